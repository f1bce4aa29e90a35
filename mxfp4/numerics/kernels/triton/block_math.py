"""What a thread of the Triton kernels does with its groups of neighbours: rotate, take maxima, scale, round, pack.

A tensor [P, G] is P groups of G elements, each group in one thread's registers: the reshapes, splits and joins below
only rename registers. Every function has its line in the plain-torch twin (`rounding.py`, `scale_rules.py`,
`hadamard.py`, `philox.py`) and gives its bits: multiplications are by powers of two and signs, hence exact, so that
contraction into FMAs changes nothing; where a rotation's 1 / sqrt(32) is not, no addition follows that could absorb it.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def max_nan(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _stage(x, P: tl.constexpr, G: tl.constexpr, D: tl.constexpr):
    pairs = tl.permute(tl.reshape(x, (P, G // (2 * D), 2, D)), (0, 1, 3, 2))
    a, b = tl.split(pairs)
    pairs = tl.permute(tl.join(a + b, a - b), (0, 1, 3, 2))
    return tl.reshape(pairs, (P, G))


@triton.jit
def rotate(x, P: tl.constexpr, G: tl.constexpr, SIZE: tl.constexpr):
    """The unscaled Hadamard transform of each SIZE neighbours of FP32 [P, G], stages in `rotate_last`'s order."""
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
def block_amax(x, P: tl.constexpr, B: tl.constexpr):
    """Largest magnitude of each 32 neighbours, NaN where there is one: FP32 [P, 32 B] -> [P, B]."""
    x = tl.abs(x)
    for level in tl.static_range(5):
        a, b = tl.split(tl.reshape(x, (P, (B * 16) >> level, 2)))
        x = max_nan(a, b)
    return x


@triton.jit
def tile_amax(amax, A: tl.constexpr, N: tl.constexpr, B: tl.constexpr, W: tl.constexpr):
    """Block maxima [A N B, W] -> the maximum over the N in the middle, in place of each of them (threads exchange)."""
    grid = tl.reshape(amax, (A, N, B, W))
    grid = tl.broadcast_to(tl.expand_dims(tl.reduce(grid, 1, max_nan), 1), (A, N, B, W))
    return tl.reshape(grid, (A * N * B, W))


@triton.jit
def scale(amax, ADDEND: tl.constexpr, EMAX: tl.constexpr, SHIFT: tl.constexpr):
    """Of block maxima still to be multiplied by 2^-SHIFT: (scale byte, int32; 2^-SHIFT / scale, FP32; NaN or infinite).

    SHIFT only touches exponents: a maximum that it would make subnormal has byte 0 either way (EMAX >= 2), and the
    largest byte that is left, 253 - SHIFT, has a normal reciprocal.
    """
    bits = amax.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    bad = bits >= 0x7F800000
    byte = tl.maximum(((bits + ADDEND) >> 23) - (EMAX + SHIFT), 0)
    inverse = ((254 - SHIFT - byte) << 23).to(tl.float32, bitcast=True)
    return tl.where(bad, 255, byte), inverse, bad


@triton.jit
def per_element(per_block, P: tl.constexpr, G: tl.constexpr):
    """[P, G / 32] -> what broadcasts against [P, G]."""
    if G > 32:
        per_block = tl.broadcast_to(tl.reshape(per_block, (P, G // 32, 1)), (P, G // 32, 32))
        per_block = tl.reshape(per_block, (P, G))
    return per_block


@triton.jit
def split8(x, P: tl.constexpr, W: tl.constexpr):
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
def _join8(x0, x1, x2, x3, x4, x5, x6, x7, P: tl.constexpr, W: tl.constexpr):
    even = tl.join(tl.join(x0, x4), tl.join(x2, x6))
    odd = tl.join(tl.join(x1, x5), tl.join(x3, x7))
    return tl.reshape(tl.join(even, odd), (P, W * 8))


@triton.jit
def philox_round(c0, c1, c2, c3, k0, k1):
    """One round of Philox4x32 on uint32 counters; the caller adds Weyl's constants to the key."""
    a = c0.to(tl.uint64) * 0xD2511F53
    b = c2.to(tl.uint64) * 0xCD9E8D57
    return (b >> 32).to(tl.uint32) ^ c1 ^ k0, b.to(tl.uint32), (a >> 32).to(tl.uint32) ^ c3 ^ k1, a.to(tl.uint32)


@triton.jit
def signs(seed, stream, G: tl.constexpr, SIZE: tl.constexpr, KIND: tl.constexpr, BITS: tl.constexpr):
    """The SIZE signs of a rotation, repeated over [G]: +1 or -1, FP32. Where KIND is 1 those of BITS, else drawn.

    One Philox call of the stream that two operands of a GEMM share, as in `philox.random_signs`.
    """
    if KIND == 1:
        c0 = tl.full((), BITS & 0xFFFFFFFF, tl.uint32)
        c1 = tl.full((), (BITS >> 32) & 0xFFFFFFFF, tl.uint32)
        c2 = tl.full((), (BITS >> 64) & 0xFFFFFFFF, tl.uint32)
        c3 = tl.full((), (BITS >> 96) & 0xFFFFFFFF, tl.uint32)
    else:
        k0 = seed.to(tl.uint32)
        k1 = (seed >> 32).to(tl.uint32)
        c0 = k0 & 0
        c1 = c0
        c2 = c0 + 1  # philox.FOR_SIGNS
        c3 = c0 + (stream.to(tl.uint32) >> 1)
        for _ in tl.static_range(7):
            c0, c1, c2, c3 = philox_round(c0, c1, c2, c3, k0, k1)
            k0 += 0x9E3779B9
            k1 += 0xBB67AE85
    j = tl.arange(0, G) % SIZE
    word = j // 32
    bits = tl.where(word == 0, c0, tl.where(word == 1, c1, tl.where(word == 2, c2, c3)))
    return 1.0 - 2.0 * ((bits >> (j % 32).to(tl.uint32)) & 1).to(tl.float32)


@triton.jit
def random_words(x, seed, first, stream, P: tl.constexpr, W: tl.constexpr):
    """Four random words (uint32 [P, W]) for each 8 neighbours of x [P, 8 W].

    Philox4x32-7 as in `philox.philox`: element j of 8 uses the half j % 2 of word j // 2. Element indices begin at
    8 first (int64 [P], a multiple of W).
    """
    k0 = seed.to(tl.uint32)
    k1 = (seed >> 32).to(tl.uint32)
    # Zero, but distributed over the threads as x is: the words are drawn where they are used.
    zero = (split8(x.to(tl.uint32, bitcast=True), P, W)[0] >> 31) >> 1
    c0 = zero + first.to(tl.uint32)[:, None] + tl.arange(0, W).to(tl.uint32)[None, :]
    c1 = zero + (first >> 32).to(tl.uint32)[:, None]
    c2 = zero
    c3 = zero + stream.to(tl.uint32)
    for _ in tl.static_range(7):
        c0, c1, c2, c3 = philox_round(c0, c1, c2, c3, k0, k1)
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def noise16(words, P: tl.constexpr, W: tl.constexpr):
    """`random_words` -> uniform 16-bit integers, int32 [P, 8 W]."""
    w0, w1, w2, w3 = words[0], words[1], words[2], words[3]
    n = _join8(w0 & 0xFFFF, w0 >> 16, w1 & 0xFFFF, w1 >> 16, w2 & 0xFFFF, w2 >> 16, w3 & 0xFFFF, w3 >> 16, P, W)
    return n.to(tl.int32, bitcast=True)


@triton.jit
def code(x, inverse, noise, MBITS: tl.constexpr, BIAS: tl.constexpr, MAX_CODE: tl.constexpr, CLIPS: tl.constexpr):
    """Magnitude codes of x * inverse, int32, saturating: stochastic with `noise`, else to nearest even.

    E2M1 to nearest comes as codes above 0x4A800000: the code of u is 2u rounded below 2, u + 2 below 4, u / 2 + 4
    beyond, which is the least of the three, for rounding is monotonic. At 2^22 one ulp is 1/2, so that the one
    rounding of each FMA is the rounding to the code.
    """
    if MBITS == 1 and noise is None:
        u = tl.abs(x)
        low = tl.fma(u, inverse, 4194304.0)
        middle = tl.fma(u, inverse * 0.5, 4194305.0)
        high = tl.fma(u, inverse * 0.25, 4194306.0)
        least = tl.minimum(tl.minimum(low, middle), high)
        if CLIPS:
            least = tl.minimum(least, 4194304.0 + MAX_CODE / 2)
        result = least.to(tl.int32, bitcast=True)
    else:
        SHIFT: tl.constexpr = 23 - MBITS
        STEP: tl.constexpr = 2.0 ** (1 - BIAS - MBITS)
        u = tl.abs(x) * inverse
        bits = u.to(tl.int32, bitcast=True)
        if noise is None:
            normal = (bits + ((1 << (SHIFT - 1)) - 1) + ((bits >> SHIFT) & 1)) >> SHIFT
            below = (u + STEP * 8388608.0).to(tl.int32, bitcast=True) & ((2 << MBITS) - 1)
        else:
            normal = (bits + (noise << (SHIFT - 16))) >> SHIFT
            # Only used below the least normal value; the others are kept in the range of int32.
            below = (tl.minimum(u * (65536.0 / STEP), 1073741824.0).to(tl.int32) + noise) >> 16
        result = tl.where(u < 2.0 ** (1 - BIAS), below, normal - ((127 - BIAS) << MBITS))
        result = tl.minimum(result, MAX_CODE)
    return result


@triton.jit
def value(x, inverse, noise, MBITS: tl.constexpr, BIAS: tl.constexpr, MAX_CODE: tl.constexpr, CLIPS: tl.constexpr):
    """The magnitude of x * inverse on the format's grid, FP32."""
    if MBITS == 1 and noise is None:
        # One ulp of 2^22 times a power of two is half that power: the add rounds to E2M1's step, subtracting is exact.
        u = tl.abs(x) * inverse
        binade = tl.maximum(u.to(tl.int32, bitcast=True) & 0x7F800000, 0x3F800000).to(tl.float32, bitcast=True)
        result = tl.fma(binade, -4194304.0, tl.fma(binade, 4194304.0, u))
        if CLIPS:
            result = tl.minimum(result, 6.0)
    else:
        codes = code(x, inverse, noise, MBITS, BIAS, MAX_CODE, CLIPS)
        normal = ((codes + ((127 - BIAS) << MBITS)) << (23 - MBITS)).to(tl.float32, bitcast=True)
        below = codes.to(tl.float32) * (2.0 ** (1 - BIAS - MBITS))
        result = tl.where(codes < (1 << MBITS), below, normal)
    return result


@triton.jit
def signed_scale(byte, bad, x, P: tl.constexpr, G: tl.constexpr):
    """The scale of each element with the element's sign, FP32 [P, G]; NaN in a bad block."""
    bits = tl.where(byte == 0, 0x00400000, byte << 23)  # 2^-127 is an FP32 subnormal
    bits = tl.where(bad, 0x7FC00000, bits)
    return (per_element(bits, P, G) | (x.to(tl.int32, bitcast=True) & -0x80000000)).to(tl.float32, bitcast=True)


@triton.jit
def sign_nibbles(x, P: tl.constexpr, W: tl.constexpr):
    """The signs of FP32 [P, 8 W] in the top bits of eight nibbles, uint32 [P, W]."""
    s0, s1, s2, s3, s4, s5, s6, s7 = split8(x.to(tl.uint32, bitcast=True), P, W)
    sign = ((s7 >> 28) << 4) | (s6 >> 28)
    sign = (sign << 4) | (s5 >> 28)
    sign = (sign << 4) | (s4 >> 28)
    sign = (sign << 4) | (s3 >> 28)
    sign = (sign << 4) | (s2 >> 28)
    sign = (sign << 4) | (s1 >> 28)
    sign = (sign << 4) | (s0 >> 28)
    return sign & 0x88888888


@triton.jit
def pack_fp4(codes, x, P: tl.constexpr, W: tl.constexpr, OFFSET: tl.constexpr):
    """Codes (int32 [P, 8 W], OFFSET above the code) with the signs of x -> eight nibbles a word, int32 [P, W]."""
    c0, c1, c2, c3, c4, c5, c6, c7 = split8(codes.to(tl.uint32, bitcast=True), P, W)
    word = (c7 << 4) + c6
    word = (word << 4) + c5
    word = (word << 4) + c4
    word = (word << 4) + c3
    word = (word << 4) + c2
    word = (word << 4) + c1
    word = (word << 4) + c0
    word -= (OFFSET * 0x11111111) & 0xFFFFFFFF
    return (word | sign_nibbles(x, P, W)).to(tl.int32, bitcast=True)


@triton.jit
def pack_fp8(codes, x, P: tl.constexpr, W: tl.constexpr):
    """Codes (int32 [P, 4 W]) with the signs of x -> four bytes a word, int32 [P, W]."""
    codes = codes | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)
    even, odd = tl.split(tl.reshape(codes, (P, W, 2, 2)))
    b0, b2 = tl.split(even)
    b1, b3 = tl.split(odd)
    return (b0 | (b1 << 8)) | ((b2 << 16) | (b3 << 24))
