"""What the training loop takes beside a configuration (tokens, a probe), and what it gives."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor, nn

from mxfp4.training.model import Llama


class Probe(Protocol):
    """Looks at a run. May run forward and backward."""

    def __call__(self, model: nn.Module, step: int, batch: Tensor) -> list[dict]:
        """Tidy rows, of the model before step `step` (from 1) and its batch [batch, seq + 1]."""

    def light(self, model: nn.Module, step: int, batch: Tensor) -> list[dict]:
        """The rows that cost little."""


class TokenSource(Protocol):
    """What the loop needs of a packed corpus."""

    vocab_size: int
    fingerprint: str

    def batch(self, step: int, batch_size: int, seq_len: int, seed: int) -> Tensor: ...
    def eval_windows(self, n: int | None, seq_len: int) -> Tensor: ...
    def bytes_per_token(self, split: str = "validation", windows: Tensor | None = None) -> float: ...


@dataclass
class TrainResult:
    """What a run gave."""

    curve: list[dict]
    """step, tokens, train_loss, grad_norm, lr, eval_loss (nats a token, NaN where not evaluated), eval_bpb
    and balance_loss (NaN for a dense model). Row 0 is the evaluation of the initial weights."""
    probes: list[dict]
    """Rows of the probe."""
    window_losses: list[float]
    """Mean loss of each window of the last evaluation, nats a token; the windows of two arms are the same."""
    outcome: dict
    """status ("finished", "diverged", "stalled" or "paused"), step, tokens, reason, final_loss, final_bpb, target; where a run over
    ranks was taken up again after a value that was not finite, `replayed`: step, reason and from (a step) of each."""
    timings: dict
    """train_seconds, evaluate_seconds, tokens_per_second (None for a run too short to time); on a GPU peak_memory_bytes,
    the largest of the ranks'; on several ranks their number, `ranks`; the choices
    of `Execution` that are not the default. As measured on this machine."""
    model: Llama = field(repr=False)
    """The model as training left it."""
    evaluations: list[dict] = field(default_factory=list)
    """One row for each evaluation and forward (`TrainConfig.eval_forwards`): branch ("" for the run itself), step, tokens,
    forward ("own" or a recipe), windows, loss (nats a token), top1, copy_top1 (shares; NaN where unknown)."""
    branches: list[dict] = field(default_factory=list)
    """Rows of the branches: those of `curve`, and branch."""
    windows: dict[str, list[float]] = field(default_factory=dict)
    """Mean loss of each window in the evaluations that end a decay: {forward, or branch:forward, or floor: [windows]}.
    floor is the loss that no model can go below, where the source knows it."""
