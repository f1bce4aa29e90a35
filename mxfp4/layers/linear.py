"""MXFP4Linear: nn.Linear whose three GEMMs take operands quantized by a recipe.

Nothing quantized outlives a forward and its backward, so an optimizer step, `p.data.copy_()` or `load_state_dict()`
is always seen. The exception is asked for: inside `weights_kept` the forwards share the quantized weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from mxfp4.layers import parallel
from mxfp4.layers.gemms import multiply
from mxfp4.layers.operands import Quantized, quantize_tensor
from mxfp4.layers.plan import SAVES, LayerPlan, layer_plan, size_problem, token_multiple
from mxfp4.layers.quest import first_derivative, project
from mxfp4.layers.recipe import Recipe, recipe
from mxfp4.numerics.formats import check_float, one_of
from mxfp4.numerics.ops import vmap
from mxfp4.numerics.ops.draws import LayerDraws, distributed_runs
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
    @first_derivative  # what it keeps is quantized: a second derivative would miss X and W without a word
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


class _TransformedLinear(torch.autograd.Function):
    """`_QuantizedLinear` under torch.func, whose functions keep inputs alone: the backward quantizes X and W again, with
    the same draws, hence to the same bytes. A backward needs both gradients, as nested transforms hide what does not."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, plan: LayerPlan, seed: Tensor | None, out_dtype: torch.dtype) -> Tensor:
        x_fprop, w_fprop = quantize_tensor(x, plan.x, seed)[0], quantize_tensor(weight, plan.w, seed)[0]
        return multiply(plan.fprop, x_fprop, w_fprop, out_dtype)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, weight, ctx.plan, seed, _ = inputs
        ctx.save_for_backward(x, weight, seed)

    @staticmethod
    def backward(ctx, grad: Tensor):
        vmap.refuse_twice()
        x, weight, seed = ctx.saved_tensors
        plan = ctx.plan
        with torch.no_grad():
            g_dgrad, g_wgrad = quantize_tensor(grad, plan.g, seed)
            grad_x = multiply(plan.dgrad, g_dgrad, quantize_tensor(weight, plan.w, seed)[1], x.dtype)
            accumulated = weight.dtype if weight.dtype == torch.bfloat16 else torch.float32
            grad_w = multiply(plan.wgrad, g_wgrad, quantize_tensor(x, plan.x, seed)[1], accumulated)
        return grad_x, as_dtype(grad_w, weight.dtype), None, None, None

    @staticmethod
    def jvp(ctx, *tangents):
        raise NotImplementedError(vmap.NO_JVP)


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


def _is_known(condition: bool) -> bool:
    """`condition` on sizes; of symbolic ones, whether it holds at every size: a question that leaves no guard."""
    if not torch.compiler.is_compiling():
        return condition
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # slow to import

    return statically_known_true(condition)


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
        if x.shape[-1:] != (self.weight.shape[1],):
            raise ValueError(
                f"layer {self.fqn or type(self).__name__!r}: x of shape {tuple(x.shape)} must end in "
                f"in_features={self.weight.shape[1]}"
            )
        if parallel.is_dtensor(self.weight) or parallel.is_dtensor(x):
            name = self.fqn or type(self).__name__
            multiple = token_multiple(self.recipe)
            y = parallel.multiply_shards(x, self.weight, self.recipe, multiple, name, self._product)
        else:
            y = self._product(x, self.weight)
        return y if self.bias is None else y + as_dtype(self.bias, y.dtype)

    def _product(self, x: Tensor, weight: Tensor, seed_offset: int = 0) -> Tensor:
        """X W^T of plain tensors: this rank's shards, where the layer is split among several."""
        device = x.device.type
        autocast = torch.is_autocast_enabled(device)
        out_dtype = torch.get_autocast_dtype(device) if autocast else x.dtype
        out_features, in_features = weight.shape
        grad = torch.is_grad_enabled() and not torch.compiler.is_exporting()
        transformed = vmap.transformed()
        needs_grad = (True, True) if transformed else (grad and x.requires_grad, grad and weight.requires_grad)
        plan = self.plan(weight.device, needs_grad)
        tokens = x.numel() // in_features
        flat = as_dtype(x if x.ndim == 2 else x.reshape(tokens, in_features), out_dtype)
        # `tokens` plus a remainder: a compiler knows that this is no less than `tokens`, at any size of them.
        padding = plan.token_multiple if _is_known(tokens == 0) else -tokens % plan.token_multiple
        aligned = _is_known(padding == 0)
        if not aligned:  # zero tokens add nothing to any of the three products
            flat = nn.functional.pad(flat, (0, 0, 0, padding))
        if self.recipe.quest:
            flat, weight = project(flat, out_dtype), project(weight, out_dtype)
        seed = None
        if plan.is_random:
            draws = self.training or self.draws_in_eval
            seed = self.draws.next(weight.device) if draws else self.draws.in_evaluation(weight.device)
            seed = seed + seed_offset if seed_offset else seed
        if transformed:
            y = _TransformedLinear.apply(flat, as_dtype(weight, out_dtype), plan, seed, out_dtype)
        else:
            y = _QuantizedLinear.apply(flat, weight, plan, seed, out_dtype, self.weight_cache)
        if not aligned:
            y = y[:tokens]
        return y if x.ndim == 2 else y.reshape(*x.shape[:-1], out_features)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, recipe={self.recipe.name}"


def set_step(model: nn.Module, step: int, forwards: int = 0, rank: int | None = None) -> None:
    """Make the random numbers of every MXFP4Linear a function of (seed, layer, rank, step, forwards of it): resumable.

    forwards: how many of the step's forwards went before the next one. rank: of the process among those that share a
    step's batch; None is torch.distributed's, or 0. Draws of two ranks are independent. Under tensor parallelism the
    ranks that split a weight have one rank here: what they all compute draws alike, their shards draw independently.
    """
    if rank is None:
        rank = parallel.data_rank(model) if distributed_runs() else 0
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
