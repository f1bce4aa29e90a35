"""What quantization does to the tensors of one linear layer, and to the three products made of them.

A layer in one step is X [T, K], W [N, K], G = dL/dY [T, N], in high precision. Everything here is a function of those
three and of a recipe. Results are `Rows`: {(gemm, tensor, metric): 0-d FP32 tensor on the device}, so that a GPU is
asked for numbers once, at the end.

Metrics of an operand t (tensor "x", "w", "g" of a GEMM), in the basis that the GEMM contracts (after the rotation):

| metric                    | meaning                                                                     |
|---------------------------|-----------------------------------------------------------------------------|
| error                     | norm of Q(t) - t over norm of t                                             |
| bias                      | <Q(t), t> / <t, t> - 1: -0.01 is one percent too short                      |
| clipped                   | share of the values that lie above the format's largest, times the scale    |
| flushed                   | share of the nonzero values that become 0                                   |
| log2_amax_q05, _q50, _q95 | quantiles over blocks of log2 of the block's largest magnitude              |
| kurtosis                  | mean over blocks of 32 of mean(t^4) / mean(t^2)^2 (2.8 for Gaussian blocks) |
| peak                      | mean over blocks of largest magnitude / root mean square (1 to sqrt(32))    |
| kurtosis_before, peak_before | the same before the rotation, where there is one                         |
| split_scale, split_dead, split_grid, dead_share | parts of error^2 of an FP4 operand: see `error_split`  |

Metrics of a product ("y", "dx", "dw") against the product of the unquantized tensors, r: `error`, `bias` as above;
`cosine`; `systematic`, the norm of the error's expectation over the recipe's random numbers, over the norm of r (equal
to `error` for a deterministic recipe); `pattern_redraw`, the cosine between the errors of two draws.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from mxfp4.diagnostics.error_split import has_split, split, split_all
from mxfp4.layers.gemms import (  # fmt: skip
    AXES,
    ROTATION,
    STREAMS,
    both_operands,
    product,
    quantized_operand,
    token_multiple,
)
from mxfp4.layers.recipe import GEMMS, TENSORS, Operand, Recipe
from mxfp4.numerics.formats import BLOCK, e8m0_value, elem_format
from mxfp4.numerics.ops import block_quantize as ops
from mxfp4.numerics.ops.rotate import rotated
from mxfp4.numerics.reference import block_amax, spread
from mxfp4.numerics.scale_rules import scale_byte

Rows = dict[tuple[str, str, str], Tensor]
PRODUCTS = {"fprop": "y", "dgrad": "dx", "wgrad": "dw"}
QUANTILES = (0.05, 0.5, 0.95)


@dataclass(frozen=True)
class Captured:
    """The tensors of the layer called `fqn` in one step: x [T, K], w [N, K], g [T, N], T padded to whole blocks."""

    fqn: str
    x: Tensor
    w: Tensor
    g: Tensor
    _exact: dict[str, Tensor] = field(default_factory=dict, repr=False)

    def sides(self, gemm: str) -> tuple[Tensor, Tensor]:
        """The two tensors that `gemm` multiplies, in the order of the recipe's operands."""
        a, b = (getattr(self, name) for name in TENSORS[gemm])
        return a, b

    def exact(self, gemm: str) -> Tensor:
        """The product of the unquantized tensors, FP32: Y [T, N], dX [T, K] or dW [N, K]. Computed once."""
        if gemm not in self._exact:
            a, b = (oriented(t.float(), AXES[gemm, n]) for t, n in zip(self.sides(gemm), TENSORS[gemm], strict=True))
            self._exact[gemm] = a @ b.t()
        return self._exact[gemm]


def pad_tokens(t: Tensor, *recipes: Recipe) -> Tensor:
    """`t` [T, K] with zero tokens added up to whole blocks for each of `recipes`, and for MX blocks in any case."""
    multiple = max(BLOCK, *(token_multiple(r) for r in recipes))
    return F.pad(t, (0, 0, 0, -len(t) % multiple))


def fresh_seed(key: Tensor, step: int, draw: int) -> Tensor:
    """A seed for measurements: a function of the layer's `key` (0-d int64), the step and the draw.

    Counts from the middle of the step's range, which the layer's own forwards never reach.
    """
    counter = torch.stack([key, torch.full_like(key, (step << 20) + (1 << 19) + draw)])
    return ops.draw_seed(counter)


def oriented(t: Tensor, axis: int) -> Tensor:
    """`t` [R, C] with the contracted axis (-1 or 0) last."""
    return t if axis == -1 else t.t()


def in_basis(t: Tensor, op: Operand, axis: int, seed: Tensor | None, stream: int) -> Tensor:
    """The unquantized operand as its GEMM would contract it: rotated, FP32, the contracted axis last."""
    if op.two_sided:
        return oriented(rotated(t, ROTATION[op.hadamard].size, both=True), axis)
    value, h = oriented(t.float(), axis), ROTATION[op.hadamard]
    if h is None:
        return value
    return rotated(value, h.size, h.resolve(seed, stream // 2, t.device))


def from_basis(value: Tensor, op: Operand, axis: int, seed: Tensor | None, stream: int) -> Tensor:
    """The inverse of `in_basis`: back in the tensor's own orientation, unrotated."""
    h = ROTATION[op.hadamard]
    if op.two_sided:
        return rotated(oriented(value, axis), h.size, both=True)
    if h is not None:
        value = rotated(value, h.size, h.resolve(seed, stream // 2, value.device), inverse=True)
    return oriented(value, axis)


def block_scales(basis: Tensor, op: Operand) -> Tensor:
    """FP32 scale of each element of an MX operand, from what `in_basis` gives, in its own units; shaped like it.

    A prescaled operand is 3/4 of its values under the rule that never clips, so a unit of it is 4/3 of the scale.
    """
    factor, rule = (0.75, "rceil") if op.prescaled else (1.0, op.scale_rule)
    fmt = elem_format(op.elem or "e2m1")
    amax = block_amax((basis * factor).contiguous(), op.block)
    return spread(e8m0_value(scale_byte(amax, fmt, rule)), op.block) / factor


def values(pair: tuple[Tensor, Tensor | None]) -> Tensor:
    """FP32 values of a prepared operand, its per-tensor factor multiplied in."""
    value, factor = pair
    return value.float() if factor is None else value.float() * factor


def prepared(layer: Captured, recipe: Recipe, seed: Tensor | None) -> dict[tuple[str, str], tuple]:
    """{(gemm, tensor): (values, factor)} of the six operands, made by the code that the layer itself runs."""
    made = {}
    for name in ("x", "w", "g"):
        gemms = [g for g in GEMMS if name in TENSORS[g]]
        pairs = both_operands(getattr(layer, name), name, recipe, seed)
        made |= {(gemm, name): pair for gemm, pair in zip(gemms, pairs, strict=True)}
    return made


@torch.no_grad()
def operand_rows(layer: Captured, recipe: Recipe, seed: Tensor | None, made: dict | None = None) -> Rows:
    """The operand metrics of the module's table for the six operands of `recipe` (of one layer: no overrides)."""
    made = made or prepared(layer, recipe, seed)
    rows: Rows = {}
    for (gemm, name), op in recipe.operands().items():
        t, axis, stream = getattr(layer, name), AXES[gemm, name], STREAMS[gemm, name]
        basis = in_basis(t, op, axis, seed, stream)
        found = _error(values(made[gemm, name]), basis)
        if op.is_mx and not _quantized_again(recipe, gemm, name):
            found["clipped"] = _clipped(basis, op)
        if has_split(op) and not _quantized_again(recipe, gemm, name):
            found |= split(values(made[gemm, name]), basis, op)
        found |= _blocks(basis)
        if op.hadamard is not None:
            before = _blocks(oriented(t.float(), axis))
            found |= {f"{metric}_before": before[metric] for metric in ("kurtosis", "peak")}
        rows |= {(gemm, name, metric): value for metric, value in found.items()}
    return rows


@torch.no_grad()
def split_rows(layer: Captured, recipe: Recipe, seed: Tensor | None) -> Rows:
    """The metrics of `error_split` for the FP4 operands of `recipe` (of one layer: no overrides).

    Operands that `requantize` makes from quantized ones are left out.
    """
    by_key = recipe.operands()
    keys = [key for key, op in by_key.items() if has_split(op) and not _quantized_again(recipe, *key)]
    if not keys:
        return {}
    made = prepared(layer, recipe, seed)
    bases = [in_basis(getattr(layer, key[1]), by_key[key], AXES[key], seed, STREAMS[key]) for key in keys]
    found = split_all([(values(made[key]), basis, by_key[key]) for key, basis in zip(keys, bases, strict=True)])
    return {(*key, metric): value for key, parts in zip(keys, found, strict=True) for metric, value in parts.items()}


@torch.no_grad()
def rule_rows(layer: Captured, op: Operand) -> Rows:
    """error, bias, clipped, flushed and the split of each tensor in each GEMM under one MX `op`.

    `op` is unrotated and rounds to nearest.
    """
    rows: Rows = {}
    for (gemm, name), axis in AXES.items():
        t = oriented(getattr(layer, name).float(), axis).contiguous()
        q = values(quantized_operand(t, op, -1, None, 0))
        found = _error(q, t) | {"clipped": _clipped(t, op)} | (split(q, t, op) if has_split(op) else {})
        rows |= {(gemm, name, metric): value for metric, value in found.items()}
    return rows


@torch.no_grad()
def product_rows(layer: Captured, recipe: Recipe, seeds: list[Tensor], made: dict | None = None) -> tuple[Rows, Tensor]:
    """The product metrics of the module's table, over as many draws as there are seeds, and the error of dW.

    A recipe without random numbers is computed once. `made` are the operands of the first seed.
    """
    seeds = seeds if recipe.is_random else seeds[:1]
    exact = {gemm: layer.exact(gemm) for gemm in GEMMS}
    total = {gemm: torch.zeros_like(r) for gemm, r in exact.items()}
    squares = {gemm: torch.zeros((), device=layer.w.device) for gemm in GEMMS}
    cosine = dict(squares)
    dw_error = total["wgrad"]
    for i, seed in enumerate(seeds):
        operands = made if made and i == 0 else prepared(layer, recipe, seed)
        for gemm, (a, b) in TENSORS.items():
            y = product(gemm, operands[gemm, a], operands[gemm, b], recipe, torch.float32)
            error = y - exact[gemm]
            total[gemm] += error
            squares[gemm] = squares[gemm] + _dot(error, error)
            cosine[gemm] = cosine[gemm] + _cosine(y, exact[gemm])
            if gemm == "wgrad" and i == 0:
                dw_error = error
    n, rows = len(seeds), {}
    for gemm, name in PRODUCTS.items():
        r, mean_square = _dot(exact[gemm], exact[gemm]), squares[gemm] / n
        # between different draws, <e_i, e_j> has the square of the mean error as its expectation
        shared = (_dot(total[gemm], total[gemm]) - squares[gemm]) / (n * (n - 1)) if n > 1 else mean_square
        found = {
            "error": (mean_square / r).sqrt(),
            "systematic": (shared.clamp(min=0) / r).sqrt(),
            "cosine": cosine[gemm] / n,
            "bias": _dot(total[gemm], exact[gemm]) / n / r,
            "pattern_redraw": shared / mean_square,
        }
        rows |= {(gemm, name, metric): value for metric, value in found.items()}
    return rows, dw_error


@torch.no_grad()
def dw_error(layer: Captured, recipe: Recipe, made: dict) -> Tensor:
    """Wgrad's own error: the product of the prepared operands `made` less the exact one, FP32 [N, K]."""
    return product("wgrad", made["wgrad", "g"], made["wgrad", "x"], recipe, torch.float32) - layer.exact("wgrad")


@torch.no_grad()
def weight_errors(layer: Captured, recipe: Recipe, seed: Tensor | None, made: dict | None = None) -> dict[str, Tensor]:
    """{"fprop", "dgrad": Q(W) - W, FP32 [N, K]}, rotated back, so that the errors of two steps can be compared."""
    made = made or prepared(layer, recipe, seed)
    errors = {}
    for gemm in ("fprop", "dgrad"):
        op, axis, stream = recipe.operands()[gemm, "w"], AXES[gemm, "w"], STREAMS[gemm, "w"]
        errors[gemm] = from_basis(values(made[gemm, "w"]), op, axis, seed, stream) - layer.w.float()
    return errors


def pattern_cosine(a: Tensor, b: Tensor) -> Tensor:
    """<a, b> / (|a| |b|) of two error patterns; NaN where one of them is zero."""
    return _dot(a, b) / (_dot(a, a) * _dot(b, b)).sqrt()


def compare(y: Tensor, r: Tensor) -> dict[str, Tensor]:
    """error, bias and cosine of `y` against the reference `r`."""
    d = y - r
    rr = _dot(r, r)
    return {"error": (_dot(d, d) / rr).sqrt(), "bias": _dot(d, r) / rr, "cosine": _cosine(y, r)}


def _error(q: Tensor, t: Tensor) -> dict[str, Tensor]:
    nonzero = t != 0
    flushed = (nonzero & (q == 0)).float().sum() / nonzero.sum()
    return {k: v for k, v in compare(q, t).items() if k != "cosine"} | {"flushed": flushed}


def _quantized_again(recipe: Recipe, gemm: str, name: str) -> bool:
    """Whether this operand is quantized from what the forward quantized already."""
    return recipe.requantize and gemm != "fprop" and name != "g"


def _clipped(basis: Tensor, op: Operand) -> Tensor:
    return (basis.abs() > block_scales(basis, op) * elem_format(op.elem or "e2m1").max).float().mean()


def _blocks(t: Tensor) -> dict[str, Tensor]:
    """The block statistics of an operand, zero blocks left out."""
    blocks = t.contiguous().view(-1, BLOCK)
    amax = blocks.abs().amax(-1, keepdim=True)
    amax = torch.where(amax > 0, amax, torch.nan)
    square = (blocks / amax).square()  # of size 1: fourth powers of gradients would underflow
    m2 = square.mean(-1)
    levels = torch.nanquantile(amax.log2(), torch.tensor(QUANTILES, device=t.device))
    names = [f"log2_amax_q{round(100 * q):02d}" for q in QUANTILES]
    return {
        "kurtosis": (square.square().mean(-1) / m2.square()).nanmean(),
        "peak": m2.rsqrt().nanmean(),
        **dict(zip(names, levels, strict=True)),
    }


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum()


def _cosine(y: Tensor, r: Tensor) -> Tensor:
    return _dot(y, r) / (_dot(y, y) * _dot(r, r)).sqrt()
