"""Extra backward passes of a model under training: its gradient in another recipe, and the tensors of its layers.

Nothing here leaves a trace: recipes, gradients, buffers, random numbers and the training mode are put back, so a run
that was looked at has the bytes of one that was not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from mxfp4.diagnostics.operand_error import Captured, pad_tokens
from mxfp4.layers.gemms import size_problem
from mxfp4.layers.linear import MXFP4Linear, set_step
from mxfp4.layers.recipe import Recipe, layer_index, recipe
from mxfp4.training.evaluation import token_loss


def quantized_layers(model: nn.Module) -> dict[str, MXFP4Linear]:
    """{full name: layer} of the converted layers, in the model's order."""
    return {m.fqn: m for m in model.modules() if isinstance(m, MXFP4Linear)}


def recipe_of(layer: MXFP4Linear, name: str | Recipe, n_layers: int) -> Recipe:
    """The recipe called `name` as it applies to `layer`; the layer's own where its sizes do not fit `name`."""
    wanted = recipe(name).for_layer(layer.fqn, n_layers)
    return layer.recipe if size_problem(layer.in_features, layer.out_features, wanted) else wanted


def depth(model: nn.Module) -> int:
    """Number of blocks that hold converted layers: what `convert` counts a recipe's tail by."""
    return 1 + max((i for i in map(layer_index, quantized_layers(model)) if i is not None), default=-1)


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Run anything on `model` inside, eagerly; afterwards its gradients, buffers, recipes and mode are as before."""
    layers = quantized_layers(model)
    recipes = {fqn: layer.recipe for fqn, layer in layers.items()}
    gradients = [(p, p.grad) for p in model.parameters()]
    buffers = [(b, b.clone()) for b in model.buffers()]
    training = {m: m.training for m in model.modules()}
    devices = [p.device for p in model.parameters() if p.device.type == "cuda"][:1]
    for p, _ in gradients:
        p.grad = None
    try:
        with torch.random.fork_rng(devices=devices), torch.compiler.set_stance("force_eager"), torch.enable_grad():
            yield
    finally:
        with torch.no_grad():
            for b, value in buffers:
                b.copy_(value)
        for p, grad in gradients:
            p.grad = grad
        for fqn, layer in layers.items():
            layer.recipe = recipes[fqn]
        for module, mode in training.items():
            module.training = mode


@contextmanager
def swapped(model: nn.Module, name: str | Recipe | None) -> Iterator[None]:
    """Inside, the converted layers of `model` compute by the recipe `name` (None: their own)."""
    layers, n_layers = quantized_layers(model), depth(model)
    own = {fqn: layer.recipe for fqn, layer in layers.items()}
    try:
        for layer in layers.values():
            layer.recipe = layer.recipe if name is None else recipe_of(layer, name, n_layers)
        yield
    finally:
        for fqn, layer in layers.items():
            layer.recipe = own[fqn]


def gradients(
    model: nn.Module, batch: Tensor, step: int, name: str | Recipe | None = None, draw: int = 0
) -> dict[str, Tensor]:
    """{parameter: gradient} of the training objective on `batch` [sequences, seq + 1], as recipe `name` computes it.

    With draw 0 the random numbers are those of the real training step `step`; other draws give others. For use
    inside `untouched`: parameters are left without gradients.
    """
    with swapped(model, name):
        set_step(model, step, draw << 10, rank=0)
        objective = token_loss(model, batch)
        balance = model.balance_loss() if hasattr(model, "balance_loss") else None
        if balance is not None:
            objective = objective + model.config.aux_loss_weight * balance
        objective.backward()
    found = {n: p.grad.float() for n, p in model.named_parameters() if p.grad is not None}
    for p in model.parameters():
        p.grad = None
    return found


def product_of_halves(model: nn.Module, batch: Tensor, step: int, whole: dict[str, Tensor]) -> dict[str, Tensor]:
    """{parameter: inner product, 0-d, of its BF16 gradients on the first and the second half of `batch`}.

    Its expectation over batches is the squared norm of the mean gradient, because the halves are independent. `whole`
    is the BF16 gradient on `batch`, of which the second half is what the first leaves: one backward pass of half a
    batch. A batch of one sequence gives {}. A parameter that the first half does not reach (an expert that was not
    chosen) has gradient 0 there. With experts the load-balance loss, which is no mean over sequences, makes the second
    half approximate. For use inside `untouched`.
    """
    n, half = len(batch), len(batch) // 2
    if not half:
        return {}
    first = gradients(model, batch[:half], step, "bf16")
    zero = torch.zeros((), device=batch.device)
    weight = half / n
    return {
        name: ((g - weight * first[name]) * first[name]).sum() / (1 - weight) if name in first else zero
        for name, g in whole.items()
    }


@contextmanager
def capturing(layers: dict[str, MXFP4Linear]) -> Iterator[dict[str, Captured]]:
    """Record X, W and G of `layers` in the forward and backward that run inside; the dict is filled on leaving.

    A layer that saw no token (an expert that was not chosen) is left out.
    """
    seen: dict[str, dict[str, Tensor]] = {fqn: {} for fqn in layers}
    out: dict[str, Captured] = {}

    def watch(layer: MXFP4Linear, args, y: Tensor) -> None:
        tensors = seen[layer.fqn]
        tensors["x"] = args[0].detach().reshape(-1, layer.in_features).to(y.dtype)
        if y.requires_grad:
            y.register_hook(lambda g: tensors.update(g=g.detach().reshape(-1, layer.out_features)))

    handles = [layer.register_forward_hook(watch) for layer in layers.values()]
    try:
        yield out
    finally:
        for handle in handles:
            handle.remove()
    for fqn, layer in layers.items():
        tensors = seen[fqn]
        if "g" in tensors and len(tensors["x"]):
            x, g = (pad_tokens(tensors[name], layer.recipe) for name in ("x", "g"))
            out[fqn] = Captured(fqn, x, layer.weight.detach().to(x.dtype), g)
