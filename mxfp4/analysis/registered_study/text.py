"""The registered study's claims as text and as JSON: grouped by question, with verdict, reason and registration."""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Sequence

from mxfp4.analysis.registered_study.contrasts import VERDICTS, Verdict, judge
from mxfp4.analysis.registered_study.gates import gates
from mxfp4.analysis.registered_study.tables import probes_table, runs_table
from mxfp4.studies.registered_arms import CORPORA
from mxfp4.studies.registry import RegisteredStudy, Registration, load_study, registrations
from mxfp4.studies.store import Store

WIDTH = 100
SHORT_HASH = 9


def verdicts(store: Store, study: RegisteredStudy | None = None, *, text: str = CORPORA["B"]) -> list[Verdict]:
    """The verdict on each claim of the registered study, from the records of scale gpu. text: the corpus of source B."""
    study = study or load_study()
    records = store.load("gpu")
    return judge(study, runs_table(study, records, text), probes_table(study, records, text))


def gates_text(store: Store, study: RegisteredStudy | None = None) -> str:
    """The gates of source A, one a line."""
    study = study or load_study()
    records = store.load("gpu")
    table = gates(study, runs_table(study, records), probes_table(study, records))
    state = {True: "passed", False: "FAILED", None: "no records yet"}
    return "\n".join(
        f"gate {g.gate}: {state[g.passed]}"
        + ("" if g.passed is None else f", {g.value:.4g} (bound {g.bound:g}, {g.n} seeds)")
        for g in table.itertuples()
    )


def registration_text(registration: Registration) -> str:
    """When a claim was registered, and what changed it later."""
    if registration.registered is None:
        return f"not registered: {registration.note}"
    text = f"registered in {registration.registered[:SHORT_HASH]}"
    if registration.changed:
        text += f", changed in {', '.join(commit[:SHORT_HASH] for commit in registration.changed)}"
    return text


def claims_text(found: Sequence[Verdict]) -> str:
    """Every claim under its question, then the counts."""
    registered = registrations()
    study = load_study()
    lines: list[str] = []
    for question, meaning in study.questions.items():
        group = [v for v in found if v.claim.question == question]
        if not group:
            continue
        lines += [textwrap.fill(f"{question}: {meaning.removeprefix(question + ': ')}", WIDTH), ""]
        for v in group:
            lines.append(f"  {v.verdict.upper():<32} {v.claim.id} ({v.claim.paper}, {v.claim.kind})")
            for text in (v.claim.claim, v.reason, registration_text(registered[v.claim.id])):
                if text:
                    lines.append(textwrap.fill(text, WIDTH, initial_indent="    ", subsequent_indent="    "))
            lines.append("")
    return "\n".join([*lines, counts_text(found)])


def counts_text(found: Sequence[Verdict]) -> str:
    """How many claims have each verdict."""
    counts = Counter(v.verdict for v in found)
    return f"{len(found)} claims: " + ", ".join(f"{counts[name]} {name}" for name in VERDICTS if counts[name])


def claims_json(found: Sequence[Verdict]) -> list[dict]:
    """The verdicts as plain data; a number that is not finite is None, and `reason` says why."""
    registered = registrations()
    return [
        {
            "id": v.claim.id, "paper": v.claim.paper, "question": v.claim.question, "kind": v.claim.kind,
            "claim": v.claim.claim, "verdict": v.verdict, "reason": v.reason, "value": _number(v.estimate.value),
            "low": _number(v.estimate.low), "high": _number(v.estimate.high), "p": _number(v.p), "n": v.estimate.n,
            "registered": registered[v.claim.id].registered, "changed": list(registered[v.claim.id].changed),
        }
        for v in found
    ]  # fmt: skip


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
