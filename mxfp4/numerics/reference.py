"""Block quantization in plain torch: the twin of the Triton kernels, and the path on the CPU.

Everything here works along the last axis of an FP32 tensor: rotate, take block maxima, compute the scale bytes, divide
by the scale, round. `quantize.py` puts the axis last, checks arguments and wraps the result.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mxfp4.numerics.formats import BLOCK, E8M0_NAN, e8m0_value, encode, pack_nibbles
from mxfp4.numerics.hadamard import rotate_last
from mxfp4.numerics.operand_plan import PRESCALE, OperandPlan
from mxfp4.numerics.philox import random16
from mxfp4.numerics.rounding import round_nearest, round_stochastic
from mxfp4.numerics.scale_rules import inverse_scale, scale_byte

Outputs = tuple[Tensor | None, Tensor | None]  # (values, scales) of one orientation


def spread(byte: Tensor, block: str) -> Tensor:
    """One entry a block -> one entry an element: [..., K/32] -> [..., K], for 2D [..., R/32, K/32] -> [..., R, K]."""
    wide = byte.repeat_interleave(BLOCK, dim=-1)
    return wide.repeat_interleave(BLOCK, dim=-2) if block == "2d" else wide


def in_blocks(x: Tensor, block: str) -> Tensor:
    """A view of `x` [..., K] that `beside` broadcasts against: [..., K/32, 32], for 2D [..., R/32, 32, K/32, 32]."""
    x = x.unflatten(-1, (-1, BLOCK))
    return x.unflatten(-3, (-1, BLOCK)) if block == "2d" else x


def beside(per_block: Tensor, block: str) -> Tensor:
    """One entry a block, to stand beside `in_blocks` of its tensor."""
    return per_block[..., :, None, :, None] if block == "2d" else per_block[..., None]


def block_amax(x: Tensor, block: str) -> Tensor:
    """Largest magnitude of each block; NaN where a block holds one."""
    amax = x.abs().unflatten(-1, (-1, BLOCK)).amax(-1)
    return amax.unflatten(-2, (-1, BLOCK)).amax(-2) if block == "2d" else amax


def round_in_blocks(x: Tensor, plan: OperandPlan, seed: Tensor | None, first: int = 0) -> tuple[Tensor, Tensor]:
    """FP32 [..., K] -> (element values on the grid of `plan.fmt`, FP32 [..., K]; scale bytes, uint8 per block).

    The elements of a block that holds NaN or infinity are 0; its byte, 255, makes every value NaN. `first` is the index
    of the first element in the whole tensor.
    """
    if plan.prescaled:
        x = x * PRESCALE
    if plan.hadamard:
        x = rotate_last(x, plan.hadamard, plan.signs(seed, x.device))
    byte = scale_byte(block_amax(x, plan.block), plan.fmt, plan.scale_rule)
    scaled = in_blocks(x, plan.block) * beside(inverse_scale(byte), plan.block)
    scaled = torch.where(beside(byte == E8M0_NAN, plan.block), 0.0, scaled).view(x.shape)
    if plan.stochastic:
        return round_stochastic(scaled, plan.fmt, random16(seed, scaled.shape, plan.stream, first)), byte
    return round_nearest(scaled, plan.fmt), byte


def quantize_packed(x: Tensor, plan: OperandPlan, seed: Tensor | None, first: int = 0) -> tuple[Tensor, Tensor]:
    """FP32 [..., K] -> (codes, uint8 [..., K/2] for E2M1 else [..., K]; scale bytes)."""
    value, byte = round_in_blocks(x, plan, seed, first)
    code = encode(value, plan.fmt)
    return (pack_nibbles(code) if plan.fmt.bits == 4 else code), byte


def quantize_dequantize(
    x: Tensor, plan: OperandPlan, seed: Tensor | None, dtype: torch.dtype, first: int = 0
) -> Tensor:
    """FP32 [..., K] -> the values that `quantize_packed` stands for, in `dtype`, still in the rotated basis."""
    value, byte = round_in_blocks(x, plan, seed, first)
    value = in_blocks(value, plan.block) * beside(e8m0_value(byte), plan.block)
    return value.view(x.shape).to(dtype)


def quantize_matrix(
    x: Tensor, row: OperandPlan | None, col: OperandPlan | None, seed: Tensor | None
) -> tuple[Outputs, Outputs]:
    """Quantize x [R, C] or [batch, R, C] along C as `row` says, along R as `col` says: the twin of the Triton kernel.

    Returns ((values, scales), (values, scales)), each None where not asked for. For a packed `row` they are codes,
    uint8 [..., R, C/2] for E2M1 else [..., R, C], and bytes [..., R, C/32], for 2D blocks [..., R/32, C/32]; with a
    dtype they are [..., R, C] and None. For `col` the same of the transpose. The axis of a plan has no part in it.
    """
    if x.ndim == 2:
        (a, b), (c, d) = quantize_matrix(x.unsqueeze(0), row, col, seed)
        a, b, c, d = (None if t is None else t.squeeze(0) for t in (a, b, c, d))
        return (a, b), (c, d)
    return _in_parts(x, row, seed), _in_parts(x.transpose(1, 2), col, seed)


CHUNK = 1 << 16  # elements that the CPU works on at a time: what its operations hand each other stays in the cache


def _in_parts(x: Tensor, plan: OperandPlan | None, seed: Tensor | None) -> Outputs:
    """`part` of some lines at a time, put together."""
    if plan is None:
        return None, None
    batch, lines, k = x.shape
    step = max(CHUNK // max(k, 1) // BLOCK, 1) * BLOCK if x.device.type == "cpu" else max(lines, 1)
    if step >= lines:
        return part(x, plan, seed, 0)
    parts = [
        part(x[b : b + 1, i : i + step], plan, seed, (b * lines + i) * k)
        for b in range(batch)
        for i in range(0, lines, step)
    ]

    def whole(tensors: tuple[Tensor | None, ...]) -> Tensor | None:
        return None if tensors[0] is None else torch.cat(tensors, dim=1).view(batch, -1, tensors[0].shape[-1])

    values, scales = zip(*parts, strict=True)
    return whole(values), whole(scales)


def part(x: Tensor, plan: OperandPlan, seed: Tensor | None, first: int) -> Outputs:
    """X [batch, R, K] quantized along K at once; `first` is the index of its first element in the whole."""
    x = x.contiguous().float()
    if plan.dtype is None:
        return quantize_packed(x, plan, seed, first)
    return quantize_dequantize(x, plan, seed, plan.dtype, first), None
