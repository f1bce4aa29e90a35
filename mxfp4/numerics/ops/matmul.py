"""GEMMs of quantized operands: [M, K] x [N, K] -> [M, N], contraction axis last on both sides."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from mxfp4.numerics.formats import one_of
from mxfp4.numerics.gemm_backends.choice import matmul_path
from mxfp4.numerics.gemm_backends.library import gemm, gemm_dtype
from mxfp4.numerics.ops import packed_operands
from mxfp4.numerics.tensor import MXTensor

OUT_DTYPES = (torch.float32, torch.bfloat16)


def matmul(a: MXTensor, b: MXTensor, out_dtype: torch.dtype = torch.float32) -> Tensor:
    """A [M, K] times b [N, K] transposed -> [M, N] in `out_dtype` (float32 or bfloat16), FP32 accumulation.

    Both operands carry their blocks along K, and the same rotation, which then cancels; a 2D-blocked operand without
    rotation may also be a transpose. Equals the exact product of the dequantized operands up to FP32 accumulation.

    Raises TypeError for other operands, ValueError when shapes, block axes, rotations or devices do not match.
    """
    one_of("out_dtype", out_dtype, OUT_DTYPES)
    for name, operand in (("a", a), ("b", b)):
        if not isinstance(operand, MXTensor):
            raise TypeError(f"{name} must be an MXTensor (see mxfp4.quantize), got {type(operand).__name__}")
        if operand.ndim != 2:
            raise ValueError(f"{name} must be 2-D, got shape {operand.shape}")
        if operand.axis != -1 and (operand.block == "1d" or operand.hadamard is not None):
            raise ValueError(
                f"{name} of shape {operand.shape} has its blocks along axis 0, but the GEMM contracts axis 1: quantize "
                "along the contraction axis, or use 2D blocks without a rotation"
            )
    if a.shape[1] != b.shape[1]:
        raise ValueError(f"contraction sizes differ: a is {a.shape}, b is {b.shape}; both must be [rows, K]")
    if a.device != b.device:
        raise ValueError(f"operands are on different devices: {a.device} and {b.device}")
    if a.hadamard != b.hadamard or (a.signs is not None and not torch.equal(a.signs, b.signs)):
        raise ValueError(f"rotations differ and would not cancel: a has {a.hadamard}, b has {b.hadamard}")
    if matmul_path(a.device) == "native":
        a, b = _packed_along_k(a), _packed_along_k(b)
        return packed_operands.gemm_packed(
            a.qdata, a.scale, a.elem, a.block, b.qdata, b.scale, b.elem, b.block, out_dtype
        )
    dtype = gemm_dtype(a.device)
    return gemm(_values(a, dtype), _values(b, dtype), out_dtype)


def _values(x: MXTensor, dtype: torch.dtype) -> Tensor:
    """`x.dequantize(dtype)`, on a GPU in one kernel."""
    return packed_operands.unpack(x.qdata, x.scale, x.elem, x.block, dtype).movedim(-1, x.axis)


def _packed_along_k(x: MXTensor) -> MXTensor:
    """`x` [rows, K] with its codes stored K last: square blocks of a transpose are turned, not quantized anew."""
    if x.axis == -1:
        return x
    return replace(x, qdata=packed_operands.turn(x.qdata, x.elem), scale=x.scale.t().contiguous(), axis=-1)
