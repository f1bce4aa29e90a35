"""Stores filled with made-up curves: every outcome that a verdict must tell apart, without training
anything."""

import math
from collections.abc import Callable, Mapping

import numpy as np

from mxfp4.studies.store import Store
from mxfp4.training.config import ModelConfig, TrainConfig
from mxfp4.training.protocols import TrainResult

BIG = ModelConfig(vocab_size=64, dim=512, n_layers=10, n_heads=8, n_kv_heads=4, ffn_dim=1408, max_seq_len=1024)
"""Large enough for the ledger's `trend`; nothing of it is ever built."""
SMALL = ModelConfig(vocab_size=64, dim=64, n_layers=1, n_heads=2, n_kv_heads=1, ffn_dim=64, max_seq_len=1024)


def config(recipe: str, seed: int = 0, **changes) -> TrainConfig:
    values = dict(
        recipe=recipe,
        seed=seed,
        model=BIG,
        corpus="fake",
        seq_len=1024,
        batch_size=64,
        steps=1000,
        lr=1e-3,
        lr_min=1e-4,
        warmup=10,
        eval_every=50,
        eval_sequences=8,
        scale="gpu",
    )
    return TrainConfig(**{**values, **changes})


def curve(
    c: TrainConfig, slowdown: float = 1.0, offset: float = 0.0, until: int | None = None, training: float = 3.0,
    flat: float | None = None,
) -> list[dict]:  # fmt: skip
    """Loss 3 + 3 / (1 + 10 t) at the share t of the budget, slowed down by a factor: its overhead is slowdown
    - 1. training: the training loss of every step. flat: the loss below which the curve does not fall."""
    rows = []
    for step in range(0, (until or c.steps) + 1, c.eval_every):
        t = step / c.steps / slowdown
        rows.append(
            {
                "step": step,
                "tokens": step * c.tokens_per_step,
                "train_loss": training,
                "grad_norm": 1.0,
                "lr": c.lr,
                "eval_loss": max(3 + 3 / (1 + 10 * t) + offset + 0.003 * c.seed, flat or 0.0),
                "eval_bpb": 1.0,
            }
        )
    return rows


def put(
    store: Store,
    c: TrainConfig,
    *,
    slowdown=1.0,
    offset=0.0,
    diverged_at=None,
    ended="diverged",
    probes=(),
    speed=1000.0,
    arms_on_device=1,
    windows=(-0.3, -0.1, 0.15, 0.25),
    corpus="fake",
    wobble=(),
    ranks=None,
    training=3.0,
    flat=None,
) -> None:
    """diverged_at: the step at which it ended early, as `ended` says. windows: what each evaluation window's loss is above their mean, at the end. wobble: added to the evaluations."""
    rows = curve(c, slowdown, offset, diverged_at, training, flat)
    for row, extra in zip(rows, wobble, strict=False):
        row["eval_loss"] += float(extra)
    if c.stop_at_target:
        stop = next((i for i, row in enumerate(rows) if (row["eval_loss"] or math.inf) <= c.target_loss), len(rows) - 1)
        rows = rows[: stop + 1]
    status, step = (ended, diverged_at) if diverged_at else ("finished", rows[-1]["step"])
    outcome = {
        "status": status,
        "step": step,
        "tokens": step * c.tokens_per_step,
        "reason": "training loss is nan" if diverged_at else None,
        "final_loss": rows[-1]["eval_loss"],
        "final_bpb": 1.0,
        "target": None,
    }
    timings = {
        "train_seconds": 1.0,
        "evaluate_seconds": 0.1,
        "tokens_per_second": speed,
        "arms_on_device": arms_on_device,
    }
    timings |= {} if ranks is None else {"ranks": ranks}
    windows = [rows[-1]["eval_loss"] + spread for spread in windows]
    store.put(c, TrainResult(rows, list(probes), windows, outcome, timings, None), "cpu", corpus=corpus)


def fill(store: Store, slowdowns: Mapping[str, float | Callable[[int], float]], *, seeds=(0, 1, 2), **changes) -> Store:
    """A record for each recipe and seed: a slowdown, or a function of the seed; infinite diverges at half of
    the budget."""
    for recipe, slowdown in slowdowns.items():
        for seed in seeds:
            s = slowdown(seed) if callable(slowdown) else slowdown
            c = config(recipe, seed, **changes)
            put(store, c, **({"diverged_at": c.steps // 2} if math.isinf(s) else {"slowdown": s}))
    return store


def probe_rows(
    metric: str, values: Mapping[str, float], *, gemm="wgrad", tensor="dw", layers=4, spread=0.01
) -> list[dict]:
    """Rows of a probe: {recipe: mean}, over some layers and two steps."""
    noise = np.linspace(-spread, spread, layers)
    return [
        {
            "step": step,
            "recipe": recipe,
            "layer": f"layers.{i}.attention.wq",
            "gemm": gemm,
            "tensor": tensor,
            "metric": metric,
            "value": value + noise[i],
        }
        for recipe, value in values.items()
        for step in (100, 500)
        for i in range(layers)
    ]
