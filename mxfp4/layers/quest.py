"""The forward of Quartet (arXiv 2505.14669): X and W projected on MXFP4 by QuEST, clipped values without a gradient.

A tensor t [R, C], C contracted by the forward GEMM, is rotated by H32 along C and cut into blocks of 32. A block's
scale follows its spread and not its maximum, so that a Gaussian block is rounded with the least mean square error:

    scale = 2^floor(log2(CLIP * std + EPS)),   value = E2M1(t H / scale) * scale to nearest even, saturating,
    kept = |t H / scale| < 6

Both operands stay rotated: H cancels in their product, and the values are exact in BF16. The backward of the layer
quantizes these values again; what comes back is masked by `kept` and rotated back, dt = (d * kept) H. Constants, the
floor and the standard deviation about the block's mean are those of the authors' public code (Quartet and QuTLASS).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mxfp4.numerics.formats import BLOCK, E2M1
from mxfp4.numerics.kernels import HAS_TRITON
from mxfp4.numerics.ops.rotate import rotated
from mxfp4.numerics.rounding import round_nearest

CLIP = 2.92247856 / 6.0
EPS = 1e-8

# An operator for the reason given in `numerics.ops`: eager and compiled runs give the same bytes.
_library = torch.library.Library("mxfp4", "FRAGMENT")
_library.define("quest(Tensor t, ScalarType dtype) -> (Tensor, Tensor)")


@torch.library.impl(_library, "quest", "CompositeExplicitAutograd")
def _quest(t, dtype):
    blocks = rotated(t, BLOCK).view(-1, BLOCK)
    std = blocks.std(dim=-1, keepdim=True, correction=0)
    values, kept = _round_blocks(t.device)(blocks, std, CLIP, EPS, dtype)
    return values.view(t.shape), kept.view(t.shape)


def _round_blocks(device: torch.device):
    """`round_blocks` or its kernel."""
    if device.type == "cuda" and HAS_TRITON:
        from mxfp4.numerics.kernels.triton import quest as quest_triton

        return quest_triton.round_blocks
    return round_blocks


def round_blocks(blocks: Tensor, std: Tensor, clip: float, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(values in `dtype`, kept, bool) of FP32 rotated `blocks` [n, 32] with standard deviations `std` [n, 1]."""
    spread = std * clip + eps
    scale = (spread.view(torch.int32) & 0x7F800000).view(torch.float32)  # the exponent alone
    scaled = blocks / scale
    return (round_nearest(scaled, E2M1) * scale).to(dtype), scaled.abs() < E2M1.max


@torch.library.register_fake("mxfp4::quest", lib=_library)
def _quest_shapes(t, dtype):
    return t.new_empty(t.shape, dtype=dtype), t.new_empty(t.shape, dtype=torch.bool)


class _Projection(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t: Tensor, source: torch.dtype):
        values, kept = torch.ops.mxfp4.quest(t.to(source), t.dtype)
        ctx.save_for_backward(kept)
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        (kept,) = ctx.saved_tensors
        masked = torch.where(kept, grad, torch.zeros((), dtype=grad.dtype, device=grad.device))
        return rotated(masked, BLOCK, dtype=grad.dtype), None


def project(t: Tensor, source: torch.dtype) -> Tensor:
    """Values [R, C] of `t` read in the dtype `source`, rotated along C, in the dtype of `t`; C a multiple of 32."""
    return _Projection.apply(t, source)
