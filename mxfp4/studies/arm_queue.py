"""The arms of a plan in work: one after the other in this process, or several at a time in processes of their own.

Each rank of an arm has a process, forked from a server that has torch loaded already; an arm that fails or is killed
takes nothing with it. Its ranks meet through a file and live and die together: when one fails, the others, which would
wait for it, are ended.

Another process may train arms of the same plan. Those it holds are put off until no others are left, and asked for
again every RETRY_SECONDS: they have a record by then, or come free with what they have when that process ends.
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

from mxfp4 import errors
from mxfp4.errors import UserError
from mxfp4.studies.devices import Place, emptiest
from mxfp4.studies.scales import Scale
from mxfp4.studies.store import Store
from mxfp4.studies.train_arm import arm_name, done, train_arm
from mxfp4.training.config import TrainConfig
from mxfp4.training.execution import distributed
from mxfp4.training.monitoring.monitor import Monitoring

RETRY_SECONDS = 2.0  # between looks at the arms that other processes train


@dataclass
class Summary:
    """What a call of `run_plan` did, as arm names (recipe-sSEED)."""

    present: list[str] = field(default_factory=list)
    """Were there already."""
    trained: list[str] = field(default_factory=list)
    """Have a record now."""
    elsewhere: list[str] = field(default_factory=list)
    """Have a record now, which another process made meanwhile."""
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
        if self.elsewhere:
            parts.append(f"{len(self.elsewhere)} by another process")
        if self.diverged:
            parts.append(f"diverged: {', '.join(self.diverged)}")
        if self.paused or self.left:
            parts.append(
                f"stopped with {len(self.paused)} paused and {len(self.left)} not begun: run it again to go on"
            )
        parts += [f"failed: {name} ({reason})" for name, reason in self.failed.items()]
        return "; ".join(parts)


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
        if not distributed.launched():
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
        self, scale: Scale, store: Store, places: list[Place], corpus, summary: Summary, bar: tqdm,
        closed: Callable[[], bool], keep_weights: bool, monitoring: Monitoring | None = None,
    ):  # fmt: skip
        self.scale, self.store, self.places = scale, store, places
        self.corpus, self.summary, self.bar = corpus, summary, bar
        self.closed, self.keep_weights = closed, keep_weights
        self.execution = scale.execution() | {
            "keep_weights": keep_weights,
            "monitoring": monitoring,
        }  # how each is trained
        self.queue: deque[tuple[TrainConfig, int]] = deque()
        self.held: deque[tuple[TrainConfig, int]] = deque()  # by other processes, when last asked
        self.retry_at = 0.0
        self.told: set[str] = set()

    def run(self, missing: list[tuple[TrainConfig, int]], stop: Callable[[], bool]) -> None:
        """Train `missing`, (arm, step of its checkpoint) each, until `stop`; once `closed`, begin no further."""
        self.queue = deque(missing)
        here = len(self.places) == 1 and len(self.places[0]) == 1 and not self.scale.spread
        try:
            (self._here if here or distributed.launched() else self._processes)(stop)
        finally:
            self.summary.left += [arm_name(config) for config, _ in (*self.queue, *self.held)]

    def _next(self) -> tuple[TrainConfig, int] | None:
        """The next arm to train, taken off the queue; None where other processes hold all that are left."""
        ranks = distributed.here()
        while True:
            if not self.queue:
                if not self.held:
                    return None
                if not ranks.agree(time.monotonic() >= self.retry_at):
                    names = " ".join(arm_name(config) for config, _ in self.held)
                    self._say("left", f"left are arms that other processes train: waiting for {names}")
                    return None
                self.queue, self.held = self.held, deque()
                self.retry_at = time.monotonic() + RETRY_SECONDS
            config, step = self.queue.popleft()
            holder, record = ranks.agree(self._elsewhere(config) if ranks.rank == 0 else None)
            if holder is not None:
                self._put_off(config, step, holder)
            elif record is not None:
                self.summary.elsewhere.append(arm_name(config))
                self.bar.update(config.steps - step)
            else:
                return config, step

    def _elsewhere(self, config: TrainConfig) -> tuple[str | None, str | None]:
        """(who holds an arm, how it ended): what other processes have done since the plan was looked at."""
        device = self.places[0][0]
        holder = self.store.lock(config, device).holder()
        record = None if holder else done(config, self.store, device, self.keep_weights)
        return holder, record and record.outcome["status"]

    def _put_off(self, config: TrainConfig, step: int, holder: str) -> None:
        self.held.append((config, step))
        if self.queue:
            name = arm_name(config)
            self._say("held", f"{name} is held by another process ({holder}): free arms first, held ones last")

    def _say(self, what: str, text: str) -> None:
        """One line, and each kind of it once."""
        if what not in self.told and distributed.here().rank == 0:
            self.told.add(what)
            tqdm.write(text, file=sys.stderr)

    def _done(self, config: TrainConfig, step: int, status: str, reason: str | None) -> None:
        name = arm_name(config)
        if status == "busy":  # another process was quicker
            self._put_off(config, step, "just begun")
        elif status == "failed":
            self.summary.failed[name] = reason or "unknown"
        elif status == "paused":
            self.summary.paused.append(name)
        else:
            self.summary.trained.append(name)
            if status == "diverged":
                self.summary.diverged.append(name)

    def _here(self, stop: Callable[[], bool]) -> None:
        ranks = distributed.here()
        while (self.queue or self.held) and not ranks.any(stop() or self.closed())[0]:
            found = self._next()
            if found is None:
                time.sleep(RETRY_SECONDS / 10)
                continue
            config, step = found
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
            self._done(config, step, status, reason)

    def _processes(self, stop: Callable[[], bool]) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        stopping = context.Event()
        threads = max(torch.get_num_threads() // sum(len(place) for place in self.places), 1)
        free, distinct = list(self.places), list(dict.fromkeys(self.places))
        sharing = context.RawArray("i", len(distinct))  # arms in work on each distinct place; their processes read it
        running: list[_Arm] = []

        def count() -> None:
            sharing[:] = [sum(arm.place == place for arm in running) for place in distinct]

        while running or ((self.queue or self.held) and not stop() and not self.closed()):
            if stop():
                stopping.set()
            while free and not stop() and not self.closed():
                found = self._next()
                if found is None:
                    break
                place = emptiest(free, [arm.place for arm in running])
                free.remove(place)
                arm = _Arm(found[0], place, found[1], begun_at=found[1])
                running.append(arm)
                count()
                arm.start(
                    context, self.store, self.corpus, self.scale.spread, self.execution, threads, stopping,
                    (sharing, distinct.index(place)),
                )  # fmt: skip
            self.bar.set_postfix_str(" ".join(arm_name(arm.config) for arm in running))
            wait([connection for arm in running for connection in arm.ranks], timeout=0.2)
            for arm in list(running):
                self.bar.update(arm.listen())
                if arm.status is None:
                    continue
                arm.end()
                running.remove(arm)
                count()
                free.append(arm.place)
                if arm.status in ("finished", "diverged"):
                    self.bar.update(arm.config.steps - arm.step)
                self._done(arm.config, arm.begun_at, arm.status, arm.reason)


@dataclass
class _Arm:
    """An arm in processes of its own, one for each device of its place."""

    config: TrainConfig
    place: Place
    step: int
    begun_at: int
    status: str | None = None
    """How it ended; None while it goes on."""
    reason: str | None = None
    ranks: dict[Connection, multiprocessing.Process] = field(default_factory=dict)
    """Those that have not said how they ended."""
    processes: list[multiprocessing.Process] = field(default_factory=list)
    meeting: str | None = None
    """Folder of the file through which the ranks find each other."""

    def start(
        self, context, store: Store, corpus, spread: bool, execution: dict, threads: int, stopping, sharing
    ) -> None:
        if spread or len(self.place) > 1:
            self.meeting = tempfile.mkdtemp(prefix="mxfp4-")
        for rank, device in enumerate(self.place):
            ours, theirs = context.Pipe(duplex=False)
            meeting = self.meeting and (f"file://{self.meeting}/ranks", rank, len(self.place))
            task = (theirs, self.config, store, corpus, str(device), execution, threads, stopping, sharing, meeting,
                    frozenset(errors.said))  # fmt: skip
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


def _child(
    connection: Connection, config, store, corpus, device, execution, threads, stopping, sharing, meeting, said
) -> None:
    """Train one arm, or be one rank of it; tell the parent about steps a few times a second, then how it ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    errors.print_notices(said)
    torch.set_num_threads(threads)
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(threads))  # its own default is every core, for each arm
    parent, told, reason = multiprocessing.parent_process(), time.monotonic(), None
    speaks = meeting is None or meeting[1] == 0
    counts, place = sharing

    def on_step(step: int) -> None:
        nonlocal told
        if speaks and time.monotonic() - told > 0.2:
            told = time.monotonic()
            with suppress(ConnectionError):
                connection.send(("step", step))

    try:
        with distributed.joined(device, meeting) if meeting else nullcontext():
            status = train_arm(
                config, store, corpus=corpus, device=device, on_step=on_step,
                stop=lambda: stopping.is_set() or not parent.is_alive(), arms_on_device=lambda: max(counts[place], 1),
                **execution,
            )  # fmt: skip
    except Exception as error:  # reported by the parent in one line
        status, reason = "failed", one_line(error)
    with suppress(ConnectionError):  # no parent left to tell
        connection.send((status, reason))


def one_line(error: Exception) -> str:
    """The error in one line, with its type unless it is a UserError."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if isinstance(error, UserError) else f"{type(error).__name__}: {text}"
