"""Arms that several ranks train together: started by the store and by torchrun, killed, stopped and taken up by
another number of ranks."""

import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from mxfp4.studies.failures import Tolerance
from mxfp4.studies.plans import plan
from mxfp4.studies.runner import run_plan
from mxfp4.studies.scales import CPU
from mxfp4.studies.store import Store
from mxfp4.training.checkpoints import checkpoint
from mxfp4.training.execution import distributed
from tests.fakes import TINY, FakeCorpus

CORPUS = FakeCorpus()
ALONE = replace(
    CPU, model=TINY, seq_len=16, batch_size=4, micro_batches=2, steps=12, eval_every=4, eval_sequences=4, warmup=3,
    probe_steps=(), jobs=1,
)  # fmt: skip
TOGETHER = replace(ALONE, ranks_per_arm=2)


def arms(scale, recipes=("mxfp4+sr",), **changes):
    return plan("table1", scale, recipes=recipes, seeds=(0,), **changes)


def train(scale, store, corpus=CORPUS, *, again=False, **options):
    return run_plan(arms(scale, **options), store, device="cpu", corpus=corpus, progress=False, again=again)


class RankDies(FakeCorpus):
    """kill -9 of rank 1 at a step of the first arm."""

    def batch(self, step, batch_size, seq_len, seed):
        if distributed.here().rank == 1 and step == 3 and seed == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().batch(step, batch_size, seq_len, seed)


def test_a_rank_that_dies_ends_its_arm_alone_and_the_next_call_goes_on_with_one(tmp_path):
    store = Store(tmp_path)
    both = plan("table1", TOGETHER, recipes=["bf16"], seeds=(0, 1))
    once = Tolerance(retries=0)
    summary = run_plan(both, store, device="cpu", corpus=RankDies(), progress=False, tolerance=once)
    assert list(summary.failed) == ["bf16-s0"] and summary.trained == ["bf16-s1"] and not summary.retried
    assert summary.failed["bf16-s0"].startswith("rank 1 ended with exit code -9: rank 0 (cpu, pid ")
    (record,) = store.load("cpu")
    assert record.timings["ranks"] == 2 and record.outcome["step"] == 12 and not store.begun()
    assert train(ALONE, store, recipes=["bf16"]).trained == ["bf16-s0"]
    assert "ranks" not in store.load("cpu")[0].timings


@dataclass(frozen=True)
class RankStops(FakeCorpus):
    """SIGSTOP of rank 1 at a step of the first attempt."""

    marker: Path = Path()

    def batch(self, step, batch_size, seq_len, seed):
        if distributed.here().rank == 1 and step == 3 and not self.marker.exists():
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().batch(step, batch_size, seq_len, seed)


def test_a_rank_that_is_stopped_is_noticed_and_named_and_its_arm_tried_again(tmp_path, capsys):
    """It is not waited for: the other waits in a collective, which would take minutes. What it leaves behind is kept."""
    store, idle = Store(tmp_path / "runs"), Tolerance(idle_minutes=8 / 60)
    summary = run_plan(
        arms(TOGETHER),
        store,
        device="cpu",
        corpus=RankStops(marker=tmp_path / "stopped"),
        progress=False,
        tolerance=idle,
    )
    assert (summary.trained, summary.retried, summary.failed) == (["mxfp4+sr-s0"], {"mxfp4+sr-s0": 1}, {})
    (said,) = [line for line in capsys.readouterr().err.splitlines() if "no progress" in line]
    assert "mxfp4+sr-s0 at step 3 on cpu: no progress for 0.1" in said and "min while training: rank 0 (cpu" in said
    assert "alive, rank 1 (cpu" in said and "stopped (state T)" in said and "tried again from step 0" in said
    (stacks,) = (tmp_path / "runs" / "logs" / "cpu").glob("*/stacks-rank-0.txt")
    assert str(stacks) in said and "train_arm" in stacks.read_text()
    assert said.split("; tried")[0] in summary.log.read_text() and str(summary.log) in str(summary)


class StoppedAt(FakeCorpus):
    """SIGTERM to the process that trains, at a step."""

    def __init__(self, at):
        super().__init__()
        object.__setattr__(self, "at", at)

    def batch(self, step, batch_size, seq_len, seed):
        if step == self.at:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().batch(step, batch_size, seq_len, seed)


# What book/_static/mxfp4.slurm runs on each node, but for the tiny arm.
BY_HAND = """
import sys
sys.path.insert(0, {tests!r})
from tests.studies.test_runner_on_ranks import ALONE, CORPUS, arms
from mxfp4.studies.store import Store
from mxfp4.studies.runner import run_plan
from mxfp4.training.execution.distributed import reports
assert sys.argv[1:] == ["train", "--scale", "mi355x", "--max-minutes", "1", "--arm", "a b"], sys.argv
summary = run_plan(arms(ALONE, steps=200_000), Store({folder!r}), device="cpu", corpus=CORPUS, progress=False)
if reports():
    print(summary)
"""
# Slurm with two nodes, which are this machine.
PROGRAMS = {
    "scontrol": '[ "$1" = show ] && echo 127.0.0.1 || echo "$@"',
    "srun": 'while [[ $1 == --* ]]; do shift; done; for n in 0 1; do SLURM_NODEID=$n "$@" & echo $! >> {folder}/pids; done; wait',
    "python": 'exec {python} "${{@:1:12}}" {folder}/by_hand.py "${{@:15}}"',
}


def test_two_nodes_train_and_sigterm_leaves_a_checkpoint_that_one_process_takes_up(tmp_path):
    top = Path(__file__).parents[2]
    (tmp_path / "by_hand.py").write_text(BY_HAND.format(tests=str(top), folder=str(tmp_path)))
    (tmp_path / "bin").mkdir()
    for name, text in PROGRAMS.items():
        program = tmp_path / "bin" / name
        program.write_text("#!/bin/bash\n" + text.format(folder=tmp_path, python=sys.executable) + "\n")
        program.chmod(0o755)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    slurm = {"SLURM_JOB_NODELIST": "n[0-1]", "SLURM_JOB_ID": "7", "SLURM_NNODES": "2", "MASTER_PORT": str(port),
             "SLURM_JOB_END_TIME": str(int(time.time()) + 960)}  # fmt: skip
    environment = {**os.environ, **slurm, "PYTHONPATH": str(top), "OMP_NUM_THREADS": "1", "GPUS": "1",
                   "PYTHON": "python", "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}  # fmt: skip
    command = ["bash", str(top / "book" / "_static" / "mxfp4.slurm"), "--arm", "a b"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    store, deadline = Store(tmp_path), time.monotonic() + 100
    while not store.begun() and process.poll() is None and time.monotonic() < deadline:  # until its lock is there
        time.sleep(0.2)
    time.sleep(3)
    for pid in (tmp_path / "pids").read_text().split():
        os.kill(int(pid), signal.SIGTERM)
    said, error = process.communicate(timeout=60)
    assert "stopped with 1 paused and 0 not begun" in said, error
    assert "requeue 7" in said
    (begun,) = store.begun()
    assert begun.step > 0 and begun.holder is None
    (folder,) = (tmp_path / "checkpoints" / "cpu").iterdir()
    summary = run_plan(
        arms(ALONE, steps=200_000), store, device="cpu", corpus=StoppedAt(begun.step + 2), progress=False
    )
    assert summary.paused == ["mxfp4+sr-s0"], summary
    assert store.begun()[0].step > begun.step
    ranks = [{p.name[:4] for p in path.glob("*.distcp")} for path in checkpoint.entries(folder)]
    assert ranks == [{"__0_"}, {"__0_", "__1_"}]


def test_too_few_parts_for_the_ranks_is_one_line(tmp_path):
    summary = train(replace(TOGETHER, micro_batches=1), Store(tmp_path), recipes=["bf16"])
    (reason,) = summary.failed.values()
    assert reason == "micro_batches=1 must be a multiple of the 2 ranks: each takes whole parts of a batch"
    with pytest.raises(StopIteration):
        next((tmp_path / "records").glob("*/*"))
