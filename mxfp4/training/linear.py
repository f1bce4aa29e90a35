"""MXFP4Linear: a linear layer whose three GEMMs take quantized operands.

Each operand is quantized from its high-precision source along the axis that its GEMM contracts, so X, W and G are
each quantized twice, in two orientations, and never from an already quantized copy. 2D blocks without a rotation are
the exception that P2 is about: one quantization serves both orientations.

    fprop  Y  [T, N] = X [T, K] . W [N, K]       contracts K
    dgrad  dX [T, K] = G [T, N] . W^T [K, N]     contracts N
    wgrad  dW [N, K] = G^T [N, T] . X^T [K, T]   contracts T (tokens)

Nothing quantized outlives the call, so an optimizer step, `p.data.copy_()` or `load_state_dict()` is always seen.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch
from torch import Tensor, nn

from mxfp4.numerics import ops
from mxfp4.numerics.formats import BLOCK, elem_format
from mxfp4.numerics.hadamard import Hadamard, rotate_last
from mxfp4.numerics.matmul import gemm, gemm_dtype
from mxfp4.numerics.philox import random16, random_signs
from mxfp4.numerics.quantize import fake_quantize
from mxfp4.numerics.rounding import round_nearest, round_stochastic
from mxfp4.training.recipe import GEMMS, ROTATIONS, TENSORS, Operand, Recipe, recipe

# Streams of random numbers, one an operand. `fake_quantize` takes the signs of a rotation from stream // 2, so the
# two operands of a GEMM rotate alike.
STREAMS = {key: i for i, key in enumerate((g, t) for g in GEMMS for t in TENSORS[g])}

DEFAULT_SKIP = ("output", "lm_head", "head", "router", "gate")



def _rotation(name: str) -> Hadamard:
    kind, size = name.rstrip("0123456789"), int(name.lstrip("frht"))
    if kind == "frht":
        return Hadamard(size, tuple(int(s) for s in random_signs(torch.tensor(0), size, stream=0)))
    return Hadamard(size, "seed" if kind == "rht" else None)


# The rotation that an Operand's `hadamard` names.
ROTATION = {None: None, **{name: _rotation(name) for name in ROTATIONS}}


def quantized_operand(t: Tensor, op: Operand, axis: int, seed: Tensor | None, stream: int) -> tuple[Tensor, Tensor | None]:
    """What a GEMM that contracts `axis` (-1 or 0) sees of the 2-D tensor `t`.

    Returns (values with the contraction axis last, in the dtype that carries them; a factor for the product or None).
    FP8 values are the element values, the factor undoes the per-tensor scale; all other formats need no factor.
    """
    carrier = gemm_dtype(t.device)
    if op.is_mx:
        free = op.transposable
        value = fake_quantize(
            t,
            axis=-1 if free else axis,
            block=op.block,
            elem=op.mx_elem,
            scale_rule=op.scale_rule,
            rounding=op.rounding,
            hadamard=ROTATION[op.hadamard],
            seed=seed,
            stream=stream,
            dtype=carrier,
        )
        return (value if axis == -1 else value.t()), None
    value = t if axis == -1 else t.t()
    if op.hadamard is not None:
        h = ROTATION[op.hadamard]
        value = rotate_last(value.float(), h.size, h.resolve(seed, stream // 2, t.device))
    if op.format == "fp32":
        return value.float(), None
    if op.format == "bf16":
        return value.to(torch.bfloat16).to(carrier), None
    return _fp8_per_tensor(value, op, seed, stream, carrier)


def _fp8_per_tensor(value: Tensor, op: Operand, seed, stream: int, carrier: torch.dtype) -> tuple[Tensor, Tensor]:
    """FP8 with one FP32 scale a tensor, taken from its current maximum ("current scaling"); a zero tensor keeps 1."""
    fmt = elem_format(op.elem)
    value = value.float()
    amax = value.abs().amax()
    scale = torch.where(amax > 0, fmt.max / amax, 1.0).clamp(max=torch.finfo(torch.float32).max)
    value = value * scale
    if op.rounding == "stochastic":
        value = round_stochastic(value, fmt, random16(seed, tuple(value.shape), stream))
    else:
        value = round_nearest(value, fmt)
    return value.to(carrier), 1.0 / scale


def quantized_gemm(
    which: str, a: Tensor, b: Tensor, layer_recipe: Recipe, seed: Tensor | None, out_dtype: torch.dtype, cache: dict
) -> Tensor:
    """One of the three GEMMs from its high-precision tensors: fprop(X, W), dgrad(G, W), wgrad(G, X).

    `cache` keeps what both orientations of a tensor can share within one forward or one backward.
    """
    axis_a, axis_b = {"fprop": (-1, -1), "dgrad": (-1, 0), "wgrad": (0, 0)}[which]
    pair = getattr(layer_recipe, which)
    values, factor = [], None
    for tensor, op, name, axis in zip((a, b), (pair.a, pair.b), TENSORS[which], (axis_a, axis_b), strict=True):
        if op.transposable:
            key = (name, op)
            if key not in cache:
                cache[key] = quantized_operand(tensor, op, -1, seed, _first_stream(name))[0]
            value, own = (cache[key] if axis == -1 else cache[key].t()), None
        else:
            value, own = quantized_operand(tensor, op, axis, seed, STREAMS[which, name])
        values.append(value)
        factor = own if factor is None else factor if own is None else factor * own
    a_value, b_value = values
    if a_value.dtype != b_value.dtype:  # one operand in high precision
        a_value, b_value = a_value.float(), b_value.float()
    if factor is None:
        return gemm(a_value, b_value, out_dtype)
    return (gemm(a_value, b_value, torch.float32) * factor).to(out_dtype)


def _first_stream(name: str) -> int:
    """One stream for a tensor in both its GEMMs: that of the first."""
    return min(i for (_, tensor), i in STREAMS.items() if tensor == name)


class _QuantizedLinear(torch.autograd.Function):
    """Y = X W^T and its backward, on 2-D X [T, K] with T padded to what the blocks need."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, layer_recipe: Recipe, seed: Tensor | None, out_dtype: torch.dtype):
        ctx.save_for_backward(x, weight, seed)
        ctx.layer_recipe, ctx.compute_dtype = layer_recipe, out_dtype
        with torch.autocast(x.device.type, enabled=False):
            return quantized_gemm("fprop", x, weight.to(out_dtype), layer_recipe, seed, out_dtype, {})

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, weight, seed = ctx.saved_tensors
        grad_x = grad_w = None
        cache: dict = {}
        with torch.autocast(x.device.type, enabled=False):
            if ctx.needs_input_grad[0]:
                w = weight.to(ctx.compute_dtype)
                grad_x = quantized_gemm("dgrad", grad, w, ctx.layer_recipe, seed, x.dtype, cache)
            if ctx.needs_input_grad[1]:
                out_dtype = weight.dtype if weight.dtype in (torch.float32, torch.bfloat16) else torch.float32
                grad_w = quantized_gemm("wgrad", grad, x, ctx.layer_recipe, seed, out_dtype, cache).to(weight.dtype)
        return grad_x, grad_w, None, None, None


class MXFP4Linear(nn.Linear):
    """nn.Linear, its GEMMs quantized by a recipe. Same parameters, same shapes, same state_dict.

    recipe: a recipe's name or a Recipe; `fqn`: the layer's full name, which picks the recipe's overrides and, with
    `seed`, the layer's random numbers. Every forward draws new ones; `set_step` makes them a function of the step.
    Raises ValueError where a feature size is not a multiple of what the recipe's blocks and rotations need.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *, recipe="mxfp4", fqn: str = "", seed: int = 0, **kw
    ):
        super().__init__(in_features, out_features, bias, **kw)
        self._configure(recipe, fqn, seed)

    @classmethod
    def from_linear(cls, linear: nn.Linear, recipe="mxfp4", *, fqn: str = "", seed: int = 0) -> MXFP4Linear:
        """The quantized layer around the parameters of `linear` (shared, not copied)."""
        layer = cls(linear.in_features, linear.out_features, linear.bias is not None, recipe=recipe, fqn=fqn, seed=seed, device="meta")
        layer.weight, layer.bias = linear.weight, linear.bias
        layer.rng = layer.rng.new_tensor([_layer_key(seed, fqn), 0], device=linear.weight.device)
        return layer.train(linear.training)

    def _configure(self, name, fqn: str, seed: int) -> None:
        self.fqn = fqn
        self.recipe = recipe(name).for_layer(fqn)
        problem = feature_problem(self.in_features, self.out_features, self.recipe)
        if problem:
            raise ValueError(f"layer {fqn or type(self).__name__!r}: {problem}")
        state = torch.tensor([_layer_key(seed, fqn), 0], dtype=torch.int64, device=self.weight.device)
        self.register_buffer("rng", state, persistent=False)  # (key of the layer, forwards so far)

    def draw_seed(self) -> Tensor | None:
        """The next call's seed, or None where the recipe draws nothing."""
        return ops.draw_seed(self.rng) if self.recipe.is_random else None

    def forward(self, x: Tensor) -> Tensor:
        device = x.device.type
        autocast = torch.is_autocast_enabled(device)
        out_dtype = torch.get_autocast_dtype(device) if autocast else x.dtype
        tokens = x.numel() // self.in_features if x.numel() else 0
        flat = x.reshape(tokens, self.in_features).to(out_dtype)
        multiple = token_multiple(self.recipe)
        padded = max(-(-tokens // multiple), 1) * multiple
        if padded != tokens:  # zero tokens add nothing to any of the three products
            flat = nn.functional.pad(flat, (0, 0, 0, padded - tokens))
        y = _QuantizedLinear.apply(flat, self.weight, self.recipe, self.draw_seed(), out_dtype)
        y = y[:tokens].reshape(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias.to(out_dtype)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, recipe={self.recipe.name}"


def token_multiple(layer_recipe: Recipe) -> int:
    """What the number of tokens is padded to: blocks and rotations along tokens (wgrad), and square blocks."""
    needs = [1]
    for (gemm_name, tensor), op in layer_recipe.operands().items():
        if op.is_mx and (gemm_name == "wgrad" or (op.block == "2d" and tensor != "w")):
            needs.append(BLOCK)
        if gemm_name == "wgrad" and op.hadamard:
            needs.append(ROTATION[op.hadamard].size)
    return max(needs)  # all are powers of two


def feature_problem(in_features: int, out_features: int, layer_recipe: Recipe) -> str | None:
    """Why these feature sizes do not fit the recipe, in a sentence, or None."""
    contracted = {"fprop": [("in_features", in_features)], "dgrad": [("out_features", out_features)], "wgrad": []}
    both = [("in_features", in_features), ("out_features", out_features)]
    for (gemm_name, tensor), op in layer_recipe.operands().items():
        if op.is_mx and op.block == "2d":
            sides = both if tensor == "w" else both[:1] if tensor == "x" else both[1:]
        else:
            sides = contracted[gemm_name]
        need = max(BLOCK if op.is_mx else 1, ROTATION[op.hadamard].size if op.hadamard else 1)
        for side, size in sides:
            if size % need:
                return f"{side}={size} is not a multiple of {need}, which recipe {layer_recipe.name!r} needs in {gemm_name}"
    return None


def default_filter(module: nn.Module, fqn: str) -> bool:
    """Every linear layer but the LM head and the routers of a mixture of experts. Embeddings and norms are no linears."""
    return fqn.rpartition(".")[2] not in DEFAULT_SKIP


def convert(
    model: nn.Module, name: str | Recipe, filter_fn: Callable[[nn.Module, str], bool] | None = None, *, seed: int = 0
) -> nn.Module:
    """Replace the nn.Linear layers of `model` for which `filter_fn(module, fqn)` holds by MXFP4Linear, in place.

    Parameters are shared, so optimizers and state_dicts stay valid. `filter_fn` None is `default_filter`. Raises
    ValueError, naming the layer and changing nothing, when a feature size does not fit the recipe.
    """
    chosen = recipe(name)
    keep = filter_fn or default_filter
    found = [(fqn, m) for fqn, m in model.named_modules() if type(m) is nn.Linear and keep(m, fqn)]
    made = {fqn: MXFP4Linear.from_linear(m, chosen, fqn=fqn, seed=seed) for fqn, m in found}
    for fqn, layer in made.items():
        if not fqn:
            return layer
        parent, _, child = fqn.rpartition(".")
        setattr(model.get_submodule(parent), child, layer)
    return model


def set_step(model: nn.Module, step: int) -> None:
    """Make the random numbers of every MXFP4Linear a function of (seed, layer, step, forwards since): resumable."""
    for module in model.modules():
        if isinstance(module, MXFP4Linear) and module.recipe.is_random:
            module.rng[1] = step << 20


def _layer_key(seed: int, fqn: str) -> int:
    digest = hashlib.blake2b(f"{seed}:{fqn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
