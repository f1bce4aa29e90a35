"""What the queue does about arms that fail: try again, give the arm up, or stop.

| failure                                          | is tried again                      | counts against its device |
|--------------------------------------------------|-------------------------------------|---------------------------|
| a mistake of the user's (UserError)              | no                                  | no                        |
| of the program: any other exception              | from the last checkpoint            | no                        |
| of the device: a process is killed, stopped, or  | from the last checkpoint            | yes                       |
| makes no progress; an error of the GPU or NCCL   |                                     |                           |

An arm is tried again at most `Tolerance.retries` times in a call. An arm that fails twice at the same step is at fault
itself: it is given up, and its failures no longer count against a device on which an arm has made a step since. The queue
stops once one device has `Tolerance.device_failures` failures, of different arms or at different steps.

Where ranks share an arm, the devices of those that were stopped or ended first count; where none stands out, all do.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from mxfp4.errors import UserError

Kind = Literal["user", "program", "device"]


@dataclass(frozen=True)
class Tolerance:
    """How long the queue waits for an arm, and how many failures it takes."""

    collective_minutes: float = 10.0
    """Longest wait of a rank for the others in a collective on the device; then NCCL writes its flight recorder and ends
    the rank."""
    idle_minutes: float = 15.0
    """Longest time without a step of any rank while an arm trains. More than collective_minutes, so that the flight
    recorder is written first."""
    slow_minutes: float = 60.0
    """The same while it starts and compiles, writes a checkpoint that it waits for, or stores its result."""
    retries: int = 2
    """Times that an arm which failed is tried again."""
    device_failures: int = 3
    """Failures of one device at which the queue stops."""

    def __post_init__(self):
        for name in ("collective_minutes", "idle_minutes", "slow_minutes", "device_failures"):
            if not getattr(self, name) > 0:
                raise UserError(f"{name}={getattr(self, name)} must be positive")
        if self.retries < 0:
            raise UserError(f"retries={self.retries} must not be negative; 0 tries no arm again")


TOLERANCE = Tolerance()


def kind_of(error: Exception) -> Kind:
    """Whose fault an exception of a rank is, as far as its type tells."""
    if isinstance(error, UserError):
        return "user"
    return "device" if isinstance(error, (torch.AcceleratorError, dist.DistError)) else "program"


@dataclass(frozen=True)
class Failure:
    """One failed attempt at an arm."""

    arm: str
    step: int
    """The last step that it finished."""
    reason: str
    kind: Kind
    devices: tuple[str, ...]
    """Those at fault: cuda:3."""

    def __str__(self) -> str:
        return f"{self.arm} at step {self.step} on {' '.join(self.devices)}: {self.reason}"


@dataclass
class Failures:
    """The failures of one call of `run_plan`, and its log file. `stopped` says why the queue is to stop."""

    tolerance: Tolerance
    log: Path | None = None
    """Gets a line with the UTC time for each event; made with the first. None: no log."""
    stopped: str | None = None
    arms: dict[str, list[Failure]] = field(default_factory=dict)
    """{arm: its failures}."""
    against: dict[str, set[tuple[str, int]]] = field(default_factory=dict)
    """{device: the (arm, step) that count against it}."""
    at_fault: set[str] = field(default_factory=set)
    """Arms given up as at fault themselves."""
    retried: dict[str, int] = field(default_factory=dict)
    """{arm: times that it was tried again}."""

    def add(self, failure: Failure) -> str | None:
        """Take a failure into account: None if the arm is to be tried again, else its reason with why it is not."""
        before = self.arms.setdefault(failure.arm, [])
        same = failure.kind != "user" and any(f.step == failure.step for f in before)
        before.append(failure)
        if failure.kind == "device":
            for device in failure.devices:
                self.against.setdefault(device, set()).add((failure.arm, failure.step))
        if same:
            self.at_fault.add(failure.arm)
        verdict = self._verdict(failure, same, len(before))
        if verdict is None:
            self.retried[failure.arm] = self.retried.get(failure.arm, 0) + 1
        self.write(f"failed: {failure}; {'tried again from its last checkpoint' if verdict is None else 'given up'}")
        self._stop_at_broken_device(failure.devices)
        return verdict

    def _verdict(self, failure: Failure, same: bool, attempts: int) -> str | None:
        if failure.kind == "user":
            return failure.reason
        if same:
            return f"{failure.reason}; twice at step {failure.step}: the arm's own fault"
        if attempts > self.tolerance.retries:
            return failure.reason + (f"; attempt {attempts}" if attempts > 1 else "")
        return None

    def _stop_at_broken_device(self, devices: Iterable[str]) -> None:
        for device in devices:
            counted = sorted(self.against.get(device, ()))
            if len(counted) >= self.tolerance.device_failures and self.stopped is None:
                where = ", ".join(f"{arm} at step {step}" for arm, step in counted)
                self.stop(f"{device} of {os.uname().nodename} failed {len(counted)} times ({where})")

    def stop(self, why: str) -> None:
        """Stop the queue: `why` names the device."""
        self.stopped = why
        self.write(f"stopped: {why}")

    def worked(self, devices: Iterable[str]) -> None:
        """An arm has made a step on `devices`: what arms at fault did there no longer counts against them."""
        for device in devices:
            if device in self.against:
                self.against[device] = {(arm, step) for arm, step in self.against[device] if arm not in self.at_fault}

    def write(self, line: str) -> None:
        """Append a line to the log."""
        if self.log is None:
            return
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log, "a") as file:
            file.write(f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} {line}\n")
