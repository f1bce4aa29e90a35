"""What can be recomputed from the public MLPerf logs: crossings, overheads, their uncertainty, speed.

Inputs are `published.mlperf_curves` and `published.mlperf_results`; nothing here is a run of ours. `deviations_frame`
compares the settings of scale mi355x with the reference's.
"""

from __future__ import annotations

import math
from dataclasses import asdict

import altair as alt
import numpy as np
import pandas as pd

from mxfp4.analysis import published
from mxfp4.analysis.deviations import deviations
from mxfp4.analysis.token_efficiency import crossing, speedup
from mxfp4.errors import UserError
from mxfp4.pages.charts import PALETTE

FP8, FP4 = "FP8", "MXFP4 + H16"
SIGMAS = 1.96  # of a 95 % interval


def perplexity_frame(target: float) -> pd.DataFrame:
    """reading, loss (nats a token), perplexity: `target` as a log-perplexity and as a perplexity."""
    if target <= 0:
        raise UserError(f"target={target} must be positive")
    rows = [("a log-perplexity (the benchmark's rules)", target, math.exp(target)),
            ("a perplexity (P1 and the press)", math.log(target), target)]  # fmt: skip
    return pd.DataFrame(rows, columns=["reading", "loss", "perplexity"])


def deviations_frame() -> pd.DataFrame:
    """point, reference, here, parameter, consequence: where scale mi355x differs from the MLPerf reference, or may."""
    return pd.DataFrame([asdict(row) for row in deviations()])


def crossings(curves: pd.DataFrame, target: float) -> dict[str, float]:
    """{arm: sequences at which its curve crosses `target`, interpolated}; arms that never do are left out."""
    found = {arm: crossing(part, target) for arm, part in curves.groupby("arm", sort=False)}
    return {arm: tokens / published.SEQUENCE for arm, tokens in found.items() if tokens is not None}


def grid_samples(curves: pd.DataFrame, target: float) -> dict[str, int]:
    """{arm: sequences of the first evaluation at or below `target`}, which is where a run ends."""
    reached = curves[curves["eval_loss"] <= target]
    return {arm: int(part["samples"].min()) for arm, part in reached.groupby("arm", sort=False)}


def _row(results: pd.DataFrame, arm: str) -> pd.Series:
    return results.set_index("arm").loc[arm]


def sample_overhead(results: pd.DataFrame) -> float:
    """Extra sequences of the ten-run mean of MXFP4 over FP8's, as a share."""
    return float(_row(results, FP4)["samples"] / _row(results, FP8)["samples"] - 1)


def step_speed(results: pd.DataFrame) -> float:
    """How many times faster a step of MXFP4 is, by seconds a step."""
    return float(_row(results, FP8)["seconds_per_step"] / _row(results, FP4)["seconds_per_step"])


def overhead_frame(curves: pd.DataFrame, results: pd.DataFrame, target: float) -> pd.DataFrame:
    """how, overhead (share), source, mark. Readings of run 0 exist where both curves reach `target`."""
    quantum = published.EVAL_EVERY / _row(results, FP8)["samples"]
    rows = [("one evaluation step, as a share of an FP8 run", quantum, "rules and logs", "log")]
    fine, grid = crossings(curves, target), grid_samples(curves, target)
    if {FP8, FP4} <= fine.keys():
        rows += [
            (
                "run 0 of each, at the evaluation that ends it",
                grid[FP4] / grid[FP8] - 1,
                "logs, run 0",
                "log",
            ),
            ("run 0 of each, crossing interpolated", fine[FP4] / fine[FP8] - 1, "logs, run 0", "log"),
        ]
    logged, stated = published.figure("log/overhead"), published.figure("token-overhead")
    rows += [
        (
            "plain means of ten runs, at the evaluation that ends them",
            sample_overhead(results),
            "logs, ten runs",
            "log",
        ),
        ("plain means of ten runs, crossing interpolated", logged.high, logged.source, logged.mark),
        ("P1", stated.low, stated.source, stated.mark),
    ]
    return pd.DataFrame(rows, columns=["how", "overhead", "source", "mark"])


def uncertainty_frame(results: pd.DataFrame) -> pd.DataFrame:
    """quantity, value, low, high (shares), mark: the sample overhead, if runs scatter as the BF16 reference
    does."""
    mean, sd = published.REFERENCE_SAMPLES
    relative = sd / mean * math.sqrt(2 / published.RUNS_PER_SET)  # of a ratio of two means of ten runs
    value = sample_overhead(results)
    half = SIGMAS * relative * (1 + value)
    return pd.DataFrame([("sample overhead, ten-run means", value, value - half, value + half, "inferred")],
                        columns=["quantity", "value", "low", "high", "mark"])  # fmt: skip


def speed_frame(results: pd.DataFrame) -> pd.DataFrame:
    """source, mark, step_speed, overhead, end_to_end (computed from these), arithmetic (the same, written out), stated (by
    the source as text; for the logs the ratio of their minutes). P1 and the press article stand under their own names."""
    rows = [
        (*_published_speed("step-speed"), published.figure("token-overhead").low, published.figure("end-to-end").text)
    ]
    press = published.figure("press/overhead")
    for overhead in (press.high, press.low):
        rows.append((*_published_speed("press/step-speed"), overhead, published.figure("press/end-to-end").text))
    minutes = float(_row(results, FP8)["minutes"] / _row(results, FP4)["minutes"])
    rows.append(("MLPerf logs", "log", step_speed(results), sample_overhead(results), f"{minutes:.2f}x by minutes"))
    frame = pd.DataFrame(rows, columns=["source", "mark", "step_speed", "overhead", "stated"])
    frame.insert(4, "end_to_end", speedup(frame["step_speed"], frame["overhead"]))
    frame.insert(5, "arithmetic", [arithmetic(r.step_speed, r.overhead) for r in frame.itertuples()])
    return frame


def _published_speed(name: str) -> tuple[str, str, float]:
    """Source, mark and value of a published step speed."""
    speed = published.figure(name)
    return speed.source, speed.mark, speed.low


def arithmetic(speed: float, overhead: float) -> str:
    """ "1.21 / 1.08 = 1.12": step speed over one plus the token overhead, written out."""
    places = 2 if math.isclose(round(speed, 2), speed) and math.isclose(round(overhead, 2), overhead) else 3
    return f"{speed:.{places}f} / {1 + overhead:.{places}f} = {float(speedup(speed, overhead)):.{places}f}"


def break_even_chart(results: pd.DataFrame) -> alt.LayerChart:
    """End-to-end gain against token overhead for the step speeds of P1, of the press article and of the logs, each source's
    own points on its line."""
    overheads = np.linspace(0, 0.3, 61)
    points = speed_frame(results)
    lines = pd.concat([
        pd.DataFrame({
            "source": r.source, "overhead": 100 * overheads, "gain": speedup(r.step_speed, overheads),
        })
        for r in points.drop_duplicates("source").itertuples()
    ])  # fmt: skip
    sources = list(dict.fromkeys(points["source"]))
    colour = alt.Color("source:N", title=None, sort=sources, scale=alt.Scale(domain=sources, range=list(PALETTE[:3])))
    x = alt.X("overhead:Q", title="token overhead, percent")
    y = alt.Y("gain:Q", title="end-to-end speed over FP8", scale=alt.Scale(zero=False))
    line = alt.Chart(lines).mark_line().encode(x=x, y=y, color=colour)
    own = points.assign(overhead=100 * points["overhead"], gain=points["end_to_end"])
    dot = alt.Chart(own).mark_point(size=120).encode(
        x="overhead:Q", y="gain:Q", color=colour,
        tooltip=["source", "mark", "arithmetic", alt.Tooltip("overhead:Q", format=".1f"),
                 alt.Tooltip("gain:Q", format=".3f")],
    )  # fmt: skip
    even = alt.Chart(pd.DataFrame({"one": [1.0]})).mark_rule(strokeDash=[4, 4]).encode(y="one:Q")
    return alt.layer(even, line, dot).properties(title="Where faster steps stop paying")
