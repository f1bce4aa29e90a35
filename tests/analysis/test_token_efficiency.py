"""Crossings and overheads on curves whose answer is known."""

import math

import numpy as np
import pandas as pd
import pytest

from mxfp4.analysis.token_efficiency import crossing, paired_mean, speedup


def curve(points):
    return pd.DataFrame(points, columns=["tokens", "eval_loss"])


CURVE = curve([(0, 6.0), (50, math.nan), (100, 4.0), (150, math.nan), (200, 3.0), (300, 3.2), (400, 2.9)])


@pytest.mark.parametrize(
    ("target", "tokens"),
    [(4.0, 100), (3.5, 150), (3.0, 200), (2.95, 300 + 100 * 0.25 / 0.3), (2.9, 400), (7.0, 0), (2.8, None)],
)
def test_crossing_is_interpolated_at_the_first_time(target, tokens):
    assert crossing(CURVE, target) == (None if tokens is None else pytest.approx(tokens))


def test_crossing_survives_a_diverged_end():
    assert crossing(curve([(0, 6.0), (100, 4.0), (200, math.nan)]), 5.0) == pytest.approx(50)


def test_bootstrap_interval_against_the_normal_one():
    values = np.random.default_rng(1).standard_normal(400)
    estimate = paired_mean(dict(enumerate(values)))
    half = 1.96 * values.std() / 20
    assert estimate.low == pytest.approx(values.mean() - half, abs=0.01)
    assert estimate.high == pytest.approx(values.mean() + half, abs=0.01)
    assert math.isnan(paired_mean({}).mean)


def test_speedup_is_the_arithmetic_of_table_2():
    assert round(float(speedup(1.21, 0.08)), 2) == 1.12
