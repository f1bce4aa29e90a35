"""What QuEST's projection does to rotated blocks whose standard deviations are known, in one read and one write.

The twin is `numerics.quest.round_blocks`. The standard deviation itself stays the library's: its bytes depend on the
order of a sum. Scales are powers of two between 2^-27 and 2^127, so multiplying by a reciprocal is dividing; the scale's
product and sum must not be contracted (`enable_fp_fusion`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxfp4.numerics.formats import BLOCK, E2M1
from mxfp4.numerics.kernels.triton.block_math import value
from mxfp4.numerics.kernels.triton.launcher import Launch, Launcher, on_device_of

ROWS = 64
WRITES = (torch.float32, torch.bfloat16, torch.float16)


@triton.jit
def round_kernel(
    blocks_ptr, std_ptr, out_ptr, unclipped_ptr, n, CLIP: tl.constexpr, EPS: tl.constexpr, BIAS: tl.constexpr,
    MAX: tl.constexpr, MAX_CODE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """`round_blocks` of ROWS of the n blocks [n, BLOCK], FP32; four booleans are a word of `unclipped_ptr`."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = row[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(blocks_ptr + at, mask=(row < n)[:, None], other=0.0)
    spread = tl.load(std_ptr + row, mask=row < n, other=0.0) * CLIP + EPS
    exponent = spread.to(tl.int32, bitcast=True) & 0x7F800000
    scale = exponent.to(tl.float32, bitcast=True)
    inverse = tl.div_rn(1.0, scale)[:, None]
    rounded = value(x, inverse, None, 1, BIAS, MAX_CODE, True) * scale[:, None]
    bits = rounded.to(tl.int32, bitcast=True) | (x.to(tl.int32, bitcast=True) & -0x80000000)
    bits = tl.where((exponent == 0x7F800000)[:, None], 0x7FC00000, bits)  # 0 times infinity, whatever the block holds
    tl.store(out_ptr + at, bits.to(tl.float32, bitcast=True).to(out_ptr.dtype.element_ty), mask=(row < n)[:, None])
    unclipped = (tl.abs(x * inverse) < MAX).to(tl.int32)
    even, odd = tl.split(tl.reshape(unclipped, (ROWS, BLOCK // 4, 2, 2)))
    k0, k2 = tl.split(even)
    k1, k3 = tl.split(odd)
    at = row[:, None] * (BLOCK // 4) + tl.arange(0, BLOCK // 4)[None, :]
    tl.store(unclipped_ptr + at, (k0 | (k1 << 8)) | ((k2 << 16) | (k3 << 24)), mask=(row < n)[:, None])


_round = Launcher(round_kernel)


def round_blocks(blocks: Tensor, std: Tensor, clip: float, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(values in `dtype`, unclipped, bool) of contiguous FP32 `blocks` [n, 32] and their `std` [n, 1]; see the twin."""
    out = torch.empty_like(blocks, dtype=dtype if dtype in WRITES else torch.float32)
    unclipped = torch.empty_like(blocks, dtype=torch.bool)
    if blocks.numel():
        tensors = (blocks, std, out, unclipped.view(torch.int32))
        with on_device_of(blocks):
            _round((blocks.shape, clip, eps, out.dtype, blocks.device), tensors, lambda: launch(*tensors, clip, eps))
    return (out if out.dtype == dtype else out.to(dtype)), unclipped


def launch(blocks: Tensor, std: Tensor, out: Tensor, unclipped: Tensor, clip: float, eps: float) -> Launch:
    """(grid, arguments, constants and options) of the kernel: what `round_blocks` runs and `isa` compiles."""
    n = blocks.shape[0]
    arguments = {"blocks_ptr": blocks, "std_ptr": std, "out_ptr": out, "unclipped_ptr": unclipped, "n": n}
    constants = {"CLIP": clip, "EPS": eps, "BIAS": E2M1.bias, "MAX": E2M1.max, "MAX_CODE": E2M1.max_code}
    constants |= {"BLOCK": BLOCK, "ROWS": ROWS, "num_warps": 4, "enable_fp_fusion": False}
    return (triton.cdiv(n, ROWS),), arguments, constants
