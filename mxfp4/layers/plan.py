"""LayerPlan: what the three GEMMs of a linear layer do to their operands, decided here and nowhere else.

Each operand is quantized from its high-precision source along the axis that its GEMM contracts, so X, W and G are
each quantized twice, in two orientations, and not from an already quantized copy (unless a recipe says `requantize`).
2D blocks, rotated along both axes or neither, are what P2 is about: one quantization serves both orientations.

    fprop  Y  [T, N] = X [T, K] . W [N, K]       contracts K
    dgrad  dX [T, K] = G [T, N] . W^T [K, N]     contracts N
    wgrad  dW [N, K] = G^T [N, T] . X^T [K, T]   contracts T (tokens)

A chip with FP4 units multiplies packed MX operands as they are; one with FP8 units multiplies FP8 with a scale a
tensor, through the library. `native.py` says which has what, `gemm_backends` what multiplies packed operands, and the
GEMMs of a recipe may differ in it. Everywhere else a GEMM reads values, and packed is how the backward's operands can
wait for it (`save="packed"`): 0.53 bytes an element (FP8: 1) in place of 2, unpacked when they are needed, the same
values. What has no packed form (high precision, NVFP4, rotations along both axes, the prescale) is held as values on
every chip, and so is the partner of such an operand in its GEMM.

FP8 in blocks of 128 waits as codes and FP32 scales on every chip: no 16-bit value holds a code times such a scale, and
the GEMM applies scales to the product of each block of K, on the chip's units or as `ops/fp8_block.py` emulates them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from mxfp4.layers.recipe import GEMMS, ROTATIONS, TENSORS, Gemm, Operand, Recipe
from mxfp4.numerics.formats import BLOCK
from mxfp4.numerics.gemm_backends.choice import described, matmul_path
from mxfp4.numerics.gemm_backends.library import gemm_dtype
from mxfp4.numerics.hadamard import Hadamard
from mxfp4.numerics.native import compile_time_constant, fp8_path
from mxfp4.numerics.operand_plan import OperandPlan
from mxfp4.numerics.ops.fp8_block import is_available as fp8_block_available
from mxfp4.numerics.ops.fp8_delayed import ALGORITHMS
from mxfp4.numerics.philox import random_signs

SAVES = ("values", "packed")
# Streams of random numbers, one an operand. The signs of a rotation come from stream // 2, so the two operands of a
# GEMM rotate alike.
STREAMS = {key: i for i, key in enumerate((g, t) for g in GEMMS for t in TENSORS[g])}
# The axis that each GEMM contracts, of the tensors as they come: X [T, K], W [N, K], G [T, N].
AXES = dict(zip(STREAMS, (-1, -1, -1, 0, 0, 0), strict=True))
READERS = {tensor: tuple(g for g in GEMMS if tensor in TENSORS[g]) for tensor in "xwg"}
"""The two GEMMs that read a tensor: the first contracts its axis -1, the second its axis 0."""

SIDES = {
    "x": {0: "tokens", -1: "in_features"},
    "w": {0: "out_features", -1: "in_features"},
    "g": {0: "tokens", -1: "out_features"},
}


def _rotation(name: str) -> Hadamard:
    kind = name.rstrip("0123456789")
    size = int(name.removeprefix(kind))
    if kind == "frht":
        seed = torch.tensor(0, dtype=torch.int64, device="cpu")
        return Hadamard(size, tuple(int(s) for s in random_signs(seed, size, stream=0)))
    return Hadamard(size, "seed" if kind == "rht" else None)


# The rotation that an Operand's `hadamard` names.
ROTATION = {None: None, **{name: _rotation(name) for name in ROTATIONS}}


@dataclass(frozen=True)
class TensorPlan:
    """What the two GEMMs that read a tensor see of it, and how both are made."""

    tensor: str
    read: str
    """each: from a read of its own. pair: one kernel makes both. codes: the same for FP8 codes. once: one quantization,
    `stored`, serves both, the second reads its transpose. again: the second is made from the first's values."""
    first: OperandPlan | None
    """As the GEMM that contracts axis -1 reads it (Y's for X and W, dX's for G); None: not needed."""
    second: OperandPlan | None
    """As the GEMM that contracts axis 0 reads it."""
    stored: OperandPlan | None = None
    amax: str | None = None
    """How its scale follows from the history of its maxima (`numerics.ops.fp8_delayed`); None: it has none."""


@dataclass(frozen=True)
class GemmPlan:
    """One GEMM: its operands and what multiplies them."""

    gemm: str
    a: OperandPlan
    b: OperandPlan
    units: str
    """mx, fp8, fp8-block: the chip's units for packed operands; blocks: emulates the last; library: the library's GEMM
    of values."""
    both_axes: int
    """Size of the rotation along both axes that its product is still in; 0: none."""


@dataclass(frozen=True)
class LayerPlan:
    """The three GEMMs of a linear layer on one kind of device, of operands that wait for the backward in one way."""

    recipe: str
    token_multiple: int
    """What the number of tokens is padded to."""
    is_random: bool
    """Whether a forward draws a seed."""
    x: TensorPlan
    w: TensorPlan
    g: TensorPlan
    fprop: GemmPlan
    dgrad: GemmPlan | None
    """None where no gradient of X is wanted."""
    wgrad: GemmPlan | None
    backends: str = ""
    """What multiplies packed MX operands, in the order in which it is asked; empty where nothing does."""

    def __str__(self) -> str:
        head = (
            "GEMM",
            "tensor",
            "units",
            "format",
            "block",
            "rule",
            "rounding",
            "rotation",
            "axis",
            "form",
            "stream",
            "read",
        )
        lines = [head]
        for gemm in (self.fprop, self.dgrad, self.wgrad):
            for tensor, plan in zip(TENSORS[gemm.gemm], (gemm.a, gemm.b), strict=True) if gemm else ():
                lines.append((gemm.gemm, tensor, gemm.units, *_columns(plan), getattr(self, tensor).read))
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        table = ["  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines]
        packed = any(gemm is not None and gemm.units == "mx" for gemm in (self.fprop, self.dgrad, self.wgrad))
        title = f"recipe {self.recipe}" + (f", MX GEMMs by {self.backends}" if packed and self.backends else "")
        return "\n".join([title, *table])


def _columns(plan: OperandPlan) -> tuple[str, ...]:
    blocks = plan.format in ("mxfp4", "mxfp8", "nvfp4", "fp8-block")
    rotation = f"both axes {plan.both_axes}" if plan.both_axes else "-"
    if plan.rotation is not None:
        rotation = f"h{plan.hadamard}" + ("", " fixed signs", " random signs")[plan.sign_kind]
    form = "packed" if plan.dtype is None else str(plan.dtype).removeprefix("torch.")
    return (
        plan.format + (f" {plan.elem}" if plan.format in ("fp8", "mxfp8", "fp8-block") else ""),
        plan.block if blocks else "-",
        _rule(plan),
        plan.rounding,
        rotation,
        str(plan.axis),
        form + (", transposed" if plan.transposed else ""),
        str(plan.stream) if plan.is_random else "-",
    )


def _rule(plan: OperandPlan) -> str:
    if plan.format.startswith("mx"):
        return plan.scale_rule + " of 3/4" * plan.prescaled
    if plan.format == "fp8-block":
        return plan.scale_rule
    return f"delayed {plan.scale_rule}" if is_delayed(plan) else "-"


def is_delayed(plan: OperandPlan) -> bool:
    """Whether an operand is FP8 whose scale comes from a history of maxima."""
    return plan.scale_rule in ALGORITHMS


# The decision


@compile_time_constant
def layer_plan(
    recipe: Recipe, device: torch.device, needs_grad: tuple[bool, bool], save: str, nearest: bool = False
) -> LayerPlan:
    """The plan of a layer with `recipe` (no overrides) on `device`; needs_grad: of X, of W. `save`: one of SAVES.
    nearest: where the recipe rounds stochastically, round to nearest."""
    blocks = any(op.format == "fp8-block" for op in recipe.operands().values())
    native = matmul_path(device) == "native", fp8_path(device) == "native", blocks and fp8_block_available(device)
    backends = described(device) if native[0] else ""
    return _layer_plan(recipe, gemm_dtype(device), native, needs_grad, save, nearest, backends)


@lru_cache(maxsize=1024)
def _layer_plan(recipe: Recipe, values_dtype, native, needs_grad, save, nearest=False, backends="") -> LayerPlan:
    if nearest:
        return _layer_plan(recipe.to_nearest(), values_dtype, native, needs_grad, save, False, backends)
    need_x, need_w = needs_grad
    units = {gemm: _units(getattr(recipe, gemm), *native) for gemm in GEMMS}
    operands = recipe.operands()

    def tensor_plan(tensor: str, needed: tuple[bool, bool]) -> TensorPlan:
        first, second = READERS[tensor]
        one, two = operands[first, tensor], operands[second, tensor]
        amax = one.delayed or two.delayed
        saved = save == "packed" and tensor != "g"  # the second waits for the backward
        packed = units[first] != "library", units[second] != "library" or (saved and packable(two))
        plans = [
            _operand_plan(operands, gemm, tensor, None if pack else values_dtype)
            for gemm, pack in zip((first, second), packed, strict=True)
        ]
        if not all(needed):
            return TensorPlan(tensor, "each", *(_alone(p, units[g]) if n else None
                                                for p, n, g in zip(plans, needed, (first, second), strict=True)),
                              amax=amax)  # fmt: skip
        again = recipe.requantize and tensor != "g"
        if one == two and per_tensor(one) and units[first] == units[second] == "fp8":
            return TensorPlan(tensor, "codes", *(p.but(transposed=False) for p in plans), amax=amax)
        if one == two and serves_both(one):
            return TensorPlan(tensor, "once", *plans, plans[0].but(dtype=None) if any(packed) else plans[0], amax)
        same_blocks = one.block_size == two.block_size and plans[0].both_axes == plans[1].both_axes
        if one_read(one) and one_read(two) and same_blocks and not again:
            return TensorPlan(tensor, "pair", *plans)
        plans = [_alone(p, units[g]) for p, g in zip(plans, (first, second), strict=True)]
        return TensorPlan(tensor, "again" if again else "each", *plans, amax=amax)

    x, w, g = tensor_plan("x", (True, need_w)), tensor_plan("w", (True, need_x)), tensor_plan("g", (need_x, need_w))

    def gemm_plan(gemm: str, a: OperandPlan | None, b: OperandPlan | None) -> GemmPlan:
        return GemmPlan(gemm, a, b, units[gemm], a.both_axes)

    return LayerPlan(
        recipe.name, token_multiple(recipe), recipe.is_random, x, w, g,
        gemm_plan("fprop", x.first, w.first),
        gemm_plan("dgrad", g.first, w.second) if need_x else None,
        gemm_plan("wgrad", g.second, x.second) if need_w else None,
        backends,
    )  # fmt: skip


def _operand_plan(operands: dict, gemm: str, tensor: str, dtype: torch.dtype | None) -> OperandPlan:
    """Of operand `tensor` of `gemm`, in `dtype` (None: packed). One quantization of what serves both has one stream."""
    op, axis = operands[gemm, tensor], AXES[gemm, tensor]
    plan = OperandPlan(
        name=f"{gemm}.{tensor}",
        format=op.format,
        elem=op.elem or "e2m1",
        block=op.block,
        # The floor rule's scale of t puts 3/4 t in [3, 6) of it: that is rceil's scale of 3/4 t, but for a block whose
        # maximum is a power of two, where rceil takes the half of it, and does not clip either.
        scale_rule="rceil" if op.prescaled else _scales(op),
        rounding=op.rounding,
        rotation=None if op.two_sided else ROTATION[op.hadamard],
        both_axes=ROTATION[op.hadamard].size if op.two_sided else 0,
        prescaled=op.prescaled,
        stream=STREAMS[READERS[tensor][0] if op.transposable else gemm, tensor],
        axis=axis,
        dtype=torch.float32 if op.format == "fp32" or (op.format == "fp8-block" and dtype is not None) else dtype,
        transposed=serves_both(op) and axis == 0,
    )
    return OperandPlan.parse(plan.text)


def _scales(op: Operand) -> str:
    """OperandPlan.scale_rule: of FP8 it says where scales that are not the tensor's own come from."""
    if op.format == "fp8-block":
        return "pow2" if op.pow2_scales else "fp32"
    return op.delayed or op.scale_rule


def _alone(plan: OperandPlan, units: str) -> OperandPlan:
    """An operand that is made on its own: FP8 codes for the chip's units are laid out as those read them."""
    return plan.but(transposed=False) if plan.format == "fp8" and plan.dtype is None and units == "fp8" else plan


def per_tensor(op: Operand) -> bool:
    """Whether an operand is FP8 codes and one scale, the same along both axes."""
    return op.format == "fp8" and op.rounding == "nearest" and op.hadamard is None


def serves_both(op: Operand) -> bool:
    """Whether an operand's transpose is what its sister GEMM sees."""
    return op.transposable or per_tensor(op)


def one_read(op: Operand) -> bool:
    """Whether one kernel can make this operand beside its sister, of the same kind of blocks."""
    return op.block_size > 1 and not op.transposable and op.format != "fp8-block"


def packable(op: Operand) -> bool:
    """Whether codes and scales are all there is to an operand."""
    return per_tensor(op) or (op.is_mx and not op.two_sided and not op.prescaled)


def takes_packed(pair: Gemm, mx: bool, fp8: bool) -> bool:
    """Whether a chip that multiplies MX blocks (`mx`), FP8 tensors (`fp8`) takes these two operands packed."""
    return _units(pair, mx, fp8) != "library"


def _units(pair: Gemm, mx: bool, fp8: bool, fp8_block: bool = False) -> str:
    """GemmPlan.units of two operands on such a chip."""
    if all(op.format == "fp8-block" and not op.two_sided for op in (pair.a, pair.b)):
        return "fp8-block" if fp8_block else "blocks"
    if per_tensor(pair.a) and per_tensor(pair.b):  # E5M2 twice is the one pairing that no library has
        return "fp8" if fp8 and not pair.a.elem == pair.b.elem == "e5m2" else "library"
    return "mx" if mx and all(op.is_mx and packable(op) for op in (pair.a, pair.b)) else "library"


# Sizes


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
