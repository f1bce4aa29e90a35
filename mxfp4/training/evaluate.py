"""Evaluation: mean cross-entropy on a fixed set of token windows, in nats a token and in bits a byte.

The model is evaluated in the arm's own numerics: its forward GEMM quantizes as in training (P1, MLPerf).
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def compute_context(device: torch.device) -> AbstractContextManager:
    """BF16 activations over FP32 weights on a GPU; FP32 on the CPU, where BF16 is slower and less exact."""
    return torch.autocast("cuda", dtype=torch.bfloat16, enabled=device.type == "cuda")


def token_loss(model: nn.Module, windows: Tensor) -> Tensor:
    """Mean cross-entropy in nats (FP32, 0-d) of windows [batch, seq + 1] int64: each token from those
    before it."""
    with compute_context(windows.device):
        logits = model(windows[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())


@torch.no_grad()
def evaluate(model: nn.Module, windows: Tensor, batch_size: int) -> float:
    """Mean loss in nats a token over windows [n, seq + 1], `batch_size` at a time, summed in FP64."""
    model.eval()
    total = torch.zeros((), dtype=torch.float64, device=windows.device)
    for part in windows.split(batch_size):
        total += token_loss(model, part).double() * len(part)
    model.train()
    return (total / len(windows)).item()


def bits_per_byte(nats_per_token: float, bytes_per_token: float) -> float:
    return nats_per_token / math.log(2) / bytes_per_token
