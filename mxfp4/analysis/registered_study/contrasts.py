"""Contrasts between arms and the verdicts on them, by the rules of book/study.yml.

The table of runs has one row for each run, budget and forward:

| column                | meaning                                                                                |
|-----------------------|----------------------------------------------------------------------------------------|
| runs, arm, seed       | entry of `runs` in book/study.yml, recipe name, seed                                   |
| budget                | full, third, two_thirds: where the run decayed                                         |
| forward               | own (with stochastic rounding as nearest) or bf16                                      |
| loss, excess          | nats a token; loss less the entropy of the source                                      |
| training              | mean training loss of the last steps, nats a token; read where forward is own          |
| top1, copying         | shares of tokens, read where forward is own                                            |
| status                | finished, diverged or stalled; the last two count as an infinite loss                  |

The table of probes has the columns runs, arm (the recipe that was applied), seed, probe, value. Both tables may lack
what was not run. A contrast is a difference of two columns over seeds, a less b; scipy.stats.ttest_rel tests it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from scipy import optimize, stats

from mxfp4.analysis import published
from mxfp4.errors import UserError
from mxfp4.studies.registry import TABLE1, Claim, Factorial, RegisteredStudy, Rule

# The numbers of book/study.yml's analysis; a test compares them.
CONFIDENCE = 0.95
CONFIDENCE_90 = 0.9
"""Of the interval that decides about equivalence."""
LEVEL = 0.05
POWER = 0.8
MARGIN = 0.02
"""Nats; two losses that differ by less are equivalent."""
NOT_SEEN = "not seen at up to 30 M weights"
NOT_RUN = "not run"
VERDICTS = ("holds", "does not hold", "undecided", "depends on the forward", NOT_SEEN, NOT_RUN)
FAILED = ("diverged", "stalled")
COLUMN = {"own": "loss", "bf16": "loss", "training": "training", "top1": "top1", "copying": "copying",
          "log_excess": "excess", "log_tokens": "loss", "cost_ratio": "loss", "misses": "loss"}  # fmt: skip
"""{outcome: column of the table of runs}."""
LOSSES = ("own", "bf16", "training")
"""Outcomes in nats, for which equivalence is defined."""


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
        return Estimate(d, n=n, note=_join(f"{n} shared seed{'s' * (n != 1)}; a test needs 2", note))
    if not finite:
        return _sign_test(x, y, bound, note)
    mean = float((x - y).mean())
    if np.ptp(x - y) <= 1e-12 * max(1.0, np.abs([x, y]).max()):  # no scatter, so no t: the value is exact
        return Estimate(mean, mean, mean, mean, mean, float(abs(mean - bound) <= 1e-12), n, 0.0, n - 1, note=note)
    test = stats.ttest_rel(x, y)
    ends = [float(end) for level in (CONFIDENCE, CONFIDENCE_90) for end in test.confidence_interval(level)]
    p = float(stats.ttest_rel(x, y + bound).pvalue)
    return Estimate(mean, *ends, p, n, float(stats.sem(x - y)), n - 1, note=note)


def _join(*notes: str) -> str:
    return "; ".join(filter(None, notes))


def _sign_test(x: np.ndarray, y: np.ndarray, bound: float, note: str) -> Estimate:
    above, below = int((x > y + bound).sum()), int((x < y + bound).sum())  # two equal infinities are a tie
    p = stats.binomtest(above, above + below).pvalue if above + below else 1.0
    value = math.inf if above > below else -math.inf if below > above else math.nan
    sign = f"an arm has no finite loss, so this is a sign test: above in {above} of {len(x)} seeds, below in {below}"
    return Estimate(value, p=float(p), n=len(x), note=_join(sign, note))


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


# From the tables to verdicts.


@dataclass(frozen=True)
class Verdict:
    """What the runs say about one claim."""

    claim: Claim
    verdict: str
    """One of VERDICTS."""
    reason: str
    """Why, in one line."""
    estimate: Estimate
    p: float
    """The p value that decides: Holm-adjusted for a primary claim."""


def decide(rule: Rule, found: Estimate, p: float, *, loss: bool = True, bf16: Estimate | None = None) -> str:
    """The verdict on a rule (any but in_seeds).

    Args:
        p: The p value that decides, which may be adjusted.
        loss: Whether the effect is in nats, so that equivalence is defined.
        bf16: The same contrast in the BF16 forward, where the effect is in the own forward.

    """
    bound, claimed = float(rule.bound), {"above": 1, "below": -1}.get(rule.kind, 0)
    if math.isnan(found.value):
        return "undecided"
    if rule.kind == "equal":
        if -bound <= found.low90 and found.high90 <= bound:
            return "holds"
        return "does not hold" if found.low > bound or found.high < -bound else "undecided"
    if bf16 is not None and found.side(bound) * bf16.side(bound) < 0:
        return "depends on the forward"
    side, null = found.side(bound, p), loss and bound == 0
    if side and side == (claimed or side):
        return "holds"
    if side or (null and found.low90 >= -MARGIN and found.high90 <= MARGIN):
        return "does not hold"
    no_room = found.high < MARGIN if claimed > 0 else claimed < 0 and found.low > -MARGIN
    return NOT_SEEN if null and no_room else "undecided"


def count_verdict(events: pd.Series, every: str) -> tuple[str, Estimate]:
    """The verdict on a claim that `every` (all, none) of the seeds fails, and the share that does.

    events: whether each seed fails.
    """
    n, k = len(events), int(events.sum() if every == "all" else (~events).sum())
    note = f"{int(events.sum())} of {n} seeds"
    found = Estimate(float(events.mean()) if n else math.nan, n=n, note=note)
    if n < 2 or 0 < k < n:
        return "undecided", found
    return "holds" if k else NOT_SEEN if every == "all" else "does not hold", found


class Tables:
    """The table of runs and the table of probes, as the study's claims read them."""

    def __init__(self, study: RegisteredStudy, runs: pd.DataFrame, probes: pd.DataFrame | None = None):
        self.study, self.runs = study, runs
        self._groups = dict(iter(runs.groupby(["runs", "arm", "budget", "forward"])))
        self._values: dict[tuple[str, ...], pd.Series] = {}
        self.probes = pd.DataFrame(columns=["runs", "arm", "seed", "probe", "value"]) if probes is None else probes

    def values(self, runs: str, arm: str, outcome: str, budget: str = "full") -> pd.Series:
        """{seed: value} of an outcome in a run; infinite (accuracies: minus infinity) where the run failed."""
        own, key = self.study.runs[runs], (runs, arm, outcome, budget)
        if own.borrows and budget == "full" and arm not in own.arms:
            return self.values(own.borrows["runs"], arm, outcome, own.borrows["budget"])
        if key not in self._values:
            self._values[key] = self._read(*key)
        return self._values[key]

    def _read(self, runs: str, arm: str, outcome: str, budget: str) -> pd.Series:
        forward = "bf16" if outcome == "bf16" else "own"
        rows = self._groups.get((runs, arm, budget, forward), self.runs[:0]).set_index("seed").sort_index()
        if not rows.index.is_unique:
            raise UserError(f"{arm} of runs {runs} has two rows for one seed, budget {budget}, forward {forward}")
        values = rows[COLUMN[outcome]].astype(float)
        if outcome == "log_excess":
            values = np.log(values.where(values > 0))
        return values.mask(rows["status"].isin(FAILED), -math.inf if outcome in ("top1", "copying") else math.inf)

    def probe(self, runs: str, arm: str, probe: str) -> pd.Series:
        """{seed: value} of a probe."""
        rows = self.probes
        rows = rows[(rows["runs"] == runs) & (rows["arm"] == arm) & (rows["probe"] == probe)]
        return rows.set_index("seed")["value"].astype(float).sort_index()

    def sides(self, claim: Claim, runs: str, outcome: str, budget: str) -> tuple[pd.Series, pd.Series]:
        """The parts of a contrast with positive and with negative weight, so that it is their difference."""
        parts: list[pd.Series] = []
        for sign in (1, -1):
            terms = []
            for arm, weight in claim.contrast.terms.items():
                if sign * weight > 0:
                    of = claim.reference_runs if arm == claim.contrast.reference and claim.reference_runs else runs
                    is_probe, probe = outcome == "probe", claim.contrast.probe
                    read = self.probe(of, arm, probe) if is_probe else self.values(of, arm, outcome, budget)
                    terms.append(abs(weight) * read)
            parts.append(pd.concat(terms, axis=1, join="inner").sum(axis=1, skipna=False) if terms else parts[0] * 0)
        return parts[0], parts[1]

    def estimate(self, claim: Claim, outcome: str | None = None) -> Estimate:
        """The effect that a claim is about (not of counts); `outcome` replaces the claim's own."""
        c, bound = claim.contrast, 0.0 if claim.holds.kind in ("equal", "different") else float(claim.holds.bound)
        outcome = outcome or c.outcome
        if c.factorial:
            factorial = self.study.factorials[c.factorial]
            return factorial_effect(self.cells(factorial, outcome), c.effect, list(factorial.factors))
        if c.arms:
            return self._ranks(claim)
        a, b = self.sides(claim, claim.runs, outcome, c.budget)
        if outcome == "cost_ratio":
            third = self.sides(claim, claim.runs, outcome, "third")
            return ratio(a - b, third[0] - third[1], bound)
        if outcome == "log_tokens":
            third = self.values(claim.reference_runs or claim.runs, c.reference, outcome, "third")
            gain = (third - b).mean() / math.log(3)  # nats an e-fold of tokens
            if not gain > 0 or math.isinf(gain):
                return Estimate(math.nan, note=f"{c.reference} gains nothing from a third to the full budget")
            return paired(a / gain, b / gain, bound)
        if claim.other_runs:
            other = self.sides(claim, claim.other_runs, outcome, c.budget)
            return unpaired(a - b, other[0] - other[1], bound)
        return paired(a, b, bound)

    def cells(self, factorial: Factorial, outcome: str) -> pd.DataFrame:
        """One row a cell and seed of a factorial, over the seeds that all its cells have."""
        found = {arm: self.values(factorial.runs, arm, outcome) for _, arm in factorial.cells()}
        seeds = set.intersection(*(set(v.index) for v in found.values()))
        return pd.DataFrame([{**levels, "seed": s, "value": found[arm][s]} for levels, arm in factorial.cells()
                             for s in sorted(seeds)], columns=[*factorial.factors, "seed", "value"])  # fmt: skip

    def _ranks(self, claim: Claim) -> Estimate:
        c = claim.contrast
        base = self.values(claim.runs, c.reference, c.outcome)
        cost = pd.Series({arm: (self.values(claim.runs, arm, c.outcome) - base).mean() for arm in c.arms})
        if c.predictor == TABLE1:
            predictor = published.table1().set_index("recipe")["low"]
        else:
            predictor = pd.Series({arm: self.probe(claim.runs, arm, c.predictor).mean() for arm in c.arms})
        return rank_correlation(predictor, cost)

    def missed(self, claim: Claim) -> pd.Series:
        """{seed: whether the event of a count happened}."""
        c = claim.contrast
        if c.outcome == "stalled":
            return np.isinf(self.values(claim.runs, c.arm, "own", c.budget))
        target = self.values(claim.runs, c.reference, "misses", "two_thirds").mean()
        final = self.values(claim.runs, c.arm, "misses", c.budget).dropna()
        return final > target if math.isfinite(target) else final[:0].astype(bool)

    def remarks(self, claim: Claim) -> str:
        """Which arms of a claim have no records, and in how many seeds one failed."""
        c, notes = claim.contrast, []
        cells = [arm for _, arm in self.study.factorials[c.factorial].cells()] if c.factorial else []
        for arm in [] if c.probe else [*c.names, *cells]:
            of = claim.reference_runs if arm == c.reference and claim.reference_runs else claim.runs
            failed = np.isinf(self.values(of, arm, "own", c.budget))
            if failed.empty:
                notes.append(f"no records of {arm} in {of}")
            elif failed.any():
                notes.append(f"{arm} diverged or stalled in {failed.sum()} of {len(failed)} seeds")
        return _join(*notes)


def judge(study: RegisteredStudy, runs: pd.DataFrame, probes: pd.DataFrame | None = None) -> list[Verdict]:
    """The verdict on every claim of the study, in its order."""
    tables, counted = Tables(study, runs, probes), {}
    found: dict[str, Estimate] = {}
    for claim in study.claims:
        if claim.holds.kind == "in_seeds":
            counted[claim.id], found[claim.id] = count_verdict(tables.missed(claim), str(claim.holds.bound))
        else:
            found[claim.id] = tables.estimate(claim)
    adjusted = holm({c.id: found[c.id].p for c in study.primaries})
    verdicts = []
    for claim in study.claims:
        e = found[claim.id]
        p, verdict = adjusted.get(claim.id, e.p), counted.get(claim.id)
        if not e.n:
            verdict = NOT_RUN
        if verdict is None:
            own = claim.contrast.outcome == "own" and not claim.contrast.arms
            bf16 = tables.estimate(claim, "bf16") if own else None
            verdict = decide(claim.holds, e, p, loss=_in_nats(claim), bf16=bf16)
        reason = _join(_reason(claim, verdict, e, p, len(adjusted)), tables.remarks(claim))
        verdicts.append(Verdict(claim, verdict, reason, e, p))
    return verdicts


def _seeds(e: Estimate) -> str:
    return f"{e.n} {e.over.removesuffix('s') if e.n == 1 and e.over == 'seeds' else e.over}"


def _in_nats(claim: Claim) -> bool:
    return claim.contrast.outcome in LOSSES and not claim.contrast.arms


def _reason(claim: Claim, verdict: str, e: Estimate, p: float, family: int) -> str:
    """Value, interval, seeds and p value; the smallest effect beside every null."""
    if claim.holds.kind == "in_seeds":
        return e.note
    unit = " nats" if _in_nats(claim) else ""
    parts = []
    if math.isfinite(e.value):
        ends = "" if math.isnan(e.low) else f" [{e.low:+.4f}, {e.high:+.4f}]"
        holm_adjusted = " after Holm" if claim.kind == "primary" else ""
        parts.append(f"{e.value:+.4f}{ends}{unit}, {_seeds(e)}, p = {p:.2g}{holm_adjusted}")
    if verdict not in ("holds", "depends on the forward") and not math.isnan(e.smallest()):
        sizes = [e.smallest()] + ([e.smallest(LEVEL / family)] if claim.kind == "primary" else [])
        shown = " to ".join(f"{size:.3f}" for size in sizes)
        steps = " (last to first Holm step)" if len(sizes) > 1 else ""
        parts.append(f"smallest effect seen with power {POWER}: {shown}{unit}{steps}")
    return _join(*parts, e.note)
