"""The arms in work: those of other processes, where each goes, and what its seconds are to be divided by."""

import os
import threading
import time
from dataclasses import replace

import pytest
import torch

from mxfp4.errors import UserError
from mxfp4.studies.arm_queue import Pool
from mxfp4.studies.devices import emptiest, places
from mxfp4.studies.plans import Plan
from mxfp4.studies.runner import run_plan
from mxfp4.studies.store import Store
from mxfp4.studies.train_arm import arm_name
from tests.fakes import FakeCorpus
from tests.fakes.studies import put
from tests.studies.test_plans import CORPUS, SCALE, small


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "runs")


@pytest.mark.parametrize("jobs", [1, 2])
def test_arms_that_another_process_holds_come_last_and_are_trained_when_it_dies(store, jobs, monkeypatch, capsys):
    """No slot waits while an arm is free; what the dead process left is taken up; one line says each, once."""
    wanted = small(recipes=("bf16", "fp8", "mxfp4", "mxfp4+sr"), seeds=(0,))
    locks = [store.lock(config, "cpu") for config in wanted.arms[:2]]
    assert all(lock.acquire() for lock in locks)
    free = [arm_name(config) for config in wanted.arms[2:]]

    waits, say = threading.Event(), Pool._say

    def heard(self, what, text):
        say(self, what, text)
        if what == "left":
            waits.set()

    monkeypatch.setattr(Pool, "_say", heard)

    def die():
        waits.wait(50)
        while len(store.load("cpu")) < 2:
            time.sleep(0.05)
        locks[0].release()
        locks[1].release()

    other = threading.Thread(target=die)
    other.start()
    summary = run_plan(wanted, store, jobs=jobs, device="cpu", corpus=CORPUS, max_minutes=1)
    other.join()
    assert sorted(summary.trained[:2]) == sorted(free) and summary.trained[2:4] and not summary.left
    assert sorted(summary.trained) == sorted(arm_name(config) for config in wanted.arms)
    said = capsys.readouterr().err.splitlines()
    holder = f"pid {os.getpid()} on {os.uname().nodename}"
    assert said[0] == f"bf16-s0 is held by another process ({holder}): free arms first, held ones last"
    assert [line for line in said if "bf16-s0" in line or "fp8-s0" in line][1:] == [
        "left are arms that other processes train: waiting for bf16-s0 fp8-s0"
    ]


def test_an_arm_that_another_process_stored_meanwhile_starts_nothing(store, monkeypatch):
    wanted = small(recipes=("bf16", "fp8"), seeds=(0,))

    class Meanwhile(FakeCorpus):
        def batch(self, step, batch_size, seq_len, seed):
            if step == 0 and not store.load("cpu"):
                put(store, wanted.arms[1])
            return super().batch(step, batch_size, seq_len, seed)

    summary = run_plan(wanted, store, jobs=1, device="cpu", corpus=Meanwhile())
    assert (summary.trained, summary.elsewhere) == (["bf16-s0"], ["fp8-s0"])


def test_an_arm_goes_where_the_fewest_train():
    zero, one = (torch.device("cuda:0"),), (torch.device("cuda:1"),)
    assert emptiest([zero, one, zero], [one, one]) == zero and emptiest([zero, zero, one], [zero, one, zero]) == one
    assert emptiest([zero, one], []) == zero


def test_records_say_how_many_arms_shared_the_device(store):
    """Two of three at a time, then one alone; what an arm says is what its seconds are to be divided by."""
    run_plan(small(recipes=("bf16",), seeds=(0,)), store, jobs=3, device="cpu", corpus=CORPUS)
    assert [r.timings["arms_on_device"] for r in store.load("cpu")] == [1]
    short, long = (small(recipes=("fp8",), seeds=(0,), steps=n, eval_every=20).arms for n in (60, 1500))
    run_plan(Plan("both", SCALE, (*short, *long)), store, jobs=2, device="cpu", corpus=CORPUS)
    shared = {r.config.steps: r.timings["arms_on_device"] for r in store.load("cpu") if r.config.recipe == "fp8"}
    assert 1 < shared[1500] < 1.5 < shared[60] <= 2


def test_arms_are_dealt_over_all_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)

    def names(*args):
        return [" ".join(map(str, place)) for place in places(*args)]

    assert names(torch.device("cuda"), 2) == ["cuda:0", "cuda:1"] * 2
    assert names(torch.device("cuda"), 1, 2) == ["cuda:0 cuda:1"]
    assert names(torch.device("cuda:1"), 2) == ["cuda:1"] * 2
    assert names(torch.device("cpu"), 3) == ["cpu"] * 3 and names(torch.device("cpu"), 1, 2) == ["cpu cpu"]
    with pytest.raises(UserError, match="3 ranks an arm need 3 GPUs, there are 2"):
        places(torch.device("cuda"), 1, 3)
    with pytest.raises(UserError, match="2 ranks an arm need 2 GPUs, not cuda:1 alone"):
        places(torch.device("cuda:1"), 1, 2)
    shared = replace(SCALE, micro_batches=3, batch_size=6, ranks_per_arm=0)
    assert shared.ranks_on(torch.cuda.device_count()) == 1 and shared.ranks_on(0) == 1
    assert replace(shared, micro_batches=4, batch_size=8).ranks_on(torch.cuda.device_count()) == 2
