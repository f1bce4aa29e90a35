"""A matrix rotated along its last axis or along both, in one read and one write; the twin is `hadamard.rotate_matrix`.

A program takes a tile of whole groups. A thread holds a group of `SIZE` neighbours in registers, as in quantization, and
runs its butterfly there (`block_math.rotate`). For the second axis the tile changes hands through shared memory, so that
a thread holds a group of the other axis; results leave the same way, as whole lines.

Of sizes 32 and 128, 1 / sqrt(size) is no power of two, and the second axis adds what was multiplied by it; of the others
a subnormal product rounds. An FMA would keep what the twin rounds away: the kernel is compiled without contraction
(`enable_fp_fusion`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxfp4.numerics.kernels.triton import block_math as bm
from mxfp4.numerics.kernels.triton.block_kernel import load_apart
from mxfp4.numerics.kernels.triton.launcher import Launch, Launcher, chip, on_device_of

THREADS = 128
"""Of a program: a tile is as many groups."""
WRITES = (torch.float32, torch.bfloat16, torch.float16)


@triton.jit
def rotate_kernel(
    x, out, signs, unclipped, R, C, row_stride, col_stride,
    SIZE: tl.constexpr, BOTH: tl.constexpr, INVERSE: tl.constexpr, ALONG_ROWS: tl.constexpr, LINES: tl.constexpr,
    ACROSS: tl.constexpr, WIDTH: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Rotate a tile of LINES rows and ACROSS groups of x [R, C] into the contiguous out [R, C].

    WIDTH: how many neighbours of a group one load takes. ALONG_ROWS: neighbours in memory lie along the rows of x, and so
    do neighbouring threads. BOTH: LINES is SIZE.
    """
    P: tl.constexpr = LINES * ACROSS
    COLUMNS: tl.constexpr = ACROSS * SIZE
    tiles = (C - 1) // COLUMNS + 1
    r0 = (tl.program_id(0) // tiles).to(tl.int64) * LINES
    c0 = (tl.program_id(0) % tiles).to(tl.int64) * COLUMNS
    p = tl.arange(0, P)
    if ALONG_ROWS:
        r = r0 + p % LINES
        c = c0 + p // LINES * SIZE
    else:
        r = r0 + p // ACROSS
        c = c0 + p % ACROSS * SIZE
    source = x + (r * row_stride + c * col_stride)[:, None] + (tl.arange(0, WIDTH) * col_stride)[None, :]
    mask = ((r < R) & (c < C))[:, None]
    group = load_apart(source, WIDTH * col_stride, mask, SIZE // WIDTH, MASKED, "")
    group = tl.permute(tl.reshape(group, (P, WIDTH, SIZE // WIDTH)), (0, 2, 1))
    group = tl.reshape(group, (P, SIZE)).to(tl.float32)
    if unclipped is not None:
        source = unclipped + (r * C + c)[:, None] + tl.arange(0, WIDTH)[None, :]
        counts = load_apart(source, WIDTH, mask, SIZE // WIDTH, MASKED, "")
        counts = tl.permute(tl.reshape(counts, (P, WIDTH, SIZE // WIDTH)), (0, 2, 1))
        group = tl.where(tl.reshape(counts, (P, SIZE)) != 0, group, 0.0)
    sign = None
    if signs is not None:
        sign = tl.load(signs + tl.arange(0, SIZE))[None, :]
        if not INVERSE:
            group = group * sign
    group = bm.rotate(group, P, SIZE, SIZE) * (SIZE**-0.5)
    if signs is not None and INVERSE:
        group = group * sign
    if ALONG_ROWS:
        group = tl.permute(tl.reshape(group, (ACROSS, LINES, SIZE)), (1, 0, 2))
    tile = tl.reshape(group, (LINES, COLUMNS))
    if BOTH:
        tile = tl.trans(bm.rotate(tl.trans(tile), COLUMNS, SIZE, SIZE) * (SIZE**-0.5))
    r = r0 + tl.arange(0, LINES)
    c = c0 + tl.arange(0, COLUMNS)
    target = out + r[:, None] * C + c[None, :]
    tile = tile.to(out.dtype.element_ty)
    if MASKED:
        tl.store(target, tile, mask=(r < R)[:, None] & (c < C)[None, :])
    else:
        tl.store(target, tile)


_rotate = Launcher(rotate_kernel)


def rotate_matrix(
    x: Tensor, size: int, signs: Tensor | None, inverse: bool, both: bool, dtype: torch.dtype,
    unclipped: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """X [R, C], float of any strides, rotated along C or along both: [R, C] in `dtype`, contiguous; see the twin."""
    if x.dtype == torch.float64:
        x = x.float()
    out = x.new_empty(x.shape, dtype=dtype if dtype in WRITES else torch.float32)
    if x.numel():
        counts = None if unclipped is None else unclipped.contiguous().view(torch.uint8)
        key = (size, inverse, both, x.shape, x.stride(), x.dtype, out.dtype, x.device)
        with on_device_of(x):
            describe = lambda: launch(x, out, size, signs, inverse, both, chip(x.device)[1], counts)
            _rotate(key, (x, out, signs, counts), describe)
    return out if out.dtype == dtype else out.to(dtype)


def launch(
    x: Tensor, out: Tensor, size: int, signs: Tensor | None, inverse: bool, both: bool, warp: int,
    unclipped: Tensor | None = None,
) -> Launch:  # fmt: skip
    """(grid, arguments, constants and options) of the kernel: what `rotate_matrix` runs and `isa` compiles.

    `warp`: threads a warp.
    """
    rows, columns = x.shape
    along_rows = x.stride(0) == 1 and x.stride(1) != 1  # threads follow memory
    across = THREADS // size
    lines = THREADS // across
    grid = (triton.cdiv(rows, lines) * triton.cdiv(columns, across * size),)  # one axis: others count to 65535
    arguments = {"x": x, "out": out, "signs": signs, "unclipped": unclipped, "R": rows, "C": columns}
    arguments |= {"row_stride": x.stride(0), "col_stride": x.stride(1)}
    options = {
        "SIZE": size,
        "BOTH": both,
        "INVERSE": inverse,
        "ALONG_ROWS": along_rows,
        "LINES": lines,
        "ACROSS": across,
        "WIDTH": 16 // x.element_size() if x.stride(1) == 1 else 1,
        "MASKED": rows % lines != 0 or columns % (across * size) != 0,
        "num_warps": THREADS // warp,
        "enable_fp_fusion": False,
    }
    return grid, arguments, options
