"""Kernels, each beside its plain-torch twin of the same signature: the CPU path and the oracle."""
