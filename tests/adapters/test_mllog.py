"""A run as an MLPerf log: the layout of the lines, and the benchmark's own checks of their values."""

from __future__ import annotations

import json
import math

import pytest

from mxfp4.adapters import mllog
from mxfp4.studies.scales import MI355X
from tests.fakes import tiny_config

MACHINE = {"device": "AMD Instinct MI355X", "path": "native"}


def log(config, losses, target, last=None):
    """[event] of a run with evaluation losses {step: loss}, of 1000 s, that ended at second 5000."""
    last = last or max(losses)
    curve = [{"step": s, "eval_loss": losses.get(s, math.nan)} for s in range(last + 1)]
    outcome = {"step": last, "target": target}
    timings = {"train_seconds": 900.0, "evaluate_seconds": 100.0, "ranks": 8}
    written = list(mllog.lines(config, curve, outcome, timings, MACHINE, 5000.0))
    assert all(line.startswith(":::MLLOG {") and "\n" not in line for line in written)
    events = [json.loads(line.removeprefix(":::MLLOG ")) for line in written]
    assert all(list(e) == ["namespace", "time_ms", "event_type", "key", "value", "metadata"] for e in events)
    return events


def test_the_papers_run_has_the_values_that_the_closed_rules_ask_for():
    """closed_llama31_8b.yaml of mlcommons/logging's training_6.1.0, key by key."""
    events = log(MI355X.config("mxfp4+h16", 3), {0: 11.9, 384: 4.0, 768: 3.2}, {"step": 768})
    values = {e["key"]: e["value"] for e in events}
    required = {
        "submission_benchmark": "llama31_8b", "submission_division": "closed", "max_sequence_length": 8192,
        "opt_name": "adamw", "opt_learning_rate_decay_steps": 1_200_000 - values["opt_learning_rate_warmup_steps"],
        "opt_learning_rate_decay_schedule": "cosine with linear warmup", "opt_adamw_beta_1": 0.9,
        "opt_adamw_beta_2": 0.95, "opt_adamw_epsilon": 1e-05, "opt_adamw_weight_decay": 0.1,
        "opt_gradient_clip_norm": 1.0, "eval_samples": 1024, "max_steps": 1_200_000, "global_batch_size": 32,
        "gradient_accumulation_steps": 2, "micro_batch_size": 2, "seed": 3, "target_accuracy": 3.3,
        "lowest_numerical_precision_in_linear": "mxfp4",
    }  # fmt: skip
    assert {key: values[key] for key in required} == required
    counted = [(e["value"], e["metadata"]["samples_count"]) for e in events if e["key"] == "eval_accuracy"]
    assert counted == [(11.9, 0), (4.0, 384 * 32), (3.2, 768 * 32)]
    assert events[-1]["key"] == "run_stop" and events[-1]["metadata"]["status"] == "success"
    once = [
        e["key"]
        for e in events
        if e["key"] not in ("eval_start", "eval_stop", "eval_accuracy", "block_start", "block_stop")
    ]
    assert len(once) == len(set(once))


@pytest.mark.parametrize("last", [8, 9])
def test_times_rise_from_start_to_end_and_intervals_close(last):
    events = log(tiny_config(), {0: 4.1, 4: 3.0, 8: 2.0}, None, last)
    times = [e["time_ms"] for e in events]
    assert times == sorted(times) and times[0] == 4_000_000 and times[-1] == 5_000_000
    (middle,) = [e for e in events if e["key"] == "eval_accuracy" and e["value"] == 3.0]
    assert middle["time_ms"] == round(5e6 - 1e6 * (1 - 4 / last)) and middle["metadata"]["time"] == "interpolated"
    opened = []
    for event in events:
        if event["event_type"] == "INTERVAL_START":
            opened.append(event["key"].rsplit("_", 1)[0])
        elif event["event_type"] == "INTERVAL_END":
            assert opened.pop() == event["key"].rsplit("_", 1)[0]
    assert opened == [] and events[0]["value"] == "cpu" and events[-1]["metadata"]["status"] == "aborted"


@pytest.mark.parametrize(
    ("recipe", "precision"),
    [("bf16", "bfloat16"), ("fp8", "fp8"), ("mxfp4-fprop", "mxfp4"), ("nvfp4", "nvfp4"), ("quartet", "mxfp4")],
)
def test_precision_is_the_narrowest_of_the_operands(recipe, precision):
    assert mllog._precision(recipe) == precision
