"""Room: the memory that arms need of a GPU and of its host, and whether a machine has it.

The same answer for a dry run and before training, which refuses what cannot fit rather than let an allocator or the
kernel's OOM killer end it hours later. GPU memory, and the CPU's, is `training.memory`'s estimate. The host of GPUs
holds a copy of what a checkpoint takes while it is written beside the training, in pinned memory
(`training.checkpoints.dcp_folder`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from mxfp4.errors import UserError
from mxfp4.numerics.gemm_backends.choice import matmul_path
from mxfp4.numerics.native import PATHS, fp8_path
from mxfp4.studies.scales import Scale
from mxfp4.training.config import TrainConfig
from mxfp4.training.execution.choices import Execution
from mxfp4.training.memory import Memory, estimate

GB = 1e9
P1_GPUS = 8
MI355X_BYTES = 288 * GB
"""Memory of one MI355X (vendor's figure)."""
PROCESS_BYTES = 0.6 * GB
"""Assumed: an interpreter with PyTorch loaded; scale cpu has one for each arm at a time."""
STAGED = 12
"""Bytes of a parameter in a checkpoint: FP32, and AdamW's two moments."""
CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@dataclass(frozen=True)
class Machine:
    """What a plan would run on."""

    gpus: int
    """0: the CPU."""
    memory: float | None
    """Bytes of one GPU (of the machine, for the CPU); None when not known."""
    what: str
    here: bool
    """Whether that is this machine, so that its disk counts."""
    path: str
    """native, emulated: how it multiplies FP4."""
    fp8_path: str
    """The same of FP8 with one scale a tensor."""
    host: float | None = None
    """Bytes of its own memory; None when not known."""


def machine_for(scale: str, gpus: int | None, memory_gb: float | None) -> Machine:
    """The machine that is meant: this one's GPUs, or P1's for scale mi355x without any. UserError for a number of GPUs
    or GB that no machine has."""
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus is not None and gpus < 0:
        raise UserError(f"gpus={gpus} must be 0 (the CPU) or more")
    if memory_gb is not None and not 0 < memory_gb < math.inf:
        raise UserError(f"gpu_memory={memory_gb:g} must be a positive number of GB")
    given = None if memory_gb is None else memory_gb * GB
    if gpus == 0 or (gpus is None and not there and scale == "cpu"):
        return Machine(0, given or ram(), "CPU", True, matmul_path("cpu"), fp8_path("cpu"), ram())
    if there:
        found = torch.cuda.get_device_properties(0)
        size, paths = given or found.total_memory, (matmul_path("cuda"), fp8_path("cuda"))
        return Machine(gpus or there, size, found.name, True, *paths, ram())
    if scale == "mi355x":
        return Machine(gpus or P1_GPUS, given or MI355X_BYTES, "MI355X (not this machine)", False, *PATHS[0])
    return Machine(gpus or 1, given, "GPU (not this machine)", False, *PATHS[-1])


def ram() -> float:
    """Bytes of memory that a process here can have: the machine's, or less where a container allows less."""
    sizes = [float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))]
    for name in CGROUP_LIMITS:
        try:
            sizes.append(float(Path(name).read_text()))
        except (OSError, ValueError):  # no such kind of limit, or "max"
            continue
    return min(sizes)


def memories(
    configs: Iterable[TrainConfig], scale: Scale, machine: Machine, ranks: int
) -> list[tuple[TrainConfig, Memory]]:
    """The estimate for each recipe and model in `configs`, trained as `scale` says on so many ranks, the largest first.
    UserError where its batch cannot be dealt to them, or `scale` cannot be executed on them."""
    Execution(**scale.execution()).check_ranks(ranks)
    device = "cuda" if machine.gpus else "cpu"
    captured = scale.capture and device == "cuda" and ranks == 1
    found = {}
    for config in configs:
        sizes = config.seq_len, config.batch_size, config.micro_batches, config.eval_sequences, config.reduce_dtype
        if (kind := (config.recipe, config.model, sizes)) not in found:
            e = estimate(
                config, ranks=ranks, device=device, compiled=scale.compile, recompute_every=scale.recompute_every,
                captured=captured, native=machine.path == "native", fp8=machine.fp8_path == "native",
                attention=scale.attention, cross_entropy=scale.cross_entropy,
                reshard_after_forward=scale.reshard_after_forward, weights_once=scale.weights_once,
            )  # fmt: skip
            found[kind] = config, e
    return sorted(found.values(), key=lambda pair: -pair[1].peak)


def needed(memory: Memory, machine: Machine, at_a_time: int) -> float:
    """Bytes that the device must have for so many arms."""
    beside = memory.reserve if machine.gpus else PROCESS_BYTES
    return at_a_time * (memory.peak + beside)


def staged(configs: Iterable[TrainConfig], machine: Machine, running: int) -> float:
    """Bytes of the host's memory that hold the checkpoints in writing of `running` arms, on the ranks of one node."""
    if not machine.gpus:
        return 0.0
    sizes = sorted((float(STAGED * c.model.n_params()) for c in configs), reverse=True)
    return sum(sizes[:running])


def too_large(found: Sequence[tuple[TrainConfig, Memory]], scale: Scale, machine: Machine, at_a_time: int) -> list[str]:
    """A line where the largest of `found` does not fit, with what would help; at_a_time: arms that share a device."""
    if not found or machine.memory is None:
        return []
    config, largest = found[0]
    need = needed(largest, machine, at_a_time)
    if need <= machine.memory:
        return []
    what = f"each {machine.what.split(' (')[0]}" if machine.gpus else "the CPU's memory"
    sharing = f" for {at_a_time} arms at a time" if at_a_time > 1 else ""
    helps = {
        "more GPUs (--gpus)": machine.gpus and scale.spread,
        "fewer arms at a time (--jobs)": at_a_time > 1,
        "--recompute-every 1": scale.recompute_every != 1,
        "--reshard-after-forward --no-weights-once": not scale.reshard_after_forward,
    }
    use = " or ".join(way for way, helping in helps.items() if helping)
    line = (
        f"memory: {config.recipe} needs {need / GB:.1f} GB of {what}{sharing}, which has {machine.memory / GB:.1f} GB"
    )
    return [f"{line}: use {use}" if use else line]


def too_much_staged(need: float, machine: Machine) -> list[str]:
    """A line where the host cannot hold what is staged."""
    if machine.host is None or need <= machine.host:
        return []
    return [
        f"host memory: {need / GB:.1f} GB hold the checkpoints in writing ({STAGED} bytes a parameter, pinned), and "
        f"the machine has {machine.host / GB:.1f} GB: use fewer arms at a time (--jobs) or nodes with more"
    ]


def check_room(
    configs: Sequence[TrainConfig], scale: Scale, device: torch.device, *, ranks: int, at_a_time: int, gpus: int,
    nodes: int = 1,
) -> None:  # fmt: skip
    """Raises UserError, one line with the numbers, where `configs` cannot be trained on this machine.

    device: of one rank. ranks: of an arm, over all `nodes`. at_a_time: arms that share a device. gpus: those used here.
    """
    if device.type == "cuda":
        about = torch.cuda.get_device_properties(device)
        machine = Machine(gpus, about.total_memory, about.name, True, matmul_path(device), fp8_path(device), ram())
        sharing = at_a_time
    else:  # ranks are processes of one memory
        machine = machine_for(scale.name, 0, None)
        sharing = at_a_time * ranks // nodes
    dealt = [config for config in configs if config.micro_batches % ranks == 0]  # the trainer refuses the others
    found = memories(dealt, scale, machine, ranks)
    running = at_a_time * max(gpus * nodes // ranks, 1)
    problems = [
        *too_large(found, scale, machine, sharing),
        *too_much_staged(staged(configs, machine, running) / nodes, machine),
    ]
    if problems:
        raise UserError(problems[0])
