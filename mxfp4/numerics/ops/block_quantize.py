"""Block quantization, and drawing its seeds, as torch operators that are opaque to torch.compile.

A compiler that saw the arithmetic could fuse, recompute or contract it; as operators the eager, compiled and
checkpointed runs execute the same code and give the same bytes. Arguments are checked in `quantize.py`. The
quantizers return their results with the block axis last; `seed` is a 0-d int64 tensor, `signs` FP32 [hadamard].
The pairs quantize a matrix along both its axes, each in its own way, from one read of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mxfp4.numerics.formats import BLOCK, ELEMS
from mxfp4.numerics.kernels import HAS_TRITON, quantize_matrix
from mxfp4.numerics.kernels.cpu import quantize as quantize_cpu
from mxfp4.numerics.reference import BlockSpec, Orientation

_library = torch.library.Library("mxfp4", "DEF")


def _how(prefix: str = "") -> str:
    kinds = {"block": "str", "elem": "str", "scale_rule": "str", "stochastic": "bool", "hadamard": "int"}
    kinds |= {"signs": "Tensor?", "stream": "int"}
    return ", ".join(f"{kind} {prefix}{name}" for name, kind in kinds.items())


_library.define("fp8_per_tensor(Tensor x, str elem, ScalarType dtype) -> (Tensor, Tensor)")
_library.define("bf16_values(Tensor x, ScalarType dtype) -> Tensor")
_library.define("draw_seed(Tensor(a!) counter) -> Tensor")
_library.define(f"quantize(Tensor x, int axis, {_how()}, Tensor? seed) -> (Tensor, Tensor)")
_library.define(f"fake_quantize(Tensor x, int axis, {_how()}, Tensor? seed, ScalarType dtype) -> Tensor")
_pair = f"Tensor x, {_how('row_')}, {_how('col_')}, Tensor? seed"
_library.define(f"quantize_pair({_pair}) -> (Tensor, Tensor, Tensor, Tensor)")
_library.define(f"fake_quantize_pair({_pair}, ScalarType dtype) -> (Tensor, Tensor)")
_library.define(f"values_and_packed({_pair}, ScalarType dtype) -> (Tensor, Tensor, Tensor)")


_GOLDEN = -7046029254386353131  # 2^64 / golden ratio, as a signed 64-bit integer: spreads successive counters


@torch.library.impl(_library, "draw_seed", "CompositeExplicitAutograd")
def _draw_seed(counter):
    if torch._C._current_graph_task_id() != -1:  # activation checkpointing runs a forward again inside a backward
        return counter[0] + (counter[1] - 1) * _GOLDEN
    seed = counter[0] + counter[1] * _GOLDEN
    counter[1] += 1
    return seed


@torch.library.register_fake("mxfp4::draw_seed", lib=_library)
def _draw_seed_shape(counter):
    return counter.new_empty(())


FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def scaled_fp8(x: Tensor, scale: Tensor, elem: str, dtype: torch.dtype) -> Tensor:
    """(x * scale) in E4M3 or E5M2 to nearest even, as values in `dtype`; no finite product is out of range."""
    if x.is_cuda and HAS_TRITON:
        from mxfp4.numerics.kernels.triton import fp8 as fp8_triton

        return fp8_triton.scaled_fp8(x, scale, elem, dtype)
    if x.device.type == "cpu" and quantize_cpu.kernel() is not None:
        return quantize_cpu.scaled_fp8(x, scale, elem).to(dtype)
    return (x.float() * scale).to(FP8[elem]).to(dtype)


def fp8_scale(x: Tensor, elem: str) -> Tensor:
    """The FP32 scale that takes the largest magnitude of x to the format's; 1 for zeros or nothing, NaN with one."""
    if not x.numel():
        return x.new_ones((), dtype=torch.float32)
    low, high = x.aminmax()
    amax = torch.maximum(-low, high).float()
    return torch.where(amax == 0, 1.0, ELEMS[elem].max / amax).clamp(max=torch.finfo(torch.float32).max)


@torch.library.impl(_library, "fp8_per_tensor", "CompositeExplicitAutograd")
def _fp8_per_tensor(x, elem, dtype):
    scale = fp8_scale(x, elem)
    return scaled_fp8(x, scale, elem, dtype), 1.0 / scale


@torch.library.register_fake("mxfp4::fp8_per_tensor", lib=_library)
def _fp8_per_tensor_shape(x, elem, dtype):
    return torch.empty_like(x, dtype=dtype), x.new_empty((), dtype=torch.float32)


@torch.library.impl(_library, "bf16_values", "CompositeExplicitAutograd")
def _bf16_values(x, dtype):
    return x.to(torch.bfloat16).to(dtype, copy=True)  # never x itself


@torch.library.register_fake("mxfp4::bf16_values", lib=_library)
def _bf16_values_shape(x, dtype):
    return torch.empty_like(x, dtype=dtype)


def _orientation(how: tuple, dtype: torch.dtype | None) -> Orientation:
    block, elem, scale_rule, stochastic, hadamard, signs, stream = how
    return Orientation(BlockSpec(ELEMS[elem], block, scale_rule, stochastic, hadamard, stream), signs, dtype)


LANES = 128  # a multiple of every group; the kernels work on many rows side by side


def _along(x: Tensor, axis: int, how: tuple, seed: Tensor | None, dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
    """(values, scales) of `x` along `axis`, as a batch of matrices with the axis last or in the middle."""
    axis %= x.ndim
    before, k, after = x.shape[:axis], x.shape[axis], x.shape[axis + 1 :]
    one = _orientation(how, dtype)
    if after:
        shape = (*before, *after, k)
        _, (values, scales) = quantize_matrix(x.reshape(before.numel(), k, after.numel()), None, one, seed)
    else:
        shape = (*before, k)
        rows, width = (before[-1] if before else 1), k
        if one.spec.block == "1d" and x.is_contiguous():
            rows = before.numel()
            if rows < LANES and k % LANES == 0:  # few long rows: the same blocks as many short ones
                rows, width = rows * k // LANES, LANES
        (values, scales), _ = quantize_matrix(x.reshape(-1 if rows else 0, rows, width), one, None, seed)
    if dtype is not None:
        return values.view(shape), values
    packed = k // 2 if one.spec.fmt.bits == 4 else k
    return values.view(*shape[:-1], packed), scales.view(_scale_shape(shape, one.spec.block))


def _scale_shape(shape: tuple[int, ...], block: str) -> list[int]:
    *rows, k = shape
    return [*rows[:-1], rows[-1] // BLOCK, k // BLOCK] if block == "2d" else [*rows, k // BLOCK]


@torch.library.impl(_library, "quantize", "CompositeExplicitAutograd")
def _quantize(x, axis, block, elem, scale_rule, stochastic, hadamard, signs, stream, seed):
    return _along(x, axis, (block, elem, scale_rule, stochastic, hadamard, signs, stream), seed, None)


@torch.library.impl(_library, "fake_quantize", "CompositeExplicitAutograd")
def _fake_quantize(x, axis, block, elem, scale_rule, stochastic, hadamard, signs, stream, seed, dtype):
    return _along(x, axis, (block, elem, scale_rule, stochastic, hadamard, signs, stream), seed, dtype)[0]


@torch.library.impl(_library, "quantize_pair", "CompositeExplicitAutograd")
def _quantize_pair(x, *how):
    row, col, seed = how[:7], how[7:14], how[14]
    row, col = quantize_matrix(x[None], _orientation(row, None), _orientation(col, None), seed)
    return row[0][0], row[1][0], col[0][0], col[1][0]


@torch.library.impl(_library, "fake_quantize_pair", "CompositeExplicitAutograd")
def _fake_quantize_pair(x, *how):
    row, col, seed, dtype = how[:7], how[7:14], how[14], how[15]
    row, col = quantize_matrix(x[None], _orientation(row, dtype), _orientation(col, dtype), seed)
    return row[0][0], col[0][0]


@torch.library.impl(_library, "values_and_packed", "CompositeExplicitAutograd")
def _values_and_packed(x, *how):
    row, col, seed, dtype = how[:7], how[7:14], how[14], how[15]
    row, col = quantize_matrix(x[None], _orientation(row, dtype), _orientation(col, None), seed)
    return row[0][0], col[0][0], col[1][0]


def _packed_shapes(x: Tensor, shape: tuple[int, ...], block: str, elem: str) -> tuple[Tensor, Tensor]:
    packed = shape[-1] // 2 if ELEMS[elem].bits == 4 else shape[-1]
    scale = x.new_empty(_scale_shape(shape, block), dtype=torch.uint8)
    return x.new_empty([*shape[:-1], packed], dtype=torch.uint8), scale


@torch.library.register_fake("mxfp4::quantize", lib=_library)
def _quantize_shape(x, axis, block, elem, scale_rule, stochastic, hadamard, signs, stream, seed):
    return _packed_shapes(x, x.movedim(axis, -1).shape, block, elem)


@torch.library.register_fake("mxfp4::fake_quantize", lib=_library)
def _fake_quantize_shape(x, axis, block, elem, scale_rule, stochastic, hadamard, signs, stream, seed, dtype):
    return x.new_empty(x.movedim(axis, -1).shape, dtype=dtype)


@torch.library.register_fake("mxfp4::quantize_pair", lib=_library)
def _quantize_pair_shape(x, *how):
    return *_packed_shapes(x, x.shape, *how[:2]), *_packed_shapes(x, x.shape[::-1], *how[7:9])


@torch.library.register_fake("mxfp4::fake_quantize_pair", lib=_library)
def _fake_quantize_pair_shape(x, *how):
    return x.new_empty(x.shape, dtype=how[15]), x.new_empty(x.shape[::-1], dtype=how[15])


@torch.library.register_fake("mxfp4::values_and_packed", lib=_library)
def _values_and_packed_shape(x, *how):
    return x.new_empty(x.shape, dtype=how[15]), *_packed_shapes(x, x.shape[::-1], *how[7:9])


# int64 [2], (key, draws so far) -> the next seed; counts the draw. As one operator a compiler cannot recompute it after
# the count has moved on; where a forward is run again for its gradients, it gives the last seed once more, so that the
# gradients are those of what the first forward computed: of the layer's last forward. Of two forwards before the first
# backward, as in a pipeline or of a shared layer, only checkpointing that keeps the drawn seeds (`training.recompute`)
# gives the first one its own.
draw_seed = torch.ops.mxfp4.draw_seed.default
# (E4M3 or E5M2 values with one scale for the tensor, from its current maximum; the factor that undoes the scale).
fp8_per_tensor = torch.ops.mxfp4.fp8_per_tensor.default
# Rounded to BF16, in another dtype: two casts in a row, of which a compiler would leave nothing.
bf16_values = torch.ops.mxfp4.bf16_values.default
quantize = torch.ops.mxfp4.quantize.default
fake_quantize = torch.ops.mxfp4.fake_quantize.default
quantize_pair = torch.ops.mxfp4.quantize_pair.default
fake_quantize_pair = torch.ops.mxfp4.fake_quantize_pair.default
# The row orientation as values, the column orientation packed: what a forward multiplies, and what it keeps.
values_and_packed = torch.ops.mxfp4.values_and_packed.default
