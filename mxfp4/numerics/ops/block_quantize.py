"""Quantization, and drawing its seeds, as torch operators that are opaque to torch.compile.

A compiler that saw the arithmetic could fuse, recompute or contract it; as operators the eager, compiled and
checkpointed runs execute the same code and give the same bytes. An operator takes an `OperandPlan` as its text, and has
an implementation for each dispatch key: CPU, CUDA, and one in plain torch for every other. Arguments are checked at the
public door (`quantize.py`, `MXFP4Linear`), not here. Results have the block axis last; `seed` is a 0-d int64 tensor.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mxfp4.numerics.fp8 import fp8_scale
from mxfp4.numerics.hadamard import Hadamard
from mxfp4.numerics.kernels import BACKENDS, Backend, backend_of
from mxfp4.numerics.operand_plan import OperandPlan, output_shapes, plan_text

_library = torch.library.Library("mxfp4", "DEF")

# Seeds

_GOLDEN = -7046029254386353131  # 2^64 / golden ratio, as a signed 64-bit integer: spreads successive counters
_library.define("draw_seed(Tensor(a!) counter) -> Tensor")


@torch.library.impl(_library, "draw_seed", "CompositeExplicitAutograd")
def _draw_seed(counter):
    key, count = counter[0], counter[1]
    if torch._C._current_graph_task_id() != -1:  # activation checkpointing runs a forward again inside a backward
        return torch.add(key, count - 1, alpha=_GOLDEN)
    seed = torch.add(key, count, alpha=_GOLDEN)
    count.add_(1)
    return seed


@torch.library.register_fake("mxfp4::draw_seed", lib=_library)
def _draw_seed_shape(counter):
    return counter.new_empty(())


# int64 [2 or more], (key, draws so far, ...) -> the next seed; counts the draw. As one operator a compiler cannot
# recompute it after the count has moved on. Inside a backward it gives the last seed again. See `draws.py`.
draw_seed = torch.ops.mxfp4.draw_seed.default


# Blocks

_library.define("quantize_operand(Tensor x, str plan, Tensor? seed) -> (Tensor, Tensor)")
_library.define("fake_quantize_operand(Tensor x, str plan, Tensor? seed) -> Tensor")
_library.define("quantize_operands(Tensor x, str row, str col, Tensor? seed) -> Tensor[]")

LANES = 128  # a multiple of every group; the kernels work on many rows side by side


def _along_axis(backend: Backend, x: Tensor, plan: OperandPlan, seed: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """(values, scales) of `x` along the plan's axis, as a batch of matrices with the axis last or in the middle."""
    axis = plan.axis % x.ndim
    before, k, after = x.shape[:axis], x.shape[axis], x.shape[axis + 1 :]
    if after:
        shape = (*before, *after, k)
        x = x if x.ndim == 2 else x.reshape(before.numel(), k, after.numel())
        _, (values, scales) = backend.quantize_matrix(x, None, plan, seed)
    else:
        shape = (*before, k)
        rows, width = (before[-1] if before else 1), k
        if plan.block == "1d" and x.is_contiguous():
            rows = before.numel()
            if rows < LANES and k % LANES == 0:  # few long rows: the same blocks as many short ones
                rows, width = rows * k // LANES, LANES
        x = x if x.shape == (rows, width) else x.reshape(-1 if rows else 0, rows, width)
        (values, scales), _ = backend.quantize_matrix(x, plan, None, seed)
    value_shape, scale_shape = output_shapes(shape, plan)
    values = values if values.shape == value_shape else values.view(value_shape)
    return values, (None if scales is None else scales.view(scale_shape))


def _implement(key: str, backend: Backend) -> None:
    def quantize_operand(x: Tensor, plan: str, seed: Tensor | None):
        return _along_axis(backend, x, OperandPlan.parse(plan), seed)

    def fake_quantize_operand(x: Tensor, plan: str, seed: Tensor | None):
        return _along_axis(backend, x, OperandPlan.parse(plan), seed)[0]

    def quantize_operands(x: Tensor, row: str, col: str, seed: Tensor | None):
        row, col = (OperandPlan.parse(text) if text else None for text in (row, col))
        nvfp4 = (row or col).format == "nvfp4"
        (a, b), (c, d) = (backend.quantize_nvfp4 if nvfp4 else backend.quantize_matrix)(x, row, col, seed)
        return [t for t in (a, b, c, d) if t is not None]

    for function in (quantize_operand, fake_quantize_operand, quantize_operands):
        _library.impl(function.__name__, function, key)


for _key, _backend in BACKENDS.items():
    _implement(_key, _backend)


def _fake(x: Tensor, shape: tuple[int, ...], plan: OperandPlan) -> list[Tensor]:
    """What an operand is in memory, empty: values, values and their factor (NVFP4), or codes and scale bytes."""
    values, scales = output_shapes(tuple(shape), plan)
    if scales is not None:
        return [x.new_empty(values, dtype=torch.uint8), x.new_empty(scales, dtype=torch.uint8)]
    factor = [x.new_empty((), dtype=torch.float32)] if plan.format == "nvfp4" else []
    return [x.new_empty(values, dtype=plan.dtype), *factor]


@torch.library.register_fake("mxfp4::quantize_operand", lib=_library)
def _quantize_operand_shape(x, plan, seed):
    plan = OperandPlan.parse(plan)
    return tuple(_fake(x, x.movedim(plan.axis, -1).shape, plan))


@torch.library.register_fake("mxfp4::fake_quantize_operand", lib=_library)
def _fake_quantize_operand_shape(x, plan, seed):
    return _quantize_operand_shape(x, plan, seed)[0]


@torch.library.register_fake("mxfp4::quantize_operands", lib=_library)
def _quantize_operands_shape(x, row, col, seed):
    shapes = ((x.shape, row), (x.shape[::-1], col))
    return [t for shape, text in shapes if text for t in _fake(x, shape, OperandPlan.parse(text))]


# A tensor along the plan's axis: codes and scale bytes; values.
quantize_operand = torch.ops.mxfp4.quantize_operand.default
fake_quantize_operand = torch.ops.mxfp4.fake_quantize_operand.default
# A matrix along C by the plan `row` and along R by `col` ("": not), from one read of it: what each gives, in a list.
quantize_operands = torch.ops.mxfp4.quantize_operands.default


# The operators before plans, with each option an argument: saved graphs hold them. Signs, FP32 [hadamard], are given.

_HOW = (
    "str {0}block, str {0}elem, str {0}scale_rule, bool {0}stochastic, int {0}hadamard, Tensor? {0}signs, int {0}stream"
)
_PAIR = f"Tensor x, {_HOW.format('row_')}, {_HOW.format('col_')}, Tensor? seed"


def _by_option(x: Tensor, axis: int, how: tuple, seed: Tensor | None, dtype: torch.dtype | None) -> tuple[Tensor, ...]:
    block, elem, scale_rule, stochastic, hadamard, signs, stream = how
    if signs is not None:
        groups = x.float().movedim(axis, -1).unflatten(-1, (-1, hadamard))
        x = (groups * signs.to(torch.float32)).flatten(-2).movedim(-1, axis)
    text = plan_text(
        elem=elem, block=block, scale_rule=scale_rule, rounding="stochastic" if stochastic else "nearest",
        rotation=Hadamard(hadamard) if hadamard else None, stream=stream, axis=axis, dtype=dtype,
    )  # fmt: skip
    return quantize_operand(x, text, seed) if dtype is None else (fake_quantize_operand(x, text, seed),)


def _define_by_option(schema: str, function) -> None:
    _library.define(schema)
    _library.impl(schema.split("(")[0], function, "CompositeImplicitAutograd")


_define_by_option(
    f"quantize(Tensor x, int axis, {_HOW.format('')}, Tensor? seed) -> (Tensor, Tensor)",
    lambda x, axis, *how: _by_option(x, axis, how[:7], how[7], None),
)
_define_by_option(
    f"fake_quantize(Tensor x, int axis, {_HOW.format('')}, Tensor? seed, ScalarType dtype) -> Tensor",
    lambda x, axis, *how: _by_option(x, axis, how[:7], how[7], how[8])[0],
)
_define_by_option(
    f"quantize_pair({_PAIR}) -> (Tensor, Tensor, Tensor, Tensor)",
    lambda x, *how: (*_by_option(x, -1, how[:7], how[14], None), *_by_option(x, 0, how[7:14], how[14], None)),
)
_define_by_option(
    f"fake_quantize_pair({_PAIR}, ScalarType dtype) -> (Tensor, Tensor)",
    lambda x, *how: (*_by_option(x, -1, how[:7], how[14], how[15]), *_by_option(x, 0, how[7:14], how[14], how[15])),
)
_define_by_option(
    f"values_and_packed({_PAIR}, ScalarType dtype) -> (Tensor, Tensor, Tensor)",
    lambda x, *how: (*_by_option(x, -1, how[:7], how[14], how[15]), *_by_option(x, 0, how[7:14], how[14], None)),
)


# FP8 with one scale a tensor, BF16, and what undoes scales on a product

_library.define("fp8_per_tensor(Tensor x, str elem, ScalarType dtype) -> (Tensor, Tensor)")
_library.define("bf16_values(Tensor x, ScalarType dtype) -> Tensor")
_library.define("scale_product(Tensor y, Tensor? a, Tensor? b, float constant, int times, ScalarType dtype) -> Tensor")


def scaled_fp8(x: Tensor, scale: Tensor, elem: str, dtype: torch.dtype) -> Tensor:
    """(x * scale) in E4M3 or E5M2 to nearest even, as values in `dtype`; no finite product is out of range."""
    return backend_of(x).scaled_fp8(x, scale, elem, dtype)


def _implement_fp8(key: str, backend: Backend) -> None:
    def fp8_per_tensor(x, elem, dtype):
        if backend.fp8_per_tensor is not None:
            return backend.fp8_per_tensor(x, elem, dtype)
        scale = fp8_scale(x, elem)
        return backend.scaled_fp8(x, scale, elem, dtype), scale.reciprocal()

    def scale_product(y, a, b, constant, times, dtype):
        return backend.scale_product(y, a, b, constant, times, dtype)

    _library.impl("fp8_per_tensor", fp8_per_tensor, key)
    _library.impl("scale_product", scale_product, key)


for _key, _backend in BACKENDS.items():
    _implement_fp8(_key, _backend)


@torch.library.register_fake("mxfp4::fp8_per_tensor", lib=_library)
def _fp8_per_tensor_shape(x, elem, dtype):
    return torch.empty_like(x, dtype=dtype), x.new_empty((), dtype=torch.float32)


@torch.library.impl(_library, "bf16_values", "CompositeExplicitAutograd")
def _bf16_values(x, dtype):
    return x.to(torch.bfloat16).to(dtype, copy=True)  # never x itself


@torch.library.register_fake("mxfp4::bf16_values", lib=_library)
def _bf16_values_shape(x, dtype):
    return torch.empty_like(x, dtype=dtype)


@torch.library.register_fake("mxfp4::scale_product", lib=_library)
def _scale_product_shape(y, a, b, constant, times, dtype):
    return torch.empty_like(y, dtype=dtype)


# (E4M3 or E5M2 values with one scale for the tensor, from its current maximum; the factor that undoes the scale).
fp8_per_tensor = torch.ops.mxfp4.fp8_per_tensor.default
# Rounded to BF16, in another dtype: two casts in a row, of which a compiler would leave nothing.
bf16_values = torch.ops.mxfp4.bf16_values.default
# FP32 y times the 0-d factors a and b, those that are given, then `times` times the constant; rounded to `dtype` once.
scale_product = torch.ops.mxfp4.scale_product.default
