"""NVFP4 values: E2M1 elements in blocks of 16 with E4M3 scales, under one FP32 scale a tensor.

Source: NVIDIA, "Pretraining Large Language Models with NVFP4" (2025). Here for comparison
with MXFP4, as values only: nothing is packed. The twin of `kernels/triton/nvfp4.py`.

With t = 448 * 6 / amax(tensor), a block's scale is s = E4M3(t * amax(block) / 6) and an element q = E2M1(x * t / s);
x stands for q * s / t. q * s has at most six significant bits and is exact in BF16.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mxfp4.numerics.formats import E2M1, E4M3
from mxfp4.numerics.hadamard import rotate_matrix
from mxfp4.numerics.operand_plan import OperandPlan
from mxfp4.numerics.philox import random16
from mxfp4.numerics.rounding import round_nearest, round_stochastic

NV_BLOCK = 16


def quantize_nvfp4(x: Tensor, row: OperandPlan | None, col: OperandPlan | None, seed: Tensor | None):
    """X [R, C] along C as `row` says and along R as `col` says: ((values, factor), (values, factor)).

    Values are in the plan's dtype, the block axis last; the factor, FP32 0-d, undoes the tensor scale.
    """
    none = (None, None)
    return none if row is None else _along(x, row, seed), none if col is None else _along(x.t(), col, seed)


def _along(x: Tensor, plan: OperandPlan, seed: Tensor | None) -> tuple[Tensor, Tensor]:
    if plan.hadamard:
        x = rotate_matrix(x, plan.hadamard, plan.signs(seed, x.device), False, False, torch.float32)
    values, factor = nvfp4_values(x.float(), plan.block, seed if plan.stochastic else None, plan.stream)
    return values.to(plan.dtype), factor


def nvfp4_values(x: Tensor, block: str, seed: Tensor | None, stream: int) -> tuple[Tensor, Tensor]:
    """FP32 2-D `x` [R, K] -> (q * s, FP32 [R, K]; 1 / t, 0-d). Blocks: 1x16 along K ("1d") or 16x16 ("2d").

    `seed` None rounds to nearest, else stochastically. Sizes must be multiples of 16 (both, for "2d"). A NaN or an
    infinity anywhere makes the tensor scale, and with it every value, NaN.
    """
    blocks = x.abs().unflatten(-1, (-1, NV_BLOCK)).amax(-1)
    if block == "2d":
        blocks = blocks.unflatten(0, (-1, NV_BLOCK)).amax(1)
    amax = blocks.amax() if blocks.numel() else x.new_zeros(())
    t = ((E4M3.max * E2M1.max) / amax).masked_fill(amax == 0, 1.0).clamp(max=torch.finfo(torch.float32).max)
    s = round_nearest(blocks * t / E2M1.max, E4M3)
    wide = s.repeat_interleave(NV_BLOCK, dim=-1)
    if block == "2d":
        wide = wide.repeat_interleave(NV_BLOCK, dim=0)
    scaled = (x * t / wide).masked_fill(wide == 0, 0.0)
    if seed is None:
        q = round_nearest(scaled, E2M1)
    else:
        q = round_stochastic(scaled, E2M1, random16(seed, tuple(x.shape), stream))
    bad = ~amax.isfinite()
    return (q * wide).masked_fill(bad, torch.nan), t.reciprocal().masked_fill(bad, torch.nan)
