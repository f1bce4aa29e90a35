"""Checkpoints of a run: written by one process or by several ranks, and resumed from."""
