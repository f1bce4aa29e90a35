"""What a plan will take before any of it runs: time, memory of a GPU, disk, what is there already, what cannot fit.

Computed on any machine. Step times come from the store's records of the same scale, else, for Llama 3.1-8B, from
public logs (`published.mlperf_results`, marked so); an arm with neither is "unknown". Memory is `training.memory`'s
estimate, disk is counted from the configuration.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mxfp4.errors import UserError
from mxfp4.experiments import published
from mxfp4.experiments.places import check, idle, no_gpu
from mxfp4.experiments.plan import ArmStatus, Plan
from mxfp4.experiments.room import (
    GB, P1_GPUS, PROCESS_BYTES, Machine, machine_for, memories, needed, staged, too_large, too_much_staged,
)  # fmt: skip
from mxfp4.experiments.store import Store
from mxfp4.experiments.study import count
from mxfp4.training import checkpoint
from mxfp4.training.config import TrainConfig
from mxfp4.training.memory import Memory
from mxfp4.training.packing_state import Packing, state_of
from mxfp4.training.recompute import check_every

LOGGED = {"fp8": "FP8", "mxfp4+h16": "MXFP4 + H16"}
"""Recipes that the public logs timed, as the logs call them."""
RECORD_BYTES_PER_STEP = 64
"""A step's row in a record's compressed tables."""


@dataclass(frozen=True)
class Cost:
    """What one arm takes."""

    arm: ArmStatus
    seconds_per_step: float | None
    source: str
    """Where the step time is from, with its mark; "unknown" without one."""
    gpu_hours_to_target: float | None
    """As logged, evaluations included; None without a log."""
    gpu_hours_left: float | None
    """The rest of its budget at that step time; arms that share a GPU share its hours."""


@dataclass(frozen=True)
class DryRun:
    """The answer. `problems` is what cannot fit, one line each."""

    plan: Plan
    machine: Machine
    costs: tuple[Cost, ...]
    memory: tuple[tuple[TrainConfig, Memory], ...]
    """One arm for each different estimate, the largest first."""
    at_a_time: int
    """Arms that share a GPU, a group of them, or the CPU."""
    packings: tuple[Packing, ...]
    disk: tuple[tuple[str, float], ...]
    """(what, bytes still to be written)."""
    free: float
    problems: tuple[str, ...]


def dry_run(
    plan: Plan, store: Store, *, gpus: int | None = None, memory_gb: float | None = None,
    recompute_every: int | None = None,
) -> DryRun:  # fmt: skip
    """Look, compute, change nothing.

    gpus: None is this machine's, or P1's 8 for scale mi355x; 0 the CPU. memory_gb: of one GPU, instead of this
    machine's. recompute_every: activation checkpointing of every n-th block (None: the scale's own). UserError for what
    training would refuse.
    """
    if plan.scale.jobs < 1:
        raise UserError(f"jobs={plan.scale.jobs} must be at least 1")
    every = plan.scale.recompute_every if recompute_every is None else recompute_every
    check_every(every)
    machine = machine_for(plan.scale.name, gpus, memory_gb)
    device = "cuda" if machine.gpus else "cpu"
    status = plan.status(store, device)
    left = [a.config for a in status if not a.done]
    ranks = plan.scale.ranks_on(machine.gpus)
    if machine.gpus:
        check(ranks, machine.gpus)
    memory = memories(left, plan.scale, machine, ranks, every)
    at_a_time = plan.scale.jobs
    packings = tuple(state_of(c, v) for c, v in sorted({(a.corpus, a.model.vocab_size) for a in left}))
    running = at_a_time * max(machine.gpus // ranks, 1)
    disk = _disk(left, packings, running)
    folder = next(p for p in (store.root, *store.root.parents) if p.exists())
    free = float(shutil.disk_usage(folder).free)
    staging = staged(left, plan.scale, machine, running)
    problems = [
        *_no_gpu(plan, machine), *too_large(memory, machine, at_a_time), *too_much_staged(staging, machine),
        *_too_full(disk, free, folder, machine),
    ]  # fmt: skip
    return DryRun(
        plan, machine, tuple(_cost(a, ranks) for a in status), tuple(memory), at_a_time, packings, tuple(disk), free,
        tuple(problems),
    )  # fmt: skip


def _cost(arm: ArmStatus, ranks: int) -> Cost:
    config = arm.config
    if arm.done:
        return Cost(arm, None, "done", None, 0.0)
    rest = config.steps - arm.step
    if arm.seconds is not None and rest:
        return Cost(arm, arm.seconds / rest, "records of this scale", None, arm.seconds * ranks / 3600)
    logged = published.mlperf_results().set_index("arm")
    name = LOGGED.get(config.recipe)
    if config.scale == "mi355x" and name:
        row = logged.loc[name]
        hours = row["minutes"] / 60 * P1_GPUS if config.target_loss == published.TARGET else None
        per_step = row["seconds_per_step"]
        return Cost(arm, per_step, f"{row['source']} ({row['mark']})", hours, rest * per_step * P1_GPUS / 3600)
    return Cost(arm, None, "unknown", None, None)


def _disk(left: Sequence[TrainConfig], packings: Sequence[Packing], running: int) -> list[tuple[str, float]]:
    """What will still be written, at its highest."""
    rows = [(f"packed tokens of {p.corpus}", p.bytes_left) for p in packings if p.bytes_left]
    if left:
        sizes = sorted((12.0 * c.model.n_params() for c in left), reverse=True)[:running]
        kept = checkpoint.KEEP + 1
        name = f"checkpoints: {kept} of 12 bytes a parameter for each arm in work ({len(sizes)})"
        rows.append((name, kept * sum(sizes)))
        rows.append(("records", float(sum(RECORD_BYTES_PER_STEP * c.steps + 50_000 for c in left))))
    return rows


def _no_gpu(plan: Plan, machine: Machine) -> list[str]:
    return [] if machine.gpus or not plan.scale.needs_gpu else [f"device: {no_gpu(plan.scale, 'cpu')}"]


def _too_full(disk, free: float, folder: Path, machine: Machine) -> list[str]:
    need = sum(size for _, size in disk)
    if need <= free or not machine.here:
        return []
    return [
        f"disk: {need / GB:.1f} GB are still to be written and {free / GB:.1f} GB are free for {folder}: make room, "
        "set MXFP4_RUNS to a larger disk, or take fewer shards of C4 (--corpus c4:768-799)"
    ]


def text(result: DryRun) -> str:
    """The answer as it is printed."""
    parts = [_head(result), _arms(result), _memory_text(result), _disk_text(result), _there(result)]
    where = "" if result.machine.here else " on such a machine, which this is not"
    verdict = [f"cannot run: {p}" for p in result.problems] or [f"nothing found that keeps it from running{where}"]
    return "\n\n".join([*parts, "\n".join(verdict)])


def _head(r: DryRun) -> str:
    scale, machine = r.plan.scale, r.machine
    model = scale.model
    size = "memory unknown (--gpu-memory GB says)" if machine.memory is None else f"{machine.memory / GB:.0f} GB each"
    where = f"{machine.gpus} x {machine.what}, {size}" if machine.gpus else f"CPU, {machine.memory / GB:.0f} GB"
    lines = [
        f"plan {r.plan.name} at scale {scale.name}: {len(r.costs)} arms, nothing is run",
        f"machine    {where}",
        f"model      {count(model.n_params())} parameters, sequence {scale.seq_len}, batch {scale.batch_size}, "
        f"{count(scale.batch_size * scale.seq_len)} tokens a step",
        f"FP4 path   {machine.path}",
        f"FP8 path   {machine.fp8_path}",
        *([f"an arm     on {ranks} GPUs together"] if (ranks := scale.ranks_on(machine.gpus)) > 1 else []),
        *([f"unused     {unused}"] if (unused := machine.gpus and idle(scale, machine.gpus)) else []),
    ]
    return "\n".join(lines)


def _arms(r: DryRun) -> str:
    groups: dict[tuple, list[Cost]] = {}
    for c in r.costs:
        config = c.arm.config
        groups.setdefault((config.recipe, config.model, config.corpus, config.steps), []).append(c)
    width = max(len(recipe) for recipe, *_ in groups)
    sized = len({model for _, model, *_ in groups}) > 1
    lines = [f"{'arm':<{width}}  {'weights  ' * sized}seeds  done  tokens each  s/step   GPU-hours for what is left"]
    for (recipe, model, *_), costs in groups.items():
        done = sum(c.arm.done for c in costs)
        left = [c for c in costs if not c.arm.done]
        size = f"{count(model.n_params_non_embedding()):<9}" if sized else ""
        row = f"{recipe:<{width}}  {size}{len(costs):<5}  {done:<4}  {count(costs[0].arm.config.tokens):<11}  "
        lines.append((row + _time_text(left)).rstrip())
    left = [c for c in r.costs if not c.arm.done]
    known = [c for c in left if c.gpu_hours_left is not None]
    tokens = sum((c.arm.config.steps - c.arm.step) * c.arm.config.tokens_per_step for c in left)
    lines.append(
        f"left: {len(left)} arms, {count(tokens)} tokens at most; {len(known)} with a known step time: "
        f"{sum(c.gpu_hours_left for c in known):.3g} GPU-hours at most; unknown: {len(left) - len(known)}"
    )
    if any("(log)" in c.source for c in known):
        logged = published.mlperf_results().set_index("arm")
        fp8 = logged.loc["FP8", "seconds_per_step"]
        if len(known) < len(left):
            total = sum((c.arm.config.steps - c.arm.step) * fp8 * P1_GPUS / 3600 for c in left)
            lines.append(
                f"if every arm ran its budget at FP8's logged {fp8:g} s a step: {total:.3g} GPU-hours (assumed)"
            )
        emulated = r.machine.path == "emulated"
        ours = "this GPU emulates FP4 and takes longer" if emulated else "this software's own are unknown"
        lines.append(
            f"logged step times are of AMD's own software on {P1_GPUS} x MI355X with native FP4, "
            f"batch {published.BATCH}; {ours}"
        )
    return "\n".join(lines)


def _time_text(left: Sequence[Cost]) -> str:
    """Seconds a step and GPU-hours of the seeds of an arm that are left."""
    if not left:
        return ""
    if any(c.gpu_hours_left is None for c in left):
        return "unknown  unknown"
    begun = sum(bool(c.arm.step) for c in left)
    hours = f"{sum(c.gpu_hours_left for c in left):.3g} at most"
    if all(c.gpu_hours_to_target is not None for c in left) and not begun:
        hours = f"{sum(c.gpu_hours_to_target for c in left):.3g} to the target, {hours}"
    return f"{left[0].seconds_per_step:<7.3g}  {hours} ({left[0].source})" + (f", {begun} begun" if begun else "")


def _memory_text(r: DryRun) -> str:
    unit = "GPU" if r.machine.gpus else "process"
    if not r.memory:
        return f"memory of a {unit}: nothing left to run"
    lines = []
    for i, (config, m) in enumerate(r.memory):
        need = needed(m, r.machine, r.at_a_time)
        shared = f", {r.at_a_time} arms at a time: {need / GB:.2f} GB" if r.at_a_time > 1 else ""
        title = f"{config.recipe}, {count(config.model.n_params())} parameters"
        head = "" if i else f"memory of a {unit}: "
        lines.append(f"{head}{title}: peak {m.peak / GB:.2f} GB ({m.worst.name}){shared}")
        if i == 0:
            lines += [f"  {t.bytes / GB:>9.3f} GB  {t.name}  [{t.formula}]" for t in m.terms]
            if m.block:
                lines.append("  of which one block keeps:")
                lines += [f"    {t.bytes / GB:>9.3f} GB  {t.name}  [{t.formula}]" for t in m.block]
            beside = m.reserve if r.machine.gpus else PROCESS_BYTES
            lines.append(f"  {beside / GB:>9.3f} GB  beside it: context, fragmentation [assumed]")
            lines.append(f"  {(m.peak + beside) / GB:>9.3f} GB  needed")
            others = (f"{x.name} {(m.always.bytes + x.bytes) / GB:.2f}" for x in m.moments if x is not m.worst)
            lines.append(f"  other moments, GB: {', '.join(others)}")
    return "\n".join(lines)


def _disk_text(r: DryRun) -> str:
    total = sum(size for _, size in r.disk)
    where = "" if r.machine.here else " here, which is not the machine meant"
    lines = [f"disk: {total / GB:.3g} GB still to be written, {r.free / GB:.3g} GB free{where}"]
    return "\n".join([*lines, *(f"  {size / GB:>9.3f} GB  {name}" for name, size in r.disk)])


def _there(r: DryRun) -> str:
    lines = [f"corpus {p.corpus} ({p.vocab_size} ids): {p.text}" for p in r.packings]
    done = sum(c.arm.done for c in r.costs)
    begun = sum(bool(c.arm.step) for c in r.costs)
    lines.append(f"records: {done} of {len(r.costs)} arms, {begun} begun")
    return "\n".join(["already there:", *(f"  {line}" for line in lines)])
