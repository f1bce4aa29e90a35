"""The log of a run: a line every few steps, in a file, and on stderr where that is no terminal.

    2026-12-01T16:40:12Z mxfp4+h16-s0 step 400/11213 loss 4.8123 lr 7.98e-04 grad 0.51, 152 k tokens/s, 3.2 h left

The file has at most about LINES lines a run, and one for each evaluation, start and end. stderr stays silent for the
first QUIET_SECONDS, so that a queue of toy runs prints nothing.
"""

from __future__ import annotations

import sys
import time
import traceback
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from mxfp4.text import count, duration
from mxfp4.training.monitoring.sink import RunView, Sink, Speed, evaluations

LINES = 100
QUIET_SECONDS = 30.0
FILE = "train.log"


class LineLog(Sink):
    """Writes FILE in `folder`. every: steps between two lines, 0 for about LINES lines a run."""

    def __init__(self, name: str, steps: int, folder: Path, *, every: int = 0, stderr: bool = False):
        self.name, self.steps = name, steps
        self.every = every or -(-steps // LINES)
        self.path = folder / FILE
        self.stream: TextIO | None = sys.stderr if stderr and not sys.stderr.isatty() else None
        self.started = time.monotonic()
        self.announced = False

    def begin(self, run: RunView) -> None:
        """Open the file: a resumed run appends to it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.first, self.speed = run.step, Speed(run)
        self.write(f"{'resumed' if run.step else 'started'} at step {run.step}/{self.steps}", on_stderr=False)

    def rows(self, fresh: list[dict[str, Any]], run: RunView) -> None:
        """A line for each row whose step is due or that holds an evaluation."""
        due = [row for row in fresh if row["step"] % self.every == 0 or row["step"] == self.steps or evaluations(row)]
        if not due:
            return
        speed = self.speed.since(run)
        for row in due:
            last = row is due[-1]
            self.write(self._line(row, speed if last else None, self._left(run) if last else None))

    def _line(self, row: dict[str, Any], speed: float | None, left: float | None) -> str:
        parts = [f"step {row['step']}/{self.steps}"]
        if row["step"]:
            parts[0] += f" loss {row['train_loss']:.4f} lr {row['lr']:.3g} grad {row['grad_norm']:.3g}"
        parts += [f"evaluation {name} {loss:.4f}" for name, loss in evaluations(row).items()]
        if speed is not None:
            parts.append(f"{count(speed)} tokens/s")
        if left is not None:
            parts.append(f"{duration(left)} left")
        return ", ".join(parts)

    def _left(self, run: RunView) -> float | None:
        """Seconds to the end of the budget at this process's pace, evaluations and checkpoints included."""
        made = run.step - self.first
        return (time.monotonic() - self.started) / made * (self.steps - run.step) if made > 0 else None

    def end(self, run: RunView) -> None:
        """Say how the run ended."""
        self.write(f"{run.status} at step {run.step}/{self.steps}" + (f": {run.reason}" if run.reason else ""))

    def failed(self, error: BaseException) -> None:
        """Keep the traceback: the queue's summary has one line alone."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.write("failed\n" + "".join(traceback.format_exception(error)).rstrip(), on_stderr=False)

    def write(self, text: str, *, on_stderr: bool = True) -> None:
        """Append a line; it is on the disk's side of this process at once, so that a killed run keeps it."""
        line = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ} {self.name} {text}\n"
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(line)
        if self.stream is None or not on_stderr or time.monotonic() - self.started < QUIET_SECONDS:
            return
        if not self.announced:
            self.announced = True
            self.stream.write(f"{self.name}: log in {self.path}\n")
        self.stream.write(line)
        self.stream.flush()
