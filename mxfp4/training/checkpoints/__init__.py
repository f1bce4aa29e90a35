"""Checkpoints of a run: folders of PyTorch's distributed checkpoint, written by any number of ranks and resumed from."""
