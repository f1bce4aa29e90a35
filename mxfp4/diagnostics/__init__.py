"""Diagnostics: what quantization does to the tensors and gradients of a run."""
