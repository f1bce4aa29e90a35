"""`mxfp4 status` says of each run how far it is: step, age of the last checkpoint, and nothing that cannot be known."""

import json
import os
import re
from dataclasses import replace

import pytest

from mxfp4.cli import main
from mxfp4.studies.progress import Progress, progress, text
from mxfp4.studies.runner import run_plan
from mxfp4.studies.store import Store
from mxfp4.training.checkpoints import checkpoint
from tests.fakes.checkpoints import leave
from tests.studies.test_runner_on_ranks import ALONE, CORPUS, TOGETHER, arms

SECONDS = {1: 2, 2: 6}  # by ranks: processes take their time to begin


def stopped(scale, store):
    """A run of 200,000 steps that was stopped after a few seconds; its folder."""
    long = arms(scale, steps=200_000)
    summary = run_plan(
        long, store, device="cpu", corpus=CORPUS, progress=False, max_minutes=SECONDS[scale.ranks_per_arm] / 60
    )
    assert summary.paused == ["mxfp4+sr-s0"]
    return store.checkpoint_dir(long.arms[0], "cpu")


@pytest.mark.parametrize("scale", [ALONE, TOGETHER], ids=["one rank", "two ranks"])
def test_status_says_how_far_a_run_is(scale, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MXFP4_RUNS", str(tmp_path))
    folder = stopped(scale, Store(tmp_path))
    newest = checkpoint.entries(folder)[0]
    os.utime(newest / checkpoint.SUMS, ((newest / checkpoint.SUMS).stat().st_mtime - 7200,) * 2)
    assert main(["status"]) == 0
    (line,) = (x for x in capsys.readouterr().out.splitlines() if folder.name in x)
    found = re.fullmatch(
        rf"scale cpu: {folder.name} at step (\d+) of 200000, loss (\d\.\d{{4}}) \(evaluated \d\.\d{{4}}\), "
        r"(?:[\d.]+ k? ?tokens/s, )?about ([\d.]+) (min|h) left, last checkpoint: step (\d+), 2\.0 h ago, stopped", line,
    )  # fmt: skip
    # A slow machine may have had the time for a first step alone, which is not timed.
    assert found and int(found[1]) == int(found[5]) == checkpoint.step_of(newest), line


def test_figures_are_those_of_the_checkpoint(tmp_path):
    rows = [
        {"step": 0, "train_loss": float("nan"), "eval_loss": 5.0},
        {"step": 1, "train_loss": 4.5, "eval_loss": 4.25},
        {"step": 2, "train_loss": 4.0, "eval_loss": float("nan")},
    ]
    state = {
        "config": {"steps": 10, "stop_at_target": True}, "curve": rows, "timed_tokens": 3000,
        "seconds": {"train": 5.0, "evaluate": 1.0, "timed": 2.0, "part": 6.0},
    }  # fmt: skip
    leave(tmp_path, 2, {}, state)
    found = progress(tmp_path)
    assert replace(found, saved=0) == Progress(2, 10, 4.0, 4.25, 1500.0, 8 * 6.0 / 2, True, 0)
    assert text(replace(found, saved=3)) == (
        "at step 2 of 10, loss 4.0000 (evaluated 4.2500), 1.5 k tokens/s, about 24 s left at most, last "
        "checkpoint: step 2, 3 s ago"
    )


def test_one_that_cannot_be_read_is_passed_over(tmp_path):
    assert progress(tmp_path) is None and progress(tmp_path / "no") is None
    (tmp_path / "step-00000009").mkdir()
    (tmp_path / "step-00000009" / "run.json").write_text(json.dumps({}))  # without sums
    (leave(tmp_path, 8, {}) / "run.json").write_text("half")
    assert progress(tmp_path) is None


def test_a_run_that_has_just_begun_has_no_checkpoint_yet(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MXFP4_RUNS", str(tmp_path))
    lock = Store(tmp_path).lock(arms(ALONE).arms[0], "cpu")
    lock.acquire()
    assert main(["status"]) == 0
    lock.release()
    assert re.search(r"mxfp4-sr-s0-\w+ no checkpoint yet, pid \d+ on ", capsys.readouterr().out)
