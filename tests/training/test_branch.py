"""Branches and evaluations in other forwards leave a run as it is, and say what they should."""

import math
from dataclasses import replace

import pytest
import torch

from mxfp4.data.known_entropy import KnownEntropy, Law
from mxfp4.errors import UserError
from mxfp4.training import run_state
from mxfp4.training.arm_model import in_recipe
from mxfp4.training.branch import branches
from mxfp4.training.config import ModelConfig, TrainConfig
from mxfp4.training.loop import train
from mxfp4.training.optimizer import learning_rate

MODEL = ModelConfig(vocab_size=64, dim=64, n_layers=1, n_heads=2, n_kv_heads=1, ffn_dim=96, max_seq_len=32)
PLAIN = TrainConfig(
    recipe="mxfp4+sr", seed=0, model=MODEL, corpus="known-entropy", seq_len=32, batch_size=2, steps=20, lr=3e-3, lr_min=0.0,
    warmup=2, eval_every=5, eval_sequences=4, scale="cpu", cooldown_steps=4,
)  # fmt: skip
FULL = replace(
    PLAIN, short_budgets=(10,), decay_recipes=("bf16",), eval_forwards=("bf16",), final_forwards=("mxfp4+h16", "llm-fp4"),
    final_eval_sequences=6,
)  # fmt: skip


def run(config, **options):
    return train(config, corpus=KnownEntropy(Law(vocab_size=64)), device="cpu", progress=False, **options)


@pytest.fixture(scope="module")
def whole():
    return run(FULL)


def training(result):
    return [(row["step"], row["train_loss"], row["grad_norm"], row["lr"]) for row in result.curve[1:]]


def same(a, b):
    return all(
        torch.equal(x, y) for x, y in zip(a.model.state_dict().values(), b.model.state_dict().values(), strict=True)
    )


def test_the_run_goes_on_as_if_there_had_been_no_branch(whole):
    plain = run(PLAIN)
    assert training(plain) == training(whole)
    assert same(plain, whole)


def test_a_short_budget_is_what_a_run_of_that_budget_is(whole):
    short = run(replace(FULL, steps=10, cooldown_steps=2, short_budgets=(), decay_recipes=(), final_forwards=()))
    branch = [row for row in whole.branches if row["branch"] == "10"]
    assert [(r["step"], r["train_loss"], r["lr"]) for r in branch] == [
        (r["step"], r["train_loss"], r["lr"]) for r in short.curve[-2:]
    ]
    mine = [e for e in whole.evaluations if e["branch"] == "10"]
    theirs = [e for e in short.evaluations if e["step"] == 10]
    assert [(e["forward"], e["loss"], e["windows"]) for e in mine] == [(e["forward"], e["loss"], 6) for e in theirs]
    assert whole.windows["10:own"] == short.windows["own"]


def test_a_decay_in_another_recipe_starts_where_the_runs_own_does(whole):
    rows = [row for row in whole.branches if row["branch"] == "bf16"]
    assert [row["step"] for row in rows] == [17, 18, 19, 20]
    own = {row["step"]: row for row in whole.curve}
    assert all(row["lr"] == own[row["step"]]["lr"] for row in rows)
    assert all(row["train_loss"] != own[row["step"]]["train_loss"] for row in rows)


def test_each_evaluation_has_a_row_for_each_forward(whole):
    main = [e for e in whole.evaluations if not e["branch"]]
    assert [e["step"] for e in main if e["forward"] == "own"] == [0, 5, 10, 15, 20]
    assert [e["forward"] for e in main if e["step"] == 20] == ["own", "bf16", "mxfp4+h16", "llm-fp4"]
    assert {e["windows"] for e in main if e["step"] < 20} == {4} and {
        e["windows"] for e in main if e["step"] == 20
    } == {6}
    for e in whole.evaluations:
        assert 0 <= e["top1"] <= 1 and 0 <= e["copy_top1"] <= 1
    last = whole.curve[-1]
    assert last["eval_loss"] == main[-4]["loss"] and last["eval_loss_bf16"] == main[-3]["loss"]
    assert whole.outcome["final_loss"] == main[-4]["loss"]
    assert set(whole.windows) == {"10:own", "10:bf16", "bf16:own", "bf16:bf16", "own", "bf16", "floor"}
    assert whole.windows["floor"] == pytest.approx(
        (
            -KnownEntropy(Law(vocab_size=64))
            .judge(KnownEntropy(Law(vocab_size=64)).eval_windows(6, 32))
            .log_prob.mean(1)
        ).tolist()
    )


def test_stochastic_rounding_is_evaluated_as_nearest(whole):
    last = {e["forward"]: e["loss"] for e in run(replace(FULL, final_forwards=("mxfp4",))).evaluations[-4:]}
    assert last["own"] == last["mxfp4"] != last["bf16"]


def test_a_bf16_run_is_the_same_in_both_forwards():
    last = {e["forward"]: e["loss"] for e in run(replace(FULL, recipe="bf16", decay_recipes=())).evaluations[-4:]}
    assert last["own"] == last["bf16"] and len({last["bf16"], last["mxfp4+h16"], last["llm-fp4"]}) == 3


@pytest.mark.parametrize("at", [6, 8, 9, 11, 16, 18])
def test_a_run_stopped_anywhere_ends_the_same(whole, tmp_path, at):
    """at: the call of `stop` that says so; 8 is where the short budget branches off, 9 is inside the branch."""
    calls = iter(range(1, 100))
    first = run(FULL, checkpoint_dir=tmp_path, checkpoint_minutes=1e9, stop=lambda: next(calls) >= at)
    assert first.outcome["status"] == "paused"
    again = run(FULL, checkpoint_dir=tmp_path)
    assert training(again) == training(whole) and same(again, whole)
    assert str(again.evaluations) == str(whole.evaluations) and again.windows == whole.windows
    assert str(again.branches) == str(whole.branches)


def test_the_rate_is_constant_and_then_falls_to_its_least():
    rates = [learning_rate(PLAIN, step) for step in range(1, 21)]
    assert rates[:2] == [0.0015, 0.003] and set(rates[1:16]) == {0.003}
    assert rates[16:] == pytest.approx([0.00225, 0.0015, 0.00075, 0.0])


def test_branches_leave_in_order():
    found = branches(replace(FULL, short_budgets=(15, 10)))
    assert [(b.name, b.start, b.end, b.recipe) for b in found] == [
        ("10", 8, 10, "mxfp4+sr"), ("15", 12, 15, "mxfp4+sr"), ("bf16", 16, 20, "bf16"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"short_budgets": (20,)}, "short_budgets=20"),
        ({"short_budgets": (2,)}, "short_budgets=2"),
        ({"cooldown_steps": 0}, "need cooldown_steps"),
        ({"cooldown_steps": 19}, "warmup=2 and cooldown_steps=19"),
        ({"eval_forwards": ()}, "final_forwards need eval_forwards"),
        ({"final_eval_sequences": 3}, "final_eval_sequences=3 must be at least eval_sequences=4"),
        ({"decay_recipes": ("bf17",)}, "bf17"),
    ],
)
def test_what_does_not_fit_is_named(change, says):
    with pytest.raises(UserError, match=says):
        replace(FULL, **change)


def test_a_branch_that_diverges_ends_alone(whole, monkeypatch):
    """The decay in another recipe gives no number from its first step; the run it left is what it was."""

    def broken(*args):
        model = in_recipe(*args)
        model.output.register_forward_hook(lambda module, inputs, output: output * math.nan)
        return model

    monkeypatch.setattr(run_state, "in_recipe", broken)  # the evaluation's models are made elsewhere
    result = run(FULL)
    assert [row["step"] for row in result.branches if row["branch"] == "bf16"] == [17]
    assert not [e for e in result.evaluations if e["branch"] == "bf16"] and "bf16:own" not in result.windows
    assert result.outcome["status"] == "finished" and training(result) == training(whole) and same(result, whole)


def test_the_fused_loss_is_the_loss():
    """What a compiled run of the study takes: value and gradients, to rounding."""
    from mxfp4.training.evaluation import fused_token_loss, token_loss
    from mxfp4.training.model import build_model

    model = build_model(MODEL, 0)
    windows = KnownEntropy(Law(vocab_size=64)).eval_windows(3, 32)
    found = []
    for loss_of in (token_loss, fused_token_loss):
        model.zero_grad()
        loss = loss_of(model, windows)
        loss.backward()
        found.append((loss.detach(), [p.grad.clone() for p in model.parameters()]))
    assert float(found[0][0]) == pytest.approx(float(found[1][0]), rel=1e-6)
    for a, b in zip(found[0][1], found[1][1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
