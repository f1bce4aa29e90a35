"""Recipes side by side, and the two-sided rotation's cancellation."""

import pytest

from mxfp4.analysis.study import studies
from mxfp4.pages.chapters import recipes as recipe_tables
from mxfp4.studies.plans import FULL
from mxfp4.studies.store import Store
from tests.fakes.studies import config, probe_rows, put


@pytest.mark.parametrize("size", [16, 32])
def test_two_sided_rotations_cancel_in_all_three_products(size):
    frame = recipe_tables.cancellation_frame(size)
    assert len(frame) == 3 and (frame["error"] < 1e-6).all() and (frame["left"] > 0.5).all()


def test_recipes_are_shown_as_their_operands():
    names = [*recipe_tables.FP8_SOURCES, *recipe_tables.SOURCES, "ti2d"]
    frame = recipe_tables.recipes_frame(names).set_index("recipe")
    assert frame.loc["fp8+delayed", "dgrad"] == "fp8 e5m2 delayed most_recent | fp8 e4m3 delayed most_recent"
    assert frame.loc["fp8-block", "fprop"] == "fp8-block e4m3 1d | fp8-block e4m3 2d"
    assert frame.loc["fp8-block", "source"] == "DeepSeek-V3"
    assert frame.loc["tseng", "fprop"] == "bf16" and frame.loc["tseng", "wgrad"] == "mxfp4 1d floor sr x3/4 rht64"
    assert frame.loc["quartet", "fprop"] == "mxfp4 1d h32, scale by spread"
    assert frame.loc["mxfp4+h16+tail15", "besides"] == "last 15% of the layers in bf16"
    assert "mxfp8" in frame.loc["ti2d", "besides"]
    assert set(recipe_tables.SOURCES) <= set(FULL["others"])


def test_properties_are_of_each_arms_own_tensors(tmp_path):
    store = Store(tmp_path)
    rows = [
        *probe_rows("mismatch", {"mxfp4+2d+hh16": 0.0, "mxfp4": 0.3}, gemm="", tensor="w", spread=0),
        *probe_rows("error", {"mxfp4+2d+hh16": 0.2}, gemm="wgrad", tensor="dw", spread=0),
    ]
    put(store, config("mxfp4+2d+hh16", probe_steps=(100, 101)), probes=rows)
    put(store, config("mxfp4+2d"))
    frame = recipe_tables.properties_frame(studies(store.load())[0], ["mxfp4+2d", "mxfp4+2d+hh16", "ti2d"]).set_index(
        "arm"
    )
    assert list(frame.index) == ["mxfp4+2d", "mxfp4+2d+hh16"]
    assert frame.loc["mxfp4+2d+hh16", "mismatch of W"] == 0 and frame.loc["mxfp4+2d+hh16", "error of dW"] == 0.2
    assert frame.loc["mxfp4+2d"].isna().all()
