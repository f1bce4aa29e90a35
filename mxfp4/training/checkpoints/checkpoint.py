"""The checkpoints of a run: a folder of `step-00000123.pt`, each with its SHA-256 beside it, as one process writes
them, or of folders `step-00000123` (`sharded`), as several ranks do.

A single-file checkpoint is written under a temporary name, synced, and renamed; then its `.sha256` (the format of
sha256sum) likewise. Without a matching sum it does not count, so a write cut short by a crash or a full
disk, or bytes that rot later, are noticed, and the one before is used; what is damaged is set aside, as
`step-00000123.damaged`, until its run is finished. The newest KEEP of both kinds are kept.
Loading allows tensors and plain data only (weights_only), never code.
"""

from __future__ import annotations

import errno
import hashlib
import io
import re
import shutil
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

import torch

from mxfp4.errors import Notice, UserError
from mxfp4.training.checkpoints.durable_files import write_atomic

KEEP = 2
SUMS = "SHA256SUMS"
"""The file without which a folder does not count: the sums of all others, in sha256sum's format."""
DAMAGED = ".damaged"
T = TypeVar("T")
_NAME = re.compile(r"step-(\d{8})(\.pt)?")


class Damaged(Exception):
    """A checkpoint that cannot be used; the message ends "checkpoint PATH ..."."""


def save(folder: Path | str, step: int, state: dict) -> Path:
    """Write `state` (tensors and plain data) as the checkpoint of `step`, then drop all but the newest KEEP.

    Raises UserError when it cannot be written, e.g. on a full disk; earlier checkpoints are then as they
    were.
    """
    folder = Path(folder)
    path = path_of(folder, step, split=False)
    buffer = io.BytesIO()
    torch.save(state, buffer)
    data = buffer.getbuffer()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob(".*.tmp"):  # by a killed run
            left.unlink(missing_ok=True)
        _sum_path(path).unlink(missing_ok=True)
        write_atomic(path, data)
        write_atomic(_sum_path(path), f"{hashlib.sha256(data).hexdigest()}  {path.name}\n".encode())
    except OSError as error:
        reason = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror or str(error)
        raise UserError(f"cannot write checkpoint {path}: {reason}; earlier checkpoints are intact") from None
    prune(folder)
    return path


def path_of(folder: Path | str, step: int, *, split: bool) -> Path:
    """Where the checkpoint of `step` lies: a folder if it is `split` over ranks, else a file."""
    return Path(folder) / f"step-{step:08d}{'' if split else '.pt'}"


def step_of(path: Path) -> int:
    """The step in a checkpoint's name."""
    name = _NAME.fullmatch(path.name)
    if name is None:
        raise ValueError(f"{path.name} is no checkpoint's name")
    return int(name[1])


def read(path: Path, map_location="cpu") -> dict:
    """The state in a single-file checkpoint. Raises Damaged."""
    problem = _problem(path)
    if problem is None:
        try:
            return torch.load(path, map_location=map_location, weights_only=True)
        except Exception as error:  # the sum fits, so the file holds something else than a state
            problem = f"cannot be loaded ({type(error).__name__})"
    raise Damaged(problem)


def newest(
    paths: Iterable[Path], load: Callable[[Path], T], *, warn: bool = True, resuming: bool = False
) -> tuple[int, T] | None:
    """(step, `load(path)`) of the first of `paths` (see `entries`) that `load` does not find Damaged, or None.

    warn: name those that are passed over, and what is done instead, in warnings. resuming: the run itself asks, and
    sets those aside that were finished once.
    """
    passed, found = [], None
    for path in paths:
        try:
            found = step_of(path), load(path)
            break
        except Damaged as problem:
            passed.append((path, f"{problem}{_set_aside(path) if resuming else ''}"))
    if passed and warn and found is None:
        each = ", ".join(f"{path.name} {problem}" for path, problem in passed)
        then = ": starting from the beginning" if resuming else ""
        warnings.warn(f"no checkpoint in {passed[0][0].parent} is whole ({each}){then}", Notice, stacklevel=2)
    for path, problem in passed if warn and found else ():
        warnings.warn(f"checkpoint {path} {problem}; going on from step {found[0]}", Notice, stacklevel=2)
    return found


def _set_aside(path: Path) -> str:
    """Rename a damaged checkpoint, so that it counts no longer among the newest; ", now NAME", or nothing for one that
    was never finished, which goes with the next that is."""
    if not _sealed(path):
        return ""
    aside = path.with_name(f"{path.name}{DAMAGED}")
    try:
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)
    except OSError:
        return ""
    _sum_path(path).unlink(missing_ok=True)
    return f", now {aside.name}"


def _sealed(path: Path) -> bool:
    """Whether its sums are there: they are written last."""
    return (path / SUMS if path.is_dir() else _sum_path(path)).is_file()


def latest_step(folder: Path | str) -> int | None:
    """Step of the newest whole checkpoint, without loading it; None when there is none. The bytes of one in a folder,
    which may be many, are not read."""
    for path in entries(folder):
        if (path / SUMS).is_file() if path.is_dir() else _problem(path) is None:
            return step_of(path)
    return None


def prune(folder: Path) -> None:
    """Drop all but the newest KEEP, and what a killed run left unfinished."""
    found = entries(folder)
    whole = [p for p in found if _sealed(p)]
    for path in found:
        if path not in whole[:KEEP]:
            _remove(path)


def remove(folder: Path | str) -> None:
    """Delete the checkpoints of a finished run, and the folder if nothing else is in it."""
    folder = Path(folder)
    for path in (*entries(folder), *folder.glob(f"step-*{DAMAGED}")):
        _remove(path)
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def entries(folder: Path | str) -> list[Path]:
    """Checkpoints of both kinds, newest first, whole or not."""
    try:
        found = [p for p in Path(folder).iterdir() if (m := _NAME.fullmatch(p.name)) and (m[2] or p.is_dir())]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(found, key=lambda p: p.name[:13], reverse=True)


def _sum_path(path: Path) -> Path:
    return path.with_suffix(".sha256")


def _problem(path: Path) -> str | None:
    try:
        wanted = _sum_path(path).read_text().split()[0]
    except (OSError, IndexError, UnicodeDecodeError):
        return "was not finished"
    try:
        with open(path, "rb") as file:
            return None if hashlib.file_digest(file, "sha256").hexdigest() == wanted else "is damaged"
    except OSError as error:  # also one that its run, or a newer checkpoint, has just removed
        return f"cannot be read ({error.strerror or error})"


def _remove(path: Path) -> None:
    if path.is_dir():
        (path / SUMS).unlink(missing_ok=True)  # first: what is half removed does not count
        shutil.rmtree(path, ignore_errors=True)
        return
    _sum_path(path).unlink(missing_ok=True)
    path.unlink(missing_ok=True)
