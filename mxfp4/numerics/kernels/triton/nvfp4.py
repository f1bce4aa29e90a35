"""NVFP4 values of a matrix along its rows, along its columns or both, in two launches; the twin is `numerics/nvfp4.py`.

The scale of a tensor needs its largest magnitude, so there are two reads: the first leaves the largest magnitude of each
program's tiles, the second takes the largest of those and writes the values. A program takes square tiles; along columns
it works on a tile's transpose. Steps and their order are the twin's; nothing may be contracted (`enable_fp_fusion`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.standard import _elementwise_max  # of `tl.max`, which does not interpret where not imported so

from mxfp4.numerics.kernels.triton import block_math as bm
from mxfp4.numerics.kernels.triton.launcher import Launch, Launcher, on_device_of
from mxfp4.numerics.operand_plan import OperandPlan
from mxfp4.numerics.reference import Outputs

PROGRAMS = 512
"""At most, of the first launch: what each leaves is read by every program of the second."""


@triton.jit
def _lines(x, r0, c0, R, C, row_stride, col_stride, seed, stream, SIDE: tl.constexpr, COL: tl.constexpr, H: tl.constexpr,
           SIGNS: tl.constexpr, SIGN_BITS: tl.constexpr):  # fmt: skip
    """A tile in FP32, [SIDE, SIDE] with the block axis last, rotated in groups of H; zeros beyond the matrix."""
    r = r0 + tl.arange(0, SIDE)
    c = c0 + tl.arange(0, SIDE)
    inside = (r < R)[:, None] & (c < C)[None, :]
    at = r.to(tl.int64)[:, None] * row_stride + c.to(tl.int64)[None, :] * col_stride
    tile = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if COL:
        tile = tl.trans(tile)
    if H:
        groups = tl.reshape(tile, (SIDE * SIDE // H, H))
        if SIGNS:
            groups = groups * bm.signs(seed, stream, H, H, SIGNS, SIGN_BITS)[None, :]
        groups = bm.rotate(groups, SIDE * SIDE // H, H, H) * (H**-0.5)
        tile = tl.reshape(groups, (SIDE, SIDE))
    return tile


@triton.jit
def _largest(x, A: tl.constexpr, N: tl.constexpr, B: tl.constexpr):
    """Largest magnitude over the middle axis of [A, N, B], as FP32 bits, int32 [A, B]: NaN above infinity."""
    return tl.reduce(tl.reshape(x, (A, N, B)), 1, _elementwise_max)


@triton.jit
def amax_kernel(
    x, partial, seed_ptr, R, C, row_stride, col_stride, row_stream, col_stream, programs,
    SIDE: tl.constexpr, SEEDED: tl.constexpr, ROW: tl.constexpr, ROW_H: tl.constexpr, ROW_SIGNS: tl.constexpr,
    ROW_SIGN_BITS: tl.constexpr, COL: tl.constexpr, COL_H: tl.constexpr, COL_SIGNS: tl.constexpr,
    COL_SIGN_BITS: tl.constexpr,
):  # fmt: skip
    """Into partial [2, programs]: bits of the largest magnitude of this program's tiles, as rows and as columns see them."""
    seed = 0
    if SEEDED:
        seed = tl.load(seed_ptr)
    across = (C - 1) // SIDE + 1
    tiles = ((R - 1) // SIDE + 1) * across
    row_most = tl.full((SIDE,), 0, tl.int32)
    col_most = row_most
    for tile in range(tl.program_id(0), tiles, programs):
        r0, c0 = tile // across * SIDE, tile % across * SIDE
        if ROW:
            t = _lines(x, r0, c0, R, C, row_stride, col_stride, seed, row_stream, SIDE, 0, ROW_H, ROW_SIGNS,
                       ROW_SIGN_BITS)  # fmt: skip
            row_most = tl.maximum(row_most, tl.reduce(t.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1, _elementwise_max))
        if COL:
            t = _lines(x, r0, c0, R, C, row_stride, col_stride, seed, col_stream, SIDE, 1, COL_H, COL_SIGNS,
                       COL_SIGN_BITS)  # fmt: skip
            col_most = tl.maximum(col_most, tl.reduce(t.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1, _elementwise_max))
    tl.store(partial + tl.program_id(0), tl.reduce(row_most, 0, _elementwise_max))
    tl.store(partial + programs + tl.program_id(0), tl.reduce(col_most, 0, _elementwise_max))


@triton.jit
def _to_grid(x, noise, MBITS: tl.constexpr, BIAS: tl.constexpr, MAX: tl.constexpr):
    """FP32 on the grid of a format: `rounding.round_nearest`, or with noise `round_stochastic`, step by step."""
    SHIFT: tl.constexpr = 23 - MBITS
    STEP: tl.constexpr = 2.0 ** (1 - BIAS - MBITS)
    MIN_NORMAL: tl.constexpr = 2.0 ** (1 - BIAS)
    magnitude = tl.abs(x)
    bits = magnitude.to(tl.int32, bitcast=True)
    if noise is None:
        normal = (bits + ((1 << (SHIFT - 1)) - 1) + ((bits >> SHIFT) & 1)) & -(1 << SHIFT)
        below = (magnitude + STEP * 8388608.0) - STEP * 8388608.0
    else:
        normal = (bits + (noise << (SHIFT - 16))) & -(1 << SHIFT)
        low = tl.where(magnitude < MIN_NORMAL, magnitude, 0.0)
        below = (((low * (65536.0 / STEP)).to(tl.int32) + noise) >> 16).to(tl.float32) * STEP
    rounded = tl.where(magnitude < MIN_NORMAL, below, normal.to(tl.float32, bitcast=True))
    rounded = tl.where(rounded > MAX, MAX, rounded)
    return (rounded.to(tl.int32, bitcast=True) | (x.to(tl.int32, bitcast=True) & -0x80000000)).to(
        tl.float32, bitcast=True
    )


@triton.jit
def _write(t, out, factor, amax_bits, r0, c0, R, C, seed, stream, SIDE: tl.constexpr, TWO_D: tl.constexpr,
           SR: tl.constexpr):  # fmt: skip
    """Quantize a tile of R lines of C elements that begins at line r0, element c0, and write it."""
    amax = amax_bits.to(tl.float32, bitcast=True)
    bad = amax_bits >= 0x7F800000
    nan = tl.full((), 0x7FC00000, tl.int32).to(tl.float32, bitcast=True)
    t_scale = tl.div_rn(1.0, amax) * 2688.0  # torch divides a number by a tensor as the number times the reciprocal
    t_scale = tl.where(amax == 0, 1.0, t_scale)
    t_scale = tl.where(t_scale > 3.4028234663852886e38, 3.4028234663852886e38, t_scale)
    if (r0 == 0) & (c0 == 0):
        tl.store(factor, tl.where(bad, nan, tl.div_rn(1.0, t_scale)))
    N: tl.constexpr = SIDE // 16
    most = tl.reshape(t.to(tl.int32, bitcast=True) & 0x7FFFFFFF, (SIDE * N, 16))
    most = tl.reduce(most, 1, _elementwise_max)
    if TWO_D:
        most = _largest(most, N, 16, N)
        most = tl.broadcast_to(tl.expand_dims(most, 1), (N, 16, N))
    blocks = tl.reshape(most, (SIDE * N,)).to(tl.float32, bitcast=True)
    s = _to_grid(tl.div_rn(blocks * t_scale, tl.full((SIDE * N,), 6.0, tl.float32)), None, 3, 7, 448.0)[:, None]
    groups = tl.reshape(t, (SIDE * N, 16))
    wide = tl.broadcast_to(s, (SIDE * N, 16))
    scaled = tl.where(wide == 0, 0.0, tl.div_rn(groups * t_scale, wide))
    noise = None
    if SR:
        p = tl.arange(0, SIDE * N)
        line = (r0 + p // N).to(tl.int64)
        first = line * (C // 8) + (c0 // 8 + p % N * 2)
        noise = bm.noise16(bm.random_words(groups, seed, first, stream, SIDE * N, 2), SIDE * N, 2)
    value = tl.where(bad, nan, _to_grid(scaled, noise, 1, 1, 6.0) * wide)
    value = tl.reshape(value, (SIDE, SIDE)).to(out.dtype.element_ty)
    r = r0 + tl.arange(0, SIDE)
    c = c0 + tl.arange(0, SIDE)
    at = r.to(tl.int64)[:, None] * C + c[None, :]
    tl.store(out + at, value, mask=(r < R)[:, None] & (c < C)[None, :])


@triton.jit
def values_kernel(
    x, partial, row_out, row_factor, col_out, col_factor, seed_ptr, R, C, row_stride, col_stride, row_stream, col_stream,
    programs, SIDE: tl.constexpr, SEEDED: tl.constexpr, PARTS: tl.constexpr,
    ROW: tl.constexpr, ROW_H: tl.constexpr, ROW_SIGNS: tl.constexpr, ROW_SIGN_BITS: tl.constexpr, ROW_2D: tl.constexpr,
    ROW_SR: tl.constexpr,
    COL: tl.constexpr, COL_H: tl.constexpr, COL_SIGNS: tl.constexpr, COL_SIGN_BITS: tl.constexpr, COL_2D: tl.constexpr,
    COL_SR: tl.constexpr,
):  # fmt: skip
    """The values of one tile to row_out [R, C] and, along the columns, to col_out [C, R]."""
    seed = 0
    if SEEDED:
        seed = tl.load(seed_ptr)
    across = (C - 1) // SIDE + 1
    r0 = tl.program_id(0) // across * SIDE
    c0 = tl.program_id(0) % across * SIDE
    part = tl.arange(0, PARTS)
    if ROW:
        most = tl.reduce(tl.load(partial + part, mask=part < programs, other=0), 0, _elementwise_max)
        t = _lines(x, r0, c0, R, C, row_stride, col_stride, seed, row_stream, SIDE, 0, ROW_H, ROW_SIGNS, ROW_SIGN_BITS)
        _write(t, row_out, row_factor, most, r0, c0, R, C, seed, row_stream, SIDE, ROW_2D, ROW_SR)
    if COL:
        most = tl.reduce(tl.load(partial + programs + part, mask=part < programs, other=0), 0, _elementwise_max)
        t = _lines(x, r0, c0, R, C, row_stride, col_stride, seed, col_stream, SIDE, 1, COL_H, COL_SIGNS, COL_SIGN_BITS)
        _write(t, col_out, col_factor, most, c0, r0, C, R, seed, col_stream, SIDE, COL_2D, COL_SR)


_amax, _values = Launcher(amax_kernel), Launcher(values_kernel)


def quantize_nvfp4(
    x: Tensor, row: OperandPlan | None, col: OperandPlan | None, seed: Tensor | None
) -> tuple[Outputs, Outputs]:
    """X [R, C], any strides, along C as `row` says and along R as `col` says: ((values, factor), (values, factor))."""
    if x.dtype == torch.float64:
        x = x.float()
    rows, columns = x.shape
    new = x.new_empty if x.numel() else x.new_ones  # of nothing the factor is 1
    outputs = [
        (None, None) if plan is None else (x.new_empty(shape, dtype=plan.dtype), new((), dtype=torch.float32))
        for plan, shape in ((row, (rows, columns)), (col, (columns, rows)))
    ]
    if x.numel():
        (row_out, row_factor), (col_out, col_factor) = outputs
        seed = seed if any(plan is not None and plan.is_random for plan in (row, col)) else None
        partial = x.new_empty((2, min(_tiles(x.shape, row, col)[1], PROGRAMS)), dtype=torch.int32)
        tensors = {"x": x, "partial": partial, "row_out": row_out, "row_factor": row_factor, "col_out": col_out}
        tensors |= {"col_factor": col_factor, "seed_ptr": seed}
        key = (row, col, x.shape, x.stride(), x.dtype, x.device)
        with on_device_of(x):
            _amax(key, (x, partial, seed), lambda: launches(tensors, row, col)[0])
            _values(key, tuple(tensors.values()), lambda: launches(tensors, row, col)[1])
    return tuple(outputs)


def _tiles(shape: tuple[int, int], row: OperandPlan | None, col: OperandPlan | None) -> tuple[int, int]:
    """(side of a tile, tiles of a matrix)."""
    side = max(64, row.hadamard if row else 0, col.hadamard if col else 0)
    return side, -(-shape[0] // side) * -(-shape[1] // side)


def launches(tensors: dict, row: OperandPlan | None, col: OperandPlan | None) -> tuple[Launch, Launch]:
    """The two launches: what `quantize_nvfp4` runs."""
    x, plans = tensors["x"], {"ROW": row, "COL": col}
    side, tiles = _tiles(x.shape, row, col)
    programs = tensors["partial"].shape[1]
    sizes = {"R": x.shape[0], "C": x.shape[1], "row_stride": x.stride(0), "col_stride": x.stride(1)}
    sizes |= {f"{prefix.lower()}_stream": 0 if plan is None else plan.stream for prefix, plan in plans.items()}
    sizes["programs"] = programs
    first, second = {"SIDE": side, "SEEDED": tensors["seed_ptr"] is not None}, {}
    for prefix, plan in plans.items():
        bits = 0 if plan is None else sum(word << 32 * i for i, word in enumerate(plan.sign_words))
        constants = (1, plan.hadamard, plan.sign_kind, bits) if plan is not None else (0, 0, 0, 0)
        first |= dict(zip((prefix, f"{prefix}_H", f"{prefix}_SIGNS", f"{prefix}_SIGN_BITS"), constants, strict=True))
        second |= {f"{prefix}_2D": plan is not None and plan.block == "2d"}
        second |= {f"{prefix}_SR": plan is not None and plan.stochastic}
    shared = {"num_warps": 4 if side == 64 else 8, "enable_fp_fusion": False}
    read = {name: tensors[name] for name in ("x", "partial", "seed_ptr")}
    return (
        ((programs,), read | sizes, first | shared),
        ((tiles,), tensors | sizes, {**first, "PARTS": triton.next_power_of_2(programs), **second, **shared}),
    )


@triton.jit
def _scale_kernel(y_ptr, a_ptr, b_ptr, out_ptr, n, CONSTANT: tl.constexpr, TIMES: tl.constexpr, TILE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    y = tl.load(y_ptr + at, mask=at < n, other=0.0)
    if a_ptr is not None:
        y = y * tl.load(a_ptr)
    if b_ptr is not None:
        y = y * tl.load(b_ptr)
    for _ in tl.static_range(TIMES):
        y = y * CONSTANT
    tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=at < n)


_scale = Launcher(_scale_kernel)


def scale_product(
    y: Tensor, a: Tensor | None, b: Tensor | None, constant: float, times: int, dtype: torch.dtype
) -> Tensor:
    """Contiguous FP32 y times the 0-d factors that are given, then `times` times the constant, rounded to `dtype` once."""
    wide = dtype == torch.float64
    out = torch.empty_like(y, dtype=torch.float32 if wide else dtype)
    n, tile = y.numel(), 1024
    if n:
        arguments = {"y_ptr": y, "a_ptr": a, "b_ptr": b, "out_ptr": out, "n": n}
        options = {"CONSTANT": constant, "TIMES": times, "TILE": tile, "num_warps": 4}
        describe = lambda: ((triton.cdiv(n, tile),), arguments, options)
        with on_device_of(y):
            _scale((n, constant, times, out.dtype, y.device), (y, a, b, out), describe)
    return out.to(dtype) if wide else out
