"""The optimizer and its schedule, as in the MLPerf reference for Llama 3.1-8B (Megatron's AdamW).

Weight decay goes to every matrix, embedding and LM head included, and to no norm (Megatron's rule:
parameters of one axis do not decay). Linear warm-up, then a cosine to lr_min, or a constant rate and a linear decay
(warm-up, stable, decay: Hu et al., MiniCPM, arXiv 2404.06395).
"""

from __future__ import annotations

import math

import torch
from torch import nn

from mxfp4.training.config import TrainConfig


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW over `model`, one fused kernel a step; the caller sets the learning rate at each step.

    On a GPU the learning rate and step counts are tensors there, so that a step can be captured in a CUDA graph.
    """
    params = list(model.parameters())
    gpu = params[0].device.type == "cuda"
    lr = torch.tensor(config.lr, device=params[0].device) if gpu else config.lr
    groups = [
        {"params": [p for p in params if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in params if p.ndim <= 1], "weight_decay": 0.0},
    ]
    betas = (config.beta1, config.beta2)
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=config.eps, fused=True, capturable=gpu)


def learning_rate(config: TrainConfig, step: int) -> float:
    """Learning rate of optimizer step `step` (the first is 1): lr is reached at step `warmup`, lr_min at
    the end."""
    if step < config.warmup:
        return config.lr * step / config.warmup
    if config.cooldown_steps:
        left = min((config.steps - step) / config.cooldown_steps, 1.0)
        return config.lr_min + (config.lr - config.lr_min) * left
    total = config.decay_steps or config.steps
    progress = min((step - config.warmup) / max(total - config.warmup, 1), 1.0)
    return config.lr_min + (config.lr - config.lr_min) * 0.5 * (1 + math.cos(math.pi * progress))


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set `lr` in every parameter group, in place where it is a tensor."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr
