"""The size axis: a row a size and arm, the trend a slope of differences within seeds."""

import math
from dataclasses import replace

import pytest
from fake_studies import BIG, config, put

from mxfp4.experiments import scaling
from mxfp4.experiments.charts import render
from mxfp4.experiments.store import Store
from mxfp4.experiments.study import studies

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
        render(scaling.size_chart(frame, quantity, title="T", unit="u"), "a caption")


def test_an_overhead_that_misses_the_target_has_an_interval_to_the_end_of_the_budget(tmp_path):
    (study,) = studies(sizes(tmp_path, lambda i, seed: 2.0)[0].records)
    row = scaling.size_frame([study], ["mxfp4"], at=0.7).iloc[0]
    assert row["overhead_high"] >= 100 * (1 / 0.7 - 1) - 1e-9 and math.isfinite(row["overhead_high"])


def test_trend_is_the_slope_for_three_times_the_parameters(tmp_path):
    grows, shrinks, flat = (
        scaling.trend(sizes(tmp_path / str(k), lambda i, seed, k=k: 0.05 + k * 0.01 * i + 1e-4 * seed * i * (k or seed - 1)), ["mxfp4"])
        for k in (1, -1, 0)
    )
    assert "the gap of mxfp4 grows with size" in grows.text and "shrinks" in shrinks.text
    assert "is not shown to grow or to shrink" in flat.text and "times larger than the largest here" in flat.text
    slope = float(grows.numbers["slope"].iloc[0].split()[0])
    steps = [math.log(b / a, 3) for a, b in zip(*[[replace(BIG, n_layers=n).n_params_non_embedding() for n in LAYERS][k:] for k in (0, 1)])]
    assert min(0.01 / s for s in steps) < slope < max(0.0102 / s for s in steps)


def test_two_seeds_of_one_sign_show_no_trend(tmp_path):
    found = sizes(tmp_path, lambda i, seed: 0.05 + (0.001, 0.02)[seed] * i, seeds=(0, 1))
    assert "is not shown to grow or to shrink" in scaling.trend(found, ["mxfp4"]).text


def test_one_size_or_a_diverged_seed_says_less(tmp_path):
    whole = sizes(tmp_path, lambda i, seed: 0.01, gone=[(2, 1)])
    assert scaling.trend(whole, ["mxfp4"]).numbers["seeds"].iloc[0] == 2
    assert scaling.trend(whole[:1], ["mxfp4"]).text.startswith("Not tested")
    assert len(scaling.size_frame(whole, ["mxfp4"])) == 3
