"""Megatron-LM (megatron-core 0.19): our recipes in its transformer layers; by the same specs in Primus.

    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    spec = quantized_spec(get_gpt_layer_local_spec(normalization="RMSNorm"), "mxfp4+h16")
    GPTModel(config, transformer_layer_spec=spec, ...)          # or: --transformer-impl local --spec MODULE spec
    mxfp4.set_step(model, iteration)                            # before each step: resumed runs draw the same numbers

`quantized_spec` changes the class that a layer's spec builds. The new class builds the layer as it was, then turns its
`ColumnParallelLinear` and `RowParallelLinear` into ones whose GEMMs a recipe quantizes, shared and sequential experts'
too. Embedding, output layer and routers are outside of those and stay. Parameters, their attributes and checkpoints
stay Megatron's; tensor and sequence parallelism are its own operators around the layer, and a block is quantized from
the part of a matrix that its rank holds. Layers are numbered over the whole model, so a recipe's BF16 tail is the
model's, not a pipeline stage's.

Two costs: the collectives of tensor parallelism do not overlap with the backward's GEMMs, and weight gradients are not
accumulated inside the GEMM (`gradient_accumulation_fusion` has no effect on converted layers, whose gradients Megatron
adds to `main_grad` itself). Transformer Engine's modules bring their own GEMMs and are refused by name.

Source of the protocols: megatron/core/tensor_parallel/layers.py (`_forward_impl`), transformer/spec_utils.py.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any, ClassVar

from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.tensor_parallel.random import CheckpointFunction
from megatron.core.transformer.moe.router import Router
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from mxfp4.errors import UserError
from mxfp4.layers.experts import ExpertLinear, bare_layer
from mxfp4.layers.recipe import Override, Recipe, recipe
from mxfp4.layers.report import NOTES, Notes
from mxfp4.layers.roles import Roles
from mxfp4.layers.swap import change_class
from mxfp4.numerics.ops.draws import know_checkpoint

know_checkpoint(CheckpointFunction)  # so that a recomputed forward rounds as the first one did


class _Quantized(nn.Module):
    """The GEMMs of a parallel linear layer, by `quantized`, which takes the weight with each call."""

    quantized: ExpertLinear
    quantized_parameters: ClassVar = {"weight": "quantized"}
    """{parameter: the submodule that multiplies with it}, for `mxfp4.report`."""

    def _forward_impl(
        self, input: Tensor, weight: Tensor, bias: Tensor | None, *, allreduce_dgrad: bool = False,
        sequence_parallel: bool = False, tp_group=None, **unused,
    ) -> Tensor:  # fmt: skip
        """Y = input `weight`^T + `bias`; input is gathered, its gradient reduced, as Megatron's GEMM does itself."""
        if sequence_parallel:
            input = gather_from_sequence_parallel_region(input, tensor_parallel_output_grad=True, group=tp_group)
        elif allreduce_dgrad:
            input = copy_to_tensor_model_parallel_region(input, group=tp_group)
        return self.quantized(input, weight.view_as(weight), bias)  # no parameter of another module


class MXFP4ColumnParallelLinear(_Quantized, ColumnParallelLinear):
    """ColumnParallelLinear whose GEMMs a recipe quantizes."""


class MXFP4RowParallelLinear(_Quantized, RowParallelLinear):
    """RowParallelLinear whose GEMMs a recipe quantizes."""


_CLASSES = {ColumnParallelLinear: MXFP4ColumnParallelLinear, RowParallelLinear: MXFP4RowParallelLinear}


def quantized_spec(spec, name: str | Recipe, *, seed: int = 0, skip: tuple[str, ...] = ()):
    """The spec of a layer, or of a block of them, whose layers are converted to a recipe when they are built.

    Args:
        spec: a ModuleSpec of TransformerLayer or of a subclass, as get_gpt_layer_local_spec makes it; or
            TransformerBlockSubmodules with such layers, as get_gpt_decoder_block_spec makes them.
        name: the recipe, or its name.
        seed: of the recipe's random numbers.
        skip: last parts of the names of linear layers that are left out, such as "linear_fc2".

    Returns:
        A new spec; `spec` is unchanged.

    Raises:
        UserError: the spec builds no TransformerLayer. The model's constructor then raises it for a layer that cannot
            be converted, and ValueError for one whose size does not fit the recipe.

    """
    chosen = recipe(name)
    if isinstance(spec, TransformerBlockSubmodules):
        layers = [quantized_spec(layer, chosen, seed=seed, skip=skip) for layer in spec.layer_specs or ()]
        return replace(spec, layer_specs=layers)
    module = getattr(spec, "module", None)
    if not (isinstance(module, type) and issubclass(module, TransformerLayer)):
        raise UserError(
            f"{getattr(module, '__name__', spec)!r} is no TransformerLayer; allowed: a spec such as "
            "get_gpt_layer_local_spec() returns"
        )
    how = {"mxfp4_recipe": chosen, "mxfp4_seed": seed, "mxfp4_skip": skip}
    return ModuleSpec(_converting(module), {**spec.params, **how}, spec.submodules, spec.metainfo)


@cache
def _converting(cls: type[TransformerLayer]) -> type[TransformerLayer]:
    """A subclass that converts itself once it is built."""

    def __init__(self, *args, mxfp4_recipe: Recipe, mxfp4_seed: int, mxfp4_skip: tuple[str, ...], **kwargs):
        cls.__init__(self, *args, **kwargs)
        _convert(self, mxfp4_recipe, mxfp4_seed, mxfp4_skip)

    return type(f"MXFP4{cls.__name__}", (cls,), {"__init__": __init__, "__module__": __name__})


def _convert(layer: TransformerLayer, chosen: Recipe, seed: int, skip: tuple[str, ...]) -> None:
    """Convert the linear layers of a TransformerLayer, changing nothing before all of them are known to fit."""
    index, depth = layer.layer_number - 1, layer.config.num_layers
    roles, notes, made = Roles(layer), Notes(recipes=[chosen.name]), {}
    for fqn, m in layer.named_modules():
        if not any(p is not None and p.ndim > 1 for p in m._parameters.values()) or isinstance(m, Router):
            continue
        if fqn.rpartition(".")[2] in skip:
            notes.left_out[fqn] = "skip"
            continue
        _refuse(m, fqn)
        full = f"{'mtp' if layer.is_mtp_layer else 'layers'}.{index}.{fqn}"
        where: dict[str, Any] = {"index": -1 if layer.is_mtp_layer else index, "aliases": roles.aliases(fqn)}
        part = chosen.part_of(full, depth, **where)
        notes.parts[f"{fqn}.weight"] = part.layers if isinstance(part, Override) else _PARTS[part]
        outer, inner = m.weight.shape
        made[fqn] = bare_layer(inner, outer, chosen.for_layer(full, depth, **where), full, seed)
    parts = set(notes.parts.values())
    for override in chosen.overrides:
        if parts - {_PARTS["tail"]} and override.layers not in parts:
            raise UserError(
                f"recipe {chosen.name!r}: its part for {override.layers!r} found none of {', '.join(made)}; use a "
                "recipe without it"
            )
    for fqn, quantized in made.items():
        m = layer.get_submodule(fqn)
        change_class(m, _CLASSES[type(m)])
        m.quantized = quantized.train(m.training)
    layer.__dict__[NOTES] = notes


_PARTS = {"tail": "bf16 tail", "main": "all layers"}


def _refuse(m: Any, fqn: str) -> None:
    """Raise UserError for a module with matrices that would not be quantized."""
    if type(m) not in _CLASSES:
        raise UserError(
            f"{fqn}: {type(m).__name__} cannot be converted; allowed: ColumnParallelLinear and RowParallelLinear "
            f"(--transformer-impl local), or leave it out with skip=({fqn.rpartition('.')[2]!r},)"
        )
    if m.gtp_remat_size > 1:
        raise UserError(
            f"{fqn}: weights split among {m.gtp_remat_size} ranks (gtp_remat) are not supported; allowed: 1"
        )
