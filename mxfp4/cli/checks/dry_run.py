"""What a plan will take before any of it runs: time, memory of a GPU, disk, what is there already, what cannot fit.

Computed on any machine. Step times come from the store's records of the same scale, else, for Llama 3.1-8B, from
public logs (`published.mlperf_results`, marked so); an arm with neither is "unknown". Memory is `memory_check`'s, disk
is counted from the configuration. `dry_run_text` prints it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mxfp4.analysis import published
from mxfp4.data.packing_state import Packing, state_of
from mxfp4.errors import UserError
from mxfp4.studies.devices import check, no_gpu
from mxfp4.studies.memory_check import (
    GB,
    P1_GPUS,
    STAGED,
    Machine,
    machine_for,
    memories,
    staged,
    too_large,
    too_much_staged,
)  # fmt: skip
from mxfp4.studies.plans import BASES, TIERS, ArmStatus, Plan, device_seconds, steps_worth, tier_of
from mxfp4.studies.store import Store
from mxfp4.training import weights
from mxfp4.training.checkpoints import checkpoint
from mxfp4.training.checkpoints.durable_files import free_space
from mxfp4.training.config import TrainConfig
from mxfp4.training.execution.choices import Execution
from mxfp4.training.memory import Memory

LOGGED = {"fp8": "FP8", "mxfp4+h16": "MXFP4 + H16"}
"""Recipes that the public logs timed, as the logs call them."""
WEIGHTS = 4
"""Bytes of a parameter in kept weights: FP32."""
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
    """The rest of its budget at that step time, with its evaluations; arms that share a GPU share its hours."""


@dataclass(frozen=True)
class Tier:
    """One of `plans.TIERS`: what is left of it, at most."""

    name: str
    arms: int
    left: int
    """Arms without a record."""
    gpu_hours: float
    gpu_hours_in_all: float
    """With those of the tiers before."""
    assumed: int
    """Arms of which no step time is known, counted at FP8's logged one."""


@dataclass(frozen=True)
class DryRun:
    """The answer. `problems` is what cannot fit, one line each."""

    plan: Plan
    machine: Machine
    costs: tuple[Cost, ...]
    memory: tuple[tuple[TrainConfig, Memory], ...]
    """One arm of each recipe and model, the largest first."""
    at_a_time: int
    """Arms that share a GPU, a group of them, or the CPU."""
    packings: tuple[Packing, ...]
    disk: tuple[tuple[str, float], ...]
    """(what, bytes still to be written)."""
    free: float
    staging: float
    """Bytes of host memory that hold checkpoints while they are written."""
    ranks: int
    """GPUs of an arm, or processes on the CPU."""
    problems: tuple[str, ...]


def dry_run(
    plan: Plan, store: Store, *, gpus: int | None = None, memory_gb: float | None = None, keep_weights: bool = False
) -> DryRun:
    """Look, compute, change nothing.

    gpus: None is this machine's, or P1's 8 for scale mi355x; 0 the CPU. memory_gb: of one GPU, instead of this
    machine's. keep_weights: as in training. UserError for what training would refuse.
    """
    if plan.scale.jobs < 1:
        raise UserError(f"jobs={plan.scale.jobs} must be at least 1")
    machine = machine_for(plan.scale.name, gpus, memory_gb)
    device = "cuda" if machine.gpus else "cpu"
    plan = replace(plan, scale=plan.scale.on_device(device))
    execution = Execution(**plan.scale.execution())
    status = plan.status(store, device)
    if keep_weights:
        status = [_for_weights(a, store, device) for a in status]
    left = [a.config for a in status if not a.done]
    ranks = plan.scale.ranks_on(machine.gpus)
    execution.check_ranks(ranks)
    if machine.gpus:
        check(ranks, machine.gpus)
    memory = memories(left, plan.scale, machine, ranks)
    at_a_time = plan.scale.jobs
    packings = tuple(
        state_of(c, v, append_eod=e) for c, v, e in sorted({(a.corpus, a.model.vocab_size, a.append_eod) for a in left})
    )
    running = at_a_time * max(machine.gpus // ranks, 1)
    disk = _disk(left, packings, running, keep_weights, plan.scale.checkpoint_minutes)
    free = free_space(store.root)
    staging = staged(left, machine, running)
    problems = [
        *_no_gpu(plan, machine), *too_large(memory, plan.scale, machine, at_a_time), *too_much_staged(staging, machine),
        *_too_full(disk, free, store.root, machine),
    ]  # fmt: skip
    return DryRun(
        plan, machine, costs_of(status, ranks), tuple(memory), at_a_time, packings, tuple(disk), free,
        staging, ranks, tuple(problems),
    )  # fmt: skip


def _for_weights(arm: ArmStatus, store: Store, device: str) -> ArmStatus:
    """An arm whose weights are wanted: it is not done without them, whatever it has a record of."""
    if not arm.done or weights.kept(store.weights_dir(arm.config, device)):
        return arm
    step = checkpoint.latest_step(store.checkpoint_dir(arm.config, device)) or 0
    rest = device_seconds(arm.record) * (1 - step / max(arm.record.outcome["step"], 1))
    return ArmStatus(arm.config, None, step, max(rest, 0.0), BASES[0])


def costs_of(arms: Sequence[ArmStatus], ranks: int) -> tuple[Cost, ...]:
    """What each arm takes on `ranks` GPUs together."""
    return tuple(_cost(arm, ranks) for arm in arms)


def tiers(plan: Plan, costs: Sequence[Cost]) -> list[Tier]:
    """The tiers of a plan that has arms of several, in order; none where the scale has no tiers."""
    found: list[Tier] = []
    total = 0.0
    for name in TIERS:
        mine = [c for c in costs if tier_of(c.arm.config, plan.scale) == name]
        left = [c for c in mine if not c.arm.done]
        hours = budget_hours(left)
        if not mine or hours is None:
            continue
        total += hours
        found.append(Tier(name, len(mine), len(left), hours, total, sum(c.gpu_hours_left is None for c in left)))
    return found


def _cost(arm: ArmStatus, ranks: int) -> Cost:
    config = arm.config
    if arm.done:
        return Cost(arm, None, "done", None, 0.0)
    rest = config.steps - arm.step
    if arm.seconds is not None and rest:
        return Cost(arm, arm.seconds / rest / ranks, "records of this scale", None, arm.seconds / 3600)
    logged = published.mlperf_results().set_index("arm")
    name = LOGGED.get(config.recipe)
    if config.scale == "mi355x" and name:
        row = logged.loc[name]
        hours = row["minutes"] / 60 * P1_GPUS if config.target_loss == published.TARGET else None
        per_step = row["seconds_per_step"] * P1_GPUS
        source = f"{row['source']} ({row['mark']})" + (f", scaled from {P1_GPUS} GPUs" if ranks != P1_GPUS else "")
        return Cost(arm, per_step / ranks, source, hours, per_step * steps_worth(config, arm.step) / 3600)
    return Cost(arm, None, "unknown", None, None)


def budget_hours(costs: Sequence[Cost]) -> float | None:
    """GPU-hours at most of what is left, an arm without a step time of its own at FP8's logged one (scale mi355x); None
    where that is not known."""
    total, fp8 = 0.0, published.mlperf_results().set_index("arm").loc["FP8", "seconds_per_step"]
    for c in costs:
        if c.gpu_hours_left is None and c.arm.config.scale != "mi355x":
            return None
        assumed = steps_worth(c.arm.config, c.arm.step) * fp8 * P1_GPUS / 3600
        total += assumed if c.gpu_hours_left is None else c.gpu_hours_left
    return total


def with_seeds(result: DryRun, seeds: Sequence[int]) -> list[Cost]:
    """What the result's arms would cost with other seeds, from nothing: each as its arm, where that is known."""
    found = {}
    for c in result.costs:
        for seed in seeds:
            config = replace(c.arm.config, seed=seed, probe_steps=())
            known = device_seconds(c.arm.record) if c.arm.record else c.arm.seconds
            if known is not None and c.arm.step and not c.arm.record:
                known *= config.steps / max(config.steps - c.arm.step, 1)
            found[config] = _cost(ArmStatus(config, None, 0, known), result.ranks)
    return list(found.values())


def _disk(
    left: Sequence[TrainConfig], packings: Sequence[Packing], running: int, keep_weights: bool, minutes: float
) -> list[tuple[str, float]]:
    """What will still be written, at its highest."""
    rows = [(f"packed tokens of {p.corpus}", p.bytes_left) for p in packings if p.bytes_left]
    if left:
        sizes = sorted((float(STAGED) * c.model.n_params() for c in left), reverse=True)[:running]
        kept = checkpoint.KEEP + 1
        name = (
            f"checkpoints: {kept} of {STAGED} bytes a parameter for each arm in work ({len(sizes)}), the largest "
            f"{sizes[0] / GB:.3g} GB; one every {minutes:g} min at most, and only where it has room"
        )
        rows.append((name, kept * sum(sizes)))
        if keep_weights:
            rows.append(
                (f"weights: {WEIGHTS} bytes a parameter", float(sum(WEIGHTS * c.model.n_params() for c in left)))
            )
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
        "set MXFP4_RUNS to a larger disk, or take fewer shards of C4 (make reproduce SCALE=mi355x CORPUS=c4:768-799)"
    ]
