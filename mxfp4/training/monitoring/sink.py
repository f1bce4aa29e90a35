"""What a run shows to whoever watches it, and the interface of those who do."""

from __future__ import annotations

import math
from typing import Any, Protocol


class RunView(Protocol):
    """The part of a run between two steps that is looked at (`training.run_state.Run`)."""

    step: int
    """Finished steps."""
    rows: list[dict[str, Any]]
    """The curve so far, one row a step; the newest steps of a GPU can be missing until they are fetched."""
    seconds: dict[str, float]
    """`timed`: seconds in which `timed_tokens` were trained on."""
    timed_tokens: int
    """Over all ranks."""
    status: str | None
    """How the run ended; None while it goes on."""
    reason: str | None
    """Why it diverged."""


class Sink:
    """Watches one run, on rank 0. Every method may fail: `Monitor` reports it once and goes on without the sink."""

    def begin(self, run: RunView) -> None:
        """Called once, at the step that the run starts or resumes from, after the first evaluation."""

    def before(self, step: int) -> None:
        """Called before each step; the first is 1."""

    def rows(self, fresh: list[dict[str, Any]], run: RunView) -> None:
        """Called with the rows that are new, each step once, in order. NaN stands for a value that was not taken."""

    def after(self) -> None:
        """Called after each step."""

    def end(self, run: RunView) -> None:
        """Called when the run has finished, diverged or paused."""

    def failed(self, error: BaseException) -> None:
        """Called instead of `end` when the run raised `error`."""


class Speed:
    """Tokens a second between two looks at a run."""

    def __init__(self, run: RunView):
        self.before = run.timed_tokens, run.seconds["timed"]

    def since(self, run: RunView) -> float | None:
        """Tokens a second over all ranks since the last look; None where nothing was timed."""
        now = run.timed_tokens, run.seconds["timed"]
        tokens, seconds = now[0] - self.before[0], now[1] - self.before[1]
        self.before = now
        return tokens / seconds if tokens > 0 and seconds > 0 else None


def evaluations(row: dict[str, Any]) -> dict[str, float]:
    """{forward: evaluation loss in nats a token} of a row: "own" and those of `TrainConfig.eval_forwards`."""
    found = {name: row[name] for name in row if name == "eval_loss" or name.startswith("eval_loss_")}
    named = {name.removeprefix("eval_loss_") if name != "eval_loss" else "own": value for name, value in found.items()}
    return {name: value for name, value in named.items() if not math.isnan(value)}
