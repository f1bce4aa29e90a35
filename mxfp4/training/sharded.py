"""One checkpoint of a run over several ranks: a folder of PyTorch's distributed checkpoint (DCP), whole or not there.

    step-00000123/__0_0.distcp, ...   tensors, each rank's shards in a file of its own
                  .metadata           DCP's index
                  run.json            everything else: plain data
                  SHA256SUMS          all of these, in sha256sum's format: written last, renamed into place

A folder without SHA256SUMS does not count, so a write cut short at any moment is noticed; bytes that rot later
disagree with their sums. Any number of ranks reads it, whatever number wrote it. The index is a pickle, so unlike a
single-file checkpoint it is to be trusted like code: read folders that your own runs wrote.

Source: PyTorch, torch.distributed.checkpoint.
"""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
import warnings
from concurrent.futures import Future
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import AsyncStager, BlockingAsyncStager

from mxfp4.errors import UserError
from mxfp4.training.checkpoint import SUMS
from mxfp4.training.durable import sync_folder, write_atomic
from mxfp4.training.parallel import Ranks

REST = "run.json"


def problem(path: Path, ranks: Ranks) -> str | None:
    """What is wrong with the folder, the same on every rank; each reads its share of the files. None: nothing."""
    try:
        sums = dict(reversed(line.split("  ", 1)) for line in (path / SUMS).read_text().splitlines())
    except (OSError, ValueError):
        sums = {}
    if not all(ranks.gather({".metadata", REST} <= sums.keys())):  # a rank may not see yet what another one does
        return "was not finished"
    bad = [name for name in sorted(sums)[ranks.rank :: ranks.size] if _sum(path / name) != sums[name]]
    bad = sorted(name for names in ranks.gather(bad) for name in names)
    return f"is damaged ({bad[0]})" if bad else None


def rest(path: Path) -> dict:
    """The plain data of a whole folder."""
    return json.loads((path / REST).read_bytes())


def read(path: Path, tensors: dict[str, Tensor], ranks: Ranks) -> None:
    """Overwrite `tensors`, as they are spread over `ranks`, by those of a whole folder. Raises UserError."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process: as it should be
            dcp.load(tensors, checkpoint_id=path, process_group=ranks.control, no_dist=ranks.control is None)
    except (Exception, CheckpointException) as error:  # its bytes are right: another PyTorch, or another model
        raise UserError(
            f"checkpoint {path} is whole, and cannot be read ({_reason(error)}): move it away to go on from the one "
            "before it"
        ) from None


def copier(device: torch.device) -> AsyncStager:
    """What copies a run's tensors before they are written; on a GPU into pinned memory, made at the first copy."""
    return BlockingAsyncStager(cache_staged_state_dict=device.type == "cuda")


def write(path: Path, tensors: dict[str, Tensor], plain: dict, ranks: Ranks, copier: AsyncStager) -> Future:
    """Begin to write `path`, and return when `tensors` may change again. All ranks call it, with the same `plain`,
    after the write before has ended.

    `result()` of what it returns waits for the end and raises UserError, on every rank, where one could not write.
    """
    writer = _Writer(path, plain)
    begun = dcp.async_save(tensors, storage_writer=writer, async_stager=copier, process_group=ranks.writers)
    done: Future = Future()

    def finish(future: Future) -> None:
        error = future.exception()
        if error is None:
            done.set_result(path)
            return
        if ranks.rank == 0:
            shutil.rmtree(path, ignore_errors=True)  # a full disk needs the room
        done.set_exception(
            UserError(f"cannot write checkpoint {path}: {_reason(error)}; earlier checkpoints are intact")
        )

    begun.add_done_callback(finish)
    return done


class _Writer(dcp.FileSystemWriter):
    """DCP's writer of files, which also keeps their sums; the last thing it writes is SUMS."""

    def __init__(self, path: Path, plain: dict):
        super().__init__(path)
        self.folder, self.plain = Path(path), plain

    def prepare_local_plan(self, plan):
        return plan  # the folder is made below, by one rank

    def prepare_global_plan(self, plans):
        shutil.rmtree(self.folder, ignore_errors=True)  # left by a killed run
        self.folder.mkdir(parents=True)
        return super().prepare_global_plan(plans)

    def write_data(self, plan, planner):
        written = super().write_data(plan, planner)
        names = sorted({result.storage_data.relative_path for result in written.value()})
        if names:
            write_atomic(self.folder / f"{names[0]}.sums", _lines(self.folder, names).encode())
        return written

    def finish(self, metadata, results):
        super().finish(metadata, results)
        write_atomic(self.folder / REST, json.dumps(self.plain).encode())
        parts = sorted(self.folder.glob("*.sums"))
        lines = "".join(p.read_text() for p in parts) + _lines(self.folder, [".metadata", REST])
        for part in parts:
            part.unlink()
        write_atomic(self.folder / SUMS, lines.encode())
        sync_folder(self.folder.parent)


def _lines(folder: Path, names: list[str]) -> str:
    return "".join(f"{_sum(folder / name)}  {name}\n" for name in names)


def _sum(path: Path) -> str | None:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None


def _reason(error: BaseException) -> str:
    """One line for what went wrong on the first rank that failed."""
    if isinstance(error, CheckpointException) and error.failures:
        error = error.failures[min(error.failures)][0]
    if isinstance(error, OSError):
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        return "the disk is full" if full else error.strerror or str(error)
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
