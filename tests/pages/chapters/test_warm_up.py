"""The warm-up pilot: its record as committed, and its sentences and charts on made-up runs whose answer is known."""

from __future__ import annotations

import json

import pytest

from mxfp4.errors import UserError
from mxfp4.pages.chapters import warm_up
from mxfp4.pages.charts import render
from mxfp4.publish.notebook import records_fingerprint

SHORT, LONG = "lr 0.002, warm-up 60", "lr 0.002, warm-up 200"


def run(recipe: str, seed: int, warmup: int, over: float, norm: float = 2.0, steps: int = 384) -> dict:
    """A run that lies `over` nats above a curve that all share, from step 128 on."""
    curve = [{"step": s, "eval_loss": 8 - s / 100 + 0.1 * seed + (over if s else 0)} for s in range(0, steps + 1, 128)]
    return {"recipe": recipe, "seed": seed, "lr": 0.002, "warmup": warmup, "steps": steps, "largest_grad_norm": norm,
            "at_step": 13, "curve": curve}  # fmt: skip


LAGGING = [
    *(run(recipe, seed, 60, over, norm, steps=512)
      for seed in (0, 1)
      for recipe, over, norm in (("bf16", 0.0, 3.0), ("fp8", 0.06, 9.0), ("mxfp4", 0.05, 8.0), ("mxfp4+sr", 0.2, 7.0))),
    run("bf16", 2, 60, 0.0, 99.0),
    *(run(recipe, seed, 200, 0.05) for seed in (0, 1) for recipe in ("bf16", "fp8")),
]  # fmt: skip


@pytest.fixture
def pilot(tmp_path):
    """Loads a pilot of given runs."""

    def make(runs: list[dict]) -> warm_up.Pilot:
        path = tmp_path / "pilot.json"
        path.write_text(json.dumps({"machine": "Chip", "runs": runs}))
        return warm_up.load(path)

    return make


def test_gaps_are_taken_within_a_seed_at_a_step_that_all_have(pilot):
    p = pilot(LAGGING)
    assert (p.last, p.first_study, p.settings) == (384, SHORT, [SHORT, LONG])
    frame = warm_up.gaps(p)
    assert set(frame["seed"]) == {0, 1}, "seed 2 has no fp8"
    ends = frame[frame["step"] == p.last].groupby("setting")["gap"].mean()
    assert ends[SHORT] == pytest.approx(0.06) and ends[LONG] == pytest.approx(0)
    assert f"+0.060 ({SHORT}), +0.000 ({LONG})" in warm_up.gap_text(p)


def test_which_arm_a_longer_warm_up_moves(pilot):
    text = warm_up.moved_text(pilot(LAGGING))
    assert "at lr 0.002 bf16 by +0.050 and fp8 by -0.010 nats" in text and "because bf16 gives up" in text
    gaining = [r for r in LAGGING if r["warmup"] == 60] + [run(r, s, 200, 0.0) for s in (0, 1) for r in ("bf16", "fp8")]
    text = warm_up.moved_text(pilot(gaining))
    assert "bf16 by +0.000 and fp8 by -0.060" in text and "gives up" not in text
    assert "two lengths" in warm_up.moved_text(pilot([r for r in LAGGING if r["warmup"] == 60]))


def test_what_a_comparison_with_fp8_alone_would_find(pilot):
    p = pilot(LAGGING)
    frame = warm_up.recipes_frame(p).set_index("recipe")
    assert list(frame.index) == ["mxfp4", "fp8", "mxfp4+sr"]
    assert frame.loc["mxfp4", "over_bf16"] == pytest.approx(0.05)
    assert frame.loc["mxfp4", "over_fp8"] == pytest.approx(-0.01)
    assert frame.loc["mxfp4", "over_fp8_seeds"] == "\u22120.010,\u00a0\u22120.010"
    text = warm_up.recipes_text(p)
    assert "3 of 3 recipes with quantized products end above bf16 in every seed" in text
    assert "1 of 2 recipes with MXFP4 end level or below on average: mxfp4." in text
    assert "Farthest above fp8 are mxfp4+sr (+0.140)" in text


def test_the_spike_is_not_taken_for_the_cause_where_it_ranks_otherwise(pilot):
    text = warm_up.norm_text(pilot(LAGGING))
    assert "99.0, is of bf16 (seed 2" in text and "-0.50 in seed 0 and -0.50 in seed 1" in text
    spiking = [{**r, "largest_grad_norm": 9 * r["curve"][1]["eval_loss"]} for r in LAGGING]
    assert "+1.00 in seed 0" in warm_up.norm_text(pilot(spiking)) and "not" not in warm_up.norm_text(pilot(spiking))


def test_charts_hold_a_line_a_seed_and_a_point_a_run(pilot):
    p = pilot(LAGGING)
    gap = warm_up.gap_chart(p, title="t", after=128).to_dict()
    rows = [r for rows in gap["datasets"].values() for r in rows if "gap" in r]
    assert len(rows) == (4 + 3) * 2 and min(r["step"] for r in rows) == 128
    render(warm_up.gap_chart(p, title="t"), "caption")
    _, made = render(warm_up.norm_chart(p, title="t"), "caption")
    ((_, points),) = made["mxfp4"]["vegalite"]["datasets"].items()
    assert len(points) == len(LAGGING)


def test_the_committed_pilot_is_whole():
    """Every pair of the settings that scale gpu was chosen from, and the setting that it took."""
    from mxfp4.studies.scales import SCALES

    p, scale = warm_up.load(), SCALES["gpu"]
    assert len(p.settings) == 5 and f"lr {scale.lr:g}, warm-up {scale.warmup}" in p.settings
    assert (p.last, len(p.runs)) == (scale.steps, 51) and p.last % scale.eval_every == 0
    pairs = warm_up.gaps(p).groupby("setting")["seed"].nunique()
    assert set(pairs) == {2} and set(pairs.index) == set(p.settings)
    bf16 = p.losses[(p.losses["recipe"] == "bf16") & (p.losses["step"] == p.last)].query("warmup == @scale.warmup")
    assert bf16.groupby("lr")["eval_loss"].mean().idxmin() == scale.lr
    assert "scale gpu" in p.about() and "51 runs" in p.about() and "its own repetition" in p.about()


def test_a_page_is_run_again_when_a_pilot_changes(tmp_path, monkeypatch):
    monkeypatch.setenv("MXFP4_RUNS", str(tmp_path))
    (tmp_path / "pilot").mkdir()
    before = records_fingerprint()
    (tmp_path / "pilot" / "gpu-warm-up.json").write_text("{}")
    assert records_fingerprint() != before


@pytest.mark.parametrize(
    ("text", "said"),
    [(None, "cannot read the pilot"), ("{", "is not a pilot's record"), ('{"machine": "x", "runs": [{}]}', "'recipe'")],
)
def test_a_pilot_that_cannot_be_read_is_named_in_a_line(tmp_path, text, said):
    path = tmp_path / "p.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=said) as error:
        warm_up.load(path)
    assert "\n" not in str(error.value) and "p.json" in str(error.value)
