"""The library's GEMM of plain values: what runs where nothing multiplies packed operands."""

from __future__ import annotations

import torch
from torch import Tensor


def gemm_dtype(device: torch.device) -> torch.dtype:
    """The dtype that carries dequantized operands: BF16 on GPUs, FP32 on the CPU (exact either way)."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def gemm(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    """[M, K] x [N, K] -> [M, N] of plain operands in `gemm_dtype`, FP32 accumulation, result in `out_dtype`."""
    if torch.is_autocast_enabled(a.device.type):  # which would give BF16 results here
        with torch.autocast(a.device.type, enabled=False):
            return gemm(a, b, out_dtype)
    if a.dtype == torch.bfloat16 and out_dtype != torch.bfloat16:  # of FP16 and FP64 it would round the sum first
        return as_dtype(torch.mm(a, b.t(), out_dtype=torch.float32), out_dtype)
    return as_dtype(torch.mm(a, b.t()), out_dtype)


def as_dtype(y: Tensor, dtype: torch.dtype) -> Tensor:
    """`y` in `dtype`, without an operation where it has it already.

    PyTorch 2.11 compiles an autograd.Function whose result went through a `.to` that changes nothing into one that
    sends no gradient back.
    """
    return y if y.dtype == dtype else y.to(dtype)
