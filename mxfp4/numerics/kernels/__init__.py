"""Kernels, each beside its plain-torch twin of the same signature: the oracle, and the path where nothing else runs.

A Backend is the kernels of one dispatch key; the operators (`numerics/ops`) register each under its key. The CPU runs C
where there is a compiler, else the twins.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from mxfp4.numerics import fp8, hadamard, nvfp4, quest, reference
from mxfp4.numerics.kernels.cpu import quantize as quantize_cpu
from mxfp4.numerics.operand_plan import OperandPlan
from mxfp4.numerics.reference import Outputs

HAS_TRITON = importlib.util.find_spec("triton") is not None


def _scale_product(y: Tensor, a: Tensor | None, b: Tensor | None, constant: float, times: int, dtype) -> Tensor:
    for factor in (a, b, *[constant] * times):
        y = y if factor is None else y * factor
    return y.to(dtype, copy=a is b is None and not times)


@dataclass
class Backend:
    """The kernels of a dispatch key; by default plain torch on any device: the twins."""

    quantize_matrix: Callable = reference.quantize_matrix
    quantize_nvfp4: Callable = nvfp4.quantize_nvfp4
    rotate_matrix: Callable = hadamard.rotate_matrix
    scaled_fp8: Callable = fp8.scaled_fp8
    fp8_per_tensor: Callable | None = None
    scale_product: Callable = _scale_product
    round_blocks: Callable = quest.round_blocks


def _quantize_on_cpu(x, row, col, seed):
    if quantize_cpu.kernel() is None:
        return reference.quantize_matrix(x, row, col, seed)
    return quantize_cpu.quantize_matrix(x, row, col, seed)


def _scaled_fp8_on_cpu(x, scale, elem, dtype):
    return (fp8 if quantize_cpu.kernel() is None else quantize_cpu).scaled_fp8(x, scale, elem, dtype)


def _fp8_per_tensor_on_cpu(x, elem, dtype):
    if quantize_cpu.kernel() is None:
        scale = fp8.fp8_scale(x, elem)
        return fp8.scaled_fp8(x, scale, elem, dtype), scale.reciprocal()
    return quantize_cpu.fp8_per_tensor(x, elem, dtype)


def _in_triton(module: str, name: str) -> Callable:
    """A function of `kernels/triton/<module>.py`, imported at its first call: importing Triton takes a while."""

    @cache
    def found() -> Callable:
        return getattr(importlib.import_module(f"mxfp4.numerics.kernels.triton.{module}"), name)

    return lambda *args: found()(*args)


BACKENDS = {
    "CPU": Backend(_quantize_on_cpu, scaled_fp8=_scaled_fp8_on_cpu, fp8_per_tensor=_fp8_per_tensor_on_cpu),
    "CompositeExplicitAutograd": Backend(),
}
if HAS_TRITON:
    BACKENDS["CUDA"] = Backend(
        quantize_matrix=_in_triton("quantize", "quantize_matrix"),
        quantize_nvfp4=_in_triton("nvfp4", "quantize_nvfp4"),
        rotate_matrix=_in_triton("rotate", "rotate_matrix"),
        scaled_fp8=_in_triton("fp8", "scaled_fp8"),
        scale_product=_in_triton("nvfp4", "scale_product"),
        round_blocks=_in_triton("quest", "round_blocks"),
    )
    _library = torch.library.Library("mxfp4", "FRAGMENT")
    _library.impl("random_signs", _in_triton("signs", "random_signs"), "CUDA")  # which `philox` defines


def backend_of(t: Tensor) -> Backend:
    """What the dispatcher chooses for `t`, for calls beside it."""
    return BACKENDS.get(t.device.type.upper(), BACKENDS["CompositeExplicitAutograd"])


def quantize_matrix(
    x: Tensor, row: OperandPlan | None, col: OperandPlan | None, seed: Tensor | None
) -> tuple[Outputs, Outputs]:
    """Quantize x [R, C] along C as `row` says and along R as `col` says, on the device of x; shapes as in the twin."""
    return backend_of(x).quantize_matrix(x, row, col, seed)
