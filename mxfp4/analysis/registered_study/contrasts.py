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
from dataclasses import dataclass

import numpy as np
import pandas as pd

from mxfp4.analysis import published
from mxfp4.analysis.registered_study.estimates import (
    LEVEL,
    POWER,
    Estimate,
    factorial_effect,
    holm,
    join_notes,
    paired,
    rank_correlation,
    ratio,
    unpaired,
)
from mxfp4.errors import UserError
from mxfp4.studies.registry import TABLE1, Claim, Factorial, RegisteredStudy, Rule

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
        return join_notes(*notes)


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
        reason = join_notes(_reason(claim, verdict, e, p, len(adjusted)), tables.remarks(claim))
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
        tested = "" if math.isnan(p) else f", p = {p:.2g}{holm_adjusted}"
        parts.append(f"{e.value:+.4f}{ends}{unit}, {_seeds(e)}{tested}")
    if verdict not in ("holds", "depends on the forward") and not math.isnan(e.smallest()):
        sizes = [e.smallest()] + ([e.smallest(LEVEL / family)] if claim.kind == "primary" else [])
        shown = " to ".join(f"{size:.3f}" for size in sizes)
        steps = " (last to first Holm step)" if len(sizes) > 1 else ""
        parts.append(f"smallest effect seen with power {POWER}: {shown}{unit}{steps}")
    return join_notes(*parts, e.note)
