"""A dry run as it is printed: arms and hours, memory, disk, what is there, what keeps it from running."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from mxfp4.analysis import published
from mxfp4.analysis.claims import load_ledger
from mxfp4.cli.checks.dry_run import Cost, DryRun, Tier, budget_hours, tiers, with_seeds
from mxfp4.errors import UserError
from mxfp4.studies.devices import idle
from mxfp4.studies.memory_check import GB, P1_GPUS, PROCESS_BYTES, STAGED, needed
from mxfp4.text import count
from mxfp4.training.execution.choices import Execution


def text(result: DryRun) -> str:
    """The answer as it is printed."""
    parts = [
        _head(result), "\n".join([_arms(result), *_seeds(result)]),
        *tiers_text(tiers(result.plan, result.costs), result.machine.gpus), _memory_text(result), _disk_text(result),
        _there(result),
    ]  # fmt: skip
    where = "" if result.machine.here else " on such a machine, which this is not"
    verdict = [f"cannot run: {p}" for p in result.problems] or [f"nothing found that keeps it from running{where}"]
    return "\n\n".join([*parts, "\n".join(verdict)])


def as_json(r: DryRun) -> dict[str, Any]:
    """The answer as plain data: bytes, seconds and GPU-hours; None where something is not known."""
    return {
        "plan": r.plan.name,
        "scale": r.plan.scale.name,
        "machine": asdict(r.machine),
        "ranks_an_arm": r.ranks,
        "arms_at_a_time": r.at_a_time,
        "execution": {**r.plan.scale.execution(), "checkpoint_minutes": r.plan.scale.checkpoint_minutes},
        "arms": [
            {
                "recipe": c.arm.config.recipe,
                "seed": c.arm.config.seed,
                "corpus": c.arm.config.corpus,
                "weights": c.arm.config.model.n_params_non_embedding(),
                "tokens": c.arm.config.tokens,
                "done": c.arm.done,
                "step": c.arm.step,
                "steps": c.arm.config.steps,
                "seconds_per_step": c.seconds_per_step,
                "source": c.source,
                "gpu_hours_left": c.gpu_hours_left,
                "gpu_hours_to_target": c.gpu_hours_to_target,
            }
            for c in r.costs
        ],
        "tiers": [asdict(tier) for tier in tiers(r.plan, r.costs)],
        "memory": [
            {
                "recipe": config.recipe,
                "weights": config.model.n_params_non_embedding(),
                "peak_bytes": memory.peak,
                "reserve_bytes": memory.reserve,
            }
            for config, memory in r.memory
        ],
        "packings": [asdict(p) for p in r.packings],
        "disk_bytes": dict(r.disk),
        "disk_free_bytes": r.free,
        "host_bytes": r.staging,
        "problems": list(r.problems),
    }


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
        *([f"execution  {chosen}"] if (chosen := _execution(r)) else []),
        *([f"an arm     on {ranks} GPUs together"] if (ranks := scale.ranks_on(machine.gpus)) > 1 else []),
        *([f"unused     {unused}"] if (unused := machine.gpus and idle(scale, machine.gpus)) else []),
    ]
    return "\n".join(lines)


def _execution(r: DryRun) -> str:
    """The choices of `Execution` beside the default, and how gradients are reduced where that is chosen."""
    chosen = Execution(**r.plan.scale.execution()).recorded()
    if dtypes := {c.arm.config.reduce_dtype for c in r.costs} - {"float32"}:
        chosen["reduce_dtype"] = ", ".join(sorted(dtypes))
    return ", ".join(f"{name}={value}" for name, value in chosen.items())


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
    hours = sum(c.gpu_hours_left for c in known)
    lines.append(
        f"left: {len(left)} arms, {count(tokens)} tokens at most; {len(known)} with a known step time: {_number(hours)} "
        f"GPU-hours at most, evaluations included{_days(r, hours, len(known))}; unknown: {len(left) - len(known)}"
    )
    if any("(log)" in c.source for c in known):
        fp8 = published.mlperf_results().set_index("arm").loc["FP8", "seconds_per_step"]
        if len(known) < len(left):
            total = budget_hours(left)
            lines.append(
                f"if every arm without one ran its budget at FP8's logged {fp8:g} s a step: {_number(total)} GPU-hours"
                f"{_days(r, total, len(left))} (assumed)"
            )
        emulated = r.machine.path == "emulated"
        ours = "this GPU emulates FP4 and takes longer" if emulated else "this software's own are unknown"
        lines.append(
            f"logged step times are of AMD's own software on {P1_GPUS} x MI355X with native FP4, "
            f"batch {published.BATCH}; {ours}"
        )
    return "\n".join(lines)


def tiers_text(found: Sequence[Tier], gpus: int) -> list[str]:
    """A table of the tiers, in a list; empty without tiers. gpus: of a node."""
    if not found:
        return []
    gpus = gpus or P1_GPUS
    heads = ("tier", "arms", "left", "GPU-hours", "GPU-hours in all", f"hours of {gpus} GPUs in all")
    rows = [
        (t.name, str(t.arms), str(t.left), *map(_number, (t.gpu_hours, t.gpu_hours_in_all, t.gpu_hours_in_all / gpus)))
        for t in found
    ]
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    lines = [
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (heads, *rows)
    ]
    if assumed := sum(t.assumed for t in found):
        lines.append(f"at most; {assumed} arms without a step time count at FP8's logged one (assumed)")
    return ["\n".join(lines)]


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _days(r: DryRun, hours: float, arms: int) -> str:
    """How long that takes by the clock, on the devices that so many arms keep busy."""
    if not r.machine.gpus or not arms:
        return ""
    groups = min(r.machine.gpus // r.ranks, math.ceil(arms / r.at_a_time))
    gpus = groups * r.ranks
    days = hours / gpus / 24
    return f", {days:.3g} days on {gpus} GPU{'s' if gpus > 1 else ''}"


def _seeds(r: DryRun) -> list[str]:
    """A line where claims about these arms cannot be decided for want of seeds alone, with what would and its cost."""
    try:
        claims = load_ledger()
    except UserError:  # installed without the book
        return []
    config = r.costs[0].arm.config
    arms: dict[str, set[int]] = {}
    for a in (c.arm.config for c in r.costs):
        if (a.model, a.corpus) == (config.model, config.corpus):
            arms.setdefault(a.recipe, set()).add(a.seed)
    have = {"parameters": config.model.n_params_non_embedding(), "tokens": config.tokens}
    kinds = {"source": config.corpus == "synthetic", "model": bool(config.model.n_experts)}
    short = []
    for claim in claims:
        needs = claim.needs
        about = kinds == {"source": needs.get("source") == "synthetic", "model": needs.get("model") == "experts"}
        enough = all(needs.get(name, 0) <= size for name, size in have.items())
        native = needs.get("path", r.machine.path) == r.machine.path
        if not (claim.arms and set(claim.arms) <= arms.keys() and about and enough and native):
            continue
        if min(len(arms[arm]) for arm in claim.arms) < needs.get("seeds", 1):
            short.append(claim)
    if not short:
        return []
    need = max(claim.needs["seeds"] for claim in short)
    wanted = tuple(range(need))
    hours = budget_hours(with_seeds(r, wanted))
    cost = "" if hours is None else f", {_number(hours)} GPU-hours at most in all{_days(r, hours, need * len(arms))}"
    own = ", ".join(map(str, sorted(set.intersection(*arms.values()))))
    options = " ".join(f"--seed {seed}" for seed in wanted)
    return [
        f'seeds: with {own} alone {len(short)} claims about these arms stay "not tested at this scale"; they need '
        f"{need} seeds of an arm ({options}{cost})"
    ]


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
    same: dict[tuple, list] = {}
    for config, m in r.memory:  # arms that need the same share a line
        same.setdefault((config.model, round(m.peak / GB, 2), m.worst.name), []).append((config, m))
    for i, ((model, *_), found) in enumerate(same.items()):
        m = found[0][1]
        need = needed(m, r.machine, r.at_a_time)
        shared = f", {r.at_a_time} arms at a time: {need / GB:.2f} GB" if r.at_a_time > 1 else ""
        title = f"{', '.join(config.recipe for config, _ in found)}, {count(model.n_params())} parameters"
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
    if r.staging:
        has = "" if r.machine.host is None else f" of {r.machine.host / GB:.0f} GB"
        lines.append(
            f"memory of the host: {r.staging / GB:.1f} GB{has}, pinned, for checkpoints in writing ({STAGED} bytes a "
            "parameter, shared by the ranks of a node)"
        )
    return "\n".join(lines)


def _disk_text(r: DryRun) -> str:
    total = sum(size for _, size in r.disk)
    where = "" if r.machine.here else " here, which is not the machine meant"
    lines = [f"disk: {_number(total / GB)} GB still to be written, {_number(r.free / GB)} GB free{where}"]
    return "\n".join([*lines, *(f"  {size / GB:>9.3f} GB  {name}" for name, size in r.disk)])


def _there(r: DryRun) -> str:
    lines = [f"corpus {p.corpus} ({p.vocab_size} ids): {p.text}" for p in r.packings]
    done = sum(c.arm.done for c in r.costs)
    begun = sum(bool(c.arm.step) for c in r.costs)
    lines.append(f"records: {done} of {len(r.costs)} arms, {begun} begun")
    return "\n".join(["already there:", *(f"  {line}" for line in lines)])
