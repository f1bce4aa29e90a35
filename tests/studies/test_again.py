"""Runs that are taken up or run anew: a NaN on one rank that does not come again is a note in a finished record, and
`--again` sets a record aside before it trains the arm once more."""

import math
from pathlib import Path

import pytest

from mxfp4.cli import main
from mxfp4.cli.commands.plan import _describe
from mxfp4.errors import UserError
from mxfp4.studies.store import Store
from mxfp4.training import run_state
from mxfp4.training.execution import distributed
from tests.fakes import FakeCorpus
from tests.studies.test_runner_on_ranks import ALONE, CORPUS, TOGETHER, arms, train

WHERE = "training loss is nan at step 7, in part 2 of 2, on rank 1 of 0-1 alone"


class Faulty(FakeCorpus):
    """The loss of rank 1 is NaN at step 7, once: a file that outlives the process says whether it was."""

    def batch(self, step, batch_size, seq_len, seed):
        flag, honest = Path(self.fingerprint), run_state.token_loss
        if distributed.here().rank == 1 and step == 6 and flag.exists():
            flag.unlink()

            def token_loss(model, part):
                run_state.token_loss = honest
                return honest(model, part) * math.nan

            run_state.token_loss = token_loss
        return super().batch(step, batch_size, seq_len, seed)


def test_a_fault_of_one_rank_is_a_note_in_the_record_of_a_run_that_goes_on(tmp_path):
    flag = tmp_path / "fault"
    flag.touch()
    stores = Store(tmp_path / "clean"), Store(tmp_path / "faulty")
    for store, corpus in zip(stores, (CORPUS, Faulty(fingerprint=str(flag))), strict=True):
        assert train(TOGETHER, store, corpus).trained == ["mxfp4+sr-s0"]
    assert not flag.exists()
    clean, faulty = (store.load("cpu")[0] for store in stores)
    assert faulty.outcome["status"] == "finished" and clean.curve.equals(faulty.curve)
    (note,) = faulty.outcome["replayed"]
    assert (note["step"], note["from"]) == (7, 0) and note["reason"] == WHERE
    (status,) = arms(TOGETHER).status(stores[1], "cpu")
    assert _describe(status).endswith(f", step 7 replayed ({WHERE})")
    assert not stores[1].begun()


def test_again_sets_the_record_aside_and_trains(tmp_path):
    store = Store(tmp_path)
    train(ALONE, store)
    first = store.load("cpu")[0].data
    for number in (1, 2):
        assert train(ALONE, store).present == ["mxfp4+sr-s0"]
        summary = train(ALONE, store, again=True)
        assert summary.trained == ["mxfp4+sr-s0"] and not summary.present
        (record,) = store.load("cpu")
        aside = sorted(path.name for path in (tmp_path / "replaced" / "cpu").iterdir())
        assert aside == [f"{record.run_id}-{n}" for n in range(1, number + 1)]
        assert record.data["sha256"] == first["sha256"]  # the same bytes, on one rank
    lock = store.lock(arms(ALONE).arms[0], "cpu")
    lock.acquire()
    with pytest.raises(UserError, match="is in work .pid .* its record stays"):
        train(ALONE, store, again=True)
    lock.release()
    assert len(store.load("cpu")) == 1


@pytest.mark.parametrize("options", [[], ["--arm", "bf16", "--dry-run"]])
def test_again_is_for_named_arms(options, capsys):
    assert main(["train", "--again", *options]) == 1
    assert capsys.readouterr().err.startswith("error: --again sets records aside: it goes with --arm RECIPE")
