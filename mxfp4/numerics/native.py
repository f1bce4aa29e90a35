"""What the units of a chip multiply themselves: blocks (MXFP4, MXFP8), and FP8 with one scale a tensor.

Who multiplies blocks where the chip can, `gemm_backends` chooses. Records hold both answers, and the key of a run
depends on them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TypeVar

import torch

Function = TypeVar("Function", bound=Callable)


def compile_time_constant(function: Function) -> Function:
    """What torch.compiler.assume_constant_result does, without its import of torch._dynamo, which takes two seconds."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


# (matmul_path, fp8_path) that a device can have: what multiplies blocks also multiplies tensors.
PATHS = (("native", "native"), ("emulated", "native"), ("emulated", "emulated"))

# Chips whose matrix units multiply FP4 blocks with E8M0 scales: CDNA4 and Blackwell data-centre parts.
NATIVE_ROCM = ("gfx950",)
NATIVE_CUDA = ((10, 0), (10, 3))

# Chips for whose FP8 units `torch._scaled_mm` takes E4M3FN and E5M2: CDNA4, and NVIDIA's from Ada and Hopper on. Not
# gfx942, whose units read the FNUZ encodings: another bias and largest value, so other codes than every other chip's.
FP8_ROCM = ("gfx950",)
FP8_CUDA = (8, 9)


@compile_time_constant
def chip_path(device: torch.device | str) -> str:
    """ "native" where the chip has units that multiply MXFP4, else "emulated"."""
    return _path_on(device, _gpu_path)


@compile_time_constant
def fp8_path(device: torch.device | str) -> str:
    """ "native" where the library multiplies FP8 tensors of one scale each on the chip's FP8 units, else "emulated".

    Emulated: FP8 values in BF16 (exact) and the library's BF16 GEMM, the result in FP32 for the two factors. The native
    GEMM reads the same codes and factors, and accumulates as the chip's units do: Hopper's keep 14 bits of a product,
    counted from the largest addend of an instruction, so that results are close to the emulated ones, not the same.
    """
    return _path_on(device, _gpu_fp8_path)


def _path_on(device: torch.device | str, of_gpu) -> str:
    device = torch.device(device)
    if device.type != "cuda" or not torch.cuda.is_available():
        return "emulated"
    return of_gpu(device.index or 0)


@lru_cache
def _gpu_path(index: int) -> str:
    if torch.version.hip:
        return "native" if _rocm_arch(index) in NATIVE_ROCM else "emulated"
    return "native" if torch.cuda.get_device_capability(index) in NATIVE_CUDA else "emulated"


@lru_cache
def _gpu_fp8_path(index: int) -> str:
    if torch.version.hip:
        return "native" if _rocm_arch(index) in FP8_ROCM else "emulated"
    return "native" if torch.cuda.get_device_capability(index) >= FP8_CUDA else "emulated"


def _rocm_arch(index: int) -> str:
    return torch.cuda.get_device_properties(index).gcnArchName.split(":")[0]
