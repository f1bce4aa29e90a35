"""Branches: detours of a run, each a decay of the learning rate that the run itself does not make there.

With a constant rate before a final decay, one run answers for several budgets: shortly before each it branches off,
decays, is judged, and goes on from where it left as if it had not (Haegele et al., arXiv 2405.18392).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from mxfp4.training.checkpoints.resume import named_tensors
from mxfp4.training.config import TrainConfig


@dataclass(frozen=True)
class Branch:
    """A detour that leaves after step `start` and ends with step `end`."""

    name: str
    """The budget in steps, or the recipe of a decay in another one: what records call it."""
    start: int
    end: int
    recipe: str


def branches(config: TrainConfig) -> list[Branch]:
    """The branches of a run, in the order in which they leave it."""
    short = [Branch(str(b), b - config.cooldown_of(b), b, config.recipe) for b in config.short_budgets]
    last = [Branch(r, config.steps - config.cooldown_steps, config.steps, r) for r in config.decay_recipes]
    return sorted([*short, *last], key=lambda b: b.start)


@contextmanager
def kept(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Puts parameters and the optimizer's state back on leaving, in place: a captured step reads them where they are."""
    tensors = list(named_tensors(model, optimizer).values())
    before = [t.clone() for t in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            torch._foreach_copy_(tensors, before)
