"""Metrics on curves whose overheads and differences are known."""

import math

import numpy as np
import pytest

from mxfp4.analysis import metrics
from mxfp4.analysis.effect import NoEffect, estimate
from mxfp4.analysis.metrics import METRICS
from mxfp4.analysis.study import studies
from mxfp4.errors import UserError
from mxfp4.studies.store import Store
from tests.fakes.studies import config, fill, probe_rows, put


def study_of(tmp_path, slowdowns, **options):
    (found,) = studies(fill(Store(tmp_path), slowdowns, **options).load())
    return found


def test_overhead_recovers_the_slowdown(tmp_path):
    study = study_of(tmp_path, {"fp8": 1.0, "mxfp4": 1.25, "mxfp4+h16": lambda s: 1.08 + 0.01 * s})
    effect = metrics.overhead(study, arm="mxfp4")
    assert effect.value == pytest.approx(0.25, abs=0.01) and effect.seeds == (0, 1, 2) and effect.unit == "share"
    assert metrics.overhead(study, arm="fp8").value == pytest.approx(0, abs=1e-9)
    difference = metrics.overhead_difference(study, arm="mxfp4", against="mxfp4+h16")
    assert difference.value == pytest.approx(0.16, abs=0.01) and difference.low < difference.value < difference.high


def test_an_arm_that_misses_the_target_gives_a_bound(tmp_path):
    study = study_of(tmp_path, {"fp8": 1.0, "mxfp4": 1.1, "mxfp4+sr": 1.9})
    effect = metrics.overhead(study, arm="mxfp4+sr")
    assert effect.value == pytest.approx(1 / metrics.AT - 1, abs=0.02) and effect.high == math.inf
    assert "does not reach the target" in effect.note
    above = metrics.overhead_difference(study, arm="mxfp4+sr", against="mxfp4")
    below = metrics.overhead_difference(study, arm="mxfp4", against="mxfp4+sr")
    assert above.low > 0 and above.high == math.inf and below.high < 0 and below.low == -math.inf
    with pytest.raises(NoEffect, match="neither mxfp4\\+sr nor mxfp4\\+sr"):
        metrics.overhead_difference(study, arm="mxfp4+sr", against="mxfp4+sr")


def test_convergence_is_by_seed(tmp_path):
    study = study_of(
        tmp_path,
        {
            "fp8": 1.0,
            "mxfp4": 1.4,
            "mxfp4+2d": 1.6,
            "mxfp4+sr": 2.5,
            "mxfp4+h16": lambda s: 2.5 if s else 1.1,
            "mxfp4+rht16": math.inf,
        },
    )
    spans = {arm: metrics.convergence(study, arm=arm) for arm in study.arms}
    assert (spans["mxfp4"].low, spans["mxfp4"].high) == (1, 1)
    assert (spans["mxfp4+2d"].low, spans["mxfp4+2d"].high) == (0, 0)
    assert metrics.convergence(study, arm="mxfp4+2d", at=0.5).low == 1
    slack = 3 / (1 + 10 * metrics.CONVERGED_AT) - 3 / 11
    assert f"an arm that ends up to {slack:.2f} nats above fp8 passes" in spans["mxfp4"].note
    assert (spans["mxfp4+sr"].low, spans["mxfp4+sr"].high) == (0, 0)
    assert (spans["mxfp4+h16"].low, spans["mxfp4+h16"].high) == (0, 1)
    assert spans["mxfp4+rht16"].high == 0 and "diverged in seed 0, 1, 2" in spans["mxfp4+rht16"].note


def test_losses_are_paired_by_seed(tmp_path):
    store = Store(tmp_path)
    for seed, offset in enumerate((0.10, 0.11, 0.12)):
        put(store, config("bf16", seed))
        put(store, config("mxfp4", seed), offset=offset)
    put(store, config("mxfp4", 7), offset=5.0)  # no partner
    (study,) = studies(store.load())
    effect = metrics.loss_difference(study, arm="mxfp4", against="bf16")
    assert effect.value == pytest.approx(0.11) and effect.seeds == (0, 1, 2)
    half = 4.303 * 0.01 / math.sqrt(3)  # Student's, two degrees of freedom
    assert (effect.low, effect.high) == pytest.approx((0.11 - half, 0.11 + half), abs=0.001)
    ppl = metrics.perplexity_increase(study, arm="mxfp4")
    assert ppl.value == pytest.approx(math.expm1(0.11)) and ppl.unit == "share"


def test_divergence_is_infinitely_worse(tmp_path):
    study = study_of(tmp_path, {"bf16": 1.0, "mxfp4": math.inf, "mxfp4+sr": lambda s: math.inf if s == 1 else 1.1})
    effect = metrics.loss_difference(study, arm="mxfp4", against="bf16")
    assert effect.value == effect.low == effect.high == math.inf and "mxfp4 diverged" in effect.note
    mixed = metrics.loss_difference(study, arm="mxfp4+sr", against="bf16")
    assert mixed.value == math.inf and math.isfinite(mixed.low)
    only = metrics.loss_difference(study, arm="mxfp4", against="mxfp4+sr")
    assert only.seeds == (0, 2)  # in seed 1 both are gone: nothing to compare


def test_one_seed_has_no_interval(tmp_path):
    study = study_of(tmp_path, {"fp8": 1.0, "mxfp4": 1.2}, seeds=(0,))
    effect = metrics.overhead(study, arm="mxfp4")
    assert effect.value == pytest.approx(0.2, abs=0.01) and math.isnan(effect.low) and math.isnan(effect.high)


def test_remaining_gap(tmp_path):
    store = Store(tmp_path)
    for seed in range(3):
        put(store, config("fp8", seed))
        put(store, config("mxfp4", seed), offset=0.10 + 0.01 * seed)
        put(store, config("mxfp4+h16", seed), offset=0.03)
    (study,) = studies(store.load())
    effect = metrics.remaining_gap(study, arm="mxfp4+h16", against="mxfp4")
    assert effect.value == pytest.approx(0.03 / 0.11, rel=1e-6) and effect.low < effect.value < effect.high < 0.5
    with pytest.raises(NoEffect, match="fp8 ends where fp8 does: there is no gap to have a share of"):
        metrics.remaining_gap(study, arm="mxfp4", against="fp8")


def test_published_order(tmp_path):
    right = {
        "fp8": 1.0,
        "mxfp4-fprop": 1.085,
        "mxfp4-fprop-dgrad": 1.105,
        "mxfp4": 1.265,
        "mxfp4+sr": 3.0,
        "mxfp4+rht16": math.inf,
        "mxfp4+h16": 1.08,
    }
    assert metrics.published_order(study_of(tmp_path / "a", right)).value == 1
    wrong = {**right, "mxfp4": 1.02, "mxfp4+sr": 1.01}
    assert metrics.published_order(study_of(tmp_path / "b", wrong)).value < 0.7
    unsure = metrics.published_order(
        study_of(tmp_path / "c", {**right, "mxfp4": lambda seed: (1.02, 1.265, 1.265)[seed]})
    )
    assert unsure.high == 1 and 0 <= unsure.low < unsure.value


@pytest.mark.parametrize(("values", "quantile"), [((0.2, 0.4), 12.706), ((0.1, 0.2, 0.6), 4.303)])
def test_an_interval_over_few_seeds_is_students(values, quantile):
    e = estimate(dict(enumerate(values)), "number")
    half = quantile * np.std(values, ddof=1) / len(values) ** 0.5
    assert (e.value - e.low, e.high - e.value) == pytest.approx((half, half), rel=0.1)


def test_probes(tmp_path):
    store = Store(tmp_path)
    rows = probe_rows("pattern_next", {"mxfp4+h16": 0.9, "mxfp4+rht16": 0.1})
    put(store, config("bf16", probe_steps=(100, 500)), probes=rows)
    put(store, config("bf16"))  # the same arm unprobed: another key, the same study, and it must not hide the probes
    (study,) = studies(store.load())
    a = metrics.probe(study, metric="pattern_next", probed="bf16", recipe="mxfp4+h16", gemm="wgrad", tensor="dw")
    assert a.value == pytest.approx(0.9) and a.unit == "cosine" and a.over == "4 layers" and a.seeds == (0,)
    d = metrics.probe_difference(
        study,
        metric="pattern_next",
        probed="bf16",
        recipe="mxfp4+h16",
        gemm="wgrad",
        tensor="dw",
        against_recipe="mxfp4+rht16",
    )
    assert d.value == pytest.approx(0.8) and d.low == pytest.approx(0.8)
    with pytest.raises(NoEffect, match="no probe of pattern_next"):
        metrics.probe(study, metric="pattern_next", probed="bf16", recipe="mxfp4", gemm="wgrad", tensor="dw")


def test_predicts_loss(tmp_path):
    store = Store(tmp_path)
    put(store, config("bf16"))
    for i, arm in enumerate(("mxfp4", "mxfp4+h16", "mxfp4+sr", "mxfp4+rht16", "mxfp4+2d")):
        rows = probe_rows("error", {arm: 0.1 * i})
        put(store, config(arm, probe_steps=(100,)), offset=0.05 * i**2, probes=rows)
    (study,) = studies(store.load())
    arms = [a for a in study.arms if a != "bf16"]
    effect = metrics.predicts_loss(study, metric="error", arms=arms, gemm="wgrad", tensor="dw")
    assert effect.value == pytest.approx(1) and effect.over == "5 arms" and effect.seeds == (0,)
    for arm in ("bf16", "mxfp4"):
        put(store, config(arm, 1, probe_steps=(100,)), probes=probe_rows("error", {arm: 0.0}))
    (study,) = studies(store.load())
    assert study.seeds == (0, 1)
    assert metrics.predicts_loss(study, metric="error", arms=arms, gemm="wgrad", tensor="dw").seeds == (0,)


def test_end_to_end_is_p1s_arithmetic(tmp_path):
    study = study_of(tmp_path, {"fp8": 1.0, "mxfp4+h16": 1.08})
    effect = metrics.end_to_end(study, arm="mxfp4+h16")
    assert effect.value == pytest.approx(1.21 / 1.08, abs=0.01)
    slow = metrics.end_to_end(study_of(tmp_path / "slow", {"fp8": 1.0, "mxfp4+h16": 2.0}), arm="mxfp4+h16")
    assert slow.low == 0 and slow.high < 1  # an overhead without a known end leaves a gain without a lower one


def test_only_arms_that_had_their_device_alone_are_compared_in_speed(tmp_path):
    store = Store(tmp_path)
    for seed, shared in ((0, 1), (1, 1), (2, 3)):
        put(store, config("mxfp4+h16", seed), speed=1080.0 if shared == 1 else 400.0, arms_on_device=shared)
        put(store, config("mxfp4+h32", seed), speed=1000.0, arms_on_device=shared)
    (study,) = studies(store.load())
    effect = metrics.throughput_ratio(study, arm="mxfp4+h16", against="mxfp4+h32")
    assert effect.value == pytest.approx(1.08) and effect.seeds == (0, 1)
    put(Store(tmp_path / "shared"), config("mxfp4+h16", 0), arms_on_device=2)
    put(Store(tmp_path / "shared"), config("mxfp4+h32", 0), arms_on_device=2)
    (crowded,) = studies(Store(tmp_path / "shared").load())
    with pytest.raises(NoEffect, match="alone on their device"):
        metrics.throughput_ratio(crowded, arm="mxfp4+h16", against="mxfp4+h32")


@pytest.mark.parametrize(
    "metric, arguments, said",
    [
        ("overhaed", {}, "unknown metric 'overhaed'; known: overhead, "),
        ("overhead", {"arm": "mxfp4", "att": 1}, "no argument 'att'; known: arm, reference, at"),
        ("overhead", {}, "lacks arm"),
    ],
)
def test_bad_arguments_are_refused(metric, arguments, said):
    with pytest.raises(UserError, match=said):
        metrics.check_arguments(metric, arguments)


def test_arms_of():
    assert metrics.arms_of("overhead", {"arm": "mxfp4"}) == ("mxfp4", "fp8")
    assert set(metrics.arms_of("published_order", {})) > {"fp8", "mxfp4+rht16"}
    assert metrics.arms_of("interaction", {"arms": ["a", "b", "c", "d"]}) == ("a", "b", "c", "d")
    assert all(METRICS[name].__doc__ for name in METRICS)


def test_roughness_is_what_seeds_do_not_share(tmp_path):
    """A bend that all runs have is not rough; errors of every evaluation are, by the ratio of their sizes."""
    store, rng = Store(tmp_path), np.random.default_rng(0)
    for arm, size, slowdown in (("fp8", 0.002, 1.0), ("mxfp4", 0.006, 3.0), ("mxfp4+h16", 0.002, 3.0)):
        for seed in range(3):
            put(store, config(arm, seed), slowdown=slowdown, wobble=size * rng.standard_normal(21))
    (study,) = studies(store.load())
    rough, smooth = (metrics.roughness(study, arm=arm) for arm in ("mxfp4", "mxfp4+h16"))
    assert rough.low > 1 and rough.low < 3 < rough.high and rough.seeds == (0, 1, 2)
    assert smooth.low < 1 < smooth.high, "a curve that bends otherwise is not smoother or rougher for that"


def test_roughness_needs_seeds_and_curves_that_differ(tmp_path):
    with pytest.raises(NoEffect, match="two seeds or more"):
        metrics.roughness(study_of(tmp_path / "a", {"fp8": 1.0, "mxfp4": 1.1}, seeds=(0,)), arm="mxfp4")
    with pytest.raises(NoEffect, match="differ by nothing"):
        metrics.roughness(study_of(tmp_path / "b", {"fp8": 1.0, "mxfp4": 1.1}), arm="mxfp4")


def test_a_reference_that_diverged_has_no_loss_where_it_did_not_get(tmp_path):
    store = fill(Store(tmp_path), {"fp8": lambda seed: math.inf if seed == 1 else 1.0, "mxfp4": 1.1})
    (study,) = studies(store.load())
    (calm,) = studies([r for r in study.records if r.config.seed != 1])
    assert metrics.target_loss(study, "fp8", 0.7) == metrics.target_loss(calm, "fp8", 0.7)
    assert "fp8 diverged in seed 1" in metrics.overhead(study, arm="mxfp4").note
    (gone,) = studies(fill(Store(tmp_path / "gone"), {"fp8": math.inf, "mxfp4": 1.1}).load())
    with pytest.raises(NoEffect, match="no run of fp8 gets to 0.7 of its budget"):
        metrics.overhead(gone, arm="mxfp4")


def test_a_reference_that_was_never_evaluated_is_left_out(tmp_path):
    study = study_of(tmp_path, {"fp8": 1.0, "mxfp4": 1.1})
    study.arms["fp8"][1].curve["eval_loss"] = math.nan
    assert metrics.overhead(study, arm="mxfp4").seeds == (0, 2)


def test_an_end_to_end_speed_is_inside_its_interval_when_two_seeds_allow_any_overhead(tmp_path):
    """One of the two diverged late: Student's interval of the other bounds reaches below no tokens at all."""
    store = Store(tmp_path)
    for seed in range(2):
        put(store, config("fp8", seed))
        put(store, config("mxfp4", seed), slowdown=1.05 + 0.25 * seed, diverged_at=950 if seed else None)
    (study,) = studies(store.load())
    assert metrics.overhead(study, arm="mxfp4").low == -1
    effect = metrics.end_to_end(study, arm="mxfp4")
    assert effect.low < effect.value < effect.high == math.inf


def test_losses_and_tokens_that_no_float_holds(tmp_path):
    store = Store(tmp_path)
    for seed in range(2):
        put(store, config("fp8", seed), slowdown=1 + seed)
        put(store, config("mxfp4", seed), slowdown=1.3, offset=900 * seed)
    (study,) = studies(store.load())
    effect = metrics.perplexity_increase(study, arm="mxfp4", against="fp8")
    assert (effect.low, effect.high) == (-1, math.inf)
    table = {"mxfp4": 0.1, "fp8": 0.0}
    few = fill(Store(tmp_path / "few"), {"fp8": 1.0, "mxfp4": lambda seed: (0.4, 1.1)[seed]}, seeds=(0, 1))
    with np.errstate(all="raise", under="ignore"):
        assert np.isfinite(metrics._noisy(studies(few.load())[0], table, "fp8", 3.8, (0, 1))).all()
