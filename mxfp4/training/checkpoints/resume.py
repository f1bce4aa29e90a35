"""Where a run goes on: writes and reads its checkpoints, in one process or on several ranks.

Every checkpoint is written beside the training (`dcp_folder`): the step waits only while the state is copied to the
host's memory. It is read by any number of ranks; a run that resumes on as many has the bytes of one that never stopped.

How often: `minutes` apart at least, and so rarely that the waiting takes at most SHARE of the time; none is begun while
one is in writing, or where the disk has no room for it. KEEP whole ones are kept, so KEEP + 1 are on the disk while one
is written. No disk ends a run: a write that fails or stalls is a warning that names the step that would be resumed
from, and the next is tried when it is due. Only a pause, which exists to leave a checkpoint, fails without one.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path

import torch
from torch import Tensor, nn

from mxfp4.errors import Notice, UserError
from mxfp4.numerics.ops.fp8_delayed import BUFFERS
from mxfp4.training.checkpoints import checkpoint
from mxfp4.training.checkpoints.durable_files import free_space, why
from mxfp4.training.execution.distributed import Ranks

SHARE = 0.02
STALLED_MINUTES = 10.0
"""A write that has not ended after so long, or after the time between two checkpoints if that is longer, has stalled:
100 GB take so long at 170 MB/s."""
MOMENTS = ("exp_avg", "exp_avg_sq", "step")


def named_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Every tensor that a run goes on from, under a name that no sharding changes: parameters, the buffers of delayed
    scaling, and AdamW's state, which is made where a first step has not made it yet."""
    reshard = getattr(model, "reshard", None)
    if callable(reshard):
        reshard()  # after an evaluation FSDP leaves the root's parameters gathered, not those that are trained
    found = {f"model.{name}": b for name, b in model.named_buffers() if name.rpartition(".")[2] in BUFFERS}
    for name, parameter in model.named_parameters():
        state = optimizer.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            for moment in MOMENTS[:2]:
                state[moment] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        found[f"model.{name}"] = parameter.detach()
        found |= {f"{moment}.{name}": state[moment] for moment in MOMENTS}
    return found


class Checkpoints:
    """The checkpoints of one run in `folder`. minutes: least time between two of them; 0: one a step, waited for."""

    def __init__(self, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, ranks: Ranks, minutes: float):
        from mxfp4.training.checkpoints import dcp_folder  # slow to import: not while a step waits

        self.folder, self.model, self.optimizer, self.ranks = folder, model, optimizer, ranks
        self.seconds = 60 * minutes
        self.copier = dcp_folder.copier(next(model.parameters()).device)
        self.writing: Future | None = None
        self.step = 0  # that is written now, or was tried last
        self.whole: int | None = None  # step of the newest whole one
        self.error: UserError | None = None  # of the last write, until it is reported
        self.saved, self.waited = time.monotonic(), 0.0
        self.warn_after = 0.0  # seconds after `saved`

    def due(self) -> bool:
        """Whether it is time to save, by this rank's clock. Reports a write that has failed or stalled."""
        if self.writing is not None and not self.writing.done():
            self._warn_if_stalled()
            return False
        self._settle()
        self._report()
        wait = max(self.seconds, self.waited / SHARE) if self.seconds else 0.0
        return time.monotonic() - self.saved >= wait

    def save(self, step: int, plain: dict) -> None:
        """Begin to save the state after `step` and `plain` data; with a time of 0 between two, wait for the end."""
        from mxfp4.training.checkpoints import dcp_folder

        self._settle()
        started, self.step, self.error = time.monotonic(), step, None
        path = checkpoint.path_of(self.folder, step)
        tensors = named_tensors(self.model, self.optimizer)
        problem = None
        if self.ranks.rank == 0:
            checkpoint.prune(self.folder)
            problem = _no_room(self.folder, sum(t.numel() * t.element_size() for t in tensors.values()))
        if problem := self.ranks.agree(problem):
            self.error = UserError(f"cannot write checkpoint {path}: {problem}{self._last()}")
        else:
            self.writing = dcp_folder.write(path, tensors, plain, self.ranks, self.copier)
        self.saved = time.monotonic()
        self.waited = self.saved - started
        self.warn_after = max(self.seconds, 60 * STALLED_MINUTES)
        if not self.seconds:
            self._settle()

    def close(self, *, needed: bool) -> None:
        """Wait for a write in work. needed: raise UserError where the last one failed, rather than warn."""
        self._settle()
        if needed and self.error is not None:
            raise self.error
        self._report()

    def _settle(self) -> None:
        """Wait for a write in work and note how it ended."""
        if self.writing is None:
            return
        while not wait([self.writing], min(max(self.saved + self.warn_after - time.monotonic(), 0.0), 3600.0)).done:
            self._warn_if_stalled()
        error, self.writing = self.writing.exception(), None
        if error is None:
            self.whole = self.step
            if self.ranks.rank == 0:
                checkpoint.prune(self.folder)
        else:
            self.error = UserError(f"{error}{self._last()}")

    def _report(self) -> None:
        """Warn, once, of a write that failed."""
        if self.error is not None and self.ranks.rank == 0:
            warnings.warn(f"{self.error}; training goes on", Notice, stacklevel=3)
        self.error = None

    def _warn_if_stalled(self) -> None:
        """Warn of a write that takes too long, and again whenever it has taken twice as long as at the last warning."""
        lasts = time.monotonic() - self.saved
        if lasts < self.warn_after:
            return
        self.warn_after = 2 * lasts
        if self.ranks.rank == 0:
            path = checkpoint.path_of(self.folder, self.step)
            warnings.warn(
                f"checkpoint {path} has been in writing for {lasts / 60:.0f} min: its disk may have stalled; no other "
                f"is written meanwhile{self._last()}",
                Notice,
                stacklevel=3,
            )

    def _last(self) -> str:
        """What a run would resume from now."""
        return "; no checkpoint is whole yet" if self.whole is None else f"; the last whole one is of step {self.whole}"

    def last_step(self) -> int:
        """Step of the newest checkpoint, once a write in work has ended; 0 without one."""
        self._settle()
        return self.ranks.agree(checkpoint.latest_step(self.folder) or 0)

    @torch.no_grad()
    def zero_moments(self) -> None:
        """The optimizer's state as before its first step."""
        for name, tensor in named_tensors(self.model, self.optimizer).items():
            if not name.startswith("model."):
                tensor.zero_()

    def load(self, check: Callable[[dict], None]) -> tuple[int, dict] | None:
        """Restore the newest whole checkpoint; (step, plain data), None where there is none. A damaged one is named
        in a warning, set aside and passed over. check: called with the plain data before anything is restored; may raise."""
        from mxfp4.training.checkpoints import dcp_folder

        def load(path: Path) -> dict:
            problem = dcp_folder.problem(path, self.ranks)
            if problem is not None:
                raise checkpoint.Damaged(problem)
            plain = checkpoint.plain(path)
            check(plain)
            dcp_folder.read(path, named_tensors(self.model, self.optimizer), self.ranks)
            return plain

        paths = self.ranks.agree(checkpoint.entries(self.folder))
        first = self.ranks.rank == 0
        found = checkpoint.newest(paths, load, warn=first, resuming=first)
        self.whole = found[0] if found else None
        return found


def _no_room(folder: Path, size: int) -> str | None:
    """Why `size` bytes cannot be written; None where they can."""
    try:
        free = free_space(folder)
    except OSError as error:
        return why(error)
    return f"it takes {size / 1e9:.3g} GB and {free / 1e9:.3g} GB are free" if size > free else None
