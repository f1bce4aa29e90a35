"""The front page's answer, computed: which recipe trains best here, what each paper's idea does, and the limits."""

from __future__ import annotations

import math

import pandas as pd

from mxfp4.analysis.registered_study.contrasts import MARGIN, NOT_RUN
from mxfp4.analysis.registered_study.estimates import Estimate
from mxfp4.pages.registered.study_report import StudyReport
from mxfp4.text import count

FULL_RECIPES = (
    "mxfp4",
    "mxfp4+h16",
    "mxfp4+sr-grad",
    "mxfp4+sr",
    "mxfp4+rht16",
    "ti2d",
    "ti2d-no-2d",
    "ti2d+hh16",
)
"""Recipes whose three GEMMs all run in MXFP4."""
LEAST_SEEDS = 2
"""With fewer a recipe is not called the best."""
USES = {
    "bf16": "The baseline: no quantization.",
    "fp8": "All three GEMMs in FP8 with one scale a tensor. Use it when FP4 hardware is not at hand.",
    "mxfp4-fprop-dgrad": "MXFP4 in Fprop and Dgrad, FP8 in Wgrad. Use it to avoid a part of the cost of full MXFP4.",
    "mxfp4+h16": "P1's recipe: full MXFP4 and a fixed 16-point rotation. Needs a rotation kernel, no random numbers.",
    "mxfp4+sr-grad": "Full MXFP4 with stochastic rounding of gradients. Needs random numbers, no rotation.",
    "ti2d": "P2's recipe as reconstructed here: square blocks, truncation-free scales, stochastic gradients.",
    "mxfp4": "Full MXFP4 with no stabiliser.",
    "mxfp4+sr": "Full MXFP4 with stochastic rounding of every operand.",
}
"""What a recipe is, for the table on the front page."""


def answer(report: StudyReport) -> str:
    """About 120 words of Markdown. Each number is computed; parts without records are left out, and the last sentence
    counts what is missing."""
    parts = [_best(report), _rotation(report), _stochastic(report), _p2(report), _setting(report)]
    return " ".join(filter(None, parts))


def in_nats(e: Estimate) -> str:
    """Such as "+0.123 nats [+0.110, +0.136]", without brackets where there is no interval."""
    if math.isinf(e.value):
        return "no finite loss"
    interval = "" if math.isnan(e.low) else f" [{e.low:+.3f}, {e.high:+.3f}]"
    return f"{e.value:+.3f} nats{interval}".replace("-", "\N{MINUS SIGN}")


def _best(report: StudyReport) -> str:
    costs = {arm: report.cost(arm, "bf16") for arm in FULL_RECIPES}
    compared = [arm for arm, e in costs.items() if e.n >= LEAST_SEEDS and math.isfinite(e.value)]
    if len(compared) < 2:
        return "No two MXFP4 recipes have enough runs to be compared yet."
    best, plain = min(compared, key=lambda arm: costs[arm].value), costs["mxfp4"]
    text = (
        f"Of the recipes that run all three GEMMs in MXFP4, **`{best}` ends lowest: {in_nats(costs[best])} over BF16**"
    )
    if best != "mxfp4" and "mxfp4" in compared:
        text += f"; MXFP4 without a stabiliser ends {in_nats(plain)} over it"
    return f"{text}."


def _by_verdict(report: StudyReport, claim: str, holds: str, fails: str, undecided: str) -> str:
    """The sentence for the verdict on a claim, with its effect; empty without records."""
    v = report.verdict(claim)
    if v.verdict == NOT_RUN:
        return ""
    if v.verdict == "does not hold" and not v.estimate.side(0.0):  # equivalent
        fails += f" by as much as {MARGIN} nats"
    return f"{ {'holds': holds, 'does not hold': fails}.get(v.verdict, undecided) } ({in_nats(v.estimate)})."


def _rotation(report: StudyReport) -> str:
    return _by_verdict(
        report,
        "h3-h16",
        holds="P1's fixed Hadamard rotation lowers the loss of full MXFP4",
        fails="P1's fixed Hadamard rotation does not lower the loss of full MXFP4",
        undecided="Whether P1's fixed Hadamard rotation lowers the loss of full MXFP4 is undecided",
    )


def _stochastic(report: StudyReport) -> str:
    everywhere = _by_verdict(
        report,
        "h2-sr",
        holds="Stochastic rounding of every operand raises it, as P1 says",
        fails="Contrary to P1, stochastic rounding of every operand does not raise it",
        undecided="Whether stochastic rounding of every operand raises it is undecided",
    )
    gradients = _by_verdict(
        report,
        "sr-grad",
        holds="Stochastic rounding of gradients alone lowers it",
        fails="Stochastic rounding of gradients alone does not lower it",
        undecided="Whether stochastic rounding of gradients alone lowers it is undecided",
    )
    return " ".join(filter(None, (everywhere, gradients)))


def _p2(report: StudyReport) -> str:
    text = _by_verdict(
        report,
        "p2-perplexity",
        holds="P2's recipe, as reconstructed here, stays within 1.3 % of BF16's perplexity",
        fails="P2's recipe, as reconstructed here, does not stay within 1.3 % of BF16's perplexity",
        undecided="Whether P2's recipe, as reconstructed here, stays within 1.3 % of BF16's perplexity is undecided",
    )
    own, bf16 = (report.cost("ti2d", "bf16", outcome=outcome) for outcome in ("own", "bf16"))
    if text and bf16.n and bf16.value > own.value + MARGIN:
        text += (
            f" Its weights end {in_nats(bf16)} over BF16 in a BF16 forward: they need the forward they trained with."
        )
    return text


def _setting(report: StudyReport) -> str:
    runs = report.study.runs["main"]
    done, planned = report.progress("main")
    text = (
        f"All this is at {count(runs.weights)} weights and {count(runs.tokens)} fresh tokens of a generated language, with "
        "exact MXFP4 values computed on other hardware. It need not carry over to billions of weights."
    )
    if done >= planned:
        return text
    return (
        f"{text} The study is not complete: {done} of its {planned} main runs are recorded. Until it is, read "
        "[the first study](first_study.html) too."
    )


def recipe_table(report: StudyReport) -> pd.DataFrame:
    """One row a recipe of USES: recipe, use, cost over BF16 in both forwards (text; a dash without records), seeds."""
    rows = []
    for arm, use in USES.items():
        own, bf16 = (report.cost(arm, "bf16", outcome=outcome) for outcome in ("own", "bf16"))
        shown = [in_nats(e) if e.n and arm != "bf16" else "\N{EN DASH}" for e in (own, bf16)]
        rows.append({"recipe": arm, "use": use, "own forward": shown[0], "BF16 forward": shown[1], "seeds": own.n})
    return pd.DataFrame(rows)
