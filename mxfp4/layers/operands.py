"""Operands made as a `LayerPlan` says, from the tensors of a layer."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mxfp4.layers.plan import TensorPlan, is_delayed
from mxfp4.numerics.gemm_backends.library import gemm_dtype
from mxfp4.numerics.operand_plan import OperandPlan, inverse_prescale
from mxfp4.numerics.ops import packed_operands
from mxfp4.numerics.ops.block_quantize import bf16_values, fp8_per_tensor, fp8_scale, quantize_operands
from mxfp4.numerics.ops.fp8_block import fp8_block, fp8_block_values
from mxfp4.numerics.ops.fp8_delayed import fp8_codes_of_amax, fp8_of_amax
from mxfp4.numerics.ops.rotate import rotated
from mxfp4.numerics.philox import random16
from mxfp4.numerics.rounding import round_stochastic


class Quantized(NamedTuple):
    """An operand in memory; its OperandPlan says what the two tensors are.

    Values [rows, K] with the contraction axis last and, for formats with a scale a tensor, the FP32 factor that undoes
    it; or codes and E8M0 bytes (FP8: codes and the factor; FP8 in blocks: codes and FP32 scales), along the other axis
    where the plan is `transposed`.
    """

    data: Tensor
    scale: Tensor | None


def quantize_tensor(
    t: Tensor, plan: TensorPlan, seed: Tensor | None, amax: Tensor | None = None
) -> tuple[Quantized | None, Quantized | None]:
    """What the two GEMMs that read the 2-D tensor `t` see of it. amax: FP32, 0-d, what a delayed scale is made of; None:
    as without a history."""
    first, second = plan.first, plan.second
    if plan.read == "pair":
        if first.both_axes:
            t = rotated(t, first.both_axes, both=True)
        made = quantize_operands(t, first.text, second.text, seed)
        count = len(made) // 2 if (first.dtype is None) == (second.dtype is None) else 2 if first.dtype is None else 1
        return _of(made[:count]), _of(made[count:])
    if plan.read == "codes":
        if is_delayed(first) and amax is not None:
            codes, factor = fp8_codes_of_amax(t, amax, first.elem)
            transposed = packed_operands.turn(codes, first.elem)
        else:
            codes, transposed, factor = packed_operands.fp8_codes_pair(t, first.elem)
        return Quantized(codes, factor), Quantized(transposed, factor)
    if plan.read == "once":
        once = quantize_operand(t, plan.stored, seed, amax)
        if plan.stored.dtype is not None:
            return once, Quantized(once.data.t(), once.scale)
        return tuple(once if p.dtype is None else _unpacked(once, p, p.dtype, False) for p in (first, second))
    one = None if first is None else quantize_operand(t, first, seed, amax)
    if plan.read == "again":
        value, factor = values_of(one, first, gemm_dtype(t.device))
        t = value if factor is None else value * factor
        t = t * inverse_prescale() if first.prescaled else t
    return one, None if second is None else quantize_operand(t, second, seed, amax)


def _of(made: list[Tensor]) -> Quantized:
    """What the operator gives of one operand."""
    return Quantized(made[0], made[1] if len(made) > 1 else None)


def quantize_operand(t: Tensor, plan: OperandPlan, seed: Tensor | None, amax: Tensor | None = None) -> Quantized:
    """One operand of one GEMM, from the 2-D tensor that it is made of; amax as for `quantize_tensor`."""
    if plan.both_axes:
        t = rotated(t, plan.both_axes, both=True)
    along_rows = plan.axis == -1 or plan.transposed
    if plan.format in ("mxfp4", "mxfp8", "nvfp4"):
        made = quantize_operands(t, plan.text if along_rows else "", "" if along_rows else plan.text, seed)
        data, scale = _of(made)
    elif plan.format == "fp8-block":
        data, scale = _in_fp8_blocks(t if along_rows else t.t(), plan, seed)
    elif plan.format == "fp8" and is_delayed(plan) and amax is not None:
        t = t if along_rows else t.t()
        made = (
            fp8_codes_of_amax(t, amax, plan.elem) if plan.dtype is None else fp8_of_amax(t, amax, plan.elem, plan.dtype)
        )
        data, scale = made
    elif plan.dtype is None:
        data, scale = packed_operands.fp8_codes(t, plan.elem, not along_rows)
    else:
        data, scale = _without_blocks(t if along_rows else t.t(), plan, seed)
    return Quantized(data.t() if plan.transposed and plan.dtype is not None else data, scale)


def _in_fp8_blocks(t: Tensor, plan: OperandPlan, seed: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """E4M3 codes and FP32 scales of an operand, its contracted axis last; or their values in FP32."""
    if plan.rotation is not None:
        t = rotated(t, plan.hadamard, plan.signs(seed, t.device))
    codes, scale = fp8_block(t, plan.block, plan.scale_rule, seed if plan.stochastic else None, plan.stream)
    return (codes, scale) if plan.dtype is None else (fp8_block_values(codes, scale, plan.block), None)


def _without_blocks(t: Tensor, plan: OperandPlan, seed: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Values of an operand in FP32, BF16 or FP8, its rotated axis last, and the factor of FP8's scale.

    FP8 has one FP32 scale a tensor, taken from its current maximum ("current scaling"); a zero tensor keeps 1.
    """
    if plan.rotation is not None:
        t = rotated(t, plan.hadamard, plan.signs(seed, t.device))
    if plan.format == "fp32":
        return t.float(), None
    if plan.format == "bf16":
        return (t.to(plan.dtype) if plan.dtype == torch.bfloat16 else bf16_values(t, plan.dtype)), None
    if not plan.stochastic:
        return fp8_per_tensor(t, plan.elem, plan.dtype)
    scale = fp8_scale(t, plan.elem)
    noise = random16(seed, tuple(t.shape), plan.stream)
    return round_stochastic(t.float() * scale, plan.fmt, noise).to(plan.dtype), scale.reciprocal()


def values_of(x: Quantized, plan: OperandPlan, dtype: torch.dtype, in_backward: bool = False) -> Quantized:
    """`x` as values and their factor: packed ones in `dtype`; `in_backward` keeps a compiler from sharing them with a forward."""
    return x if plan.dtype is not None else _unpacked(x, plan, dtype, in_backward)


def _unpacked(x: Quantized, plan: OperandPlan, dtype: torch.dtype, in_backward: bool) -> Quantized:
    if plan.format == "fp8-block":
        value = fp8_block_values(x.data, x.scale, plan.block)
        return Quantized(value.t() if plan.transposed else value, None)
    fp8 = plan.format == "fp8"
    value = packed_operands.unpack(x.data, x.scale, plan.elem, "tensor" if fp8 else plan.block, dtype, in_backward)
    return Quantized(value.t() if plan.transposed else value, x.scale if fp8 else None)


def along_contraction(x: Quantized, plan: OperandPlan) -> Quantized:
    """Packed `x` with its contraction axis last in memory."""
    if not plan.transposed:
        return x
    scale = x.scale if plan.format == "fp8" else x.scale.t().contiguous()
    return Quantized(packed_operands.turn(x.data, plan.elem), scale)
