"""Verdicts of the registered study as HTML: the full board, and a strip with one mark a claim."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Sequence

from mxfp4.analysis.registered_study.contrasts import VERDICTS, Verdict
from mxfp4.analysis.registered_study.text import registration_text
from mxfp4.studies.registry import Registration, load_study, registrations

BOARD_PAGE = "claims"
"""The page that holds the board, with an anchor for each claim."""
SHORT = dict(
    zip(VERDICTS, ("holds", "does not hold", "undecided", "depends on the forward", "not seen", "not run"), strict=True)
)
"""What a badge says."""
CLASSES = dict(zip(VERDICTS, ("holds", "fails", "undecided", "forward", "unseen", "none"), strict=True))
LETTERS = dict(zip(VERDICTS, ("h", "n", "u", "f", "s", "\N{MIDDLE DOT}"), strict=True))
"""What a mark of the strip shows, for those who do not see its colour."""


class VerdictBoard:
    """Claims under their questions, each with its verdict, effect, what would refute it and when it was registered."""

    def __init__(self, verdicts: Sequence[Verdict], *, counts: bool = False):
        self.verdicts, self.counts = list(verdicts), counts

    def __repr__(self) -> str:
        return "\n".join(f"{v.verdict:<31} {v.claim.id}: {v.reason}" for v in self.verdicts)

    def _repr_html_(self) -> str:
        parts, registered = [tally(self.verdicts)] if self.counts else [], registrations()
        for question, meaning in load_study().questions.items():
            rows = [_row(v, registered[v.claim.id]) for v in self.verdicts if v.claim.question == question]
            if rows:
                about = "" if len(rows) == len(self.verdicts) else f"<h3>{html.escape(question)}</h3>"
                parts.append(f"{about}<p>{html.escape(meaning)}.</p>{''.join(rows)}")
        return f'<div class="mx-board">{"".join(parts)}</div>'


def tally(verdicts: Sequence[Verdict]) -> str:
    """How many claims have each verdict, as badges."""
    meanings, counts = load_study().analysis.verdicts, Counter(v.verdict for v in verdicts)
    badges = "".join(
        f'<span title="{html.escape(meanings[name])}">{_badge(name)} {counts[name]}</span>'
        for name in VERDICTS
        if counts[name]
    )
    return f'<p class="mx-tally">{badges}</p>'


def _badge(verdict: str) -> str:
    return f'<span class="mx-verdict mx-v-{CLASSES[verdict]}">{html.escape(SHORT[verdict])}</span>'


def _row(v: Verdict, registration: Registration) -> str:
    c, e = v.claim, html.escape
    fold = f"<p>Fails when: {e(c.fails_when)}</p><p>{e(registration_text(registration).capitalize())}.</p>"
    return (
        f'<div class="mx-claim mx-two" id="claim-{e(c.id)}"><div><p><strong>{e(c.claim)}</strong></p>'
        f"<small>{e(c.paper)} · {e(c.kind)} · <code>{e(c.id)}</code></small>"
        f"<details><summary>what would refute it; when it was registered</summary>{fold}</details></div>"
        f"<div>{_badge(v.verdict)}<small>{e(v.reason)}</small></div></div>"
    )


class VerdictStrip:
    """One coloured mark a claim, grouped by question, each a link to the claim on the board."""

    def __init__(self, verdicts: Sequence[Verdict]):
        self.verdicts = list(verdicts)

    def __repr__(self) -> str:
        counts = Counter(v.verdict for v in self.verdicts)
        return ", ".join(f"{counts[name]} {name}" for name in VERDICTS if counts[name])

    def _repr_html_(self) -> str:
        rows = []
        for question in load_study().questions:
            marks = "".join(_mark(v) for v in self.verdicts if v.claim.question == question)
            if marks:
                rows.append(f'<div class="mx-strip-row"><span>{html.escape(question)}</span><span>{marks}</span></div>')
        return f'<div class="mx-board mx-strip">{tally(self.verdicts)}{"".join(rows)}</div>'


def _mark(v: Verdict) -> str:
    text = html.escape(f"{SHORT[v.verdict]}: {v.claim.claim}")
    primary = " mx-primary" if v.claim.kind == "primary" else ""
    return (
        f'<a class="mx-mark mx-v-{CLASSES[v.verdict]}{primary}" href="{BOARD_PAGE}.html#claim-{html.escape(v.claim.id)}" '
        f'title="{text}" aria-label="{text}">{LETTERS[v.verdict]}</a>'
    )
