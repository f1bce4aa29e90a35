"""A NaN on one of two ranks: one that does not come again leaves a note and the curve of a run without it; one that
comes again is a divergence. Either way it is said where it was."""

import math
import warnings
from dataclasses import replace

import pytest
import torch

from mxfp4.errors import Notice
from mxfp4.training import loop, run_state
from mxfp4.training.checkpoints.resume import Checkpoints
from mxfp4.training.execution import distributed
from mxfp4.training.nonfinite import in_parts, in_windows
from tests.fakes import TINY, FakeCorpus, tiny_config
from tests.fakes.ranks import full_state, launch

NAN = math.nan
CONFIG = tiny_config(
    recipe="mxfp4+sr", model=replace(TINY, n_layers=2), batch_size=8, micro_batches=4, steps=9, eval_every=4,
    eval_sequences=5,
)  # fmt: skip


class Fault(FakeCorpus):
    """What rank 1 computes of its second part (the fourth of the batch) of a step, or of an evaluation, is NaN so many
    times."""

    def __init__(self, step=0, times=1, evaluating=False):
        super().__init__()
        object.__setattr__(self, "left", {"times": times, "step": step, "evaluating": evaluating, "now": 0, "part": 0})

    def batch(self, step, batch_size, seq_len, seed):
        self.left.update(now=step + 1, part=0)
        return super().batch(step, batch_size, seq_len, seed)

    def strikes(self, evaluating):
        left = self.left
        left["part"] += 1
        hit = left["times"] and (left["now"], left["evaluating"]) == (left["step"], evaluating)
        if hit and distributed.here().rank == 1 and (evaluating or left["part"] == 2):
            left["times"] -= 1
            return True
        return False


def run(folder, corpus, seconds=0.0, saved=(3, 5)):
    """Train with checkpoints after the steps in `saved`."""
    honest = run_state.token_loss, run_state.token_losses, Checkpoints.due
    run_state.token_loss = lambda model, part: honest[0](model, part) * (NAN if corpus.strikes(False) else 1.0)
    run_state.token_losses = lambda model, part: honest[1](model, part) * (NAN if corpus.strikes(True) else 1.0)
    Checkpoints.due = lambda self: corpus.left["now"] in saved
    try:
        return loop.train(CONFIG, corpus=corpus, device="cpu", checkpoint_dir=folder, progress=False,
                          checkpoint_minutes=seconds)  # fmt: skip
    finally:
        run_state.token_loss, run_state.token_losses, Checkpoints.due = honest


CASES = {
    "none": {"times": 0},
    "once": {"step": 7},
    "before any checkpoint": {"step": 2},
    "in an evaluation": {"step": 8, "evaluating": True},
    "again": {"step": 7, "times": 2},
}


def scenario(ranks, folder):
    for name, fault in CASES.items():
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always", Notice)
            result = run(folder / "checkpoints" / name, Fault(**fault))
        notices = ranks.gather([str(w.message) for w in said if w.category is Notice])
        outcomes, weights = ranks.gather(result.outcome), full_state(result.model)
        assert outcomes[0] == outcomes[1]
        if ranks.rank == 0:
            kept = {"curve": result.curve, "outcome": result.outcome, "weights": weights, "notices": notices}
            torch.save(kept, folder / f"{name}.pt")


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults")
    launch(scenario, 2, folder)
    return {path.stem: torch.load(path, weights_only=False) for path in folder.glob("*.pt")}


@pytest.mark.parametrize(
    ("name", "step", "start", "where"),
    [
        ("once", 7, 5, "training loss is nan at step 7, in part 4 of 4, on rank 1 of 0-1 alone"),
        ("before any checkpoint", 2, 0, "training loss is nan at step 2, in part 4 of 4, on rank 1 of 0-1 alone"),
        ("in an evaluation", 8, 5, "evaluation loss is nan at step 8, in window 5 of 5, on rank 1 of 0-1 alone"),
    ],
)
def test_a_fault_that_does_not_come_again_leaves_the_curve_of_a_run_without_it(two_ranks, name, step, start, where):
    clean, found = two_ranks["none"], two_ranks[name]
    assert found["outcome"].pop("replayed") == [{"step": step, "reason": where, "from": start}]
    assert found["notices"] == [[f"mxfp4+sr, seed 0: {where}: replayed once from step {start}"], []]
    assert clean["notices"] == [[], []]
    assert found["outcome"] == clean["outcome"] and found["outcome"]["status"] == "finished"
    assert repr(found["curve"]) == repr(clean["curve"])
    assert all(torch.equal(found["weights"][key], value) for key, value in clean["weights"].items())


def test_one_that_comes_again_is_a_divergence(two_ranks):
    assert "replayed" not in two_ranks["none"]["outcome"]
    outcome, where = (
        two_ranks["again"]["outcome"],
        "training loss is nan at step 7, in part 4 of 4, on rank 1 of 0-1 alone",
    )
    assert (outcome["status"], outcome["step"]) == ("diverged", 7)
    assert outcome["reason"] == f"{where}; again after a replay from step 5"
    assert outcome["replayed"] == [{"step": 7, "reason": where, "from": 5}]


def test_a_process_by_itself_diverges_at_once(tmp_path):
    class Always(Fault):
        def strikes(self, evaluating):
            return not evaluating and self.left["now"] == 3

    outcome = run(tmp_path, Always()).outcome
    assert outcome["reason"] == "training loss is nan at step 3, in every part of 4" and "replayed" not in outcome


def test_where():
    assert in_parts([[NAN]]) == ""
    assert in_parts([[1.0, 2.0]]) == "the loss of every part is finite"
    assert in_parts([[1.0, math.inf], [NAN, 1.0]]) == "in parts 2, 3 of 4, on every rank"
    assert in_parts([[NAN], [1.0], [NAN]]) == "in parts 1, 3 of 3, on ranks 0, 2 of 0-2"
    assert in_windows([1.0] * 4 + [NAN], 2, 2, 2) == "in window 5 of 5, on rank 1 of 0-1 alone"
    assert in_windows([NAN] * 20, 2, 10, 1) == "in every window of 20"
