"""The papers' figures and the public MLPerf logs' as data, each with its source and its mark.

Marks: P1, P2 (the two papers), press (an article on P1's work), log (computed from public MLPerf logs), code (read in public code), vendor (the
maker's data sheet), inferred (our reading, to be tested). Shares are fractions (0.08 is 8 %), losses nats a token, one
sequence is 8192 tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import pandas as pd

from mxfp4.errors import UserError

MARKS = {
    "P1": "Cim et al., Pretraining Large Language Models with MXFP4 on Native FP4 Hardware, arXiv 2605.09825",
    "press": "press article on P1's work, not P1",
    "P2": "Rahimifar et al., Stable FP4 Training via Transposition-Invariant Block Quantization, "
    "arXiv 2607.24953 (abstract)",
    "log": "public MLPerf Training result logs, Llama 3.1 8B, AMD, 8 x MI355X",
    "code": "read in public code",
    "vendor": "AMD Instinct MI355X, vendor's figures, dense",
    "inferred": "our reading, to be tested",
}


@dataclass(frozen=True)
class Figure:
    """A published figure, or a statement without one (low and high NaN)."""

    text: str
    """As it is printed, short."""
    source: str
    """Paper and place, or log."""
    mark: str
    """A key of MARKS."""
    low: float = math.nan
    """Lower end of the published range (equal to `high` for a single value)."""
    high: float = math.nan
    """Upper end."""

    def __post_init__(self):
        if self.mark not in MARKS:
            raise UserError(f"mark {self.mark!r} is not known; known: {', '.join(MARKS)}")

    @property
    def cite(self) -> str:
        """Where it is from, for print: source and mark."""
        return self.source if self.source.startswith(self.mark) else f"{self.source} ({self.mark})"


# P1's Table 1: recipe of ours, what the table calls it, overhead from, to (infinite: never converges).
_TABLE1 = (
    ("mxfp4-fprop", "Fprop", "none", 0.08, 0.09),
    ("mxfp4-fprop-dgrad", "Fprop + Dgrad", "none", 0.10, 0.11),
    ("mxfp4", "Fprop + Dgrad + Wgrad", "none", 0.26, 0.27),
    ("mxfp4+sr", "all three", "stochastic rounding", math.inf, math.inf),
    ("mxfp4+rht16", "all three", "random Hadamard 16", math.inf, math.inf),
    ("mxfp4+h16", "all three", "deterministic Hadamard 16", 0.08, 0.09),
)


def span(low: float, high: float) -> str:
    """A range of shares as the papers print it: "8-9 %"."""
    if math.isinf(low):
        return "does not converge"
    ends = [f"{100 * end:.3g}" for end in (low, high)]
    return f"{ends[0]} %" if low == high else f"{ends[0]}-{ends[1]} %"


def table1() -> pd.DataFrame:
    """P1's Table 1: recipe, scope, stabiliser, low, high (shares; infinite where it does not converge), text,
    source."""
    frame = pd.DataFrame(_TABLE1, columns=["recipe", "scope", "stabiliser", "low", "high"])
    frame["text"] = [span(low, high) for low, high in zip(frame["low"], frame["high"], strict=True)]
    return frame.assign(source="P1, Table 1", mark="P1")


PRESS = "press article on P1"
"""Source of the figures with the mark press."""

FIGURES: dict[str, Figure] = {
    **{
        f"table1/{name}": Figure(
            span(low, high) + (" more tokens" if math.isfinite(low) else ""), "P1, Table 1", "P1", low, high
        )
        for name, _, _, low, high in _TABLE1
    },
    "table1/order": Figure("Fprop = H16 < Fprop + Dgrad < all three < SR, random H (never)", "P1, Table 1", "P1"),
    "table1/wgrad": Figure("26-27 % with Wgrad, 10-11 % without", "P1, Table 1", "P1", 0.15, 0.17),
    "h1": Figure("Wgrad is the sensitive GEMM", "P1, hypothesis H1", "P1"),
    "h2": Figure("randomness adds noise and does not help", "P1, hypothesis H2", "P1"),
    "h3": Figure("a fixed Hadamard spreads outliers within blocks", "P1, hypothesis H3", "P1"),
    "h4": Figure("faster steps pay while the token overhead is small", "P1, hypothesis H4", "P1"),
    "step-speed": Figure("1.21x", "P1, Table 2", "P1", 1.21, 1.21),
    "token-overhead": Figure("8 %", "P1, Table 2", "P1", 0.08, 0.08),
    "end-to-end": Figure("1.12x end to end", "P1, Table 2", "P1", 1.12, 1.12),
    "press/step-speed": Figure("1.20x", PRESS, "press", 1.20, 1.20),
    "press/overhead": Figure("8-9 %", PRESS, "press", 0.08, 0.09),
    "press/end-to-end": Figure("+9-10 % end to end", PRESS, "press", 1.09, 1.10),
    "h16-h32": Figure("1.08 : 1 kernel throughput", "P1, text", "P1", 1.08, 1.08),
    "fig2": Figure("FP8 and MXFP4 + H16 nearly coincide, plain MXFP4 is slower", "P1, Fig. 1 and 2", "P1"),
    "fig2/rough": Figure("plain MXFP4 is rougher", "P1, Fig. 1 and 2", "P1"),
    "partial": Figure("SR and random H on partial scopes: acceptable, no figures", "P1, text", "P1"),
    "explanation": Figure(
        "micro-scaling error along Wgrad is what hurts; stochastic methods bring more of it", "P1, text", "P1"
    ),
    "press/explanation": Figure(
        "random methods change the error pattern at every step, a fixed rotation keeps it", PRESS, "press"
    ),
    "p2/diagnosis": Figure("a transpose changes a value's scale with 1D blocks, not with 2D", "P2, abstract", "P2"),
    "p2/perplexity": Figure("less than 1.3 % worse than BF16", "P2, abstract", "P2", -math.inf, 0.013),
    "p2/2d": Figure("2D blocks are part of the remedy", "P2, abstract", "P2"),
    "p2/rceil": Figure("truncation-free scaling is part of the remedy", "P2, abstract", "P2"),
    "p2/sr": Figure("stochastic rounding keeps gradients unbiased", "P2, abstract", "P2"),
    "p2/qk8": Figure("query and key projections in MXFP8 are part of the remedy", "P2, abstract", "P2"),
    "reconciliation": Figure("stochastic rounding fails with a scale rule that clips, not without", "ours", "inferred"),
    "clipping-bias": Figure(
        "biased low at the block maximum with a rule that clips", "ours, from the formats", "inferred"
    ),
    "p2/experts": Figure("close to BF16 for a 30B mixture of experts as well", "P2, abstract", "P2"),
    "p2/mismatch-loss": Figure("the disagreement of forward and backward biases gradients", "P2, abstract", "P2"),
    "two-sided": Figure("a rotation of both axes keeps square blocks consistent", "ours, by algebra", "inferred"),
    "reconciliation/shape": Figure(
        "square blocks need stochastic rounding, row blocks do not", "ours, after seed 0 of scale gpu", "inferred"
    ),
    "tail15": Figure("-0.006 nats", "Lumen repository notes, 8B", "code", -0.006, -0.006),
    "quartet": Figure("QuEST forward, stochastic backward", "Quartet, arXiv 2505.14669", "code"),
    "log/step-speed": Figure("1.19x", "MLPerf v5.1 and v6.0 logs", "log", 1.19, 1.19),
    "log/overhead": Figure("4.1 % more samples, 4.9 % interpolated", "MLPerf v5.1 and v6.0 logs", "log", 0.041, 0.049),
    "log/end-to-end": Figure("1.14x end to end", "MLPerf v5.1 and v6.0 logs", "log", 1.14, 1.14),
    "lumen/wgrad-only": Figure(
        "rotating only Wgrad was 0.004 nats better", "Lumen repository notes, 8B", "code", -0.004, -0.004
    ),
}


RECONSTRUCTION = (
    "ti2d is our reconstruction of P2's recipe from its abstract: which operands P2 rounds stochastically and where it has "
    "square blocks is not public to us."
)


def reconstruction_note(arms: Iterable[str]) -> str:
    """RECONSTRUCTION where one of `arms` is a ti2d recipe, else empty."""
    return RECONSTRUCTION if any(arm.startswith("ti2d") for arm in arms) else ""


def figure(name: str) -> Figure:
    """The published figure called `name`; UserError lists the known ones."""
    if name not in FIGURES:
        raise UserError(f"published figure {name!r} is not known; known: {', '.join(FIGURES)}")
    return FIGURES[name]


# MLPerf Training, Llama 3.1 8B: rules of the benchmark and two ten-run result sets.
TARGET = 3.3
"""The benchmark's target: validation log-perplexity, nats a token (rules; P1 and the press call it a
perplexity)."""
SEQUENCE = 8192
EVAL_EVERY = 12_288
"""Sequences between evaluations."""
REFERENCE_SAMPLES = (179_405, 7_351)
"""BF16 reference points at batch 32: samples to target, and their spread."""
RUNS_PER_SET = 10
BATCH = 32
"""Sequences in an optimizer step."""


FP8_PLAIN_MINUTES = 99.97
"""Plain mean of the minutes of the ten FP8 runs; `mlperf_results` has MLPerf's score."""
MEANS_NOTE = (
    "Sequences are plain means of ten runs. FP8's 99.31 minutes are MLPerf's score, which leaves out the best and the worst of "
    f"the ten runs; their plain mean is {FP8_PLAIN_MINUTES}. Our source does not say which of the two the 86.84 minutes are. FP8 was "
    "evaluated after 12,256, 24,544, ... sequences, one batch earlier each time than MXFP4 + H16."
)
"""What the means of `mlperf_results` are, for print beside them."""


def mlperf_results() -> pd.DataFrame:
    """AMD's two result sets, ten runs each: arm, round, minutes, samples, seconds_per_step, source, mark. MEANS_NOTE says
    what the means leave out."""
    rows = [
        ("FP8", "v5.1", 99.31, 179_373, 1.043, "MLPerf v5.1 logs"),
        ("MXFP4 + H16", "v6.0", 86.84, 186_778, 0.874, "MLPerf v6.0 logs, from a fork of the results"),
    ]
    columns = ["arm", "round", "minutes", "samples", "seconds_per_step", "source"]
    return pd.DataFrame(rows, columns=columns).assign(mark="log")


_FIRST_EVALUATION = {"MXFP4 + H16": 12_288, "FP8": 12_256}
"""Sequences before the first evaluation; the others follow every EVAL_EVERY."""
_RUN0 = {
    "MXFP4 + H16": (
        5.800,
        4.524,
        4.074,
        3.871,
        3.737,
        3.644,
        3.574,
        3.514,
        3.467,
        3.428,
        3.395,
        3.356,
        3.332,
        3.315,
        3.291,
    ),
    "FP8": (5.595, 4.473, 4.050, 3.854, 3.723, 3.627, 3.556, 3.501, 3.451, 3.406, 3.375, 3.341, 3.318, 3.291),
}


def mlperf_curves() -> pd.DataFrame:
    """Validation curves of run 0 of both sets: arm, samples, tokens, eval_loss (nats a token). Source: MLPerf
    logs."""
    rows = [
        {"arm": arm, "samples": _FIRST_EVALUATION[arm] + n * EVAL_EVERY, "eval_loss": loss}
        for arm, losses in _RUN0.items()
        for n, loss in enumerate(losses)
    ]
    frame = pd.DataFrame(rows)
    frame.insert(2, "tokens", frame["samples"] * SEQUENCE)
    return frame


MI355X_FLOPS = {"mxfp4": 10.1e15, "fp8": 5.0e15, "bf16": 2.5e15}
"""FLOP/s of an MI355X, dense (vendor)."""
MI355X_BANDWIDTH = 8e12
"""Bytes a second of its memory (vendor)."""
LLAMA_8B_GEMMS = {
    "query, key, value": (16384, 6144, 4096),
    "attention output": (16384, 4096, 4096),
    "gate, up": (16384, 28672, 4096),
    "down": (16384, 4096, 14336),
}
"""Tokens, out features, in features of Llama 3.1 8B's linear layers at micro-batch 2 (MLPerf's sequence), those that
share an input taken as one."""
