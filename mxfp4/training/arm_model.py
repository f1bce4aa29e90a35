"""The model of an arm: converted to its recipe, with the initial weights of its seed or with another model's weights."""

from __future__ import annotations

import torch

from mxfp4.layers.convert import convert
from mxfp4.layers.recipe import Recipe
from mxfp4.numerics.ops.fp8_delayed import BUFFERS
from mxfp4.training.config import TrainConfig
from mxfp4.training.execution.attention import set_attention
from mxfp4.training.execution.choices import PLAIN, Execution
from mxfp4.training.execution.distributed import Ranks
from mxfp4.training.model import Llama, build_model


def initial_model(
    config: TrainConfig, device: torch.device, ranks: Ranks, execution: Execution = PLAIN
) -> Llama:  # fmt: skip
    """The converted model with its initial weights, spread over the ranks where there are several."""
    if ranks.size == 1:
        return convert(build_model(config.model, config.seed, device), config.recipe, seed=config.seed)
    with torch.device("meta"):
        model = convert(Llama(config.model), config.recipe, seed=config.seed)
    sharded = ranks.shard(
        model, device, reduce_dtype=config.reduce_dtype, reshard_after_forward=execution.reshard_after_forward
    )
    return sharded.init_weights(config.seed)


def in_recipe(model: Llama, config: TrainConfig, name: str | Recipe) -> Llama:
    """A model that shares the parameters of `model`, and histories of delayed scaling where both have them, and computes
    with another recipe; for one rank."""
    twin = convert(build_model(config.model, config.seed, next(model.parameters()).device), name, seed=config.seed)
    for full_name, parameter in model.named_parameters():
        parent, _, own = full_name.rpartition(".")
        setattr(twin.get_submodule(parent), own, parameter)
    set_attention(twin, model.layers[0].attention.backend)
    histories = {n: b for n, b in model.named_buffers() if n.rpartition(".")[2] in BUFFERS}
    for full_name in [n for n, _ in twin.named_buffers() if n in histories]:
        parent, _, own = full_name.rpartition(".")
        twin.get_submodule(parent)._buffers[own] = histories[full_name]
    return twin
