"""Charts of costs: forest plots, the matrix of forwards, curves over tokens."""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt
import pandas as pd

from mxfp4.pages.charts import PALETTE, say, show
from mxfp4.pages.registered.study_report import FORWARDS

EQUIVALENCE = 0.02
"""Nats: differences inside this band count as none."""


def forest(costs: pd.DataFrame, *, title: str, reference: str = "bf16", subtitle: str = "") -> alt.LayerChart:
    """A chart of `StudyReport.costs`: one row an arm, the cheapest first, a point and an interval for each forward."""
    data = costs[costs["cost"].abs() < float("inf")]
    forwards = list(FORWARDS.values())
    y = alt.Y("arm:N", sort=_own(data)["arm"].tolist(), title=None, axis=alt.Axis(labelLimit=220))
    x_title = f"loss over {reference}, nats a token"
    colours = alt.Scale(domain=forwards, range=list(PALETTE[:2]))
    base = alt.Chart(data).encode(
        y=y, yOffset=alt.YOffset("forward:N", sort=forwards), color=alt.Color("forward:N", title=None, scale=colours)
    )
    numbers = [alt.Tooltip(f"{name}:Q", format="+.4f") for name in ("cost", "low", "high")]
    shapes = alt.Scale(domain=forwards, range=["circle", "diamond"])
    point = base.mark_point(size=60).encode(
        x=alt.X("cost:Q", title=x_title),
        shape=alt.Shape("forward:N", title=None, scale=shapes),
        tooltip=["arm:N", "forward:N", *numbers, "seeds:Q", "failed:Q"],
    )
    interval = base.transform_filter("isValid(datum.low)").mark_rule(strokeWidth=3, opacity=0.5)
    interval = interval.encode(x=alt.X("low:Q", title=x_title), x2="high:Q")
    edges = pd.DataFrame({"low": [-EQUIVALENCE], "high": [EQUIVALENCE], "zero": [0.0]})
    band = alt.Chart(edges).mark_rect(opacity=0.12, color=PALETTE[6]).encode(x="low:Q", x2="high:Q")
    zero = alt.Chart(edges).mark_rule(strokeWidth=1.2).encode(x="zero:Q")
    heading = alt.TitleParams(title, subtitle=subtitle) if subtitle else title
    return alt.layer(band, zero, interval, point).properties(title=heading, height=alt.Step(15))


def _own(costs: pd.DataFrame) -> pd.DataFrame:
    """Finite costs in the arms' own forwards, the cheapest first."""
    return costs[(costs["forward"] == FORWARDS["own"]) & costs["cost"].abs().lt(float("inf"))].sort_values("cost")


def forest_caption(costs: pd.DataFrame, reference: str = "bf16") -> str:
    """What to see: the cheapest and the most costly arm, how intervals were made, failed seeds."""
    own = _own(costs)
    if own.empty:
        return f"No arm shares a seed with {reference} yet."
    first, last = own.iloc[0], own.iloc[-1]
    text = f"{first['arm']} costs {signed(first['cost'])} nats over {reference}"
    if len(own) > 1:
        text += f", {last['arm']} costs {signed(last['cost'])}"
    text += ". Bars are 95 % intervals over seeds"
    single = int((own["seeds"] < 2).sum())
    text += f"; {single} of {len(own)} arms have one seed and no interval." if single else "."
    failed = costs[(costs["forward"] == FORWARDS["own"]) & (costs["failed"] > 0)]
    if len(failed):
        text += f" Runs that diverged or stalled: {', '.join(f'{r.arm} ({r.failed})' for r in failed.itertuples())}."
    return text


def signed(value: float) -> str:
    """With its sign, a true minus, and three digits."""
    return f"{value:+.3f}".replace("-", "\N{MINUS SIGN}")


def show_costs(costs: pd.DataFrame, *, title: str, reference: str = "bf16", subtitle: str = "") -> None:
    """Display `forest` with its caption, or say that there is nothing to draw."""
    caption = forest_caption(costs, reference)
    if _own(costs).empty:
        say(caption)
    else:
        show(forest(costs, title=title, reference=reference, subtitle=subtitle), caption=caption)


def show_matrix(matrix: pd.DataFrame, *, title: str, caption: str) -> None:
    """Display `matrix_chart`, or say that there is nothing to draw."""
    if matrix.empty:
        say("No run that was judged in several forwards is recorded yet.")
    else:
        show(matrix_chart(matrix, title=title), caption=caption)


def show_curves(curves: pd.DataFrame, *, title: str, order: Sequence[str], caption: str) -> None:
    """Display `curves_chart`, or say that there is nothing to draw."""
    if curves.empty:
        say(f"No run of {', '.join(order)} is recorded yet.")
    else:
        show(curves_chart(curves, title=title, order=order), caption=caption)


def matrix_chart(matrix: pd.DataFrame, *, title: str) -> alt.LayerChart:
    """Trained in (rows), evaluated in (columns): the loss over BF16 trained and evaluated in BF16, as a heat map."""
    data = matrix.assign(forward=matrix["forward"].replace("own", "its own"), text=matrix["cost"].map(signed))
    columns, arms = list(dict.fromkeys(data["forward"])), list(dict.fromkeys(data["arm"]))
    x = alt.X("forward:N", sort=columns, title="evaluated in", axis=alt.Axis(labelAngle=-30, orient="top"))
    base = alt.Chart(data).encode(x=x, y=alt.Y("arm:N", sort=arms, title="trained in"))
    middle = float(data["cost"].median()) if len(data) else 0.0
    scale = alt.Scale(type="symlog", constant=0.05, scheme="blues")
    cells = base.mark_rect().encode(
        color=alt.Color("cost:Q", title="nats over BF16", scale=scale),
        tooltip=["arm:N", "forward:N", alt.Tooltip("cost:Q", format="+.4f"), "seeds:Q"],
    )
    ink = alt.condition(f"datum.cost > {middle}", alt.value("white"), alt.value("black"))
    return alt.layer(cells, base.mark_text(fontSize=10).encode(text="text:N", color=ink)).properties(
        title=title, height=alt.Step(26)
    )


def curves_chart(curves: pd.DataFrame, *, title: str, order: Sequence[str]) -> alt.LayerChart:
    """Excess over the source's entropy (or the loss, where that is unknown) against tokens, with the range over seeds."""
    known = curves["excess"].notna().any()
    shown, y_title = ("excess", "loss over the source's entropy") if known else ("loss", "loss")
    data = curves.assign(millions=curves["tokens"] / 1e6)
    base = alt.Chart(data).encode(
        x=alt.X("millions:Q", title="training tokens, millions", scale=alt.Scale(type="log", nice=False)),
        color=alt.Color("arm:N", title=None, sort=list(order)),
    )
    scale = alt.Scale(type="log" if known else "linear", zero=False, nice=False)
    y = {"title": f"{y_title}, nats a token", "scale": scale}
    band = base.mark_area(opacity=0.15).encode(y=alt.Y("low:Q", **y), y2="high:Q")
    numbers = ["millions:Q", alt.Tooltip(f"{shown}:Q", format=".4f"), "seeds:Q"]
    line = base.mark_line(point=True).encode(y=alt.Y(f"{shown}:Q", **y), tooltip=["arm:N", *numbers])
    return alt.layer(band, line).properties(title=title)
