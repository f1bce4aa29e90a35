"""The random signs of a rotation, drawn in one launch; the twin is `philox.random_signs`.

Redrawn for each GEMM at each step: in separate torch operations their seven rounds would take a hundred launches.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxfp4.numerics.kernels.triton.block_math import philox_round
from mxfp4.numerics.kernels.triton.launcher import Launcher, on_device_of


@triton.jit(do_not_specialize=["stream"])
def _signs_kernel(out, seed_ptr, stream, SIZE: tl.constexpr):
    j = tl.arange(0, SIZE)
    seed = tl.load(seed_ptr)
    k0 = seed.to(tl.uint32)
    k1 = (seed >> 32).to(tl.uint32)
    c0 = (j // 128).to(tl.uint32)
    c1 = c0 * 0
    c2 = c1 + 1  # philox.FOR_SIGNS
    c3 = c1 + stream.to(tl.uint32)
    for _ in tl.static_range(7):
        c0, c1, c2, c3 = philox_round(c0, c1, c2, c3, k0, k1)
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    word = j % 128 // 32
    bits = tl.where(word == 0, c0, tl.where(word == 1, c1, tl.where(word == 2, c2, c3)))
    tl.store(out + j, 1.0 - 2.0 * ((bits >> (j % 32).to(tl.uint32)) & 1).to(tl.float32))


_signs = Launcher(_signs_kernel)


def random_signs(seed: Tensor, size: int, stream: int) -> Tensor:
    """`size` (a power of two up to 128) random signs, FP32, on the device of `seed` (0-d int64)."""
    out = torch.empty(size, dtype=torch.float32, device=seed.device)
    with on_device_of(out):
        describe = lambda: ((1,), {"out": out, "seed_ptr": seed, "stream": stream}, {"SIZE": size, "num_warps": 1})
        _signs((size, stream, out.device), (out, seed), describe)
    return out
