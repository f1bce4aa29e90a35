"""E2M1 to nearest in plain torch, in few passes: what the CPU runs where there is no C compiler.

The twin says what is computed, an operation a step; here the same bytes come from bit tricks and in-place operations on
pieces that stay in the cache. Two tricks are those of the Triton kernels (`block_math.code`, `.value`): near 2^22 an
FP32 addition rounds to halves, so that the least of three sums is the code; and two neighbours in FP32 are one int64,
in which both signs are moved, and both codes packed, at once. Other formats and stochastic rounding are the twin's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mxfp4.numerics.formats import BLOCK, E2M1, E8M0_NAN
from mxfp4.numerics.hadamard import rotate_last
from mxfp4.numerics.reference import Orientation, Outputs, block_amax, in_parts, part
from mxfp4.numerics.scale_rules import rule_addend

_ANCHOR = 2.0**22  # one ulp is 1/2
_SIGNS, _CODES = 0x0000000800000008, 0x0000000700000007  # of two neighbours in an int64


def quantize_matrix(
    x: Tensor, row: Orientation | None, col: Orientation | None, seed: Tensor | None
) -> tuple[Outputs, Outputs]:
    """Quantize x [batch, R, C] along C as `row` says and along R as `col` says: the twin's arguments and results."""
    return in_parts(x, row, seed, _part), in_parts(x.transpose(1, 2), col, seed, _part)


def _part(x: Tensor, how: Orientation, seed: Tensor | None, first: int) -> Outputs:
    spec = how.spec
    if spec.fmt is not E2M1 or spec.stochastic or not x.numel():
        return part(x, how, seed, first)
    x = x.contiguous().float()
    if spec.hadamard:
        x = rotate_last(x, spec.hadamard, how.signs)
    bits = block_amax(x, spec.block).view(torch.int32).bitwise_and_(0x7FFFFFFF)
    bad = bits >= 0x7F800000
    byte = ((bits + rule_addend(E2M1, spec.scale_rule)) >> 23).sub_(E2M1.emax).clamp_(min=0)
    blocks = x.view(*x.shape[:-1], -1, BLOCK)
    wide, spoiled = byte, bad
    if spec.block == "2d":
        wide, spoiled = (t.repeat_interleave(BLOCK, dim=-2) for t in (byte, bad))
    u = blocks.abs().mul_(((254 - wide) << 23).view(torch.float32)[..., None])
    if how.dtype is None:
        codes = _codes(u, blocks)
        if bad.any():
            codes[spoiled] = 0
        return codes.view(*x.shape[:-1], x.shape[-1] // 2), byte.masked_fill_(bad, E8M0_NAN).to(torch.uint8)
    scale = (wide << 23).masked_fill_(wide == 0, 0x00400000).masked_fill_(spoiled, 0x7FC00000).view(torch.float32)
    value = _values(u).copysign_(blocks).mul_(scale[..., None])
    return value.view(x.shape).to(how.dtype), None


def _codes(u: Tensor, x: Tensor) -> Tensor:
    """Packed codes, uint8 [..., 16], of magnitudes u (FP32 [..., 32], overwritten) with the signs of x.

    The code of u is 2u rounded below 2, u + 2 below 4, u / 2 + 4 beyond: the least of the three.
    """
    least = u + _ANCHOR
    half = (u * 0.5).add_(_ANCHOR + 1)
    torch.minimum(least, half, out=least)
    torch.minimum(least, u.mul_(0.25).add_(_ANCHOR + 2), out=least).clamp_(max=_ANCHOR + E2M1.max_code / 2)
    pairs = least.view(torch.int64).bitwise_and_(_CODES)
    pairs |= (x.view(torch.int64) >> 28).bitwise_and_(_SIGNS)
    return pairs.bitwise_or_(pairs >> 28).to(torch.uint8)


def _values(u: Tensor) -> Tensor:
    """Magnitudes u (FP32, overwritten) on E2M1's grid: adding 2^22 times its binade rounds to the step there."""
    anchor = u.view(torch.int32).bitwise_and(0x7F800000).clamp_(min=0x3F800000).view(torch.float32).mul_(_ANCHOR)
    return u.add_(anchor).sub_(anchor).clamp_(max=E2M1.max)
