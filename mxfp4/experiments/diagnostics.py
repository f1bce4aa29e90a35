"""Probe rows to tables and sentences: what the chapters on stability and transposition say, computed from records.

The frame that goes in is `Study.probes`: arm (what was trained), seed, recipe (what was applied to the tensors), step,
layer, gemm, tensor, metric, value. Means are over layers and steps, each counted once; ranges are over layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np
import pandas as pd

from mxfp4.errors import UserError
from mxfp4.experiments.study import Study

FIXED = ("mxfp4+h16", "mxfp4+h32")
"""Rotated by the same matrix at every step."""
REDRAWN = ("mxfp4+rht16", "mxfp4+sr")
"""With random numbers that are drawn anew at every step."""
FP4_SCOPE = ("mxfp4", "mxfp4+sr", "mxfp4+rht16", "mxfp4+h16", "mxfp4+h32")
"""The arms with all three GEMMs in FP4 that P1's Table 1 compares."""
OPERANDS = {
    ("fprop", "x"): "X in Fprop", ("fprop", "w"): "W in Fprop", ("dgrad", "g"): "G in Dgrad",
    ("dgrad", "w"): "W in Dgrad", ("wgrad", "g"): "G in Wgrad", ("wgrad", "x"): "X in Wgrad",
}  # fmt: skip
PRODUCTS = {("fprop", "y"): "Y (Fprop)", ("dgrad", "dx"): "dX (Dgrad)", ("wgrad", "dw"): "dW (Wgrad)"}
WHOLE = {("", "dw"): "whole gradient of W"}
TENSORS = {("", "x"): "X", ("", "w"): "W", ("", "g"): "G"}
PATTERNS = {
    ("fprop", "w", "pattern_next"): "Q(W) - W, steps t and t + 1",
    ("wgrad", "dw", "pattern_redraw"): "error of dW, same step, drawn again",
    ("wgrad", "dw", "pattern_next_held"): "error of dW, t and t + 1, same batch",
    ("wgrad", "dw", "pattern_next"): "error of dW, t and t + 1, next batch",
    ("", "dw", "pattern_next"): "error of the whole gradient, t and t + 1",
}


@dataclass(frozen=True)
class Finding:
    """A verdict: one or two sentences computed from records, and the numbers behind them."""

    text: str
    numbers: pd.DataFrame


def select(
    frame: pd.DataFrame,
    metrics: str | Iterable[str],
    *,
    arm: str | None = None,
    recipes: Iterable[str] | None = None,
    what: dict[tuple[str, str], str] | None = None,
    layers: str = "*",
) -> pd.DataFrame:
    """Rows of the `metrics`, with a column `what` that names tensor and GEMM for print.

    arm: None takes the rows of every arm under its own recipe. recipes: what was applied; None takes the arm's own.
    what: one of this module's tables of (gemm, tensor), which also says what to keep; None keeps all. layers: a
    pattern over full names; "all" is the whole model and part of no other pattern.
    """
    metrics = [metrics] if isinstance(metrics, str) else list(metrics)
    rows = frame[frame["metric"].isin(metrics)]
    rows = rows[rows["arm"] == arm] if arm is not None else rows
    rows = rows[rows["recipe"].isin(list(recipes))] if recipes is not None else rows[rows["recipe"] == rows["arm"]]
    if layers == "all":
        rows = rows[rows["layer"] == "all"]
    else:
        known = {name: name != "all" and fnmatchcase(name, layers) for name in rows["layer"].unique()}
        rows = rows[rows["layer"].map(known).astype(bool)]
    names = [(what or {}).get(pair, " ".join(pair)) for pair in zip(rows["gemm"], rows["tensor"], strict=True)]
    rows = rows.assign(what=names)
    if what is not None:
        rows = rows[rows["what"].isin(list(what.values()))]
        rows = rows.assign(what=pd.Categorical(rows["what"], list(what.values()), ordered=True)).sort_values("what")
        rows["what"] = rows["what"].astype(str)
    return rows


def by_layer(rows: pd.DataFrame, by: Iterable[str]) -> pd.DataFrame:
    """Means over steps and seeds: one row for each layer within each group of the columns `by`; column `value`."""
    keys = [*by, "layer"]
    return rows.groupby(keys, sort=False, as_index=False)["value"].mean()


def summary(rows: pd.DataFrame, by: Iterable[str]) -> pd.DataFrame:
    """One row for each group of the columns `by`: mean, low and high over layers, and how many layers."""
    by = list(by)
    layers = by_layer(rows, by)
    found = layers.groupby(by, sort=False)["value"].agg(mean="mean", low="min", high="max", layers="count")
    return found.reset_index()


def layers_of(frame: pd.DataFrame) -> list[str]:
    """Full names of the layers that were probed, in the order of the model."""
    return [name for name in frame["layer"].unique() if name != "all"]


def share(value: float) -> str:
    """A share for print, in percent."""
    return "none" if value == 0 else f"{100 * value:.2g} %" if abs(value) < 1 else f"{100 * value:.0f} %"


def largest(rows: pd.DataFrame, name: str = "it") -> str:
    """A sentence: in which tensor the mean is largest, and in which smallest."""
    table = summary(rows, ["what"]).dropna().sort_values("mean")
    if len(table) < 2:
        return f"There is no record of {name} to compare."
    low, high = table.iloc[0], table.iloc[-1]
    return f"{name[0].upper()}{name[1:]} is largest for {high['what']} ({share(high['mean'])}) and smallest for {low['what']} ({share(low['mean'])})."


def rotation_effect(rows: pd.DataFrame, recipe: str) -> str:
    """A sentence: for which tensors the rotation of `recipe` lowers the kurtosis of blocks, for which it raises it."""
    pair = rows[rows["recipe"] == recipe]
    before = summary(pair[pair["metric"] == "kurtosis_before"], ["what"]).set_index("what")["mean"]
    after = summary(pair[pair["metric"] == "kurtosis"], ["what"]).set_index("what")["mean"]
    change = (after / before - 1).dropna()
    if change.empty:
        return f"No record holds block statistics under {recipe}."
    parts = []
    for word, names in (("lowers", change[change < -0.01]), ("raises", change[change > 0.01])):
        if len(names):
            listed = ", ".join(f"{n} ({v:+.0%})" for n, v in names.sort_values(key=abs, ascending=False).items())
            parts.append(f"{word} the kurtosis of blocks of {listed}")
    left = [n for n, v in change.items() if abs(v) <= 0.01]
    if left:
        parts.append(f"leaves {', '.join(left)} as it was")
    return f"The rotation of {recipe} {' and '.join(parts)}."


def bias_and_noise(rows: pd.DataFrame) -> pd.DataFrame:
    """Error of products, split: recipe, what, error, systematic, random (root of the rest), bias, cosine."""
    keys = ["recipe", "what"]
    table = rows.pivot_table(index=keys, columns="metric", values="value", sort=False).reset_index()
    table["random"] = (table["error"] ** 2 - table["systematic"] ** 2).clip(lower=0) ** 0.5
    return table[[*keys, "error", "systematic", "random", "bias", "cosine"]]


def loss_gaps(study: Study, reference: str = "bf16") -> pd.Series:
    """{arm: last evaluation less that of `reference`, nats a token, mean over shared seeds}; infinite when diverged."""

    def final(record) -> float:
        return math.inf if record.outcome["status"] == "diverged" else record.outcome["final_loss"]

    base = study.arms.get(reference, {})
    gaps = {}
    for arm, records in study.arms.items():
        seeds = sorted(records.keys() & base.keys())
        if seeds:
            gaps[arm] = float(np.mean([final(records[s]) - final(base[s]) for s in seeds]))
    return pd.Series(gaps, dtype=float)


def against_loss(
    study: Study, metric: str, *, gemm: str = "", tensor: str, layers: str = "*", reference: str = "bf16"
) -> pd.DataFrame:
    """One row an arm: its own value of a probe metric (mean over layers) and its loss gap; arms without either drop."""
    rows = select(study.probes, metric, layers=layers)
    rows = rows[(rows["gemm"] == gemm) & (rows["tensor"] == tensor)]
    table = summary(rows, ["arm"]) if len(rows) else pd.DataFrame(columns=["arm", "mean", "low", "high", "layers"])
    return table.assign(gap=table["arm"].map(loss_gaps(study, reference))).dropna(subset=["mean", "gap"])


def explanation(study: Study, source: str = "bf16") -> Finding:
    """P1's explanation as two questions to the records.

    Premise: on the same tensors (those of the arm `source`), does a fixed rotation keep the error of Q(W) from one
    step to the next, and do random signs and stochastic rounding change it? Yes when every layer under every fixed
    rotation keeps more than any layer under any redrawn one. Consequence: among the arms with all GEMMs in FP4, do
    those that keep it end with a lower loss? Yes when each fixed arm ends below each redrawn one; and the pattern by
    itself is the cause only if plain mxfp4, which keeps it as well, does as well as the fixed rotations.
    """
    rows = select(study.probes, "pattern_next", arm=source, recipes=(*FIXED, *REDRAWN, "mxfp4"))
    rows = rows[(rows["gemm"] == "fprop") & (rows["tensor"] == "w")]
    if rows.empty:
        return Finding(f"Not tested: no pair of steps of the arm {source} was probed.", pd.DataFrame())
    kept = summary(rows, ["recipe"]).set_index("recipe")
    gaps = loss_gaps(study)
    numbers = kept.join(gaps.rename("loss gap")).reindex([n for n in FP4_SCOPE if n in kept.index])
    fixed, redrawn = (kept.loc[[n for n in names if n in kept.index]] for names in (FIXED, REDRAWN))
    if fixed.empty or redrawn.empty:
        return Finding(f"Not tested: {source} was not probed under both fixed and redrawn recipes.", numbers)
    holds = fixed["low"].min() > redrawn["high"].max()
    text = (
        f"The premise {'holds' if holds else 'does not hold'} on the tensors of {source}: from one step to the next the "
        f"error of Q(W) has a cosine of {_range(fixed)} under a fixed rotation and of {_range(redrawn)} under random "
        f"numbers drawn anew"
    )
    if "mxfp4" in kept.index:
        plain = kept.loc[["mxfp4"]]
        text += f"; without any rotation it is {_range(plain)}"
    text += ". " + _consequence(gaps)
    return Finding(text, numbers.reset_index())


def _range(table: pd.DataFrame) -> str:
    low, high = table["low"].min(), table["high"].max()
    return f"{low:.2f}" if f"{low:.2f}" == f"{high:.2f}" else f"{low:.2f} to {high:.2f}"


def _consequence(gaps: pd.Series) -> str:
    have = {name: gaps[name] for name in FP4_SCOPE if name in gaps}
    fixed = {n: have[n] for n in FIXED if n in have}
    redrawn = {n: have[n] for n in REDRAWN if n in have}
    if not fixed or not redrawn:
        return "The consequence is not tested: the arms to compare have no records."
    better = max(fixed.values()) < min(redrawn.values())
    worst, best = max(fixed, key=fixed.get), min(redrawn, key=redrawn.get)
    text = (
        f"The consequence {'agrees' if better else 'does not follow'}: the worst fixed arm, {worst}, ends "
        f"{_nats(have[worst])} above bf16, the best redrawn one, {best}, {_nats(have[best])}."
    )
    if "mxfp4" in have:
        plain, good = have["mxfp4"], min(fixed.values())
        alone = plain <= max(fixed.values())
        text += (
            f" Plain mxfp4, which keeps its error pattern too, ends {_nats(plain)} above bf16 against {_nats(good)} for "
            f"the best fixed rotation: "
            + ("keeping the pattern would be enough." if alone else "keeping the pattern is not what a rotation adds.")
        )
    return text


def _nats(value: float) -> str:
    return "nowhere (it diverged)" if math.isinf(value) else f"{value:.4f} nats"


def transposition_verdict(frame: pd.DataFrame, source: str, recipe: str) -> Finding:
    """P2's diagnosis on the tensors of `source`: what `recipe` with 1D blocks changes under a transpose, and 2D."""
    metrics = ("changes", "mismatch", "mismatch_to_error", "mismatch_bias", "error")
    rows = select(frame, metrics, arm=source, recipes=(recipe, "mxfp4+2d"))
    if rows[rows["recipe"] == recipe].empty:
        return Finding(f"Not tested: the records of {source} hold no transposition of {recipe}.", pd.DataFrame())
    table = rows.groupby(["recipe", "gemm", "tensor", "metric"], sort=False)["value"].mean().unstack("metric")

    def at(name: str, gemm: str, tensor: str, metric: str) -> float:
        return float(table[metric].get((name, gemm, tensor), math.nan)) if metric in table else math.nan

    shares = {t: at(recipe, "", t, "changes") for t in "xwg"}
    parts = [f"{share(v)} of {t.upper()}" for t, v in shares.items() if not math.isnan(v)]
    text = f"Under {recipe}, a transpose changes scale or code of {', '.join(parts)}. " if parts else ""
    ratios = [at(recipe, "", t, "mismatch_to_error") for t in "xwg"]
    ratios = [r for r in ratios if not math.isnan(r)]
    if ratios:
        text += (
            f"The two readings of a tensor differ by {min(ratios):.2f} to {max(ratios):.2f} of its quantization error, "
            "and "
        )
    biases = [abs(at(recipe, "", t, "mismatch_bias")) for t in "xwg"]
    biases = [b for b in biases if not math.isnan(b)]
    if biases:
        text += f"the difference is a bias along the tensor of at most {share(max(biases))}. "
    effects = []
    for gemm, tensor, name in (("dgrad", "dx", "dX"), ("wgrad", "dw", "dW")):
        mismatch, error = (at(recipe, gemm, tensor, m) for m in ("mismatch", "error"))
        if not math.isnan(mismatch):
            effects.append(f"{name} by {share(mismatch)} (quantization itself: {share(error)})")
    if effects:
        text += f"It moves {' and '.join(effects)}."
    square = rows[(rows["recipe"] == "mxfp4+2d") & rows["metric"].isin(["changes", "mismatch"])]
    if len(square):
        most = float(square["value"].max())
        text += " With 32x32 blocks nothing changes." if most == 0 else f" With 32x32 blocks {share(most)} changes."
    return Finding(text, table.reset_index())


def tile(frame: pd.DataFrame, arm: str, step: int | None = None) -> pd.DataFrame:
    """Scales of the recorded 64x64 corner of a weight, one row a block: blocks, top, bottom, left, right, log2_scale.

    blocks is "1x32, along rows", "32x1, along columns" or "32x32"; bottom and right are exclusive. step: None is the
    last one recorded. Raises UserError when the arm has no recorded tile. The scale of a 32x32 block is the largest of
    its rows' scales, as every rule is monotone in the maximum.
    """
    rows = frame[(frame["arm"] == arm) & frame["metric"].str.startswith("tile_")]
    if rows.empty:
        raise UserError(f"no record of {arm} holds a weight tile; arms: {', '.join(sorted(frame['arm'].unique()))}")
    rows = rows[rows["step"] == (rows["step"].max() if step is None else step)]
    rows = rows[rows["seed"] == rows["seed"].min()]
    where = rows["metric"].str.extract(r"tile_(?P<kind>row|col):(?P<i>\d+):(?P<j>\d+)")
    where = where.astype({"i": int, "j": int}).assign(value=rows["value"])
    parts = []
    for kind, name, height, width in (("row", "1x32, along rows", 1, 32), ("col", "32x1, along columns", 32, 1)):
        part = where[where["kind"] == kind]
        parts.append(_blocks(name, part["i"] * height, part["j"] * width, height, width, part["value"]))
    square = parts[0].assign(top=parts[0]["top"] // 32 * 32).groupby(["top", "left"])["log2_scale"].max().reset_index()
    parts.append(_blocks("32x32", square["top"], square["left"], 32, 32, square["log2_scale"]))
    return pd.concat(parts, ignore_index=True).assign(layer=rows["layer"].iloc[0], step=int(rows["step"].iloc[0]))


def _blocks(name: str, top, left, height: int, width: int, value) -> pd.DataFrame:
    corners = {"top": top, "bottom": top + height, "left": left, "right": left + width}
    return pd.DataFrame({"blocks": name, **corners, "log2_scale": value})


def tile_agreement(scales: pd.DataFrame) -> str:
    """A sentence: for what share of the tile the two 1D pictures of `tile` have the same scale."""
    by_row = scales[scales["blocks"] == "1x32, along rows"]
    by_col = scales[scales["blocks"] == "32x1, along columns"]
    rows = by_row.pivot(index="top", columns="left", values="log2_scale").to_numpy().repeat(32, axis=1)
    cols = by_col.pivot(index="top", columns="left", values="log2_scale").to_numpy().repeat(32, axis=0)
    same = float((rows == cols).mean())
    return f"The two 1D pictures agree on the scale of {share(same)} of the values; 32x32 blocks have one picture."
