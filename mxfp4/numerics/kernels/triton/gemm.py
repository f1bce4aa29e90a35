"""The GEMM of packed operands on chips that multiply FP4 blocks themselves, and the unpacking that others need.

`tl.dot_scaled` becomes v_mfma_scale_f32_*_f8f6f4 on gfx950 and tcgen05.mma.*.mxf4.block_scale on sm_100: packed codes
and E8M0 bytes go to the matrix unit as they are. `mxfp4 isa` shows it. Elsewhere it would be emulated slowly, so
`matmul.py` does not come here: see `native.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxfp4.numerics.formats import BLOCK, elem_format
from mxfp4.numerics.kernels.triton.launcher import ON_AMD, Launch, Launcher, on_device_of
from mxfp4.numerics.kernels.triton.tiles import TUNED_FLOPS, Tile, fastest, tiles
from mxfp4.numerics.tensor import MXTensor


@triton.jit
def _load_operand(data, scale, rows, k, limit, K, row_stride, scale_stride, ELEM: tl.constexpr,
                  SCALE_ROWS: tl.constexpr, BK: tl.constexpr, EVEN_K: tl.constexpr):  # fmt: skip
    """Codes [rows, BK / 2] (FP8: [rows, BK]) and scale bytes [rows, BK / 32] from column k on, zeros beyond K."""
    PER_BYTE: tl.constexpr = 2 if ELEM == "e2m1" else 1
    at = k // PER_BYTE + tl.arange(0, BK // PER_BYTE)
    block = k // 32 + tl.arange(0, BK // 32)
    inside = rows[:, None] < limit
    scale_inside = inside
    if not EVEN_K:
        inside = inside & (at[None, :] < K // PER_BYTE)
        scale_inside = scale_inside & (block[None, :] < K // 32)
    codes = tl.load(data + rows.to(tl.int64)[:, None] * row_stride + at[None, :], mask=inside, other=0)
    line = (rows // SCALE_ROWS).to(tl.int64)
    bytes_ = tl.load(scale + line[:, None] * scale_stride + block[None, :], mask=scale_inside, other=0)
    if ELEM == "e4m3":
        codes = codes.to(tl.float8e4nv, bitcast=True)
    elif ELEM == "e5m2":
        codes = codes.to(tl.float8e5, bitcast=True)
    return codes, bytes_


@triton.jit
def _gemm_kernel(
    a, a_scale, b, b_scale, out, M, N, K, a_stride, a_scale_stride, b_stride, b_scale_stride, out_stride,
    A_ELEM: tl.constexpr, B_ELEM: tl.constexpr, A_SCALE_ROWS: tl.constexpr, B_SCALE_ROWS: tl.constexpr,
    ACCUMULATE: tl.constexpr, EVEN_K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Out [M, N] (+)= a [M, K] b [N, K]^T. Programs walk GROUP rows of tiles at a time, so that the L2 keeps both."""
    tiles_m, tiles_n = (M + BM - 1) // BM, (N + BN - 1) // BN
    pid = tl.program_id(0)
    group = pid // (GROUP * tiles_n)
    height = min(tiles_m - group * GROUP, GROUP)
    tile_m = group * GROUP + pid % (GROUP * tiles_n) % height
    tile_n = pid % (GROUP * tiles_n) // height
    rows = tile_m * BM + tl.arange(0, BM)
    columns = tile_n * BN + tl.arange(0, BN)
    total = tl.full((BM, BN), 0.0, tl.float32)
    for k in range(0, K, BK):
        x, xs = _load_operand(a, a_scale, rows, k, M, K, a_stride, a_scale_stride, A_ELEM, A_SCALE_ROWS, BK, EVEN_K)
        y, ys = _load_operand(b, b_scale, columns, k, N, K, b_stride, b_scale_stride, B_ELEM, B_SCALE_ROWS, BK, EVEN_K)
        total = tl.dot_scaled(x, xs, A_ELEM, y.T, ys, B_ELEM, total)
    target = out + rows.to(tl.int64)[:, None] * out_stride + columns[None, :]
    inside = (rows[:, None] < M) & (columns[None, :] < N)
    if ACCUMULATE:
        total += tl.load(target, mask=inside, other=0.0).to(tl.float32)
    tl.store(target, total.to(out.dtype.element_ty), mask=inside)


def gemm(a: MXTensor, b: MXTensor, out: Tensor, accumulate: bool = False) -> Tensor:
    """Out [M, N] (FP32 or BF16, columns contiguous) = a [M, K] b [N, K]^T, or += with `accumulate`; FP32 inside.

    Blocks along K (`axis` -1) on both sides. A NaN block makes its row or column NaN.
    """
    if out.numel():
        tensors = (a.qdata, a.scale, b.qdata, b.scale, out)
        key = (a.elem, a.block, b.elem, b.block, accumulate, out.dtype, out.device, a.shape, b.shape)
        with on_device_of(out):
            _gemm((*key, *(t.stride(0) for t in tensors)), tensors, lambda: launch(a, b, out, accumulate))
    return out


_gemm = Launcher(_gemm_kernel)


def launch(
    a: MXTensor, b: MXTensor, out: Tensor, accumulate: bool, tile: Tile | None = None, amd: bool = ON_AMD
) -> Launch:
    """(grid, arguments, constants and options) of the kernel: what `gemm` runs and `isa` compiles.

    tile: None takes the fastest, which is looked for on a GPU where a shape is first met.
    """
    (m, k), n = a.shape, b.shape[0]
    arguments = {
        "a": a.qdata,
        "a_scale": a.scale,
        "b": b.qdata,
        "b_scale": b.scale,
        "out": out,
        "M": m,
        "N": n,
        "K": k,
        "a_stride": a.qdata.stride(0),
        "a_scale_stride": a.scale.stride(0),
        "b_stride": b.qdata.stride(0),
        "b_scale_stride": b.scale.stride(0),
        "out_stride": out.stride(0),
    }
    constants = {
        "A_ELEM": a.elem,
        "B_ELEM": b.elem,
        "A_SCALE_ROWS": BLOCK if a.block == "2d" else 1,
        "B_SCALE_ROWS": BLOCK if b.block == "2d" else 1,
        "ACCUMULATE": accumulate,
    }
    fp4 = a.elem == b.elem == "e2m1"
    if tile is None:
        worth = fp4 and not accumulate and 2 * m * n * k >= TUNED_FLOPS
        tile = fastest(amd, _gemm_kernel, arguments, constants, worth) if fp4 else tiles(amd, fp4)[0]
    options = {**constants, "EVEN_K": k % tile.BK == 0, **tile.options()}
    if accumulate:  # the old values take registers beside the new ones
        options["num_warps"] = 8
    return (triton.cdiv(m, tile.BM) * triton.cdiv(n, tile.BN),), arguments, options


@triton.jit
def _unpack_kernel(words, scale, out, count, K, WORDS: tl.constexpr, MBITS: tl.constexpr, BIAS: tl.constexpr,
                   SCALE_ROWS: tl.constexpr):  # fmt: skip
    """`count` 32-bit words of codes, eight E2M1 or four FP8 each, as values: a thread reads and writes whole words.

    An element's exponent and mantissa, put where FP32 has its own, read as 2^(BIAS - 127) times its value, subnormals
    included.
    """
    EACH: tl.constexpr = 8 if MBITS == 1 else 4
    BITS: tl.constexpr = 32 // EACH
    word = tl.program_id(0).to(tl.int64) * WORDS + tl.arange(0, WORDS)
    inside = word < count
    codes = tl.load(words + word, mask=inside, other=0)
    block = word // (32 // EACH)
    per_row = K // 32
    byte = tl.load(scale + block // per_row // SCALE_ROWS * per_row + block % per_row, mask=inside, other=0).to(
        tl.int32
    )
    bits = tl.where(byte == 0, 0x00400000, byte << 23)  # 2^-127 is an FP32 subnormal
    bits = tl.where(byte == 255, 0x7FC00000, bits)
    shift = tl.arange(0, EACH)[None, :] * BITS
    codes = codes[:, None] >> shift
    sign = (codes << (32 - BITS)) & -0x80000000
    magnitude = (codes & ((1 << (BITS - 1)) - 1)) << (23 - MBITS)
    value = magnitude.to(tl.float32, bitcast=True) * (2.0 ** (127 - BIAS))
    value = value * (bits[:, None] | sign).to(tl.float32, bitcast=True)
    target = out + word[:, None] * EACH + tl.arange(0, EACH)[None, :]
    tl.store(target, value.to(out.dtype.element_ty), mask=inside[:, None])


def unpack(x: MXTensor, dtype: torch.dtype) -> Tensor:
    """The values of `x` with its block axis last, in `dtype`: the twin is `MXTensor.dequantize`."""
    out = x.qdata.new_empty(
        (*x.qdata.shape[:-1], x.qdata.shape[-1] * (2 if elem_format(x.elem).bits == 4 else 1)), dtype=dtype
    )
    if out.numel():
        tensors = (x.qdata.contiguous().view(torch.int32), x.scale.contiguous(), out)
        key = (x.elem, x.block, out.shape, dtype, out.device)
        with on_device_of(out):
            _unpack(key, tensors, lambda: launch_unpack(x, out))
    return out


_unpack = Launcher(_unpack_kernel)


def launch_unpack(x: MXTensor, out: Tensor) -> Launch:
    """(grid, arguments, constants and options) of the kernel: what `unpack` runs and `isa` compiles."""
    fmt = elem_format(x.elem)
    words = x.qdata.contiguous().view(torch.int32)
    arguments = {"words": words, "scale": x.scale.contiguous(), "out": out, "count": words.numel(), "K": out.shape[-1]}
    options = {"WORDS": 512, "MBITS": fmt.mbits, "BIAS": fmt.bias, "SCALE_ROWS": BLOCK if x.block == "2d" else 1}
    return (triton.cdiv(words.numel(), options["WORDS"]),), arguments, options | {"num_warps": 4}
