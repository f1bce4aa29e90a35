"""Watching a run from outside: lines in a log, TensorBoard or W&B, a profiler window. None of it changes a result."""
