"""FP8 with one scale for the tensor, to nearest even: values under a given scale, or codes from the tensor itself.

The twin is torch's cast. The rounding is that of the block kernels, which needs no FP8 conversion of the chip and
interprets on the CPU; NVIDIA's from sm_89 on convert codes themselves, to the same. Codes take two reads of the tensor:
one for its largest magnitude, one that writes them, along the rows, along the columns or both.

Scales are no powers of two, so multiplications round, and none may be contracted with an addition that follows: the
kernels are compiled without (`enable_fp_fusion`).
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.standard import _elementwise_max  # of `tl.max`, which does not interpret where not imported so

from mxfp4.numerics.formats import ELEMS, transposed_copy
from mxfp4.numerics.kernels.triton.block_math import code, value
from mxfp4.numerics.kernels.triton.launcher import Launcher, on_device_of

TILE = 2048
SIDE = 128
"""Rows and columns of the tile of codes that a program makes: whole 128-byte lines of both results."""


@triton.jit
def _scaled_kernel(
    x_ptr, scale_ptr, out_ptr, n, MBITS: tl.constexpr, BIAS: tl.constexpr, MAX_CODE: tl.constexpr, TILE: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0).to(tl.float32)
    scale = tl.load(scale_ptr)
    u = x * scale
    # Nothing exceeds the format's maximum but what is not finite, and then the scale is 0 or NaN.
    y = tl.where(u == u, value(x, scale, None, MBITS, BIAS, MAX_CODE, True), u)
    bits = y.to(tl.int32, bitcast=True) | (x.to(tl.int32, bitcast=True) & -0x80000000)
    tl.store(out_ptr + at, bits.to(tl.float32, bitcast=True).to(out_ptr.dtype.element_ty), mask=at < n)


def scaled_fp8(x: Tensor, scale: Tensor, elem: str, dtype: torch.dtype) -> Tensor:
    """(x * scale) in E4M3 or E5M2 as values in `dtype`, strides of `empty_like`; scale FP32 0-d, |x * scale| in range."""
    fmt, out = ELEMS[elem], torch.empty_like(x, dtype=dtype)
    if x.stride() != out.stride():  # gaps or overlaps
        x = torch.empty_like(x).copy_(x)
    n = x.numel()
    if n:
        arguments = {"x_ptr": x, "scale_ptr": scale, "out_ptr": out, "n": n}
        options = {"MBITS": fmt.mbits, "BIAS": fmt.bias, "MAX_CODE": fmt.max_code, "TILE": TILE, "num_warps": 4}
        grid, options = (triton.cdiv(n, TILE),), options | {"enable_fp_fusion": False}
        with on_device_of(x):
            _scaled((n, elem, x.dtype, dtype, x.device), (x, scale, out), lambda: (grid, arguments, options))
    return out


_scaled = Launcher(_scaled_kernel)


@triton.jit
def _place(C, SIDE: tl.constexpr):
    """(rows, columns) of this program's tile of C columns, int64 [SIDE] each: neighbours lie along the rows."""
    tiles = (C - 1) // SIDE + 1  # C may be the largest int32
    pid = tl.program_id(0)
    r = (pid // tiles).to(tl.int64) * SIDE + tl.arange(0, SIDE)
    c = (pid % tiles).to(tl.int64) * SIDE + tl.arange(0, SIDE)
    return r, c


@triton.jit
def _tile(x_ptr, r, c, R, C, row_stride, column_stride):
    inside = (r[:, None] < R) & (c[None, :] < C)
    return tl.load(x_ptr + r[:, None] * row_stride + c[None, :] * column_stride, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _amax_kernel(x_ptr, amax_ptr, R, C, row_stride, column_stride, SIDE: tl.constexpr):
    """The largest magnitude of x [R, C], as FP32 bits in an int32: ordered as magnitudes are, NaN above infinity."""
    r, c = _place(C, SIDE)
    bits = _tile(x_ptr, r, c, R, C, row_stride, column_stride).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    tl.atomic_max(amax_ptr, tl.reduce(tl.reduce(bits, 1, _elementwise_max), 0, _elementwise_max), sem="relaxed")


@triton.jit
def _codes_kernel(
    x_ptr, codes_ptr, transposed_ptr, amax_ptr, factor_ptr, R, C, row_stride, column_stride,
    MAX: tl.constexpr, MBITS: tl.constexpr, BIAS: tl.constexpr, MAX_CODE: tl.constexpr, CONVERTS: tl.constexpr,
    SIDE: tl.constexpr,
):  # fmt: skip
    """Codes of x [R, C] to codes_ptr [R, C] and, transposed, to transposed_ptr [C, R]; either may be None."""
    amax = tl.load(amax_ptr).to(tl.float32, bitcast=True)
    # `block_quantize.fp8_scale`, step by step: torch divides a number by a tensor as the number times the reciprocal.
    scale = tl.div_rn(1.0, tl.where(amax == 0, 1.0, amax)) * MAX
    scale = tl.where(amax == 0, 1.0, scale)
    scale = tl.where(scale > 3.4028234663852886e38, 3.4028234663852886e38, scale)
    if tl.program_id(0) == 0:
        tl.store(factor_ptr, tl.div_rn(1.0, scale))
    r, c = _place(C, SIDE)
    x = _tile(x_ptr, r, c, R, C, row_stride, column_stride)
    u = x * scale
    if CONVERTS:
        if MBITS == 3:
            codes = u.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        else:
            codes = u.to(tl.float8e5).to(tl.uint8, bitcast=True)
    else:  # NaN is 0x7F in both formats, and nothing else lies beyond MAX: see `_scaled_kernel`
        magnitude = tl.where(u == u, code(x, scale, None, MBITS, BIAS, MAX_CODE, True), 0x7F)
        codes = (magnitude | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)
    if codes_ptr is not None:
        tl.store(codes_ptr + r[:, None] * C + c[None, :], codes, mask=(r[:, None] < R) & (c[None, :] < C))
    if transposed_ptr is not None:
        inside = (c[:, None] < C) & (r[None, :] < R)
        tl.store(transposed_ptr + c[:, None] * R + r[None, :], tl.trans(codes), mask=inside)


def codes(x: Tensor, elem: str, along: bool, transposed: bool) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """X [R, C] -> (codes, uint8 [R, C]; the same transposed, [C, R]; FP32 factor, 0-d); what is not asked for is None.

    `block_quantize.fp8_scale` and torch's cast, byte for byte but for the sign of NaN.
    """
    if x.stride(0) == 1 and x.stride(1) != 1:  # threads follow memory
        down, across, factor = codes(x.t(), elem, transposed, along)
        return across, down, factor
    rows, columns = x.shape
    # Triton 3.6 misplaces codes in the transpose of an FP32 tile on sm_90; a BF16 tile's, what layers have, are right.
    fused = transposed and x.dtype == torch.bfloat16
    out = x.new_empty((rows, columns), dtype=torch.uint8) if along or not fused else None
    out_transposed = x.new_empty((columns, rows), dtype=torch.uint8) if fused else None
    if not x.numel():
        factor = x.new_ones((), dtype=torch.float32)
    else:
        amax, factor = x.new_zeros((), dtype=torch.int32), x.new_empty((), dtype=torch.float32)
        own, key = converts(x.device), (x.shape, x.stride(), x.dtype, x.device)

        def describe():
            grid, sizes, arguments, options = launch(x, out, out_transposed, amax, factor, elem, own)
            return grid, arguments | sizes, options

        def describe_amax():
            grid, sizes, _, options = launch(x, out, out_transposed, amax, factor, elem, own)
            return grid, {"x_ptr": x, "amax_ptr": amax, **sizes}, {"SIDE": SIDE, "num_warps": options["num_warps"]}

        with on_device_of(x):
            _amax(key, (x, amax), describe_amax)
            _codes((*key, elem, own), (x, out, out_transposed, amax, factor), describe)
    if transposed and not fused:
        out_transposed = transposed_copy(out)
    return out if along else None, out_transposed, factor


def launch(
    x: Tensor, out: Tensor | None, out_transposed: Tensor | None, amax: Tensor, factor: Tensor, elem: str, own: bool
) -> tuple[tuple[int], dict, dict, dict]:
    """(grid, sizes, arguments, constants and options) of the kernel: what `codes` runs and `isa` compiles."""
    fmt, (rows, columns) = ELEMS[elem], x.shape
    grid = (triton.cdiv(rows, SIDE) * triton.cdiv(columns, SIDE),)
    sizes = {"R": rows, "C": columns, "row_stride": x.stride(0), "column_stride": x.stride(1)}
    arguments = {"x_ptr": x, "codes_ptr": out, "transposed_ptr": out_transposed, "amax_ptr": amax, "factor_ptr": factor}
    constants = {"MAX": fmt.max, "MBITS": fmt.mbits, "BIAS": fmt.bias, "MAX_CODE": fmt.max_code, "CONVERTS": own}
    return grid, sizes, arguments, constants | {"SIDE": SIDE, "num_warps": 8, "enable_fp_fusion": False}


_amax, _codes = Launcher(_amax_kernel), Launcher(_codes_kernel)


@lru_cache
def converts(device: torch.device) -> bool:
    """Whether a device's own FP8 conversion serves: NVIDIA's cvt.rn.satfinite, which gives codes of NaN as 0x7F too."""
    return device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device) >= (8, 9)
