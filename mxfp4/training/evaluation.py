"""Evaluation: mean cross-entropy on a fixed set of token windows, in nats a token and in bits a byte.

The model is evaluated in the arm's own numerics: its forward GEMM quantizes as in training (P1, MLPerf).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mxfp4.training.execution import cross_entropy
from mxfp4.training.execution.distributed import ALONE, Ranks


def compute_context(device: torch.device) -> AbstractContextManager:
    """BF16 activations over FP32 weights on a GPU; FP32 on the CPU, where BF16 is slower and less exact."""
    return torch.autocast("cuda", dtype=torch.bfloat16, enabled=device.type == "cuda")


def token_loss(model: nn.Module, windows: Tensor) -> Tensor:
    """Mean cross-entropy in nats (FP32, 0-d) of windows [batch, seq + 1] int64: each token from those
    before it."""
    return F.cross_entropy(_logits(model, windows), windows[:, 1:].flatten())


def _logits(model: nn.Module, windows: Tensor) -> Tensor:
    """FP32 [batch * seq, vocabulary]."""
    with compute_context(windows.device):
        logits = model(windows[:, :-1])
    return logits.float().flatten(0, 1)


def fused_token_loss(model: nn.Module, windows: Tensor) -> Tensor:
    """`token_loss` with the cross-entropy compiled: the logits are read and written once in their own dtype, not five
    times in FP32. The same up to the order of sums."""
    with compute_context(windows.device):
        logits = model(windows[:, :-1])
    return _fused_cross_entropy()(logits, windows[:, 1:])


@lru_cache
def _fused_cross_entropy() -> Callable[[Tensor, Tensor], Tensor]:
    def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    return torch.compile(loss_of, dynamic=False)


def chunked_token_loss(model: nn.Module, windows: Tensor, how: str = "chunked", compiled: bool = False) -> Tensor:
    """`token_loss` without all logits in memory at once; see `cross_entropy.mean_loss`."""
    head = partial(cross_entropy.mean_loss, targets=windows[:, 1:], how=how, compiled=compiled)
    with compute_context(windows.device):
        return model(windows[:, :-1], head)


def chunked_token_losses(model: nn.Module, windows: Tensor) -> Tensor:
    """`token_losses` without all logits in memory at once; without gradients."""
    with compute_context(windows.device):
        return model(windows[:, :-1], partial(cross_entropy.token_losses, targets=windows[:, 1:]))


def token_losses(model: nn.Module, windows: Tensor) -> Tensor:
    """The cross-entropy of each token, FP32 [batch, seq]."""
    targets = windows[:, 1:]
    return F.cross_entropy(_logits(model, windows), targets.flatten(), reduction="none").view_as(targets)


@torch.no_grad()
def window_losses(
    model: nn.Module, windows: Tensor, batch_size: int, ranks: Ranks = ALONE, losses_of: Callable | None = None
) -> list[float]:
    """Mean loss of each of windows [n, seq + 1] in nats a token (a float64 mean of n values), `batch_size` windows at
    a time. Ranks share the batches; all get the whole list. losses_of: what computes `token_losses` of a batch."""
    losses_of = losses_of or partial(token_losses, model)
    parts = windows.split(batch_size)
    mine, most = ranks.share(len(parts))
    model.eval()
    losses = []
    for i in range(mine.start, mine.start + most):
        part = parts[min(i, len(parts) - 1)]  # a rank without work left computes along: its weights are needed
        found = losses_of(part).double().mean(dim=1)
        losses += [found] if i in mine else []
    model.train()
    values = torch.cat(losses).tolist() if losses else []
    return [value for share in ranks.gather(values) for value in share]


@dataclass(frozen=True)
class Judged:
    """What one forward makes of a set of windows."""

    losses: list[float]
    """Mean loss of each window, nats a token."""
    top1: float
    """Share of tokens that were the most probable one."""
    copy_top1: float
    """The same among the tokens that a copy decides; NaN where the source does not say which those are."""

    @property
    def loss(self) -> float:
        return sum(self.losses) / len(self.losses)


@torch.no_grad()
def judge_windows(model: nn.Module, windows: Tensor, batch_size: int, copied: Tensor | None = None) -> Judged:
    """Evaluate windows [n, seq + 1], `batch_size` at a time, on one rank. copied: bool [n, seq], see `Judged.copy_top1`."""
    model.eval()
    losses, right = [], []
    for part in windows.split(batch_size):
        logits, targets = _logits(model, part), part[:, 1:]
        each = F.cross_entropy(logits, targets.flatten(), reduction="none").view_as(targets)
        losses.append(each.double().mean(dim=1))
        right.append(logits.argmax(-1).view_as(targets) == targets)
    model.train()
    hits = torch.cat(right)
    copies = hits[copied[: len(hits)]] if copied is not None else hits[:0]
    copy_top1 = float(copies.double().mean()) if copies.numel() else math.nan
    return Judged(torch.cat(losses).tolist(), float(hits.double().mean()), copy_top1)


def bits_per_byte(nats_per_token: float, bytes_per_token: float) -> float:
    """Loss in nats a token as bits a byte of text."""
    return nats_per_token / math.log(2) / bytes_per_token
