"""MXFP4 quantization for training: formats, Hadamard rotations, GEMMs, layers and recipes.

import mxfp4
q = mxfp4.quantize(x, hadamard=mxfp4.Hadamard(16))     # x: [M, K], blocks of 32 along K
y = mxfp4.matmul(q, mxfp4.quantize(w, hadamard=mxfp4.Hadamard(16)))
model = mxfp4.convert(model, "mxfp4+h16")              # train with it
frame = mxfp4.records("gpu")                           # what the recorded runs were evaluated at
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mxfp4.layers.convert import convert
from mxfp4.layers.linear import MXFP4Linear, set_step
from mxfp4.layers.recipe import RECIPES, Gemm, Operand, Recipe, recipe
from mxfp4.numerics.hadamard import Hadamard, hadamard_transform
from mxfp4.numerics.ops.matmul import matmul
from mxfp4.numerics.ops.quantize import fake_quantize, fake_quantize_pair, quantize, quantize_pair
from mxfp4.numerics.tensor import MXTensor
from mxfp4.numerics.version import SEMANTICS_VERSION

__version__ = "0.1.0"
__all__ = [
    "RECIPES",
    "SEMANTICS_VERSION",
    "Gemm",
    "Hadamard",
    "MXFP4Linear",
    "MXTensor",
    "Operand",
    "Recipe",
    "convert",
    "fake_quantize",
    "fake_quantize_pair",
    "hadamard_transform",
    "matmul",
    "quantize",
    "quantize_pair",
    "recipe",
    "records",
    "set_step",
]

if TYPE_CHECKING:
    from mxfp4.studies.records_frame import records


def __getattr__(name: str) -> Any:
    """`records` is found when it is asked for: what it needs (pandas, the experiments) is slow to import."""
    if name == "records":
        from mxfp4.studies.records_frame import records

        return records
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
