"""Intervals over seeds and over the windows that models are evaluated on: a two-level bootstrap, and its floor.

The arms of a study share seeds (initial weights, batches) and evaluation windows, so a difference of two arms is a
matrix d[seed, window]. Its mean varies with both: other seeds would have trained other models, other text would have
been evaluated on. A draw resamples rows and columns at once, each with replacement, all arms by the same draw (Owen,
"The pigeonhole bootstrap", Annals of Applied Statistics 2007: for crossed factors it errs on the wide side).

Three values that happen to have one sign have a bootstrap interval on that side of zero, which chance alone does once
in four times. All arms of a study tell together, and with many degrees of freedom, how far a run lies from what its arm
and its seed have in common with others: the **scatter**, what is left of arm x seed once the means of arms and of seeds
are out. Runs that give the same bits when repeated have it too: it is of other seeds. No interval is narrower than
Student's, made from the scatter; of two arms alone, or of one value a seed (an order, a slope), that is
the paired t interval. The arms are taken to scatter alike: the interval of one that scatters more than the others is
too narrow.

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


def scatter(table: np.ndarray) -> tuple[float, int]:
    """(standard deviation, degrees of freedom) of `table` [arm, seed] without the means of arms and seeds."""
    n, k = table.shape
    rest = table - table.mean(axis=0) - table.mean(axis=1, keepdims=True) + table.mean()
    freedom = (n - 1) * (k - 1)
    return float(np.sqrt((rest**2).sum() / freedom)) if freedom else float("nan"), freedom


def final_table(study: Study, seeds: Sequence[int]) -> np.ndarray:
    """[arm, seed] final losses of the arms that finished all of `seeds`."""
    whole = [[r[s] for s in seeds] for r in study.arms.values() if set(seeds) <= r.keys()]
    kept = [rs for rs in whole if all(r.outcome["status"] != "diverged" for r in rs)]
    return np.array([[r.outcome["final_loss"] for r in rs] for rs in kept], dtype=float).reshape(-1, len(seeds))


def crossing_table(study: Study, target: float, seeds: Sequence[int]) -> np.ndarray:
    """[arm, seed] logarithms of the tokens to `target`, of the arms that reach it in all of `seeds`."""
    curves = [[study.curves(arm)[s] for s in seeds] for arm, r in study.arms.items() if set(seeds) <= r.keys()]
    at = np.array([[crossings(c, np.array([target]))[0] for c in row] for row in curves]).reshape(-1, len(seeds))
    return np.log(at[(np.isfinite(at) & (at > 0)).all(axis=1)])


def run_noise(table: np.ndarray, count: int) -> np.ndarray | None:
    """[count, DRAWS] deviations of means over seeds of `count` arms, by the scatter of `table`; None without freedom."""
    n, k = table.shape
    sd, freedom = scatter(table) if n > 1 and k > 1 else (0.0, 0)
    if not freedom:
        return None
    rng = np.random.default_rng(1)
    wide = np.sqrt(freedom / rng.chisquare(freedom, DRAWS))
    return sd / np.sqrt(k) * rng.standard_normal((count, DRAWS)) * wide


def overheads(
    study: Study, arm: str, reference: str, target: float, at: float, seeds: Sequence[int]
) -> np.ndarray | None:
    """[DRAWS] token overheads of `arm` over `reference` at `target`, the loss that the reference has at the share `at` of
    its budget, which moves with the draw (a study's fixed one does not). `seeds` may be fewer than those that gave it.
    Infinite in draws in which the arm does not get there. None without panels."""
    panels = [panel(study, name, seeds) for name in (arm, reference)]
    if any(p is None for p in panels) or panels[0].shape != panels[1].shape:
        return None
    rows, weights = draws(*panels[0].shape)
    shift, base_shift = (weights @ (p - p.mean(axis=1, keepdims=True)).T for p in panels)  # [DRAWS, seed]
    ours, theirs = ([study.curves(name)[s] for s in seeds] for name in (arm, reference))
    targets = np.full(len(rows), target)
    if not study.config.stop_at_target:
        reached = np.array([np.interp(at * study.tokens, *_points(curve)) for curve in theirs])
        targets += np.take_along_axis(reached + base_shift, rows, axis=1).mean(axis=1) - reached.mean()
    ratio = np.empty(shift.shape)
    for i in range(len(seeds)):
        base = crossings(theirs[i], targets - base_shift[:, i])
        with np.errstate(divide="ignore", invalid="ignore"):  # a reference that starts at the target says nothing
            ratio[:, i] = np.where(base > 0, crossings(ours[i], targets - shift[:, i]) / base - 1, np.nan)
        ratio[~np.isfinite(base), i] = np.nan
    picked = np.take_along_axis(ratio, rows, axis=1)
    known = ~np.isnan(picked)
    said = known.any(axis=1)
    return np.where(known, picked, 0)[said].sum(axis=1) / known[said].sum(axis=1) if said.any() else None


def _points(curve) -> tuple[np.ndarray, np.ndarray]:
    points = curve.dropna(subset="eval_loss").sort_values("tokens")
    return points["tokens"].to_numpy(float), points["eval_loss"].to_numpy(float)
