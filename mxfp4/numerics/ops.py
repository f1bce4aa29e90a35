"""Block quantization, and drawing its seeds, as torch operators that are opaque to torch.compile.

A compiler that saw the arithmetic could fuse, recompute or contract it; as operators the eager, compiled and
checkpointed runs execute the same code and give the same bytes. Arguments are checked in `quantize.py`. The
quantizers return their results with `axis` last; `seed` is a 0-d int64 tensor, `signs` FP32 [hadamard].
"""

from __future__ import annotations

import torch
from torch import Tensor

from mxfp4.numerics.formats import BLOCK, ELEMS
from mxfp4.numerics.kernels.quantize_torch import BlockSpec, quantize_dequantize, quantize_packed

_HOW = "int axis, str block, str elem, str scale_rule, bool stochastic, int hadamard, Tensor? signs, Tensor? seed, int stream"
_library = torch.library.Library("mxfp4", "DEF")
_library.define("draw_seed(Tensor(a!) counter) -> Tensor")
_library.define(f"quantize(Tensor x, {_HOW}) -> (Tensor, Tensor)")
_library.define(f"fake_quantize(Tensor x, {_HOW}, ScalarType dtype) -> Tensor")


_GOLDEN = -7046029254386353131  # 2^64 / golden ratio, as a signed 64-bit integer: spreads successive counters


@torch.library.impl(_library, "draw_seed", "CompositeExplicitAutograd")
def _draw_seed(counter):
    seed = counter[0] + counter[1] * _GOLDEN
    counter[1] += 1
    return seed


@torch.library.register_fake("mxfp4::draw_seed", lib=_library)
def _draw_seed_shape(counter):
    return counter.new_empty(())


def _last(x: Tensor, axis: int) -> Tensor:
    return x.movedim(axis, -1).contiguous().float()


@torch.library.impl(_library, "quantize", "CompositeExplicitAutograd")
def _quantize(x, axis, block, elem, scale_rule, stochastic, hadamard, signs, seed, stream):
    spec = BlockSpec(ELEMS[elem], block, scale_rule, stochastic, hadamard, stream)
    return quantize_packed(_last(x, axis), spec, signs, seed)


@torch.library.impl(_library, "fake_quantize", "CompositeExplicitAutograd")
def _fake_quantize(x, axis, block, elem, scale_rule, stochastic, hadamard, signs, seed, stream, dtype):
    spec = BlockSpec(ELEMS[elem], block, scale_rule, stochastic, hadamard, stream)
    return quantize_dequantize(_last(x, axis), spec, signs, seed, dtype)


@torch.library.register_fake("mxfp4::quantize", lib=_library)
def _quantize_shape(x, axis, block, elem, scale_rule, stochastic, hadamard, signs, seed, stream):
    *rows, k = x.movedim(axis, -1).shape
    scale_rows = [*rows[:-1], rows[-1] // BLOCK] if block == "2d" else rows
    packed = k // 2 if ELEMS[elem].bits == 4 else k
    return x.new_empty([*rows, packed], dtype=torch.uint8), x.new_empty([*scale_rows, k // BLOCK], dtype=torch.uint8)


@torch.library.register_fake("mxfp4::fake_quantize", lib=_library)
def _fake_quantize_shape(x, axis, block, elem, scale_rule, stochastic, hadamard, signs, seed, stream, dtype):
    return x.new_empty(x.movedim(axis, -1).shape, dtype=dtype)


# int64 [2], (key, draws so far) -> the next seed; counts the draw. As one operator it cannot be recomputed after the
# count has moved on.
draw_seed = torch.ops.mxfp4.draw_seed.default
quantize = torch.ops.mxfp4.quantize.default
fake_quantize = torch.ops.mxfp4.fake_quantize.default
