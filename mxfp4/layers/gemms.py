"""The three GEMMs of a linear layer on quantized operands.

Each operand is quantized from its high-precision source along the axis that its GEMM contracts, so X, W and G are
each quantized twice, in two orientations, and not from an already quantized copy (unless a recipe says `requantize`).
2D blocks, rotated along both axes or neither, are what P2 is about: one quantization serves both orientations.

    fprop  Y  [T, N] = X [T, K] . W [N, K]       contracts K
    dgrad  dX [T, K] = G [T, N] . W^T [K, N]     contracts N
    wgrad  dW [N, K] = G^T [N, T] . X^T [K, T]   contracts T (tokens)
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from mxfp4.layers.recipe import GEMMS, ROTATIONS, TENSORS, Operand, Recipe
from mxfp4.numerics.formats import BLOCK, elem_format
from mxfp4.numerics.hadamard import Hadamard
from mxfp4.numerics.nvfp4 import nvfp4_values
from mxfp4.numerics.ops.block_quantize import bf16_values, fp8_per_tensor, fp8_scale
from mxfp4.numerics.ops.matmul import as_dtype, gemm, gemm_dtype
from mxfp4.numerics.ops.quantize import fake_quantize, fake_quantize_pair
from mxfp4.numerics.ops.rotate import rotated
from mxfp4.numerics.philox import random16, random_signs
from mxfp4.numerics.rounding import round_stochastic

# Streams of random numbers, one an operand. `fake_quantize` takes the signs of a rotation from stream // 2, so the
# two operands of a GEMM rotate alike.
STREAMS = {key: i for i, key in enumerate((g, t) for g in GEMMS for t in TENSORS[g])}
# The axis that each GEMM contracts, of the tensors as they come: X [T, K], W [N, K], G [T, N].
AXES = dict(zip(STREAMS, (-1, -1, -1, 0, 0, 0), strict=True))
SIDES = {
    "x": {0: "tokens", -1: "in_features"},
    "w": {0: "out_features", -1: "in_features"},
    "g": {0: "tokens", -1: "out_features"},
}


def _rotation(name: str) -> Hadamard:
    kind = name.rstrip("0123456789")
    size = int(name.removeprefix(kind))
    if kind == "frht":
        return Hadamard(size, tuple(int(s) for s in random_signs(torch.tensor(0), size, stream=0)))
    return Hadamard(size, "seed" if kind == "rht" else None)


# The rotation that an Operand's `hadamard` names.
ROTATION = {None: None, **{name: _rotation(name) for name in ROTATIONS}}


def how(op: Operand, stream: int) -> dict:
    """The keywords of `fake_quantize` for an operand in an MX format."""
    return {
        "block": op.block,
        "elem": op.elem or "e2m1",
        "scale_rule": op.scale_rule,
        "rounding": op.rounding,
        "hadamard": ROTATION[op.hadamard],
        "stream": stream,
    }


def quantized_operand(
    t: Tensor, op: Operand, axis: int, seed: Tensor | None, stream: int
) -> tuple[Tensor, Tensor | None]:
    """What a GEMM that contracts `axis` (-1 or 0) sees of the 2-D tensor `t`.

    Returns (values with the contraction axis last, in the dtype that carries them; a factor for the product or None).
    The factor undoes per-tensor scales (FP8, NVFP4) and the prescale.
    """
    carrier = gemm_dtype(t.device)
    if op.two_sided:
        size = ROTATION[op.hadamard].size
        t, op = rotated(t, size, both=True), replace(op, hadamard=None)
    if op.prescaled:
        # The floor rule's scale of t puts 3/4 t in [3, 6) of it: that is rceil's scale of 3/4 t, but for a block whose
        # maximum is a power of two, where rceil takes the half of it, and does not clip either.
        scaled = replace(op, scale_rule="rceil", prescaled=False)
        return quantized_operand(t.float() * 0.75, scaled, axis, seed, stream)[0], torch.full(
            (), 4 / 3, device=t.device
        )
    if op.is_mx:
        free = op.transposable
        value = fake_quantize(t, axis=-1 if free else axis, seed=seed, dtype=carrier, **how(op, stream))
        return (value if axis == -1 else value.t()), None
    value = t if axis == -1 else t.t()
    if op.hadamard is not None:
        h = ROTATION[op.hadamard]
        value = rotated(value, h.size, h.resolve(seed, stream // 2, t.device))
    if op.format == "fp32":
        return value.float(), None
    if op.format == "bf16":
        return (value.to(carrier) if carrier == torch.bfloat16 else bf16_values(value, carrier)), None
    if op.format == "nvfp4":
        value = value if axis == -1 or not op.transposable else t
        value, factor = nvfp4_values(value.float(), op.block, seed if op.rounding == "stochastic" else None, stream)
        return (value.t() if op.transposable and axis == 0 else value).to(carrier), factor
    return _fp8_per_tensor(value, op, seed, stream, carrier)


def _fp8_per_tensor(t: Tensor, op: Operand, seed, stream: int, carrier: torch.dtype) -> tuple[Tensor, Tensor]:
    """FP8 with one FP32 scale a tensor, taken from its current maximum ("current scaling"); a zero tensor keeps 1."""
    if op.rounding == "nearest":
        return fp8_per_tensor(t, op.elem, carrier)
    scale = fp8_scale(t, op.elem)
    noise = random16(seed, tuple(t.shape), stream)
    return round_stochastic(t.float() * scale, elem_format(op.elem), noise).to(carrier), 1.0 / scale


def operand(
    t: Tensor, which: str, name: str, layer_recipe: Recipe, seed: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """What GEMM `which` sees of tensor `name` (x, w or g), given as the 2-D `t`: see `quantized_operand`."""
    op = layer_recipe.operands()[which, name]
    return quantized_operand(t, op, AXES[which, name], seed, stream_of(which, name, layer_recipe))


def stream_of(which: str, name: str, layer_recipe: Recipe) -> int:
    """The random numbers of an operand; square blocks have one draw for both GEMMs."""
    first = next(g for g in GEMMS if name in TENSORS[g])
    return STREAMS[first if layer_recipe.operands()[which, name].transposable else which, name]


def both_operands(t: Tensor, name: str, layer_recipe: Recipe, seed: Tensor | None) -> tuple[tuple, tuple]:
    """What the two GEMMs that contract tensor `name` see of it, in the order of GEMMS."""
    first, second = (g for g in GEMMS if name in TENSORS[g])  # contract axis -1 and axis 0
    ops = layer_recipe.operands()
    one, two = ops[first, name], ops[second, name]
    streams = [stream_of(g, name, layer_recipe) for g in (first, second)]
    again = layer_recipe.requantize and name != "g"
    if one.two_sided and one.hadamard == two.hadamard and not again:  # one rotation is both's
        t = rotated(t, ROTATION[one.hadamard].size, both=True)
        one, two = replace(one, hadamard=None), replace(two, hadamard=None)
    if one_read(one) and one_read(two) and not again:
        row, col = how(one, streams[0]), how(two, streams[1])
        value, turned = fake_quantize_pair(t, row, col, seed=seed, dtype=gemm_dtype(t.device))
        return (value, None), (turned.t(), None)
    value, factor = made = quantized_operand(t, one, AXES[first, name], seed, streams[0])
    if one == two and serves_both(one):
        return made, (value.t(), factor)
    if again:
        t = value if factor is None else value * factor
    return made, quantized_operand(t, two, AXES[second, name], seed, streams[1])


def per_tensor(op: Operand) -> bool:
    """Whether an operand is FP8 codes and one scale, the same along both axes."""
    return op.format == "fp8" and op.rounding == "nearest" and op.hadamard is None


def serves_both(op: Operand) -> bool:
    """Whether an operand's transpose is what its sister GEMM sees."""
    return op.transposable or per_tensor(op)


def one_read(op: Operand) -> bool:
    """Whether `fake_quantize_pair` can make this operand beside its sister."""
    return op.is_mx and not op.transposable and not (op.two_sided or op.prescaled)


def product(
    which: str,
    a: tuple[Tensor, Tensor | None],
    b: tuple[Tensor, Tensor | None],
    layer_recipe: Recipe,
    out_dtype: torch.dtype,
) -> Tensor:
    """GEMM `which` of two prepared operands, contraction axis last on both sides."""
    (a_value, a_factor), (b_value, b_factor) = a, b
    if a_value.dtype != b_value.dtype:  # one operand in high precision
        a_value, b_value = a_value.float(), b_value.float()
    op = getattr(layer_recipe, which).a
    if a_factor is None and b_factor is None and not op.two_sided:
        return gemm(a_value, b_value, out_dtype)
    y = gemm(a_value, b_value, torch.float32)
    for factor in (a_factor, b_factor):
        y = y if factor is None else y * factor
    if op.two_sided:  # the contracted axes cancelled, the outer ones are still rotated
        return rotated(y, ROTATION[op.hadamard].size, both=True, dtype=out_dtype)
    return as_dtype(y, out_dtype)


def _axes_cut(which: str, name: str, op: Operand) -> tuple[int, ...]:
    """The axes of a tensor that blocks or rotations divide: both where those are square, else the contracted one."""
    square = op.two_sided or (op.block_size > 1 and op.block == "2d")
    return (0, -1) if square else (AXES[which, name],)


def _multiple(op: Operand) -> int:
    return max(op.block_size, ROTATION[op.hadamard].size if op.hadamard else 1)


def size_problem(in_features: int, out_features: int, layer_recipe: Recipe) -> str | None:
    """Why these feature sizes do not fit the recipe, in a sentence, or None."""
    sizes = {"in_features": in_features, "out_features": out_features}
    for side, size in sizes.items():
        if size < 1:
            return f"{side}={size} must be 1 or more"
    if layer_recipe.quest and in_features % BLOCK:
        return (
            f"in_features={in_features} is not a multiple of {BLOCK}, which recipe {layer_recipe.name!r} needs in fprop"
        )
    for (gemm_name, name), op in layer_recipe.operands().items():
        for axis in _axes_cut(gemm_name, name, op):
            side = SIDES[name][axis]
            if side in sizes and sizes[side] % _multiple(op):
                return (
                    f"{side}={sizes[side]} is not a multiple of {_multiple(op)}, which recipe {layer_recipe.name!r} "
                    f"needs in {gemm_name}"
                )
    return None


def token_multiple(layer_recipe: Recipe) -> int:
    """What the number of tokens is padded to: all needs are powers of two, so the largest."""
    needs = [1]
    for (gemm_name, name), op in layer_recipe.operands().items():
        if any(SIDES[name][axis] == "tokens" for axis in _axes_cut(gemm_name, name, op)):
            needs.append(_multiple(op))
    return max(needs)
