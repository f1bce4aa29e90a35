"""The ranks of a run: several processes that train one model, as torchrun or the run store starts them.

    FSDP2     `fully_shard` on each block and on what is left: every rank keeps 1/size of the FP32 parameters, gradients
              and optimizer state, and gathers one block at a time
    parts     the micro-batches of a step are numbered; rank r takes the r-th run of consecutive ones, and a recipe's
              random numbers belong to (step, part). So what is computed of a part does not depend on how many ranks
              there are. Only the order in which the gradients of the parts are summed does.
    control   small agreements (stop, save, go on from where) go through a group on the CPU, so no rank waits for its
              GPU to learn them

Parameters are gathered in FP32 and cast to BF16 where they are used, as on one GPU. Gathering BF16 would halve the
traffic, but norms would then see rounded weights, and weight gradients be rounded to BF16 before they are summed.

Source: PyTorch, "Getting started with fully sharded data parallel (FSDP2)".
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mxfp4.errors import UserError

PATIENCE = timedelta(days=7)  # for agreements: rank 0 may be packing a corpus. A rank that dies is noticed at once

REDUCE_DTYPE = torch.float32
"""In which gradients are summed over the ranks."""


@dataclass(frozen=True)
class Ranks:
    """Which process of its run this one is. The default is a process by itself."""

    rank: int = 0
    """0 to size - 1. Rank 0 reports and writes records."""
    size: int = 1
    """Processes."""
    control: dist.ProcessGroup | None = None
    """Group on the CPU; None for a process by itself."""
    writers: dist.ProcessGroup | None = None
    """Another one, for checkpoints that are written beside the training."""
    mesh: dist.DeviceMesh | None = None
    """The devices that parameters are spread over."""

    def agree(self, value: Any) -> Any:
        """Rank 0's `value` (whatever pickles), on every rank."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.control)
        return box[0]

    def gather(self, value: Any) -> list:
        """Every rank's `value`, in order, on every rank."""
        if self.size == 1:
            return [value]
        values = [None] * self.size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def any(self, *flags: bool) -> list[bool]:
        """For each flag whether it is set on some rank; the same on all."""
        if self.size == 1:
            return list(flags)
        values = torch.tensor(flags, dtype=torch.uint8)
        dist.all_reduce(values, dist.ReduceOp.MAX, group=self.control)
        return [bool(v) for v in values]

    def mean(self, values: Tensor) -> Tensor:
        """Mean over the ranks, on the device, in place."""
        if self.size > 1:
            dist.all_reduce(values)
            values /= self.size
        return values

    def share(self, parts: int) -> tuple[range, int]:
        """(which of `parts` are this rank's, how many the busiest rank has)."""
        most = -(-parts // self.size)
        return range(min(self.rank * most, parts), min((self.rank + 1) * most, parts)), most

    def check(self, micro_batches: int) -> None:
        """UserError unless every rank gets the same number of parts."""
        if micro_batches % self.size:
            raise UserError(
                f"micro_batches={micro_batches} must be a multiple of the {self.size} ranks: each takes whole parts "
                "of a batch"
            )

    def shard(self, model: nn.Module, device: torch.device) -> nn.Module:
        """Spread `model`, on the meta device, over the ranks: parameters on `device`, not filled yet."""
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # slow to import, for one rank needless

        policy = MixedPrecisionPolicy(reduce_dtype=REDUCE_DTYPE)
        for module in (*model.layers, model):
            fully_shard(module, mesh=self.mesh, mp_policy=policy)
        return model.to_empty(device=device)

    def last_part(self, model: nn.Module, last: bool) -> None:
        """Say before a forward whether its gradients end the step: one sum over the ranks a step, not one a part."""
        if self.size > 1:
            model.set_requires_gradient_sync(last)


ALONE = Ranks()
_here = ALONE


def here() -> Ranks:
    """Ranks of this process: those of the `joined` that it is in, else itself alone."""
    return _here


def launched() -> bool:
    """Whether torchrun started this process."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= set(os.environ)


def reports() -> bool:
    """Whether this process speaks for its run: it is alone, or rank 0 of torchrun's."""
    return not launched() or os.environ["RANK"] == "0"


@contextmanager
def joined(device: torch.device | str, meeting: tuple[str, int, int] | None = None) -> AbstractContextManager[Ranks]:
    """Join the other ranks of the run. device: this rank's own. meeting: (address, rank, size); None is torchrun's."""
    global _here
    device = torch.device(device)
    gpu = device.type == "cuda"
    if gpu:
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        torch.cuda.set_device(device)
    address, rank, size = meeting or ("env://", int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    backend = "cpu:gloo,cuda:nccl" if gpu else "gloo"
    dist.init_process_group(backend, init_method=address, rank=rank, world_size=size)
    together = False  # after an error of this rank alone the others wait in a collective: leaving would wait for them
    try:
        control, writers = (dist.new_group(backend="gloo", timeout=PATIENCE) for _ in range(2))
        mesh = dist.DeviceMesh.from_group(dist.group.WORLD, device.type)
        _here = Ranks(rank, size, control, writers, mesh)
        yield _here
        together = True
    except UserError:
        together = True
        raise
    finally:
        _here = ALONE
        if together:
            dist.destroy_process_group()


@torch.no_grad()
def fill(tensor: Tensor, whole: Tensor) -> None:
    """Copy `whole` into `tensor`, or this rank's rows of it where `tensor` is sharded along its first axis."""
    if not hasattr(tensor, "device_mesh"):  # not a DTensor
        tensor.copy_(whole)
        return
    mesh, mine = tensor.device_mesh, tensor.to_local()
    first = mesh.get_local_rank() * -(-len(whole) // mesh.size())  # as torch.chunk cuts
    mine.copy_(whole[first : first + len(mine)])


def whole(tensor: Tensor) -> Tensor:
    """A sharded tensor's full value, on every rank; another tensor as it is."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
