"""Delayed scaling of FP8: a tensor's scale comes from its largest magnitudes in earlier steps, not from its own.

    scale = largest value of the format / amax          with margin 0, at most FP32's largest value
    amax  = most_recent: that of the step before; max: the largest of the last HISTORY steps

after `DelayedScaling` of NVIDIA Transformer Engine 2 (`common/recipe/__init__.py`: (FP8_MAX / amax) / 2^margin;
`common/recipe/delayed_scaling.cu`: the update). HISTORY 4 and most_recent are what AMD's MLPerf submissions use.

Per layer the state is FP32 `history` [3, HISTORY], rows X, W and G, the last step first, and what the step under way
has seen so far: `forward` [2] for X and W, `backward` [1] for G. Two tensors, because torch.compile takes a tensor
that either the forward or the backward changes, not both. A step ends in `advance`, once, whatever its number of
micro-batches. So all its forwards use one scale, and activation checkpointing, which takes the same maximum again,
changes nothing. Transformer Engine instead rolls its history after each forward and each backward.

Two cases that differ from Transformer Engine. Without a history a tensor is scaled by its own maximum; there by 1. An
infinity becomes NaN, so that it shows in the loss; there it saturates. As there, a value beyond the scale saturates, and
a step whose maximum is 0 or not finite leaves the scale as it was: here it does not enter the history either.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch import distributed as dist

from mxfp4.numerics.fp8 import largest_magnitude, saturated_fp8, scale_of_amax
from mxfp4.numerics.ops import block_quantize as _operators  # noqa: F401  (defines the library)

HISTORY = 4
ALGORITHMS = ("most_recent", "max")
PLACES = {"x": (0, "amax_forward", 0), "w": (1, "amax_forward", 1), "g": (2, "amax_backward", 0)}
"""{tensor: (row of the history, buffer of the step under way, place in it)}."""
BUFFERS = {"amax_history": (3, HISTORY), "amax_forward": (2,), "amax_backward": (1,)}
"""{name of a layer's buffer: shape}."""

_library = torch.library.Library("mxfp4", "FRAGMENT")
_ANY = "CompositeExplicitAutograd"
_library.define("delayed_amax(Tensor history, Tensor x, int row, str algorithm, ScalarType dtype) -> (Tensor, Tensor)")
_library.define("see_amax(Tensor(a!) seen, Tensor amax, int place) -> ()")
_library.define("fp8_of_amax(Tensor x, Tensor amax, str elem, ScalarType dtype) -> (Tensor, Tensor)")
_library.define("fp8_codes_of_amax(Tensor x, Tensor amax, str elem) -> (Tensor, Tensor)")


@torch.library.impl(_library, "delayed_amax", _ANY)
def _delayed_amax(history, x, row, algorithm, dtype):
    now = largest_magnitude(x).to(dtype, copy=True).float()
    past = history[row].amax() if algorithm == "max" else history[row, 0]
    return torch.where(past > 0, past, now), now


@torch.library.register_fake("mxfp4::delayed_amax", lib=_library)
def _delayed_amax_shape(history, x, row, algorithm, dtype):
    return history.new_empty(()), history.new_empty(())


@torch.library.impl(_library, "see_amax", _ANY)
def _see_amax(seen, amax, place):
    seen[place] = torch.maximum(seen[place], amax)


@torch.library.register_fake("mxfp4::see_amax", lib=_library)
def _see_amax_shape(seen, amax, place):
    return None


@torch.library.impl(_library, "fp8_of_amax", _ANY)
def _fp8_of_amax(x, amax, elem, dtype):
    scale = scale_of_amax(amax, elem)
    return saturated_fp8(x, scale, elem).to(dtype), scale.reciprocal()


@torch.library.register_fake("mxfp4::fp8_of_amax", lib=_library)
def _fp8_of_amax_shape(x, amax, elem, dtype):
    return torch.empty_like(x, dtype=dtype), amax.new_empty(())


@torch.library.impl(_library, "fp8_codes_of_amax", _ANY)
def _fp8_codes_of_amax(x, amax, elem):
    scale = scale_of_amax(amax, elem)
    return saturated_fp8(x, scale, elem).contiguous().view(torch.uint8), scale.reciprocal()


@torch.library.register_fake("mxfp4::fp8_codes_of_amax", lib=_library)
def _fp8_codes_of_amax_shape(x, amax, elem):
    return x.new_empty(x.shape, dtype=torch.uint8), amax.new_empty(())


# (The amax that x, once it is rounded to `dtype`, is scaled by; x's own), FP32, 0-d.
delayed_amax = torch.ops.mxfp4.delayed_amax.default
# Counts an amax in what a step has seen. Apart from `delayed_amax`, which a compiler may compute again in a backward.
see_amax = torch.ops.mxfp4.see_amax.default
# (E4M3 or E5M2 values under an amax; the FP32 factor that undoes the scale).
fp8_of_amax = torch.ops.mxfp4.fp8_of_amax.default
# The same as codes, uint8 of x's shape, contiguous.
fp8_codes_of_amax = torch.ops.mxfp4.fp8_codes_of_amax.default


@torch.no_grad()
def advance(states: Sequence[dict[str, Tensor]], groups: Sequence[dist.ProcessGroup | None] = ()) -> None:
    """End a step of layers on one device: what each has seen, the maximum over `groups` (None: all ranks), becomes the
    newest entry of its history. Nothing moves where nothing was seen. In place, without waiting for the device.

    states: BUFFERS of each layer.
    """
    seen = torch.stack([torch.cat((s["amax_forward"], s["amax_backward"])) for s in states])  # [layers, 3]
    seen = torch.where(seen.isfinite(), seen, torch.inf)  # a maximum over ranks may lose NaN
    for group in groups:
        dist.all_reduce(seen, dist.ReduceOp.MAX, group=group)
    enters = ((seen > 0) & seen.isfinite()).unsqueeze(-1)
    before = torch.stack([s["amax_history"] for s in states])
    after = torch.where(enters, torch.cat((seen.unsqueeze(-1), before[..., :-1]), dim=-1), before)
    torch._foreach_copy_([s["amax_history"] for s in states], list(after.unbind()))
    torch._foreach_zero_([s[name] for s in states for name in ("amax_forward", "amax_backward")])
