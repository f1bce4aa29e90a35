"""The element formats of the OCP Microscaling (MX) specification, v1.0, and their bit layouts.

An MX block is 32 elements that share one E8M0 scale: a byte b stands for 2^(b - 127), b = 0 is 2^-127 (not zero) and
b = 255 is NaN. Elements are E2M1 (FP4), E4M3 or E5M2 (FP8); all are sign, exponent, mantissa from the top bit down.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 32
E8M0_BIAS = 127
E8M0_NAN = 255


@dataclass(frozen=True)
class ElemFormat:
    """A small floating-point format: `ebits` exponent and `mbits` mantissa bits, exponent bias `bias`.

    `max_code` is the code of the largest finite magnitude: E4M3 keeps the code above it for NaN, E5M2 the top
    exponent for infinities (spec sections 5.3.1 to 5.3.3).
    """

    name: str
    ebits: int
    mbits: int
    bias: int
    max_code: int

    @property
    def bits(self) -> int:
        return 1 + self.ebits + self.mbits

    @property
    def sign_code(self) -> int:
        """The sign bit, as a code."""
        return 1 << (self.ebits + self.mbits)

    @property
    def max(self) -> float:
        """Largest finite value: 6, 448, 57344."""
        exponent, mantissa = self.max_code >> self.mbits, self.max_code & ((1 << self.mbits) - 1)
        return (1 + mantissa / (1 << self.mbits)) * 2.0 ** (exponent - self.bias)

    @property
    def emax(self) -> int:
        """Exponent of the largest finite value: 2, 8, 15."""
        return (self.max_code >> self.mbits) - self.bias

    @property
    def min_normal(self) -> float:
        return 2.0 ** (1 - self.bias)

    @property
    def step(self) -> float:
        """Distance between neighbours below `min_normal`; also the smallest positive value."""
        return 2.0 ** (1 - self.bias - self.mbits)

    def values(self) -> Tensor:
        """The value of every code, FP32 [2^bits]; codes beyond `max_code` (NaN, infinities) read as NaN."""
        code = torch.arange(1 << (self.bits - 1), device="cpu")
        exponent, mantissa = code >> self.mbits, (code & ((1 << self.mbits) - 1)).float()
        fraction = (exponent > 0).float() + mantissa / (1 << self.mbits)
        value = fraction * torch.exp2(exponent.clamp(min=1).float() - self.bias)
        value = torch.where(code <= self.max_code, value, torch.nan)
        return torch.cat([value, -value])


E2M1 = ElemFormat("e2m1", ebits=2, mbits=1, bias=1, max_code=0b0111)
E4M3 = ElemFormat("e4m3", ebits=4, mbits=3, bias=7, max_code=0b01111110)
E5M2 = ElemFormat("e5m2", ebits=5, mbits=2, bias=15, max_code=0b01111011)
ELEMS = {f.name: f for f in (E2M1, E4M3, E5M2)}


def elem_format(name: str) -> ElemFormat:
    """The format called `name`. Raises ValueError that lists the known ones."""
    return ELEMS[one_of("elem", name, ELEMS)]


def one_of(argument: str, value, allowed):
    """`value` if it is in `allowed`; else a ValueError that names the argument, the value and what is allowed."""
    if not any(type(value) is type(a) and value == a for a in allowed):
        raise ValueError(f"{argument}={value!r} is not known; allowed: {', '.join(map(repr, allowed))}")
    return value


def as_index(argument: str, value) -> int:
    """`value` as an int, also where it is a NumPy integer; else a TypeError that names the argument and the value."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value  # not through `index`, which would make torch.compile specialise on the value
    if not isinstance(value, (bool, Tensor)):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise TypeError(f"{argument} must be an integer, got {value!r}")


FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check_float(x) -> None:
    """Raise TypeError unless `x` is a tensor of one of the four dtypes that every function here takes."""
    if not isinstance(x, Tensor) or x.dtype not in FLOATS:
        kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"x must be a float32, bfloat16, float16 or float64 tensor, got {kind}")


def encode(value: Tensor, fmt: ElemFormat) -> Tensor:
    """Codes (uint8) of FP32 values that `fmt` represents exactly: what `rounding.py` returns. Keeps the sign of 0."""
    bits = value.view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    normal = (magnitude >> (23 - fmt.mbits)) - ((127 - fmt.bias) << fmt.mbits)
    below = (value.abs() * (1.0 / fmt.step)).to(torch.int32)  # exact: a multiple of the step
    code = torch.where(normal < (1 << fmt.mbits), below, normal)
    return (code | ((bits >> 31) & fmt.sign_code)).to(torch.uint8)


def decode(code: Tensor, fmt: ElemFormat) -> Tensor:
    """FP32 values of uint8 codes."""
    return fmt.values().to(code.device)[code.to(torch.int32)]


def pack_nibbles(code: Tensor) -> Tensor:
    """uint8 [..., K] of 4-bit codes -> uint8 [..., K/2], the even element in the low nibble."""
    return code[..., 0::2] | (code[..., 1::2] << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """The inverse of `pack_nibbles`: uint8 [..., K/2] -> uint8 [..., K]."""
    return torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(-2)


def transposed_copy(x: Tensor) -> Tensor:
    """The transpose of [R, C] in memory of its own, also where one row or column makes the two look alike.

    An operator's results must share none, with each other or with what it was given.
    """
    return x.t().clone(memory_format=torch.contiguous_format)


def e8m0_value(byte: Tensor) -> Tensor:
    """FP32 value of E8M0 bytes. 2^-127 is an FP32 subnormal, so the bits are built rather than computed."""
    b = byte.to(torch.int32)
    bits = torch.where(b == 0, 0x00400000, b << 23)
    bits = torch.where(b == E8M0_NAN, 0x7FC00000, bits)
    return bits.view(torch.float32)
