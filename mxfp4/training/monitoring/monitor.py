"""What watches a run, all together. A sink that fails is reported once and left out; the run goes on."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mxfp4.errors import Notice
from mxfp4.training.monitoring import writers
from mxfp4.training.monitoring.line_log import LineLog
from mxfp4.training.monitoring.profile_window import ProfileWindow, Window
from mxfp4.training.monitoring.sink import RunView, Sink


@dataclass(frozen=True)
class Monitoring:
    """How runs are watched: the options of `mxfp4 train`. It changes neither a result nor a key."""

    stderr: bool = False
    """Whether lines of the log also go to stderr, where that is no terminal."""
    log_every: int = 0
    """Steps between two lines; 0: about 100 lines a run."""
    log_to: str | None = None
    """tensorboard or wandb."""
    profile: Window | None = None
    """Steps whose trace is written."""

    def check(self, steps: int) -> None:
        """UserError for a library that is not there, or a window outside a run of so many steps."""
        if self.log_to is not None:
            writers.check(self.log_to)
        if self.profile is not None:
            self.profile.check(steps)

    def monitor(self, name: str, steps: int, folder: Path, config: dict[str, Any]) -> Monitor:
        """Of one run: `name` in lines, its budget, the folder for what is written, its configuration."""
        sinks: list[Sink] = [LineLog(name, steps, folder, every=self.log_every, stderr=self.stderr)]
        if self.log_to == "tensorboard":
            sinks.append(writers.TensorBoard(folder))
        if self.log_to == "wandb":
            sinks.append(writers.WandB(folder, folder.name, name, config))
        if self.profile is not None:
            sinks.append(ProfileWindow(self.profile, folder))
        return Monitor(sinks)


class Monitor:
    """The sinks of one run; without any it does nothing, as on ranks other than 0."""

    def __init__(self, sinks: Sequence[Sink] = ()):
        self.sinks = list(sinks)
        self.seen = -1

    def begin(self, run: RunView) -> None:
        """Before the first step of this process, with the evaluation of the initial weights done."""
        self.seen = run.rows[-1]["step"] if run.step else -1
        self._each(lambda sink: sink.begin(run))
        self.rows(run)

    def before(self, step: int) -> None:
        """Before each step."""
        self._each(lambda sink: sink.before(step))

    def after(self, run: RunView) -> None:
        """After each step."""
        self._each(lambda sink: sink.after())
        self.rows(run)

    def rows(self, run: RunView) -> None:
        """Show the rows that are new. A step that a replay makes again is not shown again."""
        if not self.sinks or not run.rows or run.rows[-1]["step"] <= self.seen:
            return
        first = next(i for i in range(len(run.rows) - 1, -1, -1) if i == 0 or run.rows[i - 1]["step"] <= self.seen)
        fresh = run.rows[first:]
        self.seen = fresh[-1]["step"]
        self._each(lambda sink: sink.rows(fresh, run))

    def end(self, run: RunView) -> None:
        """The run has finished, diverged or paused."""
        self.rows(run)
        self._each(lambda sink: sink.end(run))

    def failed(self, error: BaseException) -> None:
        """The run raised `error`."""
        self._each(lambda sink: sink.failed(error))

    def _each(self, call: Callable[[Sink], None]) -> None:
        for sink in list(self.sinks):
            try:
                call(sink)
            except Exception as error:  # a full disk, a server that is gone: nothing that a run should end for
                self.sinks.remove(sink)
                why = (str(error).strip().splitlines() or [""])[0]
                text = f"{type(sink).__name__} failed and is left out, the run goes on: {type(error).__name__}: {why}"
                warnings.warn(text, Notice, stacklevel=2)
