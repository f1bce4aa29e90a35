"""A profiler window: a Chrome trace of some steps in the middle of a run (chrome://tracing, Perfetto).

The profiler exists from one step before the window, its warm-up, to the window's end. Source: torch.profiler of
PyTorch 2.13, `schedule(wait=0, warmup=1, active=STEPS, repeat=1)`.
"""

from __future__ import annotations

import re
import sys
import warnings
from pathlib import Path
from typing import NamedTuple

import torch
from tqdm import tqdm

from mxfp4.errors import Notice, UserError
from mxfp4.training.monitoring.sink import RunView, Sink


class Window(NamedTuple):
    """Steps `start` to `start + steps - 1`; the first of a run is 1."""

    start: int
    steps: int

    @property
    def last(self) -> int:
        return self.start + self.steps - 1

    def check(self, steps: int) -> None:
        """UserError unless the window lies in a run of so many steps."""
        if self.start < 2 or self.last > steps:
            raise UserError(
                f"--profile {self.start}:{self.steps} covers steps {self.start} to {self.last}: allowed are 2 to {steps}"
                " (the step before the window warms up)"
            )


def window(text: str) -> Window:
    """The window that START:STEPS names. UserError for another text."""
    found = re.fullmatch(r"(\d+):(\d+)", text)
    if found is None or int(found[2]) < 1:
        raise UserError(f"--profile {text!r} is no window: write START:STEPS, as in 200:5")
    return Window(int(found[1]), int(found[2]))


class ProfileWindow(Sink):
    """Writes `folder`/trace-FIRST-LAST.json.gz, of rank 0 alone."""

    def __init__(self, where: Window, folder: Path):
        self.where = where
        self.path = folder / f"trace-{where.start}-{where.last}.json.gz"
        self.profiler: torch.profiler.profile | None = None

    def begin(self, run: RunView) -> None:
        """Say so where a resumed run is past the window, unless the trace is there."""
        if run.step >= self.where.start - 1 and not self.path.is_file():
            text = f"--profile {self.where.start}:{self.where.steps}: the run goes on from step {run.step}, no trace"
            warnings.warn(text, Notice, stacklevel=2)

    def before(self, step: int) -> None:
        """Start with the step before the window."""
        if step != self.where.start - 1 or self.profiler is not None or self.path.is_file():
            return
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
        plan = torch.profiler.schedule(wait=0, warmup=1, active=self.where.steps, repeat=1)
        self.profiler = torch.profiler.profile(activities=kinds, schedule=plan, on_trace_ready=self._write)
        self.profiler.start()

    def after(self) -> None:
        """Count the step; after the window's last, stop."""
        if self.profiler is not None:
            self.profiler.step()
            if self.path.is_file():
                self._stop()

    def _write(self, profiler: torch.profiler.profile) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(self.path))
        tqdm.write(f"trace of steps {self.where.start} to {self.where.last}: {self.path}", file=sys.stderr)

    def _stop(self) -> None:
        if self.profiler is not None:
            self.profiler.stop()
            self.profiler = None

    def end(self, run: RunView) -> None:
        """A run that ends inside the window leaves the part of it that there is."""
        self._stop()

    def failed(self, error: BaseException) -> None:
        """As `end`."""
        self._stop()
