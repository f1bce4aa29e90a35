"""Hypothesis strategies: FP32 blocks over the whole exponent range, with the mantissas where rounding goes wrong."""

from __future__ import annotations

import struct

from hypothesis import strategies as st

# Mantissas of values and midpoints of E2M1, E5M2 and E4M3, each with its two FP32 neighbours.
_CRITICAL = [m << 18 for m in range(32)]
_MANTISSAS = sorted({(m + d) % 2**23 for m in _CRITICAL for d in (-1, 0, 1)})

mantissa = st.one_of(st.sampled_from(_MANTISSAS), st.integers(0, 2**23 - 1))


def fp32(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits))[0]


@st.composite
def block(draw, special: bool = False) -> list[float]:
    """32 FP32 values whose exponents lie at or below a drawn one (field 0 to 254); NaN and infinities if `special`."""
    top = draw(st.one_of(st.integers(0, 254), st.sampled_from([0, 1, 2, 3, 8, 9, 15, 16, 127, 253, 254])))
    spread = draw(st.sampled_from([0, 1, 3, 8, 30, 254]))
    element = st.builds(
        lambda sign, drop, m: fp32(sign << 31 | max(top - drop, 0) << 23 | m),
        st.integers(0, 1), st.integers(0, spread), mantissa,
    )  # fmt: skip
    element = st.one_of(element, st.sampled_from([0.0, -0.0]))
    if special:
        element = st.one_of(element, element, element, st.sampled_from([float("nan"), float("inf"), float("-inf")]))
    return draw(st.lists(element, min_size=32, max_size=32))
