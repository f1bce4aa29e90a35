"""Token efficiency: tokens to reach a loss, and the overhead of one arm over another, paired over seeds.

P1's overhead is read off one run's evaluation grid, where a step of the grid is about 7 % of a run. Here
the crossing is interpolated on the evaluation curve, differences are taken within a seed (same initial
weights, same batches), and the interval is a bootstrap over seeds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

DRAWS = 10_000
LEVEL = 0.95
"""Of every interval."""


def crossings(curve: pd.DataFrame, targets: np.ndarray) -> np.ndarray:
    """Tokens at which `eval_loss` (nats a token) first reaches each of `targets`; infinite where it never does.

    Linear in tokens between the first evaluation at or below the target and the one before it.
    """
    known = curve["eval_loss"].notna()
    points = curve.loc[known, ["tokens", "eval_loss"]].sort_values("tokens").to_numpy(float)
    tokens, losses = points.T
    lowest = np.minimum.accumulate(losses)
    at = np.searchsorted(-lowest, -np.asarray(targets, float), side="left")  # the first loss at or below the target
    found = np.full(at.shape, np.inf)
    inside = at < len(losses)
    i, t = at[inside], np.asarray(targets, float)[inside]
    before = np.maximum(i - 1, 0)
    drop = np.where(i > 0, losses[before] - losses[i], 1.0)
    share = np.where(i > 0, (losses[before] - t) / drop, 0.0)
    found[inside] = tokens[before] + share * (tokens[i] - tokens[before])
    return found


def crossing(curve: pd.DataFrame, target: float) -> float | None:
    """`crossings` of one target; None if it is never reached."""
    (found,) = crossings(curve, np.array([target]))
    return float(found) if math.isfinite(found) else None


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds. `low` and `high` bound it; NaN with fewer than two seeds, whose spread is
    unknown."""

    mean: float
    low: float
    high: float
    seeds: tuple[int, ...]


def paired_mean(differences: Mapping[int, float]) -> Estimate:
    """Mean of one value a seed, with the percentile interval of a bootstrap over seeds (NaN for no seeds)."""
    seeds = tuple(sorted(differences))
    values = np.array([differences[s] for s in seeds], dtype=float)
    if len(values) < 2:
        return Estimate(float(values.mean()) if len(values) else math.nan, math.nan, math.nan, seeds)
    rng = np.random.default_rng(0)
    means = values[rng.integers(len(values), size=(DRAWS, len(values)))].mean(axis=1)
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(float(values.mean()), float(low), float(high), seeds)


def speedup(step_throughput: float | Sequence[float], token_overhead: float | Sequence[float]):
    """End-to-end speed-up: relative step throughput over (1 + token overhead). P1's Table 2: 1.21 / 1.08 =
    1.12."""
    return np.asarray(step_throughput) / (1 + np.asarray(token_overhead))
