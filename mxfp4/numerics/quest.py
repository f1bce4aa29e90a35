"""QuEST's rounding of rotated blocks whose standard deviations are known (Quartet, arXiv 2505.14669): the twin.

The scale is 2^floor(log2(CLIP * std + EPS)), a value E2M1(t / scale) * scale to nearest even, saturating; an element is
unclipped where |t / scale| < 6.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mxfp4.numerics.formats import E2M1
from mxfp4.numerics.rounding import round_nearest


def round_blocks(blocks: Tensor, std: Tensor, clip: float, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(values in `dtype`, unclipped, bool) of FP32 rotated `blocks` [n, 32] with standard deviations `std` [n, 1]."""
    spread = std * clip + eps
    scale = (spread.view(torch.int32) & 0x7F800000).view(torch.float32)  # the exponent alone
    scaled = blocks / scale
    return (round_nearest(scaled, E2M1) * scale).to(dtype), scaled.abs() < E2M1.max
