"""Sums in a fixed order on a GPU, so that a run repeated on the same kind of machine gives the same bits.

What has none by default is the backward of attention (its blocks add up dQ by atomics). A change in a last bit there is
a difference of hundredths of a nat a thousand steps later, so without this a run cannot be repeated, and the scatter of
repeats blurs what is compared. The number of GPUs, the chip and the versions of PyTorch and its libraries still count.

Source: PyTorch, "Reproducibility"; NVIDIA, cuBLAS, "Results reproducibility".
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def fixed_order() -> Iterator[None]:
    """Inside, operations take their deterministic kernels; one that has none raises RuntimeError with its name.

    No mere warning: told to warn, PyTorch's attention keeps its other kernels.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS is first used
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
    )
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # a check for programs that read what nobody wrote
    try:
        yield
    finally:
        enabled, warn_only, fill = before
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = fill
