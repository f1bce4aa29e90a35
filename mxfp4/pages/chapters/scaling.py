"""What the size of the model does to the cost of MXFP4: the plan `sizes`, a study a size, read as a trend.

The sizes share source, batches, steps and seeds; width, depth and, by a stated rule, the learning rate differ
(`scales.resized`). Differences are taken within a size and a seed; across sizes only differences are compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import altair as alt
import numpy as np
import pandas as pd

from mxfp4.analysis import bootstrap, metrics, training_loss
from mxfp4.analysis.claims import effect_text
from mxfp4.analysis.effect import Effect, NoEffect, estimate, last_losses
from mxfp4.analysis.study import Study
from mxfp4.analysis.token_efficiency import DRAWS
from mxfp4.pages.chapters.probe_findings import Finding
from mxfp4.pages.charts import PALETTE
from mxfp4.pages.frames import percent_ends
from mxfp4.text import count

P1_PARAMETERS = 8e9
"""Size of the model on which P1 reports its overheads."""
APART = 1.03
"""What the places of two arms of one size differ by on the logarithmic axis of a chart."""


def size_frame(
    studies: Sequence[Study], arms: Sequence[str], *, reference: str = "fp8", at: float = metrics.AT
) -> pd.DataFrame:
    """A row for each size and arm with records: parameters, arm, and value, low, high, text of three quantities: `gap_`,
    final evaluation loss over the reference's; `training_`, last training loss over the reference's (both nats a token);
    `overhead_` (percent of the reference's tokens)."""
    rows = []
    for study in studies:
        for arm in arms:
            if not {arm, reference} <= study.arms.keys() or arm == reference:
                continue
            row = {"parameters": study.parameters, "size": count(study.parameters), "arm": arm}
            for name, factor, metric, options in (
                ("gap", 1, "loss_difference", {"against": reference}),
                ("training", 1, "training_loss_difference", {"against": reference}),
                ("overhead", 100, "overhead", {"reference": reference, "at": at}),
            ):
                e = metrics.attempt(metric, study, arm=arm, **options)
                if e is None:
                    continue
                ends = percent_ends(e, at) if name == "overhead" else _ends(e)
                row |= {name: factor * e.value, f"{name}_low": ends[0], f"{name}_high": ends[1]}
                row[f"{name}_text"] = effect_text(e, unit=False)
            rows.append(row)
    return pd.DataFrame(rows)


def _ends(e: Effect) -> tuple[float, float]:
    """Ends of a difference's interval for a chart; one that is open or unknown is 0 long."""
    return tuple(x if math.isfinite(x) else e.value for x in (e.low, e.high))


def size_chart(frame: pd.DataFrame, quantity: str, *, title: str, unit: str) -> alt.LayerChart:
    """`quantity` ("gap", "training" or "overhead") against the number of parameters, a line an arm, bars for intervals. The arms of a
    size stand side by side, APART times its parameters from each other, so that no bar hides another."""
    shown = frame[np.isfinite(frame[quantity])].rename(columns={quantity: "value"})
    shown = shown.assign(low=shown[f"{quantity}_low"], high=shown[f"{quantity}_high"], text=shown[f"{quantity}_text"])
    arms = list(dict.fromkeys(shown["arm"]))
    colours = alt.Scale(domain=arms, range=list(PALETTE[: len(arms)]))
    side = {arm: APART ** (i - (len(arms) - 1) / 2) for i, arm in enumerate(arms)}
    shown = shown.assign(x=shown["parameters"] * shown["arm"].map(side))
    base = alt.Chart(shown[["x", "size", "arm", "value", "low", "high", "text"]]).encode(
        x=alt.X("x:Q", title="non-embedding parameters", scale=alt.Scale(type="log", nice=False, padding=20),
                axis=alt.Axis(format=".3~s", values=sorted(shown["parameters"].unique().tolist()))),
        color=alt.Color("arm:N", title=None, scale=colours, sort=arms),
        tooltip=["arm:N", "size:N", alt.Tooltip("text:N", title=unit)],
    )  # fmt: skip
    y = alt.Y("value:Q", title=unit)
    bars = base.mark_rule(strokeWidth=3, opacity=0.4).encode(y=alt.Y("low:Q", title=unit), y2="high:Q")
    zero = alt.Chart(pd.DataFrame({"zero": [0]})).mark_rule(strokeDash=[3, 3]).encode(y="zero:Q")
    return alt.layer(zero, bars, base.mark_line().encode(y=y), base.mark_point(size=60).encode(y=y)).properties(
        title=title
    )


def trend(studies: Sequence[Study], arms: Sequence[str], *, reference: str = "fp8") -> Finding:
    """For each arm: how its gap to the reference changes for three times the parameters, a line through the sizes, in
    evaluation loss and in training loss."""
    sizes = [s for s in studies if reference in s.arms]
    evaluated = _slopes(sizes, arms, reference, _gaps, bootstrap.final_table)
    trained = _slopes(sizes, arms, reference, _training_gaps, training_loss.final_table)
    if not evaluated:
        return Finding("Not tested: two sizes with records of one seed are needed.", pd.DataFrame())
    low, high = (f(s.parameters for s in sizes) for f in (min, max))
    text = f"From {count(low)} to {count(high)} parameters {_told(evaluated)}."
    if trained:
        text += (
            f" In training loss, on batches that all arms share, {_told(trained)}. Where the two disagree, the evaluation loss "
            "also counts how much an arm memorises of text that it sees several times, and a larger model memorises more."
        )
    text += (
        f" P1's model is {P1_PARAMETERS / high:,.0f} times larger than the largest here, so a line through these sizes says "
        "nothing sure of it."
    )
    numbers = [
        {
            "arm": arm, "slope": effect_text(e, unit=False), "sizes": len(seeds), "seeds of each": ", ".join(map(str, seeds)),
            "training slope": effect_text(trained[arm][0], unit=False) if arm in trained else "–",
        }
        for arm, (e, seeds) in evaluated.items()
    ]  # fmt: skip
    return Finding(text, pd.DataFrame(numbers))


def _slopes(
    sizes: Sequence[Study], arms: Sequence[str], reference: str, gaps: Callable, table: Callable
) -> dict[str, tuple[Effect, list[int]]]:
    """{arm: (slope, seeds of each size)} of the arms with gaps in two sizes or more."""
    found = {}
    for arm in arms:
        points = [(s, g) for s in sizes if arm in s.arms and (g := gaps(s, arm, reference))]
        if len(points) > 1:
            studies, values = zip(*points, strict=True)
            found[arm] = slope(studies, values, arm, reference, table), [len(g) for g in values]
    return found


def _told(slopes: dict[str, tuple[Effect, list[int]]]) -> str:
    said = []
    for arm, (e, _) in slopes.items():
        told = "grows" if e.low > 0 else "shrinks" if e.high < 0 else "is not shown to grow or to shrink"
        said.append(f"the gap of {arm} {told} with size ({effect_text(e)} for three times the parameters)")
    return "; ".join(said)


def slope(
    sizes: Sequence[Study],
    gaps: Sequence[dict[int, float]],
    arm: str,
    reference: str,
    table: Callable[[Study, Sequence[int]], pd.DataFrame] = bootstrap.final_table,
) -> Effect:
    """Nats for three times the parameters: least squares through the mean gap of each size, over the seeds that it has.

    A seed draws other initial weights in another size, so each size has noise of its own, made of its scatter (see
    `bootstrap`) in `table`, [arm, seed] losses. Where runs stop at a target, or a size has one seed, the interval is
    that of a slope a seed.
    """
    x = np.array([math.log(s.parameters, 3) for s in sizes])
    weights = (x - x.mean()) / ((x - x.mean()) ** 2).sum()
    value = float(weights @ [np.mean(list(g.values())) for g in gaps])
    shared = set.intersection(*map(set, gaps))
    effect = Effect(value, math.nan, math.nan, "nats", tuple(sorted(set.union(*map(set, gaps)))))
    if any(s.config.stop_at_target or len(g) < 2 for s, g in zip(sizes, gaps, strict=True)):
        return (
            estimate({k: float((weights @ [g[k] for g in gaps]).round(9)) for k in shared}, "nats")
            if shared
            else effect
        )
    samples = np.full(DRAWS, value)
    for i, (study, gap, weight) in enumerate(zip(sizes, gaps, weights, strict=True)):
        ours, theirs = bootstrap.run_noise(table(study, sorted(gap)), [arm, reference], stream=i)
        samples += weight * (ours - theirs)
    low, high = bootstrap.interval(samples)
    return replace(effect, low=low, high=high)


def _gaps(study: Study, arm: str, reference: str) -> dict[int, float]:
    a, b = (last_losses(study, (arm, reference))[name] for name in (arm, reference))
    return {s: a[s] - b[s] for s in a.keys() & b.keys() if math.isfinite(a[s] - b[s])}


def _training_gaps(study: Study, arm: str, reference: str) -> dict[int, float]:
    try:
        a, b = (training_loss.last_training_losses(study, name) for name in (arm, reference))
    except NoEffect:
        return {}
    return {s: a[s] - b[s] for s in a.keys() & b.keys() if math.isfinite(a[s] - b[s])}
