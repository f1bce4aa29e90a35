"""The Triton kernels for the tests: compiled where there is a GPU, else interpreted on the CPU."""

from __future__ import annotations

import importlib.util
import os
import sys
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
        spec = importlib.util.find_spec(full)
        copy = importlib.util.module_from_spec(importlib.util.spec_from_file_location(alias, spec.origin))
        before = os.environ.get("TRITON_INTERPRET")
        os.environ["TRITON_INTERPRET"] = "1"
        try:
            sys.modules[alias] = copy
            copy.__spec__.loader.exec_module(copy)
        finally:
            os.environ.pop("TRITON_INTERPRET") if before is None else os.environ.update(TRITON_INTERPRET=before)
    return sys.modules[alias]
