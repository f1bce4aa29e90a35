"""Causal grouped-query attention by a named back end.

    repeat      K and V copied for each query head, then `auto`: what runs have done so far, and so the default
    auto        PyTorch chooses a kernel (SDPA); K and V are not copied (`enable_gqa`)
    flash, efficient, cudnn, math   that kernel of SDPA and no other; of these `efficient` alone takes no shared heads,
                so K and V are copied for it
    aiter       AMD's kernels (distribution `amd-aiter`): assembly or Composable Kernel, on BF16

Without the copy the gradients of K and V are summed over the query heads in another order, on the CPU too: the last
bits of a run differ, which is why `repeat` stays the default of scales that have records. A back end that is named is
compared with attention in FP32 on the device before it trains (`check_backend`), and refused where it is wrong.

Source: PyTorch 2.13, torch.nn.attention.sdpa_kernel; ROCm aiter, aiter/ops/mha.py, `flash_attn_func`.
"""

from __future__ import annotations

from functools import lru_cache, partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from mxfp4.training.execution.proof import prove, with_gradients

KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
BACKENDS = ("repeat", "auto", *KERNELS, "aiter")
COPIES = ("repeat", "efficient")
"""Back ends for which K and V are copied."""
TRIED_LENGTH = 256


def attention(q: Tensor, k: Tensor, v: Tensor, backend: str = "repeat") -> Tensor:
    """Causal attention of q [batch, heads, seq, head_dim] to k, v [batch, kv_heads, seq, head_dim], in q's shape."""
    if backend == "aiter":
        return _aiter(q, k, v)
    groups = q.shape[1] // k.shape[1]
    if groups > 1 and backend in COPIES:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    shared = k.shape[1] != q.shape[1]
    if backend not in KERNELS:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shared)
    with sdpa_kernel(KERNELS[backend]):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shared)


@torch.compiler.disable  # its kernels are no operators that a compiler knows
def _aiter(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    import aiter  # type: ignore[import-not-found]

    fixed = torch.are_deterministic_algorithms_enabled()
    turned = (t.transpose(1, 2) for t in (q, k, v))  # it takes [batch, seq, heads, head_dim]
    # Its backward reads the log-sum-exp, which some of its kernels write only when asked to.
    out = aiter.flash_attn_func(*turned, causal=True, deterministic=fixed, return_lse=True)
    return out[0].transpose(1, 2)


def set_attention(model: nn.Module, backend: str) -> None:
    """Let every block of `model.layers` compute attention by `backend`."""
    for block in model.layers:  # type: ignore[union-attr]
        block.attention.backend = backend


@lru_cache
def check_backend(
    backend: str, device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int
) -> None:
    """Compare a back end, forward and backward, with attention in FP32 on `device`; once a process.

    Raises UserError where it is not installed, does not run there, or gives other values.
    """
    if backend in ("repeat", "auto"):
        return
    generator = torch.Generator(device).manual_seed(0)

    def drawn(n: int) -> Tensor:
        made = torch.randn(2, TRIED_LENGTH, n, head_dim, generator=generator, device=device)
        return made.to(dtype).transpose(1, 2)

    inputs, grad = (drawn(heads), drawn(kv_heads), drawn(kv_heads)), drawn(heads)
    exact = with_gradients(partial(attention, backend="math"), tuple(t.float() for t in inputs), grad.float())
    ours = partial(with_gradients, partial(attention, backend=backend), inputs, grad)
    prove(f"attention={backend!r}", "attention='auto'", "amd-aiter", ours, exact, dtype)
