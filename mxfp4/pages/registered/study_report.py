"""The registered study as a page reads it: its records, tables and verdicts, loaded once, and frames made of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd

from mxfp4.analysis.registered_study.contrasts import Tables, Verdict, judge
from mxfp4.analysis.registered_study.estimates import Estimate, paired
from mxfp4.analysis.registered_study.gates import gates
from mxfp4.analysis.registered_study.tables import matrix, members, probes_table, runs_table
from mxfp4.errors import UserError
from mxfp4.pages.evidence import Partial
from mxfp4.studies.registered_arms import CORPORA, DECAYED, WHOLE
from mxfp4.studies.registry import RegisteredStudy, load_study
from mxfp4.studies.store import Record, Store

SCALE = "gpu"
"""The scale whose records the study is made of."""
FORWARDS = {"own": "own forward", "bf16": "BF16 forward"}
"""{outcome: what a reader calls the forward}."""
COST_COLUMNS = ["arm", "forward", "cost", "low", "high", "seeds", "failed"]


@dataclass(frozen=True)
class StudyReport:
    """The study and what its records say."""

    study: RegisteredStudy
    records: tuple[Record, ...]
    text: str = CORPORA["B"]
    """The corpus of source B, such as c4:0-7."""

    @classmethod
    def load(cls, store: Store | None = None, *, text: str = CORPORA["B"]) -> StudyReport:
        """The study of book/study.yml with the recorded runs."""
        return cls(load_study(), tuple((store or Store()).load(SCALE)), text)

    @cached_property
    def tables(self) -> Tables:
        """The runs and the probes, as contrasts read them."""
        made = (table(self.study, self.records, self.text) for table in (runs_table, probes_table))
        return Tables(self.study, *made)

    @cached_property
    def verdicts(self) -> list[Verdict]:
        """The verdict on every claim, in the order of the study."""
        return judge(self.study, self.tables.runs, self.tables.probes)

    def verdict(self, claim: str) -> Verdict:
        """The verdict on the claim with this id. UserError for an unknown one."""
        self.study.claim(claim)
        return next(v for v in self.verdicts if v.claim.id == claim)

    def verdicts_on(self, *questions: str) -> list[Verdict]:
        """The verdicts on the claims of these questions. UserError for an unknown one."""
        unknown = [question for question in questions if question not in self.study.questions]
        if unknown:
            raise UserError(f"question {unknown[0]!r} is unknown; known: {', '.join(self.study.questions)}")
        return [v for v in self.verdicts if v.claim.question in questions]

    @cached_property
    def gates(self) -> pd.DataFrame:
        """See `gates.gates`."""
        return gates(self.study, self.tables.runs, self.tables.probes)

    @cached_property
    def members(self) -> dict[str, list[Record]]:
        """{part of the study: its records}."""
        return members(self.study, self.records, self.text)

    def progress(self, runs: str) -> tuple[int, int]:
        """(runs recorded, runs planned) of a part; of bf16-decay, branches."""
        if runs == DECAYED:
            found = self.tables.runs
            done = len(found[(found["runs"] == DECAYED) & (found["forward"] == "own")])
        else:
            done = len(self.members.get(runs, []))
        return done, sum(self.study.runs[runs].arms.values())

    def partial(self, *parts: str) -> Partial:
        """A note that a page is partial; it shows nothing where no run of these parts is missing."""
        done, planned = (sum(numbers) for numbers in zip(*map(self.progress, parts), strict=True))
        plan = parts[0] if len(parts) == 1 else WHOLE
        return Partial(planned - done, planned, f"mxfp4 train --plan {plan} --scale {SCALE}")

    def cost(
        self, arm: str, reference: str, *, runs: str = "main", outcome: str = "own", budget: str = "full"
    ) -> Estimate:
        """What an arm costs over a reference, paired by seed, in the unit of the outcome."""
        return paired(*(self.tables.values(runs, name, outcome, budget) for name in (arm, reference)))

    def costs(
        self, arms: Sequence[str] | None = None, *, reference: str = "bf16", runs: str = "main", budget: str = "full"
    ) -> pd.DataFrame:
        """One row an arm and forward: arm, forward, cost, low, high (nats a token over the reference, 95 % interval; NaN
        without one), seeds, failed (of its seeds). Arms that share no seed with the reference are left out."""
        rows = []
        for arm in arms or [name for name in self.study.arms(runs) if name != reference]:
            failed = int(np.isinf(self.tables.values(runs, arm, "own", budget)).sum())
            for outcome, forward in FORWARDS.items():
                e = self.cost(arm, reference, runs=runs, outcome=outcome, budget=budget)
                rows += _cost_row(arm, forward, e, failed)
        return pd.DataFrame(rows, columns=COST_COLUMNS)

    def decay_costs(self) -> pd.DataFrame:
        """`costs` of runs whose last decay was in BF16, over BF16's runs of main."""
        rows = []
        for arm in self.study.runs[DECAYED].arms:
            for outcome, forward in FORWARDS.items():
                ours = self.tables.values(DECAYED, arm, outcome)
                e = paired(ours, self.tables.values("main", "bf16", outcome))
                rows += _cost_row(arm, forward, e, int(np.isinf(ours).sum()))
        return pd.DataFrame(rows, columns=COST_COLUMNS)

    def curves(self, arms: Sequence[str], *, runs: str = "main", forward: str = "own") -> pd.DataFrame:
        """One row an arm and evaluation of the runs themselves: arm, tokens, loss, excess (nats a token, means over seeds),
        low, high (range over seeds of the excess, or of the loss where the source has no known entropy), seeds."""
        rows = []
        for record in self.members.get(runs, []):
            if record.config.recipe in arms:
                e = record.evaluations
                e = e[(e["branch"] == "") & (e["forward"] == forward) & (e["step"] > 0)]
                floors = np.array([_floor(record, n) for n in e["windows"]])
                about = {"arm": record.config.recipe, "seed": record.config.seed}
                rows.append(e[["tokens", "loss"]].assign(excess=e["loss"].to_numpy() - floors, **about))
        columns = ["arm", "tokens", "loss", "excess", "low", "high", "seeds"]
        if not rows:
            return pd.DataFrame(columns=columns)
        frame = pd.concat(rows)
        shown = "excess" if frame["excess"].notna().any() else "loss"
        means = {"loss": ("loss", "mean"), "excess": ("excess", "mean"), "low": (shown, "min"), "high": (shown, "max")}
        return frame.groupby(["arm", "tokens"], as_index=False).agg(**means, seeds=("seed", "nunique"))[columns]

    @cached_property
    def matrix(self) -> pd.DataFrame:
        """Trained in, evaluated in: arm, forward, cost (loss less that of the same seed's BF16 run in BF16, nats a token,
        mean over seeds), seeds. Of runs that were judged in more than two forwards."""
        frame = matrix(r for r in self.members.get("main", []) if r.config.final_forwards)
        base = frame[(frame["arm"] == "bf16") & (frame["forward"] == "own")].set_index("seed")["loss"]
        frame = frame[frame["seed"].isin(base.index)]
        frame = frame.assign(cost=frame["loss"] - frame["seed"].map(base))
        of_seeds = {"cost": ("cost", "mean"), "seeds": ("seed", "nunique")}
        return frame.groupby(["arm", "forward"], as_index=False, sort=False).agg(**of_seeds)


def _cost_row(arm: str, forward: str, e: Estimate, failed: int) -> list[dict]:
    if not e.n:
        return []
    row = {"arm": arm, "forward": forward, "cost": e.value, "low": e.low, "high": e.high, "seeds": e.n}
    return [{**row, "failed": failed}]


def _floor(record: Record, windows: int) -> float:
    return float(record.windows["floor"][:windows].mean()) if "floor" in record.windows else math.nan
