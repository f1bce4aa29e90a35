"""Block quantization in Triton: one kernel for every format, rule, rounding, rotation and orientation.

A program takes a tile of a [R, C] matrix and writes it quantized along C ("rows"), along R ("columns", stored
transposed), or both. A thread holds whole groups (a block of 32, or a rotation's 64 or 128) in registers, so that the
butterfly, the block maximum, the rounding and the packing need neither shared memory nor shuffles (`block_math.py`).
The two orientations want two distributions of the tile over threads; the second reads it again, from the cache, which
is cheaper than exchanging it: memory sees one read. The loops are not unrolled: the code has to fit the instruction
cache.

The bytes are those of `quantize_torch.py`, the twin of the same signature.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxfp4.numerics.formats import BLOCK
from mxfp4.numerics.kernels import block_math as bm
from mxfp4.numerics.kernels import block_native as native
from mxfp4.numerics.kernels.quantize_torch import Orientation, Outputs
from mxfp4.numerics.scales import rule_addend

NONE, PACKED, VALUES = 0, 1, 2  # what an orientation writes


@triton.jit
def _rotated(x, signs, P: tl.constexpr, G: tl.constexpr, H: tl.constexpr, SHIFT: tl.constexpr, NATIVE: tl.constexpr,
             HALVES: tl.constexpr):  # fmt: skip
    """Groups [P, G] in FP32, signed and rotated; if SHIFT, still to be multiplied by 2^-SHIFT, else scaled as well.

    With HALVES what `native.halves` makes of them.
    """
    if x.dtype == tl.bfloat16 and not (HALVES and H == 0):
        x = native.to_float32(x, NATIVE)
    if H:
        x = x.to(tl.float32)
        if signs is not None:
            x = x * signs
        x = bm.rotate(x, P, G, H)
        if SHIFT == 0:
            x = x * (H**-0.5)
    if HALVES:
        if x.dtype == tl.float16:
            x = x.to(tl.float32)
        groups = native.halves(x, P, G // 8)
    else:
        groups = x.to(tl.float32)
    return groups


@triton.jit
def _amax(groups, P: tl.constexpr, B: tl.constexpr, HALVES: tl.constexpr):
    if HALVES:
        amax = native.halves_amax(groups, P, B)
    else:
        amax = bm.block_amax(groups, P, B)
    return amax


@triton.jit
def _store(target, words, step, mask, P: tl.constexpr, N: tl.constexpr, MASKED: tl.constexpr):
    """Words [P, 4, N] to `target` [P, 4], each 4 of a thread `step` beyond the 4 before."""
    if N > 1:
        even, odd = tl.split(tl.reshape(words, (P, 4, N // 2, 2)))
        _store(target, even, step * 2, mask, P, N // 2, MASKED)
        _store(target + step, odd, step * 2, mask, P, N // 2, MASKED)
    elif MASKED:
        tl.store(target, tl.reshape(words, (P, 4)), mask=mask)
    else:
        tl.store(target, tl.reshape(words, (P, 4)))


@triton.jit
def _write(groups, amax, values, scales, line0, blocks, line_limit, block_limit, first, seed, stream,
           P: tl.constexpr, G: tl.constexpr, ACROSS: tl.constexpr, LINE_STEP: tl.constexpr, SHIFT: tl.constexpr,
           MODE: tl.constexpr, MBITS: tl.constexpr, BIAS: tl.constexpr, EMAX: tl.constexpr, MAX_CODE: tl.constexpr,
           ADDEND: tl.constexpr, CLIPS: tl.constexpr, SR: tl.constexpr, TWO_D: tl.constexpr, MASKED: tl.constexpr,
           NATIVE: tl.constexpr, HALVES: tl.constexpr):  # fmt: skip
    """Quantize groups whose block maxima are amax (FP32 [P, G / 32]), both still to be multiplied by 2^-SHIFT.

    Group p stands on output line line0 + p // ACROSS * LINE_STEP, ACROSS groups to a line, `blocks` blocks to a line
    of the whole output. `values` and `scales` point to the tile's first block, `first` is that block's index.
    """
    B: tl.constexpr = G // 32
    p = tl.arange(0, P)
    line = line0 + p // ACROSS * LINE_STEP
    block = p % ACROSS * B
    at = line * blocks + block
    inside = (line < line_limit) & (block < block_limit)
    byte, inverse, bad = bm.scale(amax, ADDEND, EMAX, SHIFT)
    inverse = bm.per_element(inverse, P, G)
    words = None
    if SR:
        words = bm.random_words(groups, seed, (first + at) * 4, stream, P, G // 8)
    if MODE == 1:
        W: tl.constexpr = G // 8 if MBITS == 1 else G // 4  # 32-bit words a group
        if HALVES:
            word = native.pack_halves(groups, inverse, CLIPS)
        elif MBITS == 1 and G == 32 and SR and NATIVE != 0 and NATIVE != 950:
            word = native.pack_stochastic(groups, words, inverse, CLIPS, P, W)
        elif MBITS == 1 and G == 32 and not SR and NATIVE != 0:
            word = native.pack_converted(groups, inverse, NATIVE, P, W)
        else:
            noise = bm.noise16(words, P, G // 8) if SR else None
            codes = bm.code(groups, inverse, noise, MBITS, BIAS, MAX_CODE, CLIPS)
            if MBITS == 1:
                word = bm.pack_fp4(codes, groups, P, W, 0 if SR else 0x4A800000)
            else:
                word = bm.pack_fp8(codes, groups, P, W)
        if B == 1:
            word = tl.where(bad, 0, word)
        else:
            word = tl.where(tl.reshape(bad, (P, B, 1)), 0, tl.reshape(word, (P, B, W // B)))
            word = tl.reshape(word, (P, W))
        target = values + (at * (W // B))[:, None] + tl.arange(0, 4)[None, :]
        word = tl.permute(tl.reshape(word, (P, W // 4, 4)), (0, 2, 1))
        _store(target, word, 4, inside[:, None], P, W // 4, MASKED)
        if TWO_D:
            at = line // 32 * blocks + block
        scale_target = scales + at[:, None] + tl.arange(0, B)[None, :]
        if TWO_D:
            tl.store(scale_target, byte.to(tl.uint8), mask=(inside & (line % 32 == 0))[:, None])
        elif MASKED:
            tl.store(scale_target, byte.to(tl.uint8), mask=inside[:, None])
        else:
            tl.store(scale_target, byte.to(tl.uint8))
    else:
        noise = bm.noise16(words, P, G // 8) if SR else None
        if MBITS == 1 and SR and NATIVE != 0 and NATIVE != 950:
            value = native.stochastic_value(groups, noise, inverse, CLIPS)
        else:
            value = bm.value(groups, inverse, noise, MBITS, BIAS, MAX_CODE, CLIPS)
        value = (value * bm.signed_scale(byte, bad, groups, P, G)).to(values.dtype.element_ty)
        # Whole lines, so that neighbouring threads write neighbouring bytes: this exchange goes through shared memory.
        value = tl.reshape(value, (P // ACROSS, ACROSS * G))
        line = line0 + tl.arange(0, P // ACROSS) * LINE_STEP
        place = tl.arange(0, ACROSS * G)
        target = values + (line * (blocks * 32))[:, None] + place[None, :]
        if MASKED:
            tl.store(target, value, mask=(line < line_limit)[:, None] & (place < block_limit * 32)[None, :])
        else:
            tl.store(target, value)


@triton.jit
def _load(source, step, mask, N: tl.constexpr, MASKED: tl.constexpr, POLICY: tl.constexpr):
    """N loads of [P, W] that lie `step` apart -> [P, W, 2, ..., 2]: one at a time, so that a thread keeps all of its own."""
    if N > 1:
        even = _load(source, step * 2, mask, N // 2, MASKED, POLICY)
        odd = _load(source + step, step * 2, mask, N // 2, MASKED, POLICY)
        x = tl.join(even, odd)
    elif MASKED:
        x = tl.load(source, mask=mask, other=0.0, eviction_policy=POLICY)
    else:
        x = tl.load(source, eviction_policy=POLICY)
    return x


@triton.jit
def _columns(x, P: tl.constexpr, G: tl.constexpr, V: tl.constexpr):
    """[P, G, V] -> a tuple of V [P, G]."""
    if V == 1:
        columns = (tl.reshape(x, (P, G)),)
    elif V == 2:
        columns = tl.split(x)
    else:
        even, odd = tl.split(tl.reshape(x, (P, G, 2, 2)))
        x0, x2 = tl.split(even)
        x1, x3 = tl.split(odd)
        columns = (x0, x1, x2, x3)
    return columns


@triton.jit(do_not_specialize=["row_stream", "col_stream"])
def _quantize_kernel(
    x, row_values, row_scales, col_values, col_scales, row_signs, col_signs, seed_ptr, row_stream, col_stream,
    R, C, row_blocks, col_blocks, batch_stride, row_stride, col_stride,
    TM: tl.constexpr, TN: tl.constexpr, P: tl.constexpr, V: tl.constexpr, MASKED: tl.constexpr,
    SYNC: tl.constexpr, WIDE: tl.constexpr, BATCHED: tl.constexpr, ROW_AXIS: tl.constexpr, ROW_STRIDE: tl.constexpr, NATIVE: tl.constexpr,
    ROW_MODE: tl.constexpr, ROW_G: tl.constexpr, ROW_H: tl.constexpr, ROW_SHIFT: tl.constexpr,
    ROW_2D: tl.constexpr, ROW_MBITS: tl.constexpr, ROW_BIAS: tl.constexpr, ROW_EMAX: tl.constexpr,
    ROW_MAX: tl.constexpr, ROW_ADDEND: tl.constexpr, ROW_CLIPS: tl.constexpr, ROW_SR: tl.constexpr,
    ROW_HALVES: tl.constexpr,
    COL_MODE: tl.constexpr, COL_G: tl.constexpr, COL_H: tl.constexpr, COL_SHIFT: tl.constexpr,
    COL_2D: tl.constexpr, COL_MBITS: tl.constexpr, COL_BIAS: tl.constexpr, COL_EMAX: tl.constexpr,
    COL_MAX: tl.constexpr, COL_ADDEND: tl.constexpr, COL_CLIPS: tl.constexpr, COL_SR: tl.constexpr,
    COL_HALVES: tl.constexpr,
):  # fmt: skip
    """Quantize a TM x TN tile of x [batch, R, C], P groups at a time, one a thread; C / 32 and R / 32 blocks a line.

    V columns are loaded together for the column orientation. ROW_STRIDE is row_stride where it is worth a compilation.
    ROW_AXIS: which axis of the grid counts the tiles along R of each matrix of the batch, the other those along C.
    """
    row_tiles = (R + TM - 1) // TM
    tile_r = tl.program_id(ROW_AXIS)
    batch = tile_r * 0
    if BATCHED:
        batch = tile_r // row_tiles
        tile_r = tile_r % row_tiles
    batch = batch.to(tl.int64)
    r0 = tile_r * TM
    c0 = tl.program_id(1 - ROW_AXIS) * TN
    if ROW_STRIDE:
        row_stride = ROW_STRIDE
    if WIDE:  # tl.cast, as a size of 1 comes as a Python integer
        row_stride = tl.cast(row_stride, tl.int64)
        col_stride = tl.cast(col_stride, tl.int64)
        row_blocks = tl.cast(row_blocks, tl.int64)
        col_blocks = tl.cast(col_blocks, tl.int64)
    x += batch * batch_stride + r0.to(tl.int64) * row_stride + c0.to(tl.int64) * col_stride
    seed = 0
    if ROW_SR or COL_SR:
        seed = tl.load(seed_ptr)
    p = tl.arange(0, P)

    if ROW_MODE:
        ACROSS: tl.constexpr = TN // ROW_G
        LINES: tl.constexpr = P // ACROSS
        ROW_UNIT: tl.constexpr = 32 if ROW_MODE == 2 else (4 if ROW_MBITS == 1 else 8)  # output units a block
        row = p // ACROSS
        row_block = p % ACROSS * (ROW_G // 32)
        row_first = (batch * R + r0) * row_blocks + c0 // 32
        row_values += row_first * ROW_UNIT
        if ROW_MODE == 1:
            row_scales += (batch * (R // 32) + r0 // 32) * row_blocks + c0 // 32 if ROW_2D else row_first
        row_sign = None
        if row_signs is not None:
            row_sign = tl.load(row_signs + tl.arange(0, ROW_G) % ROW_H)[None, :]
        source = x + (row * row_stride + row_block * 32 * col_stride)[:, None] + (tl.arange(0, 8) * col_stride)[None, :]
        POLICY: tl.constexpr = "evict_last" if COL_MODE else ""
        AHEAD: tl.constexpr = 2 if TM >= 2 * LINES else 1  # loads under way at a time
        for above in range(0, TM, LINES * AHEAD):
            mask = (r0 + above + row < R) & (c0 + row_block * 32 < C)
            groups = (_load(source + above * row_stride, 8 * col_stride, mask[:, None], ROW_G // 8, MASKED, POLICY),)
            if AHEAD == 2:
                mask = (r0 + above + LINES + row < R) & (c0 + row_block * 32 < C)
                below = source + (above + LINES) * row_stride
                groups = (groups[0], _load(below, 8 * col_stride, mask[:, None], ROW_G // 8, MASKED, POLICY))
            for i in tl.static_range(AHEAD):
                group = tl.permute(tl.reshape(groups[i], (P, 8, ROW_G // 8)), (0, 2, 1))
                group = tl.reshape(group, (P, ROW_G))
                rotated = _rotated(group, row_sign, P, ROW_G, ROW_H, ROW_SHIFT, NATIVE, ROW_HALVES)
                amax = _amax(rotated, P, ROW_G // 32, ROW_HALVES)
                if ROW_2D:
                    amax = bm.tile_amax(amax, LINES // 32, 32, ACROSS, ROW_G // 32)
                _write(rotated, amax, row_values, row_scales, above + i * LINES, row_blocks, R - r0,
                       row_blocks - c0 // 32, row_first, seed, row_stream, P, ROW_G, ACROSS, 1, ROW_SHIFT, ROW_MODE,
                       ROW_MBITS, ROW_BIAS, ROW_EMAX, ROW_MAX, ROW_ADDEND, ROW_CLIPS, ROW_SR, ROW_2D, MASKED, NATIVE,
                       ROW_HALVES)  # fmt: skip

    if SYNC:
        tl.debug_barrier()  # let every warp have read its rows, so that the columns are in the cache
    if COL_MODE:
        DOWN: tl.constexpr = TM // COL_G
        COLUMNS: tl.constexpr = P // DOWN * V
        COL_UNIT: tl.constexpr = 32 if COL_MODE == 2 else (4 if COL_MBITS == 1 else 8)
        col_block = p % DOWN * (COL_G // 32)
        column = p // DOWN * V
        col_first = (batch * C + c0) * col_blocks + r0 // 32
        col_values += col_first * COL_UNIT
        if COL_MODE == 1:
            col_scales += (batch * (C // 32) + c0 // 32) * col_blocks + r0 // 32 if COL_2D else col_first
        col_sign = None
        if col_signs is not None:
            col_sign = tl.load(col_signs + tl.arange(0, COL_G) % COL_H)[None, :]
        source = (
            x + (col_block * 32 * row_stride + column * col_stride)[:, None] + (tl.arange(0, V) * col_stride)[None, :]
        )
        for left in range(0, TN, COLUMNS):
            c = c0 + left + column[:, None] + tl.arange(0, V)[None, :]
            inside = (r0 + col_block * 32 < R)[:, None] & (c < C)
            group = _load(source + left * col_stride, row_stride, inside, COL_G, MASKED, "evict_first")
            group = tl.permute(tl.reshape(group, (P, V, COL_G)), (0, 2, 1))
            columns = _columns(group, P, COL_G, V)
            amax = tl.full((P, COL_G // 32), 0.0, tl.float32)
            if COL_2D:
                for v in tl.static_range(V):
                    rotated = _rotated(columns[v], col_sign, P, COL_G, COL_H, COL_SHIFT, NATIVE, COL_HALVES)
                    amax = bm.max_nan(amax, _amax(rotated, P, COL_G // 32, COL_HALVES))
                amax = bm.tile_amax(amax, COLUMNS // 32, 32 // V, DOWN, COL_G // 32)
            for v in tl.static_range(V):
                rotated = _rotated(columns[v], col_sign, P, COL_G, COL_H, COL_SHIFT, NATIVE, COL_HALVES)
                if not COL_2D:
                    amax = _amax(rotated, P, COL_G // 32, COL_HALVES)
                _write(rotated, amax, col_values, col_scales, left + v, col_blocks, C - c0, col_blocks - r0 // 32,
                       col_first, seed, col_stream, P, COL_G, DOWN, V, COL_SHIFT, COL_MODE, COL_MBITS, COL_BIAS,
                       COL_EMAX, COL_MAX, COL_ADDEND, COL_CLIPS, COL_SR, COL_2D, MASKED, NATIVE,
                       COL_HALVES)  # fmt: skip


def quantize_matrix(
    x: Tensor, row: Orientation | None, col: Orientation | None, seed: Tensor | None
) -> tuple[Outputs, Outputs]:
    """Quantize x [batch, R, C] (FP32, BF16 or FP16, any strides) along C as `row` says and along R as `col` says.

    Returns ((values, scales), (values, scales)), the second stored transposed; see the twin for shapes.
    """
    transposed = x.stride(1) == 1 and x.stride(2) != 1
    if transposed:  # threads follow memory
        x, row, col = x.transpose(1, 2), col, row
    batch, rows, columns = x.shape
    row_out, col_out = outputs(x, (batch, rows, columns), row), outputs(x, (batch, columns, rows), col)
    if x.numel():
        grid, arguments, options = launch(x, row, col, seed, row_out, col_out, *chip(x.device))
        with torch.cuda.device_of(x):
            _quantize_kernel[grid](**arguments, **options)
    return (col_out, row_out) if transposed else (row_out, col_out)


@lru_cache
def chip(device: torch.device) -> tuple[int, int]:
    """(which instructions `block_native.py` may use, threads a warp) of a device."""
    if device.type != "cuda":
        return 0, 32
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return 950 if properties.gcnArchName.startswith("gfx950") else 0, 64
    return {9: 90, 10: 100}.get(properties.major, 0), 32


def launch(
    x: Tensor,
    row: Orientation | None,
    col: Orientation | None,
    seed: Tensor | None,
    row_out,
    col_out,
    level: int,
    warp: int,
) -> tuple[tuple[int, int], dict, dict]:
    """(grid, arguments, constants and options) of the kernel: what `quantize_matrix` runs and `isa` compiles."""
    batch, rows, columns = x.shape
    tiling = _tiling(row, col)
    row_tiles, column_tiles = batch * triton.cdiv(rows, tiling["TM"]), triton.cdiv(columns, tiling["TN"])
    along_rows = row_tiles <= 65535  # what the grid's second axis can count; the first runs along memory
    reach = 256 * max(abs(x.stride(1)) + abs(x.stride(2)), rows, columns)
    arguments = {
        "x": x,
        "row_values": _words(row_out[0], row),
        "row_scales": row_out[1],
        "col_values": _words(col_out[0], col),
        "col_scales": col_out[1],
        "row_signs": None if row is None else row.signs,
        "col_signs": None if col is None else col.signs,
        "seed_ptr": seed,
        "row_stream": 0 if row is None else row.spec.stream,
        "col_stream": 0 if col is None else col.spec.stream,
        "R": rows,
        "C": columns,
        "row_blocks": columns // BLOCK,
        "col_blocks": rows // BLOCK,
        "batch_stride": x.stride(0),
        "row_stride": x.stride(1),
        "col_stride": x.stride(2),
    }
    options = {
        **tiling,
        "MASKED": rows % tiling["TM"] != 0 or columns % tiling["TN"] != 0,
        "BATCHED": batch > 1,
        "ROW_AXIS": int(along_rows),
        "WIDE": reach >= 2**31,
        "ROW_STRIDE": x.stride(1) if col is not None and x.stride(2) == 1 and level else 0,
        "NATIVE": level,
        **_orientation("ROW", row, x.dtype, level),
        **_orientation("COL", col, x.dtype, level),
        "num_warps": tiling["P"] // warp,
    }
    grid = (column_tiles, row_tiles) if along_rows else (row_tiles, column_tiles)
    return grid, arguments, options


def _tiling(row: Orientation | None, col: Orientation | None) -> dict:
    """Tile, threads and columns at a time; measured on an H200 (runs/bench): what leads is how scales share sectors."""
    group = max(BLOCK if how is None else max(BLOCK, how.spec.hadamard) for how in (row, col))
    tiling = {"TM": max(64, group), "TN": 128, "P": 128, "V": max(64 // group, 1), "SYNC": False}
    if group == BLOCK and row is None and col and col.dtype is None and not col.spec.stochastic:
        tiling |= {"TM": 128, "V": 4}
    plain = [
        how for how in (row, col) if how and how.dtype is None and how.spec.block == "1d" and not how.spec.hadamard
    ]
    if len(plain) == 2 and not any(how.spec.stochastic for how in plain):
        tiling |= {"TN": 256, "P": 256, "SYNC": True}
    return tiling


def _words(values: Tensor | None, how: Orientation | None) -> Tensor | None:
    return values.view(torch.int32) if how is not None and how.dtype is None else values


def _orientation(prefix: str, how: Orientation | None, dtype: torch.dtype, level: int) -> dict:
    """The kernel's constants for one orientation."""
    if how is None:
        names = ("MODE", "H", "2D", "MBITS", "BIAS", "EMAX", "MAX", "ADDEND", "CLIPS", "SR", "HALVES")
        return {f"{prefix}_{name}": 0 for name in names} | {f"{prefix}_SHIFT": 0, f"{prefix}_G": BLOCK}
    spec = how.spec
    fmt, size = spec.fmt, spec.hadamard
    # A power of two is left to the scale, unless x may be so small that it would lose bits.
    exact = dtype != torch.float32 and size in (16, 64)
    packed = how.dtype is None
    values = {
        "MODE": PACKED if packed else VALUES,
        "G": max(BLOCK, size),
        "H": size,
        "SHIFT": {16: 2, 64: 3}[size] if exact else 0,
        "2D": spec.block == "2d",
        "MBITS": fmt.mbits,
        "BIAS": fmt.bias,
        "EMAX": fmt.emax,
        "MAX": fmt.max_code,
        "ADDEND": rule_addend(fmt, spec.scale_rule),
        "CLIPS": spec.scale_rule == "floor" or (spec.scale_rule == "even" and spec.stochastic),
        "SR": spec.stochastic,
        "HALVES": level == 90 and packed and fmt.mbits == 1 and not spec.stochastic and size <= BLOCK,
    }
    return {f"{prefix}_{name}": value for name, value in values.items()}


def outputs(x: Tensor, shape: tuple[int, int, int], how: Orientation | None) -> Outputs:
    """Empty (values, scales) for blocks along the last axis of `shape`."""
    if how is None:
        return None, None
    batch, rows, k = shape
    if how.dtype is not None:
        return x.new_empty(shape, dtype=how.dtype), None
    packed = k // 2 if how.spec.fmt.bits == 4 else k
    scale_rows = rows // BLOCK if how.spec.block == "2d" else rows
    scales = x.new_empty((batch, scale_rows, k // BLOCK), dtype=torch.uint8)
    return x.new_empty((batch, rows, packed), dtype=torch.uint8), scales
