"""When a run is ended before its budget: outcomes that are recorded, with their step and reason, not errors.

Diverged is a loss or gradient norm that is NaN or infinite, or a collapse: the mean training loss of the
last WINDOW steps is at ln V, the loss of a model that knows nothing (V tokens in the vocabulary), after it
had been MARGIN below.

Stalled is a run whose evaluation loss has levelled off far above where it should be (`StallRule`), so that the rest of its
budget would show nothing new. The rule reads the run's own curve alone: what a run's record holds may depend on nothing
but its configuration. A run that spends its whole budget is judged again beside BF16, by `analysis.stalled`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

WINDOW = 20
MARGIN = 0.5  # nats a token


class DivergenceWatch:
    """Sees the steps of a run in order; a resumed run shows it the earlier ones again."""

    def __init__(self, vocab_size: int):
        self.know_nothing = math.log(vocab_size)
        self.recent: deque[float] = deque(maxlen=WINDOW)
        self.has_learned = False

    def observe(self, loss: float, grad_norm: float) -> str | None:
        """Why the run has diverged at this step, or None. `loss` in nats a token."""
        if not math.isfinite(loss):
            return f"training loss is {loss}"
        if not math.isfinite(grad_norm):
            return f"gradient norm is {grad_norm}"
        self.recent.append(loss)
        if len(self.recent) < WINDOW:
            return None
        mean = sum(self.recent) / WINDOW
        self.has_learned |= mean < self.know_nothing - MARGIN
        if self.has_learned and mean >= self.know_nothing:
            level = f"ln V = {self.know_nothing:.2f}"
            return f"training loss is back at {level}: mean {mean:.2f} over {WINDOW} steps"
        return None


@dataclass(frozen=True)
class StallRule:
    """A run is stalled at an evaluation when its last `evaluations` are all above `above`, and the lowest of them is not
    `improvement` below the lowest before."""

    evaluations: int
    """0: no run is stalled."""
    improvement: float
    """Nats a token."""
    above: float
    """Nats a token."""

    def reason(self, losses: Sequence[float]) -> str | None:
        """Why the run is stalled, or None. losses: its evaluations in order, nats a token."""
        if not self.evaluations or len(losses) <= self.evaluations:
            return None
        before, recent = min(losses[: -self.evaluations]), min(losses[-self.evaluations :])
        if recent <= self.above or recent <= before - self.improvement:
            return None
        return (
            f"evaluation loss is {losses[-1]:.3f}: over {self.evaluations} evaluations it improved by less than "
            f"{self.improvement:g} nats and stayed above {self.above:g}"
        )
