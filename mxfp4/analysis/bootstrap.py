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
the paired t interval.

Arms need not scatter alike: one that hardly trains ends somewhere else with each seed. Its variance would widen all
intervals, and the pooled one would be too narrow for its own. So arms whose variance is an outlier by Cochran's test, at
the level of 1 % that ISO 5725-2 (7.3.3) sets for it, the largest first, stand **apart**: they are not in the pool, and
their noise is made from their own few values. That keeps the pool clean, and finds an arm that scatters three times as
much in few seeds hardly ever. So the variance of a comparison is moderated (Smyth 2004, "Linear models and empirical Bayes
methods", Statistical Applications in Genetics and Molecular Biology 3): the mean of what its own arms show among
themselves and what the pool shows, weighted by degrees of freedom, of which the pool counts for PRIOR. The pool alone would
be right four times in five, and not 95 %, for two arms that scatter 1.6 times as much as the others.

A record keeps the losses of each window for the last evaluation alone. For a crossing, what resampled windows change
at the end, arm by arm, is taken to shift that arm's curve as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import pandas as pd
from scipy.special import betaincc

from mxfp4.analysis.study import Study
from mxfp4.analysis.token_efficiency import DRAWS, LEVEL, crossings

OUTLYING = 0.01
"""The level of Cochran's test."""
PRIOR = 2
"""Degrees of freedom for which the pool counts: arms differ so much that more would leave those that scatter more than
others with too narrow an interval. Smyth's estimate from moments is between 1 and 2 in the largest study of scale gpu."""


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
    """Final losses [seed, window] of an arm, nats a token; None where a run did not finish or has no window losses."""
    records = [study.arms[arm][s] for s in seeds]
    losses = [r.window_losses for r in records]
    whole = all(losses) and len({len(x) for x in losses}) == 1
    if not whole or any(r.outcome["status"] != "finished" for r in records):
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


@dataclass(frozen=True)
class Scatter:
    """What arm and seed do not explain, as standard deviations of one run, with their degrees of freedom."""

    sd: float
    """Of the arms that scatter alike; NaN without a degree of freedom."""
    freedom: int
    apart: dict[str, float]
    """{arm: its own}, of the arms that do not: one degree of freedom less than there are seeds."""
    own_freedom: int
    most: tuple[str, float] = ("", 0.0)
    """Of those that scatter alike the arm with the largest variance, and its share of the sum of theirs."""

    def of(self, arm: str) -> tuple[float, int]:
        return (self.apart[arm], self.own_freedom) if arm in self.apart else (self.sd, self.freedom)


def scatter(table: pd.DataFrame) -> Scatter:
    """That of `table` [arm, seed]: the arms that stand apart are taken out one by one, the largest variance first."""
    pool, k = table, table.shape[1]
    while True:
        squares = _unexplained(pool, pool)
        if k < 2 or squares.sum() == 0 or not _outlying(squares.max() / squares.sum(), len(pool), k - 1):
            break
        pool = pool.drop(index=squares.idxmax())
    freedom = max((len(pool) - 1) * (k - 1), 0)
    sd = float(np.sqrt(squares.sum() / freedom)) if freedom else float("nan")
    apart = table.drop(index=pool.index)
    most = (str(squares.idxmax()), float(squares.max() / squares.sum())) if squares.sum() else ("", 0.0)
    own = {a: float(np.sqrt(v / (k - 1))) for a, v in _unexplained(apart, pool).items()}
    return Scatter(sd, freedom, own, k - 1, most)


def _unexplained(table: pd.DataFrame, pool: pd.DataFrame) -> pd.Series:
    """{arm: sum of squares} of what is left of `table` without the means of arms, and of seeds over `pool`."""
    rest = table - pool.mean()
    return ((rest.sub(rest.mean(axis=1), axis=0)) ** 2).sum(axis=1)


def _outlying(share: float, arms: int, freedom: int) -> bool:
    """Whether the largest of `arms` variances, each of `freedom`, has too large a `share` of their sum (Cochran 1941).

    The arms' common means of seeds have taken 1 / `arms` of the arm's own squares and spread it over the others; without
    that the share of one of four arms could not exceed 3/4, and no variance of it would be found large.
    """
    if arms < 3:
        return False
    own = min(share * arms / (arms - 1), 1.0)
    return bool(arms * betaincc(freedom / 2, (arms - 2) * freedom / 2, own) < OUTLYING)


def final_table(study: Study, seeds: Sequence[int]) -> pd.DataFrame:
    """[arm, seed] final losses of the arms that finished all of `seeds`."""
    whole = {arm: [r[s] for s in seeds] for arm, r in study.arms.items() if set(seeds) <= r.keys()}
    kept = {
        arm: [r.outcome["final_loss"] for r in rs]
        for arm, rs in whole.items()
        if all(r.outcome["status"] == "finished" for r in rs)
    }
    return pd.DataFrame.from_dict(kept, orient="index", columns=list(seeds), dtype=float)


def crossing_table(study: Study, target: float, seeds: Sequence[int]) -> pd.DataFrame:
    """[arm, seed] logarithms of the tokens to `target`, of the arms that reach it in all of `seeds`."""
    curves = {arm: [study.curves(arm)[s] for s in seeds] for arm, r in study.arms.items() if set(seeds) <= r.keys()}
    at = {arm: [crossings(c, np.array([target]))[0] for c in row] for arm, row in curves.items()}
    found = pd.DataFrame.from_dict(at, orient="index", columns=list(seeds), dtype=float)
    return np.log(found[(np.isfinite(found) & (found > 0)).all(axis=1)])


def run_noise(table: pd.DataFrame, arms: Sequence[str], stream: int = 0) -> np.ndarray | None:
    """[arms, DRAWS] deviations of the arms' means over the seeds, by the scatter of `table`, of which each need not be
    part; None without freedom. Another `stream` is independent of this one."""
    found = scatter(table)
    if not found.freedom:
        return None
    found = _moderated(table, arms, found)
    rng, k = np.random.default_rng(1 + stream), table.shape[1]
    pooled, normal = rng.chisquare(found.freedom, DRAWS), rng.standard_normal((len(arms), DRAWS))
    noise = np.empty_like(normal)
    for i, (sd, freedom) in enumerate(map(found.of, arms)):
        chi = rng.chisquare(freedom, DRAWS) if arms[i] in found.apart else pooled
        noise[i] = sd / np.sqrt(k) * normal[i] * np.sqrt(freedom / chi)
    return noise


def seed_noise(table: pd.DataFrame) -> np.ndarray:
    """[DRAWS] deviations that all arms of `table` share, as they share seeds: of the mean over seeds of their mean, by
    Student's; for what a common shift does not leave alone, as a ratio. `table` has two seeds or more."""
    rng, k = np.random.default_rng(1_000_003), table.shape[1]
    return table.mean().std(ddof=1) / np.sqrt(k) * rng.standard_t(k - 1, DRAWS)


def _moderated(table: pd.DataFrame, arms: Sequence[str], found: Scatter) -> Scatter:
    """`found` with the variance of its pool drawn towards what those of `arms` in it scatter among themselves."""
    compared = table.loc[[arm for arm in dict.fromkeys(arms) if arm in table.index and arm not in found.apart]]
    freedom = max(len(compared) - 1, 0) * found.own_freedom
    prior = min(PRIOR, found.freedom - freedom)
    if not freedom:
        return found
    squares = _unexplained(compared, compared).sum() + prior * found.sd**2
    return replace(found, sd=math.sqrt(squares / (prior + freedom)), freedom=prior + freedom)


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
