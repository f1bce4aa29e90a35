"""From records to the tables of the registered study, on made-up records of its own configurations."""

import math
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import pytest

from mxfp4.analysis.registered_study.contrasts import judge
from mxfp4.analysis.registered_study.tables import budgets, matrix, members, probes_table, runs_table
from mxfp4.studies.registered_arms import study_arms
from mxfp4.studies.registry import load_study
from mxfp4.training.branch import branches

STUDY = load_study()
FLOOR = 2.5


@dataclass
class MadeUp:
    """What the tables read of a record."""

    config: object
    outcome: dict
    curve: pd.DataFrame
    branches: pd.DataFrame
    evaluations: pd.DataFrame
    windows: pd.DataFrame
    probes: pd.DataFrame
    run_id: str = "run"


def record(recipe, seed=0, part="main", cost=0.0, status="finished", until=1.0):
    """A run whose excess over the floor is 1 / (share of the budget) plus cost; BF16's forward halves the cost."""
    config = next(c for c in study_arms(part) if c.recipe == recipe and c.seed == seed)
    last = int(config.steps * until)
    steps = np.arange(1, last + 1)
    excess = cost + config.steps / steps
    curve = pd.DataFrame({"step": steps, "tokens": steps * config.tokens_per_step, "train_loss": FLOOR + excess})
    curve["eval_loss"] = curve["train_loss"].where(steps % config.eval_every == 0)
    branch_rows, rows = [], []
    for branch in branches(config):
        if branch.end <= last:
            inner = np.arange(branch.start + 1, branch.end + 1)
            branch_rows.append(pd.DataFrame({"branch": branch.name, "step": inner, "train_loss": FLOOR + 7.0 + cost}))
    for name in budgets(config):
        end = int(name) if name.isdigit() else config.steps
        forwards = ["own", "bf16", *(config.final_forwards if not name else ())]
        for i, forward in enumerate(forwards if end <= last else []):
            loss = (
                FLOOR + config.steps / end + (cost / 2 if forward == "bf16" else cost) + (0.1 if name == "bf16" else 0)
            )
            rows.append({"branch": name, "step": end, "tokens": end, "forward": forward, "windows": 4, "loss": loss,
                         "top1": 0.5 + i / 100, "copy_top1": 0.25})  # fmt: skip
        if end <= last:  # an earlier evaluation, which is not one after a decay
            rows.append({**rows[-1], "step": end - 5, "forward": "own", "loss": 99.0})
    probes = [
        {"step": step, "recipe": r, "layer": layer, "gemm": "fprop", "tensor": "y", "metric": "error", "value": value}
        for step, layer, r, value in [
            (10, "a", recipe, 0.1), (10, "b", recipe, 0.3), (20, "a", recipe, 0.4), (10, "a", "other", 9.0), (10, "all", recipe, 9.0),
        ]
    ] + [
        {"step": step, "recipe": recipe, "layer": "a", "gemm": "", "tensor": "dw", "metric": "gradient_to_noise", "value": v}
        for step, v in ((10, 5.0), (20, 2.0))
    ]  # fmt: skip
    return MadeUp(
        config, {"status": status, "step": last}, curve,
        pd.concat(branch_rows) if branch_rows else pd.DataFrame(columns=["branch", "step", "train_loss"]),
        pd.DataFrame(rows, columns=["branch", "step", "tokens", "forward", "windows", "loss", "top1", "copy_top1"]),
        pd.DataFrame({"floor": np.full(6, FLOOR)}), pd.DataFrame(probes),
    )  # fmt: skip


def row(table, **where):
    found = table[np.logical_and.reduce([table[k] == v for k, v in where.items()])]
    assert len(found) == 1, where
    return found.iloc[0]


def test_a_run_gives_a_row_for_each_budget_and_forward():
    table = runs_table(STUDY, [record("mxfp4", cost=0.2)])
    assert len(table) == 6  # full and third in two forwards, and the decay in BF16
    full = row(table, runs="main", budget="full", forward="own")
    assert full["loss"] == pytest.approx(FLOOR + 1.2) and full["excess"] == pytest.approx(1.2)
    assert full["training"] == pytest.approx(FLOOR + 1.2, abs=0.02) and full["top1"] == 0.5 and full["copying"] == 0.25
    assert row(table, runs="main", budget="full", forward="bf16")["excess"] == pytest.approx(1.1)
    third = row(table, runs="main", budget="third", forward="own")
    assert third["excess"] == pytest.approx(3.2) and third["training"] == pytest.approx(FLOOR + 7.2)
    assert row(table, runs="bf16-decay", budget="full", forward="own")["excess"] == pytest.approx(1.3)
    assert set(table["status"]) == {"finished"}


def test_fp8_also_decays_at_two_thirds():
    table = runs_table(STUDY, [record("fp8")])
    assert set(table["budget"]) == {"full", "third", "two_thirds"}


def test_a_run_that_diverges_has_rows_that_say_so():
    table = runs_table(STUDY, [record("mxfp4", status="diverged", until=0.5)])
    assert row(table, runs="main", budget="full", forward="own")["status"] == "diverged"
    assert math.isnan(row(table, runs="main", budget="full", forward="own")["loss"])
    assert row(table, runs="main", budget="third", forward="own")["status"] == "finished"
    assert row(table, runs="bf16-decay", budget="full", forward="own")["status"] == "diverged"


def test_a_run_far_above_bf16_without_progress_is_stalled():
    flat = record("mxfp4")
    flat.curve["eval_loss"] = flat.curve["eval_loss"].mask(flat.curve["eval_loss"].notna(), FLOOR + 9)
    table = runs_table(STUDY, [record("bf16"), flat])
    assert row(table, arm="mxfp4", runs="main", budget="full", forward="own")["status"] == "stalled"
    assert row(table, arm="bf16", runs="main", budget="full", forward="own")["status"] == "finished"


def test_records_of_other_studies_are_left_out():
    ours, theirs = record("bf16"), record("bf16", seed=1)
    theirs.config = replace(theirs.config, corpus="prose")
    assert list(members(STUDY, [ours, theirs])) == ["main"]
    assert len(runs_table(STUDY, [ours, theirs])) == 4
    assert runs_table(STUDY, []).empty and probes_table(STUDY, []).empty and matrix([]).empty


def test_a_probe_is_a_mean_over_layers_then_steps():
    table = probes_table(STUDY, [record("mxfp4")])
    assert row(table, probe="fprop-error")["value"] == pytest.approx(((0.1 + 0.3) / 2 + 0.4) / 2)
    assert row(table, probe="gradient-to-noise")["value"] == 2.0  # of the last step alone
    assert set(table["arm"]) == {"mxfp4"}  # "other" was applied to the tensors of this run, which is not BF16's


def test_the_matrix_has_the_last_evaluation_in_every_forward():
    table = matrix([record("mxfp4", cost=0.2)])
    others = ["fp8", "mxfp4", "mxfp4+h16", "ti2d", "ti2d-no-2d", "nvfp4"]
    assert list(table["forward"]) == ["own", "bf16", *others]
    assert list(matrix([record("bf16")])["forward"]) == ["own", "bf16", *others, "llm-fp4"]
    assert 99.0 not in set(table["loss"])


def test_a_made_up_study_comes_out_as_it_was_made():
    costs = {"bf16": 0.0, "mxfp4": 0.1, "mxfp4+h16": 0.02}
    rng = np.random.default_rng(0)
    records = [record(arm, seed, cost=cost + rng.normal(0, 0.005)) for arm, cost in costs.items() for seed in range(6)]
    found = {v.claim.id: v for v in judge(STUDY, runs_table(STUDY, records), probes_table(STUDY, records))}
    assert found["h3-h16"].verdict == "holds" and found["h3-h16"].estimate.value == pytest.approx(-0.08, abs=0.02)
    assert found["p2-2d"].verdict == "not run"
    assert found["weights-mxfp4"].estimate.value == pytest.approx(0.05, abs=0.02)


def test_text_may_be_another_corpus():
    """Runs on it count as the study's runs on text, apart from those on the pinned one."""
    own = record("mxfp4", part="text")
    other = replace(own, config=replace(own.config, corpus="c4:0-3"))
    assert members(STUDY, [own, other]) == {"text": [own]}
    assert members(STUDY, [own, other], "c4:0-3") == {"text": [other]}
