"""Splits the squared error of an FP4 operand into three parts: scale, dead zone and grid.

The operand t is what the quantizer reads: after the rotation, FP32, in blocks of 32 (MXFP4) or 16 (NVFP4), along the
contracted axis or square. Q(t) is what the GEMM contracts. Each part is a share of the squared norm of t:

| part        | meaning                                                                                            |
|-------------|----------------------------------------------------------------------------------------------------|
| split_dead  | error of the values that become zero under the ideal scale                                         |
| split_grid  | error of the other values under the ideal scale: rounding to 0.5, 1, 1.5, 2, 3, 4 or 6 times it    |
| split_scale | squared norm of Q(t) - t, less the two above: what the scale that the format stores costs on top   |

`dead_share` is the share of the nonzero values that become zero under the ideal scale: the values behind `split_dead`.
(`flushed`, in `operand_error`, counts those that become zero under the stored scale.)

The ideal scale of a block is its largest magnitude over 6, as a real number. It is not the scale of least error.

- The parts add up to the squared `error` of the operand by construction, because `split_scale` is the rest.
- `split_scale` can be negative: a block of the values 4 and 3 is exact under the scale 1, but not under 4/6.
- No value saturates under the ideal scale. `split_scale` therefore holds all saturation (rules floor and even), the
  coarser grid of a scale that is too large (even, ceil and rceil), and the cost of ideal scales below the smallest that
  the format stores.
- `split_dead` and `split_grid` are the same for all scale rules. Rotation, block shape, block size and rounding change
  them.
- NVFP4 stores scales in E4M3 under one FP32 factor a tensor, so `split_scale` is the cost of both of those. A block
  whose scale becomes zero is part of it.
- Stochastic rounding: Q(t) is the draw that the GEMM contracts. `split_dead`, `split_grid` and `dead_share` are
  expectations over all draws. The sampling noise of the draw is therefore in `split_scale`: about the squared error
  over the square root of the number of values.

Operands that a recipe with `requantize` makes from quantized ones have no split: their error is that of two
quantizations. FP8 operands have none either. A zero tensor gives NaN, as it does for `error`.

Source: the three mechanisms are named in the abstract of Li, Wu and Shen, "Decomposing MXFP4 quantization error for LLM
reinforcement learning" (arXiv 2605.20402). The definition by squared norms is this package's own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mxfp4.layers.recipe import FP4, Operand
from mxfp4.numerics.formats import E2M1
from mxfp4.numerics.rounding import round_nearest

PARTS = ("split_scale", "split_dead", "split_grid")
METRICS = (*PARTS, "dead_share")


def has_split(op: Operand) -> bool:
    """Whether `split` is defined for an operand in this format: MXFP4 and NVFP4."""
    return op.format in FP4


@torch.no_grad()
def split(q: Tensor, t: Tensor, op: Operand) -> dict[str, Tensor]:
    """The METRICS of the module's table, each a 0-d FP32 tensor on the device.

    Args:
        q: FP32 [R, K], the quantized operand, contracted axis last.
        t: FP32 [R, K], the same before quantization, rotated as `op` says. Finite, magnitudes below 2^125.
        op: format, block shape and rounding; `has_split(op)` must hold.

    """
    return split_all([(q, t, op)])[0]


@torch.no_grad()
def split_all(operands: Sequence[tuple[Tensor, Tensor, Operand]]) -> list[dict[str, Tensor]]:
    """`split` of several (q, t, op), one or more: fewer operations on the device than calls one by one."""
    sums = torch.stack([_sums(q, t, op) for q, t, op in operands], dim=1)
    norm, total, ideal, dead, zeros, nonzero, size = sums
    shares = torch.stack([total - ideal, dead, ideal - dead]) / norm
    dead_share = (zeros - (size - nonzero)) / nonzero  # a zero stays one
    columns = torch.cat([shares, dead_share[None]]).float().t()
    return [dict(zip(METRICS, column.unbind(), strict=True)) for column in columns]


def _sums(q: Tensor, t: Tensor, op: Operand) -> Tensor:
    """FP64 [7] of one operand: squared norm of t; squared error under the stored scale, under the ideal one, and of the
    values that become zero under the ideal one; number of zeros under it, of nonzero values, of all values.

    The first four are in units of the largest ideal scale of the tensor.
    """
    dims = (-3, -1) if op.block == "2d" else (-1,)
    t, d = (_in_blocks(v, op.block_size, op.block) for v in (t, q - t))
    amax = torch.linalg.vector_norm(t, torch.inf, dims, keepdim=True)
    unit = torch.where(amax > 0, amax, 1.0)
    # In units of the block's ideal scale, because squares of small gradients would underflow. Multiplying by 6 before
    # dividing keeps ties exact for operands in BF16.
    scaled = t * E2M1.max / unit
    to_zero, square = (_stochastic if op.rounding == "stochastic" else _nearest)(scaled)
    norm = scaled.square()
    parts = (norm, (d * E2M1.max / unit).square(), square, norm * to_zero)
    per_block = torch.stack([part.sum(dims).flatten() for part in parts]).double()
    squares = per_block @ (amax / amax.max()).double().square().flatten()
    counts = torch.stack([to_zero.sum(dtype=torch.float64), t.count_nonzero().double()])
    return torch.cat([squares, counts, counts.new_full((1,), t.numel())])


def _in_blocks(t: Tensor, size: int, block: str) -> Tensor:
    """A view of `t` [R, K]: [R, K/size, size], for square blocks [R/size, size, K/size, size]."""
    t = t.contiguous().unflatten(-1, (-1, size))
    return t.unflatten(0, (-1, size)) if block == "2d" else t


def _nearest(u: Tensor) -> tuple[Tensor, Tensor]:
    """For values `u`, magnitudes at most 6, rounded to nearest: (whether a value becomes 0; squared error)."""
    value = round_nearest(u, E2M1)
    return value == 0, (value - u).square()


def _stochastic(u: Tensor) -> tuple[Tensor, Tensor]:
    """For values `u`, magnitudes at most 6, rounded stochastically: (probability of 0; expected squared error).

    A magnitude a between the neighbours lo and hi has the expectation (a - lo) (hi - a).
    """
    a = u.abs()
    gap = torch.where(a < 4, 1.0, 2.0).masked_fill(a < 2, E2M1.step)
    above = a.remainder(gap)
    return (1 - a / E2M1.step).clamp(min=0), above * (gap - above)
