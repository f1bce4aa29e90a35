"""The size axis: a row a size and arm, the trend a slope of differences within seeds."""

import math
from dataclasses import replace

import pytest

from mxfp4.analysis.study import studies
from mxfp4.pages.chapters import scaling
from mxfp4.pages.charts import render
from mxfp4.studies.store import Store
from tests.fakes.studies import BIG, config, put

LAYERS = (1, 3, 9)


def sizes(tmp_path, offset, seeds=(0, 1, 2), gone=()):
    """Studies of three sizes, smallest first; offset(size index, seed): the gap of mxfp4 to fp8."""
    store = Store(tmp_path)
    for i, n in enumerate(LAYERS):
        model = replace(BIG, n_layers=n)
        for seed in seeds:
            put(store, config("fp8", seed, model=model))
            diverged = 500 if (i, seed) in gone else None
            put(store, config("mxfp4", seed, model=model), offset=offset(i, seed), diverged_at=diverged)
    return sorted(studies(store.load()), key=lambda s: s.parameters)


def test_rows_are_sizes_and_arms_with_their_own_reference(tmp_path):
    found = sizes(tmp_path, lambda i, seed: 0.03 - 0.01 * i + 0.001 * seed)
    frame = scaling.size_frame(found, ["fp8", "mxfp4", "mxfp4+h16"])
    assert list(frame["parameters"]) == [s.parameters for s in found] and set(frame["arm"]) == {"mxfp4"}
    assert frame["gap"].to_list() == pytest.approx([0.031, 0.021, 0.011])
    assert (frame["gap_low"] < frame["gap"]).all() and (frame["overhead"] > 0).all()
    for quantity in ("gap", "overhead"):
        chart = scaling.size_chart(frame, quantity, title="T", unit="u")
        render(chart, "a caption")
        bars = chart.layer[1].data
        assert not bars["x"].duplicated().any()  # no bar on another
        assert (bars["x"] / frame["parameters"].to_numpy() - 1).abs().max() < 0.1


def test_an_overhead_that_misses_the_target_has_an_interval_to_the_end_of_the_budget(tmp_path):
    (study,) = studies(sizes(tmp_path, lambda i, seed: 2.0)[0].records)
    row = scaling.size_frame([study], ["mxfp4"], at=0.7).iloc[0]
    assert row["overhead_high"] >= 100 * (1 / 0.7 - 1) - 1e-9 and math.isfinite(row["overhead_high"])


def test_trend_is_the_slope_for_three_times_the_parameters(tmp_path):
    grows, shrinks, flat = (
        scaling.trend(
            sizes(tmp_path / str(k), lambda i, seed, k=k: 0.05 + k * 0.01 * i + 1e-4 * seed * i * (k or seed - 1)),
            ["mxfp4"],
        )
        for k in (1, -1, 0)
    )
    assert "the gap of mxfp4 grows with size" in grows.text and "shrinks" in shrinks.text
    assert "is not shown to grow or to shrink" in flat.text and "times larger than the largest here" in flat.text
    slope = float(grows.numbers["slope"].iloc[0].split()[0])
    steps = [
        math.log(b / a, 3)
        for a, b in zip(
            *[[replace(BIG, n_layers=n).n_params_non_embedding() for n in LAYERS][k:] for k in (0, 1)], strict=False
        )
    ]
    assert min(0.01 / s for s in steps) < slope < max(0.0102 / s for s in steps)


def test_two_seeds_of_one_sign_show_no_trend(tmp_path):
    found = sizes(tmp_path, lambda i, seed: 0.05 + (0.001, 0.02)[seed] * i, seeds=(0, 1))
    assert "is not shown to grow or to shrink" in scaling.trend(found, ["mxfp4"]).text


def test_a_slope_has_the_noise_of_each_size_apart(tmp_path):
    """Closed form: Student's, of two arms and two seeds a size; three equal sizes' noise has the outer two weigh in."""
    found = sizes(tmp_path, lambda i, seed: 0.01 * (seed if i == 0 else 0), seeds=(0, 1))
    gaps = [scaling._gaps(s, "mxfp4", "fp8") for s in found]
    e = scaling.slope(found, gaps, "mxfp4", "fp8")
    x = [math.log(s.parameters, 3) for s in found]
    weight = (x[0] - sum(x) / 3) / sum((v - sum(x) / 3) ** 2 for v in x)
    half = (
        abs(weight) * 12.706 * 0.01 / math.sqrt(2) / math.sqrt(2)
    )  # only the smallest size scatters, one degree of freedom
    assert e.value == pytest.approx(weight * 0.005, rel=1e-4)
    assert (e.low, e.high) == pytest.approx((e.value - half, e.value + half), rel=0.1)


def test_sizes_need_no_seed_in_common(tmp_path):
    one = sizes(tmp_path / "one", lambda i, seed: 0.05 + 1e-3 * seed)
    mixed = [one[0], sizes(tmp_path / "b", lambda i, seed: 0.03 + 1e-4 * seed, seeds=(3, 4))[1]]
    assert scaling.trend(mixed, ["mxfp4"]).numbers["seeds of each"].iloc[0] == "3, 2"
    alone = [one[0], sizes(tmp_path / "c", lambda i, seed: 0.03, seeds=(5,))[1]]
    assert math.isnan(scaling.slope(alone, [scaling._gaps(s, "mxfp4", "fp8") for s in alone], "mxfp4", "fp8").low)


def test_one_size_or_a_diverged_seed_says_less(tmp_path):
    whole = sizes(tmp_path, lambda i, seed: 0.01, gone=[(2, 1)])
    assert scaling.trend(whole, ["mxfp4"]).numbers["seeds of each"].iloc[0] == "3, 3, 2"
    assert scaling.trend(whole[:1], ["mxfp4"]).text.startswith("Not tested")
    assert len(scaling.size_frame(whole, ["mxfp4"])) == 3
