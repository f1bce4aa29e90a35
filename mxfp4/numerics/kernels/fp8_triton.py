"""A tensor times its FP32 scale on an FP8 grid, to nearest even, in one pass; the twin is torch's cast.

The rounding is that of the block kernels, so that it needs no FP8 conversion of the chip and interprets on the CPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxfp4.numerics.formats import ELEMS
from mxfp4.numerics.kernels.block_math import value

TILE = 2048


@triton.jit
def _scaled_kernel(
    x_ptr, out_ptr, scale_ptr, n, MBITS: tl.constexpr, BIAS: tl.constexpr, MAX_CODE: tl.constexpr, TILE: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0).to(tl.float32)
    scale = tl.load(scale_ptr)
    u = x * scale
    # Nothing exceeds the format's maximum but what is not finite, and then the scale is 0 or NaN.
    y = tl.where(u == u, value(x, scale, None, MBITS, BIAS, MAX_CODE, True), u)
    bits = y.to(tl.int32, bitcast=True) | (x.to(tl.int32, bitcast=True) & -0x80000000)
    tl.store(out_ptr + at, bits.to(tl.float32, bitcast=True).to(out_ptr.dtype.element_ty), mask=at < n)


def scaled_fp8(x: Tensor, scale: Tensor, elem: str, dtype: torch.dtype) -> Tensor:
    """(x * scale) in E4M3 or E5M2 as values in `dtype`, strides as x's; scale FP32 0-d, |x * scale| in range."""
    fmt, out = ELEMS[elem], torch.empty_like(x, dtype=dtype)
    if x.stride() != out.stride():  # gaps or overlaps
        x = x.contiguous()
        out = torch.empty_like(x, dtype=dtype)
    with torch.cuda.device_of(x):
        grid = (triton.cdiv(x.numel(), TILE),)
        if grid[0]:
            _scaled_kernel[grid](
                x, out, scale, x.numel(), MBITS=fmt.mbits, BIAS=fmt.bias, MAX_CODE=fmt.max_code, TILE=TILE, num_warps=4
            )
    return out
