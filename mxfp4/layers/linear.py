"""MXFP4Linear: nn.Linear whose three GEMMs take operands quantized by a recipe.

Nothing quantized outlives a forward and its backward, so an optimizer step, `p.data.copy_()` or `load_state_dict()`
is always seen. The exception is asked for: inside `weights_kept` the forwards share the quantized weights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.optim.optimizer import register_optimizer_step_post_hook

from mxfp4.layers import operands as prepared
from mxfp4.layers.gemms import size_problem, token_multiple
from mxfp4.layers.quest import project
from mxfp4.layers.recipe import Recipe, recipe
from mxfp4.numerics.formats import check_float, one_of
from mxfp4.numerics.ops import block_quantize as ops


class _QuantizedLinear(torch.autograd.Function):
    """Y = X W^T and its backward, on 2-D X [T, K] with T padded to what the blocks need.

    The forward reads X and W once and prepares what the backward will need of them in place of the originals, packed
    where the chip multiplies packed operands or where `save` says so. Which gradients are wanted comes in as `wanted`
    (of X, of W), as grad mode is always off in here. `kept`, if given, holds what an earlier forward made of W.
    """

    @staticmethod
    def forward(
        ctx, x: Tensor, weight: Tensor, layer_recipe: Recipe, seed: Tensor | None, out_dtype, wanted, save="values",
        kept: dict | None = None,
    ):  # fmt: skip
        operands = layer_recipe.operands()

        def made_of(t: Tensor, name: str, back: str, needed: bool) -> tuple:
            packed = prepared.runs_packed("fprop", layer_recipe, x.device)
            if not needed:
                return prepared.prepare(t, "fprop", name, layer_recipe, seed, packed), None
            keep = prepared.runs_packed(back, layer_recipe, x.device) or (
                save == "packed" and prepared.packable(operands[back, name])
            )
            return prepared.prepare_both(t, name, layer_recipe, seed, (packed, keep))

        with torch.autocast(x.device.type, enabled=False):
            x_now, x_later = made_of(x, "x", "wgrad", wanted[1])
            if kept is None or weight.is_inference():  # whose changes nothing counts
                w_now, w_later = made_of(weight.to(out_dtype), "w", "dgrad", wanted[0])
            else:
                memory = weight.untyped_storage()  # held on to, so that no other weight gets its address
                place = (memory._cdata, weight.storage_offset(), weight.shape, weight.stride())
                key = (*place, weight.dtype, weight._version, layer_recipe, out_dtype, wanted[0])
                if key not in kept:
                    kept.clear()
                    kept[key] = (*made_of(weight.to(out_dtype), "w", "dgrad", wanted[0]), memory)
                w_now, w_later, _ = kept[key]
            y = prepared.multiply("fprop", x_now, w_now, layer_recipe, out_dtype)
        tensors, ctx.plan = prepared.flatten(x_later, w_later)
        ctx.save_for_backward(*tensors, *([] if seed is None else [seed]))
        ctx.wanted, ctx.layer_recipe, ctx.x_dtype, ctx.w_dtype = wanted, layer_recipe, x.dtype, weight.dtype
        ctx.seeded = seed is not None
        return y

    @staticmethod
    @once_differentiable  # what it keeps is quantized: a second derivative would miss X and W without a word
    def backward(ctx, grad: Tensor):
        tensors, layer_recipe = list(ctx.saved_tensors), ctx.layer_recipe
        seed = tensors.pop() if ctx.seeded else None
        x, w = prepared.rebuild(tensors, ctx.plan)
        need_x, need_w = ctx.wanted
        grad_x = grad_w = None
        packed = tuple(prepared.runs_packed(which, layer_recipe, grad.device) for which in ("dgrad", "wgrad"))
        with torch.autocast(grad.device.type, enabled=False):
            if need_x and need_w:
                for_dgrad, for_wgrad = prepared.prepare_both(grad, "g", layer_recipe, seed, packed)
            else:
                which = "dgrad" if need_x else "wgrad"
                for_dgrad = for_wgrad = prepared.prepare(grad, which, "g", layer_recipe, seed, packed[int(need_w)])
            if need_x:
                grad_x = prepared.multiply("dgrad", for_dgrad, w, layer_recipe, ctx.x_dtype)
            if need_w:
                accumulated = ctx.w_dtype if ctx.w_dtype == torch.bfloat16 else torch.float32
                grad_w = prepared.multiply("wgrad", for_wgrad, x, layer_recipe, accumulated).to(ctx.w_dtype)
        return grad_x, grad_w, None, None, None, None, None, None


class MXFP4Linear(nn.Linear):
    """nn.Linear, its GEMMs quantized by a recipe. Same parameters, same shapes, same state_dict.

    recipe: a recipe's name or a Recipe; `fqn`: the layer's full name, which picks the recipe's overrides and, with
    `n_layers`, whether it belongs to a tail in BF16, and with `seed`, the layer's random numbers. Every forward draws
    new ones; `set_step` makes them a function of the step. `save`: how MX and FP8 operands wait for the backward on
    chips that do not multiply them packed: as "values" (2 bytes an element on a GPU) or "packed" (0.53, FP8 1, unpacked
    in the backward); the results are the same.
    Raises ValueError where a feature size is not a positive multiple of what the recipe's blocks and rotations need;
    called, TypeError for an x that is no float tensor.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *, recipe="mxfp4", fqn: str = "",
        seed: int = 0, n_layers: int = 0, save: str = "values", **kw
    ):  # fmt: skip
        super().__init__(in_features, out_features, bias, **kw)
        self.save = one_of("save", save, prepared.SAVES)
        self.kept: dict | None = None  # what forwards share of the quantized weight, inside `weights_kept`
        self._configure(recipe, fqn, seed, n_layers)

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, recipe="mxfp4", *, fqn: str = "", seed: int = 0, n_layers: int = 0, save: str = "values"
    ) -> MXFP4Linear:
        """The quantized layer around the parameters of `linear` (shared, not copied)."""
        how = {"recipe": recipe, "fqn": fqn, "seed": seed, "n_layers": n_layers, "save": save}
        layer = cls(linear.in_features, linear.out_features, linear.bias is not None, device="meta", **how)
        layer.weight, layer.bias = linear.weight, linear.bias
        layer.init_rng(linear.weight.device)
        return layer.train(linear.training)

    def _configure(self, name, fqn: str, seed: int, n_layers: int) -> None:
        self.fqn, self.key = fqn, _layer_key(seed, fqn)
        self.recipe = recipe(name).for_layer(fqn, n_layers)
        problem = size_problem(self.in_features, self.out_features, self.recipe)
        if problem:
            raise ValueError(f"layer {fqn or type(self).__name__!r}: {problem}")
        self.register_buffer("rng", None, persistent=False)  # (key of the layer, forwards so far)
        self.init_rng(self.weight.device)

    def init_rng(self, device: torch.device | None) -> None:
        """Start the layer's random numbers anew, on `device`; also after `to_empty` from the meta device."""
        self.rng = torch.tensor([self.key, 0], dtype=torch.int64, device=device)

    def draw_seed(self) -> Tensor | None:
        """The next call's seed, or None where the recipe draws nothing."""
        return ops.draw_seed(self.rng) if self.recipe.is_random else None

    @property
    def keepable(self) -> bool:
        """Whether one quantized weight may serve several forwards: it takes no random numbers (nor QuEST's clip)."""
        of_w = (op for (_, name), op in self.recipe.operands().items() if name == "w")
        return not self.recipe.quest and not any(op.is_random for op in of_w)

    def __getstate__(self) -> dict:
        """What copies and pickles of the layer hold: not what `weights_kept` has the layer itself keep for a while."""
        return {**self.__dict__, "kept": None}

    def forward(self, x: Tensor) -> Tensor:
        check_float(x)
        device = x.device.type
        autocast = torch.is_autocast_enabled(device)
        out_dtype = torch.get_autocast_dtype(device) if autocast else x.dtype
        out_features, in_features = self.weight.shape  # of this rank's part, where the layer is split among several
        if x.shape[-1:] != (in_features,):
            raise ValueError(
                f"layer {self.fqn or type(self).__name__!r}: x of shape {tuple(x.shape)} must end in in_features={in_features}"
            )
        tokens = x.numel() // in_features
        flat = x.reshape(tokens, in_features).to(out_dtype)
        multiple = token_multiple(self.recipe)
        padded = max(-(-tokens // multiple), 1) * multiple
        if padded != tokens:  # zero tokens add nothing to any of the three products
            flat = nn.functional.pad(flat, (0, 0, 0, padded - tokens))
        weight = self.weight
        if self.recipe.quest:
            flat, weight = project(flat, out_dtype), project(weight, out_dtype)
        wanted = tuple(torch.is_grad_enabled() and t.requires_grad for t in (flat, weight))
        y = _QuantizedLinear.apply(flat, weight, self.recipe, self.draw_seed(), out_dtype, wanted, self.save, self.kept)
        y = y[:tokens].reshape(*x.shape[:-1], out_features)
        return y if self.bias is None else y + self.bias.to(out_dtype)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, recipe={self.recipe.name}"


def set_step(model: nn.Module, step: int, forwards: int = 0) -> None:
    """Make the random numbers of every MXFP4Linear a function of (seed, layer, step, forwards of it): resumable.

    forwards: how many of the step's forwards went before the next one, on other ranks.
    """
    layers = (m for m in model.modules() if isinstance(m, MXFP4Linear) and m.recipe.is_random)
    counters = [layer.rng[1:] for layer in layers]
    if counters:  # all of them in a launch or two
        torch._foreach_zero_(counters)
        torch._foreach_add_(counters, (step << 20) + forwards)


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
            layer.kept = {}

    forget()
    hook = register_optimizer_step_post_hook(forget)
    try:
        yield
    finally:
        hook.remove()
        for layer in layers:
            layer.kept = None


def _layer_key(seed: int, fqn: str) -> int:
    digest = hashlib.blake2b(f"{seed}:{fqn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
