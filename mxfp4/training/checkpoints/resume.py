"""Where a run goes on: writes and reads its checkpoints, in one process or on several ranks.

A process by itself writes a file, and resumes to the same bytes. Ranks write a folder together (`sharded`), beside
the training: the step waits only while the state is copied to the host's memory. Either kind is read by any number
of ranks. `due` lets at most SHARE of the time go into such waiting, so a large model is saved less often.
"""

from __future__ import annotations

import time
import warnings
from concurrent.futures import Future
from pathlib import Path

import torch
from torch import Tensor, nn

from mxfp4.errors import Notice, UserError
from mxfp4.numerics.ops.fp8_delayed import BUFFERS
from mxfp4.training.checkpoints import checkpoint
from mxfp4.training.execution.distributed import Ranks, fill

SHARE = 0.02
MOMENTS = ("exp_avg", "exp_avg_sq", "step")


def named_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Every tensor that a run goes on from, under a name that no sharding changes: parameters, the buffers of delayed
    scaling, and AdamW's state, which is made where a first step has not made it yet."""
    if hasattr(model, "reshard"):
        model.reshard()  # after an evaluation FSDP leaves the root's parameters gathered, not those that are trained
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


def _names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Names of the parameters in the optimizer's order, which is that of its state_dict."""
    name_of = {id(p): name for name, p in model.named_parameters()}
    return [name_of[id(p)] for group in optimizer.param_groups for p in group["params"]]


class Checkpoints:
    """The checkpoints of one run in `folder`. seconds: least time between two of them; 0: one a step."""

    def __init__(self, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, ranks: Ranks, seconds: float):
        self.folder, self.model, self.optimizer, self.ranks, self.seconds = folder, model, optimizer, ranks, seconds
        self.split = ranks.control is not None
        if self.split:
            from mxfp4.training.checkpoints import sharded  # slow to import: not while a step waits

            self.copier = sharded.copier(next(model.parameters()).device)
        self.writing: Future | None = None
        self.saved, self.waited = time.monotonic(), 0.0

    def due(self) -> bool:
        """Whether it is time to save, by this rank's clock."""
        if self.seconds and self.writing is not None and not self.writing.done():
            return False
        wait = max(self.seconds, self.waited / SHARE) if self.seconds else 0.0
        return time.monotonic() - self.saved >= wait

    def save(self, step: int, plain: dict, *, wait: bool) -> None:
        """Save the state after `step` and `plain` data. wait: until it is on the disk. Raises UserError where a
        checkpoint, this one or the one before, cannot be written."""
        started = time.monotonic()
        if not self.split:
            state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), **plain}
            checkpoint.save(self.folder, step, state)
        else:
            from mxfp4.training.checkpoints import sharded

            self._settle()
            if self.ranks.rank == 0:
                checkpoint.prune(self.folder)
            path = checkpoint.path_of(self.folder, step, split=True)
            tensors = named_tensors(self.model, self.optimizer)
            self.writing = sharded.write(path, tensors, plain, self.ranks, self.copier)
            if wait:
                self._settle()
        self.saved = time.monotonic()
        self.waited = self.saved - started

    def close(self, *, needed: bool) -> None:
        """Wait for a write in work. needed: False turns its failure into a warning, as the run has its result."""
        try:
            self._settle()
        except UserError as error:
            if needed:
                raise
            warnings.warn(str(error), Notice, stacklevel=2)

    def _settle(self) -> None:
        if self.writing is not None:
            writing, self.writing = self.writing, None
            writing.result()
            if self.ranks.rank == 0:
                checkpoint.prune(self.folder)

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

    def load(self, check) -> tuple[int, dict] | None:
        """Restore the newest whole checkpoint; (step, plain data), None where there is none. A damaged one is named
        in a warning, set aside and passed over. check: called with the plain data before anything is restored; may raise."""

        def load(path: Path) -> dict:
            return self._load_folder(path, check) if path.suffix == "" else self._load_file(path, check)

        paths = self.ranks.agree(checkpoint.entries(self.folder))
        first = self.ranks.rank == 0
        return checkpoint.newest(paths, load, warn=first, resuming=first)

    def _load_folder(self, path: Path, check) -> dict:
        from mxfp4.training.checkpoints import sharded  # slow to import

        problem = sharded.problem(path, self.ranks)
        if problem is not None:
            raise checkpoint.Damaged(problem)
        plain = sharded.rest(path)
        check(plain)
        sharded.read(path, named_tensors(self.model, self.optimizer), self.ranks)
        return plain

    def _load_file(self, path: Path, check) -> dict:
        problem, state = None, None
        try:
            device = "cpu" if self.split else next(self.model.parameters()).device
            state = checkpoint.read(path, map_location=device)
        except checkpoint.Damaged as error:
            problem = str(error)
        problem = next((p for p in self.ranks.gather(problem) if p is not None), None)
        if problem is not None:
            raise checkpoint.Damaged(problem)
        weights, moments = state.pop("model"), state.pop("optimizer")
        check(state)
        if not self.split:
            self.model.load_state_dict(weights)
            self.optimizer.load_state_dict(moments)
            return state
        there = {f"model.{name}": value for name, value in weights.items()}
        for index, name in enumerate(_names(self.model, self.optimizer)):
            there |= {f"{moment}.{name}": moments["state"][index][moment] for moment in MOMENTS}
        for name, tensor in named_tensors(self.model, self.optimizer).items():
            fill(tensor, there[name])
        return state
