"""When a run counts as diverged: an outcome that is recorded, with its step and reason, not an error.

Diverged is a loss or gradient norm that is NaN or infinite, or a collapse: the mean training loss of the
last WINDOW steps is at ln V, the loss of a model that knows nothing (V tokens in the vocabulary), after it
had been MARGIN below.
"""

from __future__ import annotations

import math
from collections import deque

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
