"""Attention back ends and ways to the cross-entropy at the width of Llama 3.1-8B: time and memory of forward and backward.

One sequence of 8192 tokens in BF16; 32 query heads that share 8 of keys and values, head size 128; an output layer of
4096 x 128256 in FP32, cast to BF16 as autocast does. Peak memory is what a call adds to its inputs. Back ends of
attention are checked first (`check_backend`), losses against the whole one's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mxfp4.bench.results import attempt, gpu_seconds
from mxfp4.training.execution import attention as attentions
from mxfp4.training.execution import cross_entropy

DEVICE = "cuda"
CLOSE = 1e-3
"""Relative difference allowed between two losses from BF16 logits, whose roundings average out over the tokens."""


@dataclass(frozen=True)
class Sizes:
    """Of the model and its input."""

    tokens: int = 8192
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    vocab_size: int = 128256

    @property
    def dim(self) -> int:
        """Width of the model, D."""
        return self.heads * self.head_dim


def rows(sizes: Sizes = Sizes(), repeat: int = 10) -> Iterator[dict]:
    """One dict a choice: name ("attention, flash"), who, seconds, peak_bytes, flops_per_second (causal: half of the scores)
    or loss and correct; or a problem."""
    for backend in attentions.BACKENDS:
        who = "aiter" if backend == "aiter" else "torch"
        yield attempt(f"attention, {backend}", who, partial(_attention, backend, sizes, repeat))
    whole = None
    for how, who in (
        ("whole", "torch"),
        ("chunked", "mxfp4"),
        ("chunked, compiled", "mxfp4"),
        ("liger", "liger-kernel"),
    ):
        row = attempt(f"cross-entropy, {how}", who, partial(_cross_entropy, how, sizes, repeat))
        whole = row.get("loss") if how == "whole" else whole
        if whole is not None and "loss" in row:
            row["correct"] = abs(row["loss"] - whole) <= CLOSE * whole
        yield row


def _attention(backend: str, sizes: Sizes, repeat: int) -> dict:
    device = torch.device(DEVICE)
    attentions.check_backend(backend, device, torch.bfloat16, sizes.heads, sizes.kv_heads, sizes.head_dim)
    torch.manual_seed(0)
    drawn = [_random(sizes.tokens, n, sizes.head_dim) for n in (sizes.heads, sizes.kv_heads, sizes.kv_heads)]
    q, k, v = (t.transpose(0, 1)[None].requires_grad_() for t in drawn)
    grad = torch.ones_like(q)

    def call() -> None:
        torch.autograd.grad(attentions.attention(q, k, v, backend), (q, k, v), grad)

    seconds, peak = _measured(call, repeat)
    forward = 2 * sizes.tokens**2 * sizes.dim  # two GEMMs, half of each
    return {"seconds": seconds, "peak_bytes": peak, "flops_per_second": 3.5 * forward / seconds}


def _cross_entropy(how: str, sizes: Sizes, repeat: int) -> dict:
    how, _, compiled = how.partition(", ")
    cross_entropy.check_choice(how, torch.device(DEVICE), torch.bfloat16)
    torch.manual_seed(0)
    x = _random(sizes.tokens, sizes.dim).requires_grad_()
    with torch.device(DEVICE):
        head = nn.Linear(sizes.dim, sizes.vocab_size, bias=False)
        targets = torch.randint(sizes.vocab_size, (sizes.tokens,))

    def loss_of() -> Tensor:
        if how == "whole":
            return F.cross_entropy((x @ head.weight.to(x.dtype).t()).float(), targets)
        return cross_entropy.mean_loss(x, head, targets, how, bool(compiled))

    seconds, peak = _measured(lambda: torch.autograd.grad(loss_of(), (x, head.weight)), repeat)
    with torch.no_grad():
        return {"seconds": seconds, "peak_bytes": peak, "loss": loss_of().item()}


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16)


def _measured(call: Callable[[], object], repeat: int) -> tuple[float, int]:
    """(median seconds, bytes at the peak beside what was there before) of a call."""
    call()  # what it makes once, such as work space and compiled code, does not count
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    return gpu_seconds(call, repeat), peak
