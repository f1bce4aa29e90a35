"""The charts of the evidence chapters: Altair specifications over the frames of `frames` and `published`.

Click a name in a legend to see that arm alone, shift-click for several.
"""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt
import pandas as pd

from mxfp4.pages.charts import CUT, PALETTE, cut


def _scale(arms: Sequence[str]) -> alt.Scale:
    return alt.Scale(domain=list(arms), range=[PALETTE[i % len(PALETTE)] for i in range(len(arms))])


def _arm_scale(arms: Sequence[str]) -> alt.Scale:
    """As `_scale`, but FP8 is grey: the other arms of a page keep their colours where it is the reference and not drawn."""
    others = [c for c in PALETTE if c != PALETTE[6]] if "fp8" in arms else PALETTE
    rest = iter(others[i % len(others)] for i in range(len(arms)))
    return alt.Scale(domain=list(arms), range=[PALETTE[6] if arm == "fp8" else next(rest) for arm in arms])


def _tokens(frame: pd.DataFrame) -> tuple[float, str]:
    size = frame["tokens"].max()
    return next(
        (u, f"tokens, {n}")
        for u, n in ((1e9, "billions"), (1e6, "millions"), (1e3, "thousands"))
        if size >= u or u == 1e3
    )


def learning_curves(frame: pd.DataFrame, *, y: str, title: str, y_title: str, subtitle: str = "") -> alt.LayerChart:
    """Mean curve of each arm with its band over seeds. frame: arm, tokens, `y`, low, high."""
    unit, x_title = _tokens(frame)
    arms = list(dict.fromkeys(frame["arm"]))
    chosen = alt.selection_point(fields=["arm"], bind="legend")
    x = alt.X("x:Q", title=x_title, scale=alt.Scale(zero=False, nice=False))
    colour = alt.Color("arm:N", title=None, scale=_arm_scale(arms), sort=arms, legend=alt.Legend(symbolOpacity=1))
    base = alt.Chart(frame.assign(x=frame["tokens"] / unit)).encode(x=x, color=colour)
    band = base.mark_area().encode(
        y=alt.Y("low:Q", title=y_title, scale=alt.Scale(zero=False)), y2="high:Q",
        opacity=alt.condition(chosen, alt.value(0.18), alt.value(0.0)),
    )  # fmt: skip
    line = base.mark_line(point=alt.OverlayMarkDef(size=22)).encode(
        y=alt.Y(f"{y}:Q", title=y_title, scale=alt.Scale(zero=False)),
        opacity=alt.condition(chosen, alt.value(1.0), alt.value(0.08)),
        tooltip=[
            alt.Tooltip("arm:N"), alt.Tooltip("x:Q", title=x_title, format=".4g"),
            alt.Tooltip(f"{y}:Q", title=y_title, format=".4f"), alt.Tooltip("low:Q", format=".4f"),
            alt.Tooltip("high:Q", format=".4f"),
        ],
    )  # fmt: skip
    heading = alt.TitleParams(title, subtitle=subtitle) if subtitle else title
    return alt.layer(band, line).add_params(chosen).properties(title=heading)


def overheads(frame: pd.DataFrame, *, title: str, subtitle: str) -> alt.LayerChart:
    """P1's Table 1 and ours: a bar over each interval, a point at its middle. frame:
    `frames.overhead_points`."""
    order = list(dict.fromkeys(frame["label"]))
    finite = frame[frame["reached"]]
    bounds = frame[~frame["reached"]].copy()
    edge = max(30.0, float(frame["high"].max(skipna=True)) * 1.05)
    bounds["text"] = ["never" if r.whose == "P1" else f"more than {r.low:.0f} %" for r in bounds.itertuples()]
    bounds["at"] = edge
    y = alt.Y("label:N", sort=order, title=None, axis=alt.Axis(labelLimit=160))
    offset = alt.YOffset("whose:N", sort=["P1", "ours"])
    colour = alt.Color("whose:N", title=None, scale=alt.Scale(domain=["P1", "ours"], range=[PALETTE[6], PALETTE[0]]))
    axis = alt.X("low:Q", title="token overhead over FP8, percent")
    rule = (
        alt.Chart(finite)
        .mark_rule(strokeWidth=5, opacity=0.45)
        .encode(x=axis, x2="high:Q", y=y, yOffset=offset, color=colour)
    )
    point = alt.Chart(finite).mark_point().encode(
        x="value:Q", y=y, yOffset=offset, color=colour,
        tooltip=["label", "whose", alt.Tooltip("value:Q", format=".1f"), alt.Tooltip("low:Q", format=".1f"),
                 alt.Tooltip("high:Q", format=".1f")],
    )  # fmt: skip
    layers = [
        alt.Chart(pd.DataFrame({"zero": [0]})).mark_rule(strokeDash=[3, 3]).encode(x="zero:Q"),
        rule,
        point,
    ]
    if len(bounds):
        layers.append(
            alt.Chart(bounds).mark_text(align="right", fontStyle="italic").encode(
                x="at:Q", y=y, yOffset=offset, text="text:N", color=colour
            )
        )  # fmt: skip
    return alt.layer(*layers).properties(title=alt.TitleParams(title, subtitle=subtitle), height=alt.Step(26))


def rule_by_rounding(
    frame: pd.DataFrame, *, title: str, rules: Sequence[str], roundings: Sequence[str], reference: str
):
    """Loss over the reference for each scale rule and rounding. frame: `frames.disagreement_frame`."""
    y = alt.Y("rule:N", sort=list(rules), title="scale rule")
    offset = alt.YOffset("rounding:N", sort=list(roundings))
    colour = alt.Color("rounding:N", title=None, scale=_scale(roundings), sort=list(roundings))
    axis = alt.X("low:Q", title=f"final loss over {reference.upper()}, nats a token", scale=alt.Scale(zero=False))
    finite = frame[frame["difference"].abs() < float("inf")]
    rule = (
        alt.Chart(finite)
        .mark_rule(strokeWidth=4, opacity=0.4)
        .encode(x=axis, x2="high:Q", y=y, yOffset=offset, color=colour)
    )
    point = (
        alt.Chart(finite)
        .mark_point(size=70)
        .encode(x="difference:Q", y=y, yOffset=offset, color=colour, tooltip=["arm", "text", "seeds", "outcome"])
    )
    return alt.layer(rule, point).properties(title=title, height=alt.Step(22))


def _cut(frame: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Finite differences of `frame` in two parts: those to draw as points with their whole intervals, and those far
    beyond the rest, at the edge with a `label`."""
    finite = frame[frame["difference"].abs() < float("inf")]
    far = finite["difference"].abs() > cut(finite["difference"])
    end = finite[~far][["difference", "low", "high"]].abs().max(axis=None)
    labels = [f"{d:.2f} \u25b6" if d > 0 else f"\u25c0 {d:.2f}" for d in finite["difference"]]
    spans = ["difference", "low", "high"]
    finite = finite.assign(label=labels, **{name: finite[name].clip(-end, end) for name in spans})
    return finite[~far], finite[far]


def _points(frame: pd.DataFrame, unit: str, tips: Sequence[str], **encoding) -> alt.LayerChart:
    """A point at each difference with a bar over its interval; where a bar is cut, its size."""
    near, far = _cut(frame)
    x = alt.X("low:Q", title=unit, scale=alt.Scale(zero=False))
    bars = alt.Chart(near).mark_rule(strokeWidth=5, opacity=0.4).encode(x=x, x2="high:Q", **encoding)
    points = alt.Chart(near).mark_point(size=70).encode(x="difference:Q", tooltip=tips, **encoding)
    if far.empty:
        return alt.layer(bars, points)
    sizes = alt.Chart(far).mark_text(align="right", fontWeight="bold")
    return alt.layer(bars, points, sizes.encode(x="difference:Q", text="label:N", tooltip=tips, **encoding))


def _heading(title: str, frame: pd.DataFrame, subtitle: str = "") -> alt.TitleParams | str:
    lines = [line for line in (subtitle, "" if _cut(frame)[1].empty else CUT) if line]
    return alt.TitleParams(title, subtitle=lines) if lines else title


def gaps(frame: pd.DataFrame, *, title: str, unit: str, subtitle: str = "") -> alt.LayerChart:
    """A point an arm with a bar over its interval. frame: `frames.gap_frame`; arms that diverged have no place on it."""
    y = alt.Y("arm:N", sort=list(frame["arm"]), title=None, axis=alt.Axis(labelLimit=200))
    chart = _points(frame, unit, ["arm", "text", "seeds", "outcome"], y=y)
    return chart.properties(title=_heading(title, frame, subtitle), height=alt.Step(24))


def gaps_by(frame: pd.DataFrame, column: str, *, title: str, unit: str) -> alt.LayerChart:
    """As `gaps`, with a colour and a place of its own for each value of `column`."""
    groups = list(dict.fromkeys(frame[column]))
    chart = _points(
        frame, unit, ["arm", column, "text", "seeds", "outcome"],
        y=alt.Y("arm:N", sort=list(dict.fromkeys(frame["arm"])), title=None, axis=alt.Axis(labelLimit=200)),
        yOffset=alt.YOffset(f"{column}:N", sort=groups),
        color=alt.Color(f"{column}:N", title=None, scale=_scale(groups), sort=groups),
    )  # fmt: skip
    return chart.properties(title=_heading(title, frame), height=alt.Step(20))


def overhead_by_target(frame: pd.DataFrame, *, title: str, reference: str) -> alt.LayerChart:
    """Token overhead against where on the reference's curve the target lies. frame: `frames.target_frame`."""
    arms = list(dict.fromkeys(frame["arm"]))
    base = alt.Chart(frame).encode(
        x=alt.X(
            "at:Q", title=f"target: loss of {reference} at this percentage of its budget", scale=alt.Scale(zero=False)
        ),
        color=alt.Color("arm:N", title=None, scale=_arm_scale(arms), sort=arms, legend=alt.Legend(symbolOpacity=1)),
    )
    y = alt.Y("overhead:Q", title="token overhead, percent")
    tips = ["arm", "at", *(alt.Tooltip(f"{name}:Q", format="+.1f") for name in ("overhead", "low", "high"))]
    band = base.mark_area(opacity=0.15).encode(y=alt.Y("low:Q", title="token overhead, percent"), y2="high:Q")
    zero = alt.Chart(pd.DataFrame({"zero": [0]})).mark_rule(strokeDash=[3, 3]).encode(y="zero:Q")
    return alt.layer(zero, band, base.mark_line(point=True).encode(y=y, tooltip=tips)).properties(title=title)


def sr_bias(frame: pd.DataFrame, *, title: str, rules: Sequence[str]) -> alt.LayerChart:
    """Mean of a stochastically rounded block maximum against the maximum. frame: rule, amax, bias
    (percent)."""
    chosen = alt.selection_point(fields=["rule"], bind="legend")
    zero = alt.Chart(pd.DataFrame({"zero": [0]})).mark_rule(strokeDash=[3, 3]).encode(y="zero:Q")
    line = alt.Chart(frame).mark_line().encode(
        x=alt.X("amax:Q", title="block maximum, within one binade", scale=alt.Scale(zero=False, nice=False)),
        y=alt.Y("bias:Q", title="bias of the rounded maximum, percent"),
        color=alt.Color("rule:N", title=None, scale=_scale(rules), sort=list(rules)),
        strokeDash=alt.StrokeDash("rule:N", legend=None, sort=list(rules)),
        opacity=alt.condition(chosen, alt.value(1.0), alt.value(0.08)),
        tooltip=["rule", alt.Tooltip("amax:Q", format=".3f"), alt.Tooltip("bias:Q", format="+.2f")],
    ).add_params(chosen)  # fmt: skip
    return alt.layer(zero, line).properties(title=title)


def mlperf(frame: pd.DataFrame, target: float, crossings: dict[str, float], *, title: str, after: float = 0.0):
    """The two public curves, the target, and where each curve crosses it. frame: arm, samples, eval_loss."""
    arms = list(dict.fromkeys(frame["arm"]))
    shown = frame[frame["samples"] >= after].assign(x=frame["samples"] / 1000)
    chosen = alt.selection_point(fields=["arm"], bind="legend")
    colour = alt.Color("arm:N", title=None, scale=_scale(arms), sort=arms)
    x = alt.X("x:Q", title="training sequences, thousands", scale=alt.Scale(zero=False))
    y = alt.Y("eval_loss:Q", title="validation log-perplexity, nats a token", scale=alt.Scale(zero=False))
    line = alt.Chart(shown).mark_line(point=True).encode(
        x=x, y=y, color=colour, opacity=alt.condition(chosen, alt.value(1.0), alt.value(0.1)),
        tooltip=["arm", alt.Tooltip("x:Q", title="thousand sequences", format=".1f"),
                 alt.Tooltip("eval_loss:Q", title="nats a token", format=".3f"),
                 alt.Tooltip("perplexity:Q", title="perplexity", format=".1f")],
    ).transform_calculate(perplexity="exp(datum.eval_loss)").add_params(chosen)  # fmt: skip
    goal = alt.Chart(pd.DataFrame({"goal": [target]})).mark_rule(strokeDash=[4, 4]).encode(y="goal:Q")
    marks = pd.DataFrame({"arm": list(crossings), "x": [c / 1000 for c in crossings.values()], "eval_loss": target})
    cross = alt.Chart(marks).mark_point(shape="diamond", size=140, filled=False, strokeWidth=2).encode(
        x="x:Q", y="eval_loss:Q", color=colour,
        tooltip=["arm", alt.Tooltip("x:Q", title="crossing, thousand sequences", format=".1f")],
    )  # fmt: skip
    return alt.layer(goal, line, cross).properties(title=title)
