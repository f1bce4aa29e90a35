"""Which road GEMMs take on a device, in `mxfp4.matmul` and in the layers: the one place that decides.

Records hold the answer, and the key of a run depends on it.
"""

from __future__ import annotations

from functools import lru_cache

import torch

PATHS = ("native", "emulated")

# Chips whose matrix units multiply FP4 blocks with E8M0 scales: CDNA4 and Blackwell data-centre parts.
NATIVE_ROCM = ("gfx950",)
NATIVE_CUDA = ((10, 0), (10, 3))


@torch.compiler.assume_constant_result
def matmul_path(device: torch.device | str) -> str:
    """"native" where the chip multiplies MXFP4 itself, else "emulated".

    Emulated: operands are dequantized to BF16 (exact for E2M1 x E8M0) and multiplied by the library's BF16 GEMM, on
    the CPU to FP32 and an FP32 one. The values are those of the native GEMM up to the order of FP32 accumulation.
    """
    device = torch.device(device)
    if device.type != "cuda" or not torch.cuda.is_available():
        return "emulated"
    return _gpu_path(device.index or 0)


@lru_cache
def _gpu_path(index: int) -> str:
    if torch.version.hip:
        arch = torch.cuda.get_device_properties(index).gcnArchName.split(":")[0]
        return "native" if arch in NATIVE_ROCM else "emulated"
    return "native" if torch.cuda.get_device_capability(index) in NATIVE_CUDA else "emulated"
