"""Block quantization in Triton: one kernel for every format, rule, rounding, rotation and orientation.

A program takes a tile of a [R, C] matrix and writes it quantized along C ("rows"), along R ("columns", stored
transposed), or both. Each thread holds whole groups (a block of 32, or a rotation's 64 or 128) in registers, so the
butterfly, the block maximum, the scale, the rounding and the packing need neither shared memory nor shuffles: all the
reshapes, splits and joins below only rename registers. The two orientations want two distributions of the tile over
threads; the second reads it again, from the cache, which is cheaper than exchanging it: memory sees one read.

The bytes are those of `quantize_torch.py`, the twin of the same signature. Multiplications are by powers of two and
signs, hence exact; where a rotation of 32 or 128 is not (1 / sqrt(32)), no addition follows that could absorb it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxfp4.numerics.formats import BLOCK
from mxfp4.numerics.kernels.quantize_torch import Orientation, Outputs
from mxfp4.numerics.scales import rule_addend

NONE, PACKED, VALUES = 0, 1, 2  # what an orientation writes
TILE = 128


@triton.jit
def _max_nan(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _stage(x, P: tl.constexpr, G: tl.constexpr, D: tl.constexpr):
    """One butterfly stage of distance D on FP32 [P, G]."""
    pairs = tl.permute(tl.reshape(x, (P, G // (2 * D), 2, D)), (0, 1, 3, 2))
    a, b = tl.split(pairs)
    pairs = tl.permute(tl.join(a + b, a - b), (0, 1, 3, 2))
    return tl.reshape(pairs, (P, G))


@triton.jit
def _rotate(x, P: tl.constexpr, G: tl.constexpr, SIZE: tl.constexpr):
    """The unscaled Hadamard transform of each SIZE neighbours of FP32 [P, G]: `hadamard.rotate_last`'s order."""
    x = _stage(x, P, G, 1)
    x = _stage(x, P, G, 2)
    x = _stage(x, P, G, 4)
    x = _stage(x, P, G, 8)
    if SIZE >= 32:
        x = _stage(x, P, G, 16)
    if SIZE >= 64:
        x = _stage(x, P, G, 32)
    if SIZE >= 128:
        x = _stage(x, P, G, 64)
    return x


@triton.jit
def _block_amax(x, P: tl.constexpr, B: tl.constexpr):
    """Largest magnitude of each 32 neighbours, NaN where there is one: FP32 [P, 32 B] -> [P, B], as a tree."""
    x = tl.abs(x)
    for level in tl.static_range(5):
        a, b = tl.split(tl.reshape(x, (P, (B * 16) >> level, 2)))
        x = _max_nan(a, b)
    return x


@triton.jit
def _split8(x, P: tl.constexpr, W: tl.constexpr):
    """[P, 8 W] -> eight [P, W], one for each position among 8 neighbours."""
    even, odd = tl.split(tl.reshape(x, (P, W, 2, 2, 2)))
    e0, e1 = tl.split(even)
    o0, o1 = tl.split(odd)
    x0, x4 = tl.split(e0)
    x2, x6 = tl.split(e1)
    x1, x5 = tl.split(o0)
    x3, x7 = tl.split(o1)
    return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def _per_element(per_block, P: tl.constexpr, G: tl.constexpr):
    """[P, G / 32] -> what broadcasts against [P, G]."""
    if G > 32:
        per_block = tl.broadcast_to(tl.reshape(per_block, (P, G // 32, 1)), (P, G // 32, 32))
        per_block = tl.reshape(per_block, (P, G))
    return per_block


@triton.jit
def _philox_round(c0, c1, c2, c3, k0, k1):
    a = c0.to(tl.uint64) * 0xD2511F53
    b = c2.to(tl.uint64) * 0xCD9E8D57
    return (b >> 32).to(tl.uint32) ^ c1 ^ k0, b.to(tl.uint32), (a >> 32).to(tl.uint32) ^ c3 ^ k1, a.to(tl.uint32)


@triton.jit
def _random_words(like, seed, first, stream, P: tl.constexpr, W: tl.constexpr):
    """Four random words (uint32 [P, W]) for each 8 neighbours; element indices begin at 8 first (int64 [P], W | first).

    Philox4x32-7 as in `philox.philox`; element j of 8 uses the half j % 2 of word j // 2. `like`, uint32 [P, W], gives
    the counters its distribution over threads, so that the words are drawn where they are used.
    """
    zero = (like >> 31) >> 1
    k0 = seed.to(tl.uint32)
    k1 = (seed >> 32).to(tl.uint32)
    c0 = zero + first.to(tl.uint32)[:, None] + tl.arange(0, W).to(tl.uint32)[None, :]
    c1 = zero + (first >> 32).to(tl.uint32)[:, None]
    c2 = zero
    c3 = zero + stream.to(tl.uint32)
    for _ in tl.static_range(7):
        c0, c1, c2, c3 = _philox_round(c0, c1, c2, c3, k0, k1)
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def _join8(x0, x1, x2, x3, x4, x5, x6, x7, P: tl.constexpr, W: tl.constexpr):
    """The inverse of `_split8`."""
    even = tl.join(tl.join(x0, x4), tl.join(x2, x6))
    odd = tl.join(tl.join(x1, x5), tl.join(x3, x7))
    return tl.reshape(tl.join(even, odd), (P, W * 8))


@triton.jit
def _noise(x, seed, first, stream, P: tl.constexpr, W: tl.constexpr):
    """Uniform 16-bit integers, uint32 [P, 8 W], for the elements of x [P, 8 W]."""
    like = _split8(x.to(tl.uint32, bitcast=True), P, W)[0]
    w0, w1, w2, w3 = _random_words(like, seed, first, stream, P, W)
    return _join8(w0 & 0xFFFF, w0 >> 16, w1 & 0xFFFF, w1 >> 16, w2 & 0xFFFF, w2 >> 16, w3 & 0xFFFF, w3 >> 16, P, W)


@triton.jit
def _fp4_lines(x, inverse):
    """RNE codes of |x| * inverse in E2M1, FP32 values 2^22 + code / 2: the code is the low bits, above 0x4A800000.

    The code of u is 2u rounded to even below 2, u + 2 below 4, u / 2 + 4 beyond, that is, the least of the three, for
    rounding is monotonic. 2^22 makes one ulp 1/2, so the one rounding of each FMA is the rounding to the code.
    """
    u = tl.abs(x)
    low = tl.fma(u, inverse, 4194304.0)
    middle = tl.fma(u, inverse * 0.5, 4194305.0)
    high = tl.fma(u, inverse * 0.25, 4194306.0)
    return tl.minimum(tl.minimum(low, middle), high)


@triton.jit
def _code(x, inverse, noise, MBITS: tl.constexpr, BIAS: tl.constexpr, MAX_CODE: tl.constexpr, CLIPS: tl.constexpr,
          STOCHASTIC: tl.constexpr):  # fmt: skip
    """Magnitude codes of x * inverse, int32, saturating. In E2M1 to nearest they stand above 0x4A800000."""
    if MBITS == 1 and not STOCHASTIC:
        lines = _fp4_lines(x, inverse)
        if CLIPS:
            lines = tl.minimum(lines, 4194304.0 + MAX_CODE / 2)
        code = lines.to(tl.int32, bitcast=True)
    else:
        SHIFT: tl.constexpr = 23 - MBITS
        STEP: tl.constexpr = 2.0 ** (1 - BIAS - MBITS)
        u = tl.abs(x) * inverse
        bits = u.to(tl.int32, bitcast=True)
        if STOCHASTIC:
            up = noise.to(tl.int32, bitcast=True)
            normal = (bits + (up << (SHIFT - 16))) >> SHIFT
            # Only used below the least normal value; the others are kept in the range of int32.
            below = (tl.minimum(u * (65536.0 / STEP), 1073741824.0).to(tl.int32) + up) >> 16
        else:
            normal = (bits + ((1 << (SHIFT - 1)) - 1) + ((bits >> SHIFT) & 1)) >> SHIFT
            below = (u + STEP * 8388608.0).to(tl.int32, bitcast=True) & ((2 << MBITS) - 1)
        code = tl.where(u < 2.0 ** (1 - BIAS), below, normal - ((127 - BIAS) << MBITS))
        code = tl.minimum(code, MAX_CODE)
    return code


@triton.jit
def _pack_fp4(code, x, P: tl.constexpr, W: tl.constexpr, OFFSET: tl.constexpr):
    """Codes (int32 [P, 8 W], OFFSET above the code) with the signs of x -> eight nibbles a word, int32 [P, W]."""
    c0, c1, c2, c3, c4, c5, c6, c7 = _split8(code.to(tl.uint32, bitcast=True), P, W)
    s0, s1, s2, s3, s4, s5, s6, s7 = _split8(x.to(tl.uint32, bitcast=True), P, W)
    word = (c7 << 4) + c6
    word = (word << 4) + c5
    word = (word << 4) + c4
    word = (word << 4) + c3
    word = (word << 4) + c2
    word = (word << 4) + c1
    word = (word << 4) + c0
    word -= (OFFSET * 0x11111111) & 0xFFFFFFFF
    sign = ((s7 >> 28) << 4) | (s6 >> 28)
    sign = (sign << 4) | (s5 >> 28)
    sign = (sign << 4) | (s4 >> 28)
    sign = (sign << 4) | (s3 >> 28)
    sign = (sign << 4) | (s2 >> 28)
    sign = (sign << 4) | (s1 >> 28)
    sign = (sign << 4) | (s0 >> 28)
    return (word | (sign & 0x88888888)).to(tl.int32, bitcast=True)


@triton.jit
def _pack_fp8(code, x, P: tl.constexpr, W: tl.constexpr):
    """Codes (int32 [P, 4 W]) with the signs of x -> four bytes a word, int32 [P, W]."""
    code = code | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)
    even, odd = tl.split(tl.reshape(code, (P, W, 2, 2)))
    b0, b2 = tl.split(even)
    b1, b3 = tl.split(odd)
    return (b0 | (b1 << 8)) | ((b2 << 16) | (b3 << 24))


@triton.jit
def _value(x, inverse, noise, MBITS: tl.constexpr, BIAS: tl.constexpr, MAX_CODE: tl.constexpr, CLIPS: tl.constexpr,
           STOCHASTIC: tl.constexpr):  # fmt: skip
    """The magnitude of x * inverse on the format's grid, FP32."""
    if MBITS == 1 and not STOCHASTIC:
        # One ulp of 2^22 times a power of two is half that power: the add rounds to E2M1's step, subtracting is exact.
        u = tl.abs(x) * inverse
        binade = tl.maximum(u.to(tl.int32, bitcast=True) & 0x7F800000, 0x3F800000).to(tl.float32, bitcast=True)
        value = tl.fma(binade, -4194304.0, tl.fma(binade, 4194304.0, u))
        if CLIPS:
            value = tl.minimum(value, 6.0)
    else:
        code = _code(x, inverse, noise, MBITS, BIAS, MAX_CODE, CLIPS, STOCHASTIC)
        normal = ((code + ((127 - BIAS) << MBITS)) << (23 - MBITS)).to(tl.float32, bitcast=True)
        below = code.to(tl.float32) * (2.0 ** (1 - BIAS - MBITS))
        value = tl.where(code < (1 << MBITS), below, normal)
    return value


@triton.jit
def _scale(amax, ADDEND: tl.constexpr, EMAX: tl.constexpr):
    """(scale byte, int32; 1 / scale, FP32; whether the block holds NaN or infinity) of block maxima."""
    bits = amax.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    bad = bits >= 0x7F800000
    byte = tl.maximum(((bits + ADDEND) >> 23) - EMAX, 0)
    byte = tl.where(bad, 255, byte)
    return byte, ((254 - byte) << 23).to(tl.float32, bitcast=True), bad


@triton.jit
def _rotated(x, signs, P: tl.constexpr, G: tl.constexpr, H: tl.constexpr, FACTOR: tl.constexpr):
    """Groups in FP32, signed and rotated. FACTOR 1 with a rotation: scaled as well, else FACTOR is still to apply."""
    x = x.to(tl.float32)
    if signs is not None:
        x = x * signs
    if H:
        x = _rotate(x, P, G, H)
        if FACTOR == 1.0:
            x = x * (H**-0.5)
    return x


@triton.jit
def _write(x, amax, values, scales, at, scale_at, line, mask, first, seed, stream,
           P: tl.constexpr, G: tl.constexpr, FACTOR: tl.constexpr, MODE: tl.constexpr, MBITS: tl.constexpr,
           BIAS: tl.constexpr, EMAX: tl.constexpr, MAX_CODE: tl.constexpr, ADDEND: tl.constexpr, CLIPS: tl.constexpr,
           STOCHASTIC: tl.constexpr, TWO_D: tl.constexpr, MASKED: tl.constexpr):
    """Quantize groups x (FP32 [P, G]) whose block maxima are amax ([P, G / 32]), both to be multiplied by FACTOR.

    Writes group p at `values + at[p]` (words of 32 bits when packed, else elements) and `scales + scale_at[p]`, for
    2D blocks only from the first line of each.
    """
    byte, inverse, bad = _scale(amax * FACTOR, ADDEND, EMAX)
    wide = _per_element(inverse * FACTOR, P, G)
    noise = None
    if STOCHASTIC:
        noise = _noise(x, seed, first, stream, P, G // 8)
    if MODE == 1:
        code = _code(x, wide, noise, MBITS, BIAS, MAX_CODE, CLIPS, STOCHASTIC)
        if MBITS == 1:
            word = _pack_fp4(code, x, P, G // 8, 0 if STOCHASTIC else 0x4A800000)
            W: tl.constexpr = G // 8
        else:
            word = _pack_fp8(code, x, P, G // 4)
            W: tl.constexpr = G // 4
        if G == 32:
            word = tl.where(bad, 0, word)
        else:
            WB: tl.constexpr = W * 32 // G
            word = tl.reshape(word, (P, G // 32, WB))
            word = tl.reshape(tl.where(tl.reshape(bad, (P, G // 32, 1)), 0, word), (P, W))
        target = values + at[:, None] + tl.arange(0, W)[None, :]
        scale_target = scales + scale_at[:, None] + tl.arange(0, G // 32)[None, :]
        if MASKED:
            tl.store(target, word, mask=mask[:, None])
        else:
            tl.store(target, word)
        if TWO_D:
            mask = mask & (line % 32 == 0)
        if MASKED or TWO_D:
            tl.store(scale_target, byte.to(tl.uint8), mask=mask[:, None])
        else:
            tl.store(scale_target, byte.to(tl.uint8))
    else:
        value = _value(x, wide, noise, MBITS, BIAS, MAX_CODE, CLIPS, STOCHASTIC)
        bits = tl.where(byte == 0, 0x00400000, byte << 23)
        bits = tl.where(bad, 0x7FC00000, bits)
        signed = _per_element(bits, P, G) | (x.to(tl.int32, bitcast=True) & -0x80000000)
        value = (value * signed.to(tl.float32, bitcast=True)).to(values.dtype.element_ty)
        VEC: tl.constexpr = 128 // values.dtype.element_ty.primitive_bitwidth
        value = tl.reshape(value, (P, G // VEC, VEC))
        target = values + at[:, None, None] + (tl.arange(0, G // VEC) * VEC)[None, :, None] + tl.arange(0, VEC)[None, None, :]
        if MASKED:
            tl.store(target, value, mask=mask[:, None, None])
        else:
            tl.store(target, value)


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


@triton.jit
def _tile_amax(amax, A: tl.constexpr, N: tl.constexpr, B: tl.constexpr, W: tl.constexpr):
    """Block maxima [A N B, W] -> the maximum over the N in the middle, in place of each of them."""
    grid = tl.reshape(amax, (A, N, B, W))
    grid = tl.broadcast_to(tl.expand_dims(tl.reduce(grid, 1, _max_nan), 1), (A, N, B, W))
    return tl.reshape(grid, (A * N * B, W))


@triton.jit(do_not_specialize=["row_stream", "col_stream"])
def _quantize_kernel(
    x, row_values, row_scales, col_values, col_scales, row_signs, col_signs, seed_ptr, row_stream, col_stream,
    R, C, row_blocks, col_blocks, batch_stride, row_stride, col_stride,
    TM: tl.constexpr, TN: tl.constexpr, P: tl.constexpr, V: tl.constexpr, MASKED: tl.constexpr, WIDE: tl.constexpr,
    ROW_MODE: tl.constexpr, ROW_G: tl.constexpr, ROW_H: tl.constexpr, ROW_FACTOR: tl.constexpr,
    ROW_2D: tl.constexpr, ROW_MBITS: tl.constexpr, ROW_BIAS: tl.constexpr, ROW_EMAX: tl.constexpr,
    ROW_MAX: tl.constexpr, ROW_ADDEND: tl.constexpr, ROW_CLIPS: tl.constexpr, ROW_SR: tl.constexpr,
    COL_MODE: tl.constexpr, COL_G: tl.constexpr, COL_H: tl.constexpr, COL_FACTOR: tl.constexpr,
    COL_2D: tl.constexpr, COL_MBITS: tl.constexpr, COL_BIAS: tl.constexpr, COL_EMAX: tl.constexpr,
    COL_MAX: tl.constexpr, COL_ADDEND: tl.constexpr, COL_CLIPS: tl.constexpr, COL_SR: tl.constexpr,
):  # fmt: skip
    """Quantize a TM x TN tile of x [batch, R, C]; blocks: C / 32 and R / 32; P threads' worth of groups at a time."""
    column_tiles = (C + TN - 1) // TN
    tiles = (R + TM - 1) // TM * column_tiles
    batch = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    r0 = (tile // column_tiles) * TM
    c0 = (tile % column_tiles) * TN
    if WIDE:
        row_stride = row_stride.to(tl.int64)
        col_stride = col_stride.to(tl.int64)
        row_blocks = row_blocks.to(tl.int64)
        col_blocks = col_blocks.to(tl.int64)
    x += batch * batch_stride + r0.to(tl.int64) * row_stride + c0.to(tl.int64) * col_stride
    seed = 0
    if ROW_SR or COL_SR:
        seed = tl.load(seed_ptr)
    p = tl.arange(0, P)

    if ROW_MODE:
        NB: tl.constexpr = TN // ROW_G
        ROW_STEP: tl.constexpr = P // NB
        ROW_W: tl.constexpr = 32 if ROW_MODE == 2 else (4 if ROW_MBITS == 1 else 8)  # output units a block
        row = p // NB
        block = (p % NB) * (ROW_G // 32)
        base = (batch * R + r0) * row_blocks + c0 // 32  # first block of the tile, counted in the output
        inside = (
            (row * row_stride + block * 32 * col_stride)[:, None, None]
            + (tl.arange(0, ROW_G // 8) * 8 * col_stride)[None, :, None]
            + (tl.arange(0, 8) * col_stride)[None, None, :]
        )
        row_values += base * ROW_W
        if ROW_MODE == 1:
            row_scales += (batch * (R // 32) + r0 // 32) * row_blocks + c0 // 32 if ROW_2D else base
        signs = None
        if row_signs is not None:
            signs = tl.load(row_signs + tl.arange(0, ROW_G) % ROW_H)[None, :]
        for i in tl.static_range(TM // ROW_STEP):
            mask = (r0 + row + i * ROW_STEP < R) & (c0 + block * 32 < C)
            if MASKED:
                group = tl.load(x + i * ROW_STEP * row_stride + inside, mask=mask[:, None, None], other=0.0)
            else:
                group = tl.load(x + i * ROW_STEP * row_stride + inside)
            group = _rotated(tl.reshape(group, (P, ROW_G)), signs, P, ROW_G, ROW_H, ROW_FACTOR)
            amax = _block_amax(group, P, ROW_G // 32)
            if ROW_2D:
                amax = _tile_amax(amax, ROW_STEP // 32, 32, NB, ROW_G // 32)
            line = row + i * ROW_STEP
            at = line * row_blocks + block
            scale_at = line // 32 * row_blocks + block if ROW_2D else at
            _write(group, amax, row_values, row_scales, at * ROW_W, scale_at, line, mask, (base + at) * 4, seed, row_stream,
                   P, ROW_G, ROW_FACTOR, ROW_MODE, ROW_MBITS, ROW_BIAS, ROW_EMAX, ROW_MAX, ROW_ADDEND, ROW_CLIPS,
                   ROW_SR, ROW_2D, MASKED)  # fmt: skip

    if COL_MODE:
        RG: tl.constexpr = TM // COL_G
        COL_STEP: tl.constexpr = P // RG
        COL_W: tl.constexpr = 32 if COL_MODE == 2 else (4 if COL_MBITS == 1 else 8)
        block = (p % RG) * (COL_G // 32)
        column = (p // RG) * V
        base = (batch * C + c0) * col_blocks + r0 // 32
        inside = (
            (block * 32 * row_stride + column * col_stride)[:, None, None]
            + (tl.arange(0, COL_G) * row_stride)[None, :, None]
            + (tl.arange(0, V) * col_stride)[None, None, :]
        )
        col_values += base * COL_W
        if COL_MODE == 1:
            col_scales += (batch * (C // 32) + c0 // 32) * col_blocks + r0 // 32 if COL_2D else base
        signs = None
        if col_signs is not None:
            signs = tl.load(col_signs + tl.arange(0, COL_G) % COL_H)[None, :]
        for i in tl.static_range(TN // (COL_STEP * V)):
            c = column + i * COL_STEP * V
            in_rows = r0 + block * 32 < R
            if MASKED:
                mask = in_rows[:, None, None] & (c0 + c[:, None, None] + tl.arange(0, V)[None, None, :] < C)
                group = tl.load(x + i * COL_STEP * V * col_stride + inside, mask=mask, other=0.0)
            else:
                group = tl.load(x + i * COL_STEP * V * col_stride + inside)
            columns = _columns(group, P, COL_G, V)
            amax = tl.full((P, COL_G // 32), 0.0, tl.float32)
            if COL_2D:
                for v in tl.static_range(V):
                    rotated = _rotated(columns[v], signs, P, COL_G, COL_H, COL_FACTOR)
                    amax = _max_nan(amax, _block_amax(rotated, P, COL_G // 32))
                amax = _tile_amax(amax, COL_STEP * V // 32, 32 // V, RG, COL_G // 32)
            for v in tl.static_range(V):
                rotated = _rotated(columns[v], signs, P, COL_G, COL_H, COL_FACTOR)
                if not COL_2D:
                    amax = _block_amax(rotated, P, COL_G // 32)
                line = c + v
                at = line * col_blocks + block
                scale_at = line // 32 * col_blocks + block if COL_2D else at
                _write(rotated, amax, col_values, col_scales, at * COL_W, scale_at, line, in_rows & (c0 + line < C),
                       (base + at) * 4, seed, col_stream, P, COL_G, COL_FACTOR, COL_MODE, COL_MBITS, COL_BIAS,
                       COL_EMAX, COL_MAX, COL_ADDEND, COL_CLIPS, COL_SR, COL_2D, MASKED)  # fmt: skip


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
    row_out, col_out = _outputs(x, (batch, rows, columns), row), _outputs(x, (batch, columns, rows), col)
    if x.numel():
        grid, arguments, options = launch(x, row, col, seed, row_out, col_out)
        _quantize_kernel[grid](**arguments, **options)
    return (col_out, row_out) if transposed else (row_out, col_out)


def launch(x: Tensor, row, col, seed, row_out, col_out) -> tuple[tuple[int], dict, dict]:
    """(grid, arguments, constants and options) of the kernel: what `quantize_matrix` runs and `isa` compiles."""
    batch, rows, columns = x.shape
    reach = max(TILE * (abs(x.stride(1)) + abs(x.stride(2))), TILE * max(rows, columns))
    exact = x.dtype != torch.float32  # no bit of x is so small that a power of two could lose it
    group = 32 if col is None else max(32, col.spec.hadamard)
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
        "TM": TILE,
        "TN": TILE,
        "P": 128,
        "V": max(128 // group // (2 if x.dtype == torch.float32 else 1), 1),
        "MASKED": rows % TILE != 0 or columns % TILE != 0,
        "WIDE": reach >= 2**31,
        **_orientation("ROW", row, exact),
        **_orientation("COL", col, exact),
        "num_warps": 4,
    }
    return (batch * triton.cdiv(rows, TILE) * triton.cdiv(columns, TILE),), arguments, options


def _words(values: Tensor | None, how: Orientation | None) -> Tensor | None:
    return values.view(torch.int32) if how is not None and how.dtype is None else values


_CONSTANTS = ("MODE", "H", "2D", "MBITS", "BIAS", "EMAX", "MAX", "ADDEND", "CLIPS", "SR")


def _orientation(prefix: str, how: Orientation | None, exact: bool) -> dict:
    """The kernel's constants for one orientation."""
    if how is None:
        return {f"{prefix}_{name}": 0 for name in _CONSTANTS} | {f"{prefix}_FACTOR": 1.0, f"{prefix}_G": 32}
    spec = how.spec
    fmt, size = spec.fmt, spec.hadamard
    values = {
        "MODE": PACKED if how.dtype is None else VALUES,
        "G": max(BLOCK, size),
        "H": size,
        "FACTOR": size**-0.5 if exact and size in (16, 64) else 1.0,
        "2D": spec.block == "2d",
        "MBITS": fmt.mbits,
        "BIAS": fmt.bias,
        "EMAX": fmt.emax,
        "MAX": fmt.max_code,
        "ADDEND": rule_addend(fmt, spec.scale_rule),
        "CLIPS": spec.scale_rule == "floor" or (spec.scale_rule == "even" and spec.stochastic),
        "SR": spec.stochastic,
    }
    return {f"{prefix}_{name}": value for name, value in values.items()}


def _outputs(x: Tensor, shape: tuple[int, int, int], how: Orientation | None) -> Outputs:
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
