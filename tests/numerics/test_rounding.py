"""Rounding to the element grids: nearest against exact rationals, stochastic against its own definition."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mxfp4
from mxfp4.numerics.formats import ELEMS, encode
from mxfp4.numerics.rounding import round_nearest, round_stochastic
from tests.fakes.oracle import FORMATS, nearest_code, neighbours
from tests.fakes.oracle import Fraction as F
from tests.fakes.strategies import fp32, mantissa

# Seven points, one in each interval of E2M1, and points of the FP8 formats: normal, below
# min_normal, below the smallest value.
SR_POINTS = {
    "e2m1": [0.55, 1.1, 1.75, 2.2, 3.3, 4.4, 5.9, 0.2, 0.0004],
    "e4m3": [1.03, 100.3, 300.0, 0.0161, 0.0111, 0.003, 0.0007],
    "e5m2": [1.1, 100.3, 33000.0, 6.5e-5, 5.1e-5, 2.2e-5, 3e-6],
}
ANCHOR = {"e2m1": 4.0, "e4m3": 256.0, "e5m2": 32768.0}  # 2^emax: floor then gives scale 1


@pytest.mark.parametrize("elem", FORMATS)
def test_nearest_at_every_value_midpoint_and_their_fp32_neighbours(elem):
    grid = FORMATS[elem].magnitudes
    points = [*grid, *((a + b) / 2 for a, b in itertools.pairwise(grid)), grid[-1] * 2, F(2) ** 120]
    at = torch.tensor([float(p) for p in points])
    at = torch.cat([at, torch.nextafter(at, torch.tensor(torch.inf)), torch.nextafter(at, torch.tensor(0.0))])
    at = torch.cat([at, -at])
    got = encode(round_nearest(at, ELEMS[elem]), ELEMS[elem]).tolist()
    sign = torch.signbit(at).int().tolist()
    want = [
        s * FORMATS[elem].sign_code + nearest_code(F(v), FORMATS[elem]) for s, v in zip(sign, at.tolist(), strict=True)
    ]
    assert [(v, w, g) for v, w, g in zip(at.tolist(), want, got, strict=True) if w != g] == []


value = st.builds(lambda s, e, m: fp32(s << 31 | e << 23 | m), st.integers(0, 1), st.integers(100, 150), mantissa)


@pytest.mark.parametrize("elem", FORMATS)
@given(values=st.lists(value, min_size=1, max_size=64), draw=st.sampled_from([0, 1, 2**15 - 1, 2**15, 2**16 - 1]))
def test_stochastic_lands_on_a_neighbour_as_its_bits_say(elem, values, draw):
    """Up exactly when (distance to the lower neighbour)/(gap), cut to 16 bits, plus the random bits reaches 2^16."""
    fmt = FORMATS[elem]
    x = torch.tensor(values)
    bits = torch.full(x.shape, draw, dtype=torch.int32)
    got = encode(round_stochastic(x, ELEMS[elem], bits), ELEMS[elem]).tolist()
    for v, code in zip(values, got, strict=True):
        low, high = neighbours(abs(F(v)), fmt)
        up = False
        if low != high:
            gap = fmt.magnitudes[high] - fmt.magnitudes[low]
            up = math.floor((abs(F(v)) - fmt.magnitudes[low]) / gap * 2**16) + draw >= 2**16
        assert code == (fmt.sign_code if math.copysign(1, v) < 0 else 0) + (high if up else low)


@pytest.mark.parametrize("elem", FORMATS)
def test_stochastic_keeps_what_the_format_holds(elem):
    fmt = ELEMS[elem]
    values = fmt.values()
    values = values[values.isfinite()]
    for draw in (0, 2**15, 2**16 - 1):
        bits = torch.full(values.shape, draw, dtype=torch.int32)
        assert torch.equal(round_stochastic(values, fmt, bits), values)
    assert torch.equal(round_nearest(values, fmt), values)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("elem, point", [(e, p) for e, points in SR_POINTS.items() for p in points])
def test_stochastic_is_unbiased(elem, point, sign):
    """10^5 draws at scale 1; the mean within 4 sigma of the value, plus the 2^-16 of a gap that the cut to 16 bits costs."""
    rows = -(-100_000 // 31)
    x = torch.full((rows, 32), sign * point)
    x[:, 0] = ANCHOR[elem]
    q = mxfp4.quantize(x, elem=elem, rounding="stochastic", seed=2026)
    assert (q.scale == 127).all()
    got = q.dequantize()[:, 1:].double()
    low, high = (float(FORMATS[elem].magnitudes[c]) for c in neighbours(F(x[0, 1].abs().item()), FORMATS[elem]))
    assert set(got.abs().unique().tolist()) <= {low, high}
    p = (x[0, 1].abs().item() - low) / (high - low)
    sigma = (high - low) * math.sqrt(p * (1 - p) / got.numel())
    assert abs(got.mean().item() - x[0, 1].item()) < 4 * sigma + (high - low) * 2**-16


@pytest.mark.parametrize("rule, biased", [("floor", True), ("even", True), ("ceil", False), ("rceil", False)])
def test_stochastic_at_the_block_maximum_is_biased_only_where_the_rule_clips(rule, biased):
    """SR on a clipping rule is biased low at the block maximum; on rceil it is not."""
    x = torch.zeros(50_000, 32)
    x[:, 0] = 6.9
    got = mxfp4.fake_quantize(x, scale_rule=rule, rounding="stochastic", seed=1)[:, 0].double()
    sigma = got.std().item() / math.sqrt(got.numel())
    assert (got.mean().item() < 6.9 - 10 * sigma - 0.5) == biased
    assert biased or abs(got.mean().item() - 6.9) < 4 * sigma + 2**-14


def test_stochastic_errors_of_neighbours_rows_streams_and_seeds_are_uncorrelated():
    x = torch.full((256, 512), 2.5)
    x[:, ::32] = 4.0
    free = torch.ones(512, dtype=torch.bool)
    free[::32] = False

    def error(**how):
        got = mxfp4.fake_quantize(x, rounding="stochastic", **how)
        return (got - x)[:, free].double()

    base = error(seed=5)
    pairs = {
        **{f"columns {k} apart": (base[:, k:], base[:, :-k]) for k in (1, 2, 4, 8, 31)},
        **{f"rows {k} apart": (base[k:], base[:-k]) for k in (1, 2, 128)},
        **{f"stream {s}": (base, error(seed=5, stream=s)) for s in (1, 2, 3)},
        **{f"seed {s}": (base, error(seed=s)) for s in (4, 6, 5 + 2**32)},
    }
    far = {}
    for name, (a, b) in pairs.items():
        corr = (a * b).mean() / (a.std() * b.std()) * math.sqrt(a.numel())
        if abs(corr) > 4:
            far[name] = corr.item()
    assert not far
