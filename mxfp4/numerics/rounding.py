"""Rounding FP32 values onto an element format's grid: nearest (ties to even) or stochastic, both saturating.

Both work on magnitudes and return FP32 values that the format holds exactly; `formats.encode` turns them into codes.
The operations are integer adds and masks, one FP32 add (the 2^23 trick below `min_normal`) and multiplications by
powers of two, so that no compiler's contraction or reordering can change a bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mxfp4.numerics.formats import ElemFormat

ROUNDINGS = ("nearest", "stochastic")


def round_nearest(x: Tensor, fmt: ElemFormat) -> Tensor:
    """FP32 `x` (any shape, finite) to the nearest value of `fmt`, ties to the even code, saturating at `fmt.max`."""
    magnitude = x.abs()
    bits = magnitude.view(torch.int32)
    shift = 23 - fmt.mbits
    normal = (bits + ((1 << (shift - 1)) - 1) + ((bits >> shift) & 1)) & -(1 << shift)
    anchor = fmt.step * 2.0**23  # where one FP32 ulp is one step: the add itself rounds to nearest even
    below = (magnitude + anchor) - anchor
    rounded = torch.where(magnitude < fmt.min_normal, below, normal.view(torch.float32))
    return rounded.clamp(max=fmt.max).copysign(x)


def round_stochastic(x: Tensor, fmt: ElemFormat, random16: Tensor) -> Tensor:
    """FP32 `x` to one of its two neighbours in `fmt`, up with probability (distance to the lower one) / (gap).

    `random16`: int32 in [0, 2^16), shaped like x; the probability is resolved to 2^-16, rounded down. Values that
    `fmt` holds stay as they are. Magnitudes above `fmt.max` saturate: under a scale rule that clips, the block
    maximum is therefore biased low.
    """
    magnitude = x.abs()
    bits = magnitude.view(torch.int32)
    shift = 23 - fmt.mbits
    normal = (bits + (random16 << (shift - 16))) & -(1 << shift)
    low = torch.where(magnitude < fmt.min_normal, magnitude, 0.0)
    steps = ((low * (2.0**16 / fmt.step)).to(torch.int32) + random16) >> 16
    rounded = torch.where(magnitude < fmt.min_normal, steps.float() * fmt.step, normal.view(torch.float32))
    return rounded.clamp(max=fmt.max).copysign(x)
