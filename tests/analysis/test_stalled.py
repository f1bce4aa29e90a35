"""Stalled runs on made-up curves: who is stalled, who is slow, who diverged, and what tables say of them."""

import math

import numpy as np
import pandas as pd
import pytest

from mxfp4 import cli
from mxfp4.analysis import metrics, stalled
from mxfp4.analysis.bootstrap import panel
from mxfp4.analysis.effect import final_losses
from mxfp4.analysis.study import studies
from mxfp4.pages import frames
from mxfp4.studies.store import Store
from tests.fakes.studies import config, fill, put

BUDGET = 1000.0


def made(loss, *, until: float = 1.0) -> pd.DataFrame:
    """A curve of 20 evaluations up to the share `until` of the budget; loss: a function of that share."""
    share = np.linspace(0.05, until, round(20 * until))
    return pd.DataFrame({"tokens": share * BUDGET, "eval_loss": [loss(t) for t in share]})


def reference(t: float) -> float:
    return 3 + 3 / (1 + 10 * t)


MEAN = stalled.mean_curve([made(reference), made(lambda t: reference(t) + 0.002)])


def is_stalled(loss, **options) -> bool:
    return stalled.is_stalled(made(loss, **options), MEAN, BUDGET)


def test_a_healthy_run_is_not_stalled():
    assert not is_stalled(lambda t: reference(t) + 0.05)
    assert not is_stalled(lambda t: reference(t) - 0.05)  # below all that the reference reached


def test_a_slow_run_that_still_learns_is_not_stalled():
    """It is at an eighth of the reference's tokens and advances an eighth as fast."""
    assert not is_stalled(lambda t: reference(t / 8))


def test_a_run_that_levels_off_far_above_is_stalled():
    assert is_stalled(lambda t: max(reference(t), 5.0))
    assert is_stalled(lambda t: max(reference(t), 5.0 - 0.01 * t))
    assert is_stalled(lambda t: max(reference(t), 5.0) + max(t - 0.6, 0))  # it gets worse
    assert is_stalled(lambda t: 7.0)  # it never got to the reference's first loss


def test_a_run_that_levels_off_near_the_reference_is_not_stalled():
    assert not is_stalled(lambda t: max(reference(t), reference(0.4)))


def test_a_run_is_never_called_stalled_early():
    level = lambda t: max(reference(t), 5.0)
    assert not is_stalled(level, until=0.95) and is_stalled(level)


def test_without_a_reference_no_run_is_called_stalled():
    assert stalled.mean_curve([]) is None
    assert not stalled.is_stalled(made(lambda t: 7.0), None, BUDGET)


def test_the_advance_is_held_against_five_percent():
    """Both ends of the last quarter put on the reference's curve, at a tenth of the tokens."""

    def advancing(rate: float):
        return lambda t: reference(0.1 + rate * (t - 0.75)) if t > 0.74 else reference(0.1)

    fine = stalled.mean_curve(
        [pd.DataFrame({"tokens": (t := np.linspace(0, 1, 4001)) * BUDGET, "eval_loss": [reference(x) for x in t]})]
    )
    assert stalled.is_stalled(made(advancing(0.04)), fine, BUDGET)
    assert not stalled.is_stalled(made(advancing(0.06)), fine, BUDGET)


@pytest.fixture
def store(tmp_path):
    """Healthy, slow, diverged and stalled arms; the last in two of its three seeds."""
    store = fill(Store(tmp_path / "runs"), {"bf16": 1.0, "mxfp4": 1.2, "mxfp4+h16": 9.0, "mxfp4+sr": math.inf})
    for seed in range(3):
        put(store, config("ti2d-no-sr", seed), flat=5.0 if seed else None)
    return store


def test_a_study_names_the_seeds_in_which_an_arm_stalled(store):
    (study,) = studies(store.load())
    assert {arm: study.stalled(arm) for arm in study.arms} == {
        "bf16": (), "mxfp4": (), "mxfp4+h16": (), "mxfp4+sr": (), "ti2d-no-sr": (1, 2)
    }  # fmt: skip
    assert frames.outcome_text(study, "ti2d-no-sr") == "1 finished, 2 stalled (seed 1, 2)"
    assert frames.outcome_text(study, "mxfp4+sr") == "3 diverged (step 500, 500, 500)"
    assert frames.outcome_text(study, "mxfp4") == "3 finished"
    (alone,) = studies([r for r in study.records if r.config.recipe != "bf16"])
    assert frames.outcome_text(alone, "ti2d-no-sr") == "3 finished"


def test_a_run_that_was_ended_as_stalled_has_no_last_loss(tmp_path):
    """Its curve ends early: what it had last is not the loss of its budget, and its window losses are left out."""
    store = fill(Store(tmp_path), {"bf16": 1.0, "mxfp4": lambda seed: math.inf if seed == 2 else 1.1})
    put(store, config("mxfp4+h16", 0), slowdown=1.05)
    put(store, config("mxfp4+h16", 1), flat=5.0, diverged_at=500, ended="stalled")
    (study,) = studies(store.load())
    assert (study.diverged("mxfp4+h16"), study.stalled("mxfp4+h16"), study.cut_short("mxfp4+h16")) == ((), (1,), (1,))
    assert (study.stalled("mxfp4"), study.cut_short("mxfp4")) == ((), (2,))
    losses = final_losses(study, "mxfp4+h16")
    assert math.isfinite(losses[0]) and losses[1] == math.inf and panel(study, "mxfp4+h16", (0, 1)) is None
    assert frames.outcome_text(study, "mxfp4+h16") == "1 finished, 1 stalled (seed 1)"
    effect = metrics.convergence(study, arm="mxfp4+h16", reference="bf16")
    assert effect.value == 0.5 and "mxfp4+h16 stalled in seed 1" in effect.note


def test_a_reference_that_diverged_is_not_part_of_the_mean(tmp_path):
    store = fill(Store(tmp_path), {"bf16": lambda seed: math.inf if seed == 1 else 1.0})
    put(store, config("ti2d-no-sr", 0), flat=5.0)
    (study,) = studies(store.load())
    assert study.stalled("ti2d-no-sr") == (0,)


def test_the_plan_says_that_an_arm_stalled(tmp_path, monkeypatch, capsys):
    from mxfp4.studies.scales import SCALES

    monkeypatch.setenv("MXFP4_RUNS", str(tmp_path))
    store, scale = Store(tmp_path), SCALES["cpu"]
    put(store, scale.config("bf16", 0))
    put(store, scale.config("mxfp4", 0), flat=5.5)
    assert cli.main(["plan", "--plan", "table1", "--scale", "cpu", "--arm", "mxfp4", "--seed", "0"]) == 0
    assert "mxfp4  seed 0  stalled at step" in capsys.readouterr().out
