"""Training losses at the end, paired by seed, and the gap of the evaluation loss above them."""

import math
from dataclasses import replace

import pytest

from mxfp4.analysis import metrics, training_loss
from mxfp4.analysis.effect import NoEffect
from mxfp4.analysis.study import studies
from mxfp4.pages import frames
from mxfp4.pages.chapters import scaling, sr_cost
from mxfp4.studies.store import Store
from mxfp4.training.config import TrainConfig
from tests.fakes.studies import config, curve, fill, put


def study_of(store: Store):
    (study,) = studies(store.load())
    return study


@pytest.fixture
def study(tmp_path):
    store = Store(tmp_path)
    for seed, cost in enumerate((0.09, 0.10, 0.11)):
        put(store, config("bf16", seed), training=2.9 + 0.01 * seed)
        put(store, config("mxfp4", seed), offset=0.04, training=2.9 + 0.01 * seed + cost)
    fill(store, {"mxfp4+sr": lambda seed: math.inf if seed == 2 else 1.0})
    return study_of(store)


def test_differences_are_paired_by_seed(study):
    effect = metrics.METRICS["training_loss_difference"](study, arm="mxfp4", against="bf16")
    assert effect.value == pytest.approx(0.10) and effect.unit == "nats" and effect.seeds == (0, 1, 2)
    half = 4.303 * 0.01 / math.sqrt(3)  # Student's, two degrees of freedom
    assert (effect.low, effect.high) == pytest.approx((0.10 - half, 0.10 + half), abs=0.001)
    gone = training_loss.training_loss_difference(study, arm="mxfp4+sr")
    assert gone.value == math.inf and "mxfp4+sr diverged in seed 2" in gone.note


def test_the_last_five_percent_of_the_steps_count(tmp_path, monkeypatch):
    from tests.fakes import studies as fake_studies

    def falling(c: TrainConfig, *given) -> list[dict]:
        rows = curve(c, *given)
        return [{**row, "train_loss": 5.0 if row["step"] <= 950 else 3.0 + row["step"] / 1e5} for row in rows]

    monkeypatch.setattr(fake_studies, "curve", falling)
    store = Store(tmp_path)
    put(store, config("bf16", eval_every=10))
    (loss,) = training_loss.last_training_losses(study_of(store), "bf16").values()
    assert loss == pytest.approx(3.0 + (960 + 970 + 980 + 990 + 1000) / 5 / 1e5)


def test_the_gap_is_evaluation_less_training(study):
    final = 3 + 3 / 11 + 0.003  # the mean over three seeds
    assert training_loss.evaluation_gap(study, "bf16") == pytest.approx(final - 2.91)
    assert training_loss.evaluation_gap(study, "mxfp4") == pytest.approx(final + 0.04 - 3.01)
    assert math.isnan(training_loss.evaluation_gap(study, "ti2d"))


def test_tables_of_evaluation_losses_have_both_columns(study):
    frame = frames.arms_frame(study, ["bf16", "mxfp4", "mxfp4+sr"]).set_index("arm")
    assert frame.loc["mxfp4", frames.TRAINING[0]].startswith("+0.1000 [+0.07")
    assert frame.loc["mxfp4", frames.TRAINING[1]] == f"{3 + 3 / 11 + 0.043 - 3.01:+.3f}"
    assert frame.loc["mxfp4+sr", frames.TRAINING[0]].startswith("∞")
    assert set(frames.TRAINING) <= set(frames.table1_frame(study).columns)
    assert list(frame.reset_index().filter(frames.LOSSES).columns) == list(frames.LOSSES)
    named = frames.with_training(frame.reset_index()[["arm"]], study)
    assert list(named[frames.TRAINING[0]]) == list(frame[frames.TRAINING[0]])


def test_without_bf16_there_is_a_gap_and_no_difference(tmp_path):
    study = study_of(fill(Store(tmp_path), {"fp8": 1.0}))
    found = frames.training_columns(study, "fp8")
    assert list(found.values()) == ["–", f"{3 / 11 + 0.003:+.3f}"]


def test_runs_that_stop_at_a_target_have_no_last_batches_in_common(tmp_path):
    study = study_of(fill(Store(tmp_path), {"bf16": 1.0, "mxfp4": 1.1}, target_loss=3.5, stop_at_target=True))
    with pytest.raises(NoEffect, match="no last batches in common"):
        training_loss.training_loss_difference(study, arm="mxfp4")
    assert set(frames.training_columns(study, "mxfp4").values()) == {"–"}


def test_the_cost_of_sr_is_told_in_both_losses(tmp_path):
    store = Store(tmp_path)
    for seed in range(3):
        put(store, config("mxfp4", seed))
        put(store, config("mxfp4+sr", seed), offset=0.04 + 0.001 * seed, training=3.09 + 0.001 * seed)
    row = sr_cost.sr_cost_frame(study_of(store)).iloc[0]
    assert float(row["cost"].split()[0]) == pytest.approx(0.041) and float(row["training"].split()[0]) == pytest.approx(
        0.091
    )


def test_a_gap_that_shrinks_in_evaluation_alone_is_told_from_one_that_shrinks(tmp_path):
    store = Store(tmp_path)
    for i, layers in enumerate((1, 3, 9)):
        model = replace(config("fp8").model, n_layers=layers)
        for seed in range(3):
            put(store, config("fp8", seed, model=model))
            put(
                store,
                config("mxfp4", seed, model=model),
                offset=0.06 - 0.02 * i + 1e-4 * seed,
                training=3.1 + 1e-4 * seed * (i - 1),
            )
    sizes = sorted(studies(store.load()), key=lambda s: s.parameters)
    found = scaling.trend(sizes, ["mxfp4"])
    evaluated, trained = found.text.split(" In training loss, on batches that all arms share, ")
    assert "the gap of mxfp4 shrinks with size" in evaluated and "is not shown to grow or to shrink" in trained
    assert "also counts how much an arm memorises" in trained and "training slope" in found.numbers
    frame = scaling.size_frame(sizes, ["mxfp4"])
    assert frame["training"].to_list() == pytest.approx([0.1] * 3, abs=1e-3) and frame["training_text"].notna().all()
