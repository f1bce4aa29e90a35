"""How far a run is that goes on or was stopped, as its newest checkpoint says: nothing else of it is on the disk.

A run on a GPU is saved so that this takes a small share of its time (`training.checkpoints.resume`), so what it says
can be minutes old; `saved` tells.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path

from mxfp4.text import count, duration
from mxfp4.training.checkpoints import checkpoint


@dataclass(frozen=True)
class Progress:
    """A run at its newest checkpoint."""

    step: int
    steps: int
    """Its budget."""
    loss: float | None
    """Training loss of that step, nats a token; None before the first."""
    eval_loss: float | None
    """That of the last evaluation."""
    tokens_per_second: float | None
    """Over all its devices, evaluations apart; None before it is timed."""
    seconds_left: float | None
    """To the end of its budget at its pace so far, evaluations included."""
    to_target: bool
    """Whether it ends before, at a target."""
    saved: float
    """Seconds since the checkpoint was written."""


def progress(folder: Path) -> Progress | None:
    """Of the run with checkpoints in `folder`; None without one that can be read, as while one is just being removed."""
    for path in checkpoint.entries(folder):
        try:
            saved = max(time.time() - (path / checkpoint.SUMS).stat().st_mtime, 0.0)
            return _progress(checkpoint.step_of(path), checkpoint.plain(path), saved)
        except (OSError, ValueError, KeyError):
            continue
    return None


def _progress(step: int, state: dict, saved: float) -> Progress:
    config, rows, seconds = state["config"], state["curve"], state["seconds"]
    evaluated = [row["eval_loss"] for row in rows if math.isfinite(row["eval_loss"])]
    loss = rows[-1]["train_loss"] if rows else math.nan
    pace = (seconds["train"] + seconds["evaluate"]) / step if step else None
    return Progress(
        step, config["steps"], loss if math.isfinite(loss) else None, evaluated[-1] if evaluated else None,
        state["timed_tokens"] / seconds["timed"] if seconds["timed"] else None,
        None if pace is None else pace * (config["steps"] - step), bool(config.get("stop_at_target")), saved,
    )  # fmt: skip


def text(p: Progress) -> str:
    """ "at step 480 of 1216, loss 3.2140 (evaluated 3.3010), 152 k tokens/s, about 12.3 min left, last checkpoint: step 480,
    40 s ago"."""
    parts = [f"at step {p.step} of {p.steps}"]
    if p.loss is not None:
        evaluated = "" if p.eval_loss is None else f" (evaluated {p.eval_loss:.4f})"
        parts.append(f"loss {p.loss:.4f}{evaluated}")
    if p.tokens_per_second is not None:
        parts.append(f"{count(p.tokens_per_second)} tokens/s")
    if p.seconds_left is not None:
        parts.append(f"about {duration(p.seconds_left)} left{' at most' * p.to_target}")
    return ", ".join([*parts, f"last checkpoint: step {p.step}, {duration(p.saved)} ago"])
