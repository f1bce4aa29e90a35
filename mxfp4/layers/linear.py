"""MXFP4Linear: nn.Linear whose three GEMMs take operands quantized by a recipe.

Nothing quantized outlives a forward and its backward, so an optimizer step, `p.data.copy_()` or `load_state_dict()`
is always seen. The exception is asked for: inside `weights_kept` the forwards share the quantized weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.optim.optimizer import register_optimizer_step_post_hook

from mxfp4.layers.gemms import multiply
from mxfp4.layers.operands import Quantized, quantize_tensor
from mxfp4.layers.plan import SAVES, LayerPlan, layer_plan, size_problem
from mxfp4.layers.quest import project
from mxfp4.layers.recipe import Recipe, recipe
from mxfp4.numerics.formats import check_float, one_of
from mxfp4.numerics.ops.draws import LayerDraws, default_rank
from mxfp4.numerics.ops.matmul import as_dtype


class _QuantizedLinear(torch.autograd.Function):
    """Y = X W^T and its backward, on 2-D X [T, K] with T padded to what the blocks need.

    Each of X, W and G is read once, for both GEMMs that it is an operand of; what the backward needs of X and W is kept
    quantized, in place of the originals. `seed`, 0-d int64, is all that the random numbers depend on beside the plan.
    `weight_cache`, if given, holds what an earlier forward made of W.
    """

    @staticmethod
    def forward(
        ctx, x: Tensor, weight: Tensor, plan: LayerPlan, seed: Tensor | None, out_dtype: torch.dtype,
        weight_cache: dict | None,
    ):  # fmt: skip
        x_fprop, x_wgrad = quantize_tensor(x, plan.x, seed)
        w_fprop, w_dgrad = _quantize_weight(weight, plan, seed, out_dtype, weight_cache)
        y = multiply(plan.fprop, x_fprop, w_fprop, out_dtype)
        ctx.save_for_backward(*(x_wgrad or _NOTHING), *(w_dgrad or _NOTHING), seed)
        ctx.plan, ctx.x_dtype, ctx.w_dtype = plan, x.dtype, weight.dtype
        return y

    @staticmethod
    @once_differentiable  # what it keeps is quantized: a second derivative would miss X and W without a word
    def backward(ctx, grad: Tensor):
        x, x_scale, w, w_scale, seed = ctx.saved_tensors
        plan, grad_x, grad_w = ctx.plan, None, None
        g_dgrad, g_wgrad = quantize_tensor(grad, plan.g, seed)
        if plan.dgrad is not None:
            grad_x = multiply(plan.dgrad, g_dgrad, Quantized(w, w_scale), ctx.x_dtype)
        if plan.wgrad is not None:
            accumulated = ctx.w_dtype if ctx.w_dtype == torch.bfloat16 else torch.float32
            grad_w = as_dtype(multiply(plan.wgrad, g_wgrad, Quantized(x, x_scale), accumulated), ctx.w_dtype)
        return grad_x, grad_w, None, None, None, None


_NOTHING = (None, None)


def _quantize_weight(weight: Tensor, plan: LayerPlan, seed: Tensor | None, out_dtype: torch.dtype, cache: dict | None):
    """`quantize_tensor` of W, from `cache` where that holds it and W has not changed since."""
    if cache is None or weight.is_inference():  # whose changes nothing counts
        return quantize_tensor(as_dtype(weight, out_dtype), plan.w, seed)
    memory = weight.untyped_storage()  # held on to, so that no other weight gets its address
    place = (memory._cdata, weight.storage_offset(), weight.shape, weight.stride())
    key = (*place, weight.dtype, weight._version, plan.w, out_dtype)
    if key not in cache:
        cache.clear()
        cache[key] = quantize_tensor(as_dtype(weight, out_dtype), plan.w, seed), memory
    return cache[key][0]


class MXFP4Linear(nn.Linear):
    """nn.Linear, its GEMMs quantized by a recipe. Same parameters, same shapes, same state_dict.

    recipe: a recipe's name or a Recipe; `fqn`: the layer's full name, which picks the recipe's overrides and, with
    `n_layers`, whether it belongs to a tail in BF16, and with `seed`, the layer's random numbers. Every forward of a
    training draws new ones; `set_step` makes them a function of the step. In eval mode stochastic rounding becomes
    nearest and random rotations stay the same, unless `draws_in_eval` is set. `save`: how MX and FP8 operands wait for
    the backward on chips that do not multiply them packed: as "values" (2 bytes an element on a GPU) or "packed" (0.53,
    FP8 1, unpacked in the backward); the results are the same.
    Raises ValueError where a feature size is not a positive multiple of what the recipe's blocks and rotations need;
    called, TypeError for an x that is no float tensor.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *, recipe="mxfp4", fqn: str = "",
        seed: int = 0, n_layers: int = 0, save: str = "values", **kw
    ):  # fmt: skip
        super().__init__(in_features, out_features, bias, **kw)
        self.save = one_of("save", save, SAVES)
        self.draws_in_eval = False
        self.weight_cache: dict | None = None  # what forwards share of the quantized weight, inside `weights_kept`
        self._plans: tuple[Recipe, dict] | None = None
        self._configure(recipe, fqn, seed, n_layers)

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, recipe="mxfp4", *, fqn: str = "", seed: int = 0, n_layers: int = 0, save: str = "values"
    ) -> MXFP4Linear:
        """The quantized layer around the parameters of `linear` (shared, not copied)."""
        options = {"recipe": recipe, "fqn": fqn, "seed": seed, "n_layers": n_layers, "save": save}
        layer = cls(linear.in_features, linear.out_features, linear.bias is not None, device="meta", **options)
        layer.weight, layer.bias = linear.weight, linear.bias
        layer.draws.on(linear.weight.device)
        return layer.train(linear.training)

    def _configure(self, name, fqn: str, seed: int, n_layers: int) -> None:
        self.fqn, self.draws = fqn, LayerDraws(seed, fqn)
        self.recipe = recipe(name).for_layer(fqn, n_layers)
        problem = size_problem(self.in_features, self.out_features, self.recipe)
        if problem:
            raise ValueError(f"layer {fqn or type(self).__name__!r}: {problem}")
        self.draws.on(self.weight.device)

    def _apply(self, fn, recurse: bool = True):
        super()._apply(fn, recurse)
        own = next(self.parameters(), None)
        if own is not None:  # before a graph is captured or compiled
            self.draws.on(own.device)
        return self

    @property
    def keepable(self) -> bool:
        """Whether one quantized weight may serve several forwards: it takes no random numbers (nor QuEST's clip)."""
        of_w = (op for (_, name), op in self.recipe.operands().items() if name == "w")
        return not self.recipe.quest and not any(op.is_random for op in of_w)

    def __getstate__(self) -> dict:
        """What copies and pickles of the layer hold: not what `weights_kept` has the layer itself keep for a while."""
        return {**self.__dict__, "weight_cache": None, "_plans": None}

    def plan(self, device: torch.device | str | None = None, needs_grad: tuple[bool, bool] = (True, True)) -> LayerPlan:
        """What the layer's GEMMs do to their operands on `device` (None: the weight's), where X and W need a gradient or
        not: printed as a table. Made once for each."""
        nearest = not (self.training or self.draws_in_eval)
        if torch.compiler.is_compiling():  # a constant there
            return layer_plan(self.recipe, self.weight.device, needs_grad, self.save, nearest)
        if self._plans is None or self._plans[0] is not self.recipe:
            self._plans = self.recipe, {}
        plans, key = self._plans[1], (device or self.weight.device, needs_grad, nearest)
        if key not in plans:
            plans[key] = layer_plan(self.recipe, torch.device(key[0]), needs_grad, self.save, nearest)
        return plans[key]

    def forward(self, x: Tensor) -> Tensor:
        check_float(x)
        if x.is_nested:
            raise TypeError(
                f"layer {self.fqn or type(self).__name__!r} got a nested tensor, which it does not multiply; allowed: a plain "
                "one, such as torch.nested.to_padded_tensor(x, 0.0) or, of a jagged one, x.values()"
            )
        device = x.device.type
        autocast = torch.is_autocast_enabled(device)
        out_dtype = torch.get_autocast_dtype(device) if autocast else x.dtype
        out_features, in_features = self.weight.shape  # of this rank's part, where the layer is split among several
        if x.shape[-1:] != (in_features,):
            raise ValueError(
                f"layer {self.fqn or type(self).__name__!r}: x of shape {tuple(x.shape)} must end in in_features={in_features}"
            )
        weight, grad = self.weight, torch.is_grad_enabled()
        plan = self.plan(weight.device, (grad and x.requires_grad, grad and weight.requires_grad))
        tokens = x.numel() // in_features
        flat = as_dtype(x if x.ndim == 2 else x.reshape(tokens, in_features), out_dtype)
        padded = max(-(-tokens // plan.token_multiple), 1) * plan.token_multiple
        if padded != tokens:  # zero tokens add nothing to any of the three products
            flat = nn.functional.pad(flat, (0, 0, 0, padded - tokens))
        if self.recipe.quest:
            flat, weight = project(flat, out_dtype), project(weight, out_dtype)
        seed = None
        if plan.is_random:
            draws = self.training or self.draws_in_eval
            seed = self.draws.next(weight.device) if draws else self.draws.in_evaluation(weight.device)
        y = _QuantizedLinear.apply(flat, weight, plan, seed, out_dtype, self.weight_cache)
        if padded != tokens:
            y = y[:tokens]
        if x.ndim != 2:
            y = y.reshape(*x.shape[:-1], out_features)
        return y if self.bias is None else y + as_dtype(self.bias, out_dtype)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, recipe={self.recipe.name}"


def set_step(model: nn.Module, step: int, forwards: int = 0, rank: int | None = None) -> None:
    """Make the random numbers of every MXFP4Linear a function of (seed, layer, rank, step, forwards of it): resumable.

    forwards: how many of the step's forwards went before the next one. rank: of the process among those that share a
    step's batch; None is torch.distributed's, or 0. Draws of two ranks are independent.
    """
    rank = default_rank() if rank is None else rank
    layers = [m for m in model.modules() if isinstance(m, MXFP4Linear) and m.recipe.is_random]
    counts = [count for layer in layers if (count := layer.draws.set(step, forwards, rank)) is not None]
    if counts:  # all of them in a launch or two
        torch._foreach_zero_(counts)
        torch._foreach_add_(counts, layers[0].draws.position)


@contextmanager
def weights_kept(model: nn.Module) -> Iterator[None]:
    """Quantize each weight once for all forwards inside: the parts of a step, the batches of an evaluation.

    For layers that draw no random numbers for their weights; others draw new ones at every forward, as outside. The
    results are the same. A changed weight is seen (an optimizer's step, load_state_dict, any operation in place), but
    for one written through `.data` inside, whose version PyTorch does not count; nothing is kept after leaving. Costs
    the quantized weights' memory; not for compiled layers, nor for FSDP, where it would keep every layer whole on each
    rank.
    """
    layers = [m for m in model.modules() if isinstance(m, MXFP4Linear) and m.keepable]

    def forget(*_) -> None:  # a fused optimizer's step does not count as a version either
        for layer in layers:
            layer.weight_cache = {}

    forget()
    hook = register_optimizer_step_post_hook(forget)
    try:
        yield
    finally:
        hook.remove()
        for layer in layers:
            layer.weight_cache = None
