"""The arms of a plan in work: one after the other in this process, or several at a time in processes of their own.

A place is what one arm trains on: a device, or several, one for each of its ranks. Each rank of an arm has a process,
forked from a server that has torch loaded already; an arm that fails or is killed takes nothing with it. Its ranks
meet through a file and live and die together: when one fails, the others, which would wait for it, are ended.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait

import torch
from tqdm import tqdm

from mxfp4.errors import UserError
from mxfp4.experiments.arm import arm_name, train_arm
from mxfp4.experiments.plan import Plan
from mxfp4.experiments.store import Store
from mxfp4.training import parallel
from mxfp4.training.config import TrainConfig

RETRY_SECONDS = 2.0  # between looks at an arm that another process trains
Place = tuple[torch.device, ...]


@dataclass
class Summary:
    """What a call of `run_plan` did, as arm names (recipe-sSEED)."""

    present: list[str] = field(default_factory=list)
    """Were there already."""
    trained: list[str] = field(default_factory=list)
    """Have a record now."""
    paused: list[str] = field(default_factory=list)
    """Left a checkpoint."""
    failed: dict[str, str] = field(default_factory=dict)
    """Name -> reason in one line."""
    left: list[str] = field(default_factory=list)
    """Not begun, as the run was stopped."""
    diverged: list[str] = field(default_factory=list)
    """Of the trained ones, those whose outcome is divergence."""
    seconds: float = 0.0

    def __str__(self) -> str:
        parts = [
            f"{len(self.trained)} arms trained in {self.seconds:.0f} s",
            f"{len(self.present)} already there",
        ]
        if self.diverged:
            parts.append(f"diverged: {', '.join(self.diverged)}")
        if self.paused or self.left:
            parts.append(
                f"stopped with {len(self.paused)} paused and {len(self.left)} not begun: "
                "run it again to go on"
            )
        parts += [f"failed: {name} ({reason})" for name, reason in self.failed.items()]
        return "; ".join(parts)


def places(device: torch.device, jobs: int, ranks: int = 1) -> list[Place]:
    """Where each arm that runs at a time trains, `ranks` devices an arm: `jobs` arms on every GPU or group of GPUs,
    neighbours on different ones. On the CPU ranks are processes. Raises UserError where there are fewer GPUs."""
    if device.type == "cpu" or device.index is not None:
        if device.index is not None and ranks > 1:
            raise UserError(f"{ranks} ranks an arm need {ranks} GPUs, not {device} alone")
        return [(device,) * ranks] * jobs
    count = torch.cuda.device_count()
    if ranks > count:
        raise UserError(f"{ranks} ranks an arm need {ranks} GPUs, there are {count}")
    if count == 1:
        return [(device,)] * jobs
    gpus = [torch.device("cuda", i) for i in range(count)]
    return [tuple(gpus[i : i + ranks]) for i in range(0, count - ranks + 1, ranks)] * jobs


@contextmanager
def stop_on_signal():
    """Gives an event that Ctrl-C and SIGTERM set; a second one acts as usual, but under torchrun, which passes one
    signal on more than once. Only the main thread has signals."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return
    before = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}

    def handle(number, frame):
        event.set()
        if not parallel.launched():
            signal.signal(number, before[number])

    for number in before:
        signal.signal(number, handle)
    try:
        yield event
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Pool:
    """The arms in work. With one place of one device they run in this process, else each in its own."""

    def __init__(
        self, plan: Plan, store: Store, places: list[Place], corpus, summary: Summary, bar: tqdm,
        closed: Callable[[], bool], keep_weights: bool,
    ):  # fmt: skip
        self.plan, self.store, self.places = plan, store, places
        self.corpus, self.summary, self.bar = corpus, summary, bar
        self.waiting_for: set[str] = set()
        self.closed = closed
        self.execution = plan.scale.execution()  # how each is trained
        self.execution |= {"keep_weights": keep_weights, "arms_on_device": places.count(places[0])}

    def run(self, missing: list[tuple[TrainConfig, int]], stop: Callable[[], bool]) -> None:
        """Train `missing`, (arm, step of its checkpoint) each, until `stop`; once `closed`, begin no further."""
        queue = deque(missing)
        here = len(self.places) == 1 and len(self.places[0]) == 1 and not self.plan.scale.spread
        try:
            (self._here if here or parallel.launched() else self._processes)(queue, stop)
        finally:
            self.summary.left += [arm_name(config) for config, _ in queue]

    def _done(self, config: TrainConfig, status: str, reason: str | None, queue: deque) -> None:
        name = arm_name(config)
        if status == "busy":
            if name not in self.waiting_for:
                self.waiting_for.add(name)
                if parallel.here().rank == 0:
                    tqdm.write(f"{name} is being trained by another process: waiting for it", file=sys.stderr)
            queue.append((config, 0))
        elif status == "failed":
            self.summary.failed[name] = reason or "unknown"
        elif status == "paused":
            self.summary.paused.append(name)
        else:
            self.summary.trained.append(name)
            if status == "diverged":
                self.summary.diverged.append(name)

    def _only_busy(self, queue: deque) -> bool:
        return all(arm_name(config) in self.waiting_for for config, _ in queue)

    def _here(self, queue: deque, stop: Callable[[], bool]) -> None:
        ranks = parallel.here()
        while queue and not ranks.any(stop() or self.closed())[0]:
            if self._only_busy(queue):
                time.sleep(RETRY_SECONDS)
            config, _ = queue.popleft()
            self.bar.set_postfix_str(arm_name(config))
            reason = None
            try:
                status = train_arm(
                    config, self.store, corpus=self.corpus, device=self.places[0][0],
                    on_step=lambda _: self.bar.update(), stop=stop, **self.execution,
                )  # fmt: skip
            except Exception as error:  # the other arms go on; the reason is reported
                if ranks.size > 1 and not isinstance(error, UserError):
                    raise  # this rank's alone: torchrun ends the others
                status, reason = "failed", one_line(error)
            self._done(config, status, reason, queue)

    def _processes(self, queue: deque, stop: Callable[[], bool]) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        stopping = context.Event()
        threads = max(torch.get_num_threads() // sum(len(place) for place in self.places), 1)
        free = list(reversed(self.places))
        running: list[_Arm] = []
        retry_at = 0.0
        while running or (queue and not stop() and not self.closed()):
            if stop():
                stopping.set()
            while queue and free and not stop() and not self.closed():
                if self._only_busy(queue) and time.monotonic() < retry_at:
                    break
                config, step = queue.popleft()
                retry_at = time.monotonic() + RETRY_SECONDS
                arm = _Arm(config, free.pop(), step)
                arm.start(context, self.store, self.corpus, self.plan.scale.spread, self.execution, threads, stopping)
                running.append(arm)
            self.bar.set_postfix_str(" ".join(arm_name(arm.config) for arm in running))
            wait([connection for arm in running for connection in arm.ranks], timeout=0.2)
            for arm in list(running):
                self.bar.update(arm.listen())
                if arm.status is None:
                    continue
                arm.end()
                running.remove(arm)
                free.append(arm.place)
                if arm.status in ("finished", "diverged"):
                    self.bar.update(arm.config.steps - arm.step)
                self._done(arm.config, arm.status, arm.reason, queue)


@dataclass
class _Arm:
    """An arm in processes of its own, one for each device of its place."""

    config: TrainConfig
    place: Place
    step: int
    status: str | None = None
    """How it ended; None while it goes on."""
    reason: str | None = None
    ranks: dict[Connection, multiprocessing.Process] = field(default_factory=dict)
    """Those that have not said how they ended."""
    processes: list[multiprocessing.Process] = field(default_factory=list)
    meeting: str | None = None
    """Folder of the file through which the ranks find each other."""

    def start(self, context, store: Store, corpus, spread: bool, execution: dict, threads: int, stopping) -> None:
        if spread or len(self.place) > 1:
            self.meeting = tempfile.mkdtemp(prefix="mxfp4-")
        for rank, device in enumerate(self.place):
            ours, theirs = context.Pipe(duplex=False)
            meeting = self.meeting and (f"file://{self.meeting}/ranks", rank, len(self.place))
            task = (theirs, self.config, store, corpus, str(device), execution, threads, stopping, meeting)
            process = context.Process(target=_child, args=task, daemon=True)
            process.start()
            theirs.close()
            self.ranks[ours] = process
            self.processes.append(process)

    def listen(self) -> int:
        """Take in what the ranks have said; the steps made since. `status` is set when all, or a failure, has ended."""
        made = 0
        for connection in wait(list(self.ranks), timeout=0):
            process, silent = self.ranks[connection], False
            try:
                kind, value = connection.recv()
            except EOFError:  # the process ended without a word
                process.join()
                kind, value, silent = "failed", f"its process ended with exit code {process.exitcode}", True
            if kind == "step":
                made += value - self.step
                self.step = value
                continue
            del self.ranks[connection]
            connection.close()
            if kind == "failed":
                # A rank that vanishes is the cause of what the others then report.
                self.status, self.reason = kind, value if silent else self.reason or value
            elif not self.ranks:
                self.status = kind
        return made

    def end(self) -> None:
        """After the last word: let the processes end, or end those that wait for one that failed."""
        if self.ranks:
            wait(list(self.ranks), timeout=1.0)
            self.listen()
        for process in self.processes:
            process.join(1.0 if self.status == "failed" else None)
            process.kill()
            process.join()
        for connection in self.ranks:
            connection.close()
        if self.meeting:
            shutil.rmtree(self.meeting, ignore_errors=True)


def _child(connection: Connection, config, store, corpus, device, execution, threads, stopping, meeting) -> None:
    """Train one arm, or be one rank of it; tell the parent about steps a few times a second, then how it ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    torch.set_num_threads(threads)
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(threads))  # its own default is every core, for each arm
    parent, told, reason = multiprocessing.parent_process(), time.monotonic(), None
    speaks = meeting is None or meeting[1] == 0

    def on_step(step: int) -> None:
        nonlocal told
        if speaks and time.monotonic() - told > 0.2:
            told = time.monotonic()
            with suppress(BrokenPipeError):
                connection.send(("step", step))

    try:
        with parallel.joined(device, meeting) if meeting else nullcontext():
            status = train_arm(
                config, store, corpus=corpus, device=device, on_step=on_step,
                stop=lambda: stopping.is_set() or not parent.is_alive(), **execution,
            )  # fmt: skip
    except Exception as error:  # reported by the parent in one line
        status, reason = "failed", one_line(error)
    with suppress(BrokenPipeError):  # no parent left to tell
        connection.send((status, reason))


def one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if isinstance(error, UserError) else f"{type(error).__name__}: {text}"
