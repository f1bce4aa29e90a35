"""The same as `block_math.py` in the instructions of one chip, with the same bits: packed E2M1 only.

| NATIVE | target            | to nearest                                         | stochastic              |
|--------|-------------------|----------------------------------------------------|-------------------------|
| 90     | NVIDIA sm_90 up   | two elements an instruction, in BF16 rounded to odd | FP32 subnormals, `mul.rz` |
| 100    | NVIDIA sm_100     | `cvt.rn.satfinite.e2m1x2.f32`                      | as 90                   |
| 950    | AMD gfx950        | `v_cvt_scalef32_pk_fp4_f32`                        | as everywhere           |

Neither chip's own stochastic conversion is used: their random bits enter elsewhere than in `rounding.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mxfp4.numerics.kernels.triton.block_math import max_nan, sign_nibbles, split8


@triton.jit
def to_float32(x, NATIVE: tl.constexpr):
    """BF16 [...] in FP32: on NVIDIA one instruction an element (a shift or a mask of the pair that memory holds)."""
    if NATIVE == 90 or NATIVE == 100:
        bits = tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xFFFF0000;",
            "=r,=r,r", [x], dtype=tl.int32, is_pure=True, pack=2,
        )  # fmt: skip
        x = bits.to(tl.float32, bitcast=True)
    return x.to(tl.float32)


# NVIDIA sm_90: packed BF16


@triton.jit
def halves(x, P: tl.constexpr, W: tl.constexpr):
    """[P, 8 W] -> elements j and j + 4 of each 8 as two BF16 in an int32 [P, W]: four magnitudes, four signs.

    FP32 magnitudes are rounded to odd: truncated, the last bit set if anything was lost. Such a number stays on its
    side of every value of seven bits or fewer, of each midpoint of E2M1's grid and each threshold of the scale rules,
    so that what follows decides as it would on the FP32 value. The signs are bit 15 of each half, above bits that mean
    nothing. BF16 comes as it is.
    """
    x0, x1, x2, x3, x4, x5, x6, x7 = split8(x, P, W)
    if x.dtype == tl.bfloat16:
        s0, s1, s2, s3 = _bf16_pair(x0, x4), _bf16_pair(x1, x5), _bf16_pair(x2, x6), _bf16_pair(x3, x7)
        u0, u1, u2, u3 = s0 & 0x7FFF7FFF, s1 & 0x7FFF7FFF, s2 & 0x7FFF7FFF, s3 & 0x7FFF7FFF
    else:
        u0, s0 = _odd_pair(x0, x4)
        u1, s1 = _odd_pair(x1, x5)
        u2, s2 = _odd_pair(x2, x6)
        u3, s3 = _odd_pair(x3, x7)
    return u0, u1, u2, u3, s0, s1, s2, s3


@triton.jit
def _bf16_pair(low, high):
    low = low.to(tl.uint16, bitcast=True).to(tl.uint32)
    high = high.to(tl.uint16, bitcast=True).to(tl.uint32)
    return (low | (high << 16)).to(tl.int32, bitcast=True)


@triton.jit
def _odd_pair(low, high):
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 rest, one;
        mov.b32 one, 0x00010001;
        prmt.b32 $1, $2, $3, 0x7632;
        prmt.b32 rest, $2, $3, 0x5410;
        min.u16x2 rest, rest, one;
        lop3.b32 $0, $1, 0x7FFF7FFF, rest, 0xEA;
        }
        """,
        "=&r,=&r,r,r", [low, high], dtype=(tl.int32, tl.int32), is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _half_max(a, b):
    return tl.inline_asm_elementwise(
        "max.NaN.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def halves_amax(h, P: tl.constexpr, B: tl.constexpr):
    """Largest magnitude of each block, FP32 [P, B], from `halves` of [P, 32 B]."""
    words = _half_max(_half_max(h[0], h[1]), _half_max(h[2], h[3]))
    a, b = tl.split(tl.reshape(words, (P, B * 2, 2)))
    a, b = tl.split(tl.reshape(_half_max(a, b), (P, B, 2)))
    both = _half_max(a, b)
    return max_nan((both << 16).to(tl.float32, bitcast=True), (both & -65536).to(tl.float32, bitcast=True))


@triton.jit
def _half_code(half, low, middle, high, CLIPS: tl.constexpr):
    """The two E2M1 codes of a pair, each above 0x4280 in its half: `block_math.code` in BF16, 2^6 for 2^22."""
    code = tl.inline_asm_elementwise(
        """
        {
        .reg .b32 a, b, c;
        mov.b32 a, 0x42804280;
        mov.b32 b, 0x42824282;
        mov.b32 c, 0x42844284;
        fma.rn.bf16x2 a, $1, $2, a;
        fma.rn.bf16x2 b, $1, $3, b;
        fma.rn.bf16x2 c, $1, $4, c;
        min.bf16x2 a, a, b;
        min.bf16x2 $0, a, c;
        }
        """,
        "=r,r,r,r,r", [half, low, middle, high], dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip
    if CLIPS:
        code = tl.inline_asm_elementwise(
            "{ .reg .b32 a; mov.b32 a, 0x42874287; min.bf16x2 $0, $1, a; }",
            "=r,r", [code], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    return code


@triton.jit
def pack_halves(h, inverse, CLIPS: tl.constexpr):
    """`halves` times inverse (FP32 [P, 1], powers of two) -> eight E2M1 codes a word, int32 [P, W]."""
    low, middle, high = tl.inline_asm_elementwise(
        """
        {
        .reg .b32 half, quarter, zero;
        mov.b32 half, 0x3F003F00;
        mov.b32 quarter, 0x3E803E80;
        mov.b32 zero, 0x80008000;
        prmt.b32 $0, $3, $3, 0x3232;
        fma.rn.bf16x2 $1, $0, half, zero;
        fma.rn.bf16x2 $2, $0, quarter, zero;
        }
        """,
        "=&r,=&r,=r,r", [inverse], dtype=(tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
    )  # fmt: skip
    c0 = _half_code(h[0], low, middle, high, CLIPS)
    c1 = _half_code(h[1], low, middle, high, CLIPS)
    c2 = _half_code(h[2], low, middle, high, CLIPS)
    c3 = _half_code(h[3], low, middle, high, CLIPS)
    # prmt repeats the sign bit of a byte over it: elements 0, 2, 4, 6 and 1, 3, 5, 7 of each 8, in order.
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 word, even, odd;
        mad.lo.u32 word, $4, 16, $3;
        mad.lo.u32 word, word, 16, $2;
        mad.lo.u32 word, word, 16, $1;
        add.u32 word, word, 286332288;
        prmt.b32 even, $5, $7, 0xFBD9;
        prmt.b32 odd, $6, $8, 0xFBD9;
        lop3.b32 even, even, 0x08080808, word, 0xEA;
        lop3.b32 $0, odd, 0x80808080, even, 0xEA;
        }
        """,
        "=r,r,r,r,r,r,r,r,r", [c0, c1, c2, c3, h[4], h[5], h[6], h[7]], dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


# NVIDIA sm_90: stochastic rounding


@triton.jit
def _stochastic_pair(a, b, words0, words1, inverse, SELECT: tl.constexpr, CLIPS: tl.constexpr):
    """Stochastic E2M1 magnitudes of two elements in the bytes 1 and 3 of an int32.

    Times 2^-126, what lies below E2M1's least normal value is an FP32 subnormal: the bits of every value are its code
    and, below, its binary places. `mul.rz` truncates at 2^-23, finer than the random bits. SELECT puts 16 random bits
    of the words under bit 24, where the code begins.
    """
    code = tl.inline_asm_elementwise(
        """
        {
        .reg .f32 u, v;
        .reg .b32 a, b, zero, noise;
        mov.b32 zero, 0;
        abs.f32 u, $1;
        abs.f32 v, $2;
        mul.rn.f32 u, u, $5;
        mul.rn.f32 v, v, $5;
        mul.rz.f32 u, u, 0f00800000;
        mul.rz.f32 v, v, 0f00800000;
        mov.b32 a, u;
        mov.b32 b, v;
        prmt.b32 noise, $3, zero, $6;
        mad.lo.u32 a, a, 4, noise;
        prmt.b32 noise, $4, zero, $6;
        mad.lo.u32 b, b, 4, noise;
        prmt.b32 $0, a, b, 0x7632;
        }
        """,
        "=r,f,f,r,r,f,r", [a, b, words0, words1, inverse, SELECT], dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip
    if CLIPS:
        code = tl.inline_asm_elementwise(
            "{ .reg .b32 a; mov.b32 a, 0x07FF07FF; min.u16x2 $0, $1, a; }",
            "=r,r", [code], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    return code


@triton.jit
def pack_stochastic(x, words, inverse, CLIPS: tl.constexpr, P: tl.constexpr, W: tl.constexpr):
    """FP32 [P, 8 W] times inverse ([P, 1]), rounded by `random_words` -> eight codes a word, int32 [P, W]."""
    x0, x1, x2, x3, x4, x5, x6, x7 = split8(x, P, W)
    c02 = _stochastic_pair(x0, x2, words[0], words[1], inverse, 0x4104, CLIPS)
    c13 = _stochastic_pair(x1, x3, words[0], words[1], inverse, 0x4324, CLIPS)
    c46 = _stochastic_pair(x4, x6, words[2], words[3], inverse, 0x4104, CLIPS)
    c57 = _stochastic_pair(x5, x7, words[2], words[3], inverse, 0x4324, CLIPS)
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 even, odd, s, t;
        prmt.b32 even, $1, $3, 0x7531;
        prmt.b32 odd, $2, $4, 0x7531;
        mad.lo.u32 even, odd, 16, even;
        prmt.b32 s, $5, $7, 0x00FB;
        prmt.b32 t, $9, $11, 0x00FB;
        prmt.b32 s, s, t, 0x5410;
        lop3.b32 even, s, 0x08080808, even, 0xEA;
        prmt.b32 s, $6, $8, 0x00FB;
        prmt.b32 t, $10, $12, 0x00FB;
        prmt.b32 s, s, t, 0x5410;
        lop3.b32 $0, s, 0x80808080, even, 0xEA;
        }
        """,
        "=r,r,r,r,r,f,f,f,f,f,f,f,f", [c02, c13, c46, c57, x0, x1, x2, x3, x4, x5, x6, x7], dtype=tl.int32,
        is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def stochastic_value(x, noise, inverse, CLIPS: tl.constexpr):
    """FP32 [P, G] times inverse, rounded stochastically to E2M1's grid by 16 random bits: magnitudes, FP32."""
    bits = tl.inline_asm_elementwise(
        "mul.rz.f32 $0, $1, 0f00800000;",
        "=r,f", [tl.abs(x) * inverse], dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip
    bits = (bits + (noise << 6)) & -0x400000
    if CLIPS:
        bits = tl.minimum(bits, 7 << 22)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126


# Conversions of chips that multiply FP4


@triton.jit
def pack_converted(x, inverse, NATIVE: tl.constexpr, P: tl.constexpr, W: tl.constexpr):
    """FP32 [P, 8 W] times inverse ([P, 1]) -> eight E2M1 codes a word, int32 [P, W], by the chip's conversion."""
    if NATIVE == 100:
        x0, x1, x2, x3, x4, x5, x6, x7 = split8(x * inverse, P, W)
        word = tl.inline_asm_elementwise(
            """
            {
            .reg .b8 a, b, c, d;
            cvt.rn.satfinite.e2m1x2.f32 a, $2, $1;
            cvt.rn.satfinite.e2m1x2.f32 b, $4, $3;
            cvt.rn.satfinite.e2m1x2.f32 c, $6, $5;
            cvt.rn.satfinite.e2m1x2.f32 d, $8, $7;
            mov.b32 $0, {a, b, c, d};
            }
            """,
            "=r,f,f,f,f,f,f,f,f", [x0, x1, x2, x3, x4, x5, x6, x7], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        # The scale operand stays 1 and the signs are set apart: only the rounding and the saturation of a magnitude
        # are asked of the instruction, so that neither subnormal scales nor the sign of zero can differ.
        x0, x1, x2, x3, x4, x5, x6, x7 = split8(tl.abs(x) * inverse, P, W)
        word = tl.inline_asm_elementwise(
            """
            v_cvt_scalef32_pk_fp4_f32 $0, $1, $2, 1.0
            v_cvt_scalef32_pk_fp4_f32 $0, $3, $4, 1.0 op_sel:[0,0,1,0]
            v_cvt_scalef32_pk_fp4_f32 $0, $5, $6, 1.0 op_sel:[0,0,0,1]
            v_cvt_scalef32_pk_fp4_f32 $0, $7, $8, 1.0 op_sel:[0,0,1,1]
            """,
            "=&v,v,v,v,v,v,v,v,v", [x0, x1, x2, x3, x4, x5, x6, x7], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
        word = word | sign_nibbles(x, P, W).to(tl.int32, bitcast=True)
    return word
