"""How fast a chip's public figures let Llama's linear layers be: the roofline of its GEMMs and of quantizing for them.

A GEMM takes at least its operations over the chip's rate for their format, and at least its bytes (operands read once,
the BF16 result written once) over the memory's bandwidth. Quantizing is bytes alone. Times are in seconds, of one chip;
nothing here was measured on one, and no kernel reaches a roofline.
"""

from __future__ import annotations

from dataclasses import dataclass

import altair as alt
import pandas as pd

from mxfp4.analysis import published
from mxfp4.pages.charts import PALETTE

BYTES = {"mxfp4": 0.5 + 1 / 32, "fp8": 1.0, "bf16": 2.0}
"""Of an operand's element, scales included."""
SOURCE_BYTES = 2  # operands are quantized from BF16, results written in it
FORMATS = {"mxfp4": "MXFP4", "fp8": "FP8", "bf16": "BF16"}
GEMMS = ("Fprop", "Dgrad", "Wgrad")


@dataclass(frozen=True)
class Way:
    """A way to quantize a tensor for its two GEMMs: how often the BF16 source, or a copy of it, is read and written."""

    name: str
    reads: int
    copies: int
    """BF16 copies written: a rotated tensor, or a transposed one."""

    def bytes_an_element(self, fmt: str) -> float:
        return SOURCE_BYTES * (self.reads + self.copies) + 2 * BYTES[fmt]


WAYS = (
    Way("both orientations from one read", 1, 0),
    Way("each orientation from a read of its own", 2, 0),
    Way("rotated copies written first", 4, 2),
)


def gemm_seconds(m: int, n: int, k: int, fmt: str) -> tuple[float, float]:
    """(by operations, by bytes) of [m, k] x [n, k] in `fmt` on an MI355X; the larger holds."""
    moved = (m + n) * k * BYTES[fmt] + m * n * SOURCE_BYTES
    return 2 * m * n * k / published.MI355X_FLOPS[fmt], moved / published.MI355X_BANDWIDTH


def duals(shape: tuple[int, int, int]) -> dict[str, tuple[int, int, int]]:
    """The three GEMMs of a layer (tokens, out, in) as (M, N, K)."""
    tokens, out, into = shape
    return dict(zip(GEMMS, ((tokens, out, into), (tokens, into, out), (out, into, tokens)), strict=True))


def gemms() -> pd.DataFrame:
    """layer, gemm, format, m, n, k, intensity (FLOP a byte), seconds, flops_per_second, bound ("operations", "bytes")."""
    rows = []
    for layer, shape in published.LLAMA_8B_GEMMS.items():
        for gemm, (m, n, k) in duals(shape).items():
            for fmt, label in FORMATS.items():
                compute, memory = gemm_seconds(m, n, k, fmt)
                seconds, operations = max(compute, memory), 2 * m * n * k
                rows.append(
                    {
                        "layer": layer, "gemm": gemm, "format": label, "m": m, "n": n, "k": k,
                        "shape": f"{m} x {n} x {k}", "intensity": operations / (memory * published.MI355X_BANDWIDTH),
                        "seconds": seconds, "flops_per_second": operations / seconds,
                        "bound": "operations" if compute >= memory else "bytes",
                    }
                )  # fmt: skip
    return pd.DataFrame(rows)


def layers(fmt: str = "mxfp4") -> pd.DataFrame:
    """layer, way, part ("GEMMs", "quantization"), seconds: forward and backward of each linear layer in `fmt`."""
    rows = []
    for layer, (tokens, out, into) in published.LLAMA_8B_GEMMS.items():
        products = sum(max(gemm_seconds(*mnk, fmt)) for mnk in duals((tokens, out, into)).values())
        elements = tokens * into + out * into + tokens * out  # X, W and G
        for way in WAYS:
            quantizing = elements * way.bytes_an_element(fmt) / published.MI355X_BANDWIDTH
            rows.append({"layer": layer, "way": way.name, "part": "GEMMs", "seconds": products})
            rows.append({"layer": layer, "way": way.name, "part": "quantization", "seconds": quantizing})
    return pd.DataFrame(rows)


def shares() -> pd.DataFrame:
    """way, gemms, quantization (seconds over all four layers), share (quantization of both), over_fp8, over_bf16 (speed
    relative to the same layers in FP8, quantized as they must be, and in BF16)."""
    bf16 = sum(max(gemm_seconds(*mnk, "bf16")) for s in published.LLAMA_8B_GEMMS.values() for mnk in duals(s).values())
    fp8 = layers("fp8")
    fp8 = fp8[fp8["way"] == WAYS[0].name]["seconds"].sum()
    rows = []
    for way, part in layers().groupby("way", sort=False):
        seconds = part.groupby("part")["seconds"].sum()
        total = seconds.sum()
        rows.append(
            {
                "way": way, "gemms": seconds["GEMMs"], "quantization": seconds["quantization"],
                "share": seconds["quantization"] / total, "over_fp8": fp8 / total, "over_bf16": bf16 / total,
            }
        )  # fmt: skip
    return pd.DataFrame(rows)


def roofline_chart() -> alt.LayerChart:
    """Attainable rate against intensity for the three formats, and where each GEMM of `gemms` stands."""
    found = gemms()
    labels = list(FORMATS.values())
    edges = [100.0, *(rate / published.MI355X_BANDWIDTH for rate in published.MI355X_FLOPS.values()), 12000.0]
    roofs = pd.DataFrame(
        [
            {"format": label, "intensity": i, "rate": min(i * published.MI355X_BANDWIDTH, rate) / 1e15}
            for (fmt, label) in FORMATS.items()
            for rate in [published.MI355X_FLOPS[fmt]]
            for i in sorted(edges)
        ]
    )
    colour = alt.Color("format:N", title=None, sort=labels, scale=alt.Scale(domain=labels, range=list(PALETTE[:3])))
    x = alt.X("intensity:Q", title="operations a byte", scale=alt.Scale(type="log", domain=[100, 12000]))
    y = alt.Y("rate:Q", title="PFLOP/s", scale=alt.Scale(type="log", domain=[0.8, 14]))
    roof = alt.Chart(roofs).mark_line().encode(x=x, y=y, color=colour)
    dots = alt.Chart(found.assign(rate=found["flops_per_second"] / 1e15)).mark_point(size=60).encode(
        x=x, y=y, color=colour,
        shape=alt.Shape("gemm:N", title=None, sort=list(GEMMS)),
        tooltip=["layer", "gemm", "format", "shape", alt.Tooltip("intensity:Q", title="operations a byte", format=".0f"),
                 alt.Tooltip("rate:Q", title="PFLOP/s", format=".2f"), "bound"],
    )  # fmt: skip
    return alt.layer(roof, dots).properties(title="Roofline of an MI355X, and Llama 8B's GEMMs on it")


def layer_chart() -> alt.Chart:
    """Stacked bars of `layers`: GEMMs and quantization of each layer, one bar a way to quantize."""
    frame = layers()
    frame["milliseconds"] = 1e3 * frame["seconds"]
    return (
        alt.Chart(frame, title=alt.TitleParams("Forward and backward of each layer", subtitle="the floor, by how operands are quantized"))
        .mark_bar()
        .encode(
            y=alt.Y("way:N", title=None, sort=[w.name for w in WAYS], axis=alt.Axis(labelLimit=260)),
            x=alt.X("milliseconds:Q", title="milliseconds"),
            color=alt.Color("part:N", title=None, scale=alt.Scale(domain=["GEMMs", "quantization"], range=list(PALETTE[:2]))),
            order=alt.Order("part:N"),
            row=alt.Row("layer:N", title=None, sort=list(published.LLAMA_8B_GEMMS), header=alt.Header(labelAngle=0, labelAlign="left")),
            tooltip=["layer", "way", "part", alt.Tooltip("milliseconds:Q", format=".3f")],
        )
        .properties(width=310, height=alt.Step(18))
    )  # fmt: skip
