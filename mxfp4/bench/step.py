"""A training step on a GPU, each recipe against BF16: a Llama of about 370 M parameters, its blocks compiled.

Sequence 2048, batch 8; BF16 parameters, forward, backward and a fused AdamW step, as one CUDA graph, so that the
processor's launches are not what is measured. On a chip without FP4 units, where FP8 may run on units of its own, this
is the price of emulating FP4 exactly, not the speed of the format. "packed": operands wait for the backward as codes
and scales, unpacked there (`MXFP4Linear`'s `save`).
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

import mxfp4
from mxfp4.bench.results import attempt
from mxfp4.training.config import ModelConfig
from mxfp4.training.execution.cuda_graph import WARM_UP, CapturedStep
from mxfp4.training.model import build_model

RECIPES = (
    "bf16", "fp8", "mxfp4", "mxfp4+h16", "mxfp4+h32", "mxfp4+sr-grad", "ti2d", "mxfp4, packed", "mxfp4+h16, packed",
)  # fmt: skip
MODEL = ModelConfig(vocab_size=32000, dim=1024, n_layers=24, n_heads=16, n_kv_heads=16, ffn_dim=2816, max_seq_len=2048)
BATCH = 8
DEVICE = "cuda"


def rows(recipes: tuple[str, ...] = RECIPES, steps: int = 8) -> Iterator[dict]:
    """One dict a recipe: median seconds a step, peak memory, and both relative to BF16 if that came before; or a
    problem."""
    reference = None
    for name in recipes:
        row = attempt(name, "torch" if name == "bf16" else "mxfp4", lambda name=name: _measure(name, steps))
        if "problem" not in row:
            reference = row if name == "bf16" else reference
            if reference is not None:
                row["time_ratio"] = row["seconds"] / reference["seconds"]
                row["memory_ratio"] = row["peak_bytes"] / reference["peak_bytes"]
        yield row


def _measure(name: str, steps: int) -> dict:
    """One recipe from nothing: whatever the one before left in compiled code and in memory is dropped first."""
    torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.manual_seed(0)
    model = build_model(MODEL, seed=0, device=DEVICE).to(torch.bfloat16)
    if name != "bf16":  # the reference is the plain layer
        base, _, save = name.partition(", ")
        model = mxfp4.convert(model, base, save=save or "values")
    for block in model.layers:
        block.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, capturable=True)
    tokens = torch.randint(0, MODEL.vocab_size, (BATCH, MODEL.max_seq_len + 1), device=DEVICE)

    def update(tokens: Tensor) -> Tensor:
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    captured, times, loss = CapturedStep(update), [], None
    warm_up = WARM_UP + 2  # the capture itself, and one replay
    for step in range(warm_up + steps):
        mxfp4.set_step(model, step)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        loss = captured(tokens)
        end.record()
        if step >= warm_up:
            times.append((start, end))
    torch.cuda.synchronize()
    return {
        "seconds": statistics.median(s.elapsed_time(e) for s, e in times) / 1e3,
        "peak_bytes": torch.cuda.max_memory_allocated() - before,
        "loss": loss.item(),
    }
