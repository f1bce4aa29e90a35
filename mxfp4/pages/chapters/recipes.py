"""Recipes side by side, and the rotation of both axes shown to cancel, for the chapter on other recipes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pandas as pd
import torch

from mxfp4.analysis.effect import NoProbe
from mxfp4.analysis.study import Study
from mxfp4.diagnostics.operand_error import PRODUCTS, Captured, compare, prepared
from mxfp4.layers.gemms import product
from mxfp4.layers.recipe import GEMMS, Gemm, Operand, Recipe, recipe
from mxfp4.pages import probe_tables

SOURCES = {
    "nvfp4": "NVIDIA, NVFP4",
    "tseng": "Tseng et al.",
    "tetrajet": "TetraJet",
    "quartet": "Quartet",
    "mxfp4+h16+tail15": "P1's, with a BF16 tail",
}
FP8_SOURCES = {
    "fp8": "P1, current scaling",
    "fp8+delayed": "Transformer Engine, AMD's MLPerf runs",
    "fp8-block": "DeepSeek-V3",
}
"""The FP8 recipes that an FP4 recipe may be compared with."""


def recipes_frame(names: Sequence[str]) -> pd.DataFrame:
    """recipe, source, the operands of each GEMM, and what else it does."""
    rows = []
    for name in names:
        made = recipe(name)
        rows.append(
            {
                "recipe": name,
                "source": (SOURCES | FP8_SOURCES).get(name, ""),
                **{g: _pair(getattr(made, g)) for g in GEMMS},
            }
            | ({"fprop": "mxfp4 1d h32, scale by spread"} if made.quest else {})
            | {"besides": _besides(made)}
        )
    return pd.DataFrame(rows)


def _pair(gemm: Gemm) -> str:
    a, b = str(gemm.a), str(gemm.b)
    return a if a == b else f"{a} | {b}"


def _besides(made: Recipe) -> str:
    parts = [f"last {made.bf16_tail:.0%} of the layers in bf16"] if made.bf16_tail else []
    parts += ["backward quantizes the quantized X and W"] if made.requantize else []
    parts += ["backward quantizes the quantized X and W; clipped values have no gradient"] if made.quest else []
    parts += [f"{o.layers} in {o.fprop.a.format}" for o in made.overrides]
    return "; ".join(parts)


def _both(gemm: Gemm, hadamard: str, format: str) -> Gemm:
    return Gemm(*(replace(Operand(format), hadamard=hadamard) for _ in (gemm.a, gemm.b)))


def cancellation_frame(size: int = 16, *, seed: int = 0) -> pd.DataFrame:
    """product, error: of the three products with both axes of every operand rotated and nothing quantized, FP32, against
    the plain products; `left`: the same if the product were left rotated."""
    g = torch.Generator().manual_seed(seed)
    layer = Captured("", *(torch.randn(shape, generator=g) for shape in ((64, 96), (128, 96), (64, 128))))
    used = recipe("fp32")
    used = replace(used, **{gemm: _both(getattr(used, gemm), f"hh{size}", "fp32") for gemm in GEMMS})
    plain = replace(used, **{gemm: Gemm(Operand("fp32"), Operand("fp32")) for gemm in GEMMS})
    made, rows = prepared(layer, used, None), []
    for gemm, name in PRODUCTS.items():
        a, b = ((gemm, t) for t in {"fprop": ("x", "w"), "dgrad": ("g", "w"), "wgrad": ("g", "x")}[gemm])
        back, left = (product(gemm, made[a], made[b], how, torch.float32) for how in (used, plain))
        errors = [float(compare(y, layer.exact(gemm))["error"]) for y in (back, left)]
        rows.append({"product": probe_tables.PRODUCTS[gemm, name], "error": errors[0], "left": errors[1]})
    return pd.DataFrame(rows)


MEASURES = {
    "mismatch of W": ("mismatch", "", "w"),
    "error of W in Fprop": ("error", "fprop", "w"),
    "error of dW": ("error", "wgrad", "dw"),
    "kurtosis of G in Wgrad": ("kurtosis", "wgrad", "g"),
}


def properties_frame(study: Study, arms: Sequence[str]) -> pd.DataFrame:
    """Arm and the MEASURES of its own tensors under its own recipe (means over layers and steps); NaN if not probed."""
    rows = []
    for arm in (a for a in arms if a in study.arms):
        row = {"arm": arm}
        for name, (metric, gemm, tensor) in MEASURES.items():
            try:
                found = probe_tables.select(study.probes, metric, arm=arm, recipes=[arm], what={(gemm, tensor): name})
                row[name] = float(found["value"].mean())
            except NoProbe:
                row[name] = float("nan")
        rows.append(row)
    return pd.DataFrame(rows)
