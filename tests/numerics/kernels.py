"""The Triton kernels for the tests: compiled where there is a GPU, else interpreted on the CPU."""

from __future__ import annotations

import importlib.util
import os
import sys
from contextlib import contextmanager
from types import ModuleType

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def load(name: str) -> ModuleType:
    """`mxfp4.numerics.kernels.<name>`; without a GPU a second copy of it whose kernels Triton interprets.

    Triton decides between the two when a function is decorated, so the copy is made with TRITON_INTERPRET set.
    """
    pytest.importorskip("triton")
    full = f"mxfp4.numerics.kernels.{name}"
    if DEVICE == "cuda":
        return importlib.import_module(full)
    alias = f"interpreted_{name}"
    if alias not in sys.modules:
        origin = importlib.util.find_spec(full).origin
        copy = importlib.util.module_from_spec(importlib.util.spec_from_file_location(alias, origin))
        sys.modules[alias] = copy
        with _interpreting():
            copy.__spec__.loader.exec_module(copy)
    return sys.modules[alias]


@contextmanager
def _interpreting():
    """TRITON_INTERPRET set, and the modules that the kernels share put aside, to be imported anew meanwhile."""
    package = sys.modules["mxfp4.numerics.kernels"]
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
