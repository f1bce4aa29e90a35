"""quantize and fake_quantize: the public way into MX block quantization (OCP MX v1.0, section 6.3)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from mxfp4.numerics.formats import BLOCK, FLOATS, as_index, check_float, elem_format, one_of
from mxfp4.numerics.hadamard import Hadamard, check_multiple, check_rotation
from mxfp4.numerics.ops import block_quantize as ops
from mxfp4.numerics.philox import as_seed
from mxfp4.numerics.rounding import ROUNDINGS
from mxfp4.numerics.scale_rules import SCALE_RULES
from mxfp4.numerics.tensor import MXTensor

BLOCKS = ("1d", "2d")


@torch.no_grad()
def quantize(
    x: Tensor,
    *,
    axis: int = -1,
    block: str = "1d",
    elem: str = "e2m1",
    scale_rule: str = "floor",
    rounding: str = "nearest",
    hadamard: Hadamard | None = None,
    seed: int | Tensor | None = None,
    stream: int = 0,
) -> MXTensor:
    """Quantize `x` to MX blocks along `axis`, the axis that a GEMM will contract.

    x: float tensor of any strides, at least 1-D (2-D for 2D blocks). FP64 is rounded to FP32 first.
    block: "1d" (1x32 along `axis`) or "2d" (32x32 over the last two axes).
    elem: "e2m1" (MXFP4), "e4m3", "e5m2" (MXFP8).
    scale_rule: "floor" (the OCP rule), "even", "ceil", "rceil": see `mxfp4.numerics.scale_rules`.
    rounding: "nearest" (ties to even) or "stochastic"; both saturate.
    hadamard: rotation along `axis` before the block maximum, in FP32.
    seed: int or one-element int64 tensor, for stochastic rounding and for signs="seed". The same seed gives the same
        bytes on every backend; None draws a new one from torch's generator at each call.
    stream: separates draws that share a seed; streams 2n and 2n + 1 (the two operands of a GEMM) share their signs.

    A zero block has scale byte 0; a block that holds NaN or infinity (also after rotation) has byte 255 and codes 0.
    Finite values within a factor of 2 of FP32's largest may round up to 2^128, which FP32 reads as infinity. FP32
    subnormals, and blocks with byte 0, may read as 0 while torch.set_flush_denormal(True) is on. The result carries
    no gradient.

    Raises TypeError for non-float input and non-integer axis or seed, ValueError when `axis` (for 2D blocks: either
    axis) is not a positive multiple of 32, or of the rotation's size, and for unknown names.
    Zero rows give an empty result.
    """
    how = _prepare(x, axis, block, elem, scale_rule, rounding, hadamard, seed, stream)
    qdata, scale = ops.quantize(x.detach(), *how)
    signs = how[6]
    return MXTensor(qdata, scale, elem, block, _negative(how[0], x.ndim), tuple(x.shape), hadamard, signs)


@torch.no_grad()
def fake_quantize(
    x: Tensor,
    *,
    axis: int = -1,
    block: str = "1d",
    elem: str = "e2m1",
    scale_rule: str = "floor",
    rounding: str = "nearest",
    hadamard: Hadamard | None = None,
    seed: int | Tensor | None = None,
    stream: int = 0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """`quantize(x, ...).dequantize(dtype)` in one pass, nothing packed: same arguments, same values, same errors.

    The result is shaped like x, in `dtype` (None: FP32), in the rotated basis; in memory `axis` is last.
    """
    how = _prepare(x, axis, block, elem, scale_rule, rounding, hadamard, seed, stream)
    dtype = torch.float32 if dtype is None else one_of("dtype", dtype, FLOATS)
    return ops.fake_quantize(x.detach(), *how, dtype).movedim(-1, how[0])


@torch.no_grad()
def fake_quantize_pair(
    x: Tensor,
    row: Mapping[str, object],
    col: Mapping[str, object],
    *,
    seed: int | Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """`fake_quantize(x, axis=-1, **row)` and `fake_quantize(x, axis=0, **col)` of a matrix, from one read of it.

    `row` and `col` hold keywords of `fake_quantize`: block, elem, scale_rule, rounding, hadamard, stream. Both results
    are shaped like x [R, C]; in memory the second has its axis 0 last. Same values and same errors as the two calls.
    """
    dtype, seed, how = _prepare_pair(x, row, col, seed, dtype)
    along_row, along_col = ops.fake_quantize_pair(x.detach(), *how, seed, dtype)
    return along_row, along_col.t()


@torch.no_grad()
def quantize_pair(
    x: Tensor, row: Mapping[str, object], col: Mapping[str, object], *, seed: int | Tensor | None = None
) -> tuple[MXTensor, MXTensor]:
    """`quantize(x, axis=-1, **row)` and `quantize(x, axis=0, **col)` of a matrix, from one read of it.

    Arguments as in `fake_quantize_pair`.
    """
    _, seed, how = _prepare_pair(x, row, col, seed, None)
    outputs = ops.quantize_pair(x.detach(), *how, seed)
    first = MXTensor(*outputs[:2], how[1], how[0], -1, tuple(x.shape), row.get("hadamard"), how[5])
    return first, _turned(x, outputs[2:], how, col)


@torch.no_grad()
def values_and_packed(
    x: Tensor,
    row: Mapping[str, object],
    col: Mapping[str, object],
    *,
    seed: int | Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, MXTensor]:
    """`fake_quantize(x, axis=-1, **row)` and `quantize(x, axis=0, **col)` of a matrix, from one read of it.

    Arguments as in `fake_quantize_pair`.
    """
    dtype, seed, how = _prepare_pair(x, row, col, seed, dtype)
    values, *packed = ops.values_and_packed(x.detach(), *how, seed, dtype)
    return values, _turned(x, packed, how, col)


def _turned(x: Tensor, packed, how: tuple, col: Mapping[str, object]) -> MXTensor:
    """The column orientation's codes and scales, wrapped."""
    return MXTensor(*packed, how[8], how[7], -2, tuple(x.shape), col.get("hadamard"), how[12])


_DEFAULTS = {"block": "1d", "elem": "e2m1", "scale_rule": "floor", "rounding": "nearest", "hadamard": None, "stream": 0}


def _prepare_pair(x, row, col, seed, dtype):
    """Check every argument; return (dtype, seed, those of the operators between x and the seed)."""
    if isinstance(x, Tensor) and x.ndim != 2:
        raise ValueError(f"a pair of quantizations needs a 2-D tensor, got shape {tuple(x.shape)}")
    for options in (row, col):
        for name in options:
            one_of("keyword", name, _DEFAULTS)
    dtype = torch.float32 if dtype is None else one_of("dtype", dtype, FLOATS)
    if isinstance(x, Tensor):
        seed = as_seed(seed, x.device) if any(map(_is_random, (row, col))) else None
    _, *row_how, _ = _prepare(x, axis=-1, seed=seed, **{**_DEFAULTS, **row})
    _, *col_how, _ = _prepare(x, axis=0, seed=seed, **{**_DEFAULTS, **col})
    return dtype, seed, (*row_how, *col_how)


def _is_random(options) -> bool:
    hadamard = options.get("hadamard")
    return options.get("rounding") == "stochastic" or (isinstance(hadamard, Hadamard) and hadamard.signs == "seed")


def _prepare(x, axis, block, elem, scale_rule, rounding, hadamard, seed, stream):
    """Check every argument; return those of the operators after x."""
    check_float(x)
    axis = as_index("axis", axis)
    elem_format(elem)
    one_of("block", block, BLOCKS)
    one_of("scale_rule", scale_rule, SCALE_RULES)
    one_of("rounding", rounding, ROUNDINGS)
    check_rotation(hadamard)
    if not 0 <= as_index("stream", stream) < 2**32:
        raise ValueError(f"stream={stream} is out of range; allowed: 0 to 2^32 - 1")
    check_multiple(x, axis, BLOCK, "the block size")
    if hadamard is not None:
        check_multiple(x, axis, hadamard.size, "the Hadamard size")
    if block == "2d":
        if x.ndim < 2 or _negative(axis, x.ndim) < -2:
            raise ValueError(
                f"2D blocks need axis -1 or -2 of at least 2 axes, got axis={axis}, shape {tuple(x.shape)}"
            )
        other = -3 - _negative(axis, x.ndim)
        if x.shape[other] % BLOCK:
            raise ValueError(
                f"axis {other} of shape {tuple(x.shape)} has size {x.shape[other]}, which is not a multiple of "
                f"{BLOCK} (2D blocks are 32x32)"
            )
    stochastic = rounding == "stochastic"
    random_sign = hadamard is not None and hadamard.signs == "seed"
    seed = as_seed(seed, x.device) if stochastic or random_sign else None
    signs = None if hadamard is None else hadamard.resolve(seed, stream // 2, x.device)
    size = 0 if hadamard is None else hadamard.size
    return axis, block, elem, scale_rule, stochastic, size, signs, stream, seed


def _negative(axis: int, ndim: int) -> int:
    return axis if axis < 0 else axis - ndim
