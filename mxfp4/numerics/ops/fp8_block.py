"""FP8 in blocks of 128 with an FP32 scale each, as DeepSeek-V3 trains (arXiv 2412.19437, section 3.3).

An operand [R, K], K contracted, is cut into tiles of 1x128 along K (activations, gradients) or blocks of 128x128
(weights), E4M3 everywhere:

    scale = amax / 448          FP32; 1 for zeros, at least 2^-126; pow2: rounded up to a power of two
    code  = E4M3(x / scale)     nearest even (or stochastic); a block that holds NaN or an infinity is NaN

The product is that of the hardware, not of dequantized values, which 24 bits do not hold:

    Y[m, n] = sum over blocks k of scale_a[m, k] * scale_b[n, k] * (sum over the 128 products of block k)

`gemm_blocks` does this with one GEMM of E4M3 values for each block of K (BF16 on a GPU, FP32 elsewhere: exact), FP32
sums and FP32 scales. cuBLASLt 12.9 does it on Hopper (`torch.nn.functional.scaled_mm` of PyTorch 2.10 and later, types
BlockWise1x128 and BlockWise128x128); `is_available` checks its results against `gemm_blocks` before it is used. Its
inner sums keep fewer bits, so results are close to the emulated ones, not the same. A product of two scales beyond
FP32's range gives infinity or NaN, or 0, in both.

Sources: the report; DeepGEMM `utils/math.py` (power-of-two scales); PyTorch `aten/src/ATen/native/cuda/ScaledBlas.cpp`
(layouts of the scales, which blocks may meet which).
"""

from __future__ import annotations

import warnings
from functools import lru_cache
from importlib import import_module

import torch
from torch import Tensor

from mxfp4.errors import Notice
from mxfp4.numerics.formats import E4M3
from mxfp4.numerics.fp8 import FP8
from mxfp4.numerics.gemm_backends.library import as_dtype, gemm
from mxfp4.numerics.native import compile_time_constant
from mxfp4.numerics.ops import block_quantize as _operators  # noqa: F401  (defines the library)
from mxfp4.numerics.philox import random16
from mxfp4.numerics.rounding import round_stochastic

SIDE = 128
SCALES = ("fp32", "pow2")
SMALLEST_SCALE = 2.0**-126
"""FP32's smallest normal number: below it a scale would lose the bits that keep x / scale within 448."""

_library = torch.library.Library("mxfp4", "FRAGMENT")
_ANY = "CompositeExplicitAutograd"
_library.define("fp8_block(Tensor x, str block, str scales, Tensor? seed, int stream) -> (Tensor, Tensor)")
_library.define("fp8_block_values(Tensor codes, Tensor scale, str block) -> Tensor")
_operand = "Tensor {0}, Tensor {0}_scale, str {0}_block"
_library.define(
    f"gemm_fp8_block({_operand.format('a')}, {_operand.format('b')}, ScalarType dtype, bool native) -> Tensor"
)


def block_scale(amax: Tensor, scales: str) -> Tensor:
    """The scales, FP32, of blocks with these largest magnitudes (FP32); NaN where one is not finite."""
    scale = (amax / E4M3.max).clamp(min=SMALLEST_SCALE).masked_fill(amax == 0, 1.0)
    if scales == "pow2":  # the next power of two: carry out of the mantissa, then none is left
        scale = ((scale.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    return scale.masked_fill(~amax.isfinite(), torch.nan)


def _scale_shape(shape: torch.Size, block: str) -> tuple[int, int]:
    rows, k = shape
    return (rows // SIDE if block == "2d" else rows), k // SIDE


def _wide(scale: Tensor, block: str) -> Tensor:
    """Scales [.., K / 128] for each row."""
    return scale.repeat_interleave(SIDE, dim=0) if block == "2d" else scale


@torch.library.impl(_library, "fp8_block", _ANY)
def _fp8_block(x, block, scales, seed, stream):
    tiles = x.float().unflatten(-1, (-1, SIDE))  # [R, K / 128, 128]
    amax = tiles.abs().amax(-1)
    if block == "2d":
        amax = amax.unflatten(0, (-1, SIDE)).amax(1)
    scale = block_scale(amax, scales)
    scaled = (tiles / _wide(scale, block).unsqueeze(-1)).flatten(-2)
    if seed is not None:
        noise = random16(seed, tuple(x.shape), stream)
        scaled = torch.where(scaled.isnan(), scaled, round_stochastic(scaled, E4M3, noise))
    return scaled.to(FP8["e4m3"]).contiguous().view(torch.uint8), scale


@torch.library.register_fake("mxfp4::fp8_block", lib=_library)
def _fp8_block_shape(x, block, scales, seed, stream):
    return x.new_empty(x.shape, dtype=torch.uint8), x.new_empty(_scale_shape(x.shape, block), dtype=torch.float32)


@torch.library.impl(_library, "fp8_block_values", _ANY)
def _fp8_block_values(codes, scale, block):
    tiles = codes.view(FP8["e4m3"]).float().unflatten(-1, (-1, SIDE))
    return (tiles * _wide(scale, block).unsqueeze(-1)).flatten(-2)


@torch.library.register_fake("mxfp4::fp8_block_values", lib=_library)
def _fp8_block_values_shape(codes, scale, block):
    return codes.new_empty(codes.shape, dtype=torch.float32)


def gemm_blocks(a: Tensor, a_scale: Tensor, a_block: str, b: Tensor, b_scale: Tensor, b_block: str) -> Tensor:
    """[M, K] x [N, K] -> FP32 [M, N] of codes and their scales, block after block of K: the module's formula."""
    dtype = torch.bfloat16 if a.is_cuda else torch.float32
    a, b = (t.view(FP8["e4m3"]).to(dtype) for t in (a, b))
    a_scale, b_scale = _wide(a_scale, a_block), _wide(b_scale, b_block)
    y = torch.zeros((len(a), len(b)), dtype=torch.float32, device=a.device)
    for k in range(a.shape[1] // SIDE):
        part = slice(k * SIDE, (k + 1) * SIDE)
        y += gemm(a[:, part], b[:, part], torch.float32) * (a_scale[:, k, None] * b_scale[:, k])
    return y


def multiplies(shape_a: torch.Size, a_block: str, shape_b: torch.Size, b_block: str) -> bool:
    """Whether the library takes operands [M, K], [N, K] of these blocks: not two of 128x128, whole tiles, and rows that
    cuBLASLt can align."""
    whole = shape_a[0] % 16 == 0 and shape_b[0] % 16 == 0 and shape_a[1] % SIDE == 0 and shape_a[1] > 0
    return whole and shape_a[0] > 0 and shape_b[0] > 0 and (a_block, b_block) != ("2d", "2d")


def _for_library(scale: Tensor, block: str) -> Tensor:
    """Scales [rows, K / 128] where cuBLASLt reads them: along the rows first; of 128x128 blocks [K / 128 rounded up to 4,
    rows / 128], along K first."""
    rows, blocks = scale.shape
    if block == "1d":
        return torch.empty_strided((rows, blocks), (1, rows), dtype=scale.dtype, device=scale.device).copy_(scale)
    padded = -(-blocks // 4) * 4
    made = torch.zeros((rows, padded), dtype=scale.dtype, device=scale.device)
    made[:, :blocks] = scale
    return torch.as_strided(made, (padded, rows), (1, padded))


def gemm_library(
    a: Tensor, a_scale: Tensor, a_block: str, b: Tensor, b_scale: Tensor, b_block: str, dtype: torch.dtype
) -> Tensor:
    """`gemm_blocks` by the library's kernel, in `dtype` (FP32 or BF16); for shapes that `multiplies` allows."""
    functional = import_module("torch.nn.functional")  # PyTorch before 2.10 lacks the names
    kind = {"1d": functional.ScalingType.BlockWise1x128, "2d": functional.ScalingType.BlockWise128x128}
    plain = functional.SwizzleType.NO_SWIZZLE
    return functional.scaled_mm(
        a.view(FP8["e4m3"]), b.view(FP8["e4m3"]).t(), _for_library(a_scale, a_block), kind[a_block],
        _for_library(b_scale, b_block), kind[b_block], plain, plain, output_dtype=dtype,
    )  # fmt: skip


@torch.library.impl(_library, "gemm_fp8_block", _ANY)
def _gemm_fp8_block(a, a_scale, a_block, b, b_scale, b_block, dtype, native):
    if native and multiplies(a.shape, a_block, b.shape, b_block):
        return gemm_library(a, a_scale, a_block, b, b_scale, b_block, dtype)
    return as_dtype(gemm_blocks(a, a_scale, a_block, b, b_scale, b_block), dtype)


@torch.library.register_fake("mxfp4::gemm_fp8_block", lib=_library)
def _gemm_fp8_block_shape(a, a_scale, a_block, b, b_scale, b_block, dtype, native):
    return a.new_empty((a.shape[0], b.shape[0]), dtype=dtype)


# A matrix [R, K] as E4M3 codes (uint8 [R, K]) and FP32 scales, [R, K / 128] ("1d") or [R / 128, K / 128] ("2d").
fp8_block = torch.ops.mxfp4.fp8_block.default
# The values of both, FP32 [R, K]: code times scale, rounded once.
fp8_block_values = torch.ops.mxfp4.fp8_block_values.default
# [M, K] x [N, K] -> [M, N] in `dtype`; `native`: by the library where it takes these shapes.
gemm_fp8_block = torch.ops.mxfp4.gemm_fp8_block.default


# Where the library's kernel is used


@compile_time_constant
def is_available(device: torch.device | str) -> bool:
    """Whether `device` multiplies such blocks itself and gives the results of `gemm_blocks`: checked once a process."""
    device = torch.device(device)
    if device.type != "cuda" or not torch.cuda.is_available():
        return False
    return _available_on(torch.cuda.current_device() if device.index is None else device.index)


@lru_cache
def _available_on(index: int) -> bool:
    built = torch.version.cuda
    if built is None or tuple(map(int, built.split(".")[:2])) < (12, 9):  # ROCm, or a cuBLASLt without the kernels
        return False
    if torch.cuda.get_device_capability(index)[0] != 9 or not hasattr(torch.nn.functional, "scaled_mm"):
        return False
    with torch.utils._python_dispatch._disable_current_modes(), torch.no_grad(), torch.cuda.device(index):
        problem = self_check(torch.device("cuda", index))
    if problem:
        warnings.warn(f"FP8 blocks are emulated on cuda:{index}: {problem}", Notice, stacklevel=2)
    return not problem


def self_check(device: torch.device) -> str:
    """Multiplies random blocks of very different scales in the pairings that training needs; what is wrong, or "".

    Five blocks of K, so that scales that are padded to a multiple of four are seen. An error beyond 2^-9 of the sum of
    magnitudes is one: cuBLASLt's inner sums keep about 13 bits, and a wrong scale is wrong by far more.
    """
    generator = torch.Generator().manual_seed(0)
    m, n, k = 256, 384, 640

    def operand(rows: int, block: str) -> tuple[Tensor, Tensor, str]:
        shape = _scale_shape(torch.Size((rows, k)), block)
        x = torch.randn(rows, k, generator=generator) * 2.0 ** _wide(
            torch.randint(-12, 12, shape, generator=generator), block
        ).repeat_interleave(SIDE, dim=1)
        return *fp8_block(x.to(device), block, "fp32", None, 0), block

    for block in ("2d", "1d"):
        a, b = operand(m, "1d"), operand(n, block)
        positive = (a[0] & 0x7F, *a[1:]), (b[0] & 0x7F, *b[1:])  # the magnitudes: the sign is the first bit
        bound = 2.0**-9 * gemm_blocks(*positive[0], *positive[1])
        for dtype in (torch.float32, torch.bfloat16):
            try:
                got = gemm_library(*a, *b, dtype).float()
            except (RuntimeError, ValueError, NotImplementedError, AttributeError) as error:
                return f"the library refuses them ({str(error).splitlines()[0][:120]})"
            wrong = (got - gemm_blocks(*a, *b)).abs() > bound + 2.0**-8 * (dtype == torch.bfloat16) * got.abs()
            if bool(wrong.any()) or not bool(got.isfinite().all()):
                return f"the library's product of 1x128 and {'128x128' if block == '2d' else '1x128'} is wrong"
    return ""
