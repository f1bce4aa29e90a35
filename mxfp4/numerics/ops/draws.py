"""The random numbers of a layer: a draw is a function of (seed, layer, rank, step, forward within the step).

The layer keeps them in a plain object and not in a buffer, so nothing broadcasts, averages, offloads or saves them, and
a layer that came from the meta device draws as any other. On the device they are int64 [3]: the key of (seed, layer,
rank); step * 2^20 + forwards so far, which each draw counts up; the key of rank 0, for evaluations.

Activation checkpointing runs a forward a second time, inside the backward. The second forward has to round as the first
one did, however many forwards lie between the two. So the seeds of a checkpointed forward are kept with what the
checkpoint keeps: with its frame (`use_reentrant=False`) or its autograd context (`use_reentrant=True`).
"""

from __future__ import annotations

import hashlib
import sys
from itertools import count
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch.utils import checkpoint

from mxfp4.errors import UserError
from mxfp4.numerics.ops import vmap
from mxfp4.numerics.ops.block_quantize import draw_seed

FORWARDS_A_STEP = 1 << 20
_unnamed = count()
_KEPT = "_mxfp4_seeds"
"""Attribute of a checkpoint's frame or context: {draws of a layer: seeds, in order}."""


def distributed_runs() -> bool:
    """Whether this process is one of torch.distributed's."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


class LayerDraws:
    """The seeds that one layer draws.

    name: the layer's full name. Layers without one are numbered as they are made, and copies as they are copied: no two
    layers draw alike, and a repeated run repeats.
    """

    def __init__(self, seed: int, name: str) -> None:
        self.seed, self.name = seed, name or f"#{next(_unnamed)}"
        self.rank, self.position, self.copies = 0, 0, 0
        self.state: Tensor | None = None
        self.unrepeatable = 0  # forwards since `set` that a repetition could not tell apart

    def key(self, rank: int) -> int:
        """A signed 64-bit hash of seed, layer and rank."""
        text = f"{self.seed}:{self.name}" + (f":{rank}" if rank else "")
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)

    def __deepcopy__(self, memo: dict) -> LayerDraws:
        twin = LayerDraws(self.seed, f"{self.name}/{self.copies}")
        self.copies += 1
        twin.rank, twin.position = self.rank, self.position
        if self.state is not None:
            twin.on(self.state.device)[1].copy_(self.state[1])
        return twin

    def on(self, device: torch.device) -> Tensor:
        """The state on `device`, moved or made where it is not there yet."""
        if self.state is None or self.state.device != device:
            if self.state is None or self.state.is_meta:
                numbers = [self.key(self.rank), self.position, self.key(0)]
                self.state = torch.tensor(numbers, dtype=torch.int64, device=device)
            else:
                self.state = self.state.to(device)
        return self.state

    def set(self, step: int, forwards: int, rank: int) -> Tensor | None:
        """Go to a step, a number of forwards and a rank. Returns the count on the device, int64 [1], which the caller has to
        set to `position`: in place, as a CUDA graph may hold it."""
        self.position, self.unrepeatable = step * FORWARDS_A_STEP + forwards, 0
        moved, self.rank = rank != self.rank, rank
        if self.state is None or self.state.is_meta:
            return None
        if moved:
            self.state[0].fill_(self.key(rank))
        return self.state[1:2]

    def in_evaluation(self, device: torch.device) -> Tensor:
        """The seed of every evaluation: the same at each call and on each rank."""
        return self.on(device)[2]

    def next(self, device: torch.device) -> Tensor:
        """The seed of the next forward, int64 []; inside a checkpoint's second forward that of its first.

        Raises RuntimeError where the first forward cannot be told: in nested checkpoints, and in a second forward that
        no known checkpoint runs, after several forwards. Raises UserError in torch.export.
        """
        if torch.compiler.is_exporting():
            raise UserError(
                f"layer {self.name!r} draws random numbers in training, and an exported program cannot count them. Call "
                "model.eval() before torch.export, or use a recipe without random numbers."
            )
        if torch._C._are_functorch_transforms_active():
            return vmap.seed_of_sample(self._next(device))
        return self._next(device)

    def _next(self, device: torch.device) -> Tensor:
        state = self.on(device)
        if torch.compiler.is_compiling():
            return draw_seed(state)
        keeper, task = _checkpoint(), torch._C._current_graph_task_id()
        if task == -1:
            seed = draw_seed(state)
            if keeper is None:
                self.unrepeatable += 1
            else:
                keeper.__dict__.setdefault(_KEPT, {}).setdefault(self, []).append(seed)
            return seed
        if keeper is not None:
            return self._kept(keeper, task)
        if self.unrepeatable > 1:
            raise RuntimeError(
                f"layer {self.name!r} runs forward inside a backward after {self.unrepeatable} forwards, and which of "
                "them it repeats is unknown: use torch.utils.checkpoint, or a recipe without random numbers"
            )
        return draw_seed(state)  # gives the last seed again

    def _kept(self, keeper: Any, task: int) -> Tensor:
        kept = keeper.__dict__.get(_KEPT, {})
        if self not in kept:
            raise RuntimeError(
                f"layer {self.name!r} is inside a checkpoint inside a checkpoint, where its random numbers cannot be "
                "repeated: take one of the two away, or a recipe without random numbers"
            )
        counts = kept.setdefault(task, {})  # a graph that is kept can be run backward again
        counts[self] = counts.get(self, 0) + 1
        return kept[self][counts[self] - 1]


_reentrant: set[CodeType] = set()
"""Forward and backward of the autograd functions that run a forward again inside a backward, each with its `ctx`."""


def know_checkpoint(function: type[torch.autograd.Function]) -> None:
    """Repeat the random numbers in forwards that `function`, another library's reentrant checkpoint, runs again."""
    _reentrant.update((function.forward.__code__, function.backward.__code__))


know_checkpoint(checkpoint.CheckpointFunction)


def _checkpoint() -> Any:
    """What keeps the values of the checkpoint that runs now, its first or its second forward; None outside of one."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if hooks is not None:
        code = getattr(hooks[0], "__wrapped__", hooks[0])  # the second forward's is wrapped for dynamo
        cells = dict(zip(code.__code__.co_freevars, code.__closure__ or (), strict=True))
        if "target_frame_ref" in cells:
            return cells["target_frame_ref"].cell_contents()
        frame = cells["frame"].cell_contents if "frame" in cells else None
        return frame if hasattr(frame, "weak_holders") else None
    if torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
        return None
    calls = sys._getframe(1)
    while calls is not None:
        if calls.f_code in _reentrant:
            return calls.f_locals["ctx"]
        calls = calls.f_back
    return None
