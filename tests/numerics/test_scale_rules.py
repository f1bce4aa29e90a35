"""The four scale rules against exact rationals, over the whole range of FP32."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mxfp4.numerics.formats import ELEMS
from mxfp4.numerics.scale_rules import inverse_scale, rule_addend
from mxfp4.numerics.scale_rules import scale_byte as ours
from tests.fakes.oracle import FORMATS, RULES, scale_byte, scale_value
from tests.fakes.strategies import fp32, mantissa


def bytes_of(amax: list[float], elem: str, rule: str) -> list[int]:
    return ours(torch.tensor(amax, dtype=torch.float32), ELEMS[elem], rule).tolist()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("elem", FORMATS)
def test_every_exponent_with_the_critical_mantissas(elem, rule):
    """Every exponent field, with the mantissas at which some rule or format changes its mind and their neighbours."""
    critical = [0, 1, 2**23 - 1] + [(k << 18) + d for k in range(1, 32) for d in (-1, 0, 1)]
    amax = [fp32(e << 23 | m) for e in range(255) for m in critical]
    wrong = [
        (a, theirs, got)
        for a, got in zip(amax, bytes_of(amax, elem, rule), strict=True)
        if got != (theirs := scale_byte([a], elem, rule))
    ]
    assert not wrong, wrong[:5]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("elem", FORMATS)
@given(bits=st.lists(st.builds(lambda e, m: e << 23 | m, st.integers(0, 254), mantissa), min_size=1, max_size=50))
def test_any_amax(elem, rule, bits):
    amax = [fp32(b) for b in bits]
    assert bytes_of(amax, elem, rule) == [scale_byte([a], elem, rule) for a in amax]


@pytest.mark.parametrize("rule, low, high, closed_high", [
    ("floor", 4, 8, False), ("even", 3.5, 7, False), ("ceil", 2, 4, True), ("rceil", 3, 6, True),
])  # fmt: skip
def test_where_amax_over_scale_lies(rule, low, high, closed_high):
    """The ranges that the module's table states for E2M1."""
    amax = torch.logspace(-30, 30, 20001, base=2.0)
    ratio = amax.double() * inverse_scale(ours(amax, ELEMS["e2m1"], rule)).double()
    assert ratio.min() >= low and ratio.max() <= high
    assert (ratio == low).any() or ratio.min() < low * 1.01
    assert (ratio == high).any() == closed_high or ratio.max() < high


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("elem", FORMATS)
def test_zero_nan_and_infinity(elem, rule):
    amax = torch.tensor([0.0, float("inf"), float("nan")])
    assert ours(amax, ELEMS[elem], rule).tolist() == [0, 255, 255]


@pytest.mark.parametrize("elem", FORMATS)
def test_a_nan_with_its_sign_set_is_a_nan(elem):
    """What vectorized maxima return: all ones."""
    amax = torch.tensor([-1, -(2**22), 0x7FFFFFFF], dtype=torch.int32).view(torch.float32)
    assert ours(amax, ELEMS[elem], "floor").tolist() == [255, 255, 255]


def test_inverse_is_exact():
    inverse = inverse_scale(torch.arange(254, dtype=torch.uint8))
    assert inverse.tolist() == [float(1 / scale_value(b)) for b in range(254)]
    assert inverse_scale(torch.tensor([255], dtype=torch.uint8)).isnan()


def test_no_finite_amax_needs_more_than_byte_253():
    top = torch.tensor([torch.finfo(torch.float32).max])
    assert max(ours(top, fmt, rule).item() for fmt in ELEMS.values() for rule in RULES) == 253


def test_unknown_rule():
    with pytest.raises(ValueError, match="scale_rule='round' is not known; allowed: 'floor', 'even', 'ceil', 'rceil'"):
        rule_addend(ELEMS["e2m1"], "round")
