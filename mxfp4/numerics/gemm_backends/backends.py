"""The back ends that multiply packed FP4 blocks on chips that have units for them, the fastest first.

    name       what runs                                                      multiplies
    aiter      AMD's assembly kernels (distribution amd-aiter)                E2M1 x E2M1 to BF16, N and K % 256 = 0
    scaled_mm  torch.nn.functional.scaled_mm: hipBLASLt, on NVIDIA MSLK       E2M1 x E2M1 to BF16, M and N % 32 = 0
    triton     our kernel around tl.dot_scaled                                everything

The order follows published rates on MI355X, and is fixed: a choice by measured time could change from run to run, and
with it the order in which products are added. What a back end does not take goes to `triton`.

Sources: ROCm/aiter 0.1.7 and 0.1.9 (aiter/ops/gemm_op_a4w4.py, ops/shuffle.py, utility/fp4_utils.py,
csrc/py_itfs_cu/asm_gemm_a4w4.cu); PyTorch 2.13 (torch/nn/functional.py, aten/src/ATen/native/cuda/ScaledBlas.cpp).
"""

from __future__ import annotations

import importlib
import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from mxfp4.numerics.formats import BLOCK
from mxfp4.numerics.kernels import HAS_TRITON
from mxfp4.numerics.tensor import MXTensor


class GemmBackend(ABC):
    """Multiplies a [M, K] and b [N, K], packed with blocks along K -> [M, N], FP32 accumulation."""

    name: str

    @abstractmethod
    def missing(self) -> str | None:
        """Why it is not to be had here, in a phrase; None where it is."""

    @abstractmethod
    def takes(self, a: MXTensor, b: MXTensor, dtype: torch.dtype) -> bool:
        """Whether it multiplies operands of these elements and sizes to a result in `dtype`."""

    @abstractmethod
    def multiply(self, a: MXTensor, b: MXTensor, dtype: torch.dtype) -> Tensor:
        """The product of operands that it takes."""


def _fp4_to_bf16(a: MXTensor, b: MXTensor, dtype: torch.dtype) -> bool:
    return a.elem == b.elem == "e2m1" and dtype == torch.bfloat16


def scale_of_rows(x: MXTensor) -> Tensor:
    """E8M0 bytes [rows, K / 32], also of square blocks, which share one among 32 rows."""
    return x.scale.repeat_interleave(BLOCK, dim=0) if x.block == "2d" else x.scale.contiguous()


class Aiter(GemmBackend):
    """`aiter.ops.gemm_op_a4w4.gemm_a4w4_asm`: b in tiles of 16 x 16 bytes, both scales shuffled, BF16 out.

    Never with its split K, which adds BF16 partial sums by atomic operations: `gemm_a4w4` may choose that, so the
    function under it is called. aiter's Triton kernel (`gemm_afp4wfp4`) is not used: it is slower than ours.
    """

    name = "aiter"

    class Functions(NamedTuple):
        """What is called of the library."""

        gemm_a4w4_asm: Callable
        shuffle_weight: Callable
        e8m0_shuffle: Callable

    @staticmethod
    @lru_cache
    def functions() -> Functions:
        """Import them, which takes seconds; raises what the library raises."""
        return Aiter.Functions(
            importlib.import_module("aiter.ops.gemm_op_a4w4").gemm_a4w4_asm,
            importlib.import_module("aiter.ops.shuffle").shuffle_weight,
            importlib.import_module("aiter.utility.fp4_utils").e8m0_shuffle,
        )

    def missing(self) -> str | None:
        if not torch.version.hip:
            return "for AMD GPUs"
        if importlib.util.find_spec("aiter") is None:
            return "pip install amd-aiter"
        try:
            self.functions()
        except (ImportError, AttributeError) as error:  # the distribution `aiter` is about asynchronous iterators
            return f"a module aiter without its FP4 GEMM is installed ({error}); AMD's is the distribution amd-aiter"
        except Exception as error:  # compiles code as it is imported
            return f"aiter does not import: {type(error).__name__}: {error}".splitlines()[0]
        return None

    def takes(self, a: MXTensor, b: MXTensor, dtype: torch.dtype) -> bool:
        (m, k), n = a.shape, b.shape[0]
        return _fp4_to_bf16(a, b, dtype) and m % 32 == n % 256 == k % 256 == 0

    def multiply(self, a: MXTensor, b: MXTensor, dtype: torch.dtype) -> Tensor:
        library = self.functions()
        codes = library.shuffle_weight(b.qdata.contiguous(), layout=(16, 16))
        scales = (library.e8m0_shuffle(scale_of_rows(x)) for x in (a, b))
        out = torch.empty((a.shape[0], b.shape[0]), dtype=dtype, device=a.device)
        library.gemm_a4w4_asm(a.qdata.contiguous(), codes, *scales, out, "", None, 1.0, 0.0, True, log2_k_split=0)
        return out


class ScaledMM(GemmBackend):
    """`torch.nn.functional.scaled_mm` with BlockWise1x32: BF16 out, packed FP4, E8M0 scales.

    ROCm 7.0 or newer on gfx950 reads the scales as rows of K / 32. CUDA on sm_100 wants them in blocks of 128 x 4
    (SWIZZLE_32_4_4), and a PyTorch built with MSLK. PyTorch that is built for ROCm 7.13 or newer asks for another
    layout, and its refusal is what `doctor` then shows.
    """

    name = "scaled_mm"

    def missing(self) -> str | None:
        if not hasattr(torch.nn.functional, "scaled_mm"):
            return f"PyTorch {torch.__version__} has no torch.nn.functional.scaled_mm"
        return None

    def takes(self, a: MXTensor, b: MXTensor, dtype: torch.dtype) -> bool:
        (m, k), n = a.shape, b.shape[0]
        return _fp4_to_bf16(a, b, dtype) and m % 32 == n % 32 == k % 128 == 0

    def multiply(self, a: MXTensor, b: MXTensor, dtype: torch.dtype) -> Tensor:
        from torch.nn.functional import ScalingType, SwizzleType, scaled_mm

        swizzle = SwizzleType.NO_SWIZZLE if torch.version.hip else SwizzleType.SWIZZLE_32_4_4
        rows = [scale_of_rows(x) for x in (a, b)]
        scale_a, scale_b = (
            (s if torch.version.hip else in_blocks_of_128_by_4(s)).view(torch.float8_e8m0fnu) for s in rows
        )
        codes_a, codes_b = (x.qdata.contiguous().view(torch.float4_e2m1fn_x2) for x in (a, b))
        blocks = ScalingType.BlockWise1x32
        return scaled_mm(
            codes_a, codes_b.t(), scale_a, blocks, scale_b, blocks, swizzle, swizzle, output_dtype=dtype
        )  # fmt: skip


def in_blocks_of_128_by_4(scale: Tensor) -> Tensor:
    """Scale bytes [R, C] as cuBLAS and CUTLASS read them, flat: 128 x 4 blocks, row r of one at (r % 32, r / 32).

    Rows and columns are padded with zeros. Source: cuBLAS manual, 1D block scaling factors layout.
    """
    rows, columns = scale.shape
    padded = torch.nn.functional.pad(scale, (0, -columns % 4, 0, -rows % 128))
    blocks = padded.view(padded.shape[0] // 128, 4, 32, padded.shape[1] // 4, 4)  # block row, r / 32, r % 32, block, c
    return blocks.permute(0, 3, 2, 1, 4).flatten()


class Triton(GemmBackend):
    """Our kernel: every element, block and size, FP32 or BF16 out."""

    name = "triton"

    def missing(self) -> str | None:
        return None if HAS_TRITON else "not installed: the PyTorch build for a GPU brings it"

    def takes(self, a: MXTensor, b: MXTensor, dtype: torch.dtype) -> bool:
        return True

    def multiply(self, a: MXTensor, b: MXTensor, dtype: torch.dtype) -> Tensor:
        from mxfp4.numerics.kernels.triton import gemm as gemm_triton

        return gemm_triton.gemm(a, b, a.qdata.new_empty((a.shape[0], b.shape[0]), dtype=dtype))


BACKENDS: dict[str, GemmBackend] = {backend.name: backend for backend in (Aiter(), ScaledMM(), Triton())}
"""By name, the fastest first."""
