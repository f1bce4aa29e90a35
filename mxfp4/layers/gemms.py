"""The three GEMMs of a linear layer on quantized operands.

`quantized_operand`, `operand` and `both_operands` show what a GEMM sees, for diagnostics: made by the layer's code.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mxfp4.layers.operands import Quantized, along_contraction, quantize_operand, quantize_tensor, values_of
from mxfp4.layers.plan import (  # noqa: F401  (the address of some for callers)
    AXES,
    READERS,
    ROTATION,
    STREAMS,
    GemmPlan,
    _layer_plan,
    _operand_plan,
    per_tensor,
    serves_both,
    size_problem,
    token_multiple,
)
from mxfp4.layers.recipe import Operand, Recipe
from mxfp4.numerics.gemm_backends.library import as_dtype, gemm, gemm_dtype
from mxfp4.numerics.operand_plan import OperandPlan, inverse_prescale
from mxfp4.numerics.ops import packed_operands
from mxfp4.numerics.ops.block_quantize import scale_product
from mxfp4.numerics.ops.fp8_block import gemm_fp8_block
from mxfp4.numerics.ops.matmul import OUT_DTYPES
from mxfp4.numerics.ops.rotate import rotated

FP8_MULTIPLE = 16
"""What the library's FP8 GEMM wants the contracted size and the columns to be multiples of."""


def multiply(plan: GemmPlan, a: Quantized, b: Quantized, out_dtype: torch.dtype) -> Tensor:
    """A GEMM of two quantized operands -> [M, N] in `out_dtype`, FP32 accumulation."""
    if plan.units == "mx":
        a, b = along_contraction(a, plan.a), along_contraction(b, plan.b)
        sides = (*a, plan.a.elem, plan.a.block, *b, plan.b.elem, plan.b.block)
        return as_dtype(packed_operands.gemm_packed(*sides, _own(out_dtype)), out_dtype)
    if plan.units == "fp8":
        k, columns = a.data.shape[0 if plan.a.transposed else 1], b.data.shape[1 if plan.b.transposed else 0]
        if k % FP8_MULTIPLE == 0 and columns % FP8_MULTIPLE == 0:
            a, b = along_contraction(a, plan.a), along_contraction(b, plan.b)
            sides = (*a, plan.a.elem, *b, plan.b.elem)
            return as_dtype(packed_operands.gemm_fp8(*sides, _own(out_dtype)), out_dtype)
    if plan.units in ("fp8-block", "blocks"):
        a, b = along_contraction(a, plan.a), along_contraction(b, plan.b)
        made = gemm_fp8_block(*a, plan.a.block, *b, plan.b.block, _own(out_dtype), plan.units == "fp8-block")
        return as_dtype(made, out_dtype)
    dtype, in_backward = gemm_dtype(a.data.device), plan.gemm != "fprop"
    a, b = values_of(a, plan.a, dtype, in_backward), values_of(b, plan.b, dtype, in_backward)
    prescaled = plan.a.prescaled + plan.b.prescaled
    if prescaled and not (a.scale is b.scale is None):  # the factors of a come first
        a, b = (_with_prescale(x, side) for x, side in ((a, plan.a), (b, plan.b)))
        prescaled = 0
    return _product(a, b, plan.both_axes, prescaled, out_dtype)


def _own(dtype: torch.dtype) -> torch.dtype:
    """What units are asked for where a product is wanted in `dtype`."""
    return dtype if dtype in OUT_DTYPES else torch.float32


def _with_prescale(x: Quantized, plan: OperandPlan) -> Quantized:
    if not plan.prescaled:
        return x
    return Quantized(x.data, torch.full((), inverse_prescale(), dtype=torch.float32, device=x.data.device))


def _product(a: Quantized, b: Quantized, both_axes: int, prescaled: int, out_dtype: torch.dtype) -> Tensor:
    """The library's GEMM of values, their factors and 4/3 for each prescaled operand; unrotated along both axes."""
    (a, a_factor), (b, b_factor) = a, b
    if a.dtype != b.dtype:  # one operand in high precision
        a, b = a.float(), b.float()
    if a_factor is b_factor is None and not both_axes and not prescaled:
        return gemm(a, b, out_dtype)
    y = gemm(a, b, torch.float32)
    if a_factor is not None or b_factor is not None or prescaled:
        scaled_dtype = torch.float32 if both_axes else out_dtype
        y = scale_product(y, a_factor, b_factor, inverse_prescale(), prescaled, scaled_dtype)
    # The contracted axes cancelled, the outer ones are still rotated.
    return rotated(y, both_axes, both=True, dtype=out_dtype) if both_axes else y


# What diagnostics look at: (values, factor or None) of an operand, the contraction axis last. Delayed scales are then
# those of a first step; values of FP8 in blocks are rounded to FP32 once more than in the layer's GEMMs.


def quantized_operand(
    t: Tensor, op: Operand, axis: int, seed: Tensor | None, stream: int
) -> tuple[Tensor, Tensor | None]:
    """What a GEMM that contracts `axis` (-1 or 0) sees of the 2-D tensor `t`.

    Returns (values with the contraction axis last, in the dtype that carries them; a factor for the product or None).
    The factor undoes per-tensor scales (FP8, NVFP4) and the prescale.
    """
    gemm_name, tensor = next(key for key, a in AXES.items() if a == axis)
    plan = _operand_plan({(gemm_name, tensor): op}, gemm_name, tensor, gemm_dtype(t.device)).but(stream=stream)
    return tuple(_with_prescale(quantize_operand(t, plan, seed), plan))


def operand(
    t: Tensor, which: str, name: str, layer_recipe: Recipe, seed: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """What GEMM `which` sees of tensor `name` (x, w or g), given as the 2-D `t`: see `quantized_operand`."""
    plan = _operand_plan(layer_recipe.operands(), which, name, gemm_dtype(t.device))
    return tuple(_with_prescale(quantize_operand(t, plan, seed), plan))


def both_operands(t: Tensor, name: str, layer_recipe: Recipe, seed: Tensor | None) -> tuple[tuple, tuple]:
    """What the two GEMMs that read tensor `name` see of it, in the order of GEMMS, as values."""
    dtype = gemm_dtype(t.device)
    plan = getattr(_layer_plan(layer_recipe, dtype, (False, False), (True, True), "values"), name)
    made = [
        values_of(x, p, dtype) for x, p in zip(quantize_tensor(t, plan, seed), (plan.first, plan.second), strict=True)
    ]
    return tuple(tuple(_with_prescale(x, p)) for x, p in zip(made, (plan.first, plan.second), strict=True))


def product(which: str, a: tuple, b: tuple, layer_recipe: Recipe, out_dtype: torch.dtype) -> Tensor:
    """GEMM `which` of two such operands."""
    op = getattr(layer_recipe, which).a
    return _product(Quantized(*a), Quantized(*b), ROTATION[op.hadamard].size if op.two_sided else 0, 0, out_dtype)
