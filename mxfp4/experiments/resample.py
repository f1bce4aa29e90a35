"""The two-level bootstrap: intervals over seeds and over the windows that models are evaluated on.

The arms of a study share seeds (initial weights, batches) and evaluation windows, so a difference of two arms is a
matrix d[seed, window]. Its mean varies with both: other seeds would have trained other models, other text would have
been evaluated on. A draw resamples rows and columns at once, each with replacement, all arms by the same draw (Owen,
"The pigeonhole bootstrap", Annals of Applied Statistics 2007: for crossed factors it errs on the wide side).
Percentile intervals over three seeds are little more than their range.

A record keeps the losses of each window for the last evaluation alone. For a crossing, what resampled windows change
at the end, arm by arm, is taken to shift that arm's curve as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np

from mxfp4.experiments.efficiency import DRAWS, crossings
from mxfp4.experiments.study import Study

LEVEL = 0.95


@lru_cache(maxsize=8)
def draws(seeds: int, windows: int) -> tuple[np.ndarray, np.ndarray]:
    """(indices of seeds int [DRAWS, seeds], weights of windows float [DRAWS, windows] that sum to 1), always the same.

    One seed or one window is not resampled.
    """
    rng = np.random.default_rng(0)
    rows = rng.integers(seeds, size=(DRAWS, seeds))
    weights = rng.multinomial(windows, np.full(windows, 1 / windows), size=DRAWS) / windows
    return rows, weights


def panel(study: Study, arm: str, seeds: Sequence[int]) -> np.ndarray | None:
    """Final losses [seed, window] of an arm, nats a token; None where a run diverged or has no window losses."""
    records = [study.arms[arm][s] for s in seeds]
    losses = [r.window_losses for r in records]
    whole = all(losses) and len({len(x) for x in losses}) == 1
    if not whole or any(r.outcome["status"] == "diverged" for r in records):
        return None
    return np.array(losses, dtype=float)


def combined(study: Study, weights: Mapping[str, float], seeds: Sequence[int]) -> np.ndarray | None:
    """The sum over arms of weight times `panel`, the difference of two arms for one; None where one has no panel."""
    panels = [panel(study, arm, seeds) for arm in weights]
    if any(p is None for p in panels) or len({p.shape for p in panels}) != 1:
        return None
    return sum(w * p for w, p in zip(weights.values(), panels, strict=True))


def means(values: np.ndarray) -> np.ndarray:
    """[DRAWS] means of `values` [seed, window] under `draws`."""
    rows, weights = draws(*values.shape)
    return np.take_along_axis(weights @ values.T, rows, axis=1).mean(axis=1)


def interval(samples: np.ndarray) -> tuple[float, float]:
    """Percentiles of a bootstrap; samples may be infinite."""
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(samples, [tail, 1 - tail], method="inverted_cdf")
    return float(low), float(high)


def overheads(study: Study, arm: str, reference: str, at: float, seeds: Sequence[int]) -> np.ndarray | None:
    """[DRAWS] token overheads of `arm` over `reference`, at the loss that the reference has at the share `at` of its
    budget (or a study's fixed target). Infinite in draws in which the arm does not get there. None without panels."""
    panels = [panel(study, name, seeds) for name in (arm, reference)]
    if any(p is None for p in panels) or panels[0].shape != panels[1].shape:
        return None
    rows, weights = draws(*panels[0].shape)
    shift, base_shift = (weights @ (p - p.mean(axis=1, keepdims=True)).T for p in panels)  # [DRAWS, seed]
    ours, theirs = ([study.curves(name)[s] for s in seeds] for name in (arm, reference))
    if study.config.stop_at_target:
        target = np.full(len(rows), study.config.target_loss)
    else:
        reached = [np.interp(at * study.tokens, *_points(curve)) for curve in theirs]
        target = np.take_along_axis(np.array(reached) + base_shift, rows, axis=1).mean(axis=1)
    ratio = np.empty(shift.shape)
    for i in range(len(seeds)):
        base = crossings(theirs[i], target - base_shift[:, i])
        with np.errstate(divide="ignore", invalid="ignore"):  # a reference that starts at the target says nothing
            ratio[:, i] = np.where(base > 0, crossings(ours[i], target - shift[:, i]) / base - 1, np.nan)
        ratio[~np.isfinite(base), i] = np.nan
    picked = np.take_along_axis(ratio, rows, axis=1)
    known = ~np.isnan(picked)
    total = np.where(known, picked, 0).sum(axis=1)
    return (total / known.sum(axis=1))[known.any(axis=1)] if known.any() else None


def _points(curve) -> tuple[np.ndarray, np.ndarray]:
    points = curve.dropna(subset="eval_loss").sort_values("tokens")
    return points["tokens"].to_numpy(float), points["eval_loss"].to_numpy(float)
