"""Charts of the chapters on stability and transposition, from the rows that `probe_tables.select` gives.

Bars are means over layers and steps, points are layers. Facets have fixed widths that fit a page.
"""

from __future__ import annotations

import altair as alt
import pandas as pd

from mxfp4.pages import probe_tables
from mxfp4.pages.charts import CUT, DIVERGING, PALETTE, cut

TOTAL = 600
"""Pixels that the facets of a row share."""
DASHES = ([1, 0], [6, 3], [2, 2], [8, 3, 2, 3])
"""Of the blocks of a model: pixels drawn and left out."""


def by_layer(
    rows: pd.DataFrame,
    *,
    x: str,
    title: str,
    unit: str,
    facet: str | None = None,
    x_title: str = "",
    form: str = "%",
    log: bool = False,
    zero_line: bool = False,
    columns: int = 3,
    height: int = 220,
) -> alt.TopLevelMixin:
    """A point for each layer and a tick at their mean, for each value of column `x`; small multiples by `facet`.

    form: how values are printed (d3-format); log: a logarithmic axis.
    """
    keys = [x] + ([facet] if facet else [])
    layers = probe_tables.by_layer(rows, keys)
    layers["mean"] = layers.groupby(keys, sort=False)["value"].transform("mean")
    order, facets = list(layers[x].unique()), list(layers[facet].unique()) if facet else []
    base = alt.Chart(layers).encode(
        x=alt.X(
            f"{x}:N",
            sort=order,
            title=x_title or None,
            axis=_names(0 if len(order) <= 3 else -35 if len(order) <= 5 else -55),
        ),
        color=alt.Color(f"{x}:N", sort=order, legend=None),
    )
    scale = alt.Scale(type="log") if log else alt.Scale()
    y = alt.Y("value:Q", title=unit, axis=alt.Axis(format=form, tickCount=5), scale=scale)
    tip = [alt.Tooltip("layer:N"), alt.Tooltip(f"{x}:N"), alt.Tooltip("value:Q", format=".4g", title=unit)]
    points = base.mark_circle(size=45, opacity=0.45).encode(y=y, tooltip=tip)
    ticks = base.mark_tick(thickness=3, size=22 if len(order) <= 5 else 11).encode(
        y=alt.Y("mean:Q", title=unit),
        tooltip=[alt.Tooltip(f"{x}:N"), alt.Tooltip("mean:Q", format=".4g", title=f"mean of {unit}")],
    )
    layered = [points, ticks]
    if zero_line:
        layered.insert(0, alt.Chart(layers).mark_rule(strokeDash=[4, 3]).encode(y=alt.datum(0)))
    chart = alt.layer(*layered)
    if not facet:
        return chart.properties(title=title, height=height)
    shown = min(columns, max(len(facets), 1))
    chart = chart.properties(width=TOTAL // shown - 55, height=height)
    chart = chart.facet(facet=alt.Facet(f"{facet}:N", sort=facets, title=None), columns=shown)
    return chart.properties(title=title)


def phase_lines(
    rows: pd.DataFrame, *, colour: str, title: str, unit: str, form: str = "%", columns: int = 3, spread: bool = False
) -> alt.TopLevelMixin:
    """A line for each value of column `colour` from one probed step to the next, small multiples by `what`.

    Layers are more than there are colours: there the colour is the kind of layer and the dashes are the block.
    spread: bars for the range over layers.
    """
    table = probe_tables.by_phase(rows, colour)
    tips, dashes = [f"{colour}:N"], {}
    if colour == "layer":
        table[["block", "kind"]] = table["layer"].str.extract(r"^(layers\.\d+|)\.?(.*)$")
        blocks = list(table["block"].unique())
        dash = alt.Scale(domain=blocks, range=[DASHES[i % len(DASHES)] for i in range(len(blocks))])
        dashes, colour = {"strokeDash": alt.StrokeDash("block:N", title=None, scale=dash), "detail": "layer:N"}, "kind"
    facets, order, phases = (list(table[name].unique()) for name in ("what", colour, "phase"))
    facets = [name for name in rows["what"].unique() if name in facets]
    base = alt.Chart(table).encode(
        x=alt.X("phase:N", sort=phases, title=None, axis=_names(0), scale=alt.Scale(padding=0.5)),
        color=alt.Color(f"{colour}:N", sort=order, title=None, legend=alt.Legend(columns=3)),
        tooltip=[*tips, "phase:N", *(alt.Tooltip(f"{n}:Q", format=".4g") for n in ("value", "low", "high"))],
    )
    y = alt.Y("value:Q", title=unit, axis=alt.Axis(format=form, tickCount=5))
    layered = [base.mark_line().encode(y=y, **dashes), base.mark_point(size=30, filled=True, opacity=1).encode(y=y)]
    if spread:
        layered.append(base.mark_rule(opacity=0.35, strokeWidth=2).encode(y="low:Q", y2="high:Q"))
    shown = min(columns, len(facets))
    chart = alt.layer(*layered).properties(width=TOTAL // shown - 55, height=170)
    return chart.facet(facet=alt.Facet("what:N", sort=facets, title=None), columns=shown).properties(title=title)


def layer_heat(rows: pd.DataFrame, *, title: str, unit: str, form: str = ".1%") -> alt.Chart:
    """A cell for each layer (down) and tensor (across), coloured by the mean over steps."""
    cells = probe_tables.by_layer(rows, ["what"])
    order, layers = list(cells["what"].unique()), list(cells["layer"].unique())
    base = alt.Chart(cells).encode(
        x=alt.X("what:N", sort=order, title=None, axis=_names(-25)),
        y=alt.Y("layer:N", sort=layers, title="layer"),
    )
    colour = alt.Color("value:Q", title=unit, legend=alt.Legend(format=form, gradientLength=180))
    heat = base.mark_rect().encode(
        color=colour, tooltip=["layer:N", "what:N", alt.Tooltip("value:Q", format=".4g", title=unit)]
    )
    middle = (cells["value"].min() + cells["value"].max()) / 2
    ink = alt.condition(alt.datum.value > middle, alt.value("#111"), alt.value("#fff"))
    text = base.mark_text(fontSize=11).encode(text=alt.Text("value:Q", format=form), color=ink)
    return alt.layer(heat, text).properties(title=title, height=26 * len(layers))


def error_parts(table: pd.DataFrame, *, title: str) -> alt.TopLevelMixin:
    """The systematic and the random part of the error of products, from `probe_tables.bias_and_noise`, side by side."""
    long = table.melt(["recipe", "what"], ["systematic", "random"], "part", "size")
    recipes, facets = list(table["recipe"].unique()), list(table["what"].unique())
    chart = (
        alt.Chart(long)
        .mark_bar()
        .encode(
            x=alt.X("recipe:N", sort=recipes, title=None, axis=_names(-35)),
            xOffset=alt.XOffset("part:N", sort=["systematic", "random"]),
            y=alt.Y("size:Q", title="part of the error, share of the exact product", axis=alt.Axis(format="%")),
            color=alt.Color(
                "part:N", sort=["systematic", "random"], title=None, scale=alt.Scale(range=list(PALETTE[:2]))
            ),
            tooltip=["recipe:N", "what:N", "part:N", alt.Tooltip("size:Q", format=".3%")],
        )
    )
    chart = chart.properties(width=TOTAL // 3 - 45, height=200)
    return chart.facet(facet=alt.Facet("what:N", sort=facets, title=None), columns=3).properties(title=title)


def paired(
    rows: pd.DataFrame, *, metrics: dict[str, str], x: str, title: str, unit: str, x_title: str = "", form: str = "%"
) -> alt.TopLevelMixin:
    """Bars of several metrics beside each other, for each value of column `x`, in small multiples by `what`.

    metrics: {metric: name in the legend}.
    """
    table = probe_tables.summary(rows, ["what", x, "metric"])
    table["part"] = table["metric"].map(metrics)
    table = table.dropna(subset=["part", "mean"])
    names, order, facets = list(metrics.values()), list(table[x].unique()), list(table["what"].unique())
    chart = (
        alt.Chart(table)
        .mark_bar()
        .encode(
            x=alt.X(f"{x}:N", sort=order, title=x_title or None, axis=_names(-35)),
            xOffset=alt.XOffset("part:N", sort=names),
            y=alt.Y("mean:Q", title=unit, axis=alt.Axis(format=form)),
            color=alt.Color("part:N", sort=names, title=None, scale=alt.Scale(range=list(PALETTE[: len(names)]))),
            tooltip=[f"{x}:N", "what:N", "part:N", alt.Tooltip("mean:Q", format=".4g", title=unit)],
        )
    )
    chart = chart.properties(width=TOTAL // max(len(facets), 1) - 45, height=210)
    return chart.facet(facet=alt.Facet("what:N", sort=facets, title=None), columns=3).properties(title=title)


def maxima(rows: pd.DataFrame, *, title: str) -> alt.TopLevelMixin:
    """Range of log2 of the block maxima (5 to 95 percent of the blocks, point at the median) by layer and tensor."""
    wide = rows.groupby(["what", "layer", "metric"], sort=False)["value"].mean().unstack("metric").reset_index()
    layers, facets = list(wide["layer"].unique()), list(wide["what"].unique())
    base = alt.Chart(wide).encode(y=alt.Y("layer:N", sort=layers, title=None))
    span = alt.X("log2_amax_q05:Q", title="log2 of block maximum", scale=alt.Scale(zero=False))
    tips = ["layer:N", *(alt.Tooltip(f"log2_amax_{q}:Q", format=".2f") for q in ("q05", "q50", "q95"))]
    bars = base.mark_bar(height=6, opacity=0.5).encode(x=span, x2="log2_amax_q95:Q", tooltip=tips)
    dots = base.mark_circle(size=60).encode(x="log2_amax_q50:Q", tooltip=tips)
    chart = alt.layer(bars, dots).properties(width=TOTAL // 3 - 75, height=24 * len(layers))
    chart = chart.facet(facet=alt.Facet("what:N", sort=facets, title=None), columns=3)
    return chart.resolve_scale(x="independent").properties(title=title)


def against_loss(table: pd.DataFrame, *, x_title: str, title: str, form: str = ".2f") -> alt.TopLevelMixin:
    """Arms down, sorted by a probe metric (left; line: range over layers), their loss gaps beside it (right).

    A gap many times the others' has a bar cut short, with its size written into it.
    """
    finite = table[table["gap"].abs() < float("inf")]
    end = cut(finite["gap"])
    finite = finite.assign(
        drawn=finite["gap"].clip(-end, end), label=[f"{g:.2f}" if abs(g) > end else "" for g in finite["gap"]]
    )
    order, height = list(finite["arm"]), 24 * len(finite)
    tips = ["arm:N", alt.Tooltip("mean:Q", format=".4g", title=x_title), alt.Tooltip("gap:Q", format=".4f")]
    x = alt.X("mean:Q", title=x_title, axis=alt.Axis(format=form, tickCount=4), scale=alt.Scale(zero=False))
    base = alt.Chart(finite).encode(y=alt.Y("arm:N", sort=order, title=None, axis=_names(0)))
    spans = base.mark_rule(strokeWidth=3, opacity=0.35, color=PALETTE[0]).encode(x="low:Q", x2="high:Q")
    dots = base.mark_circle(size=80, opacity=1, color=PALETTE[0]).encode(x=x, tooltip=tips)
    right = alt.Chart(finite).encode(
        y=alt.Y("arm:N", sort=order, title=None, axis=None),
        x=alt.X("drawn:Q", title="final loss above bf16, nats a token", axis=alt.Axis(tickCount=4)),
        tooltip=tips,
    )
    cut_short = right.mark_text(align="right", dx=-6, color="white", fontWeight="bold").encode(text="label:N")
    gaps = alt.layer(right.mark_bar(color=PALETTE[1]), cut_short)
    left = alt.layer(spans, dots).properties(width=240, height=height)
    heading = alt.TitleParams(title, subtitle=CUT) if end < float("inf") else title
    return alt.hconcat(left, gaps.properties(width=200, height=height), spacing=12).properties(title=heading)


def tile(scales: pd.DataFrame, *, title: str) -> alt.TopLevelMixin:
    """The scales of a 64x64 weight tile as three pictures: blocks along rows, along columns, square."""
    side = 3 * 64  # whole pixels for each value: no seams
    names = list(scales["blocks"].unique())
    axis = alt.Axis(values=[0, 32, 64], grid=False)
    chart = (
        alt.Chart(scales)
        .mark_rect()
        .encode(
            x=alt.X("left:Q", title="input feature", scale=alt.Scale(domain=[0, 64], nice=False), axis=axis),
            x2="right:Q",
            y=alt.Y("top:Q", title="output feature", scale=alt.Scale(domain=[64, 0], nice=False), axis=axis),
            y2="bottom:Q",
            color=alt.Color("log2_scale:O", title="log2 of the scale", scale=alt.Scale(scheme="viridis")),
            tooltip=["blocks:N", "top:Q", "left:Q", alt.Tooltip("log2_scale:Q")],
        )
    )
    chart = chart.properties(width=side, height=side)
    return chart.facet(facet=alt.Facet("blocks:N", sort=names, title=None), columns=3).properties(title=title)


def arm_bars(rows: pd.DataFrame, *, title: str, unit: str, complement: bool = False) -> alt.Chart:
    """One horizontal bar an arm, at the mean over steps; `complement` draws 1 - value."""
    table = probe_tables.summary(rows, ["arm"])
    table["mean"] = 1 - table["mean"] if complement else table["mean"]
    chart = (
        alt.Chart(table)
        .mark_bar()
        .encode(
            y=alt.Y("arm:N", sort=list(table["arm"]), title=None),
            x=alt.X("mean:Q", title=unit),
            tooltip=["arm:N", alt.Tooltip("mean:Q", format=".4g", title=unit)],
        )
    )
    return chart.properties(title=title, height=22 * len(table))


def signed_heat(
    table: pd.DataFrame, *, x: str, y: str, value: str, title: str, unit: str, form: str = "+.1%"
) -> alt.Chart:
    """Signed shares as a heat map with zero in the middle of the colours: columns `x` and `y` name the cells."""
    bound = float(table[value].abs().max()) or 1.0
    base = alt.Chart(table).encode(
        x=alt.X(f"{x}:N", sort=list(table[x].unique()), title=None, axis=_names(-25)),
        y=alt.Y(f"{y}:N", sort=list(table[y].unique()), title=None),
    )
    scale = alt.Scale(scheme=DIVERGING, domain=[-bound, bound], domainMid=0)
    heat = base.mark_rect().encode(
        color=alt.Color(f"{value}:Q", title=unit, scale=scale, legend=alt.Legend(format=".1%", gradientLength=180)),
        tooltip=[f"{x}:N", f"{y}:N", alt.Tooltip(f"{value}:Q", format=".3%", title=unit)],
    )
    strong = alt.condition(f"abs(datum['{value}']) > {0.6 * bound}", alt.value("#fff"), alt.value("#111"))
    text = base.mark_text(fontSize=11).encode(text=alt.Text(f"{value}:Q", format=form), color=strong)
    return alt.layer(heat, text).properties(title=title, height=30 * table[y].nunique())


def _names(angle: int) -> alt.Axis:
    """An axis of names, all of them printed."""
    return alt.Axis(labelAngle=angle, labelOverlap=False, labelLimit=220)
