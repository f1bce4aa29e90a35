"""Kernels, each beside its plain-torch twin of the same signature: the oracle, and the path where nothing else runs.

The functions here choose one for the device of their argument: Triton on a GPU; on the CPU C where there is a compiler,
else few passes of torch.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from mxfp4.numerics import hadamard, reference
from mxfp4.numerics.kernels.cpu import quantize as quantize_cpu
from mxfp4.numerics.kernels.cpu import quantize_eager
from mxfp4.numerics.reference import Orientation, Outputs

HAS_TRITON = importlib.util.find_spec("triton") is not None


def quantize_matrix(
    x: Tensor, row: Orientation | None, col: Orientation | None, seed: Tensor | None
) -> tuple[Outputs, Outputs]:
    """Quantize x [batch, R, C] along C as `row` says and along R as `col` says; shapes as in the twin."""
    if x.dtype == torch.float64:
        x = x.float()
    if x.is_cuda and HAS_TRITON:
        from mxfp4.numerics.kernels.triton import quantize as quantize_triton

        return quantize_triton.quantize_matrix(x, row, col, seed)
    if x.device.type == "cpu" and quantize_cpu.kernel() is not None:
        return quantize_cpu.quantize_matrix(x, row, col, seed)
    if x.device.type == "cpu":
        return quantize_eager.quantize_matrix(x, row, col, seed)
    return reference.quantize_matrix(x, row, col, seed)


def rotate_matrix(x: Tensor, size: int, signs: Tensor | None, inverse: bool, both: bool, dtype: torch.dtype) -> Tensor:
    """X [R, C] rotated along C or along both axes, contiguous, in `dtype`; see the twin in `hadamard.py`."""
    if x.is_cuda and HAS_TRITON:
        from mxfp4.numerics.kernels.triton import rotate as rotate_triton

        return rotate_triton.rotate_matrix(x, size, signs, inverse, both, dtype)
    return hadamard.rotate_matrix(x, size, signs, inverse, both, dtype)


if HAS_TRITON:  # the implementation for GPUs of an operator that `philox` defines
    _library = torch.library.Library("mxfp4", "FRAGMENT")

    @torch.library.impl(_library, "random_signs", "CUDA")
    def _random_signs(seed: Tensor, size: int, stream: int) -> Tensor:
        from mxfp4.numerics.kernels.triton import signs as signs_triton

        return signs_triton.random_signs(seed, size, stream)
