"""The Triton kernels for the tests: compiled where there is a GPU, else interpreted on the CPU."""

from __future__ import annotations

import importlib.util
import os
import sys
from contextlib import contextmanager
from functools import cache
from types import ModuleType

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def load(name: str) -> ModuleType:
    """`mxfp4.numerics.kernels.triton.<name>`; without a GPU a second copy of it whose kernels Triton interprets.

    Triton decides between the two when a function is decorated, so the copy is made with TRITON_INTERPRET set.
    """
    pytest.importorskip("triton")
    full = f"mxfp4.numerics.kernels.triton.{name}"
    if DEVICE == "cuda":
        return importlib.import_module(full)
    alias = f"interpreted_{name}"
    if alias not in sys.modules:
        origin = importlib.util.find_spec(full).origin
        copy = importlib.util.module_from_spec(importlib.util.spec_from_file_location(alias, origin))
        sys.modules[alias] = copy
        _convert_as_chips_do()
        with _interpreting():
            copy.__spec__.loader.exec_module(copy)
    return sys.modules[alias]


@cache
def _convert_as_chips_do() -> None:
    """Make the interpreter round FP32 to BF16 to nearest even, where it truncates, and read BF16's subnormals right."""
    from triton.runtime import interpreter

    original = interpreter._convert_float

    def convert(data, source, target, rounding_mode):
        if (source.name, target.name) == ("bf16", "fp32"):
            return data.astype("uint32") << 16
        if (source.name, target.name, rounding_mode) == ("fp32", "bf16", None):
            return torch.from_numpy(data.copy()).bfloat16().view(torch.int16).numpy().view("uint16")
        return original(data, source, target, rounding_mode)

    interpreter._convert_float = convert


@contextmanager
def _interpreting():
    """TRITON_INTERPRET set, and the modules that the kernels share put aside, to be imported anew meanwhile."""
    package = sys.modules["mxfp4.numerics.kernels.triton"]
    shared = {n: vars(package).pop(n) for n in list(vars(package)) if n.startswith("block_")}
    for n in shared:
        del sys.modules[f"{package.__name__}.{n}"]
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        yield
    finally:
        os.environ.pop("TRITON_INTERPRET") if before is None else os.environ.update(TRITON_INTERPRET=before)
        for n in [n for n in vars(package) if n.startswith("block_")]:
            delattr(package, n)
            del sys.modules[f"{package.__name__}.{n}"]
        for n, module in shared.items():
            setattr(package, n, module)
            sys.modules[f"{package.__name__}.{n}"] = module
