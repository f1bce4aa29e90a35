"""Table 2: step time, tokens a second and token overhead combined into the stability-gated speed-up.

Faster steps pay while they are not eaten up by tokens: end to end = step speed / (1 + token overhead) (P1, H4). Step
speeds are a property of a machine. A GPU that emulates FP4 says nothing about those of FP4 hardware: its times are
shown, and a gain is computed from them nowhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import altair as alt
import numpy as np
import pandas as pd

from mxfp4.analysis import metrics, published, token_efficiency
from mxfp4.analysis.effect import Effect
from mxfp4.analysis.study import Study
from mxfp4.bench.results import bench_name
from mxfp4.pages.chapters import kernels as kernel_tables
from mxfp4.pages.chapters import mlperf as logs
from mxfp4.pages.charts import PALETTE

REFERENCE = "fp8"
ELSEWHERE = "step-h200"
"""The benchmark that is shown where the runs are of no GPU."""
BLOCKS = ("mxfp4+h16", "mxfp4+h32")
NATIVE = "native"
SPEEDS = (1.0, 2.0)
"""Range of the calculator's step speed-up; above, MI355X's own ratio of FP4 to FP8 peak rates."""
OVERHEADS = (0.0, 50.0)
"""Range of its token overhead, percent."""
EMULATED = ["FP4 is emulated here: ours borrow a published step speed,", "no speed-up of our own is claimed"]
LEVELS = (0.9, 1.0, 1.1, 1.2, 1.4, 1.6)
"""End-to-end speeds that have a contour."""


def path_sentence(study: Study) -> str:
    """What the times of this page are times of, in one sentence."""
    device = study.records[0].machine["device"]
    if study.path == NATIVE:
        return f"{device} multiplies FP4 itself: its step times are measurements of Table 2."
    does = "multiplies FP8 itself and emulates FP4" if study.fp8_path == NATIVE else "emulates FP4"
    return f"{device} {does}: its times are what emulation costs, and no speed-up is claimed from them."


def recorded(study: Study, arms: Sequence[str]) -> pd.DataFrame:
    """arm, seeds, alone (how many of them had their device to themselves), step (seconds), tokens_per_second (mean over
    seeds), spread (fastest / slowest seed), over.

    `over` is the ratio to the reference's tokens a second, paired by seed, of records that were alone; NaN where
    emulated.
    """
    rows = []
    for arm in arms:
        records = study.arms.get(arm, {}).values()
        rates = [r.timings.get("tokens_per_second") for r in records]
        rates = [rate for rate in rates if rate]
        if rates:
            effect = (
                metrics.attempt("throughput_ratio", study, arm=arm, against=REFERENCE) if study.path == NATIVE else None
            )
            rows.append({
                "arm": arm, "seeds": len(rates), "alone": sum(not math.isnan(metrics.speed(r)) for r in records),
                "step": study.config.tokens_per_step / float(np.mean(rates)), "tokens_per_second": float(np.mean(rates)),
                "spread": max(rates) / min(rates), "over": math.nan if effect is None else effect.value,
            })  # fmt: skip
    columns = ["arm", "seeds", "alone", "step", "tokens_per_second", "spread", "over"]
    return pd.DataFrame(rows, columns=columns)


def benched(name: str) -> tuple[pd.DataFrame, str]:
    """A benchmark of training steps: recipe, seconds, tokens_per_second, ratio (step time over FP8's, else BF16's),
    against; and the machine with its paths, in words. An empty frame where it was not run."""
    from mxfp4.bench.step import BATCH, MODEL

    data = kernel_tables.read(name)
    rows = [r for r in (data["rows"] if data else []) if r.get("seconds") and ", " not in r["name"]]
    frame = pd.DataFrame([{"recipe": r["name"], "seconds": r["seconds"]} for r in rows], columns=["recipe", "seconds"])
    if frame.empty:
        return frame, "not run"
    known = frame.set_index("recipe")["seconds"]
    against = next((r for r in (REFERENCE, "bf16") if r in known), frame["recipe"].iloc[0])
    frame = frame.assign(
        tokens_per_second=BATCH * MODEL.max_seq_len / frame["seconds"],
        ratio=frame["seconds"] / known[against],
        against=against,
    )
    machine = data["machine"]
    paths = f"FP8 {machine.get('fp8_path', machine['path'])}, FP4 {machine['path']}"
    return frame, f"{kernel_tables.device(name)}, {paths}"


def bench_of(study: Study | None) -> str:
    """The name of the benchmark of training steps on the GPU of a study; without one, of the H200's."""
    if study is None or study.records[0].machine["device_type"] == "cpu":
        return ELSEWHERE
    return bench_name("step", study.records[0].machine["device"])


def other_fp8(machine: str, study: Study) -> str:
    """A sentence where a benchmark, by the words of `benched`, multiplied FP8 in another way than the runs of a study."""
    if f"FP8 {study.fp8_path}" in machine:
        return ""
    return f" FP8 is {study.fp8_path} in the runs above and was not in this benchmark, so its bar is not what FP8 costs them."


def block_sizes(name: str) -> pd.DataFrame:
    """source, quantity, ratio (H16's speed over H32's) of whole steps; P1's figure is of kernels."""
    figure = published.figure("h16-h32")
    rows = [(figure.cite, "kernel throughput", figure.low)]
    frame, machine = benched(name)
    known = dict(zip(frame["recipe"], frame["seconds"], strict=True))
    if set(BLOCKS) <= known.keys():
        rows.append((machine, "training step", known[BLOCKS[1]] / known[BLOCKS[0]]))
    return pd.DataFrame(rows, columns=["source", "quantity", "ratio"])


def gated(study: Study | None, arms: Sequence[str], *, at: float = metrics.AT) -> pd.DataFrame:
    """Table 2, theirs and ours: source, arm, step_speed, overhead, low, high (its interval), end_to_end, e_low, e_high,
    arithmetic (of published figures, written out), stated (by their source, text), basis.

    Published rows have no interval. Ours take the step speed of P1 and of the logs for the recipe that these timed, and
    the measured one where FP4 is native.
    """
    frame = logs.speed_frame(published.mlperf_results())
    rows = [
        {"source": f"{r.source} ({r.mark})", "arm": BLOCKS[0], "step_speed": r.step_speed, "overhead": r.overhead,
         "end_to_end": r.end_to_end, "arithmetic": r.arithmetic, "stated": r.stated, "basis": "as published"}
        for r in frame.itertuples()
    ]  # fmt: skip
    for arm in arms if study is not None else ():
        rows += _ours(study, arm, at)
    ours = ["source", "arm", "step_speed", "overhead", "low", "high", "end_to_end", "e_low", "e_high"]
    return pd.DataFrame(rows, columns=[*ours, "arithmetic", "stated", "basis"])


def gated_table(frame: pd.DataFrame) -> pd.DataFrame:
    """`gated` for print: source (with arm and basis for ours), step_speed, overhead and end_to_end with intervals,
    arithmetic and stated of published rows."""

    def interval(low: float, high: float, form: str) -> str:
        if math.isnan(low) or math.isnan(high):
            return ""
        return f" [{', '.join('∞' if end == math.inf else format(end, form) for end in (low, high))}]"

    rows = [
        {
            "source": f"{r.source}: {r.arm}, {r.basis}" if r.source.startswith("ours") else r.source,
            "step_speed": r.step_speed,
            "overhead": f"{r.overhead:+.1%}{interval(r.low, r.high, '+.1%')}",
            "end_to_end": f"{r.end_to_end:.2f}{interval(r.e_low, r.e_high, '.2f')}",
            "arithmetic": r.arithmetic,
            "stated": r.stated,
        }
        for r in frame.itertuples()
    ]
    return pd.DataFrame(rows, columns=["source", "step_speed", "overhead", "end_to_end", "arithmetic", "stated"])


def _ours(study: Study, arm: str, at: float) -> list[dict]:
    effect = metrics.attempt("overhead", study, arm=arm, reference=REFERENCE, at=at)
    if effect is None:
        return []
    rows = []
    own = metrics.attempt("measured_end_to_end", study, arm=arm, at=at) if study.path == NATIVE else None
    if own is not None:
        speed = metrics.throughput_ratio(study, arm=arm, against=REFERENCE)
        rows.append(
            _row(f"ours, scale {study.scale}", arm, speed.value, effect, "step speed and overhead measured", own)
        )
    if arm == BLOCKS[0]:
        clocked = logs.step_speed(published.mlperf_results())
        for source, speed in (("P1's", published.figure("step-speed").low), ("the logs'", clocked)):
            rows.append(_row(f"ours, scale {study.scale}", arm, speed, effect, f"{source} step speed"))
    return rows


def _row(source: str, arm: str, speed: float, o: Effect, basis: str, end: Effect | None = None) -> dict:
    value, high, low = (float(token_efficiency.speedup(speed, x)) for x in (o.value, o.low, o.high))
    if end is not None:
        value, low, high = end.value, end.low, end.high
    return {
        "source": source, "arm": arm, "step_speed": speed, "overhead": o.value, "low": o.low, "high": o.high,
        "end_to_end": value, "e_low": low, "e_high": high, "arithmetic": None, "stated": None, "basis": basis,
    }  # fmt: skip


def step_chart(frame: pd.DataFrame, machine: str, *, title: str) -> alt.LayerChart:
    """Seconds a step of each recipe of `benched`; the subtitle says on what, and that emulation is no speed-up."""
    emulated = not machine.endswith(NATIVE)
    subtitle = [machine, *(["the price of emulation, not the speed of what is emulated"] if emulated else [])]
    order = list(frame["recipe"])
    x = alt.X("milliseconds:Q", title="milliseconds a step")
    base = alt.Chart(frame.assign(milliseconds=1e3 * frame["seconds"])).encode(
        y=alt.Y("recipe:N", sort=order, title=None, axis=alt.Axis(labelLimit=200)), x=x
    )
    bar = base.mark_bar(height=14).encode(
        color=alt.condition(alt.datum.recipe == frame["against"].iloc[0], alt.value(PALETTE[6]), alt.value(PALETTE[0])),
        tooltip=["recipe", alt.Tooltip("milliseconds:Q", format=".2f"),
                 alt.Tooltip("tokens_per_second:Q", format=",.0f")],
    )  # fmt: skip
    text = base.mark_text(align="left", dx=4).encode(text=alt.Text("ratio:Q", format=".2f"))
    return alt.layer(bar, text).properties(title=alt.TitleParams(title, subtitle=subtitle), height=alt.Step(24))


def gated_chart(frame: pd.DataFrame, study: Study | None, *, title: str) -> alt.LayerChart:
    """End-to-end speed over FP8 of each row of `gated`, ours with intervals, against 1."""
    if study is None:
        said = ["no records of this scale yet: published figures alone"]
    else:
        own = study.path == NATIVE
        said = ["measured on native FP4"] if own else EMULATED
    frame = frame.assign(
        label=[f"ours, {r.arm}: {r.basis}" if r.source.startswith("ours") else r.source for r in frame.itertuples()],
        whose=["ours" if s.startswith("ours") else "published" for s in frame["source"]],
    )
    order = list(dict.fromkeys(frame["label"]))
    y = alt.Y("label:N", sort=order, title=None, axis=alt.Axis(labelLimit=260))
    two = alt.Scale(domain=["published", "ours"], range=[PALETTE[6], PALETTE[0]])
    colour = alt.Color("whose:N", title=None, scale=two)
    x = alt.X("end_to_end:Q", title="end-to-end speed over FP8", scale=alt.Scale(zero=False))
    layers = [alt.Chart(pd.DataFrame({"one": [1.0]})).mark_rule(strokeDash=[4, 4]).encode(x="one:Q")]
    bounded = frame[np.isfinite(frame["e_low"].astype(float)) & np.isfinite(frame["e_high"].astype(float))]
    if len(bounded):
        rule = alt.Chart(bounded).mark_rule(strokeWidth=5, opacity=0.45)
        low = alt.X("e_low:Q", title="end-to-end speed over FP8")
        layers.append(rule.encode(x=low, x2="e_high:Q", y=y, color=colour))
    layers.append(alt.Chart(frame).mark_point(size=70).encode(
        x=x, y=y, color=colour,
        tooltip=["label", "arm", "arithmetic", alt.Tooltip("step_speed:Q", format=".2f"), alt.Tooltip("overhead:Q", format=".1%"),
                 alt.Tooltip("end_to_end:Q", format=".3f")],
    ))  # fmt: skip
    return alt.layer(*layers).properties(title=alt.TitleParams(title, subtitle=said), height=alt.Step(26))


def contours() -> pd.DataFrame:
    """level, overhead (percent), speed: the step speed that an overhead needs for an end-to-end speed of `level`."""
    overheads = np.linspace(*OVERHEADS, 51)
    frame = pd.concat([
        pd.DataFrame({"level": level, "overhead": overheads, "speed": level * (1 + overheads / 100)})
        for level in LEVELS
    ])  # fmt: skip
    return frame[frame["speed"].between(*SPEEDS)].reset_index(drop=True)


def calculator(frame: pd.DataFrame, *, title: str) -> alt.LayerChart:
    """When FP4 pays: sliders for step speed and token overhead move a point over contours of the end-to-end speed.

    frame: rows of `gated`, drawn as fixed points. The contour of 1 is where faster steps stop paying.
    """
    speed = alt.param(
        name="step_speed",
        value=published.figure("step-speed").low,
        bind=alt.binding_range(min=SPEEDS[0], max=SPEEDS[1], step=0.01, name="step speed over FP8 "),
    )
    overhead = alt.param(
        name="token_overhead", value=100 * published.figure("token-overhead").low,
        bind=alt.binding_range(min=OVERHEADS[0], max=OVERHEADS[1], step=0.5, name="token overhead, percent "),
    )  # fmt: skip
    x = alt.X("overhead:Q", title="token overhead, percent", scale=alt.Scale(domain=list(OVERHEADS), nice=False))
    y = alt.Y("speed:Q", title="step speed over FP8", scale=alt.Scale(domain=list(SPEEDS), nice=False))
    lines = contours()
    line = alt.Chart(lines).mark_line().encode(
        x=x, y=y, detail="level:N", color=alt.value(PALETTE[6]),
        strokeWidth=alt.condition(alt.datum.level == 1.0, alt.value(3), alt.value(1)),
        strokeDash=alt.condition(alt.datum.level == 1.0, alt.value([1, 0]), alt.value([4, 3])),
    )  # fmt: skip
    ends = lines.loc[lines.groupby("level")["overhead"].idxmax()]
    named = (
        alt.Chart(ends).mark_text(align="right", dy=-7, dx=-2).encode(x=x, y=y, text=alt.Text("level:Q", format=".1f"))
    )
    points = frame.assign(
        percent=100 * frame["overhead"], who=["ours" if s.startswith("ours") else s for s in frame["source"]]
    )
    points = points[points["percent"].between(*OVERHEADS) & points["step_speed"].between(*SPEEDS)]
    who = list(dict.fromkeys(points["who"]))
    known = alt.Chart(points).mark_point(size=60, filled=False, strokeWidth=2).encode(
        x=alt.X("percent:Q", title="token overhead, percent", scale=alt.Scale(domain=list(OVERHEADS), nice=False)),
        y=alt.Y("step_speed:Q", title="step speed over FP8", scale=alt.Scale(domain=list(SPEEDS), nice=False)),
        color=alt.Color("who:N", title=None, sort=who, scale=alt.Scale(domain=who, range=list(PALETTE[: len(who)]))),
        tooltip=["source", "basis", alt.Tooltip("step_speed:Q", format=".2f"), alt.Tooltip("percent:Q", format=".1f"),
                 alt.Tooltip("end_to_end:Q", format=".3f")],
    )  # fmt: skip
    here = alt.Chart(pd.DataFrame({"here": [0]})).transform_calculate(
        speed="step_speed",
        overhead="token_overhead",
        gain="step_speed / (1 + token_overhead / 100)",
        said="format(datum.gain, '.3f') + 'x end to end: ' + (datum.gain > 1 ? 'FP4 pays' : 'FP4 does not pay')",
    )
    cross = here.mark_point(shape="cross", size=260, color=PALETTE[1], filled=True).encode(x=x, y=y)
    said = here.mark_text(align="left", fontSize=14, fontWeight=600)
    said = said.encode(x=alt.value(10), y=alt.value(16), text="said:N")
    chart = alt.layer(line, named, known, cross, said).add_params(speed, overhead)
    heading = alt.TitleParams(title, subtitle="move the sliders below; the thick line is 1: no gain")
    return chart.properties(title=heading, height=360)
