"""The three GEMMs of a linear layer as pictures: what a recipe does to each operand, and what a transpose changes.

Matrices are drawn as they are stored: X is tokens x C_in, W is C_out x C_in, G = dL/dY is tokens x C_out.
"""

from __future__ import annotations

from html import escape
from typing import NamedTuple

import altair as alt
import pandas as pd
import torch

import mxfp4
from mxfp4.layers.recipe import GEMMS, TENSORS, Operand, Recipe, recipe
from mxfp4.pages.charts import PALETTE


class Product(NamedTuple):
    """One GEMM: its title, formula and contraction axis."""

    title: str
    formula: str
    axis: str


PRODUCTS = {
    "fprop": Product("Fprop", "Y = X Wᵀ", "C_in"),
    "dgrad": Product("Dgrad", "dX = G W", "C_out"),
    "wgrad": Product("Wgrad", "dW = Gᵀ X", "tokens"),
}
AXES = {"x": ("tokens", "C_in"), "w": ("C_out", "C_in"), "g": ("tokens", "C_out")}
"""{operand: (rows, columns)}"""
NAMES = {"x": "X", "w": "W", "g": "G"}
CELLS = 8
"""Cells along each side of a drawn matrix; a block is drawn four cells long."""


class GemmDiagram:
    """The three GEMMs under one recipe: each operand with its format, the direction of its blocks and what is applied.

    Raises ValueError for an unknown recipe.
    """

    def __init__(self, name: str):
        self.recipe = recipe(name)

    def __repr__(self) -> str:
        return "\n".join(
            f"{p.title}: {p.formula}, contracted over {p.axis}: "
            + "; ".join(f"{NAMES[t]} {describe(o, p.axis)}" for t, o in operands(self.recipe, gemm))
            for gemm, p in PRODUCTS.items()
        )

    def _repr_html_(self) -> str:
        rows = "".join(_row(self.recipe, gemm) for gemm in GEMMS)
        return f'<div class="mx-gemms" role="img" aria-label="{escape(repr(self))}">{rows}</div>'


def operands(made: Recipe, gemm: str) -> list[tuple[str, Operand]]:
    """(name of the tensor, how the recipe quantizes it) of the two operands of a GEMM."""
    pair = getattr(made, gemm)
    return list(zip(TENSORS[gemm], (pair.a, pair.b), strict=True))


def describe(operand: Operand, axis: str) -> str:
    """An operand in words: "MXFP4, blocks 1x32 along C_in, H16, stochastic rounding"."""
    return ", ".join(_words(operand, axis))


def _words(operand: Operand, axis: str) -> list[str]:
    words = [operand.format.upper() + (f" {operand.elem.upper()}" if operand.elem else "")]
    size = operand.block_size
    if size > 1:
        words.append(f"blocks {size}x{size}" if operand.block == "2d" else f"blocks 1x{size} along {axis}")
    if operand.hadamard:
        words.append(_rotation(operand.hadamard))
    if operand.rounding == "stochastic":
        words.append("stochastic rounding")
    return words


def _rotation(name: str) -> str:
    kind, size = name.rstrip("0123456789"), name.lstrip("abcdefghijklmnopqrstuvwxyz")
    return {"h": "H{}", "hh": "H{} along both axes", "rht": "random H{}", "frht": "H{} with fixed random signs"}[
        kind
    ].format(size)


def _html(text: str) -> str:
    return escape(text).replace("C_in", "C<sub>in</sub>").replace("C_out", "C<sub>out</sub>")


def _row(made: Recipe, gemm: str) -> str:
    p = PRODUCTS[gemm]
    first, second = (_operand(tensor, operand, p.axis) for tensor, operand in operands(made, gemm))
    return (
        f'<div class="mx-gemm"><p><strong>{p.title}</strong><br>{escape(p.formula)}<br>'
        f"<small>sum over {_html(p.axis)}</small></p>{first}<span>·</span>{second}</div>"
    )


def _operand(tensor: str, operand: Operand, axis: str) -> str:
    first, *rest = _words(operand, axis)
    chips = f'<b class="mx-format-{operand.format}">{escape(first)}</b>' + "".join(f"<br>{_html(w)}" for w in rest)
    rows, columns = AXES[tensor]
    return (
        f'<div class="mx-operand"><div>{_matrix(operand, vertical=axis == rows)}</div>'
        f"<small><strong>{NAMES[tensor]}</strong>: {_html(rows)} × {_html(columns)}<br>{chips}</small></div>"
    )


def _matrix(operand: Operand, *, vertical: bool) -> str:
    """An SVG of the stored matrix, cut into its blocks. vertical: the contraction axis runs down the rows."""
    side, cell = 64, 64 // CELLS
    wide, high = (4, 4) if operand.block == "2d" else (1, 4) if vertical else (4, 1)
    if operand.block_size == 1:
        wide = high = CELLS
    blocks = "".join(
        f'<rect x="{x * cell + 0.5}" y="{y * cell + 0.5}" width="{wide * cell - 1}" height="{high * cell - 1}"/>'
        for y in range(0, CELLS, high)
        for x in range(0, CELLS, wide)
    )
    arrow = (
        f'<path d="M{side + 6} 4 V{side - 6}" marker-end="none"/><path d="M{side + 3} {side - 8} l3 6 l3 -6"/>'
        if vertical
        else f'<path d="M4 {side + 6} H{side - 6}"/><path d="M{side - 8} {side + 3} l6 3 l-6 3"/>'
    )
    return f'<svg viewBox="0 0 {side + 11} {side + 11}" class="mx-format-{operand.format}" aria-hidden="true">{blocks}{arrow}</svg>'


def transpose_changes(*, size: int = 32, seed: int = 0) -> pd.DataFrame:
    """A normal matrix [size, size] quantized along its rows and, for the transpose, along its columns.

    Columns: blocks ("1x32" or "32x32"), row, column, fprop and dgrad (the two quantized values), differ.
    """
    w = torch.randn(size, size, generator=torch.Generator().manual_seed(seed))
    frames = []
    for name, block in (("1x32", "1d"), ("32x32", "2d")):
        along_rows = mxfp4.quantize(w, block=block).dequantize()
        along_columns = mxfp4.quantize(w.T.contiguous(), block=block).dequantize().T
        cells = pd.DataFrame({"row": range(size)}).merge(pd.DataFrame({"column": range(size)}), how="cross")
        cells = cells.assign(blocks=name, fprop=along_rows.flatten().tolist(), dgrad=along_columns.flatten().tolist())
        frames.append(cells.assign(differ=cells["fprop"] != cells["dgrad"]))
    return pd.concat(frames, ignore_index=True)


def transpose_chart(frame: pd.DataFrame, *, title: str) -> alt.FacetChart:
    """`transpose_changes` as two maps: a cell is marked where the two products read different values of W."""
    base = alt.Chart(frame).mark_rect(stroke="white", strokeWidth=0.3)
    cells = base.encode(
        x=alt.X("column:O", title="C_in", axis=alt.Axis(labels=False, ticks=False)),
        y=alt.Y("row:O", title="C_out", axis=alt.Axis(labels=False, ticks=False)),
        color=alt.Color(
            "differ:N", title=None, scale=alt.Scale(domain=[False, True], range=["#c9d1d9", PALETTE[1]]),
            legend=alt.Legend(labelExpr="datum.value ? 'Fprop and Dgrad read different values' : 'the same value'"),
        ),
        tooltip=["row", "column", alt.Tooltip("fprop:Q", title="read by Fprop"), alt.Tooltip("dgrad:Q", title="read by Dgrad")],
    )  # fmt: skip
    return cells.properties(width=260, height=260).facet(
        facet=alt.Facet("blocks:N", title=None, header=alt.Header(labelExpr="'blocks ' + datum.value")), columns=2
    ).properties(title=title)  # fmt: skip
