"""A step of Llama 3.1-8B's width on all ranks of a machine, with few layers: what a node will do, known in minutes.

The step is the trainer's own (`training.run_state.Run`) with the choices of scale mi355x: forward, backward and
optimizer, compiled blocks, FSDP2 over several ranks. Each recipe is measured with two numbers of layers, from which
`node_prediction` gets the time of one. Each other GEMM back end, attention back end and cross-entropy that passes its
check on the device is measured with the larger number, all else being the scale's. Ranks are processes, started anew
for each measurement, so that one that fails or hangs takes nothing with it; under torchrun they are torchrun's.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from torch import Tensor

from mxfp4.bench.results import attempt
from mxfp4.errors import UserError
from mxfp4.layers.plan import takes_packed
from mxfp4.layers.recipe import GEMMS, recipe
from mxfp4.numerics.gemm_backends import choice
from mxfp4.numerics.native import chip_path, fp8_path
from mxfp4.studies.memory_check import machine_for, memories, needed
from mxfp4.studies.scales import MI355X, Scale
from mxfp4.training.config import TrainConfig
from mxfp4.training.execution import cross_entropy, distributed
from mxfp4.training.execution.choices import Execution
from mxfp4.training.run_state import Run

RECIPES = ("bf16", "fp8", "mxfp4", "mxfp4+h16")
ATTENTION = ("auto", "flash", "efficient", "cudnn", "aiter")
"""Of the back ends of attention those that a model of this length can use: `math` holds all scores."""
DEPTHS = ((2, 4), (1, 2))
"""Pairs of numbers of layers; the first pair that fits is measured."""
WARM_UP, STEPS = 3, 5
PARTS = 2
"""Most micro-batches of a rank that are measured, as many as each of eight ranks has; more are multiplied."""
CASE_SECONDS = 300.0
"""Most that one measurement may take, compiling included."""
TINY = replace(
    MI355X.on_corpus("c4:toy"),
    model=replace(MI355X.trial["model"], vocab_size=256, dim=64, n_layers=8, n_heads=2, n_kv_heads=1, ffn_dim=128),
    seq_len=64, compile=False,
)  # fmt: skip
"""To try the benchmark itself, on the CPU too."""


@dataclass(frozen=True)
class Case:
    """One measurement."""

    recipe: str
    layers: int
    gemm_backend: str
    """One of `choice.CHOICES`."""
    attention: str
    cross_entropy: str
    varied: str = ""
    """The field that is not as the scale has it; empty for none."""

    @property
    def name(self) -> str:
        """Such as "mxfp4, 4 layers, attention aiter"."""
        layers = f"{self.recipe}, {self.layers} layer{'s' * (self.layers > 1)}"
        return layers + (f", {self.varied.replace('_', ' ')} {getattr(self, self.varied)}" if self.varied else "")


@dataclass(frozen=True)
class Setting:
    """What all measurements share."""

    scale: Scale
    ranks: int
    gpus: int
    """Of this machine that are used; 0: the CPU."""
    recipes: tuple[str, ...] = RECIPES
    steps: int = STEPS

    @property
    def device(self) -> str:
        return "cuda" if self.gpus else "cpu"

    @property
    def parts(self) -> int:
        """Micro-batches of a rank in a step of the scale. UserError where they cannot be dealt."""
        distributed.Ranks(size=self.ranks).check(self.scale.micro_batches)
        return self.scale.micro_batches // self.ranks

    @property
    def measured_parts(self) -> int:
        return min(self.parts, PARTS)

    def config(self, name: str, layers: int) -> TrainConfig:
        """The scale's arm with so many layers, of whose step each rank has `measured_parts`. It neither ends nor is
        evaluated."""
        parts, endless = self.measured_parts * self.ranks, 10**9
        return self.scale.config(
            name, 0, model=replace(self.scale.model, n_layers=layers), micro_batches=parts,
            batch_size=self.scale.batch_size // self.scale.micro_batches * parts, steps=endless, eval_every=endless,
            eval_sequences=1, target_loss=None, stop_at_target=False, stall_evaluations=0, probe_steps=(),
        )  # fmt: skip


@dataclass
class RandomTokens:
    """A corpus of one batch of random tokens."""

    vocab_size: int
    fingerprint: str = "random"

    def batch(self, step: int, batch_size: int, seq_len: int, seed: int) -> Tensor:
        """[batch_size, seq_len + 1] int64, the same at each step."""
        return torch.randint(self.vocab_size, (batch_size, seq_len + 1), generator=torch.Generator().manual_seed(seed))

    def eval_windows(self, n: int | None, seq_len: int) -> Tensor:
        return self.batch(0, n or 1, seq_len, 1)

    def bytes_per_token(self, split: str = "validation", windows: Tensor | None = None) -> float:
        return 1.0


def rows(setting: Setting, minutes: float) -> Iterator[dict]:
    """One dict a measurement: `Case`'s fields, name, who, ranks, parts, path ("native" or "emulated": of the recipe's
    GEMMs), seconds of a step (median) and of its forward, backward and optimizer, peak_bytes, communication_share,
    loss; or a problem. What `minutes` do not suffice for has `not_reached` too. All ranks of torchrun call it."""
    ranks, until = distributed.here(), time.monotonic() + 60 * minutes
    for case in ranks.agree(cases(setting) if ranks.rank == 0 else None):
        who = "torch" if case.recipe == "bf16" else "mxfp4"
        about = {"recipe": case.recipe, "layers": case.layers, "varied": case.varied}
        left = ranks.agree(until - time.monotonic())
        row = {"name": case.name, "who": who, "problem": f"not reached in {minutes:g} minutes", "not_reached": True}
        if left > 0:
            found = attempt(case.name, who, partial(_measured, case, setting, min(left, CASE_SECONDS)))
            row = found if "problem" not in found or until > time.monotonic() else row
        yield about | row


def cases(setting: Setting) -> list[Case]:
    """What is to be measured, the most important first: the recipes, then what can be chosen beside."""
    own, (few, more) = setting.scale, depths(setting)
    base = Case("", more, choice.requested(), own.attention, own.cross_entropy)
    found = [replace(base, recipe=name, layers=n) for n in (more, few) for name in setting.recipes]
    used = choice.gemm_backend(setting.device)
    for status in choice.statuses(setting.device) if chip_path(setting.device) == "native" else []:
        if status.state == "usable" and status.name != used:
            asked = replace(base, gemm_backend=status.name, varied="gemm_backend")
            found += [replace(asked, recipe=name) for name in setting.recipes if takes_fp4(name)]
    first = replace(base, recipe=setting.recipes[0])
    found += [replace(first, attention=name, varied="attention") for name in ATTENTION if name != own.attention]
    others = (name for name in cross_entropy.CHOICES if name != own.cross_entropy)
    return found + [replace(first, cross_entropy=name, varied="cross_entropy") for name in others]


def depths(setting: Setting) -> tuple[int, int]:
    """The first of DEPTHS that fits by the estimate, or the last."""
    machine = machine_for(setting.scale.name, setting.gpus, None)
    for pair in DEPTHS:
        configs = [setting.config(name, pair[1]) for name in setting.recipes]
        _, largest = memories(configs, setting.scale, machine, setting.ranks)[0]
        if machine.memory is None or needed(largest, machine, 1 if setting.gpus else setting.ranks) <= machine.memory:
            return pair
    return DEPTHS[-1]


def takes_fp4(name: str) -> bool:
    """Whether a recipe quantizes some operand to FP4."""
    return any(operand.format in ("mxfp4", "nvfp4") for operand in recipe(name).operands().values())


def path_of(name: str, device: torch.device | str) -> str:
    """ "native" where the device's units multiply what the recipe quantizes to, in each of its GEMMs, else "emulated"."""
    if torch.device(device).type != "cuda":  # which computes in FP32
        return "emulated"
    units = choice.matmul_path(device) == "native", fp8_path(device) == "native"
    pairs = [getattr(recipe(name), gemm) for gemm in GEMMS]
    quantized = [pair for pair in pairs if {pair.a.format, pair.b.format} - {"bf16", "fp32"}]
    return "native" if all(takes_packed(pair, *units) for pair in quantized) else "emulated"


def measure(case: Case, setting: Setting, device: torch.device) -> dict:
    """One case on this rank; all ranks call it."""
    ranks, gpu = distributed.here(), device.type == "cuda"
    os.environ[choice.VARIABLE] = case.gemm_backend
    config = setting.config(case.recipe, case.layers)
    chosen = replace(setting.scale, attention=case.attention, cross_entropy=case.cross_entropy)
    used = _Memory(device)
    run = Run(config, RandomTokens(config.model.vocab_size), device, ranks, lambda: 1, Execution(**chosen.execution()))
    run.prepare()
    watch = _StopWatch(run, gpu)
    for _ in range(WARM_UP):
        run.advance(None)
    found = [watch.step(run) for _ in range(setting.steps)]
    middle = {name: statistics.median(step[name] for step in found) for name in found[0]}
    run.fetch()
    share = _communication(run) if gpu and ranks.size > 1 else None
    return {
        **middle, "peak_bytes": used.peak(), "loss": run.rows[-1]["train_loss"], "communication_share": share,
        "path": path_of(case.recipe, device), "ranks": ranks.size, "parts": setting.measured_parts,
        "gemm_backend": choice.gemm_backend(device) if takes_fp4(case.recipe) else None,
        "attention": case.attention, "cross_entropy": case.cross_entropy,
    }  # fmt: skip


class _StopWatch:
    """Times a step's parts: the forwards of its micro-batches, the optimizer, and the rest, which is the backward."""

    def __init__(self, run: Run, gpu: bool):
        self.gpu = gpu
        self.forward: list = []
        self.optimizer: list = []
        run.model.register_forward_pre_hook(lambda *_: self.forward.append(self._mark()))
        run.model.register_forward_hook(lambda *_: self.forward.append(self._mark()))
        run.optimizer.register_step_pre_hook(lambda *_: self.optimizer.append(self._mark()))
        run.optimizer.register_step_post_hook(lambda *_: self.optimizer.append(self._mark()))

    def step(self, run: Run) -> dict:
        """One step, in seconds of wall time."""
        self._wait()
        self.forward.clear()
        self.optimizer.clear()
        started = time.perf_counter()
        run.advance(None)
        self._wait()
        seconds = time.perf_counter() - started
        forward, optimizer = self._between(self.forward), self._between(self.optimizer)
        return {
            "seconds": seconds, "forward_seconds": forward, "backward_seconds": seconds - forward - optimizer,
            "optimizer_seconds": optimizer,
        }  # fmt: skip

    def _mark(self):
        if not self.gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, marks: list) -> float:
        pairs = zip(marks[::2], marks[1::2], strict=True)
        return sum(a.elapsed_time(b) / 1e3 if self.gpu else b - a for a, b in pairs)

    def _wait(self) -> None:
        if self.gpu:
            torch.cuda.synchronize()


class _Memory:
    """Peak of the device's memory from here on, bytes; None on the CPU, whose processes share theirs."""

    def __init__(self, device: torch.device):
        torch.compiler.reset()  # what an earlier case left
        gc.collect()
        self.gpu = device.type == "cuda"
        if self.gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int | None:
        return torch.cuda.max_memory_allocated() if self.gpu else None


def _communication(run: Run) -> float | None:
    """Share of a profiled step in which nothing but collectives runs on the GPU; None where it cannot be profiled."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    try:
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
            run.advance(None)
            torch.cuda.synchronize()
        on_gpu = [e for e in found.events() if e.device_type == DeviceType.CUDA]
    except RuntimeError:
        return None
    return exposed_share([(e.name, e.time_range.start, e.time_range.end) for e in on_gpu])


def exposed_share(kernels: list[tuple[str, float, float]]) -> float | None:
    """Of (name, start, end): share of the time from the first to the last in which NCCL's (RCCL's) alone run."""
    if not kernels:
        return None
    span = max(end for _, _, end in kernels) - min(start for _, start, _ in kernels)
    others = [kernel for kernel in kernels if "nccl" not in kernel[0].lower()]
    return (_covered(kernels) - _covered(others)) / span


def _covered(kernels: list[tuple[str, float, float]]) -> float:
    """Length of the union of the intervals."""
    total, reached = 0.0, float("-inf")
    for _, start, end in sorted(kernels, key=lambda kernel: kernel[1]):
        total += max(end - max(start, reached), 0.0)
        reached = max(reached, end)
    return total


def _measured(case: Case, setting: Setting, seconds: float) -> dict:
    """A case on all ranks: the slowest rank's times and the largest one's memory. Raises where it fails on one."""
    ranks = distributed.here()
    if distributed.launched():
        device = torch.device("cuda", torch.cuda.current_device()) if setting.gpus else torch.device("cpu")
        try:
            found = measure(case, setting, device)
        except (UserError, torch.OutOfMemoryError) as error:  # others end the job: the other ranks wait in a collective
            found = {"problem": _one_line(error)}
        results = ranks.gather(found)
    else:
        results = in_processes(case, setting, seconds)
    if problems := [found["problem"] for found in results if "problem" in found]:
        raise UserError(problems[0])
    most = {
        name: max(found[name] for found in results)
        for name, value in results[0].items()
        if isinstance(value, float) or (name == "peak_bytes" and value is not None)
    }
    return results[0] | most


def in_processes(case: Case, setting: Setting, seconds: float) -> list[dict]:
    """`measure` on each rank, in processes of their own: what each found, or [{"problem"}] where one failed or all took
    longer than `seconds`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    threads = max(torch.get_num_threads() // setting.ranks, 1)
    connections: list[Connection] = []
    processes = []
    found: dict[int, dict] = {}
    with tempfile.TemporaryDirectory(prefix="mxfp4-") as folder:
        for rank in range(setting.ranks):
            ours, theirs = context.Pipe(duplex=False)
            meeting = (f"file://{folder}/ranks", rank, setting.ranks) if setting.ranks > 1 else None
            device = f"cuda:{rank}" if setting.gpus else "cpu"
            process = context.Process(
                target=_child, args=(theirs, case, setting, device, meeting, threads), daemon=True
            )
            process.start()
            theirs.close()
            connections.append(ours)
            processes.append(process)
        try:
            until = time.monotonic() + seconds
            while len(found) < setting.ranks:
                left = [c for rank, c in enumerate(connections) if rank not in found]
                ready = wait(left, timeout=max(until - time.monotonic(), 0))
                for rank in [rank for rank, connection in enumerate(connections) if connection in ready]:
                    try:
                        found[rank] = connections[rank].recv()
                    except EOFError:  # the cause of what the others may report
                        processes[rank].join()
                        return [{"problem": f"rank {rank} ended with exit code {processes[rank].exitcode}"}]
                failed = any("problem" in result for result in found.values())
                if failed:  # the others may wait for it
                    until = min(until, time.monotonic() + 1)
                if not ready:
                    if not failed:
                        return [{"problem": f"not done after {seconds:.0f} s"}]
                    break
        finally:
            for process in processes:
                process.join(0.5)
                process.kill()
                process.join()
    return [found[rank] for rank in sorted(found)]


def _child(connection: Connection, case: Case, setting: Setting, device: str, meeting, threads: int) -> None:
    """One rank of one case; tells the parent what it found or why not."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    torch.set_num_threads(threads)
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(threads))
    try:
        timeout = timedelta(seconds=CASE_SECONDS)
        group: Any = distributed.joined(device, meeting, timeout=timeout) if meeting else nullcontext()
        with group:
            found = measure(case, setting, torch.device(device))
    except Exception as error:
        found = {"problem": _one_line(error)}
    connection.send(found)


def _one_line(error: Exception) -> str:
    name = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
    return f"{name}{error}".splitlines()[0]
