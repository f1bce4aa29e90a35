"""The claims board: every claim with the paper's figure, ours, and the verdict, as one block of HTML.

A row a claim on a wide page, a card a claim on a narrow one. Colours follow the page's light or dark theme.
"""

from __future__ import annotations

import html
import inspect
import re
from collections import Counter
from collections.abc import Sequence

from mxfp4.analysis import published
from mxfp4.analysis.claims import VERDICTS, Verdict, effect_text, rule_text
from mxfp4.analysis.metrics import METRICS
from mxfp4.text import count

TITLES = {
    "P1": "P1: MXFP4 on native FP4 hardware",
    "press": "The press on P1",
    "P2": "P2: transposition-invariant block quantization",
    "both": "Between the two papers",
    "others": "Other public evidence",
}

_STYLE = """
.mx-board{font-family:var(--mx-sans,system-ui,sans-serif);
font-size:.875em;line-height:1.45;margin:1.2em 0 2em}
.mx-board h3{font-size:1.05em;margin:1.6em 0 .4em}
.mx-board p{margin:0}
.mx-claim{display:grid;gap:0 1.1em;
grid-template-columns:minmax(0,2.4fr) minmax(0,1.5fr) minmax(0,1.7fr) minmax(0,1.3fr);
padding:.75em 0;border-top:1px solid var(--mx-rule,#d8dee4)}
.mx-claim.mx-head{font-weight:600;border-top:0;border-bottom:2px solid var(--mx-muted,#57606a);padding:.3em 0}
.mx-claim small{display:block;color:var(--mx-muted,#57606a);font-size:.9em;margin-top:.15em}
.mx-effect{font-variant-numeric:tabular-nums;font-weight:600}
.mx-verdict{display:inline-block;padding:.05em .55em;border-radius:.9em;
border:1.5px solid currentColor;font-weight:600;
line-height:1.3}
.mx-v-holds{color:#0a6b4a}.mx-v-fails{color:#a63c00}.mx-v-undecided{color:#7a5200}.mx-v-none{
color:var(--mx-muted,#57606a);font-weight:500;border-style:dashed}
html[data-theme=dark] .mx-v-holds{color:#4cc79b}html[data-theme=dark] .mx-v-fails{color:#ff9457}
html[data-theme=dark] .mx-v-undecided{color:#f0c04a}
.mx-verdict.mx-v-posthoc{border-style:dashed}
.mx-claim details{margin-top:.25em}.mx-claim summary{cursor:pointer;color:var(--mx-muted,#57606a)}
.mx-claim code{overflow-wrap:anywhere}
.mx-claim span.mx-label{display:none}
.mx-tally{display:flex;flex-wrap:wrap;gap:.4em .8em;margin:.6em 0}
@media (max-width:760px){.mx-claim{grid-template-columns:1fr;gap:.35em;padding:1em 0}
.mx-claim.mx-head{display:none}
.mx-claim span.mx-label{display:inline;color:var(--mx-muted,#57606a)}}
"""
_CLASS = {
    "holds": "holds", "does not hold": "fails", "undecided": "undecided",
    "suggested by these records": "holds mx-v-posthoc", "contradicted by these records": "fails mx-v-posthoc",
}  # fmt: skip


class Board:
    """Verdicts, displayed as HTML in a notebook and as text elsewhere."""

    def __init__(self, verdicts: Sequence[Verdict]):
        self.verdicts = list(verdicts)

    def __repr__(self) -> str:
        return "\n".join(f"{v.verdict:<29} {v.claim.id}: {effect_text(v.effect)}" for v in self.verdicts)

    def _repr_html_(self) -> str:
        parts = [f"<style>{_STYLE}</style>", tally_html(self.verdicts)]
        head = "".join(f"<div>{t}</div>" for t in ("Claim", "Published", "Ours", "Verdict"))
        for paper, title in TITLES.items():
            rows = [v for v in self.verdicts if v.claim.paper == paper]
            if rows:
                parts.append(
                    f'<h3>{html.escape(title)}</h3><div class="mx-claim mx-head" aria-hidden="true">{head}</div>'
                )
                parts += [_row(v) for v in rows]
        return f'<div class="mx-board">{"".join(parts)}</div>'


def tally_html(verdicts: Sequence[Verdict]) -> str:
    """How many of each verdict, as badges with what they mean."""
    counts = Counter(v.verdict for v in verdicts)
    badges = "".join(
        f'<span title="{html.escape(meaning)}">{_badge(name)} {counts[name]}</span>'
        for name, meaning in VERDICTS.items()
        if counts[name]
    )
    return f'<p class="mx-tally">{badges}</p>'


def _badge(verdict: str) -> str:
    return f'<span class="mx-verdict mx-v-{_CLASS.get(verdict, "none")}">{html.escape(verdict)}</span>'


def _row(v: Verdict) -> str:
    c, e = v.claim, html.escape
    lead, _, rest = c.claim.partition(". ")
    claim = (
        f"<p><strong>{_code(lead)}.</strong> {_code(rest)}</p>" if rest else f"<p><strong>{_code(lead)}</strong></p>"
    )
    notes = "".join(f"<small>{_code(note)}</small>" for note in c.notes)
    how = f"<p>{_code(decided_by(v))}</p><p>What scale could change: {_code(c.scale_note)}</p>"
    scale = f"<details><summary>the rule; what scale could change</summary>{how}</details>"
    link = f'<small><a href="{e(c.chapter)}.html">{e(c.chapter)}</a> · <code>{e(c.id)}</code></small>'
    return (
        f'<div class="mx-claim" id="claim-{e(c.id)}"><div>{claim}{link}{notes}{scale}</div>'
        f"<div>{_published(v)}</div><div>{_ours(v)}</div>"
        f"<div>{_badge(v.verdict)}<small>{e(v.reason)}</small></div></div>"
    )


def decided_by(v: Verdict) -> str:
    """One or two sentences: what is measured, of which arms, where it is read, and the rule."""
    c = v.claim
    what = " ".join((inspect.getdoc(METRICS[c.metric]) or "").split("\n\n")[0].split()).rstrip(".")
    options = {
        k: p.default for k, p in inspect.signature(METRICS[c.metric]).parameters.items() if p.default is not p.empty
    }
    shown = {k: x for k, x in {**c.arguments, **{k: c.arguments.get(k, x) for k, x in options.items()}}.items() if x}
    given = ", ".join(f"{k}={'/'.join(x) if isinstance(x, list) else x}" for k, x in shown.items())
    return f"{what} ({given or c.metric}). {'It is suggested' if c.posthoc else 'It holds'} when that is {rule_text(c, v.effect)}."


def _code(text: str) -> str:
    """`text` for HTML, what is in backticks as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text))


def _published(v: Verdict) -> str:
    shown = [("Published", v.claim.published)]
    if v.claim.logs:
        shown.append(("Logs", published.figure(v.claim.logs)))
    return "".join(
        f'<p><span class="mx-label">{label}: </span>{html.escape(f.text)}<small>{html.escape(f.cite)}</small></p>'
        for label, f in shown
    )


def _ours(v: Verdict) -> str:
    label = '<span class="mx-label">Ours: </span>'
    if v.effect is None or v.study is None:
        return f"<p>{label}–</p>"
    e, s = v.effect, v.study
    lines = [f"{s.scale}: {count(s.parameters)} parameters, {count(s.tokens)} tokens"]
    seeds = f"{len(e.seeds)} seed{'s' if len(e.seeds) != 1 else ''}"
    lines.append(seeds if e.over == "seeds" else f"{seeds}, interval over {e.over}")
    if e.note:
        lines.append(e.note)
    small = "".join(f"<small>{html.escape(line)}</small>" for line in lines)
    return f'<p>{label}<span class="mx-effect">{html.escape(effect_text(e))}</span>{small}</p>'
