"""Probe rows to tables for the chapters on stability and transposition.

The frame that goes in is `Study.probes`: arm (what was trained), seed, recipe (what was applied to the tensors), step,
layer, gemm, tensor, metric, value. Means are over layers and steps, each counted once; ranges are over layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from fnmatch import fnmatchcase

import pandas as pd

from mxfp4.analysis.effect import NoProbe
from mxfp4.analysis.study import Study
from mxfp4.errors import UserError
from mxfp4.layers.recipe import FP4, recipe

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

ERROR_PARTS = {"split_scale": "scale", "split_dead": "dead zone", "split_grid": "grid"}
"""The parts of an operand's squared error: see `error_split`."""
NOISE_THRESHOLD = math.sqrt(3)
"""Gradient over quantization noise below which training in FP4 becomes less effective (arXiv 2505.19115)."""


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
    pattern over full names; "all" is the whole model and part of no other pattern. Raises NoProbe, which names what
    there is, where no row is left.
    """
    metrics = [metrics] if isinstance(metrics, str) else list(metrics)
    recipes = None if recipes is None else list(recipes)
    asked = f"{', '.join(metrics)} of {arm or 'any arm'} in layers {layers!r}"
    rows = frame[frame["metric"].isin(metrics)]
    rows = rows[rows["arm"] == arm] if arm is not None else rows
    rows = rows[rows["recipe"].isin(recipes)] if recipes is not None else rows[rows["recipe"] == rows["arm"]]
    if layers == "all":
        rows = rows[rows["layer"] == "all"]
    else:
        known = {name: name != "all" and fnmatchcase(name, layers) for name in rows["layer"].unique()}
        rows = rows[rows["layer"].map(known).astype(bool)]
    names = [(what or {}).get(pair, " ".join(pair)) for pair in zip(rows["gemm"], rows["tensor"], strict=True)]
    rows = rows.assign(what=names)
    if what is not None:
        rows = rows[rows["what"].isin(list(what.values()))]
        rows = rows.assign(what=pd.Categorical(rows["what"], list(what.values()), ordered=True))
        rows = rows.sort_values("what", kind="stable")
        rows["what"] = rows["what"].astype(str)
    if rows.empty:
        asked += f" under {', '.join(recipes)}" if recipes else ""
        raise NoProbe(
            f"no probe of {asked}; probed arms: {', '.join(frame['arm'].unique()) or 'none'}; layers: "
            f"{', '.join(layers_of(frame)) or 'none'}"
        )
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


def measured(frame: pd.DataFrame, arm: str, wanted: Iterable[str] = (), metric: str = "error") -> list[str]:
    """The recipes that were applied to the tensors of `arm`, those of `wanted` first and alone if there are any.

    Empty where the metric does not apply to any of them. Raises NoProbe for an arm that was not probed.
    """
    if arm not in set(frame["arm"]):
        probed = ", ".join(frame["arm"].unique()) or "none"
        raise NoProbe(f"arm {arm!r} was not probed in these records; probed arms: {probed}")
    there = frame[(frame["arm"] == arm) & (frame["metric"] == metric) & (frame["layer"] != "all")]["recipe"].unique()
    return [name for name in wanted if name in there] or list(there)


def layers_of(frame: pd.DataFrame) -> list[str]:
    """Full names of the layers that were probed, in the order of the model."""
    return [name for name in frame["layer"].unique() if name != "all"]


def ordered(rows: pd.DataFrame, column: str, order: Iterable[str]) -> pd.DataFrame:
    """Rows with the values of `column` in `order` (the tensors' order kept within each), others dropped."""
    place = {name: i for i, name in enumerate(order)}
    rows = rows[rows[column].isin(list(place))]
    return rows.sort_values(column, key=lambda c: c.map(place), kind="stable")


def before_and_after(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of "kurtosis" and "kurtosis_before" with a column `rotation`: none first, then each recipe's."""
    before = rows[rows["metric"] == "kurtosis_before"]
    before = before[before["recipe"] == before["recipe"].iloc[0]].assign(rotation="none")
    after = rows[rows["metric"] == "kurtosis"]
    return pd.concat([before, after.assign(rotation=after["recipe"].str.rpartition("+")[2])], ignore_index=True)


def patterns(frame: pd.DataFrame, arm: str, recipes: Iterable[str], layers: str = "*") -> pd.DataFrame:
    """Rows of the pattern metrics of PATTERNS, their meaning in the column `what`, recipes in the order given."""
    metrics = {metric for _, _, metric in PATTERNS}
    rows = select(frame, metrics, arm=arm, recipes=recipes, layers=layers)
    keys = list(zip(rows["gemm"], rows["tensor"], rows["metric"], strict=True))
    rows = rows.assign(what=[PATTERNS.get(key, "") for key in keys])
    return ordered(ordered(rows, "recipe", recipes), "what", PATTERNS.values())


def signed_means(rows: pd.DataFrame, recipes: Iterable[str]) -> pd.DataFrame:
    """recipe, what, value: the mean over layers and steps, recipes in the order given."""
    table = ordered(summary(rows, ["recipe", "what"]), "recipe", recipes)
    return table.rename(columns={"mean": "value"})[["recipe", "what", "value"]]


def patterns_of_arms(frame: pd.DataFrame, arms: Iterable[str], layers: str = "*") -> pd.DataFrame:
    """Rows of what PATTERNS compares between steps t and t + 1, each arm under its own recipe, arms in the order given."""
    rows = select(frame, {metric for _, _, metric in PATTERNS if metric != "pattern_redraw"}, layers=layers)
    keys = list(zip(rows["gemm"], rows["tensor"], rows["metric"], strict=True))
    rows = rows.assign(what=[PATTERNS.get(key, "") for key in keys])
    return ordered(ordered(rows, "arm", arms), "what", PATTERNS.values())


def by_phase(rows: pd.DataFrame, column: str) -> pd.DataFrame:
    """`column`, what, phase ("step 200"), value, low, high (over layers): rows at each step that was probed, in order."""
    table = rows.groupby([column, "what", "step", "layer"], sort=False, as_index=False)["value"].mean()
    table = table.groupby([column, "what", "step"], sort=False)["value"].agg(value="mean", low="min", high="max")
    table = table.reset_index().sort_values("step", kind="stable")
    return table.assign(phase=[f"step {step}" for step in table["step"]])


def bias_by_rule(
    frame: pd.DataFrame, arms: dict[str, tuple[str, str]], what: dict[tuple[str, str], str]
) -> pd.DataFrame:
    """rule, rounding, value: the mean `bias` of one tensor under each arm's own recipe; arms: {arm: (rule, rounding)}."""
    rows = select(frame, "bias", what=what)
    means = summary(rows[rows["arm"].isin(list(arms))], ["arm"]).set_index("arm")["mean"]
    found = [{"rule": r, "rounding": how, "value": means[arm]} for arm, (r, how) in arms.items() if arm in means.index]
    return pd.DataFrame(found, columns=["rule", "rounding", "value"])


def bias_and_noise(rows: pd.DataFrame) -> pd.DataFrame:
    """Error of products, split: recipe, what, error, systematic, random (root of the rest), bias, cosine."""
    keys = ["recipe", "what"]
    table = rows.pivot_table(index=keys, columns="metric", values="value", sort=False).reset_index()
    table["random"] = (table["error"] ** 2 - table["systematic"] ** 2).clip(lower=0) ** 0.5
    return table[[*keys, "error", "systematic", "random", "bias", "cosine"]]


def error_parts(frame: pd.DataFrame, arm: str, recipes: Iterable[str] | None = None, layers: str = "*") -> pd.DataFrame:
    """recipe, what, part, value: the mean over layers and steps of each of the ERROR_PARTS, as a share of the operand's
    squared norm; the three parts of a tensor add up to its mean squared `error`. recipes as in `select`."""
    rows = select(frame, ERROR_PARTS, arm=arm, recipes=recipes, what=OPERANDS, layers=layers)
    table = summary(rows.assign(part=rows["metric"].map(ERROR_PARTS)), ["recipe", "what", "part"])
    return table.rename(columns={"mean": "value"})[["recipe", "what", "part", "value"]]


def gradient_to_noise(
    frame: pd.DataFrame, arm: str, recipe: str | None = None, metric: str = "gradient_to_noise"
) -> pd.DataFrame:
    """step, whole (all parameters), lowest, highest (over layers), below (share of the layers under NOISE_THRESHOLD):
    means over seeds, steps in order. recipe: None is the arm's own. metric: that or "gradient_to_noise_mean"."""
    recipes = None if recipe is None else [recipe]
    whole, layers = (
        select(frame, metric, arm=arm, recipes=recipes, layers=which).groupby(by, as_index=False)["value"].mean()
        for which, by in (("all", ["step"]), ("*", ["step", "layer"]))
    )
    layers = layers.assign(under=layers["value"] < NOISE_THRESHOLD).groupby("step", as_index=False)
    table = layers.agg(lowest=("value", "min"), highest=("value", "max"), below=("under", "mean"))
    return whole.rename(columns={"value": "whole"}).merge(table, on="step").sort_values("step", ignore_index=True)


def loss_gaps_by_seed(study: Study, reference: str = "bf16") -> pd.DataFrame:
    """Seeds of `reference` down, arms across: last evaluation less the reference's, nats a token; infinite when the arm
    diverged or was ended as stalled, NaN without a record."""

    def final(record) -> float:
        return record.outcome["final_loss"] if record.outcome["status"] == "finished" else math.inf

    base = study.arms.get(reference, {})
    gaps = {
        arm: {seed: final(records[seed]) - final(base[seed]) for seed in records.keys() & base.keys()}
        for arm, records in study.arms.items()
    }
    return pd.DataFrame({arm: pd.Series(values, dtype=float) for arm, values in gaps.items() if values}).sort_index()


def loss_gaps(study: Study, reference: str = "bf16") -> pd.Series:
    """{arm: mean over its seeds of `loss_gaps_by_seed`}."""
    return loss_gaps_by_seed(study, reference).mean()


def shared_gaps(study: Study, arms: Iterable[str], reference: str = "bf16") -> tuple[pd.Series, int]:
    """{arm: loss gap} over the seeds that all of `arms` with a record have, and how many those are: the reference's own
    luck in a seed would rank arms of different seeds. Empty where they share none."""
    by_seed = loss_gaps_by_seed(study, reference)
    shared = by_seed[[arm for arm in arms if arm in by_seed]].dropna()
    return shared.mean().dropna(), len(shared)


def against_loss(
    study: Study, metric: str, *, gemm: str = "", tensor: str, layers: str = "*", reference: str = "bf16"
) -> pd.DataFrame:
    """One row for each arm with FP4: its own value of a probe metric (mean, low, high over layers) and its loss gap, over
    the `seeds` (their number) that all of these arms have.

    Sorted by the metric; arms without either are left out.
    """
    rows = select(study.probes, metric, what={(gemm, tensor): metric}, layers=layers)
    fp4 = {arm: any(op.format in FP4 for op in recipe(arm).operands().values()) for arm in rows["arm"].unique()}
    table = summary(rows[rows["arm"].map(fp4)], ["arm"])
    table = table.dropna(subset="mean")
    gaps, seeds = shared_gaps(study, table["arm"], reference)
    return table.assign(gap=table["arm"].map(gaps), seeds=seeds).dropna(subset="gap").sort_values("mean")


def whole_gradients(study: Study, arms: Iterable[str], reference: str = "bf16") -> tuple[pd.DataFrame, int]:
    """The gradient of all weights against BF16's at each step looked at, and the number of seeds of `gap`: arm,
    "error, step 200" (share of its norm), "cosine, step 200", "along, step 200" (its projection on BF16's, less 1: cosine
    times the ratio of norms), ..., gap (final loss over the reference's, nats, over the seeds that all these arms have);
    arms in the order given, those probed."""
    names = {"error": "error", "cosine": "cosine", "bias": "along"}
    rows = ordered(select(study.probes, list(names), what=WHOLE, layers="all"), "arm", arms)
    what = [f"{names[metric]}, step {step}" for metric, step in zip(rows["metric"], rows["step"], strict=True)]
    table = rows.assign(column=what).pivot_table(index="arm", columns="column", values="value", sort=False)
    gaps, seeds = shared_gaps(study, table.index, reference)
    return table.assign(gap=gaps.reindex(table.index)).reset_index(), seeds


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
