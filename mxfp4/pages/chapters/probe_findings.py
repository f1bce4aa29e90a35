"""Sentences and verdicts of the chapters on stability and transposition, computed from probe rows.

Every number that these chapters print in prose comes out of here; the tables behind are those of `probe_tables`.
"""

from __future__ import annotations

import html
import math
from dataclasses import dataclass

import numpy as np
import pandas as pd

from mxfp4.analysis.effect import NoProbe
from mxfp4.analysis.study import Study
from mxfp4.layers.recipe import recipe
from mxfp4.pages.probe_tables import (  # fmt: skip
    FIXED,
    FP4_SCOPE,
    REDRAWN,
    TENSORS,
    loss_gaps,
    loss_gaps_by_seed,
    select,
    summary,
)


@dataclass(frozen=True)
class Finding:
    """A verdict: one or two sentences computed from records, and the numbers behind them."""

    text: str
    numbers: pd.DataFrame

    def _repr_html_(self) -> str:
        return f'<div class="mx-evidence"><p><strong>Verdict.</strong> {html.escape(self.text)}</p></div>'

    def __repr__(self) -> str:
        return f"Verdict. {self.text}"


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


def extremes(rows: pd.DataFrame, column: str, name: str, form: str = "") -> str:
    """A sentence: for which value of `column`, over all tensors, the mean is largest and smallest; with negative ones among
    them, farthest from zero and nearest to it.

    form: a format such as "{:.2f}"; empty prints shares.
    """
    table = summary(rows, [column]).dropna().sort_values("mean", key=abs, kind="stable")
    words = ("farthest from zero", "nearest to it") if (table["mean"] < 0).any() else ("largest", "smallest")
    show = form.format if form else share
    if len(table) < 2 or table["mean"].iloc[0] == table["mean"].iloc[-1]:
        return f"Over all tensors {name} is {show(table['mean'].iloc[0])}." if len(table) else f"There is no {name}."
    low, high = table.iloc[0], table.iloc[-1]
    least = list(table[table["mean"] == low["mean"]][column])
    return (
        f"Over all tensors {name} is {words[0]} under {high[column]} ({show(high['mean'])}) and {words[1]} under "
        f"{' and '.join(least)} ({show(low['mean'])})."
    )


def noisiest(parts: pd.DataFrame) -> str:
    """A sentence on `probe_tables.bias_and_noise`: which recipe has least systematic error in dW, at what total."""
    wgrad = parts[parts["what"].str.startswith("dW")].sort_values("systematic")
    if len(wgrad) < 2:
        return "Blue repeats at every draw, orange does not."
    low, high = wgrad.iloc[0], wgrad.iloc[-1]
    return (
        f"For dW the systematic part is smallest under {low['recipe']} ({share(low['systematic'])} of a total of "
        f"{share(low['error'])}) and largest under {high['recipe']} ({share(high['systematic'])} of {share(high['error'])})."
    )


def most_biased(parts: pd.DataFrame) -> str:
    """A sentence on `probe_tables.bias_and_noise`: the product that is farthest from its exact length, and the nearest."""
    table = parts.assign(size=parts["bias"].abs()).sort_values("size")
    near, far = table.iloc[0], table.iloc[-1]
    return (
        f"Farthest from the exact product is {far['what']} under {far['recipe']} ({far['bias']:+.2%}), nearest "
        f"{near['what']} under {near['recipe']} ({near['bias']:+.2%})."
    )


def farthest(table: pd.DataFrame) -> str:
    """A sentence on `probe_tables.signed_means`: the value farthest from zero."""
    far = table.loc[table["value"].abs().idxmax()]
    return f"The value farthest from zero is {far['value']:+.2%}, for {far['what']} under {far['recipe']}."


def ranked(rows: pd.DataFrame, column: str, name: str) -> str:
    """A sentence: first and last of `column` by mean."""
    table = summary(rows, [column]).sort_values("mean")
    if len(table) < 2:
        return f"There is one {column} with {name}."
    low, high = table.iloc[0], table.iloc[-1]
    return f"{high[column]} has the highest value of {name} ({high['mean']:.4f}), {low[column]} the lowest ({low['mean']:.4f})."


def drift(rows: pd.DataFrame, name: str) -> str:
    """A sentence: how the mean of `name` over all tensors moves from the first probed step to the last."""
    table = rows.groupby("step")["value"].mean().sort_index()
    if len(table) < 2:
        return f"{name[0].upper()}{name[1:]} was probed once."
    first, last = table.iloc[0], table.iloc[-1]
    return f"Over all tensors {name} goes from {share(first)} at step {table.index[0]} to {share(last)} at step {table.index[-1]}."


def batches(patterns: pd.DataFrame) -> str:
    """Half a sentence on `probe_tables.patterns`: what is left of dW's error pattern on the next batch."""
    kept = patterns[(patterns["metric"] == "pattern_next") & (patterns["gemm"] == "wgrad")]
    if kept.empty:
        return "it was not recorded here."
    table = summary(kept, ["recipe"])
    low, high = table["low"].min(), table["high"].max()
    return f"its cosine lies between {low:.2f} and {high:.2f} over all recipes and layers shown."


def beside(rows: pd.DataFrame) -> str:
    """A sentence on rows of "mismatch" and "reading_error" of products: the largest ratio of the two."""
    table = rows.groupby(["recipe", "what", "metric"], sort=False)["value"].mean().unstack("metric").dropna()
    table = (table["mismatch"] / table["reading_error"]).sort_values()
    (recipe, what), ratio = table.index[-1], table.iloc[-1]
    nothing = list(dict.fromkeys(r for (r, _), v in table.items() if v < 1e-5))
    text = f"The choice of reading weighs most for {what} under {recipe}: {ratio:.2f} times the quantization error beside it."
    return text + (f" It changes nothing under {', '.join(nothing)}." if nothing else "")


def correlation(table: pd.DataFrame, name: str) -> str:
    """A sentence on `probe_tables.against_loss`: rank correlation with the loss gap over arms, if there are enough."""
    finite = table[table["gap"].abs() < math.inf]
    gone = sorted(set(table["arm"]) - set(finite["arm"]))
    left = f" Not drawn, as it diverged: {', '.join(gone)}." if gone else ""
    if len(finite) < 4 or finite[["mean", "gap"]].nunique().min() < 2:
        return f"There are too few arms ({len(finite)}) to rank.{left}"
    ranks = [finite[column].rank().to_numpy() for column in ("mean", "gap")]
    rank = np.corrcoef(ranks)[0, 1]
    seeds = int(finite["seeds"].iloc[0]) if "seeds" in finite else 0
    over = f" (over {seeds} seed{'s' if seeds != 1 else ''} that all of them have)" if seeds else ""
    return (
        f"Over {len(finite)} arms the rank correlation of {name} with the final loss{over} is {rank:+.2f}; of arms in random order "
        f"one in twenty lies beyond ±{_by_chance(*ranks):.2f}.{left}"
    )


def _by_chance(a: np.ndarray, b: np.ndarray, draws: int = 10_000) -> float:
    """The size of correlation of `a` with `b` that one random order of `b` in twenty exceeds."""
    orders = np.random.default_rng(0).permuted(np.tile(b - b.mean(), (draws, 1)), axis=1)
    found = orders @ (a - a.mean()) / np.sqrt(((a - a.mean()) ** 2).sum() * ((b - b.mean()) ** 2).sum())
    return float(np.quantile(np.abs(found), 0.95))


def square_blocks(table: pd.DataFrame) -> str:
    """Where square blocks stand among the arms of `probe_tables.against_loss` of a mismatch, or that there are none."""
    if any(recipe(arm).operands()["fprop", "w"].transposable for arm in table["arm"]):
        return "Square blocks stand at zero, on top"
    return "No arm here has square blocks, which would stand at zero, so nothing here says what consistency is worth"


STOCHASTIC = {"mxfp4+sr": "stochastic rounding", "mxfp4+rht16": "a random Hadamard transform"}
"""P1's stochastic methods on all three GEMMs, in words."""


def error_size(study: Study, source: str = "bf16") -> Finding:
    """P1's explanation as a question to the records: on the same tensors (those of the arm `source`), is the error of dW
    from Wgrad larger under the stochastic methods than under none? Layer by layer, each under every recipe."""
    recipes = ("mxfp4", *STOCHASTIC, *FIXED)
    try:
        rows = select(study.probes, "error", arm=source, recipes=recipes, what={("wgrad", "dw"): "dW"})
    except NoProbe as reason:
        return Finding(f"Not tested: {reason}.", pd.DataFrame())
    layers = rows.pivot_table(index="layer", columns="recipe", values="value")
    numbers = summary(rows, ["recipe"]).set_index("recipe")
    numbers = numbers.join(loss_gaps(study).rename("loss gap")).reindex([n for n in recipes if n in numbers.index])
    tested = [name for name in STOCHASTIC if name in layers]
    if "mxfp4" not in layers or not tested:
        return Finding(
            f"Not tested: {source} was not probed under mxfp4 and a stochastic method.", numbers.reset_index()
        )
    said, larger = [], []
    for name in tested:
        pair = layers[["mxfp4", name]].dropna()
        above = int((pair[name] > pair["mxfp4"]).sum())
        larger.append(above == len(pair))
        said.append(f"{share(pair[name].mean())} under {STOCHASTIC[name]} (larger in {above} of {len(pair)} layers)")
    text = f"On the tensors of {source} the error of dW is {share(layers['mxfp4'].mean())} without a stabiliser, {' and '.join(said)}. "
    words = [(STOCHASTIC[name], yes) for name, yes in zip(tested, larger, strict=True)]
    agree, differ = [word for word, yes in words if yes], [word for word, yes in words if not yes]
    parts = [f"holds for {' and '.join(agree)}"] if agree else []
    parts += [f"does not hold for {' and '.join(differ)}"] if differ else []
    text += f"P1's premise, more error under stochastic methods, {' and '.join(parts)} on these tensors."
    return Finding(text, numbers.reset_index())


def error_pattern(study: Study, source: str = "bf16") -> Finding:
    """The press's explanation, which P1 does not give, as two questions to the records.

    Premise: on the same tensors (those of the arm `source`), does a fixed rotation keep the error of Q(W) from one
    step to the next, and do random signs and stochastic rounding change it? Yes when every layer under every fixed
    rotation keeps more than any layer under any redrawn one. Consequence: among the arms with all GEMMs in FP4, do
    those that keep it end with a lower loss? Yes when each fixed arm ends below each redrawn one in every seed; and the
    pattern by itself is the cause only if plain mxfp4, which keeps it as well, does as well as the fixed rotations.
    """
    weight = {("fprop", "w"): "W"}
    try:
        rows = select(study.probes, "pattern_next", arm=source, recipes=(*FIXED, *REDRAWN, "mxfp4"), what=weight)
    except NoProbe as reason:
        return Finding(f"Not tested: {reason}.", pd.DataFrame())
    kept = summary(rows, ["recipe"]).set_index("recipe")
    gaps = loss_gaps(study)
    numbers = kept.join(gaps.rename("loss gap")).reindex([n for n in FP4_SCOPE if n in kept.index])
    fixed, redrawn = (kept.loc[[n for n in names if n in kept.index]] for names in (FIXED, REDRAWN))
    if fixed.empty or redrawn.empty:
        return Finding(
            f"Not tested: {source} was not probed under both fixed and redrawn recipes.", numbers.reset_index()
        )
    holds = fixed["low"].min() > redrawn["high"].max()
    text = (
        f"The press's premise {'holds' if holds else 'does not hold'} on the tensors of {source}: from one step to the next the "
        f"error of Q(W) has a cosine of {_range(fixed)} under a fixed rotation and of {_range(redrawn)} under random "
        f"numbers drawn anew"
    )
    if "mxfp4" in kept.index:
        plain = kept.loc[["mxfp4"]]
        text += f"; without any rotation it is {_range(plain)}"
    text += ". " + _consequence(study)
    return Finding(text, numbers.reset_index())


def _range(table: pd.DataFrame) -> str:
    low, high = table["low"].min(), table["high"].max()
    return f"{low:.2f}" if f"{low:.2f}" == f"{high:.2f}" else f"{low:.2f} to {high:.2f}"


def _consequence(study: Study) -> str:
    by_seed = loss_gaps_by_seed(study).reindex(columns=list(FP4_SCOPE)).dropna(axis=1, how="all").dropna()
    fixed, redrawn = (by_seed[[n for n in names if n in by_seed]] for names in (FIXED, REDRAWN))
    if by_seed.empty or fixed.empty or redrawn.empty:
        return "The consequence is not tested: the arms to compare have no records of one seed."
    below = fixed.max(axis=1) < redrawn.min(axis=1)
    seeds = f"{len(by_seed)} seed{'s' if len(by_seed) > 1 else ''}"
    told = {len(below): "agrees", 0: "does not follow"}.get(int(below.sum()), "is not decided")
    means = by_seed.mean()
    worst, best = means[fixed.columns].idxmax(), means[redrawn.columns].idxmin()
    text = (
        f"The consequence, a lower loss for arms that keep it, {told} over {seeds}: every fixed arm ends below every "
        f"redrawn one in {int(below.sum())} of {len(below)}; on average the worst fixed arm, {worst}, ends "
        f"{_nats(means[worst])} above bf16 and the best redrawn one, {best}, {_nats(means[best])}."
    )
    if "mxfp4" in by_seed:
        helped = int((by_seed["mxfp4"] > fixed.max(axis=1)).sum())
        text += (
            f" Plain mxfp4 keeps its error pattern too and ends {_nats(means['mxfp4'])} above bf16, above every fixed arm "
            f"in {helped} of {len(below)} seeds"
        )
        text += ": keeping the pattern is then not what a rotation adds." if helped == len(below) else "."
    return text


def _nats(value: float) -> str:
    return "nowhere (it diverged)" if math.isinf(value) else f"{value:.4f} nats"


def transposition_verdict(frame: pd.DataFrame, source: str, recipe: str) -> Finding:
    """P2's diagnosis on the tensors of `source`: what `recipe` with 1D blocks changes under a transpose, and 2D."""
    metrics = ("changes", "mismatch", "mismatch_to_error", "mismatch_bias", "reading_error")
    what = TENSORS | {("dgrad", "dx"): "dX", ("wgrad", "dw"): "dW"}
    try:
        select(frame, "mismatch", arm=source, recipes=[recipe])
        rows = select(frame, metrics, arm=source, recipes=(recipe, "mxfp4+2d"), what=what)
    except NoProbe as reason:
        return Finding(f"Not tested: {reason}.", pd.DataFrame())
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
        mismatch, error = (at(recipe, gemm, tensor, m) for m in ("mismatch", "reading_error"))
        if not math.isnan(mismatch):
            effects.append(f"{name} by {share(mismatch)} (quantization itself: {share(error)})")
    if effects:
        text += f"It moves {' and '.join(effects)}."
    square = rows[(rows["recipe"] == "mxfp4+2d") & rows["metric"].isin(["changes", "mismatch"])]
    if len(square):
        most = float(square["value"].max())
        text += " With 32x32 blocks nothing changes." if most == 0 else f" With 32x32 blocks {share(most)} changes."
    return Finding(text, table.reset_index())


def tile_agreement(scales: pd.DataFrame) -> str:
    """A sentence: for what share of the tile the two 1D pictures of `tile` have the same scale."""
    by_row = scales[scales["blocks"] == "1x32, along rows"]
    by_col = scales[scales["blocks"] == "32x1, along columns"]
    rows = by_row.pivot(index="top", columns="left", values="log2_scale").to_numpy().repeat(32, axis=1)
    cols = by_col.pivot(index="top", columns="left", values="log2_scale").to_numpy().repeat(32, axis=0)
    same = float((rows == cols).mean())
    return f"The two 1D pictures agree on the scale of {share(same)} of the values; 32x32 blocks have one picture."
