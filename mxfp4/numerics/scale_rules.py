"""The four rules that turn a block's largest magnitude into its E8M0 scale byte.

| rule  | exponent of the scale        | amax/scale (E2M1) | clips     | who uses it                           |
|-------|------------------------------|-------------------|-----------|---------------------------------------|
| floor | floor(log2 amax) - emax      | [4, 8)            | (6, 8)    | OCP MX 1.0 section 6.3                |
| even  | of amax rounded to the element's mantissa, - emax | [3.5, 7) | (6, 7) | ROCm Transformer Engine, aiter |
| ceil  | ceil(log2 amax) - emax       | (2, 4]            | never     |                                       |
| rceil | ceil(log2(amax / max))       | (3, 6]            | never     | P2 "truncation-free", TetraJet        |

All are integer arithmetic on the FP32 bits of amax: a float logarithm or division would misround next to powers of
two, and differ between devices. FP32 subnormals have exponent field 0, whose byte is 0 under every rule, because
emax >= 2 takes them below 2^-127, the smallest scale.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mxfp4.numerics.formats import E8M0_NAN, ElemFormat, one_of

SCALE_RULES = ("floor", "even", "ceil", "rceil")
DEFAULT_SCALE_RULE = "even"
"""Of `mxfp4.quantize` and of recipes: what ROCm Transformer Engine runs."""


def rule_addend(fmt: ElemFormat, rule: str) -> int:
    """What to add to the FP32 bits of amax so that the exponent field of the sum is the rule's exponent + emax.

    floor adds nothing; ceil carries for any mantissa above 0, rceil for one above the mantissa of `fmt.max`, even for
    one that rounds up to 2 with the element's own number of mantissa bits (ties up).
    """
    one_of("scale_rule", rule, SCALE_RULES)
    carry_above = {
        "floor": (1 << 23) - 1,
        "even": (1 << 23) - (1 << (22 - fmt.mbits)) - 1,
        "ceil": 0,
        "rceil": (fmt.max_code & ((1 << fmt.mbits) - 1)) << (23 - fmt.mbits),
    }[rule]
    return (1 << 23) - 1 - carry_above


def scale_byte(amax: Tensor, fmt: ElemFormat, rule: str) -> Tensor:
    """E8M0 bytes (uint8) for block maxima `amax` (FP32, >= 0). Zero: byte 0. NaN or infinity: byte 255."""
    bits = amax.view(torch.int32) & 0x7FFFFFFF  # a vectorized maximum may set the sign of the NaN that it returns
    byte = ((bits + rule_addend(fmt, rule)) >> 23) - fmt.emax
    byte = torch.where(bits >= 0x7F800000, E8M0_NAN, byte.clamp(min=0))
    return byte.to(torch.uint8)


def inverse_scale(byte: Tensor) -> Tensor:
    """2^(127 - byte) in FP32, exact for bytes 0 to 253: the largest that a finite FP32 amax gives. NaN stays NaN."""
    b = byte.to(torch.int32)
    return torch.where(b == E8M0_NAN, 0x7FC00000, (254 - b) << 23).view(torch.float32)
