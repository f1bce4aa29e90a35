"""Transposition consistency: do the two GEMMs that read one tensor see the same numbers? (P2's diagnosis.)

Each of X, W and G is contracted along one axis in one GEMM and along the other in another (X: C_in in fprop, tokens
in wgrad; W: C_in in fprop, C_out in dgrad; G: C_out in dgrad, tokens in wgrad). With 1x32 blocks a value then falls
into two blocks with two maxima, so it can get two scales and two codes. With 32x32 blocks it has one.

Metrics of a tensor t ("x", "w", "g", gemm ""), quantized along its rows, R, and along its columns, C, both rotated
back to the basis of t:

| metric            | meaning                                                                             |
|-------------------|-------------------------------------------------------------------------------------|
| scale_changes     | share of the values whose scale differs between R and C                             |
| code_changes      | share of the values whose element differs (-0 and 0 are one)                        |
| changes           | share of the values for which scale or element differs                              |
| mismatch          | norm of R - C over norm of t                                                        |
| mismatch_to_error | norm of R - C over norm of R - t: 1.41 for two independent errors of one size       |
| mismatch_bias     | <R - C, t> / <t, t>                                                                 |

Shares exist where both operands are unrotated MXFP4. Effects, tensor "dx" (gemm "dgrad") and "dw" (gemm "wgrad"), with
the unquantized G: `mismatch`, norm of G R(W) - G C(W) over norm of G W, that is, the weight that the forward used
against the one that the backward uses; `mismatch_bias`, its projection on G W; `reading_error`, norm of G C(W) - G W
over the norm of G W, to judge it by. Likewise G^T R(X) and G^T C(X) for dW.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mxfp4.diagnostics.operand_error import (
    Captured,
    Rows,
    block_scales,
    compare,
    from_basis,
    in_basis,
    prepared,
    values,
)
from mxfp4.layers.gemms import AXES, STREAMS
from mxfp4.layers.recipe import GEMMS, TENSORS, Recipe
from mxfp4.numerics.formats import E2M1, e8m0_value
from mxfp4.numerics.reference import block_amax
from mxfp4.numerics.scale_rules import scale_byte

TILE = 64
VARIANTS = (
    "mxfp4", "mxfp4+floor", "mxfp4+ceil", "mxfp4+rceil", "mxfp4+h16", "mxfp4+2d", "mxfp4+2d+rceil", "mxfp4+2d+hh16",
)  # fmt: skip
"""What an arm without FP4 is measured with: 1D under each scale rule, with a rotation, and 2D."""


def gemms_of(tensor: str) -> tuple[str, str]:
    """The two GEMMs that read `tensor`, in the order of GEMMS."""
    first, second = (g for g in GEMMS if tensor in TENSORS[g])
    return first, second


@torch.no_grad()
def transposition_rows(layer: Captured, recipe: Recipe, seed: Tensor | None, made: dict | None = None) -> Rows:
    """The metrics of the module's table, for the tensors that `recipe` (of one layer) quantizes to FP4 both ways."""
    made = made or prepared(layer, recipe, seed)
    rows: Rows = {}
    views: dict[str, tuple[Tensor, Tensor]] = {}
    for name in ("x", "w", "g"):
        pair = [_view(layer, recipe, gemm, name, seed, made) for gemm in gemms_of(name)]
        if any(view is None for view in pair):
            continue
        (r, r_scale), (c, c_scale) = pair
        t = getattr(layer, name).float()
        views[name] = r, c
        d = r - c
        tt = (t * t).sum()
        found = {
            "mismatch": ((d * d).sum() / tt).sqrt(),
            "mismatch_to_error": ((d * d).sum() / ((r - t) ** 2).sum()).sqrt(),
            "mismatch_bias": (d * t).sum() / tt,
        }
        if r_scale is not None and c_scale is not None:
            scale, code = r_scale != c_scale, r / r_scale != c / c_scale
            found["scale_changes"] = scale.float().mean()
            found["code_changes"] = code.float().mean()
            found["changes"] = (scale | code).float().mean()
        rows |= {("", name, metric): value for metric, value in found.items()}
    g = layer.g.float()
    if "w" in views:
        r, c = views["w"]
        rows |= _effect("dgrad", "dx", g @ r, g @ c, layer.exact("dgrad"))
    if "x" in views:
        r, c = views["x"]
        rows |= _effect("wgrad", "dw", g.t() @ r, g.t() @ c, layer.exact("wgrad"))
    return rows


def _view(layer: Captured, recipe: Recipe, gemm: str, name: str, seed, made):
    """(what `gemm` sees of the tensor, in the tensor's basis; scales per element or None), or None if it is not FP4."""
    op, axis, stream = recipe.operands()[gemm, name], AXES[gemm, name], STREAMS[gemm, name]
    if op.format not in ("mxfp4", "nvfp4"):
        return None
    value = from_basis(values(made[gemm, name]), op, axis, seed, stream)
    if op.format != "mxfp4" or op.hadamard is not None or op.prescaled:
        return value, None
    scale = block_scales(in_basis(getattr(layer, name), op, axis, seed, stream), op)
    return value, scale if axis == -1 else scale.t()


def _effect(gemm: str, name: str, row: Tensor, col: Tensor, exact: Tensor) -> Rows:
    d, rr = row - col, (exact * exact).sum()
    return {
        (gemm, name, "mismatch"): ((d * d).sum() / rr).sqrt(),
        (gemm, name, "mismatch_bias"): (d * exact).sum() / rr,
        (gemm, name, "reading_error"): compare(col, exact)["error"],
    }


@torch.no_grad()
def tile_rows(layer: Captured, rule: str = "even") -> Rows:
    """log2 of the scales of the first 64x64 values of W, blocks along each axis, as rows to be kept in a record.

    Metrics "tile_row:i:j" (block j of row i: 64 x 2) and "tile_col:i:j" (block i of column j: 2 x 64). Empty for a
    smaller weight.
    """
    w = layer.w[:TILE, :TILE].float()
    if w.shape != (TILE, TILE):
        return {}

    def log2_scales(t: Tensor) -> Tensor:
        return e8m0_value(scale_byte(block_amax(t.contiguous(), "1d"), E2M1, rule)).log2()

    by_row, by_col = log2_scales(w), log2_scales(w.t()).t()
    rows: Rows = {}
    for kind, grid in (("row", by_row), ("col", by_col)):
        for i in range(grid.shape[0]):
            for j in range(grid.shape[1]):
                rows["", "w", f"tile_{kind}:{i}:{j}"] = grid[i, j]
    return rows
