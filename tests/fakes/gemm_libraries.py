"""Stand-ins for the libraries that multiply FP4: their signatures and layouts of scales, computed in FP64 on the CPU."""

from __future__ import annotations

import importlib.machinery
import sys
from types import ModuleType

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

from mxfp4.numerics.gemm_backends.backends import GemmBackend
from mxfp4.numerics.tensor import MXTensor


def product(a: MXTensor, b: MXTensor, dtype: torch.dtype) -> Tensor:
    """The exact product, rounded once."""
    return (a.dequantize(torch.float64) @ b.dequantize(torch.float64).t()).to(dtype)


def operand(codes: Tensor, scale: Tensor) -> MXTensor:
    """E2M1 codes uint8 [rows, K / 2] and E8M0 bytes of which the first [rows, K / 32] count."""
    rows, k = codes.shape[0], codes.shape[1] * 2
    return MXTensor(codes, scale[:rows, : k // 32], "e2m1", "1d", -1, (rows, k))


class StandIn(GemmBackend):
    """A back end that takes everything; `spoil` changes its operands or its result."""

    def __init__(self, name: str = "triton", *, on_operands=lambda x: x, on_result=lambda y: y, takes=None):
        self.name, self.calls = name, 0
        self.on_operands, self.on_result, self.accepts = on_operands, on_result, takes

    def missing(self):
        return None

    def takes(self, a, b, dtype):
        return self.accepts is None or self.accepts(a, b, dtype)

    def multiply(self, a, b, dtype):
        self.calls += 1
        return self.on_result(product(self.on_operands(a), self.on_operands(b), dtype))


# amd-aiter 0.1.7 to 0.1.9, on gfx950


def shuffle_weight(x: Tensor, layout=(16, 16), use_int4=False) -> Tensor:
    """Tiles of 16 rows and 32 bytes: of each the first 16 bytes of all rows, then the others."""
    n, width = x.shape
    assert layout == (16, 16) and n % 16 == 0 and width % 32 == 0
    return x.view(n // 16, 16, width // 32, 2, 16).permute(0, 2, 3, 1, 4).reshape(n, width)


def unshuffle_weight(x: Tensor) -> Tensor:
    n, width = x.shape
    return x.view(n // 16, width // 32, 2, 16, 16).permute(0, 3, 1, 2, 4).reshape(n, width)


def e8m0_shuffle(scale: Tensor) -> Tensor:
    """[rows, columns], padded to multiples of 256 and 8, in tiles of 32 and 8."""
    rows, columns = scale.shape
    padded = torch.nn.functional.pad(scale, (0, -columns % 8, 0, -rows % 256), value=0x55)
    tiles = padded.view(padded.shape[0] // 32, 2, 16, padded.shape[1] // 8, 2, 4)
    return tiles.permute(0, 3, 5, 2, 4, 1).reshape(padded.shape)


def e8m0_unshuffle(scale: Tensor) -> Tensor:
    rows, columns = scale.shape
    return scale.view(rows // 32, columns // 8, 4, 16, 2, 2).permute(0, 5, 3, 1, 4, 2).reshape(rows, columns)


def gemm_a4w4_asm(
    A, B, A_scale, B_scale, out, kernelName="", bias=None, alpha=1.0, beta=0.0, bpreshuffle=True, log2_k_split=None
):
    """The function of that name in aiter/ops/gemm_op_a4w4.py."""
    assert out.dtype == torch.bfloat16 and out.shape[0] % 32 == 0 and bpreshuffle and bias is None
    assert log2_k_split == 0  # else BF16 partial sums
    sides = operand(A, e8m0_unshuffle(A_scale)), operand(unshuffle_weight(B), e8m0_unshuffle(B_scale))
    return out.copy_(product(*sides, torch.bfloat16))


def install_aiter(monkeypatch, **functions) -> None:
    """Put a package `aiter` with these functions, by default the right ones, where Python imports it."""
    of = {
        "aiter.ops.gemm_op_a4w4": {"gemm_a4w4_asm": gemm_a4w4_asm},
        "aiter.ops.shuffle": {"shuffle_weight": shuffle_weight},
        "aiter.utility.fp4_utils": {"e8m0_shuffle": e8m0_shuffle},
    }
    for name in ("aiter", "aiter.ops", "aiter.utility", *of):
        module = ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        for function, right in of.get(name, {}).items():
            setattr(module, function, functions.get(function, right))
        monkeypatch.setitem(sys.modules, name, module)


# PyTorch 2.13: the checks of aten/src/ATen/native/cuda/ScaledBlas.cpp


def scaled_mm(
    mat_a, mat_b, scale_a, scale_recipe_a, scale_b, scale_recipe_b, swizzle_a=None, swizzle_b=None, bias=None,
    output_dtype=torch.bfloat16, contraction_dim=(), use_fast_accum=False,
):  # fmt: skip
    """torch.nn.functional.scaled_mm of FP4 blocks with E8M0 scales, under ROCm or CUDA as torch.version says."""
    rocm = bool(torch.version.hip)
    assert mat_a.dtype == mat_b.dtype == torch.float4_e2m1fn_x2 and output_dtype == torch.bfloat16
    assert scale_recipe_a == scale_recipe_b == ScalingType.BlockWise1x32
    assert swizzle_a == swizzle_b == (SwizzleType.NO_SWIZZLE if rocm else SwizzleType.SWIZZLE_32_4_4)
    assert not any(size % 32 for size in (*mat_a.shape, *mat_b.shape)) or not rocm
    sides = []
    for codes, scale in ((mat_a, scale_a), (mat_b.t(), scale_b)):
        assert codes.is_contiguous() and scale.is_contiguous() and scale.dtype == torch.float8_e8m0fnu
        rows, blocks = codes.shape[0], codes.shape[1] * 2 // 32
        scale = scale.view(torch.uint8)
        if rocm:
            assert scale.numel() == rows * blocks
            scale = scale.view(rows, blocks)
        else:
            high, wide = -(-rows // 128), -(-blocks // 4)
            assert scale.numel() == high * 128 * wide * 4
            scale = scale.view(high, wide, 32, 4, 4).permute(0, 3, 2, 1, 4).reshape(high * 128, wide * 4)
        sides.append(operand(codes.view(torch.uint8), scale))
    return product(*sides, torch.bfloat16)
