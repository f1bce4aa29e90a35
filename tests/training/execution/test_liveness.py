"""Processes that live, stop and die, as /proc shows them; heartbeats; idle time; what a failure leaves behind."""

import multiprocessing
import os
import subprocess
import sys

import pytest

from mxfp4.training.execution.liveness import (
    FLIGHT_PREFIX,
    Heartbeat,
    IdleClock,
    left_behind,
    process_state,
    record_flight,
)


@pytest.mark.parametrize(
    ("letter", "state"),
    [
        ("R", "alive"), ("S", "alive"), ("T", "stopped (state T)"), ("t", "stopped by a debugger (state t)"),
        ("Z", "dead"), ("D", "blocked in the kernel (state D)"),
    ],
)  # fmt: skip
def test_the_state_of_a_process(letter, state, tmp_path):
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "stat").write_text(f"7 (a T) Z name) {letter} 1 7 7 0 -1\n")
    assert process_state(7, tmp_path) == state
    assert process_state(8, tmp_path) == "dead" and process_state(7, tmp_path / "none") == "unknown"
    assert process_state(os.getpid()) == "alive"


def test_each_rank_writes_its_own_part():
    heartbeat = Heartbeat(multiprocessing, 2)
    assert (heartbeat.beats(), heartbeat.steps(), heartbeat.phases()) == (0, [0, 0], ["starting"] * 2)
    heartbeat.step(1, 480)
    heartbeat.phase(1, "checkpoint")
    heartbeat.step(0, 481)
    assert (heartbeat.beats(), heartbeat.steps(), heartbeat.phases()) == (3, [481, 480], ["training", "checkpoint"])


def test_idle_time_counts_from_the_last_beat_and_not_while_nobody_looks():
    clock = IdleClock(100.0)
    assert [clock.look(1, 101.0), clock.look(1, 103.0), clock.look(2, 104.0), clock.look(2, 106.0)] == [0, 2, 0, 2]
    assert clock.look(2, 4000.0) == 7  # the parent was stopped for an hour, and the ranks perhaps with it


def test_the_flight_recorder_is_on_and_writes_here_unless_told_otherwise(tmp_path, monkeypatch):
    names = ("TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DUMP_ON_TIMEOUT")
    for name in (*names, "TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"):
        monkeypatch.delenv(name, raising=False)
    record_flight(tmp_path / "arm")
    assert [os.environ[name] for name in names] == ["2000", str(tmp_path / "arm" / FLIGHT_PREFIX), "1"]
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "50")
    record_flight(tmp_path / "other")
    assert [os.environ[name] for name in names] == ["50", str(tmp_path / "arm" / FLIGHT_PREFIX), "1"]
    for name in names:
        monkeypatch.delenv(name)


def test_what_a_failure_leaves_behind_is_named(tmp_path):
    assert left_behind(tmp_path) == ""
    for name in ("flight-recorder-rank-0", "flight-recorder-rank-2", "stacks-rank-1.txt"):
        (tmp_path / name).write_text("x")
    (tmp_path / "stacks-rank-0.txt").touch()
    assert left_behind(tmp_path) == (
        f"flight recorder of rank 0, 2: {tmp_path}/flight-recorder-rank-* (`torchfrtrace --allow-incomplete-ranks "
        f"-p flight-recorder-rank- {tmp_path}`); stacks: {tmp_path}/stacks-rank-1.txt"
    )


ALONE = """
import sys, time
from pathlib import Path
from mxfp4.training.execution.liveness import SelfWatch
watch = SelfWatch(Path(sys.argv[1]), 3, idle=0.5, slow=60)
watch.step()
time.sleep(50)
"""


def test_a_rank_that_nobody_watches_ends_itself(tmp_path):
    done = subprocess.run([sys.executable, "-c", ALONE, str(tmp_path)], timeout=45)
    assert done.returncode == 1 and "<module>" in (tmp_path / "stacks-rank-3.txt").read_text()
