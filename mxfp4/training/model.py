"""Llama: RMSNorm, RoPE, grouped-query attention, SwiGLU, untied head, no biases; dense or a mixture of
experts.

Module names are those of Meta's reference and TorchTitan (layers.N.attention.wq, layers.N.feed_forward.w1,
tok_embeddings, norm, output). RoPE turns the two halves of a head, as in Hugging Face, so weights can be
exported to that format without permuting rows. Attention is causal over the whole sequence: no document
mask (MLPerf's rule).

Initial weights are normal with std 0.02, the matrices that write to the residual stream (wo, w2) divided by
sqrt(2 n_layers) (GPT-2, Megatron). Each parameter draws from its own generator, seeded by (seed, name), on
the CPU: the same bytes for every recipe, device and sharding, and however many are drawn at a time.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mxfp4.training.config import ModelConfig
from mxfp4.training.execution.attention import attention
from mxfp4.training.execution.distributed import fill, here
from mxfp4.training.execution.recompute import recomputed

INIT_STD = 0.02
ORIGINAL_CONTEXT, LOW_FREQUENCY, HIGH_FREQUENCY = 8192, 1.0, 4.0
"""Of Llama 3.1's RoPE scaling: positions of the context before it was lengthened, and turns in them."""
DRAWING = 8
"""Most parameters that a process draws at a time, each whole, in FP32, in the host's memory: 5 ns a number."""


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last axis, computed in FP32, returned in x's dtype."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        h = x.float()
        h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + self.eps)
        return (h * self.weight).to(x.dtype)


def scaled_rates(rates: Tensor, factor: float) -> Tensor:
    """RoPE's rates (radians a position, float64) with Llama 3.1's scaling.

    A pair whose wavelength is above ORIGINAL_CONTEXT / LOW_FREQUENCY turns `factor` times slower; one below
    ORIGINAL_CONTEXT / HIGH_FREQUENCY turns as before; in between the two rates are mixed, linearly in the turns that
    the pair makes in ORIGINAL_CONTEXT positions. Source: Meta's reference (`apply_scaling`), as rope_type "llama3" of
    transformers 5 and `apply_rope_scaling` of Megatron-LM core 0.19 have it.
    """
    turns = ORIGINAL_CONTEXT * rates / (2 * math.pi)
    share = ((turns - LOW_FREQUENCY) / (HIGH_FREQUENCY - LOW_FREQUENCY)).clamp(0, 1)
    return (1 - share) * rates / factor + share * rates


def rope_tables(seq_len: int, head_dim: int, theta: float, device=None, scaling_factor: float = 1.0) -> Tensor:
    """FP32 [2, seq_len, head_dim]: cosines and sines of the angle of each position and (repeated) pair."""
    rates = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64, device=device) / head_dim)
    if scaling_factor != 1:
        rates = scaled_rates(rates, scaling_factor)
    angles = torch.arange(seq_len, dtype=torch.float64, device=device)[:, None] * rates
    angles = torch.cat([angles, angles], dim=-1)
    return torch.stack([angles.cos(), angles.sin()]).float()


def apply_rope(x: Tensor, rope: Tensor) -> Tensor:
    """Turn x [batch, heads, seq, head_dim] by the angles of `rope` [2, seq, head_dim]; computed in FP32."""
    h = x.float()
    a, b = h.chunk(2, dim=-1)
    return (h * rope[0] + torch.cat([-b, a], dim=-1) * rope[1]).to(x.dtype)


class Attention(nn.Module):
    """Causal grouped-query attention."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        kv = config.n_kv_heads * config.head_dim
        self.wq = nn.Linear(config.dim, config.dim, bias=False)
        self.wk = nn.Linear(config.dim, kv, bias=False)
        self.wv = nn.Linear(config.dim, kv, bias=False)
        self.wo = nn.Linear(config.dim, config.dim, bias=False)
        self.backend = "repeat"

    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        batch, seq, dim = x.shape
        q, k, v = (p(x).view(batch, seq, -1, self.config.head_dim).transpose(1, 2) for p in (self.wq, self.wk, self.wv))
        q, k = apply_rope(q, rope), apply_rope(k, rope)
        y = attention(q, k, v, self.backend)
        return self.wo(y.transpose(1, 2).reshape(batch, seq, dim))


class FeedForward(nn.Module):
    """SwiGLU: w2(silu(w1 x) * w3 x)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.w2 = nn.Linear(config.ffn_dim, config.dim, bias=False)
        self.w3 = nn.Linear(config.dim, config.ffn_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class MixtureOfExperts(nn.Module):
    """Each token goes to its top k of n experts, weighted by the router's probabilities, renormalized over
    the k.

    The router runs in FP32 and is never quantized. `balance` holds the last forward's load-balance loss,
    n_experts * sum_i f_i p_i with f the share of assignments and p the mean probability of expert i: 1 when
    even.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.top_k = config.n_experts_per_token
        self.router = nn.Linear(config.dim, config.n_experts, bias=False)
        self.experts = nn.ModuleList(FeedForward(config) for _ in range(config.n_experts))
        self.balance: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        with torch.autocast(x.device.type, enabled=False):
            probs = self.router(flat.float()).softmax(dim=-1)
        weight, chosen = probs.topk(self.top_k, dim=-1)
        weight = weight / weight.sum(dim=-1, keepdim=True)
        counts = F.one_hot(chosen, len(self.experts)).sum(dim=(0, 1))
        self.balance = len(self.experts) * (counts / chosen.numel() * probs.mean(dim=0)).sum()
        places = chosen.flatten().argsort(stable=True).split(counts.tolist())  # the one wait for the device
        y = torch.zeros_like(flat)
        for expert, place in zip(self.experts, places, strict=True):
            token = place // self.top_k
            y = y.index_add(0, token, (expert(flat[token]) * weight.flatten()[place, None]).to(y.dtype))
        return y.view_as(x)


class Block(nn.Module):
    """One pre-norm transformer block."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)
        self.feed_forward = MixtureOfExperts(config) if config.n_experts else FeedForward(config)
        self.recompute = False

    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        if self.recompute and torch.is_grad_enabled():
            return recomputed(self._forward, x, rope)
        return self._forward(x, rope)

    def _forward(self, x: Tensor, rope: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rope)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    """Token ids [batch, seq] -> logits [batch, seq, vocab_size] in the compute dtype.

    Under autocast the residual stream is in autocast's dtype. Raises ValueError for seq > max_seq_len.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.output.weight = self.tok_embeddings.weight
        self.register_buffer("rope", self._rope(), persistent=False)

    def _rope(self, device=None) -> Tensor:
        c = self.config
        return rope_tables(c.max_seq_len, c.head_dim, c.rope_theta, device, c.rope_scaling_factor)

    def forward(self, tokens: Tensor, head: Callable[[Tensor, nn.Linear], Tensor] | None = None) -> Tensor:
        """head: what is made of the last hidden states [batch, seq, dim] and the output layer in place of the logits, here
        because FSDP frees that layer's weight outside of the model's forward."""
        seq = tokens.shape[1]
        if seq > self.config.max_seq_len:
            raise ValueError(f"sequence of {seq} tokens exceeds max_seq_len={self.config.max_seq_len}")
        x = self.tok_embeddings(tokens)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        rope = self.rope[:, :seq]
        for layer in self.layers:
            x = layer(x, rope)
        x = self.norm(x)
        return self.output(x) if head is None else head(x, self.output)

    def balance_loss(self) -> Tensor | None:
        """Mean over layers of the last forward's load-balance loss; None for a dense model."""
        if not self.config.n_experts:
            return None
        return torch.stack([layer.feed_forward.balance for layer in self.layers]).mean()

    @torch.no_grad()
    def init_weights(self, seed: int) -> Llama:
        """Fill every parameter and buffer; also after `to_empty` from the meta device. Returns self."""
        if self.config.tie_embeddings:  # `to_empty` separates them
            self.output.weight = self.tok_embeddings.weight
        matrices = []
        for name, parameter in self.named_parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0)
                continue
            residual = name.endswith(("wo.weight", "w2.weight"))
            std = INIT_STD / math.sqrt(2 * self.config.n_layers) if residual else INIT_STD
            digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
            matrices.append((parameter, std, int.from_bytes(digest, "little") >> 1))
        matrices.sort(key=lambda matrix: -matrix[0].numel())  # the largest first: no thread has it left at the end
        with ThreadPoolExecutor(_threads()) as pool:
            list(pool.map(_draw, *zip(*matrices, strict=True)))
        self.rope = self._rope(self.rope.device)
        return self


def _threads() -> int:
    """Threads that draw weights: a rank's share of the cores, at most DRAWING. Not torch's number of threads, which torchrun sets to 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(max(cores // here().size, 1), DRAWING)


def _draw(parameter: Tensor, std: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    fill(parameter, torch.empty(parameter.shape, device="cpu").normal_(std=std, generator=generator))


def build_model(config: ModelConfig, seed: int, device: torch.device | str = "cpu") -> Llama:
    """A Llama with its initial weights, FP32, made on `device` without default initialisation first."""
    with torch.device("meta"):
        model = Llama(config)
    return model.to_empty(device=device).init_weights(seed)
