"""A recorded run as an MLPerf training log, for the tools that read one: `:::MLLOG {json}`, a line an event.

The keys are those of the benchmark llama31_8b ("small LLM pretraining"). The log is no submission, and says so in
`submission_org`. A record holds seconds of the whole run, not of each step: times in between are interpolated, and
every line whose time is says so in its metadata. A run of another model is written under its scale's name, which
MLPerf's checker refuses.

Source: mlcommons/logging 4.1 (`mllog/mllog.py` for the layout, `compliance_checker/training_6.1.0/closed_llama31_8b.yaml`
for the keys).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mxfp4.layers.recipe import recipe
from mxfp4.training.config import ModelConfig, TrainConfig

BENCHMARK = "llama31_8b"
PRECISIONS = {"mxfp4": "mxfp4", "nvfp4": "nvfp4", "fp8": "fp8", "mxfp8": "fp8", "bf16": "bfloat16"}
"""{format of an operand: MLPerf's name}, lowest precision first."""


def lines(
    config: TrainConfig,
    curve: Sequence[Mapping[str, Any]],
    outcome: Mapping[str, Any],
    timings: Mapping[str, Any],
    machine: Mapping[str, Any],
    ended: float,
) -> Iterator[str]:
    """The log's lines.

    Args:
        config: the run's configuration.
        curve: rows of its curve, with `step` and `eval_loss` (nats a token; NaN where not evaluated).
        outcome: its status, step and target.
        timings: train_seconds and evaluate_seconds.
        machine: the device that it ran on.
        ended: when it ended, in seconds since 1970.

    """
    seconds = timings["train_seconds"] + timings["evaluate_seconds"]
    steps, ranks = max(outcome["step"], 1), timings.get("ranks", 1)

    def line(key: str, value: Any = None, kind: str = "POINT_IN_TIME", step: int | None = 0, **metadata: Any) -> str:
        at = ended if step is None else ended - seconds * (1 - step / steps)
        if step not in (0, None):
            metadata["time"] = "interpolated"
        event = {"namespace": "", "time_ms": round(at * 1000), "event_type": kind, "key": key, "value": value}
        return f":::MLLOG {json.dumps(event | {'metadata': metadata})}"

    start, stop = "INTERVAL_START", "INTERVAL_END"
    yield line("submission_benchmark", BENCHMARK if _is_llama31_8b(config.model) else config.scale)
    yield line("submission_org", "none: not a submission")
    yield line("submission_division", "closed")
    yield line("submission_status", "research")
    yield line("submission_platform", machine["device"], ranks=ranks, path=machine["path"])
    yield line("cache_clear", True)
    yield line("init_start", kind=start)
    for key, value in _settings(config, ranks).items():
        yield line(key, value)
    yield line("init_stop", kind=stop)
    yield line("run_start", kind=start)
    samples, in_block = 0, False
    for row in curve:
        if math.isnan(row["eval_loss"]):
            continue
        step = row["step"]
        if in_block:
            yield line("block_stop", kind=stop, step=step, samples_count=samples)
        samples = step * config.batch_size
        yield line("eval_start", kind=start, step=step, samples_count=samples)
        yield line("eval_accuracy", row["eval_loss"], step=step, samples_count=samples)
        yield line("eval_stop", kind=stop, step=step, samples_count=samples)
        in_block = step < outcome["step"]
        if in_block:
            yield line("block_start", kind=start, step=step, samples_count=samples)
    if in_block:  # diverged between two evaluations
        yield line("block_stop", kind=stop, step=None, samples_count=samples)
    status = "success" if outcome["target"] else "aborted"
    yield line("run_stop", kind=stop, step=None, samples_count=outcome["step"] * config.batch_size, status=status)


def _settings(config: TrainConfig, ranks: int) -> dict[str, Any]:
    schedule = config.decay_steps or config.steps
    decay = "cosine with linear warmup" if not config.cooldown_steps else "linear warmup, constant, linear decay"
    settings = {
        "seed": config.seed,
        "global_batch_size": config.batch_size,
        "micro_batch_size": config.batch_size // config.micro_batches,
        "gradient_accumulation_steps": config.micro_batches // ranks,
        "max_sequence_length": config.seq_len,
        "max_steps": schedule,
        "train_samples": config.steps * config.batch_size,
        "eval_samples": config.eval_sequences,
        "opt_name": "adamw",
        "opt_base_learning_rate": config.lr,
        "opt_end_learning_rate": config.lr_min,
        "opt_learning_rate_warmup_steps": config.warmup,
        "opt_learning_rate_decay_steps": config.cooldown_steps or schedule - config.warmup,
        "opt_learning_rate_decay_schedule": decay,
        "opt_adamw_beta_1": config.beta1,
        "opt_adamw_beta_2": config.beta2,
        "opt_adamw_epsilon": config.eps,
        "opt_adamw_weight_decay": config.weight_decay,
        "opt_gradient_clip_norm": config.clip,
        "lowest_numerical_precision_in_linear": _precision(config.recipe),
        "lowest_numerical_precision_in_attn": "bfloat16",
        "lowest_numerical_precision_in_comm": {"float32": "fp32"}.get(config.reduce_dtype, config.reduce_dtype),
        **dict.fromkeys((f"{axis}_parallelism" for axis in ("tensor", "pipeline", "context", "expert")), 1),
        "config_filename": config.recipe,
    }
    return settings | ({"target_accuracy": config.target_loss} if config.target_loss is not None else {})


def _precision(name: str) -> str:
    """MLPerf's name of the narrowest format among a recipe's operands."""
    made = recipe(name)
    formats = {operand.format for operand in made.operands().values()} | ({"mxfp4"} if made.quest else set())
    return next(PRECISIONS[each] for each in PRECISIONS if each in formats)


def _is_llama31_8b(model: ModelConfig) -> bool:
    sizes = (model.vocab_size, model.dim, model.n_layers, model.n_heads, model.n_kv_heads, model.ffn_dim)
    return sizes == (128_256, 4096, 32, 32, 8, 14336) and not model.n_experts
