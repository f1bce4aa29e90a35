"""The loop: pairing of arms, the schedule, outcomes, and resuming to the same bytes after kill -9."""

import math
import os
import signal
import time

import pytest
import torch

from mxfp4.errors import UserError
from mxfp4.training import run_state
from mxfp4.training.checkpoints import checkpoint
from mxfp4.training.evaluation import token_loss
from mxfp4.training.loop import train
from mxfp4.training.model import build_model
from mxfp4.training.optimizer import learning_rate, make_optimizer
from tests.fakes import TINY, FakeCorpus, tiny_config
from tests.fakes.checkpoints import tensor_bytes
from tests.fakes.ranks import context

CORPUS = FakeCorpus()


def run(config, **options):
    return train(config, corpus=CORPUS, device="cpu", progress=False, **options)


def test_a_small_model_learns_and_the_curve_is_complete():
    result = run(tiny_config(steps=60, eval_every=25))
    losses = {row["step"]: row["eval_loss"] for row in result.curve if not math.isnan(row["eval_loss"])}
    assert list(losses) == [0, 25, 50, 60]
    assert losses[0] == pytest.approx(math.log(64), abs=0.1)
    assert losses[60] < 2.5
    assert [row["step"] for row in result.curve] == list(range(61))
    assert result.curve[-1]["tokens"] == 60 * 64 == result.outcome["tokens"]
    assert result.curve[-1]["eval_bpb"] == pytest.approx(losses[60] / math.log(2) / 4.0)
    assert result.outcome["status"] == "finished" and result.outcome["final_loss"] == losses[60]
    assert result.timings["tokens_per_second"] > 0


def test_window_losses_are_those_of_the_last_evaluation():
    result = run(tiny_config(eval_sequences=6))
    assert len(result.window_losses) == 6
    assert sum(result.window_losses) / 6 == pytest.approx(result.outcome["final_loss"], rel=1e-12)
    windows, model = CORPUS.eval_windows(6, 16), result.model.eval()
    each = [token_loss(model, window[None]).item() for window in windows]
    assert result.window_losses == pytest.approx(each, rel=1e-5)


def test_arms_of_a_seed_start_from_the_same_weights_and_see_the_same_batches():
    class Watching(FakeCorpus):
        def batch(self, *args):
            seen.append(super().batch(*args))
            return seen[-1]

    batches, starts = [], []
    for name in ("bf16", "mxfp4+sr", "mxfp4+h16"):
        seen = []
        first = []
        probe = lambda model, step, batch, first=first: (
            first.append({k: v.clone() for k, v in model.state_dict().items()}) or []
        )
        config = tiny_config(recipe=name, steps=3, probe_steps=(1,))
        train(config, corpus=Watching(), device="cpu", progress=False, probe=probe)
        batches.append(torch.stack(seen))
        starts.append(first[0])
    for other_batches, other_start in zip(batches[1:], starts[1:], strict=True):
        assert torch.equal(batches[0], other_batches)
        assert all(torch.equal(starts[0][k], other_start[k]) for k in starts[0])


def test_a_probe_does_not_change_the_run():
    def probe(model, step, batch):
        model(batch[:, :-1]).sum().backward()
        return [{"step": step, "value": 1.0}]

    config = tiny_config(recipe="mxfp4+sr", probe_steps=(2, 5))
    plain, probed = run(config), run(config, probe=probe)
    assert same_bytes(plain.model, probed.model)
    assert [row["step"] for row in probed.probes] == [2, 5]


def same_bytes(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


def test_micro_batches_sum_to_the_batch():
    whole, parts = run(tiny_config(recipe="fp32")), run(tiny_config(recipe="fp32", micro_batches=4))
    for a, b in zip(whole.curve[1:], parts.curve[1:], strict=True):
        assert a["train_loss"] == pytest.approx(b["train_loss"], rel=1e-4)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-3)


def test_schedule():
    config = tiny_config(steps=103, warmup=3, lr=1.0, lr_min=0.1)
    assert [learning_rate(config, s) for s in (1, 2, 3)] == pytest.approx([1 / 3, 2 / 3, 1.0])
    assert learning_rate(config, 53) == pytest.approx(0.55) and learning_rate(config, 103) == pytest.approx(0.1)
    long = tiny_config(steps=100, warmup=0, lr=1.0, lr_min=0.0, decay_steps=1_000_000)
    assert learning_rate(long, 100) > 0.9999


def test_norms_do_not_decay_and_matrices_do():
    model = build_model(TINY, 0)
    decaying, free = make_optimizer(model, tiny_config()).param_groups
    assert decaying["weight_decay"] == 0.1 and free["weight_decay"] == 0.0
    assert {id(p) for p in free["params"]} == {id(p) for n, p in model.named_parameters() if "norm" in n}


def test_non_finite_loss_is_an_outcome():
    config = tiny_config(steps=40, lr=1e30, lr_min=1e30, clip=1e30, warmup=0)
    result = run(config)
    assert result.outcome["status"] == "diverged" and result.outcome["step"] < 40
    assert any(word in result.outcome["reason"] for word in ("nan", "inf"))
    assert result.curve[-1]["step"] == result.outcome["step"]


def test_target_is_recorded_and_can_end_the_run():
    config = tiny_config(steps=40, target_loss=3.5)
    went_on, stopped = run(config), run(tiny_config(steps=40, target_loss=3.5, stop_at_target=True))
    hit = went_on.outcome["target"]
    first = next(row for row in went_on.curve if row["eval_loss"] <= 3.5)
    assert hit == {"loss": 3.5, "step": first["step"], "tokens": first["tokens"]} == stopped.outcome["target"]
    assert went_on.outcome["step"] == 40 and stopped.outcome["step"] == first["step"]
    assert stopped.outcome["status"] == "finished"


def test_a_run_that_does_not_improve_ends_as_stalled_if_its_configuration_says_so():
    flat = {"lr": 1e-9, "lr_min": 0.0, "eval_every": 2}
    rule = {"stall_evaluations": 2, "stall_improvement": 0.01, "stall_above": 2.0}
    result = run(tiny_config(**flat, **rule))
    assert (result.outcome["status"], result.outcome["step"], len(result.curve)) == ("stalled", 4, 5)
    assert result.outcome["reason"].endswith("less than 0.01 nats and stayed above 2, at step 4")
    assert run(tiny_config(**flat)).outcome["status"] == "finished"
    with pytest.raises(
        UserError, match="stall_evaluations=2 needs a positive stall_improvement and stall_above, not 0 and"
    ):
        tiny_config(**{**rule, "stall_improvement": 0})


def test_a_mixture_of_experts_reports_its_balance():
    from dataclasses import replace

    result = run(tiny_config(model=replace(TINY, n_experts=4), recipe="mxfp4"))
    assert all(0.9 < row["balance_loss"] < 4 for row in result.curve[1:])
    assert math.isnan(run(tiny_config(steps=2)).curve[-1]["balance_loss"])


def test_another_vocabulary_is_refused():
    with pytest.raises(UserError, match="vocabulary of 65, the model one of 64"):
        train(tiny_config(), corpus=FakeCorpus(vocab_size=65), device="cpu", progress=False)


def test_a_pause_leaves_a_checkpoint_from_which_the_same_bytes_come(tmp_path):
    config = tiny_config(recipe="mxfp4+rht16+sr-grad")
    straight = run(config)
    seen = []
    paused = run(config, checkpoint_dir=tmp_path, on_step=seen.append, stop=lambda: len(seen) == 5)
    assert paused.outcome["status"] == "paused" and checkpoint.latest_step(tmp_path) == 5
    resumed = run(config, checkpoint_dir=tmp_path)
    assert same_bytes(straight.model, resumed.model)
    assert repr(straight.curve) == repr(resumed.curve) and straight.outcome == resumed.outcome


@pytest.mark.parametrize("change", [{"lr": 2e-2}, {"seed": 1}])
def test_a_checkpoint_of_another_configuration_is_refused(tmp_path, change):
    run(tiny_config(), checkpoint_dir=tmp_path, stop=lambda: True)
    with pytest.raises(UserError, match=f"is of a run with {next(iter(change))}="):
        run(tiny_config(**change), checkpoint_dir=tmp_path)


def test_a_checkpoint_of_other_code_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(run_state, "SEMANTICS_VERSION", 0)
    run(tiny_config(), checkpoint_dir=tmp_path, stop=lambda: True)
    monkeypatch.undo()
    with pytest.raises(UserError, match="is of a run by semantics version 0, this is "):
        run(tiny_config(), checkpoint_dir=tmp_path)


def until_killed(recipe, folder):
    torch.set_num_threads(1)
    run(tiny_config(recipe=recipe, steps=400), checkpoint_dir=folder, checkpoint_minutes=0)


@pytest.mark.parametrize("recipe", ["mxfp4+sr", "bf16"])
def test_kill_9_at_a_random_step_and_resume_gives_the_same_bytes(tmp_path, recipe):
    """Weights, optimizer state and curve, compared through one more checkpoint of each run."""
    process = context.Process(target=until_killed, args=(recipe, tmp_path / "killed"))
    process.start()
    deadline = time.monotonic() + 120
    while checkpoint.latest_step(tmp_path / "killed") is None and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(int.from_bytes(os.urandom(1)) / 1000)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        killed_at = checkpoint.latest_step(tmp_path / "killed")
        last = min(killed_at + 5, 400)
        config = tiny_config(recipe=recipe, steps=400)
        for folder in ("killed", "straight"):
            steps = []
            start = checkpoint.latest_step(tmp_path / folder) or 0
            run(
                config,
                checkpoint_dir=tmp_path / folder,
                on_step=steps.append,
                stop=lambda start=start, steps=steps: start + len(steps) == last,
            )
    finally:
        torch.set_num_threads(threads)
    a, b = (checkpoint.entries(tmp_path / folder)[0] for folder in ("killed", "straight"))
    assert checkpoint.step_of(a) == checkpoint.step_of(b) == last > killed_at > 0
    assert tensor_bytes(a) == tensor_bytes(b) != {}
    assert repr(checkpoint.plain(a)["curve"]) == repr(checkpoint.plain(b)["curve"])


def test_a_pause_never_falls_between_two_probed_steps(tmp_path):
    """The probe compares them, and what it saw at the first is not in a checkpoint."""
    config = tiny_config(probe_steps=(2, 3))
    paused = run(config, checkpoint_dir=tmp_path, probe=lambda *_: [], stop=lambda: True, on_step=(steps := []).append)
    assert paused.outcome["step"] == 1 and steps == [1]
    run(config, checkpoint_dir=tmp_path, probe=lambda *_: [], stop=lambda: True, on_step=steps.append)
    assert steps == [1, 2, 3] and checkpoint.latest_step(tmp_path) == 3
