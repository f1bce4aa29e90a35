"""The arms of a plan in work: one after the other in this process, or several at a time in processes of their own.

Each rank of an arm has a process, forked from a server that has torch loaded already; an arm that fails or is killed
takes nothing with it. Its ranks meet through a file and live and die together: when one fails, is stopped or makes no
progress (`liveness`), the others, which would wait for it, are ended. `failures` decides what is tried again.

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
import time
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch
from tqdm import tqdm

from mxfp4 import errors
from mxfp4.errors import UserError
from mxfp4.studies.devices import Place, emptiest
from mxfp4.studies.failures import TOLERANCE, Failure, Failures, Kind, Tolerance, kind_of
from mxfp4.studies.scales import Scale
from mxfp4.studies.store import ENDINGS, Store
from mxfp4.studies.train_arm import arm_name, done, train_arm
from mxfp4.training.checkpoints import checkpoint
from mxfp4.training.config import TrainConfig
from mxfp4.training.execution import distributed, liveness
from mxfp4.training.monitoring.monitor import Monitoring

RETRY_SECONDS = 2.0  # between looks at the arms that other processes train
STACKS_SECONDS = 0.5  # that ranks get to write their stacks
KILL_SECONDS = 30.0  # after which a killed process counts as one that cannot be ended: its GPU's driver holds it


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
    stalled: list[str] = field(default_factory=list)
    """Of the trained ones, those that were ended as stalled."""
    retried: dict[str, int] = field(default_factory=dict)
    """Name -> times that it was tried again after a failure."""
    stopped: str | None = None
    """Why the queue stopped by itself: which device failed how often."""
    log: Path | None = None
    """The file with the failures, if there were any."""
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
        if self.stalled:
            parts.append(f"stalled: {', '.join(self.stalled)}")
        if self.retried:
            again = (f"{name} ({times} time{'s' * (times > 1)})" for name, times in self.retried.items())
            parts.append(f"tried again after a failure: {', '.join(again)}")
        if self.stopped:
            parts.append(f"stopped by itself: {self.stopped}")
        if self.paused or self.left:
            parts.append(
                f"stopped with {len(self.paused)} paused and {len(self.left)} not begun: run it again to go on"
            )
        parts += [f"failed: {name} ({reason})" for name, reason in self.failed.items()]
        if self.log is not None:
            parts.append(f"failures are in {self.log}")
        return "; ".join(parts)


class Pool:
    """The arms in work. With one place of one device they run in this process, else each in its own."""

    def __init__(
        self, scale: Scale, store: Store, places: list[Place], corpus, summary: Summary, bar: tqdm,
        closed: Callable[[], bool], keep_weights: bool, tolerance: Tolerance = TOLERANCE,
        monitoring: Monitoring | None = None,
    ):  # fmt: skip
        self.scale, self.store, self.places = scale, store, places
        self.corpus, self.summary, self.bar = corpus, summary, bar
        self.closed, self.keep_weights = closed, keep_weights
        self.execution = scale.execution() | {  # how each is trained
            "checkpoint_minutes": scale.checkpoint_minutes, "keep_weights": keep_weights, "monitoring": monitoring,
        }  # fmt: skip
        self.queue: deque[tuple[TrainConfig, int]] = deque()
        self.held: deque[tuple[TrainConfig, int]] = deque()  # by other processes, when last asked
        self.retry_at = 0.0
        self.told: set[str] = set()
        self.tolerance = tolerance
        log = store.log_file(scale.name) if distributed.here().rank == 0 else None
        self.failures = Failures(tolerance, log)

    def run(self, missing: list[tuple[TrainConfig, int]], stop: Callable[[], bool]) -> None:
        """Train `missing`, (arm, step of its checkpoint) each, until `stop`; once `closed`, begin no further."""
        self.queue = deque(missing)

        def stop_or_broken() -> bool:
            return stop() or self.failures.stopped is not None

        here = len(self.places) == 1 and len(self.places[0]) == 1 and not self.scale.spread
        try:
            (self._here if here or distributed.launched() else self._processes)(stop_or_broken)
        finally:
            self.summary.retried, self.summary.stopped = self.failures.retried, self.failures.stopped
            self.summary.log = self.failures.log if self.failures.arms else None
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

    def _done(self, config: TrainConfig, step: int, status: str) -> None:
        name = arm_name(config)
        if status == "busy":  # another process was quicker
            self._put_off(config, step, "just begun")
        elif status == "paused":
            self.summary.paused.append(name)
        else:
            self.summary.trained.append(name)
            if status == "diverged":
                self.summary.diverged.append(name)
            elif status == "stalled":
                self.summary.stalled.append(name)
                self.failures.write(f"stalled: {name}, so it was ended; its record says at what loss")

    def _failed(self, config: TrainConfig, failure: Failure, bar_at: int) -> None:
        """Put an arm that failed back at the head of the queue, or give it up. bar_at: its step in the bar."""
        verdict = self.failures.add(failure)
        if verdict is not None:
            self.summary.failed[failure.arm] = verdict
            return
        step = checkpoint.latest_step(self.store.checkpoint_dir(config, self.places[0][0])) or 0
        self.bar.update(step - bar_at)
        self._say(f"retry {failure.arm}", f"{failure}; tried again from step {step}")
        self.queue.appendleft((config, step))

    def _here(self, stop: Callable[[], bool]) -> None:
        ranks = distributed.here()
        while (self.queue or self.held) and not ranks.any(stop() or self.closed())[0]:
            found = self._next()
            if found is None:
                time.sleep(RETRY_SECONDS / 10)
                continue
            config, step = found
            self.bar.set_postfix_str(arm_name(config))
            self._train_here(config, step, stop)

    def _train_here(self, config: TrainConfig, begun_at: int, stop: Callable[[], bool]) -> None:
        """Train one arm in this process, with torchrun's other ranks where it was started so."""
        ranks, device, at = distributed.here(), self.places[0][0], begun_at
        watch = None
        if distributed.launched():
            limits = 60 * self.tolerance.idle_minutes, 60 * self.tolerance.slow_minutes
            watch = liveness.SelfWatch(self.store.trace_dir(config, device), ranks.rank, *limits)

        def on_step(step: int) -> None:
            nonlocal at
            if at == begun_at:
                self.failures.worked([str(device)])
            at = step
            self.bar.update()
            if watch is not None:
                watch.step()

        try:
            status = train_arm(
                config, self.store, corpus=self.corpus, device=device, on_step=on_step, stop=stop,
                on_phase=watch.phase if watch is not None else lambda phase: None, **self.execution,
            )  # fmt: skip
        except Exception as error:  # the other arms go on; the reason is reported
            if ranks.size > 1 and not isinstance(error, UserError):
                raise  # this rank's alone: torchrun ends the others
            failure = Failure(arm_name(config), at, one_line(error), kind_of(error), (str(device),))
            self._failed(config, failure, at)
        else:
            self._done(config, begun_at, status)
        finally:
            if watch is not None:
                watch.close()

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
                    (sharing, distinct.index(place)), self.tolerance,
                )  # fmt: skip
            self.bar.set_postfix_str(" ".join(arm_name(arm.config) for arm in running))
            wait([connection for arm in running for connection in arm.ranks], timeout=0.2)
            for arm in list(running):
                made = arm.listen(self.tolerance, time.monotonic())
                self.bar.update(made)
                if made:
                    self.failures.worked(arm.devices())
                if arm.status is None:
                    continue
                unkilled = arm.end()
                running.remove(arm)
                count()
                free.append(arm.place)
                if arm.status == "failed":
                    self._failed(arm.config, arm.failure(), arm.step)
                    if unkilled:
                        self.failures.stop(f"{unkilled} of {os.uname().nodename} cannot be ended: reset its device")
                    continue
                if arm.status in ENDINGS:
                    self.bar.update(arm.config.steps - arm.step)
                self._done(arm.config, arm.begun_at, arm.status)


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
    kind: Kind = "program"
    """Whose fault its failure is."""
    timed_out: bool = False
    """Whether it made no progress for too long."""
    culprits: list[int] = field(default_factory=list)
    """Ranks at fault; none where it cannot be told."""
    ranks: dict[Connection, multiprocessing.Process] = field(default_factory=dict)
    """Those that have not said how they ended."""
    processes: list[multiprocessing.Process] = field(default_factory=list)
    meeting: str | None = None
    """Folder of the file through which the ranks find each other."""

    def start(
        self, context, store: Store, corpus, spread: bool, execution: dict, threads: int, stopping, sharing,
        tolerance: Tolerance,
    ) -> None:  # fmt: skip
        if spread or len(self.place) > 1:
            self.meeting = tempfile.mkdtemp(prefix="mxfp4-")
        self.heartbeat, self.clock = liveness.Heartbeat(context, len(self.place)), liveness.IdleClock(time.monotonic())
        self.traces = store.trace_dir(self.config, self.place[0])
        for rank, device in enumerate(self.place):
            ours, theirs = context.Pipe(duplex=False)
            meeting = self.meeting and (f"file://{self.meeting}/ranks", rank, len(self.place))
            task = (theirs, self.config, store, corpus, str(device), execution, threads, stopping, sharing, meeting,
                    frozenset(errors.said), self.heartbeat, self.traces, tolerance.collective_minutes)  # fmt: skip
            process = context.Process(target=_child, args=task, daemon=True)
            process.start()
            theirs.close()
            self.ranks[ours] = process
            self.processes.append(process)

    def listen(self, tolerance: Tolerance, now: float) -> int:
        """Take in what the ranks have done and said by `now`; the steps made since. `status` is set when all, or a failure,
        has ended, or when no rank gets on."""
        at = max(self.heartbeat.steps()) or self.step
        made, self.step = at - self.step, at
        self._take_endings()
        if self.status is None:
            self._watch(tolerance, self.clock.look(self.heartbeat.beats(), now))
        return made

    def _take_endings(self) -> None:
        for connection in wait(list(self.ranks), timeout=0):
            process, silent = self.ranks[connection], False
            try:
                status, reason, kind = connection.recv()
            except EOFError:  # the process ended without a word
                process.join()
                status, reason, kind, silent = "failed", f"ended with exit code {process.exitcode}", "device", True
            del self.ranks[connection]
            connection.close()
            if status == "failed":
                rank = self.processes.index(process)
                if silent:
                    reason = f"rank {rank} {reason}" if self.meeting else f"its process {reason}"
                if (
                    silent or self.status != "failed"
                ):  # a rank that vanishes is the cause of what the others then report
                    self.reason, self.kind = reason, kind
                    # A collective that timed out ends every rank that waited, by SIGABRT.
                    self.culprits = [] if process.exitcode == -signal.SIGABRT else [rank]
                self.status = status
            elif not self.ranks and self.status is None:
                self.status = status

    def _watch(self, tolerance: Tolerance, idle: float) -> None:
        """End an arm of which no rank has made a step in `idle` seconds, where that is too long."""
        if idle < 60 * tolerance.idle_minutes:
            return
        phases = sorted(set(self.heartbeat.phases()))
        if phases != ["training"] and idle < 60 * tolerance.slow_minutes and not self._in_state("stopped"):
            return
        self.status, self.kind, self.timed_out = "failed", "device", True
        self.reason = f"no progress for {idle / 60:.3g} min while {' and '.join(phases)}"

    def _states(self) -> list[str]:
        return [
            liveness.process_state(p.pid) if p.pid and p.exitcode is None else f"ended with exit code {p.exitcode}"
            for p in self.processes
        ]

    def _in_state(self, state: str) -> list[int]:
        return [rank for rank, found in enumerate(self._states()) if found.startswith(state)]

    def _diagnose(self) -> None:
        """Say in `reason` which ranks live and what they leave behind, before they are ended."""
        hung = self._in_state("stopped") or self._in_state(liveness.BLOCKED)
        if hung or not self.culprits:
            self.culprits = hung
        if self.kind == "user" or not (self.meeting or self.timed_out):
            return
        liveness.ask_for_stacks([p.pid for p in self.processes if p.pid and p.exitcode is None])
        time.sleep(STACKS_SECONDS)
        states = zip(self.place, self.processes, self._states(), strict=True)
        ranks = (f"rank {rank} ({d}, pid {p.pid}) {state}" for rank, (d, p, state) in enumerate(states))
        self.reason = "; ".join(
            [f"{self.reason}: {', '.join(ranks)}", *filter(None, [liveness.left_behind(self.traces)])]
        )

    def devices(self) -> tuple[str, ...]:
        """Names of the devices at fault, or of all."""
        return tuple(dict.fromkeys(str(self.place[rank]) for rank in self.culprits or range(len(self.place))))

    def failure(self) -> Failure:
        return Failure(arm_name(self.config), self.step, self.reason or "unknown", self.kind, self.devices())

    def end(self) -> str:
        """After the last word: let the processes end, or end those that wait for one that failed. What cannot be ended, in
        words; empty if nothing."""
        if self.ranks:
            wait(list(self.ranks), timeout=1.0)
            self._take_endings()
        failed = self.status == "failed"
        if failed:
            self._diagnose()
        for process in self.processes:
            process.join(1.0 if failed else None)
            process.kill()
            process.join(KILL_SECONDS)
        for connection in self.ranks:
            connection.close()
        if self.meeting:
            shutil.rmtree(self.meeting, ignore_errors=True)
        if not failed:
            shutil.rmtree(self.traces, ignore_errors=True)
        left = [
            f"process {p.pid} on {d}" for p, d in zip(self.processes, self.place, strict=True) if p.exitcode is None
        ]
        return ", ".join(left)


def _child(
    connection: Connection, config, store, corpus, device, execution, threads, stopping, sharing, meeting, said,
    heartbeat: liveness.Heartbeat, traces: Path, collective_minutes: float,
) -> None:  # fmt: skip
    """Train one arm, or be one rank of it; show the parent each step, then tell it how it ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    errors.print_notices(said)
    torch.set_num_threads(threads)
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(threads))  # its own default is every core, for each arm
    parent, reason, kind = multiprocessing.parent_process(), None, "program"
    rank = meeting[1] if meeting else 0
    counts, place = sharing
    try:
        liveness.offer_stacks(traces, rank)
        timeout = timedelta(minutes=collective_minutes)
        with distributed.joined(device, meeting, timeout=timeout, flight=traces) if meeting else nullcontext():
            status = train_arm(
                config, store, corpus=corpus, device=device, on_step=lambda step: heartbeat.step(rank, step),
                on_phase=lambda phase: heartbeat.phase(rank, phase),
                stop=lambda: stopping.is_set() or not parent.is_alive(), arms_on_device=lambda: max(counts[place], 1),
                **execution,
            )  # fmt: skip
    except Exception as error:  # reported by the parent in one line
        status, reason, kind = "failed", one_line(error), kind_of(error)
    with suppress(ConnectionError):  # no parent left to tell
        connection.send((status, reason, kind))


def one_line(error: Exception) -> str:
    """The error in one line, with its type unless it is a UserError."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if isinstance(error, UserError) else f"{type(error).__name__}: {text}"
