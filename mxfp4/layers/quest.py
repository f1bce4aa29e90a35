"""The forward of Quartet (arXiv 2505.14669): X and W projected on MXFP4 by QuEST, clipped values without a gradient.

A tensor t [R, C], C contracted by the forward GEMM, is rotated by H32 along C and cut into blocks of 32. A block's
scale follows its spread and not its maximum, so that a Gaussian block is rounded with the least mean square error:

    scale = 2^floor(log2(CLIP * std + EPS)),   value = E2M1(t H / scale) * scale to nearest even, saturating,
    unclipped = |t H / scale| < 6

Both operands stay rotated: H cancels in their product, and the values are exact in BF16. The backward of the layer
quantizes these values again; what comes back is masked by `unclipped` and rotated back, dt = (d * unclipped) H.
Constants, the floor and the standard deviation about the block's mean are those of the authors' public code (Quartet
and QuTLASS).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mxfp4.numerics.formats import BLOCK
from mxfp4.numerics.kernels import BACKENDS, Backend
from mxfp4.numerics.ops import rotate as _operators  # noqa: F401  (defines rotate_unclipped)
from mxfp4.numerics.ops import vmap
from mxfp4.numerics.quest import round_blocks  # noqa: F401  (the twin, under its earlier address)

CLIP = 2.92247856 / 6.0
EPS = 1e-8

# An operator for the reason given in `numerics.ops`: eager and compiled runs give the same bytes.
_library = torch.library.Library("mxfp4", "FRAGMENT")
_library.define("quest(Tensor t, ScalarType dtype) -> (Tensor, Tensor)")


def _implement(key: str, backend: Backend) -> None:
    def quest(t, dtype):
        blocks = backend.rotate_matrix(t, BLOCK, None, False, False, torch.float32).view(-1, BLOCK)
        std = blocks.std(dim=-1, keepdim=True, correction=0)
        values, unclipped = backend.round_blocks(blocks, std, CLIP, EPS, dtype)
        return values.view(t.shape), unclipped.view(t.shape)

    _library.impl("quest", quest, key)


for _key, _backend in BACKENDS.items():
    _implement(_key, _backend)


@torch.library.register_fake("mxfp4::quest", lib=_library)
def _quest_shapes(t, dtype):
    return t.new_empty(t.shape, dtype=dtype), t.new_empty(t.shape, dtype=torch.bool)


vmap.register("quest")


def first_derivative(backward: Callable) -> Callable:
    """`once_differentiable`, which a gradient that is a constant, as that of a sum, does not escape: X and W would be
    missing from the second derivative without a word."""
    once = once_differentiable(backward)

    @wraps(backward)
    def refusing(ctx, grad: Tensor):
        found = once(ctx, grad)
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or grad.requires_grad:
            return found
        refuse = torch._C._functions.DelayedError(b"trying to differentiate twice an MXFP4Linear", len(found))
        return refuse(*(t.detach().requires_grad_() if isinstance(t, Tensor) else t for t in found))

    return refusing


class _Projection(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t: Tensor, source: torch.dtype):
        values, unclipped = torch.ops.mxfp4.quest(t.to(source), t.dtype)
        ctx.save_for_backward(unclipped)
        return values

    @staticmethod
    @first_derivative
    def backward(ctx, grad: Tensor):
        (unclipped,) = ctx.saved_tensors
        return torch.ops.mxfp4.rotate_unclipped(grad, unclipped, BLOCK, grad.dtype), None


class _TransformedProjection(torch.autograd.Function):
    """`_Projection` under torch.func."""

    generate_vmap_rule = True

    @staticmethod
    def forward(t: Tensor, source: torch.dtype) -> tuple[Tensor, Tensor]:
        return torch.ops.mxfp4.quest(t.to(source), t.dtype)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx, grad: Tensor, _):
        vmap.refuse_twice()
        (unclipped,) = ctx.saved_tensors
        with torch.no_grad():
            return torch.ops.mxfp4.rotate_unclipped(grad, unclipped, BLOCK, grad.dtype), None

    @staticmethod
    def jvp(ctx, *tangents):
        raise NotImplementedError(vmap.NO_JVP)


def project(t: Tensor, source: torch.dtype) -> Tensor:
    """Values [R, C] of `t` read in the dtype `source`, rotated along C, in the dtype of `t`; C a multiple of 32."""
    return _TransformedProjection.apply(t, source)[0] if vmap.transformed() else _Projection.apply(t, source)
