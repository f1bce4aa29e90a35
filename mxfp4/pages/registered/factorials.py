"""Effects of a factorial on the log excess, as a frame and as a chart."""

from __future__ import annotations

from itertools import combinations

import altair as alt
import numpy as np
import pandas as pd

from mxfp4.analysis.registered_study.estimates import factorial_effect
from mxfp4.pages.charts import PALETTE, say, show, table
from mxfp4.pages.registered.study_report import StudyReport

OUTCOME = "log_excess"
KINDS = ("main effect", "interaction")


def factorial_effects(report: StudyReport, name: str) -> pd.DataFrame:
    """One row a main effect and two-way interaction of factorial `name`: effect, kind, value, low, high (natural logarithm
    of the excess), n, note. Empty while the factorial lacks a cell."""
    factors = list(report.study.factorials[name].factors)
    cells = report.tables.cells(report.study.factorials[name], OUTCOME)
    rows = []
    for effect in [] if cells.empty else [*factors, *(f"{a}:{b}" for a, b in combinations(factors, 2))]:
        e = factorial_effect(cells, effect, factors)
        about = {"effect": effect, "kind": KINDS[":" in effect], "n": e.n, "note": e.note}
        rows.append({**about, "value": e.value, "low": e.low, "high": e.high})
    return pd.DataFrame(rows, columns=["effect", "kind", "value", "low", "high", "n", "note"])


def failed_cells(report: StudyReport, name: str) -> pd.DataFrame:
    """Cells of a factorial that diverged or stalled in some seed: the level of each factor, failed, seeds."""
    factors = list(report.study.factorials[name].factors)
    cells = report.tables.cells(report.study.factorials[name], "own")
    found = cells.assign(failed=np.isinf(cells["value"].astype(float))).groupby(factors, as_index=False)
    counted = found.agg(failed=("failed", "sum"), seeds=("seed", "nunique"))
    return counted[counted["failed"] > 0]


def show_factorial(report: StudyReport, name: str, *, title: str) -> None:
    """Display the effects of a factorial and a table of its failed cells, or say that there is nothing to draw."""
    effects, failed = factorial_effects(report, name), failed_cells(report, name)
    if not np.isfinite(effects["value"].astype(float)).any():
        say("The factorial is not complete: a cell has no record yet.")
    else:
        caption = (
            "Points right of zero raise the loss. Bars are 95 % intervals, over the settings of the other factors or, with "
            "two seeds a cell, over seeds."
        )
        show(effects_chart(effects, title=title), caption=caption)
    if len(failed):
        table(failed, caption="Cells in which a run diverged or stalled.")


def effects_chart(effects: pd.DataFrame, *, title: str) -> alt.LayerChart:
    """Effects with their intervals; main effects first."""
    data = effects[np.isfinite(effects["value"].astype(float))]
    x_title = "effect on the natural logarithm of the excess"
    colour = alt.Color("kind:N", title=None, scale=alt.Scale(domain=list(KINDS), range=list(PALETTE[:2])))
    base = alt.Chart(data).encode(y=alt.Y("effect:N", sort=list(data["effect"]), title=None), color=colour)
    numbers = [alt.Tooltip(f"{name}:Q", format="+.3f") for name in ("value", "low", "high")]
    point = base.mark_point(size=60).encode(x=alt.X("value:Q", title=x_title), tooltip=["effect:N", *numbers, "n:Q"])
    interval = base.transform_filter("isValid(datum.low)").mark_rule(strokeWidth=3, opacity=0.5)
    interval = interval.encode(x=alt.X("low:Q", title=x_title), x2="high:Q")
    zero = alt.Chart(pd.DataFrame({"zero": [0.0]})).mark_rule().encode(x="zero:Q")
    return alt.layer(zero, interval, point).properties(title=title, height=alt.Step(22))
