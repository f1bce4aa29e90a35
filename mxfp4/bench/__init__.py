"""Benchmarks of kernels and training steps, and instruction counts of compiled kernels."""
