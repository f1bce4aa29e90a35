"""From steps with few layers to the whole model: seconds of a step, hours of each tier of the plan, go or no-go.

A step's time is taken as linear in the number of layers: a layer takes the difference of the two measured depths, and
what is left is the embedding, the head and the loss. The optimizer is taken apart, as it does not come once a
micro-batch. Measured peaks of memory go up in the same way; the estimate (`training.memory`) is asked too, and the
larger one counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mxfp4.analysis.published import mlperf_results
from mxfp4.bench.node import Setting, takes_fp4
from mxfp4.studies.memory_check import GB, Machine, machine_for, memories, needed
from mxfp4.studies.plans import TIERS, plan, steps_worth, tier_of

PUBLISHED = {"FP8": "fp8", "MXFP4 + H16": "mxfp4+h16"}
"""Recipes of the public logs."""


@dataclass(frozen=True)
class Prediction:
    """One recipe with all of the scale's layers."""

    recipe: str
    path: str
    seconds: float
    """Of a step."""
    layer_seconds: float
    """Forward and backward of a layer, all micro-batches of a rank together."""
    rest_seconds: float
    """Embedding, head, loss and what comes once a step."""
    optimizer_seconds: float
    bytes: float | None
    """Peak memory of a rank and what it needs beside; None where it is not measured (CPU)."""
    communication_share: float | None
    """As measured with the larger number of layers."""


@dataclass(frozen=True)
class Hours:
    """A tier of the plan at the predicted step times, whole budgets, evaluations included."""

    tier: str
    arms: int
    hours: float
    """Of this machine."""
    hours_in_all: float
    """With the tiers before."""
    assumed: int
    """Arms of recipes that were not measured, counted at the slowest one's time."""


@dataclass(frozen=True)
class Verdict:
    """Go or no-go, each condition with its reason in one line."""

    reasons: tuple[tuple[bool, str], ...]

    @property
    def go(self) -> bool:
        return all(holds for holds, _ in self.reasons)


def predictions(rows: Sequence[dict], setting: Setting) -> list[Prediction]:
    """One for each recipe of which both depths are there."""
    found = []
    for name in setting.recipes:
        mine = sorted((r for r in _base(rows) if r["recipe"] == name and "seconds" in r), key=lambda r: r["layers"])
        if len(mine) == 2:
            found.append(_predicted(mine[0], mine[1], setting))
    return found


def _base(rows: Sequence[dict]) -> list[dict]:
    return [row for row in rows if not row["varied"]]


def _predicted(few: dict, more: dict, setting: Setting) -> Prediction:
    layers, times = setting.scale.model.n_layers, setting.parts / setting.measured_parts
    distance = more["layers"] - few["layers"]

    def at(value: str) -> tuple[float, float]:
        """(of a layer, of none) of a measured value."""
        slope = (more[value] - few[value]) / distance
        return slope, more[value] - slope * more["layers"]

    passes = [sum(pair) * times for pair in zip(at("forward_seconds"), at("backward_seconds"), strict=True)]
    step, nothing = at("optimizer_seconds")
    optimizer = nothing + layers * step
    peak = None
    if more["peak_bytes"] is not None:
        slope, nothing = at("peak_bytes")
        config = setting.scale.config(few["recipe"], 0)
        (_, estimate), *_ = memories([config], setting.scale, _machine(setting), setting.ranks)
        peak = max(nothing + layers * slope, estimate.peak) + estimate.reserve
    return Prediction(
        few["recipe"], more["path"], passes[1] + layers * passes[0] + optimizer, passes[0], passes[1], optimizer, peak,
        more["communication_share"],
    )  # fmt: skip


def _machine(setting: Setting) -> Machine:
    return machine_for(setting.scale.name, setting.gpus, None)


def hours(found: Sequence[Prediction], setting: Setting) -> list[Hours]:
    """Each of `plans.TIERS`; none without a prediction."""
    if not found:
        return []
    seconds, slowest = {p.recipe: p.seconds for p in found}, max(p.seconds for p in found)
    arms, total, tiers = plan("all", setting.scale).arms, 0.0, []
    for tier in TIERS:
        mine = [config for config in arms if tier_of(config, setting.scale) == tier]
        took = sum(steps_worth(config) * seconds.get(config.recipe, slowest) for config in mine) / 3600
        total += took
        tiers.append(Hours(tier, len(mine), took, total, sum(config.recipe not in seconds for config in mine)))
    return tiers


def verdict(rows: Sequence[dict], found: Sequence[Prediction], setting: Setting) -> Verdict:
    """Whether days of running are worth beginning on this machine."""
    base, machine = _base(rows), _machine(setting)
    failed = [f"{row['name']}: {row['problem']}" for row in base if "problem" in row]
    missing = [name for name in setting.recipes if name not in {p.recipe for p in found}]
    ran = f"every recipe ran: {', '.join(setting.recipes)}"
    wild = [row["name"] for row in base if "loss" in row and not math.isfinite(row["loss"])]
    noisy = [p.recipe for p in found if p.layer_seconds <= 0]
    reasons = [
        (not missing, f"not measured: {', '.join(missing)} ({'; '.join(failed)})" if missing else ran),
        (not wild, f"losses that are not finite: {', '.join(wild)}" if wild else "losses are finite"),
    ]
    if noisy:
        reasons.append((False, f"more layers took no longer, so times are noise: {', '.join(noisy)}"))
    reasons += [(holds, text) for holds, text in (_memory(found, setting, machine), _speed(found)) if text]
    return Verdict(tuple(reasons))


def _memory(found: Sequence[Prediction], setting: Setting, machine: Machine) -> tuple[bool, str]:
    layers = setting.scale.model.n_layers
    if setting.gpus:
        sizes = {p.recipe: p.bytes for p in found if p.bytes is not None}
    else:
        configs = [setting.scale.config(p.recipe, 0) for p in found]
        estimates = memories(configs, setting.scale, machine, setting.ranks)
        sizes = {config.recipe: needed(memory, machine, setting.ranks) for config, memory in estimates}
    if not sizes or machine.memory is None:
        return True, ""
    largest = max(sizes, key=lambda name: sizes[name])
    text = f"memory of {layers} layers: {largest} needs {sizes[largest] / GB:.3g} GB of {machine.memory / GB:.3g} GB"
    return sizes[largest] <= machine.memory, text


def _speed(found: Sequence[Prediction]) -> tuple[bool, str]:
    """FP4's predicted step against FP8's, where both run natively."""
    fp8 = next((p for p in found if p.recipe == "fp8"), None)
    fp4 = [p for p in found if takes_fp4(p.recipe)]
    emulated = [p.recipe for p in fp4 if p.path != "native"]
    if emulated:
        return True, f"no FP4 speed: {', '.join(emulated)} emulated here, so the times are those of the emulation"
    if fp8 is None or not fp4:
        return True, ""
    if fp8.path != "native":
        return True, "FP4's speed is not compared: FP8 is emulated here"
    ratios = {p.recipe: fp8.seconds / p.seconds for p in fp4}
    text = ", ".join(f"{name} {ratio:.2f} times as fast as fp8" for name, ratio in ratios.items())
    return all(ratio > 1 for ratio in ratios.values()), text


def advice(rows: Sequence[dict]) -> list[str]:
    """One line for each choice that is faster than the scale's own, as the option that makes it."""
    found = []
    options = {
        "attention": "--attention {}",
        "cross_entropy": "--cross-entropy {}",
        "gemm_backend": "MXFP4_GEMM_BACKEND={}",
    }
    for row in rows:
        if not row["varied"] or "seconds" not in row:
            continue
        same = (r for r in _base(rows) if (r["recipe"], r["layers"]) == (row["recipe"], row["layers"]))
        own = next((r for r in same if "seconds" in r), None)
        if own is not None and row["seconds"] < own["seconds"]:
            option = options[row["varied"]].format(row[row["varied"]])
            found.append(f"{option}: {row['seconds'] / own['seconds']:.3f} of the time ({row['name']})")
    return found


def published(found: Sequence[Prediction]) -> list[str]:
    """One line for each public step time, with its source, and the prediction beside it where there is one. FP4 that is
    emulated here is not set beside FP4."""
    lines = []
    for log in mlperf_results().to_dict("records"):
        text = f"{log['arm']} on 8 MI355X: {log['seconds_per_step']:.3f} s a step ({log['source']})"
        mine = next((p for p in found if p.recipe == PUBLISHED.get(log["arm"])), None)
        if mine is not None and mine.path == "native":
            text += f"; predicted here {mine.seconds:.3f} s, {mine.seconds / log['seconds_per_step']:.2f} times that"
        elif mine is not None:
            text += "; not comparable: emulated here"
        lines.append(text)
    return lines


def text(rows: Sequence[dict], setting: Setting, device: str) -> str:
    """The answer, for print."""
    found = predictions(rows, setting)
    model, ranks = setting.scale.model, setting.ranks
    where = f"{ranks} x {device}" if setting.gpus else f"{ranks} processes on the CPU ({device})"
    lines = [
        f"\nPredicted: {model.n_layers} layers of width {model.dim}, {where}, {setting.parts} micro-batches a rank",
        f"  {'recipe':<14}{'GEMMs':<10}{'s a step':>10}{'s a layer':>11}{'s beside':>10}{'optimizer':>11}{'memory':>10}",
    ]
    for p in found:
        memory = f"{p.bytes / GB:>7.1f} GB" if p.bytes is not None else f"{'':>10}"
        times = f"{p.seconds:>10.3f}{p.layer_seconds:>11.4f}{p.rest_seconds:>10.4f}{p.optimizer_seconds:>11.4f}"
        lines.append(f"  {p.recipe:<14}{p.path:<10}{times}{memory}")
    lines += ["Hours of this machine at most (whole budgets, with evaluations):"]
    for h in hours(found, setting):
        assumed = f"; {h.assumed} arms counted at the slowest recipe's time" if h.assumed else ""
        lines.append(f"  {h.tier:<8}{h.arms:>4} arms {h.hours:>9.3g} h, in all {h.hours_in_all:.3g} h{assumed}")
    lines += ["Published:", *(f"  {line}" for line in published(found))]
    if faster := advice(rows):
        lines += ["Faster than the scale's own choice:", *(f"  {line}" for line in faster)]
    if late := [row["name"] for row in rows if row.get("not_reached")]:
        lines.append(f"Not reached in the time: {'; '.join(late)}")
    answer = verdict(rows, found, setting)
    lines.append("GO" if answer.go else "NO-GO")
    lines += [f"  {'ok' if holds else 'NO'}: {reason}" for holds, reason in answer.reasons]
    return "\n".join(lines)
