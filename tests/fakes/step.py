"""The real training step on fake tensors: its memory, allocation by allocation, at full size and without a device.

Fake tensors have shapes and dtypes and no data, so an 8 B model's step runs in a second. They are CPU tensors, told to
compute as a GPU does: autocast to BF16, operands carried in BF16.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import contextmanager, nullcontext

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mxfp4.layers.convert import convert
from mxfp4.layers.linear import weights_kept
from mxfp4.training import evaluation
from mxfp4.training.config import TrainConfig
from mxfp4.training.execution.distributed import Ranks
from mxfp4.training.memory import local_batch
from mxfp4.training.model import Llama

GRAIN = 512  # bytes that an allocation is rounded up to


class Allocations(TorchDispatchMode):
    """Bytes of all living storages that operators have made, and their peak."""

    def __init__(self):
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.live = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor) and t.device.type != "meta" and not hasattr(t, "device_mesh"):
                self._see(t.untyped_storage())
        return out

    def _see(self, storage) -> None:
        if storage._cdata not in self.sizes:
            self.sizes[storage._cdata] = 0
            weakref.finalize(storage, self._gone, storage._cdata)
            self.resized(storage)

    def _gone(self, key: int) -> None:
        self.live -= self.sizes.pop(key)

    def resized(self, storage) -> None:
        """FSDP2 frees and refills gathered parameters by resizing their storage, which is no operator."""
        if storage._cdata in self.sizes:
            size = -(-storage.nbytes() // GRAIN) * GRAIN
            self.live += size - self.sizes[storage._cdata]
            self.sizes[storage._cdata] = size
            self.peak = max(self.peak, self.live)


@contextmanager
def as_a_gpu(patch):
    """CPU tensors are computed with as a GPU's are. patch: pytest's monkeypatch."""
    for module in ("numerics.ops.matmul", "layers.plan", "layers.operands", "layers.gemms"):
        patch.setattr(f"mxfp4.{module}.gemm_dtype", lambda device: torch.bfloat16)
    patch.setattr(evaluation, "compute_context", lambda device: torch.autocast("cpu", dtype=torch.bfloat16))
    yield


def peak_of_step(
    config: TrainConfig, patch, *, ranks: int = 1, prepare: Callable[[nn.Module], None] = lambda model: None
) -> int:
    """Bytes at the peak of the second step of one rank. prepare: what is done to the model before it is sharded."""
    with torch.device("meta"):
        model = convert(Llama(config.model), config.recipe, seed=config.seed)
    prepare(model)
    if ranks > 1:
        shard(model, ranks)
    with as_a_gpu(patch), FakeTensorMode(allow_non_fake_inputs=True), Allocations() as seen:
        resize = torch.UntypedStorage.resize_

        def resize_and_tell(storage, size):
            resize(storage, size)
            seen.resized(storage)
            return storage

        patch.setattr(torch.UntypedStorage, "resize_", resize_and_tell)
        model.to_empty(device="cpu")
        model.rope = model._rope("cpu")
        local = [p.to_local() if ranks > 1 else p for p in model.parameters()]
        state = [torch.zeros_like(p) for p in local for _ in range(2)]
        windows = torch.zeros(config.eval_sequences, config.seq_len + 1, dtype=torch.int64)
        sequences, parts = local_batch(config, ranks)
        batch = torch.zeros(parts * sequences, config.seq_len + 1, dtype=torch.int64)
        with weights_kept(model) if ranks == 1 and parts > 1 else nullcontext():
            for i, part in enumerate(batch.chunk(parts)):
                if ranks > 1:
                    Ranks(size=ranks).last_part(model, i == parts - 1)
                evaluation.token_loss(model, part).backward()
        assert len(state) == 2 * len(local) and len(windows)
    return seen.peak


def shard(model: nn.Module, ranks: int) -> None:
    """As training does it; the process group is PyTorch's fake one, which moves nothing."""
    from torch.distributed.device_mesh import init_device_mesh

    Ranks(size=ranks, mesh=init_device_mesh("cpu", (ranks,))).shard(model, torch.device("meta"))
