"""Runs a plan: trains the arms that are missing, several at a time if asked, and can be stopped at any
moment.

Where several arms run at a time (several jobs, or several GPUs), each has a process of its own, forked from a
server that has torch loaded already; an arm that fails or is killed takes nothing with it. Ctrl-C (or SIGTERM, or the end of the time)
lets every arm leave a checkpoint, from which the next call carries on. A second Ctrl-C ends at once; then
the last periodic checkpoint counts.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait

import torch
from tqdm import tqdm

from mxfp4.errors import UserError
from mxfp4.experiments.machine import default_device
from mxfp4.experiments.plan import Plan
from mxfp4.experiments.probes import Probe
from mxfp4.experiments.store import Store
from mxfp4.training import checkpoint
from mxfp4.training.config import TrainConfig
from mxfp4.training.loop import TokenSource, train
from mxfp4.training.packing import prepare

RETRY_SECONDS = 2.0  # between looks at an arm that another process trains


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


def arm_name(config: TrainConfig) -> str:
    return f"{config.recipe}-s{config.seed}"


def train_arm(
    config: TrainConfig,
    store: Store,
    *,
    corpus: TokenSource | None = None,
    device: torch.device | str | None = None,
    compile: bool = False,
    capture: bool = False,
    on_step: Callable[[int], None] | None = None,
    stop: Callable[[], bool] | None = None,
) -> str:
    """Train one arm into the store: "finished", "diverged", "paused", or "busy" when another process is at
    it."""
    device = torch.device(device) if device is not None else default_device()
    if device.index is not None:
        torch.cuda.set_device(device)
    folder = store.checkpoint_dir(config, device)
    lock = store.lock(config, device)
    if not lock.acquire():
        return "busy"
    try:
        record = store.get(config, device)  # another process may have stored it just now
        if record is None:
            if corpus is None:
                corpus = prepare(config.corpus, config.model.vocab_size, progress=False)
            result = train(
                config,
                corpus=corpus,
                device=device,
                checkpoint_dir=folder,
                on_step=on_step,
                probe=Probe() if config.probe_steps else None,
                progress=False,
                compile=compile,
                capture=capture,
                stop=stop,
            )
            if result.outcome["status"] == "paused":
                return "paused"
            record = store.put(config, result, device, corpus=corpus.fingerprint)
        checkpoint.remove(folder)
        return record.outcome["status"]
    finally:
        lock.release()


def run_plan(
    plan: Plan,
    store: Store,
    *,
    jobs: int | None = None,
    device: torch.device | str | None = None,
    corpus: TokenSource | None = None,
    max_minutes: float | None = None,
    last_start: float | None = None,
    progress: bool = True,
) -> Summary:
    """Train the missing arms of `plan`, `jobs` at a time on each device (None: the scale's own number).

    device: None is every GPU, or the CPU. corpus: None packs or opens the plan's. max_minutes: stop then, with checkpoints. last_start: begin no
    arm after so many minutes, and finish those in work. progress: a bar, where
    stderr is a terminal, and a line that names what is there already. Raises UserError when the corpus
    cannot be had.
    """
    jobs = plan.scale.jobs if jobs is None else jobs
    if jobs < 1:
        raise UserError(f"jobs={jobs} must be at least 1")
    device = torch.device(device) if device is not None else default_device()
    started = time.monotonic()
    status = plan.status(store, device)
    summary = Summary(present=[arm_name(a.config) for a in status if a.done])
    missing = [a for a in status if not a.done]
    if summary.present and progress:
        tqdm.write(f"already there ({len(summary.present)}): {' '.join(summary.present)}", file=sys.stderr)
    if missing:
        if corpus is None:
            corpora = {(a.config.corpus, a.config.model.vocab_size) for a in missing}
            for name, vocab_size in sorted(corpora):  # once, before the arms ask for it
                prepare(name, vocab_size, progress=progress)
        bar = tqdm(
            total=sum(a.config.steps for a in missing),
            initial=sum(a.step for a in missing),
            unit="step",
            desc=f"{plan.name} ({len(missing)} arms)",
            disable=None if progress else True,
        )
        deadline = None if max_minutes is None else started + 60 * max_minutes
        with bar, _stop_on_signal() as interrupted:
            pool = _Pool(plan, store, places(device, jobs), corpus, summary, bar)
            closing = None if last_start is None else started + 60 * last_start
            pool.closed = lambda: closing is not None and time.monotonic() > closing
            pool.run(
                missing,
                lambda: interrupted.is_set() or (deadline is not None and time.monotonic() > deadline),
            )
    summary.seconds = time.monotonic() - started
    return summary


def places(device: torch.device, jobs: int) -> list[torch.device]:
    """The device of each arm that runs at a time: `jobs` of them on every GPU, neighbours on different ones."""
    if device.type == "cuda" and device.index is None and torch.cuda.device_count() > 1:
        return [torch.device("cuda", i) for i in range(torch.cuda.device_count())] * jobs
    return [device] * jobs


@contextmanager
def _stop_on_signal():
    """Gives an event that Ctrl-C and SIGTERM set; a second one acts as usual. Only the main thread has
    signals."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return
    before = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}

    def handle(number, frame):
        event.set()
        signal.signal(number, before[number])

    for number in before:
        signal.signal(number, handle)
    try:
        yield event
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Pool:
    """The arms in work. With one place they run in this process, else each in its own."""

    def __init__(self, plan: Plan, store: Store, places: list[torch.device], corpus, summary: Summary, bar: tqdm):
        self.plan, self.store, self.places = plan, store, places
        self.corpus, self.summary, self.bar = corpus, summary, bar
        self.waiting_for: set[str] = set()
        self.closed: Callable[[], bool] = lambda: False  # whether no further arm is begun

    def run(self, missing: list, stop: Callable[[], bool]) -> None:
        queue = deque((a.config, a.step) for a in missing)
        try:
            (self._here if len(self.places) == 1 else self._processes)(queue, stop)
        finally:
            self.summary.left += [arm_name(config) for config, _ in queue]

    def _done(self, config: TrainConfig, status: str, reason: str | None, queue: deque) -> None:
        name = arm_name(config)
        if status == "busy":
            if name not in self.waiting_for:
                self.waiting_for.add(name)
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
        while queue and not stop() and not self.closed():
            if self._only_busy(queue):
                time.sleep(RETRY_SECONDS)
            config, _ = queue.popleft()
            self.bar.set_postfix_str(arm_name(config))
            reason = None
            try:
                status = train_arm(
                    config, self.store, corpus=self.corpus, device=self.places[0],
                    compile=self.plan.scale.compile, capture=self.plan.scale.capture, on_step=lambda _: self.bar.update(), stop=stop,
                )  # fmt: skip
            except Exception as error:  # the other arms go on; the reason is reported
                status, reason = "failed", _one_line(error)
            self._done(config, status, reason, queue)

    def _processes(self, queue: deque, stop: Callable[[], bool]) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        stopping = context.Event()
        threads = max(torch.get_num_threads() // len(self.places), 1)
        free = list(reversed(self.places))
        running: dict[Connection, _Arm] = {}
        retry_at = 0.0
        while running or (queue and not stop() and not self.closed()):
            if stop():
                stopping.set()
            while queue and free and not stop() and not self.closed():
                if self._only_busy(queue) and time.monotonic() < retry_at:
                    break
                config, step = queue.popleft()
                retry_at = time.monotonic() + RETRY_SECONDS
                ours, theirs = context.Pipe(duplex=False)
                device, how = free.pop(), (self.plan.scale.compile, self.plan.scale.capture)
                task = (theirs, config, self.store, self.corpus, str(device), how, threads)
                process = context.Process(target=_child, args=(*task, stopping), daemon=True)
                process.start()
                theirs.close()
                running[ours] = _Arm(config, process, step, device)
            self.bar.set_postfix_str(" ".join(arm_name(arm.config) for arm in running.values()))
            for connection in wait(list(running), timeout=0.2):
                arm = running[connection]
                try:
                    kind, value = connection.recv()
                except EOFError:  # the process ended without a word
                    arm.process.join()
                    kind, value = "failed", f"its process ended with exit code {arm.process.exitcode}"
                if kind == "step":
                    self.bar.update(value - arm.step)
                    arm.step = value
                    continue
                del running[connection]
                connection.close()
                arm.process.join()
                free.append(arm.device)
                if kind in ("finished", "diverged"):
                    self.bar.update(arm.config.steps - arm.step)
                self._done(arm.config, kind, value, queue)


@dataclass
class _Arm:
    config: TrainConfig
    process: multiprocessing.Process
    step: int
    device: torch.device


def _child(connection: Connection, config, store, corpus, device, how, threads, stopping) -> None:
    """Train one arm; tell the parent about steps a few times a second, then how it ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    torch.set_num_threads(threads)
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(threads))  # its own default is every core, for each arm
    compile, capture = how
    parent, told, reason = multiprocessing.parent_process(), time.monotonic(), None

    def on_step(step: int) -> None:
        nonlocal told
        if time.monotonic() - told > 0.2:
            told = time.monotonic()
            with suppress(BrokenPipeError):
                connection.send(("step", step))

    try:
        status = train_arm(
            config, store, corpus=corpus, device=device, compile=compile, capture=capture, on_step=on_step,
            stop=lambda: stopping.is_set() or not parent.is_alive(),
        )  # fmt: skip
    except Exception as error:  # reported by the parent in one line
        status, reason = "failed", _one_line(error)
    with suppress(BrokenPipeError):  # no parent left to tell
        connection.send((status, reason))


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if isinstance(error, UserError) else f"{type(error).__name__}: {text}"
