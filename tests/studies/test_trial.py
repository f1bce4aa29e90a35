"""Scale mi355x cut down to the toy C4, on CPU ranks: trained, killed, gone on with, and shown by a page."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from mxfp4.errors import UserError
from mxfp4.pages.evidence import gather
from mxfp4.studies.failures import Tolerance
from mxfp4.studies.plans import plan
from mxfp4.studies.runner import run_plan
from mxfp4.studies.scales import MI355X, SCALES
from mxfp4.studies.store import Store
from mxfp4.training.checkpoints import checkpoint
from mxfp4.training.execution import distributed
from tests.fakes import TINY, FakeCorpus

SMALL = replace(
    MI355X, batch_size=4, micro_batches=2, checkpoint_minutes=1e-6,
    trial={**MI355X.trial, "model": TINY, "seq_len": 16, "steps": 8, "eval_every": 4, "eval_sequences": 4},
)  # fmt: skip


@dataclass(frozen=True)
class KilledAfterACheckpoint(FakeCorpus):
    """kill -9 of rank 1 once `folder` holds a whole checkpoint."""

    folder: Path = Path()

    def batch(self, step, batch_size, seq_len, seed):
        if distributed.here().rank == 1 and step == 3:
            until = time.monotonic() + 60
            while not checkpoint.latest_step(self.folder) and time.monotonic() < until:
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().batch(step, batch_size, seq_len, seed)


def trial(scale):
    return plan("first", scale, recipes=["mxfp4+h16"], seeds=(0,), corpus="c4:toy")


def test_two_ranks_train_the_trial_and_one_goes_on_after_a_kill(tmp_path, monkeypatch):
    store, two = Store(tmp_path), replace(SMALL, ranks_per_arm=2)
    corpus = KilledAfterACheckpoint(folder=store.checkpoint_dir(trial(two).arms[0], "cpu"))
    killed = run_plan(trial(two), store, gpus=0, corpus=corpus, progress=False, tolerance=Tolerance(retries=0))
    assert killed.failed["mxfp4+h16-s0"].startswith("rank 1 ended with exit code -9")
    assert store.begun()[0].step > 0
    assert run_plan(trial(SMALL), store, gpus=0, corpus=FakeCorpus(), progress=False).trained == ["mxfp4+h16-s0"]
    (record,) = store.load("mi355x")
    assert record.outcome["step"] == 8 and record.config.corpus == "c4:toy" and record.timings["ranks"] == 1
    assert record.timings["attention"] == "auto" and record.timings["cross_entropy"] == "chunked"
    monkeypatch.setitem(SCALES, "mi355x", SMALL)
    assert gather("table1", "mi355x", store=store).arms == ["mxfp4+h16"]


def test_the_real_corpus_and_a_trial_with_another_model_are_refused_without_a_gpu(tmp_path):
    large = replace(trial(SMALL), scale=replace(trial(SMALL).scale, model=MI355X.model))
    for refused in (plan("first", MI355X, corpus="c4:768-799"), large):
        with pytest.raises(UserError, match="scale 'mi355x' trains on a GPU"):
            run_plan(refused, Store(tmp_path), gpus=0, progress=False)
