"""Operands as a layer multiplies and keeps them: values, or packed codes and scales.

A chip with FP4 units multiplies packed MX operands as they are; one with FP8 units multiplies FP8 with a scale a
tensor, through the library. `native.py` says which has what, and the GEMMs of a recipe may differ in it. Everywhere
else a GEMM reads values (`gemms.py`), and packed is how the backward's operands can wait for it: 0.53 bytes an
element (FP8: 1) in place of 2, unpacked when they are needed, the same values. What has no packed form (high
precision, NVFP4, rotations along both axes, the prescale) is held as values on every chip, and so is the partner of
such an operand in its GEMM.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mxfp4.layers.gemms import AXES, both_operands, how, one_read, operand, per_tensor, product, serves_both, stream_of
from mxfp4.layers.recipe import GEMMS, TENSORS, Gemm, Operand, Recipe
from mxfp4.numerics.native import fp8_path, matmul_path
from mxfp4.numerics.ops import packed_operands
from mxfp4.numerics.ops.matmul import as_dtype, gemm_dtype
from mxfp4.numerics.ops.quantize import quantize, quantize_pair, values_and_packed
from mxfp4.numerics.tensor import MXTensor

SAVES = ("values", "packed")
FP8_MULTIPLE = 16
"""What the library's FP8 GEMM wants the contracted size and the columns to be multiples of."""


class Values(NamedTuple):
    """Contraction axis last, in the dtype that carries them; a factor for the product, or None."""

    value: Tensor
    factor: Tensor | None


class Packed(NamedTuple):
    """Codes and E8M0 bytes, the contraction axis last unless `turned`: square blocks, stored along the other axis.

    Block "tensor": FP8 codes, and as `scale` the FP32 factor that undoes the tensor's one scale; `turned` where one
    store of them waits for a GEMM that reads values.
    """

    qdata: Tensor
    scale: Tensor
    elem: str
    block: str
    turned: bool


Prepared = Values | Packed


def packable(op: Operand) -> bool:
    """Whether codes and scales are all there is to an operand."""
    return per_tensor(op) or (op.is_mx and not op.two_sided and not op.prescaled)


def takes_packed(pair: Gemm, mx: bool, fp8: bool) -> bool:
    """Whether a chip that multiplies MX blocks (`mx`), FP8 tensors (`fp8`) takes these two operands packed."""
    if per_tensor(pair.a) and per_tensor(pair.b):
        return fp8 and not pair.a.elem == pair.b.elem == "e5m2"  # the one pairing that no library has
    return mx and all(op.is_mx and packable(op) for op in (pair.a, pair.b))


def runs_packed(which: str, layer_recipe: Recipe, device: torch.device) -> bool:
    """Whether GEMM `which` takes packed operands on `device`."""
    mx, fp8 = matmul_path(device) == "native", fp8_path(device) == "native"
    return takes_packed(getattr(layer_recipe, which), mx, fp8)


def prepare(t: Tensor, which: str, name: str, layer_recipe: Recipe, seed: Tensor | None, packed: bool) -> Prepared:
    """What GEMM `which` sees of tensor `name` (x, w or g), given as the 2-D `t`."""
    if not packed:
        return Values(*operand(t, which, name, layer_recipe, seed))
    op, axis = layer_recipe.operands()[which, name], AXES[which, name]
    if per_tensor(op):
        turned = axis != -1
        waits = turned and not runs_packed(which, layer_recipe, t.device)  # laid out as its values would be: same sums
        return Packed(*packed_operands.fp8_codes(t, op.elem, turned and not waits), op.elem, "tensor", waits)
    along = -1 if op.transposable else axis
    q = quantize(t, axis=along, seed=seed, **how(op, stream_of(which, name, layer_recipe)))
    return _packed(q, turned=along != axis)


def _packed(q: MXTensor, turned: bool = False) -> Packed:
    return Packed(q.qdata, q.scale, q.elem, q.block, turned)


def prepare_both(
    t: Tensor, name: str, layer_recipe: Recipe, seed: Tensor | None, packed: tuple[bool, bool]
) -> tuple[Prepared, Prepared]:
    """What the two GEMMs that contract tensor `name` see of it, in the order of GEMMS, each packed or not."""
    if not any(packed):
        return tuple(Values(*one) for one in both_operands(t, name, layer_recipe, seed))
    first, second = (g for g in GEMMS if name in TENSORS[g])
    one, two = (layer_recipe.operands()[g, name] for g in (first, second))
    dtype = gemm_dtype(t.device)
    run = all(keep and runs_packed(g, layer_recipe, t.device) for g, keep in zip((first, second), packed, strict=True))
    if one == two and per_tensor(one) and run:
        codes, turned, factor = packed_operands.fp8_codes_pair(t, one.elem)
        return tuple(Packed(qdata, factor, one.elem, "tensor", False) for qdata in (codes, turned))
    if one == two and serves_both(one):  # one quantization serves both
        made = prepare(t, first, name, layer_recipe, seed, True)
        both = made, made._replace(turned=True)
        return tuple(p if keep else unpacked(p, dtype) for p, keep in zip(both, packed, strict=True))
    again = layer_recipe.requantize and name != "g"
    if one_read(one) and one_read(two) and packed[1] and not again:
        row, col = how(one, stream_of(first, name, layer_recipe)), how(two, stream_of(second, name, layer_recipe))
        if packed[0]:
            return tuple(_packed(q) for q in quantize_pair(t, row, col, seed=seed))
        value, q = values_and_packed(t, row, col, seed=seed, dtype=dtype)
        return Values(value, None), _packed(q)
    prepared = prepare(t, first, name, layer_recipe, seed, packed[0])
    if again:
        value, factor = unpacked(prepared, dtype)
        t = value if factor is None else value * factor
    return prepared, prepare(t, second, name, layer_recipe, seed, packed[1])


def unpacked(x: Prepared, dtype: torch.dtype, late: bool = False) -> Values:
    """`x` as values in `dtype`; `late`: in a backward."""
    if isinstance(x, Values):
        return x
    value = packed_operands.unpack(x.qdata, x.scale, x.elem, x.block, dtype, late)
    return Values(value.t() if x.turned else value, x.scale if x.block == "tensor" else None)


def multiply(which: str, a: Prepared, b: Prepared, layer_recipe: Recipe, out_dtype: torch.dtype) -> Tensor:
    """GEMM `which` of two prepared operands -> [M, N] in `out_dtype`, FP32 accumulation."""
    device = (a.value if isinstance(a, Values) else a.qdata).device
    if runs_packed(which, layer_recipe, device):
        dtype = out_dtype if out_dtype in (torch.float32, torch.bfloat16) else torch.float32
        a, b = _along_k(a), _along_k(b)
        if a.block != "tensor":
            return as_dtype(packed_operands.gemm_packed(*a[:4], *b[:4], dtype), out_dtype)
        if a.qdata.shape[1] % FP8_MULTIPLE == 0 and b.qdata.shape[0] % FP8_MULTIPLE == 0:
            return as_dtype(packed_operands.gemm_fp8(*a[:3], *b[:3], dtype), out_dtype)
    a, b = (unpacked(x, gemm_dtype(device), late=which != "fprop") for x in (a, b))
    return product(which, a, b, layer_recipe, out_dtype)


def _along_k(x: Packed) -> Packed:
    """`x` with its contraction axis last in memory."""
    if not x.turned:
        return x
    scale = x.scale if x.block == "tensor" else x.scale.t().contiguous()
    return Packed(packed_operands.turn(x.qdata, x.elem), scale, x.elem, x.block, False)


def flatten(*parts: Prepared | None) -> tuple[list[Tensor], list]:
    """(tensors, what `rebuild` needs beside them) of operands that wait for a backward."""
    tensors: list[Tensor] = []
    plan: list = []
    for part in parts:
        if isinstance(part, Packed):
            tensors += [part.qdata, part.scale]
            plan.append(("packed", part.elem, part.block, part.turned))
        elif isinstance(part, Values):
            tensors += [part.value] if part.factor is None else [part.value, part.factor]
            plan.append(("values", part.factor is not None))
        else:
            plan.append(None)
    return tensors, plan


def rebuild(tensors, plan: list) -> list[Prepared | None]:
    """The inverse of `flatten`."""
    left = list(tensors)
    parts: list[Prepared | None] = []
    for kind in plan:
        if kind is None:
            parts.append(None)
        elif kind[0] == "packed":
            parts.append(Packed(left.pop(0), left.pop(0), *kind[1:]))
        else:
            parts.append(Values(left.pop(0), left.pop(0) if kind[1] else None))
    return parts
