"""Cross-entropy of the output layer and its gradient, without all logits in memory at once.

    whole     all logits [T, V]: what runs have done so far, and so the default
    chunked   CHUNK tokens at a time: logits, their losses, their gradient, and what it adds to the gradients of the
              hidden states and of the weight; then the next chunk
    liger     the same in Triton kernels of liger-kernel, which picks its own chunks

The chunked gradients are made in the forward, so the layer is multiplied three times, as without chunks. A token's loss
has the bits of `F.cross_entropy`. The sum of losses is taken chunk by chunk, and the weight's gradient is summed in FP32,
not rounded to BF16 before it is added up.

Source: liger-kernel 0.8, `liger_fused_linear_cross_entropy`, whose plan this is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from mxfp4.numerics.gemm_backends.library import as_dtype
from mxfp4.training.execution.proof import prove, with_gradients

CHOICES = ("whole", "chunked", "liger")
CHUNK = 2048
"""Tokens: with 128 k words 0.5 GB of BF16 logits, and 2 GB while their gradient is made."""


def mean_loss(x: Tensor, head: nn.Linear, targets: Tensor, how: str = "chunked", compiled: bool = False) -> Tensor:
    """Mean cross-entropy in nats (FP32, 0-d) of hidden states x [..., D], `head` [V, D] and targets [...] int64.

    how: "chunked" or "liger". compiled: a chunk's losses and their gradient through torch.compile. Backward can run
    once.
    """
    x, targets = x.flatten(0, -2), targets.flatten()
    if how == "liger":
        return _liger(x, head.weight, targets)
    return _ChunkedLoss.apply(x, head.weight, targets, _part(compiled))


@torch.no_grad()
def token_losses(x: Tensor, head: nn.Linear, targets: Tensor) -> Tensor:
    """The cross-entropy of each token, FP32 in the shape of `targets`, without gradients."""
    weight, flat = as_dtype(head.weight, x.dtype), targets.flatten()
    parts = zip(x.flatten(0, -2).split(CHUNK), flat.split(CHUNK), strict=True)
    found = [F.cross_entropy((part @ weight.t()).float(), wanted, reduction="none") for part, wanted in parts]
    return torch.cat(found).view_as(targets)


class _ChunkedLoss(torch.autograd.Function):
    """Mean loss of x [T, D] and weight [V, D]; the gradients are made in the forward and scaled in the backward."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, targets: Tensor, part: Callable) -> Tensor:
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        cast = as_dtype(weight, x.dtype)
        total = torch.zeros((), dtype=torch.float32, device=x.device)
        grad_x = torch.empty_like(x) if needs_x else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        with torch.autocast(x.device.type, enabled=False):  # which would round the weight's gradient
            for start in range(0, len(x), CHUNK):
                rows = slice(start, start + CHUNK)
                losses, grad = part(x[rows] @ cast.t(), targets[rows], 1 / len(x), needs_x or needs_weight)
                total += losses.sum()
                if grad_x is not None:
                    torch.mm(grad, cast, out=grad_x[rows])
                if grad_weight is not None:
                    _add_product(grad_weight, grad, x[rows])
                del grad  # before the next chunk makes its own
        ctx.save_for_backward(grad_x, grad_weight)
        ctx.weight_dtype = weight.dtype
        return total / len(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        grad_x, grad_weight = ctx.saved_tensors
        if grad_x is not None:  # in place: two of the weight's gradient would be 4 GB with 128 k words
            grad_x.mul_(grad)
        if grad_weight is not None:
            grad_weight = as_dtype(grad_weight.mul_(grad), ctx.weight_dtype)
        return grad_x, grad_weight, None, None


def _add_product(total: Tensor, grad: Tensor, x: Tensor) -> None:
    """Add grad [C, V] transposed times x [C, D] to `total` [V, D], FP32."""
    if x.dtype == torch.float32:
        total.addmm_(grad.t(), x)
    elif x.device.type == "cuda":  # read and written once
        torch.addmm(total, grad.t(), x, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(grad.t().float(), x.float())


def _losses_and_gradient(
    logits: Tensor, targets: Tensor, scale: float, needs_grad: bool
) -> tuple[Tensor, Tensor | None]:
    """Losses [C] of logits [C, V], and `scale` times the gradient of their sum, in the logits' dtype."""
    log_prob = F.log_softmax(logits.float(), dim=-1)
    at = targets[:, None]
    losses = -log_prob.gather(-1, at)[:, 0]
    if not needs_grad:
        return losses, None
    grad = log_prob.exp_().mul_(scale)
    grad.scatter_add_(-1, at, torch.full_like(at, -scale, dtype=grad.dtype))
    return losses, grad.to(logits.dtype)


@lru_cache
def _part(compiled: bool) -> Callable:
    return torch.compile(_losses_and_gradient, dynamic=False) if compiled else _losses_and_gradient


def _liger(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    from liger_kernel.transformers.functional import (  # type: ignore[import-not-found]
        liger_fused_linear_cross_entropy,
    )

    return liger_fused_linear_cross_entropy(x, as_dtype(weight, x.dtype), targets, accum_dtype=torch.float32)


@lru_cache
def check_choice(how: str, device: torch.device, dtype: torch.dtype) -> None:
    """Compare loss and gradients with PyTorch's on `device`, hidden states in `dtype`; once a process.

    Raises UserError where liger-kernel is not installed, something does not run there, or gives other values.
    """
    if how == "whole":
        return
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(96, 64, generator=generator, device=device).to(dtype)
    weight = torch.randn(1000, 64, generator=generator, device=device).to(dtype).float()
    targets = torch.randint(1000, (96,), generator=generator, device=device)
    exact = with_gradients(lambda x, w: F.cross_entropy(x @ w.t(), targets), (x.float(), weight))

    def tried(x: Tensor, weight: Tensor) -> Tensor:
        return _liger(x, weight, targets) if how == "liger" else _ChunkedLoss.apply(x, weight, targets, _part(False))

    instead = "cross_entropy='chunked'" if how == "liger" else "cross_entropy='whole'"
    ours = partial(with_gradients, tried, (x, weight))
    prove(f"cross_entropy={how!r}", instead, "'liger-kernel>=0.8'", ours, exact, dtype)
