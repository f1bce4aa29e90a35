"""The box at the top of a page: its question, the answer, the evidence and the scale of the evidence."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

from mxfp4.analysis.registered_study.contrasts import LOSSES, NOT_RUN
from mxfp4.pages.registered.answer import in_nats
from mxfp4.pages.registered.study_report import StudyReport
from mxfp4.pages.registered.verdict_board import SHORT
from mxfp4.text import count


@dataclass(frozen=True)
class Summary:
    """What a page of the registered study found, in a box."""

    report: StudyReport
    question: str
    claims: Sequence[str]
    """Ids of the claims that answer the question, the most important one first."""
    runs: Sequence[str] = ("main",)
    """Parts of the study that the page reads."""

    @property
    def answers(self) -> list[tuple[str, str]]:
        """(claim, verdict with its effect) of each claim."""
        found = []
        for name in self.claims:
            v = self.report.verdict(name)
            in_loss = v.claim.contrast.outcome in LOSSES and not v.claim.contrast.arms
            effect = f", {in_nats(v.estimate)}" if in_loss and v.verdict != NOT_RUN and v.estimate.n else ""
            found.append((v.claim.claim, f"{SHORT[v.verdict]}{effect}"))
        return found

    @property
    def evidence(self) -> str:
        """How many runs are recorded, and at what size."""
        parts = []
        for name in self.runs:
            part = self.report.study.runs[name]
            done, planned = self.report.progress(name)
            of = f"{done} of {planned} runs" if done < planned else f"{planned} runs"
            source = self.report.study.sources[part.source]
            parts.append(f"{of} of {count(part.weights)} weights on {count(part.tokens)} tokens ({source})")
        return "; ".join(parts)

    def __repr__(self) -> str:
        return "\n".join([self.question, *(f"- {claim} {verdict}" for claim, verdict in self.answers), self.evidence])

    def _repr_html_(self) -> str:
        e = html.escape
        rows = "".join(f"<li>{e(claim)} <strong>{e(verdict)}</strong></li>" for claim, verdict in self.answers)
        return (
            f'<div class="mx-summary"><p><strong>{e(self.question)}</strong></p><ul>{rows}</ul><p><small>Evidence: '
            f"{e(self.evidence)}. Losses in nats a token; brackets are 95 % intervals over seeds.</small></p></div>"
            f"{self.report.partial(*self.runs)._repr_html_()}"
        )
