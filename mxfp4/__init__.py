"""MXFP4 quantization for training: formats, Hadamard rotations, GEMMs, layers and recipes.

import mxfp4
q = mxfp4.quantize(x, hadamard=mxfp4.Hadamard(16))     # x: [M, K], blocks of 32 along K
y = mxfp4.matmul(q, mxfp4.quantize(w, hadamard=mxfp4.Hadamard(16)))
model = mxfp4.convert(model, "mxfp4+h16")              # train with it
print(mxfp4.report(model))                             # what was converted and what was not
frame = mxfp4.records("gpu")                           # what the recorded runs were evaluated at

A name is imported when it is first asked for, so `import mxfp4` costs milliseconds and `mxfp4 --help` needs no PyTorch.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mxfp4.layers.convert import convert, default_filter
    from mxfp4.layers.linear import MXFP4Linear, set_step
    from mxfp4.layers.recipe import RECIPES, Gemm, Operand, Recipe, recipe
    from mxfp4.layers.report import report
    from mxfp4.layers.roles import Names
    from mxfp4.numerics.gemm_backends.choice import set_gemm_backend
    from mxfp4.numerics.hadamard import Hadamard, hadamard_transform
    from mxfp4.numerics.ops.matmul import matmul
    from mxfp4.numerics.ops.quantize import fake_quantize, fake_quantize_pair, quantize, quantize_pair
    from mxfp4.numerics.tensor import MXTensor
    from mxfp4.numerics.version import SEMANTICS_VERSION
    from mxfp4.studies.records_frame import records

__version__ = "0.1.0"

_MODULES = {
    "mxfp4.layers.convert": ("convert", "default_filter"),
    "mxfp4.layers.linear": ("MXFP4Linear", "set_step"),
    "mxfp4.layers.recipe": ("RECIPES", "Gemm", "Operand", "Recipe", "recipe"),
    "mxfp4.layers.report": ("report",),
    "mxfp4.layers.roles": ("Names",),
    "mxfp4.numerics.gemm_backends.choice": ("set_gemm_backend",),
    "mxfp4.numerics.hadamard": ("Hadamard", "hadamard_transform"),
    "mxfp4.numerics.ops.matmul": ("matmul",),
    "mxfp4.numerics.ops.quantize": ("fake_quantize", "fake_quantize_pair", "quantize", "quantize_pair"),
    "mxfp4.numerics.tensor": ("MXTensor",),
    "mxfp4.numerics.version": ("SEMANTICS_VERSION",),
    "mxfp4.studies.records_frame": ("records",),
}
"""{module: the public names that it defines}. A new name goes here, in __all__ and under TYPE_CHECKING."""
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "RECIPES",
    "SEMANTICS_VERSION",
    "Gemm",
    "Hadamard",
    "MXFP4Linear",
    "MXTensor",
    "Names",
    "Operand",
    "Recipe",
    "convert",
    "default_filter",
    "fake_quantize",
    "fake_quantize_pair",
    "hadamard_transform",
    "matmul",
    "quantize",
    "quantize_pair",
    "recipe",
    "records",
    "report",
    "set_gemm_backend",
    "set_step",
]


def __getattr__(name: str) -> Any:
    """Import the public `name` and keep it, so that this is called once a name."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    if "torch" in sys.modules:
        _define_operators()
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _define_operators() -> None:
    """Define the torch operators that saved torch.export programs and compiled packages name."""
    for module in ("numerics.ops.packed_operands", "numerics.ops.rotate", "layers.quest"):
        importlib.import_module(f"mxfp4.{module}")


class _AfterTorch(importlib.abc.MetaPathFinder):
    """Defines the operators when PyTorch is imported after this package, once."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                if not any(name.startswith(("mxfp4.numerics", "mxfp4.layers")) for name in sys.modules):
                    _define_operators()  # else one of those is importing PyTorch, and not ready itself

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if "torch" in sys.modules:
    _define_operators()
else:
    sys.meta_path.insert(0, _AfterTorch())
