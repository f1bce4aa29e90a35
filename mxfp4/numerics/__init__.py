"""Numerics: the bottom storey. Needs torch alone; Triton only where there is an accelerator."""
