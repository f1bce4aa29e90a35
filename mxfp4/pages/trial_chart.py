"""The chart of a trial, as a page of its own and as a PNG.

The page holds its data, the Vega bundle that the book uses and the still picture, which stays where scripts are off. It
loads nothing, so it opens offline from a disk.
"""

from __future__ import annotations

import base64
import html
import re
from pathlib import Path

import altair as alt
import pandas as pd
import vl_convert

from mxfp4.analysis.registered_study.trial import FORWARDS, Trial
from mxfp4.pages.charts import METADATA, PALETTE, VL_VERSION, figure_html, render
from mxfp4.training.checkpoints.durable_files import write_atomic
from mxfp4.training.forwards import OWN

KINDS = {"on trial": PALETTE[1], "reference": PALETTE[6]}
NAMES = {OWN: "own forward", "bf16": "BF16 forward"}
EDITOR = "https://vega.github.io/editor/"
"""The bundle's one address that a reader could be led to: its menu entry is off, and it is taken out."""
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>body{{font-family:system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em;color:#1f2328}}
figure{{margin:0}}img{{max-width:100%}}figcaption,.mx-note{{color:#57606a;line-height:1.5}}</style></head>
<body>{figure}{note}<script>(function () {{
{bundle}
}})();</script>
<script>(function () {{
const spec = JSON.parse(document.querySelector(".mx-spec").textContent);
const host = document.querySelector(".mx-vega"), still = host.querySelector(".mx-still");
const canvas = document.createElement("div");
canvas.style.width = "100%";
host.appendChild(canvas);
const actions = {{export: true, source: false, compiled: false, editor: false}};
window.mxfp4Vega.embed(canvas, spec, {{renderer: "svg", actions, downloadFileName: "mxfp4-trial"}})
  .then(() => {{ still.hidden = true; }}, () => {{ canvas.remove(); }});
}})();</script></body></html>
"""


def frame(trial: Trial) -> pd.DataFrame:
    """One row an arm and forward: arm, kind, forward, excess, low, high (nats a token; NaN without an interval), seeds.
    An arm of which a seed failed has none."""
    rows = []
    for row in trial.rows:
        for forward in FORWARDS if not row.failed else ():
            e = row.excess[forward]
            seeds = ", ".join(map(str, row.seeds))
            rows.append({"arm": row.recipe, "kind": list(KINDS)[not row.trial], "forward": NAMES[forward],
                         "excess": e.value, "low": e.low, "high": e.high, "seeds": seeds})  # fmt: skip
    return pd.DataFrame(rows, columns=["arm", "kind", "forward", "excess", "low", "high", "seeds"])


def chart(trial: Trial) -> alt.LayerChart:
    """Excess of each arm in both forwards, with intervals; arms on trial in a colour of their own."""
    data = frame(trial)
    forwards = list(NAMES.values())
    y = alt.Y("arm:N", sort=[row.recipe for row in trial.rows], title=None, axis=alt.Axis(labelLimit=220))
    offset = alt.YOffset("forward:N", sort=forwards)
    axis = {"title": "excess over the entropy of the source, nats a token", "scale": alt.Scale(zero=False)}
    colour = alt.Color("kind:N", title=None, scale=alt.Scale(domain=list(KINDS), range=list(KINDS.values())))
    shapes = alt.Scale(domain=forwards, range=["circle", "diamond"])
    shape = alt.Shape("forward:N", title=None, sort=forwards, scale=shapes)
    base = alt.Chart(data).encode(y=y, yOffset=offset, color=colour)
    rule = base.transform_filter("isValid(datum.low)").mark_rule(strokeWidth=4, opacity=0.45).encode(
        x=alt.X("low:Q", **axis), x2="high:Q"
    )  # fmt: skip
    numbers = [alt.Tooltip(f"{name}:Q", format=".4f") for name in ("excess", "low", "high")]
    shown = ["arm:N", "forward:N", *numbers, "seeds:N"]
    point = base.mark_point(size=70).encode(x=alt.X("excess:Q", **axis), shape=shape, tooltip=shown)
    heading = f"{'TOY: ' * trial.protocol.toy}Excess loss of the recipes on trial"
    title = alt.TitleParams(heading, subtitle=trial.setting)
    return alt.layer(rule, point).properties(title=title, height=alt.Step(20))


def caption(trial: Trial) -> str:
    """What to see, in one or two sentences."""
    text = (
        "Loss above the entropy of the source after the decay. Bars are 95 % intervals over seeds; one seed has none."
    )
    failed = [f"{row.recipe} ({', '.join(sorted(set(row.failed.values())))})" for row in trial.rows if row.failed]
    return text + (f" Not drawn: {', '.join(failed)}." if failed else "")


def write(trial: Trial, folder: Path) -> list[Path]:
    """Write the page and the PNG into `folder` (made if needed), over those of the same trial; their paths."""
    text = f"{caption(trial)} {trial.warning}".strip()
    bundle, metadata = render(chart(trial), text)
    png = bundle["image/png"]
    figure = figure_html(metadata[METADATA]["vegalite"], text, f"data:image/png;base64,{png}")
    code = vl_convert.javascript_bundle(snippet="window.mxfp4Vega = {embed: vegaEmbed};", vl_version=VL_VERSION)
    code = code.replace(EDITOR, "").replace("</script", "<\\/script")
    note = f'<p class="mx-note">{html.escape(trial.resolution_text)}</p>'
    page = _PAGE.format(title=html.escape(f"mxfp4 {_name(trial)}"), figure=figure, note=note, bundle=code)
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{_name(trial)}.{kind}" for kind in ("html", "png")]
    for path, data in zip(paths, (page.encode(), base64.b64decode(png)), strict=True):
        write_atomic(path, data)
    return paths


def _name(trial: Trial) -> str:
    """A safe file name: trial (or trial-toy), the recipes, the seeds."""
    words = [row.recipe for row in trial.rows if row.trial]
    slug = re.sub(r"[^a-z0-9]+", "-", "-".join(words).lower()).strip("-")[:80]
    return f"trial{'-toy' * trial.protocol.toy}-{slug}-s{'-'.join(map(str, trial.seeds))}"[:150]
