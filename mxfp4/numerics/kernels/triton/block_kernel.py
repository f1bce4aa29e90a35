"""The kernel of block quantization: every format, rule, rounding, rotation and orientation (`triton/quantize.py`).

A program takes a tile of a [R, C] matrix and writes it quantized along C ("rows"), along R ("columns", stored
transposed), or both. A thread holds whole groups (a block of 32, or a rotation's 64 or 128) in registers, so that the
butterfly, the block maximum, the rounding and the packing need neither shared memory nor shuffles (`block_math.py`).
The two orientations want two distributions of the tile over threads; the second reads it again, from the cache, which
is cheaper than exchanging it: memory sees one read. The loops are not unrolled: the code has to fit the instruction
cache.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mxfp4.numerics.kernels.triton import block_math as bm
from mxfp4.numerics.kernels.triton import block_native as native


@triton.jit
def _rotated(x, signs, P: tl.constexpr, G: tl.constexpr, H: tl.constexpr, SHIFT: tl.constexpr, PRESCALED: tl.constexpr,
             NATIVE: tl.constexpr, HALVES: tl.constexpr):  # fmt: skip
    """Groups [P, G] in FP32, signed and rotated; if SHIFT, still to be multiplied by 2^-SHIFT, else scaled as well.

    PRESCALED: times 3/4 before (`operand_plan.PRESCALE`), rounded to FP32: no FMA may join it to a sum.

    With HALVES what `native.halves` makes of them.
    """
    if x.dtype == tl.bfloat16 and not (HALVES and H == 0):
        x = native.to_float32(x, NATIVE)
    if PRESCALED:
        x = x.to(tl.float32) * 0.75
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
def load_apart(source, step, mask, N: tl.constexpr, MASKED: tl.constexpr, POLICY: tl.constexpr):
    """N loads of [P, W] that lie `step` apart -> [P, W, 2, ..., 2]: one at a time, so that a thread keeps its own."""
    if N > 1:
        even = load_apart(source, step * 2, mask, N // 2, MASKED, POLICY)
        odd = load_apart(source + step, step * 2, mask, N // 2, MASKED, POLICY)
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
def quantize_kernel(
    x, row_values, row_scales, col_values, col_scales, seed_ptr, row_stream, col_stream,
    R, C, row_blocks, col_blocks, batch_stride, row_stride, col_stride,
    TM: tl.constexpr, TN: tl.constexpr, P: tl.constexpr, V: tl.constexpr, MASKED: tl.constexpr,
    SYNC: tl.constexpr, WIDE: tl.constexpr, BATCHED: tl.constexpr, ROW_AXIS: tl.constexpr, ROW_STRIDE: tl.constexpr,
    NATIVE: tl.constexpr,
    ROW_MODE: tl.constexpr, ROW_G: tl.constexpr, ROW_H: tl.constexpr, ROW_SHIFT: tl.constexpr,
    ROW_2D: tl.constexpr, ROW_MBITS: tl.constexpr, ROW_BIAS: tl.constexpr, ROW_EMAX: tl.constexpr,
    ROW_MAX: tl.constexpr, ROW_ADDEND: tl.constexpr, ROW_CLIPS: tl.constexpr, ROW_SR: tl.constexpr,
    ROW_SIGNS: tl.constexpr, ROW_SIGN_BITS: tl.constexpr, ROW_PRESCALED: tl.constexpr, ROW_HALVES: tl.constexpr,
    COL_MODE: tl.constexpr, COL_G: tl.constexpr, COL_H: tl.constexpr, COL_SHIFT: tl.constexpr,
    COL_2D: tl.constexpr, COL_MBITS: tl.constexpr, COL_BIAS: tl.constexpr, COL_EMAX: tl.constexpr,
    COL_MAX: tl.constexpr, COL_ADDEND: tl.constexpr, COL_CLIPS: tl.constexpr, COL_SR: tl.constexpr,
    COL_SIGNS: tl.constexpr, COL_SIGN_BITS: tl.constexpr, COL_PRESCALED: tl.constexpr, COL_HALVES: tl.constexpr,
):  # fmt: skip
    """Quantize a TM x TN tile of x [batch, R, C], P groups at a time, one a thread; C / 32 and R / 32 blocks a line.

    V columns are loaded together for the column orientation. ROW_STRIDE is row_stride where it is worth a compilation.
    ROW_AXIS: which axis of the grid counts the tiles along R of each matrix of the batch, the other those along C.
    A MODE writes nothing (0), codes and scales (1) or values (2). SIGNS of a rotation: none (0), those of SIGN_BITS (1),
    drawn from the seed (2).
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
    if ROW_SR or COL_SR or ROW_SIGNS == 2 or COL_SIGNS == 2:
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
        if ROW_SIGNS:
            row_sign = bm.signs(seed, row_stream, ROW_G, ROW_H, ROW_SIGNS, ROW_SIGN_BITS)[None, :]
        source = x + (row * row_stride + row_block * 32 * col_stride)[:, None] + (tl.arange(0, 8) * col_stride)[None, :]
        POLICY: tl.constexpr = "evict_last" if COL_MODE else ""
        AHEAD: tl.constexpr = 2 if TM >= 2 * LINES else 1  # loads under way at a time
        for above in range(0, TM, LINES * AHEAD):
            mask = (r0 + above + row < R) & (c0 + row_block * 32 < C)
            here = source + above * row_stride
            groups = (load_apart(here, 8 * col_stride, mask[:, None], ROW_G // 8, MASKED, POLICY),)
            if AHEAD == 2:
                mask = (r0 + above + LINES + row < R) & (c0 + row_block * 32 < C)
                below = source + (above + LINES) * row_stride
                groups = (groups[0], load_apart(below, 8 * col_stride, mask[:, None], ROW_G // 8, MASKED, POLICY))
            for i in tl.static_range(AHEAD):
                group = tl.permute(tl.reshape(groups[i], (P, 8, ROW_G // 8)), (0, 2, 1))
                group = tl.reshape(group, (P, ROW_G))
                rotated = _rotated(group, row_sign, P, ROW_G, ROW_H, ROW_SHIFT, ROW_PRESCALED, NATIVE, ROW_HALVES)
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
        if COL_SIGNS:
            col_sign = bm.signs(seed, col_stream, COL_G, COL_H, COL_SIGNS, COL_SIGN_BITS)[None, :]
        source = (
            x + (col_block * 32 * row_stride + column * col_stride)[:, None] + (tl.arange(0, V) * col_stride)[None, :]
        )
        for left in range(0, TN, COLUMNS):
            c = c0 + left + column[:, None] + tl.arange(0, V)[None, :]
            inside = (r0 + col_block * 32 < R)[:, None] & (c < C)
            group = load_apart(source + left * col_stride, row_stride, inside, COL_G, MASKED, "evict_first")
            group = tl.permute(tl.reshape(group, (P, V, COL_G)), (0, 2, 1))
            columns = _columns(group, P, COL_G, V)
            amax = tl.full((P, COL_G // 32), 0.0, tl.float32)
            if COL_2D:
                for v in tl.static_range(V):
                    rotated = _rotated(
                        columns[v], col_sign, P, COL_G, COL_H, COL_SHIFT, COL_PRESCALED, NATIVE, COL_HALVES
                    )
                    amax = bm.max_nan(amax, _amax(rotated, P, COL_G // 32, COL_HALVES))
                amax = bm.tile_amax(amax, COLUMNS // 32, 32 // V, DOWN, COL_G // 32)
            for v in tl.static_range(V):
                rotated = _rotated(columns[v], col_sign, P, COL_G, COL_H, COL_SHIFT, COL_PRESCALED, NATIVE, COL_HALVES)
                if not COL_2D:
                    amax = _amax(rotated, P, COL_G // 32, COL_HALVES)
                _write(rotated, amax, col_values, col_scales, left + v, col_blocks, C - c0, col_blocks - r0 // 32,
                       col_first, seed, col_stream, P, COL_G, DOWN, V, COL_SHIFT, COL_MODE, COL_MBITS, COL_BIAS,
                       COL_EMAX, COL_MAX, COL_ADDEND, COL_CLIPS, COL_SR, COL_2D, MASKED, NATIVE,
                       COL_HALVES)  # fmt: skip
