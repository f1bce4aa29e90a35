"""quantize and fake_quantize: the public way into MX block quantization (OCP MX v1.0, section 6.3)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from mxfp4.numerics.formats import BLOCK, FLOATS, as_index, check_float, elem_format, one_of
from mxfp4.numerics.hadamard import Hadamard, check_multiple, check_rotation
from mxfp4.numerics.operand_plan import plan_text
from mxfp4.numerics.ops import block_quantize as ops
from mxfp4.numerics.philox import as_seed
from mxfp4.numerics.rounding import ROUNDINGS
from mxfp4.numerics.scale_rules import DEFAULT_SCALE_RULE, SCALE_RULES
from mxfp4.numerics.tensor import MXTensor

BLOCKS = ("1d", "2d")


@torch.no_grad()
def quantize(
    x: Tensor,
    *,
    axis: int = -1,
    block: str = "1d",
    elem: str = "e2m1",
    scale_rule: str = DEFAULT_SCALE_RULE,
    rounding: str = "nearest",
    hadamard: Hadamard | None = None,
    seed: int | Tensor | None = None,
    stream: int = 0,
) -> MXTensor:
    """Quantize `x` to MX blocks along `axis`, the axis that a GEMM will contract (OCP MX 1.0, sections 5.1 and 6.3).

    A zero block has scale byte 0. A block that holds NaN or infinity, also after rotation, has byte 255 and codes 0.
    Finite values within a factor of 2 of FP32's largest may round up to 2^128, which FP32 reads as infinity. FP32
    subnormals, and blocks with byte 0, may read as 0 while torch.set_flush_denormal(True) is on.

    Args:
        x: Float tensor of any strides, at least 1-D (2-D for 2D blocks). FP64 is rounded to FP32 first.
        axis: The axis that blocks of 32 lie along.
        block: "1d" (1x32 along `axis`) or "2d" (32x32 over the last two axes).
        elem: "e2m1" (MXFP4), "e4m3" or "e5m2" (MXFP8).
        scale_rule: "even" (the recipes' default), "floor" (the OCP rule), "ceil" or "rceil"; see
            `mxfp4.numerics.scale_rules`.
        rounding: "nearest" (ties to even) or "stochastic"; both saturate.
        hadamard: Rotation along `axis`, in FP32, before the block maximum is taken.
        seed: An int or a one-element int64 tensor, for stochastic rounding and for signs="seed". The same seed gives
            the same bytes on every back end. None draws a new one from torch's generator at each call.
        stream: Separates draws that share a seed. Streams 2n and 2n + 1, the two operands of a GEMM, share their signs.

    Returns:
        The codes and scales. Zero rows give an empty result. It carries no gradient.

    Raises:
        TypeError: `x` is no float tensor, or axis or seed is no integer.
        ValueError: `axis`, or for 2D blocks either axis, is no positive multiple of 32 or of the rotation's size; or a
            name is unknown.

    """
    axis, stream, seed = _checked(x, axis, block, elem, scale_rule, rounding, hadamard, seed, stream)
    text = _text(axis, block, elem, scale_rule, rounding, hadamard, stream, None)
    qdata, scale = ops.quantize_operand(x.detach(), text, seed)
    return _wrapped(qdata, scale, x, elem, block, axis, hadamard, stream, seed)


@torch.no_grad()
def fake_quantize(
    x: Tensor,
    *,
    axis: int = -1,
    block: str = "1d",
    elem: str = "e2m1",
    scale_rule: str = DEFAULT_SCALE_RULE,
    rounding: str = "nearest",
    hadamard: Hadamard | None = None,
    seed: int | Tensor | None = None,
    stream: int = 0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """`quantize(x, ...).dequantize(dtype)` in one pass, nothing packed: same arguments, same values, same errors.

    The result is shaped like x, in `dtype` (None: FP32), in the rotated basis; in memory `axis` is last.
    """
    axis, stream, seed = _checked(x, axis, block, elem, scale_rule, rounding, hadamard, seed, stream)
    dtype = torch.float32 if dtype is None else one_of("dtype", dtype, FLOATS)
    text = _text(axis, block, elem, scale_rule, rounding, hadamard, stream, dtype)
    return ops.fake_quantize_operand(x.detach(), text, seed).movedim(-1, axis)


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
    dtype = torch.float32 if dtype is None else one_of("dtype", dtype, FLOATS)
    row, col, seed = _checked_pair(x, row, col, seed)
    along_row, along_col = ops.quantize_operands(x.detach(), _text(-1, *row, dtype), _text(0, *col, dtype), seed)
    return along_row, along_col.t()


@torch.no_grad()
def quantize_pair(
    x: Tensor, row: Mapping[str, object], col: Mapping[str, object], *, seed: int | Tensor | None = None
) -> tuple[MXTensor, MXTensor]:
    """`quantize(x, axis=-1, **row)` and `quantize(x, axis=0, **col)` of a matrix, from one read of it.

    Arguments as in `fake_quantize_pair`.
    """
    row, col, seed = _checked_pair(x, row, col, seed)
    outputs = ops.quantize_operands(x.detach(), _text(-1, *row, None), _text(0, *col, None), seed)
    return tuple(
        _wrapped(*outputs[i : i + 2], x, elem, block, axis, hadamard, stream, seed)
        for i, axis, (block, elem, _, _, hadamard, stream) in ((0, -1, row), (2, 0, col))
    )


_DEFAULTS = {
    "block": "1d", "elem": "e2m1", "scale_rule": DEFAULT_SCALE_RULE, "rounding": "nearest", "hadamard": None, "stream": 0,
}  # fmt: skip


def _text(axis, block, elem, scale_rule, rounding, hadamard, stream, dtype) -> str:
    """The plan of checked arguments."""
    return plan_text(
        elem=elem, block=block, scale_rule=scale_rule, rounding=rounding, rotation=hadamard, stream=stream, axis=axis,
        dtype=dtype,
    )  # fmt: skip


def _wrapped(qdata, scale, x, elem, block, axis, hadamard, stream, seed) -> MXTensor:
    signs = None if hadamard is None else hadamard.resolve(seed, stream // 2, x.device)
    return MXTensor(qdata, scale, elem, block, _negative(axis, x.ndim), tuple(x.shape), hadamard, signs)


def _checked_pair(x, row, col, seed) -> tuple[tuple, tuple, Tensor | None]:
    """Check every argument; return (row options in the order of _DEFAULTS, column options, seed)."""
    if isinstance(x, Tensor) and x.ndim != 2:
        raise ValueError(f"a pair of quantizations needs a 2-D tensor, got shape {tuple(x.shape)}")
    for options in (row, col):
        for name in options:
            one_of("keyword", name, _DEFAULTS)
    row, col = ({**_DEFAULTS, **options} for options in (row, col))
    if isinstance(x, Tensor):
        seed = as_seed(seed, x.device) if any(_is_random(o["rounding"], o["hadamard"]) for o in (row, col)) else None
    _, row["stream"], _ = _checked(x, axis=-1, seed=seed, **row)
    _, col["stream"], _ = _checked(x, axis=0, seed=seed, **col)
    return tuple(row.values()), tuple(col.values()), seed


def _is_random(rounding, hadamard) -> bool:
    return rounding == "stochastic" or (isinstance(hadamard, Hadamard) and hadamard.signs == "seed")


def _checked(x, axis, block, elem, scale_rule, rounding, hadamard, seed, stream) -> tuple[int, int, Tensor | None]:
    """Check every argument; return (axis, stream, seed), the seed None where nothing is random."""
    check_float(x)
    axis = as_index("axis", axis)
    elem_format(elem)
    one_of("block", block, BLOCKS)
    one_of("scale_rule", scale_rule, SCALE_RULES)
    one_of("rounding", rounding, ROUNDINGS)
    check_rotation(hadamard)
    stream = as_index("stream", stream)
    if not 0 <= stream < 2**32:
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
    return axis, stream, as_seed(seed, x.device) if _is_random(rounding, hadamard) else None


def _negative(axis: int, ndim: int) -> int:
    return axis if axis < 0 else axis - ndim
