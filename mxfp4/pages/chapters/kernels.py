"""The kernel chapter's tables and charts, from what `mxfp4 isa` and `mxfp4 bench` wrote into runs/bench."""

from __future__ import annotations

import json

import altair as alt
import pandas as pd

from mxfp4.analysis import published
from mxfp4.directories import bench_dir
from mxfp4.errors import UserError
from mxfp4.pages.charts import PALETTE

ARCHS = {"gfx950": "MI350X, MI355X", "gfx942": "MI300X, MI325X", "sm_100": "B200", "sm_90": "H100, H200"}


def read(name: str) -> dict | list | None:
    """The JSON of runs/bench/<name>.json, None where there is none. UserError for one that is damaged."""
    path = bench_dir() / f"{name}.json"
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise UserError(
            f"{path} is damaged ({error}): write it again with `mxfp4 bench` or `mxfp4 isa --json`"
        ) from None


def isa() -> pd.DataFrame:
    """What each kernel compiles to, a row a kernel and target: the fields of `numerics.isa.Report`, and chips, units and
    converts (matrix and conversion instructions as text), memory (spills and scratch together)."""
    frame = pd.DataFrame(read("isa") or [])
    if frame.empty:
        raise UserError("runs/bench/isa.json does not exist: `mxfp4 isa --arch ... --json` writes it")
    for column, source in (("units", "matrix"), ("converts", "conversions")):
        frame[column] = [", ".join(f"{count} {name}" for name, count in row.items()) or None for row in frame[source]]
    return frame.assign(chips=frame["arch"].map(ARCHS), memory=frame["spills"] + frame["scratch"])


def multiplying(frame: pd.DataFrame) -> pd.DataFrame:
    """The GEMMs of `isa`."""
    return frame[frame["kernel"].str.startswith("gemm")]


def quantizing(frame: pd.DataFrame) -> pd.DataFrame:
    """The quantizers of `isa`, a row a kernel: for each target its instructions, and on gfx950 its conversions."""
    frame = frame[~frame["kernel"].str.startswith("gemm")]
    wide = frame.pivot(index="kernel", columns="arch", values="instructions")[list(ARCHS)]
    native = frame[frame["arch"] == "gfx950"].set_index("kernel")
    wide = wide.assign(converts=native["converts"], registers=native["registers"])
    return wide.loc[list(dict.fromkeys(frame["kernel"]))].reset_index()


def rows(name: str) -> pd.DataFrame:
    """The rows of a benchmark, times in microseconds and rates per second; empty where it was not run."""
    data = read(name)
    frame = pd.DataFrame(data["rows"] if data else [])
    for column in ("seconds", "ratio", "correct", "problem", "bytes", "bytes_per_second", "flops_per_second"):
        if column not in frame:
            frame[column] = None
    return frame.assign(microseconds=pd.to_numeric(frame["seconds"]) * 1e6, ratio=pd.to_numeric(frame["ratio"]))


def device(name: str) -> str:
    """The machine of a benchmark and its versions, in words."""
    machine = read(name)["machine"]
    return f"{machine['device']}, PyTorch {machine['torch']}, Triton {machine['triton']}"


def quantizers(frame: pd.DataFrame) -> pd.DataFrame:
    """The measured quantizers of `rows`: those with a ratio to a copy."""
    return frame[frame["bytes"].notna() & frame["ratio"].notna()]


def products(frame: pd.DataFrame) -> pd.DataFrame:
    """The measured GEMMs of `rows`."""
    return frame[frame["name"].str.startswith("gemm") & frame["microseconds"].notna()]


def against_rivals(frame: pd.DataFrame) -> pd.DataFrame:
    """name, who, theirs, ours (microseconds), times (theirs over ours), correct, problem: a row a rival."""
    ours = frame[frame["who"] == "mxfp4"].set_index("name")["microseconds"]
    rivals = frame[frame["name"].isin(ours.index) & ~frame["who"].str.startswith("mxfp4")]
    mine = pd.to_numeric(rivals["name"].map(ours))
    return rivals.assign(theirs=rivals["microseconds"], ours=mine, times=rivals["microseconds"] / mine)


def problems(frame: pd.DataFrame) -> dict[str, str]:
    """The heading of the column `problem` for a table of `frame`; nothing where no row has one."""
    return {"problem": "problem"} if frame["problem"].notna().any() else {}


def sizes_of_rotation(name: str) -> pd.DataFrame:
    """source, quantity, ratio: how much H32 costs over H16, by P1, by bytes, by code and by measurement."""
    stated = published.figure("h16-h32")
    code = isa().set_index(["arch", "kernel"])["instructions"]
    found = [
        (stated.source, "kernel throughput, H16 : H32", stated.low),
        ("roofline", "bytes moved, H32 : H16", 1.0),
    ]
    for arch, chips in ARCHS.items():
        ratio = code[arch, "quantize h32, both"] / code[arch, "quantize h16, both"]
        found.append((f"{arch} ({chips})", "instructions of the quantizer, H32 : H16", ratio))
    time = rows(name).query("who == 'mxfp4'").drop_duplicates("name").set_index("name")["microseconds"]
    if {"packed, both, h16", "packed, both, h32"} <= set(time.index):
        found.append(
            (
                device(name).split(",")[0],
                "time of the quantizer, H32 : H16",
                time["packed, both, h32"] / time["packed, both, h16"],
            )
        )
    return pd.DataFrame(found, columns=["source", "quantity", "ratio"])


def ratio_chart(frame: pd.DataFrame, title: str) -> alt.LayerChart:
    """Each quantizer's share of a copy's bandwidth: ours a bar, a rival's a diamond. frame: `quantizers`."""
    who = ["mxfp4", *sorted(set(frame["who"]) - {"mxfp4"})]
    base = alt.Chart(frame).encode(
        y=alt.Y("name:N", title=None, sort=list(dict.fromkeys(frame["name"])), axis=alt.Axis(labelLimit=240)),
        x=alt.X("ratio:Q", title="share of a copy's bandwidth", axis=alt.Axis(format="%")),
        color=alt.Color("who:N", title=None, sort=who, scale=alt.Scale(domain=who, range=list(PALETTE[: len(who)]))),
        tooltip=["name", "who", alt.Tooltip("ratio:Q", format=".1%"), alt.Tooltip("microseconds:Q", format=".1f")],
    )
    layers = [base.transform_filter(alt.datum.who == "mxfp4").mark_bar()]
    if len(who) > 1:
        layers.append(base.transform_filter(alt.datum.who != "mxfp4").mark_point(shape="diamond", size=110, opacity=1))
    whole = alt.Chart(pd.DataFrame({"one": [1.0]})).mark_rule(strokeDash=[4, 3]).encode(x="one:Q")
    return alt.layer(*layers, whole).properties(title=title, height=alt.Step(22))


def cpu(name: str = "cpu") -> pd.DataFrame:
    """The CPU's rows: name, who, milliseconds, processor (the same of processor time), rate (elements a second), times
    (torchao's processor time over theirs, for the same output)."""
    frame = rows(name)
    processor = pd.to_numeric(frame["processor_seconds"])
    theirs = processor[frame["who"] == "torchao"].set_axis(frame["name"][frame["who"] == "torchao"])
    base = pd.to_numeric(frame["name"].map(theirs))
    rate = pd.to_numeric(frame["elements_per_second"])
    return frame.assign(
        milliseconds=frame["microseconds"] / 1e3, processor=processor * 1e3, rate=rate, times=base / processor
    )
