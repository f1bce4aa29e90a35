"""Whether the processes of a run are alive and get on, as their parent sees it, and what they leave when they do not.

Each rank writes how far it is into memory that it shares with the parent (`Heartbeat`). The parent counts the seconds in
which no rank wrote (`IdleClock`) and asks the kernel for the state of each process (`process_state`). Before it ends
them it has them write the stacks of their threads (`ask_for_stacks`).

NCCL writes a flight recorder of its last collectives when one of them times out (`record_flight`); `torchfrtrace FOLDER`
reads those files and names the rank that did not come.

Source: proc(5), /proc/PID/stat; PyTorch 2.13, FlightRecorder.hpp, FlightRecorder.cpp and ProcessGroupNCCL.hpp; Python,
faulthandler.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

PHASES = ("starting", "training", "checkpoint", "ending")
"""What a rank is at. "starting" lasts to the end of its first step, compilation included."""
BLOCKED = "blocked in the kernel (state D)"
STATES = {"T": "stopped (state T)", "t": "stopped by a debugger (state t)", "Z": "dead", "X": "dead", "D": BLOCKED}
LONGEST_LOOK = 5.0
"""Seconds between two looks that count at most. The parent may have been stopped too, as by Ctrl-Z."""
FLIGHT_PREFIX = "flight-recorder-rank-"
STACKS_PREFIX = "stacks-rank-"
FLIGHT_ENTRIES = 2000
"""Collectives that a rank's flight recorder holds: PyTorch's own default, said here as 0 turns the recorder off."""


def process_state(pid: int, proc: Path = Path("/proc")) -> str:
    """ "alive", "dead", or one of STATES; "unknown" without /proc."""
    if not proc.is_dir():
        return "unknown"
    try:
        stat = (proc / str(pid) / "stat").read_text()
    except OSError:
        return "dead"
    return STATES.get(stat.rpartition(")")[2].split()[0], "alive")  # the name in brackets may hold spaces and brackets


class Heartbeat:
    """How far each of `ranks` ranks is, in shared memory: one rank writes its own part, the parent reads all.

    context: the multiprocessing context that starts the ranks. An instance is an argument of such a process.
    """

    def __init__(self, context: Any, ranks: int):
        self.cells = context.RawArray("q", 3 * ranks)  # of each rank: beats, step, index in PHASES

    def step(self, rank: int, step: int) -> None:
        """`rank` has finished step `step`."""
        self._write(rank, step, "training")

    def phase(self, rank: int, phase: str) -> None:
        """`rank` is now at `phase`, one of PHASES."""
        self._write(rank, self.cells[3 * rank + 1], phase)

    def _write(self, rank: int, step: int, phase: str) -> None:
        self.cells[3 * rank + 1] = step
        self.cells[3 * rank + 2] = PHASES.index(phase)
        self.cells[3 * rank] += 1

    def beats(self) -> int:
        """How often all ranks together have written."""
        return sum(self.cells[::3])

    def steps(self) -> list[int]:
        """The last step of each rank, 0 before its first."""
        return list(self.cells[1::3])

    def phases(self) -> list[str]:
        """What each rank is at."""
        return [PHASES[i] for i in self.cells[2::3]]


class IdleClock:
    """Seconds since a count last changed, without those in which nobody looked."""

    def __init__(self, now: float):
        self.seconds, self.count, self.looked = 0.0, 0, now

    def look(self, count: int, now: float) -> float:
        """The seconds, by a monotonic clock that reads `now`."""
        self.seconds = 0.0 if count != self.count else self.seconds + min(now - self.looked, LONGEST_LOOK)
        self.count, self.looked = count, now
        return self.seconds


def record_flight(folder: Path) -> None:
    """Have this process's NCCL write its flight recorder into `folder` when a collective times out or fails.

    Call it before torch.distributed is initialized. Variables that are set already stay.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if "TORCH_NCCL_TRACE_BUFFER_SIZE" not in os.environ:  # the recorder's former name
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(FLIGHT_ENTRIES))
    if "TORCH_NCCL_DEBUG_INFO_TEMP_FILE" not in os.environ:
        os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(folder / FLIGHT_PREFIX))  # NCCL appends the rank
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")


def offer_stacks(folder: Path, rank: int) -> None:
    """Have this process write the stacks of its threads into `folder` on SIGUSR1, also while it waits in C."""
    folder.mkdir(parents=True, exist_ok=True)
    faulthandler.register(signal.SIGUSR1, open(folder / f"{STACKS_PREFIX}{rank}.txt", "w"), all_threads=True)  # noqa: SIM115


def ask_for_stacks(pids: Sequence[int]) -> None:
    """Have processes that called `offer_stacks` write their stacks; a stopped one does not."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)


class SelfWatch:
    """Ends this process, with the stacks of its threads in a file, once it makes no step: for a rank without a parent that
    watches it. torchrun then ends the others."""

    def __init__(self, folder: Path, rank: int, idle: float, slow: float):
        """idle, slow: seconds without a step while it trains, and in any other of PHASES."""
        folder.mkdir(parents=True, exist_ok=True)
        self.file = open(folder / f"{STACKS_PREFIX}{rank}.txt", "w")  # noqa: SIM115
        self.idle, self.slow = idle, slow
        self.armed = 0.0
        self.phase("starting")

    def step(self) -> None:
        """The rank has finished a step."""
        if time.monotonic() - self.armed > 1.0:
            self.phase("training")

    def phase(self, phase: str) -> None:
        """The rank is now at `phase`, one of PHASES."""
        self.armed = time.monotonic() if phase == "training" else 0.0  # the step after another phase counts at once
        seconds = self.idle if phase == "training" else self.slow
        faulthandler.dump_traceback_later(seconds, exit=True, file=self.file)

    def close(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        self.file.close()


def left_behind(folder: Path) -> str:
    """What lies in `folder` for whoever looks into a failure, in one line; empty where there is nothing."""
    flights = sorted(folder.glob(f"{FLIGHT_PREFIX}*"))
    stacks = [path for path in sorted(folder.glob(f"{STACKS_PREFIX}*")) if path.stat().st_size]
    parts = []
    if flights:
        ranks = ", ".join(path.name.removeprefix(FLIGHT_PREFIX) for path in flights)
        reader = f"torchfrtrace --allow-incomplete-ranks -p {FLIGHT_PREFIX} {folder}"
        parts.append(f"flight recorder of rank {ranks}: {folder / FLIGHT_PREFIX}* (`{reader}`)")
    if stacks:
        parts.append(f"stacks: {' '.join(map(str, stacks))}")
    return "; ".join(parts)
