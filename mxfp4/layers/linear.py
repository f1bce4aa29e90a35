"""MXFP4Linear: nn.Linear whose three GEMMs take operands quantized by a recipe.

Nothing quantized outlives a forward and its backward, so an optimizer step, `p.data.copy_()` or `load_state_dict()`
is always seen. The exception is asked for: inside `weights_kept` or `weights_made` the forwards share the quantized
weights.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from mxfp4.errors import Notice
from mxfp4.layers import parallel
from mxfp4.layers.gemms import multiply
from mxfp4.layers.operands import Quantized, quantize_tensor
from mxfp4.layers.plan import SAVES, LayerPlan, layer_plan, size_problem, token_multiple
from mxfp4.layers.quest import first_derivative, project
from mxfp4.layers.recipe import Recipe, recipe
from mxfp4.numerics.formats import check_float, one_of
from mxfp4.numerics.gemm_backends.choice import requested
from mxfp4.numerics.gemm_backends.library import as_dtype
from mxfp4.numerics.ops import vmap
from mxfp4.numerics.ops.draws import LayerDraws, distributed_runs
from mxfp4.numerics.ops.fp8_delayed import BUFFERS, PLACES, advance, delayed_amax, see_amax


class _QuantizedLinear(torch.autograd.Function):
    """Y = X W^T and its backward, on 2-D X [T, K] with T padded to what the blocks need.

    Each of X, W and G is read once, for both GEMMs that it is an operand of; what the backward needs of X and W is kept
    quantized, in place of the originals. `seed`, 0-d int64, is all that the random numbers depend on beside the plan.
    `weight_cache`, if given, holds what an earlier forward made of W. `made`, if given, is W already quantized: `places`
    has the places in it of Fprop's data and scale and of Dgrad's.
    """

    @staticmethod
    def forward(
        ctx, x: Tensor, weight: Tensor, plan: LayerPlan, seed: Tensor | None, out_dtype: torch.dtype,
        weight_cache: dict | None, x_amax: Tensor | None, w_amax: Tensor | None, history: Tensor | None,
        g_seen: Tensor | None, update: bool, places: tuple[int | None, ...], *made: Tensor,
    ):  # fmt: skip
        x_fprop, x_wgrad = quantize_tensor(x, plan.x, seed, x_amax)
        if made:
            data, scale, data_dgrad, scale_dgrad = (None if i is None else made[i] for i in places)
            w_fprop, w_dgrad = Quantized(data, scale), Quantized(data_dgrad, scale_dgrad)
        else:
            w_fprop, w_dgrad = _quantize_weight(weight, plan, seed, out_dtype, weight_cache, w_amax)
        y = multiply(plan.fprop, x_fprop, w_fprop, out_dtype)
        ctx.save_for_backward(*(x_wgrad or _NOTHING), *(w_dgrad or _NOTHING), seed)
        ctx.plan, ctx.x_dtype, ctx.w_dtype, ctx.n_made = plan, x.dtype, weight.dtype, len(made)
        ctx.history, ctx.g_seen, ctx.update = history, g_seen, update  # not saved: other backwards may change them
        return y

    @staticmethod
    @first_derivative  # what it keeps is quantized: a second derivative would miss X and W without a word
    def backward(ctx, grad: Tensor):
        x, x_scale, w, w_scale, seed = ctx.saved_tensors
        plan, grad_x, grad_w = ctx.plan, None, None
        g_amax = None
        if plan.g.amax is not None and ctx.history is not None:
            g_amax = _amax(grad, "g", plan.g.amax, ctx.history, ctx.g_seen, grad.dtype, ctx.update)
        g_dgrad, g_wgrad = quantize_tensor(grad, plan.g, seed, g_amax)
        if plan.dgrad is not None:
            grad_x = multiply(plan.dgrad, g_dgrad, Quantized(w, w_scale), ctx.x_dtype)
        if plan.wgrad is not None:
            accumulated = ctx.w_dtype if ctx.w_dtype == torch.bfloat16 else torch.float32
            grad_w = as_dtype(multiply(plan.wgrad, g_wgrad, Quantized(x, x_scale), accumulated), ctx.w_dtype)
        return grad_x, grad_w, *(None,) * (10 + ctx.n_made)


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


class WeightMade(NamedTuple):
    """A weight quantized before the forwards that use it."""

    dtype: torch.dtype | None
    """That those compute in."""
    places: tuple[int | None, ...]
    """In `tensors`, of Fprop's data and scale and of Dgrad's: a compiler takes no tensor twice, and they may share one."""
    tensors: tuple[Tensor, ...]


NOT_MADE = WeightMade(None, (), ())
NOT_DELAYED = (None, None, None, None, False)


def _amax(t: Tensor, tensor: str, algorithm: str, history: Tensor, seen: Tensor, dtype: torch.dtype, update: bool):
    """What the delayed scale of X, W or G in `dtype` is made of, FP32, 0-d; `update`: t's own maximum is counted."""
    row, _, place = PLACES[tensor]
    amax, own = delayed_amax(history, t.detach(), row, algorithm, dtype)
    if update:
        see_amax(seen, own, place)
    return amax


def _quantize_weight(
    weight: Tensor, plan: LayerPlan, seed: Tensor | None, out_dtype: torch.dtype, cache: dict | None,
    amax: Tensor | None,
):  # fmt: skip
    """`quantize_tensor` of W, from `cache` where that holds it and W has not changed since."""
    if cache is None or weight.is_inference():  # whose changes nothing counts
        return quantize_tensor(as_dtype(weight, out_dtype), plan.w, seed, amax)
    memory = weight.untyped_storage()  # held on to, so that no other weight gets its address
    place = (memory._cdata, weight.storage_offset(), weight.shape, weight.stride())
    key = (*place, weight.dtype, weight._version, plan.w, out_dtype)
    if key not in cache:
        cache.clear()
        cache[key] = quantize_tensor(as_dtype(weight, out_dtype), plan.w, seed, amax), memory
    return cache[key][0]


def _is_known(condition: bool) -> bool:
    """`condition` on sizes; of symbolic ones, whether it holds at every size: a question that leaves no guard."""
    if not torch.compiler.is_compiling():
        return condition
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # slow to import

    return statically_known_true(condition)


class MXFP4Linear(nn.Linear):
    """nn.Linear, its GEMMs quantized by a recipe. Same parameters, same shapes, same state_dict.

    Recipes with delayed scaling add the buffers `amax_history`, `amax_forward` and `amax_backward`
    (`numerics.ops.fp8_delayed`), to the state_dict as well; `set_step` ends a step of theirs. A state_dict without them
    loads, as no history. Forwards in eval mode, or without gradients, use the history and add nothing to it. Under
    DistributedDataParallel pass broadcast_buffers=False: it would replace what the ranks have seen by rank 0's.

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
        self.weight_made: WeightMade | None = None  # that weight, made before the forwards of `weights_made`
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
        layer._without_history(linear.weight.device)
        return layer.train(linear.training)

    def _configure(self, name, fqn: str, seed: int, n_layers: int) -> None:
        self.fqn, self.draws = fqn, LayerDraws(seed, fqn)
        self.recipe = recipe(name).for_layer(fqn, n_layers)
        problem = size_problem(self.in_features, self.out_features, self.recipe)
        if problem:
            raise ValueError(f"layer {fqn or type(self).__name__!r}: {problem}")
        self.draws.on(self.weight.device)
        self.last_step: int | None = None
        """That `set_step` named last; of recipes with delayed scaling."""
        if self.recipe.is_delayed:
            for buffer, shape in BUFFERS.items():
                self.register_buffer(buffer, torch.empty(shape, dtype=torch.float32, device="meta"))
            self._without_history(self.weight.device)

    def _without_history(self, device: torch.device) -> None:
        """Forget the maxima of earlier steps, on `device`."""
        for buffer, shape in BUFFERS.items() if "amax_history" in self._buffers else ():
            self._buffers[buffer] = torch.zeros(shape, dtype=torch.float32, device=device)

    def _load_from_state_dict(self, state_dict, prefix, *args):
        if "amax_history" in self._buffers and not any(prefix + buffer in state_dict for buffer in BUFFERS):
            none = {prefix + b: torch.zeros(s, dtype=torch.float32, device="cpu") for b, s in BUFFERS.items()}
            state_dict = {**state_dict, **none}
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _apply(self, fn, recurse: bool = True):
        before = {name: self._buffers[name] for name in BUFFERS if name in self._buffers}
        super()._apply(fn, recurse)
        for name, old in before.items():
            new = self._buffers[name]
            if old.is_meta and not new.is_meta:  # `to_empty` leaves them undefined
                new.zero_()
            elif new.dtype != torch.float32:  # they stay FP32, whatever the weights are cast to
                self._buffers[name] = old.to(new.device)
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
        return {**self.__dict__, "weight_cache": None, "weight_made": None, "_plans": None}

    def plan(self, device: torch.device | str | None = None, needs_grad: tuple[bool, bool] = (True, True)) -> LayerPlan:
        """What the layer's GEMMs do to their operands on `device` (None: the weight's), where X and W need a gradient or
        not: printed as a table. Made once for each."""
        nearest = not (self.training or self.draws_in_eval)
        if torch.compiler.is_compiling():  # a constant there
            return layer_plan(self.recipe, self.weight.device, needs_grad, self.save, nearest)
        if self._plans is None or self._plans[0] is not self.recipe:
            self._plans = self.recipe, {}
        plans, key = self._plans[1], (device or self.weight.device, needs_grad, nearest, requested())
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
            if self._delays(plan):
                raise NotImplementedError(
                    f"layer {self.fqn or type(self).__name__!r}: delayed scaling keeps a history, which functions of "
                    "torch.func cannot; use a recipe without it, such as fp8"
                )
            y = _TransformedLinear.apply(flat, as_dtype(weight, out_dtype), plan, seed, out_dtype)
        else:
            made = (
                self.weight_made if self.weight_made is not None and self.weight_made.dtype == out_dtype else NOT_MADE
            )
            amax = self._amaxes(flat, weight, plan, out_dtype) if self._delays(plan) else NOT_DELAYED
            y = _QuantizedLinear.apply(
                flat, weight, plan, seed, out_dtype, self.weight_cache, *amax, made.places, *made.tensors
            )
        if not aligned:
            y = y[:tokens]
        return y if x.ndim == 2 else y.reshape(*x.shape[:-1], out_features)

    def _delays(self, plan: LayerPlan) -> bool:
        """Whether a scale comes from the history; a recipe that is only tried on the layer finds none."""
        delayed = plan.x.amax or plan.w.amax or plan.g.amax
        return delayed is not None and "amax_history" in self._buffers

    def _amaxes(self, x: Tensor, weight: Tensor, plan: LayerPlan, dtype: torch.dtype) -> tuple:
        """The last five arguments of `_QuantizedLinear`."""
        update = self.training and torch.is_grad_enabled()
        if update and self.last_step is None and not torch.compiler.is_compiling():
            self.last_step = 0
            warnings.warn(
                f"recipe {self.recipe.name!r} scales by earlier steps: call mxfp4.set_step(model, step) before each one, "
                "or it scales by the current maximum as fp8 does",
                Notice,
                stacklevel=3,
            )
        history, forward = self.amax_history, self.amax_forward
        x_amax, w_amax = (
            None if p.amax is None else _amax(t, p.tensor, p.amax, history, forward, dtype, update)
            for t, p in ((x, plan.x), (weight, plan.w))
        )
        return x_amax, w_amax, history, self.amax_backward, update

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, recipe={self.recipe.name}"


def set_step(model: nn.Module, step: int, forwards: int = 0, rank: int | None = None) -> None:
    """Make the random numbers of every MXFP4Linear a function of (seed, layer, rank, step, forwards of it): resumable.

    forwards: how many of the step's forwards went before the next one. rank: of the process among those that share a
    step's batch; None is torch.distributed's, or 0. Draws of two ranks are independent. Under tensor parallelism the
    ranks that split a weight have one rank here: what they all compute draws alike, their shards draw independently.

    Delayed scaling: where the step is another one than before, ends that one (`end_step`). All ranks call it then.
    """
    delayed = [m for m in model.modules() if isinstance(m, MXFP4Linear) and "amax_history" in m._buffers]
    if any(layer.last_step != step for layer in delayed):
        end_step(model)
        for layer in delayed:
            layer.last_step = step
    if rank is None:
        rank = parallel.data_rank(model) if distributed_runs() else 0
    layers = [m for m in model.modules() if isinstance(m, MXFP4Linear) and m.recipe.is_random]
    counts = [count for layer in layers if (count := layer.draws.set(step, forwards, rank)) is not None]
    if counts:  # all of them in a launch or two
        torch._foreach_zero_(counts)
        torch._foreach_add_(counts, layers[0].draws.position)


def end_step(model: nn.Module) -> None:
    """Delayed scaling: the maxima that the layers of `model` have seen since the last call become the newest entries of
    their histories, over all ranks. For layers that saw none it changes nothing, so it may be called again.

    Call it before a checkpoint is made on several ranks: until then each rank has seen its own. The maximum is over the
    device mesh of a sharded weight (FSDP2, HSDP), else over all ranks, which must then have the same layers: pipeline
    stages of unsharded layers are not supported.
    """
    states: dict[tuple, list[dict[str, Tensor]]] = {}
    for m in model.modules():
        if isinstance(m, MXFP4Linear) and "amax_history" in m._buffers and not m.amax_history.is_meta:
            mesh = getattr(m.weight, "device_mesh", None)
            states.setdefault((m.amax_history.device, mesh), []).append({b: m._buffers[b] for b in BUFFERS})
    for (_, mesh), found in states.items():
        groups: list = []
        if dist.is_available() and dist.is_initialized():
            groups = [None] if mesh is None else [mesh.get_group(i) for i in range(mesh.ndim)]
        advance(found, groups)


@contextmanager
def weights_kept(model: nn.Module) -> Iterator[None]:
    """Quantize each weight once for all forwards inside: the parts of a step, the batches of an evaluation.

    For layers that draw no random numbers for their weights; others draw new ones at every forward, as outside. The
    results are the same. A changed weight is seen (an optimizer's step, load_state_dict, any operation in place), but
    for one written through `.data` inside, whose version PyTorch does not count; nothing is kept after leaving. Costs
    the quantized weights' memory. For compiled layers and FSDP there is `weights_made`.
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


@contextmanager
def weights_made(model: nn.Module, dtype: torch.dtype | None = None) -> Iterator[None]:
    """Quantize each weight before the forwards inside, for all of them: `weights_kept` for compiled blocks and for FSDP2
    that keeps gathered parameters (`reshard_after_forward=False`).

    dtype: that the forwards compute in, autocast's; None: each weight's. For the same layers as `weights_kept`, with the
    same results. Once a weight changes (an optimizer's step; any operation in place on it or on this rank's part of
    it, seen at the model's next forward), no layer uses what was made. Layers with delayed scaling take no part. Costs the quantized weights' memory, and under
    FSDP2 every parameter gathered from here on.
    """
    layers = [
        m for m in model.modules() if isinstance(m, MXFP4Linear) and m.keepable and not m.recipe.is_delayed
    ]  # delayed scaling looks at the weight in each forward
    versions = [_version(layer.weight) for layer in layers]  # sharded: the gathered copies have one of their own
    sources = [layer.weight for layer in layers]

    def forget(*_) -> None:
        for layer in layers:
            layer.weight_made = None

    def look(*_) -> None:
        if any(_version(source) != version for source, version in zip(sources, versions, strict=True)):
            forget()

    for module in model.modules():
        if hasattr(module, "unshard"):  # of FSDP2
            module.unshard()
    with torch.no_grad():
        for layer in layers:
            layer.weight_made = _made(layer, dtype or layer.weight.dtype)
    hooks = [register_optimizer_step_post_hook(forget), model.register_forward_pre_hook(look)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        forget()


def _version(weight: Tensor) -> int:
    """How often a tensor, or this rank's part of a DTensor, was written in place."""
    return getattr(weight, "_local_tensor", weight)._version


def _made(layer: MXFP4Linear, dtype: torch.dtype) -> WeightMade:
    """A layer's weight as its forward in `dtype` and the backward read it."""
    made = [t for one in quantize_tensor(as_dtype(layer.weight, dtype), layer.plan().w, None) for t in one]
    tensors = tuple({id(t): t for t in made if t is not None}.values())
    of = {id(t): i for i, t in enumerate(tensors)}
    return WeightMade(dtype, tuple(of.get(id(t)) for t in made), tensors)
