"""What the chapter on the format shows, as frames: every number comes from a call of mxfp4.quantize.

Blocks are 32 values. "Place" is where a block's maximum lies between two powers of two: 1 to 2.
"""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt
import pandas as pd
import torch

import mxfp4
from mxfp4.numerics.formats import BLOCK, E2M1, E8M0_BIAS, ELEMS, decode, e8m0_value
from mxfp4.numerics.scale_rules import SCALE_RULES
from mxfp4.pages.charts import PALETTE


def codes() -> pd.DataFrame:
    """The codes of E2M1 without sign: code, bits and value."""
    half = 1 << (E2M1.bits - 1)
    values = decode(torch.arange(half, dtype=torch.uint8), E2M1).tolist()
    return pd.DataFrame({"code": range(half), "bits": [f"{c:04b}" for c in range(half)], "value": values})


def formats() -> pd.DataFrame:
    """The element formats: bits, largest and smallest values, and bits a value with the scale shared by a block."""
    rows = [
        {
            "element": f.name, "sign, exponent, mantissa bits": f"1, {f.ebits}, {f.mbits}", "largest": f.max,
            "smallest above 0": f.step, "bits a value": f.bits + 8 / BLOCK,
        }
        for f in ELEMS.values()
    ]  # fmt: skip
    return pd.DataFrame(rows)


def one_block(
    rules: Sequence[str] = SCALE_RULES, *, amax: float = 6.75, rounding: str = "nearest", seed: int = 0
) -> pd.DataFrame:
    """One normal block, scaled to maximum magnitude `amax`, under each rule.

    Columns: rule, element (by descending value), value, quantized, error, scale, byte (E8M0), clipped.
    """
    x = torch.randn(BLOCK, generator=torch.Generator().manual_seed(seed))
    x = (x * (amax / x.abs().max())).sort(descending=True).values
    frames = []
    for rule in rules:
        q = mxfp4.quantize(x[None], scale_rule=rule, rounding=rounding, seed=seed)
        scale, y = float(e8m0_value(q.scale)), q.dequantize()[0]
        frame = {"rule": rule, "element": range(BLOCK), "value": x.tolist(), "quantized": y.tolist()}
        clipped = (x.abs() > E2M1.max * scale).tolist()
        frames.append(pd.DataFrame({**frame, "scale": scale, "byte": int(q.scale), "clipped": clipped}))
    found = pd.concat(frames, ignore_index=True)
    found["error"] = found["quantized"] - found["value"]
    return found


def staircase(rules: Sequence[str] = SCALE_RULES, *, amax: float = 6.75, points: int = 401) -> pd.DataFrame:
    """Values from 0 to `amax`, rounded to nearest in a block whose maximum is `amax`: rule, value, quantized."""
    grid = torch.linspace(0.0, amax, points)
    blocks = torch.zeros(points, BLOCK)
    blocks[:, 0], blocks[:, 1] = grid, amax
    frames = []
    for rule in rules:
        y = mxfp4.quantize(blocks, scale_rule=rule).dequantize()[:, 0]
        frames.append(pd.DataFrame({"rule": rule, "value": grid.tolist(), "quantized": y.tolist()}))
    return pd.concat(frames, ignore_index=True)


def scale_choice(rules: Sequence[str] = SCALE_RULES, *, points: int = 256) -> pd.DataFrame:
    """Block maxima from 1 to 2 under each rule: rule, place, exponent (of the scale), filled (maximum / scale)."""
    place = torch.linspace(1.0, 2.0, points + 1)[:-1]
    blocks = torch.zeros(points, BLOCK)
    blocks[:, 0] = place
    frames = []
    for rule in rules:
        byte = mxfp4.quantize(blocks, scale_rule=rule).scale[:, 0]
        filled = place / e8m0_value(byte)
        exponent = (byte.to(torch.int32) - E8M0_BIAS).tolist()
        frames.append(
            pd.DataFrame({"rule": rule, "place": place.tolist(), "exponent": exponent, "filled": filled.tolist()})
        )
    return pd.concat(frames, ignore_index=True)


def error_by_place(
    rules: Sequence[str] = SCALE_RULES, *, rounding: str = "nearest", blocks: int = 512, points: int = 49, seed: int = 0
) -> pd.DataFrame:
    """Normal blocks whose maximum is moved to each place: rule, place, error (relative L2), clipped (share)."""
    x = torch.randn(blocks, BLOCK, generator=torch.Generator().manual_seed(seed))
    x = x / x.abs().amax(dim=1, keepdim=True)
    rows = []
    for place in torch.linspace(1.0, 2.0, points)[:-1].tolist():
        scaled = x * place
        for rule in rules:
            q = mxfp4.quantize(scaled, scale_rule=rule, rounding=rounding, seed=seed)
            error = float((q.dequantize() - scaled).norm() / scaled.norm())
            clipped = float((scaled.abs() > E2M1.max * e8m0_value(q.scale)).float().mean())
            rows.append({"rule": rule, "place": place, "error": error, "clipped": clipped})
    return pd.DataFrame(rows)


def rounding_means(
    *, rule: str = "rceil", amax: float = 6.0, draws: int = 4096, points: int = 121, seed: int = 0
) -> pd.DataFrame:
    """Mean over `draws` of each value from 0 to `amax`, rounded to nearest and stochastically.

    Columns: rounding, value, mean, bias (mean - value).
    """
    grid = torch.linspace(0.0, amax, points)
    blocks = torch.zeros(draws, points, BLOCK)
    blocks[..., 0], blocks[..., 1] = grid, amax
    frames = []
    for rounding in ("nearest", "stochastic"):
        y = mxfp4.fake_quantize(blocks, scale_rule=rule, rounding=rounding, seed=seed)[..., 0].double().mean(dim=0)
        frames.append(pd.DataFrame({"rounding": rounding, "value": grid.tolist(), "mean": y.tolist()}))
    found = pd.concat(frames, ignore_index=True)
    found["bias"] = found["mean"] - found["value"]
    return found


def packing(values: Sequence[float] = (1.0, 2.0, -0.5, 6.0)) -> pd.DataFrame:
    """How `values` (at most 32, an even number) at the head of a block are packed: a row a byte."""
    block = torch.zeros(1, BLOCK)
    block[0, : len(values)] = torch.tensor(list(values))
    block[0, -1] = E2M1.max  # so that the scale is 1
    q = mxfp4.quantize(block)
    rows = []
    for i in range(0, len(values), 2):
        byte = int(q.qdata[0, i // 2])
        rows.append(
            {
                "elements": f"{i}, {i + 1}", "values": f"{values[i]:g}, {values[i + 1]:g}",
                "high nibble": f"{byte >> 4:04b}", "low nibble": f"{byte & 15:04b}", "byte": f"0x{byte:02X}",
            }
        )  # fmt: skip
    return pd.DataFrame(rows)


EXPONENTS = {
    "floor": "floor(l) - 2",
    "even": "floor(l) - 2 + (pow(2, l - floor(l)) >= 1.75 ? 1 : 0)",
    "ceil": "ceil(l) - 2",
    "rceil": "ceil(log(block_maximum / 6) / LN2)",
}
"""The exponent of the scale by rule, as Vega expressions; l is the binary logarithm of the block's maximum."""
LARGEST_VALUE = 8.0


def number_line(*, title: str, rule: str = "even", maximum: float = 6.75, value: float = 2.4) -> alt.LayerChart:
    """The magnitudes that a block can hold, and where one value goes: sliders for value, block maximum, rule, rounding.

    The page computes all of it, with no server. Stochastic rounding shows both neighbours with their probabilities.
    """
    params = [
        alt.param(name="value", value=value, bind=alt.binding_range(min=0, max=LARGEST_VALUE, step=0.05, name="value ")),
        alt.param(name="block_maximum", value=maximum,
                  bind=alt.binding_range(min=2, max=LARGEST_VALUE, step=0.05, name="largest value of the block ")),
        alt.param(name="rule", value=rule, bind=alt.binding_select(options=list(EXPONENTS), name="scale rule ")),
        alt.param(name="rounding", value="nearest",
                  bind=alt.binding_radio(options=["nearest", "stochastic"], name="rounding ")),
        alt.param(name="shown", expr="min(value, block_maximum)"),
        alt.param(name="l", expr="log(block_maximum) / LN2 + 1e-12"),
        alt.param(name="scale", expr="pow(2, " + " : ".join(f"rule == '{r}' ? {e}" for r, e in EXPONENTS.items()) + " : 0)"),
        alt.param(name="inside", expr=f"min(shown / scale, {E2M1.max:g})"),
        alt.param(name="gap", expr="inside < 2 ? 0.5 : inside < 4 ? 1 : 2"),
        alt.param(name="below", expr="floor(inside / gap) * gap"),
        alt.param(name="share", expr="(inside - below) / gap"),
        # A tie goes to the code whose last bit is 0: of two neighbours, the one with an even multiple of the gap.
        alt.param(name="up", expr="rounding == 'stochastic' ? share : share > 0.5 || (share == 0.5 && (below / gap) % 2 == 1) ? 1 : 0"),
    ]  # fmt: skip
    axis = alt.X("x:Q", title="magnitude", scale=alt.Scale(domain=[0, LARGEST_VALUE]))
    codes_ = alt.Chart(codes()).transform_calculate(x="datum.value * scale", text="format(datum.value, '.3~g')")
    ticks = codes_.transform_filter(f"datum.x <= {LARGEST_VALUE}")
    line = ticks.mark_tick(size=26, thickness=2, color=PALETTE[6]).encode(x=axis, y=alt.value(60))
    names = ticks.mark_text(dy=26).encode(x="x:Q", y=alt.value(60), text="text:N")
    one = alt.Chart(pd.DataFrame({"end": [0, 1]}))
    ends = one.transform_calculate(
        x="(below + datum.end * gap) * scale", probability="datum.end ? up : 1 - up",
        text="rounding == 'stochastic' && datum.probability > 0 ? format(datum.probability, '.0%') : ''",
    ).transform_filter("datum.probability > 0")  # fmt: skip
    stored = ends.mark_circle(size=260, color=PALETTE[0]).encode(
        x="x:Q", y=alt.value(60), opacity=alt.Opacity("probability:Q", scale=alt.Scale(domain=[0, 1], range=[0.15, 1]), legend=None),
    )  # fmt: skip
    chances = ends.mark_text(dy=-24, fontWeight=600).encode(x="x:Q", y=alt.value(60), text="text:N")
    at = one.transform_filter("datum.end == 0").transform_calculate(
        x="shown",
        text=(
            "'value ' + format(shown, '.2f') + ', scale ' + format(scale, '~r') + (shown / scale > "
            f"{E2M1.max:g} ? ', clipped to ' + format({E2M1.max:g} * scale, '~r') : '')"
        ),
    )
    before = at.mark_point(shape="triangle-down", size=140, color=PALETTE[1], filled=True).encode(
        x="x:Q", y=alt.value(30)
    )
    said = at.mark_text(align="left", fontSize=13, fontWeight=600).encode(x=alt.value(4), y=alt.value(8), text="text:N")
    chart = alt.layer(line, names, stored, chances, before, said).add_params(*params)
    return chart.properties(title=title, height=110)
