"""The frames behind the chapters on the format and the Hadamard transform say what the chapters say."""

from __future__ import annotations

import math

import pytest

from mxfp4.pages.chapters import format as fmt
from mxfp4.pages.chapters import hadamard as rot

RULES = ["floor", "even", "ceil", "rceil"]


def test_codes_and_formats():
    assert fmt.codes()["value"].tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert fmt.formats()["bits a value"].tolist() == [4.25, 8.25, 8.25]


def test_each_rule_puts_the_maximum_where_its_definition_says():
    """maximum/scale: floor [4, 8), even [3.5, 7), ceil (2, 4], rceil (3, 6]."""
    found = fmt.scale_choice(points=256).groupby("rule")["filled"]
    assert found.min().loc[RULES].tolist() == [4, 3.5, 2 + 2 / 256, 3 + 3 / 384]
    assert found.max().loc[RULES].tolist() == [8 - 4 / 256, 7 - 4 / 256, 4, 6]


def test_only_floor_and_even_clip_and_the_maximum_pays():
    block = fmt.one_block(amax=6.75, seed=1)
    clipped = block.groupby("rule")["clipped"].sum()
    assert {rule for rule in RULES if clipped[rule]} == {"floor", "even"}
    assert block.groupby("rule")["scale"].first().loc[RULES].tolist() == [1, 1, 2, 2]
    assert block.loc[block["clipped"], "quantized"].abs().eq(6).all()
    share = fmt.error_by_place(blocks=64, points=9).groupby("rule")["clipped"].sum()
    assert share["floor"] > share["even"] > 0 == share["ceil"] == share["rceil"]


def test_staircase_is_monotonic_and_ends_at_the_top_of_the_grid():
    steps = fmt.staircase(["even"], amax=6.75)
    assert steps["quantized"].is_monotonic_increasing and steps["quantized"].iloc[-1] == 6
    assert steps["quantized"].nunique() == 8


def test_stochastic_rounding_is_unbiased_exactly_where_nothing_is_clipped():
    draws = 2000
    bound = 5 * 1.0 / math.sqrt(draws)  # five sigma at the widest gap, 2, and the worst place in it
    for rule, amax, clips in (("rceil", 7.0, False), ("floor", 7.0, True)):
        means = fmt.rounding_means(rule=rule, amax=amax, draws=draws, points=15)
        bias = means[means["rounding"] == "stochastic"].set_index("value")["bias"]
        inside = bias[bias.index <= 6]
        assert inside.abs().max() < bound * (1 if rule == "floor" else 2)
        assert (bias.iloc[-1] == -1) == clips


def test_packing_is_low_nibble_first():
    assert fmt.packing((1.0, 2.0))["byte"].tolist() == ["0x42"]


@pytest.mark.parametrize("signs", [None, "seed"])
@pytest.mark.parametrize("size", [16, 32, 128])
def test_rotation_cancels_in_all_three_products_and_only_in_pairs(size, signs):
    found = rot.cancellation(size=size, signs=signs)
    assert found["gemm"].tolist() == ["Fprop", "Dgrad", "Wgrad"]
    assert found["both sides"].max() < 1e-6 < 0.1 < found["one side"].min()


def test_rotation_keeps_values_that_an_outlier_would_flush():
    zeros = rot.outlier_block(20.0, ["none", "H16", "H32"]).groupby("rotation")["zero"].sum()
    assert zeros["none"] > zeros["H16"] > zeros["H32"]
    errors = rot.error_by_outlier([0, 16], ["none", "H16"], blocks=64).set_index(["part", "outlier", "rotation"])[
        "error"
    ]
    assert errors["all but the outlier", 16, "none"] > 1.4 * errors["all but the outlier", 16, "H16"]
    assert errors["whole block", 0, "none"] == pytest.approx(errors["whole block", 0, "H16"], rel=0.1)
    products = rot.gemm_error_by_outlier([16], ["none", "H16"], size=32).set_index("rotation")["error"]
    assert products["none"] > 1.2 * products["H16"]


def test_fixed_errors_stay_and_random_ones_average_out():
    found = rot.averaged_error(["none", "H16", "random H16", "H16, stochastic"], steps=16)
    left = found[found["steps"] == 16].set_index("variant")["left"]
    assert left["none"] == pytest.approx(1) and left["H16"] == pytest.approx(1)
    assert 1 / 4 < left["random H16"] < 0.5 and 0.2 < left["H16, stochastic"] < 0.5
    one = found[found["steps"] == 1].set_index("variant")["one"]
    assert one["H16, stochastic"] > one["H16"]
