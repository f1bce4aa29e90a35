"""An oracle for MX quantization in exact rationals, written from the OCP MX v1.0 text and not from the package.

For a block with largest magnitude `amax` and an element format with largest exponent `emax`, largest value `vmax` and
`m` mantissa bits:

    scale exponent: floor  floor(log2 amax) - emax            (section 6.3)
                    ceil   ceil(log2 amax) - emax
                    rceil  ceil(log2(amax / vmax))
                    even   floor(log2 r) - emax, r = amax rounded to m mantissa bits, ties up
    byte           = clamp(exponent + 127, 0, 254); zero block: 0; NaN or infinity in the block: 255
    element        = the nearest value of the format to v / 2^(byte - 127), ties to the even code, saturating

Two details that are easy to get wrong: byte 0 is 2^-127 (not zero), and a negative value that rounds to zero keeps
its sign. Everything here may be asserted to the bit. Stochastic rounding may only be asserted to land on one of the
two neighbours, with the mean of many draws inside its interval.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from fractions import Fraction

BLOCK = 32
NAN_BYTE = 255


def _fp8(exponent_bits: int, mantissa_bits: int, bias: int, codes: int) -> tuple[Fraction, ...]:
    """Magnitudes of codes 0 .. codes - 1: m/2^M * 2^(1-bias) where the exponent field is 0, else (1+m/2^M) * 2^(e-bias)."""
    values = []
    for code in range(codes):
        e, m = divmod(code, 2**mantissa_bits)
        fraction = Fraction(m, 2**mantissa_bits) + (1 if e else 0)
        values.append(fraction * Fraction(2) ** (max(e, 1) - bias))
    assert values == sorted(values) and (codes - 1) >> mantissa_bits < 2**exponent_bits
    return tuple(values)


@dataclass(frozen=True)
class Format:
    magnitudes: tuple[Fraction, ...]  # by code, without the sign
    mantissa_bits: int
    sign_code: int

    @property
    def vmax(self) -> Fraction:
        return self.magnitudes[-1]

    @property
    def emax(self) -> int:
        return floor_log2(self.vmax)


FORMATS = {
    "e2m1": Format(tuple(Fraction(v) for v in (0, 0.5, 1, 1.5, 2, 3, 4, 6)), 1, 0x8),
    "e4m3": Format(_fp8(4, 3, 7, 127), 3, 0x80),  # code 127 is NaN
    "e5m2": Format(_fp8(5, 2, 15, 124), 2, 0x80),  # 124 is infinity, 125 to 127 are NaN
}
RULES = ("floor", "even", "ceil", "rceil")


def floor_log2(v: Fraction) -> int:
    e = v.numerator.bit_length() - v.denominator.bit_length()
    return e if Fraction(2) ** e <= v else e - 1


def ceil_log2(v: Fraction) -> int:
    e = floor_log2(v)
    return e if Fraction(2) ** e == v else e + 1


def scale_byte(values: list[float], elem: str, rule: str) -> int:
    if not all(math.isfinite(v) for v in values):
        return NAN_BYTE
    fmt = FORMATS[elem]
    amax = max(abs(Fraction(v)) for v in values)
    if amax == 0:
        return 0
    if rule == "floor":
        e = floor_log2(amax) - fmt.emax
    elif rule == "ceil":
        e = ceil_log2(amax) - fmt.emax
    elif rule == "rceil":
        e = ceil_log2(amax / fmt.vmax)
    else:
        ulp = Fraction(2) ** (floor_log2(amax) - fmt.mantissa_bits)
        e = floor_log2(math.floor(amax / ulp + Fraction(1, 2)) * ulp) - fmt.emax
    return min(max(e + 127, 0), 254)


def scale_value(byte: int) -> Fraction:
    return Fraction(2) ** (byte - 127)


def neighbours(magnitude: Fraction, fmt: Format) -> tuple[int, int]:
    """Codes of the largest value <= magnitude and the smallest >= it; both the top code beyond `vmax`."""
    top = len(fmt.magnitudes) - 1
    low = bisect_right(fmt.magnitudes, magnitude) - 1
    return low, min(bisect_left(fmt.magnitudes, magnitude), top)


def nearest_code(v: Fraction, fmt: Format) -> int:
    """Magnitude code of |v| rounded to nearest, ties to the even code, saturating."""
    low, high = neighbours(abs(v), fmt)
    below, above = abs(v) - fmt.magnitudes[low], fmt.magnitudes[high] - abs(v)
    return low if low == high or below < above or (below == above and low % 2 == 0) else high


def quantize_block(values: list[float], elem: str, rule: str) -> tuple[int, list[int]]:
    """(scale byte, codes) of one block of FP32 values; codes are 0 where the byte is 255."""
    byte = scale_byte(values, elem, rule)
    if byte == NAN_BYTE:
        return byte, [0] * len(values)
    fmt, scale = FORMATS[elem], scale_value(byte)
    sign = [fmt.sign_code if math.copysign(1, v) < 0 else 0 for v in values]
    return byte, [s | nearest_code(Fraction(v) / scale, fmt) for s, v in zip(sign, values, strict=True)]


def code_value(code: int, elem: str) -> Fraction:
    fmt = FORMATS[elem]
    magnitude = fmt.magnitudes[code & (fmt.sign_code - 1)]
    return -magnitude if code & fmt.sign_code else magnitude


def to_fp32(v: Fraction) -> float:
    """`v` as a float where FP32 holds it; infinity at and above 2^128."""
    if abs(v) >= Fraction(2) ** 128:
        return math.copysign(math.inf, v)
    return float(v)


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int], rounds: int) -> tuple[int, int, int, int]:
    """Philox4x32 of Salmon et al., SC 2011, figure 4, in Python integers."""
    c, (k0, k1) = list(counter), key
    for _ in range(rounds):
        high0, low0 = divmod(0xD2511F53 * c[0], 2**32)
        high1, low1 = divmod(0xCD9E8D57 * c[2], 2**32)
        c = [high1 ^ c[1] ^ k0, low1, high0 ^ c[3] ^ k1, low0]
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return tuple(c)
