"""Numerics: the bottom layer. Needs torch alone; Triton only where there is an accelerator."""
