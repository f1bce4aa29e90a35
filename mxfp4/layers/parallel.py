"""MXFP4Linear on DTensors: tensor parallelism, each rank multiplying its own shards.

`parallelize_module` with ColwiseParallel, RowwiseParallel or SequenceParallel makes the parameters DTensors
(torch 2.13, torch.distributed.tensor). Along each dimension of their mesh:

    weight       X                Y            dX           dW
    Shard(0)     Replicate        Shard(-1)    Partial      Shard(0)      column-wise
    Shard(1)     Shard(-1)        Partial      Shard(-1)    Shard(1)      row-wise
    Replicate    Shard(tokens)    as X         as X         Partial       sequence
    Replicate    Replicate        Replicate    Replicate    Replicate

An X of another placement is redistributed first. Blocks lie within shards, so the operands are those of one rank and
the results equal up to the order of sums; shards that are no multiple of what the recipe's blocks need are refused.
X that is split among ranks along tokens, with blocks across the cuts, is gathered. Shards draw random numbers of their
own; replicas of one computation draw the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mxfp4.errors import UserError
from mxfp4.layers.plan import size_problem
from mxfp4.layers.recipe import Recipe

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_SHARD = -3335678366873096957  # an odd number of random bits, which spreads the seeds of shards
_LEFT_OUT = "leave the layer out of the parallelize plan"


def is_dtensor(t: Any) -> bool:
    """Whether `t` is a DTensor; imports nothing."""
    return hasattr(t, "device_mesh")


def multiply_shards(
    x: DTensor, weight: DTensor, layer_recipe: Recipe, token_multiple: int, name: str,
    multiply: Callable[[Tensor, Tensor, int], Tensor],
) -> DTensor:  # fmt: skip
    """Y of X [..., K] and W [N, K] from `multiply(local X, local W, offset of the seed)` on each rank.

    name: the layer's. Raises UserError for operands that are not on one mesh, placements or shard sizes that the recipe
    cannot be computed with, and recipes with one scale a tensor where a tensor is split.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    if not (is_dtensor(x) and is_dtensor(weight)) or x.device_mesh != weight.device_mesh:
        kinds = ["a DTensor" if is_dtensor(t) else "a plain tensor" for t in (x, weight)]
        raise UserError(
            f"layer {name!r}: x is {kinds[0]} and the weight is {kinds[1]}; allowed: two plain tensors, or two DTensors "
            "on one mesh. Name the layer in the parallelize plan, or distribute x."
        )
    mesh, last = weight.device_mesh, x.ndim - 1
    _check_shards(weight, layer_recipe, name)
    x_in: list[Any] = []
    x_grad: list[Any] = []
    w_grad: list[Any] = []
    out: list[Any] = []
    offset = 0
    for i, (of_x, of_w) in enumerate(zip(x.placements, weight.placements, strict=True)):
        at, size = mesh.get_local_rank(i), mesh.size(i)
        if of_w == Shard(0):
            row: tuple[Any, ...] = (Replicate(), Shard(last), Partial(), of_w)
        elif of_w == Shard(1):
            row = (Shard(last), Partial(), Shard(last), of_w)
        elif type(of_x) is Shard and _whole_blocks(x, of_x.dim, size, token_multiple) and not _per_tensor(layer_recipe):
            row = (of_x, of_x, of_x, Partial())
        else:
            row = (Replicate(),) * 4
        if row != (Replicate(),) * 4:
            offset = offset * size + at
        for found, placement in zip((x_in, out, x_grad, w_grad), row, strict=True):
            found.append(placement)
    local_x = x.redistribute(placements=x_in).to_local(grad_placements=x_grad)
    local_w = weight.to_local(grad_placements=w_grad)
    y = multiply(local_x, local_w, (offset * _SHARD + 2**63) % 2**64 - 2**63)
    shape = torch.Size((*x.shape[:-1], weight.shape[0]))
    stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    return DTensor.from_local(y, mesh, out, run_check=False, shape=shape, stride=stride)


def _per_tensor(layer_recipe: Recipe) -> bool:
    """Whether an operand has a scale for the whole tensor."""
    return any(op.format in ("fp8", "nvfp4") for op in layer_recipe.operands().values())


def _check_shards(weight: DTensor, layer_recipe: Recipe, name: str) -> None:
    """The same answer on every rank: UserError unless each of their shards of the weight can be computed with."""
    for i, placement in enumerate(weight.placements):
        ranks, axis = weight.device_mesh.size(i), getattr(placement, "dim", None)
        if placement.is_replicate():
            continue
        if not placement.is_shard() or axis not in (0, 1):
            raise UserError(
                f"layer {name!r}: weight placement {placement} is not supported; allowed: Shard(0), Shard(1), Replicate()"
            )
        if ranks == 1:
            continue
        if _per_tensor(layer_recipe):
            raise UserError(
                f"layer {name!r}: recipe {layer_recipe.name!r} takes a scale from a whole tensor, of which each of "
                f"{ranks} ranks holds a part; allowed: recipes with blocks alone (mxfp4, mxfp8). Use one, or {_LEFT_OUT}."
            )
        chunk = -(-weight.shape[axis] // ranks)
        for size in {chunk, max(weight.shape[axis] - chunk * (ranks - 1), 0)}:
            out_features, in_features = (size if axis == i else n for i, n in enumerate(weight.shape))
            problem = size_problem(in_features, out_features, layer_recipe)
            if problem:
                raise UserError(
                    f"layer {name!r}, split among {ranks} ranks: {problem}. Use fewer ranks, or {_LEFT_OUT}."
                )


def _whole_blocks(x: DTensor, dim: int, ranks: int, token_multiple: int) -> bool:
    """Whether X split along `dim` among `ranks` has blocks along tokens that one rank would make too."""
    if dim == x.ndim - 1:
        return False
    inner = math.prod(x.shape[dim + 1 : -1])
    chunk = -(-x.shape[dim] // ranks)
    rest = x.shape[dim] - chunk * (ranks - 1)
    if rest < 0 or chunk * inner % token_multiple:
        return False
    return dim == 0 or rest * inner % token_multiple == 0


def data_rank(model: nn.Module) -> int:
    """The rank of this process among those that share a step's batch: ranks that split a layer's weight have one.

    It is the least rank of the mesh that the model's DTensors are on before FSDP2 shards them, or torch.distributed's.
    """
    rank = torch.distributed.get_rank()
    before_fsdp: dict[int, Any] = {}
    for module in model.modules():
        get_state: Any = getattr(module, "_get_fsdp_state", None)
        state = get_state() if get_state else None
        for group in getattr(state, "_fsdp_param_groups", ()):
            for held in group.fsdp_params:  # torch 2.13: the spec is None for what was a plain tensor
                spec = getattr(held, "_unsharded_dtensor_spec", None)
                before_fsdp[id(held.sharded_param)] = None if spec is None else spec.mesh
    for parameter in model.parameters():
        if is_dtensor(parameter):
            mesh: Any = before_fsdp.get(id(parameter), getattr(parameter, "device_mesh", None))
            if mesh is not None:
                return min(rank, int(mesh.mesh.min()))
    return rank
