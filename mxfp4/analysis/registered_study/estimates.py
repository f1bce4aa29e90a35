"""Effects and their tests: paired over seeds, between settings, over a factorial, over ranks. Knows no claim and no study.

Student's tests and intervals are scipy's (`ttest_rel`, `ttest_ind`), the sign test `binomtest`, the order of arms a
permutation test of Spearman's correlation. Several claims together are adjusted by Holm's procedure (1979); a ratio has
Fieller's interval (1954).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from scipy import optimize, stats

# Numbers of book/study.yml's analysis; a test compares them.
CONFIDENCE = 0.95
CONFIDENCE_90 = 0.9
"""Of the interval that decides about equivalence."""
LEVEL = 0.05
POWER = 0.8


@dataclass(frozen=True)
class Estimate:
    """An effect and its test. NaN where there is no answer; `note` says why."""

    value: float
    low: float = math.nan
    """Ends of the 95 % interval."""
    high: float = math.nan
    low90: float = math.nan
    """Ends of the 90 % interval, for equivalence."""
    high90: float = math.nan
    p: float = math.nan
    """Two-sided, of the hypothesis that the effect is the bound of the claim."""
    n: int = 0
    """Seeds, or whatever `over` names."""
    standard_error: float = math.nan
    df: float = math.nan
    over: str = "seeds"
    note: str = ""

    def smallest(self, level: float = LEVEL) -> float:
        """The smallest effect that this contrast shows with power 0.8."""
        return smallest_effect(self.standard_error, self.df, level)

    def side(self, bound: float, p: float | None = None) -> int:
        """1 or -1 where the effect lies significantly above or below the bound, else 0."""
        significant = (self.p if p is None else p) <= LEVEL
        return int(np.sign(self.value - bound)) if significant and not math.isnan(self.value) else 0


def paired(a: pd.Series, b: pd.Series, bound: float = 0.0) -> Estimate:
    """Mean of a - b over shared seeds, with Student's intervals and the p value against `bound`.

    A seed in which either is NaN is left out and named. Infinite values leave no mean: the p value is then that of an
    exact sign test, and the value is the infinity of the side that has more seeds.
    """
    seeds = sorted(set(a.index) & set(b.index))
    x, y = a.loc[seeds].to_numpy(float), b.loc[seeds].to_numpy(float)
    known = ~(np.isnan(x) | np.isnan(y))
    missing = [str(seed) for seed, is_known in zip(seeds, known, strict=True) if not is_known]
    x, y, note, n = x[known], y[known], f"no value in seed {', '.join(missing)}" if missing else "", int(known.sum())
    finite = bool(np.isfinite(x).all() and np.isfinite(y).all())
    if n < 2:
        d = float(x[0] - y[0]) if n and finite else math.nan
        return Estimate(d, n=n, note=join_notes(f"{n} shared seed{'s' * (n != 1)}; a test needs 2", note))
    if not finite:
        return _sign_test(x, y, bound, note)
    mean = float((x - y).mean())
    if np.ptp(x - y) <= 1e-12 * max(1.0, np.abs([x, y]).max()):  # no scatter, so no t: the value is exact
        return Estimate(mean, mean, mean, mean, mean, float(abs(mean - bound) <= 1e-12), n, 0.0, n - 1, note=note)
    test = stats.ttest_rel(x, y)
    ends = [float(end) for level in (CONFIDENCE, CONFIDENCE_90) for end in test.confidence_interval(level)]
    p = float(stats.ttest_rel(x, y + bound).pvalue)
    return Estimate(mean, *ends, p, n, float(stats.sem(x - y)), n - 1, note=note)


def join_notes(*notes: str) -> str:
    """The notes that say something, in one line."""
    return "; ".join(filter(None, notes))


def _sign_test(x: np.ndarray, y: np.ndarray, bound: float, note: str) -> Estimate:
    above, below = int((x > y + bound).sum()), int((x < y + bound).sum())  # two equal infinities are a tie
    p = stats.binomtest(above, above + below).pvalue if above + below else 1.0
    value = math.inf if above > below else -math.inf if below > above else math.nan
    sign = f"an arm has no finite loss, so this is a sign test: above in {above} of {len(x)} seeds, below in {below}"
    return Estimate(value, p=float(p), n=len(x), note=join_notes(sign, note))


def unpaired(ours: pd.Series, theirs: pd.Series, bound: float = 0.0) -> Estimate:
    """Mean of the paired differences of one setting less that of another, by Welch's test.

    A side with one seed is compared with the prediction interval of the other, as if both scattered alike.
    """
    x, y = (s.dropna().to_numpy(float) for s in (ours, theirs))
    n, m = len(x), len(y)
    if min(n, m) < 1 or max(n, m) < 2 or not (np.isfinite(x).all() and np.isfinite(y).all()):
        return Estimate(math.nan, n=min(n, m), note=f"{n} and {m} seeds, or a run that failed: no test of two settings")
    value, spread = float(x.mean() - y.mean()), [s.var(ddof=1) / len(s) if len(s) > 1 else None for s in (x, y)]
    if None in spread:
        many = x if n > 1 else y
        error, df = math.sqrt(many.var(ddof=1) * (1 + 1 / len(many))), len(many) - 1
        note = "one seed on one side, which is taken to scatter like the other side"
    else:
        error, df, note = math.sqrt(sum(spread)), float(stats.ttest_ind(x, y, equal_var=False).df), ""
    return replace(_student(value, error, df, bound), n=min(n, m), note=note)


def _student(value: float, error: float, df: float, bound: float) -> Estimate:
    ends = [value + sign * stats.t.ppf(1 - tail, df) * error for tail in (0.025, 0.05) for sign in (-1, 1)]
    p = 2 * stats.t.sf(abs(value - bound) / error, df) if error else float(value == bound)
    return Estimate(value, *map(float, ends), float(p), standard_error=error, df=df)


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Holm's adjusted p values. A missing one (NaN) counts as 1, so that it makes no other one smaller."""
    p = {name: 1.0 if math.isnan(value) else value for name, value in p_values.items()}
    adjusted, worst = {}, 0.0
    for rank, name in enumerate(sorted(p, key=p.__getitem__)):
        worst = max(worst, min(1.0, (len(p) - rank) * p[name]))
        adjusted[name] = worst
    return {name: adjusted[name] for name in p}


def smallest_effect(standard_error: float, df: float, level: float = LEVEL, power: float = POWER) -> float:
    """The effect that a two-sided t test finds with this power, from the noncentral t distribution.

    The chance of significance on the wrong side is left out; it is below 1e-4 for powers of 0.5 and more.
    """
    if math.isnan(standard_error) or standard_error == 0:
        return standard_error
    critical = stats.t.ppf(1 - level / 2, df)
    shift = optimize.brentq(lambda d: stats.nct.sf(critical, df, d) - power, 0.0, 4 * critical + 4)
    return float(standard_error * shift)


def smallest_difference(scatter: float, n: int, level: float = LEVEL, power: float = POWER) -> float:
    """The same for n seeds of two arms whose losses scatter by `scatter` each, independently of one another."""
    return smallest_effect(math.sqrt(2 / n) * scatter, n - 1, level, power)


def ratio(top: pd.Series, bottom: pd.Series, bound: float = 1.0) -> Estimate:
    """Mean of `top` over mean of `bottom`, paired by seed, with Fieller's interval.

    Without one where the bottom does not differ from 0: the ratio could then be anything.
    """
    both = pd.concat([top, bottom], axis=1, join="inner").dropna().to_numpy(float)
    if len(both) < 2 or not np.isfinite(both).all():
        return Estimate(math.nan, n=len(both), note=f"{len(both)} seeds, or a run that failed: no ratio")
    (x, y), cov, n = both.mean(axis=0), np.cov(both.T) / len(both), len(both)
    if stats.ttest_1samp(both[:, 1], 0).pvalue > LEVEL:
        return Estimate(float(x / y), n=n, note="no interval: the cost at a third of the budget does not differ from 0")
    ends = []
    for confidence in (CONFIDENCE, CONFIDENCE_90):
        k = stats.t.ppf((1 + confidence) / 2, n - 1) ** 2
        a, b, c = y * y - k * cov[1, 1], x * y - k * cov[0, 1], x * x - k * cov[0, 0]
        half = math.sqrt(max(b * b - a * c, 0.0)) / a
        ends += [b / a - half, b / a + half]
    p = stats.ttest_rel(both[:, 0], bound * both[:, 1]).pvalue
    return Estimate(float(x / y), *map(float, ends), float(p), n)


def factorial_effect(cells: pd.DataFrame, effect: str, factors: list[str]) -> Estimate:
    """A main effect ("W") or a two-way interaction ("W:X") of a two-level factorial, by paired contrasts.

    Args:
        cells: One row a cell and seed: the level, 0 or 1, of every factor, seed, value (infinite where the run failed).
        effect: One factor, or two apart by a colon.
        factors: All of them.

    A main effect is the mean difference of cells that differ in the factor alone; an interaction is half the mean
    difference of such differences. With two or more seeds the test is over seeds, else over settings of the others.

    """
    ours = effect.split(":")
    others = [f for f in factors if f not in ours]
    sign = (2 * cells[ours] - 1).prod(axis=1)
    terms = cells.assign(value=sign * cells["value"] / len(ours)).groupby([*others, "seed"])["value"]
    sums = terms.sum(min_count=2 ** len(ours))  # NaN where a cell is missing
    table = sums.unstack("seed") if others else sums.to_frame().T
    whole = table[np.isfinite(table).all(axis=1)]
    lost = 2 ** len(others) - len(whole)
    note = f"{lost} of {2 ** len(others)} settings left out, where a cell failed or is missing" if lost else ""
    over = "seeds" if table.shape[1] > 1 else "settings of the other factors"
    values = whole.mean(axis=0 if table.shape[1] > 1 else 1).reset_index(drop=True)
    found = paired(values, values * 0)
    return replace(found, over=over, note=note or (found.note and f"{found.n} {over}; a test needs 2"))


def rank_correlation(predictor: pd.Series, cost: pd.Series) -> Estimate:
    """Spearman's correlation over arms, with a permutation p value and no interval."""
    both = pd.concat([predictor, cost], axis=1, join="inner").dropna()
    x, y = (stats.rankdata(column) for column in both.to_numpy().T)
    if len(both) < 4 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return Estimate(math.nan, n=len(both), over="arms", note="fewer than 4 arms that differ: no order to compare")

    def correlation(x: np.ndarray, axis: int = -1) -> np.ndarray:
        x, centred = x - x.mean(axis=axis, keepdims=True), y - y.mean()
        return (x * centred).sum(axis=axis) / np.sqrt((x * x).sum(axis=axis) * (centred @ centred))

    test = stats.permutation_test((x,), correlation, permutation_type="pairings", vectorized=True, random_state=0)
    return Estimate(float(test.statistic), p=float(test.pvalue), n=len(both), over="arms")
