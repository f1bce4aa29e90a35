"""Checkpoints of one run on one device: a folder of `step-00000123.pt`, each with its SHA-256 beside it.

A checkpoint is written under a temporary name, synced, and renamed; then its `.sha256` (the format of
sha256sum) likewise. Without a matching sum it does not count, so a write cut short by a crash or a full
disk, or bytes that rot later, are noticed, and the one before is used. The newest KEEP are kept. Loading
allows tensors and plain data only (weights_only), never code.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import re
import warnings
from pathlib import Path

import torch

from mxfp4.errors import UserError

KEEP = 2
_NAME = re.compile(r"step-(\d{8})\.pt")


def save(folder: Path | str, step: int, state: dict) -> Path:
    """Write `state` (tensors and plain data) as the checkpoint of `step`, then drop all but the newest KEEP.

    Raises UserError when it cannot be written, e.g. on a full disk; earlier checkpoints are then as they
    were.
    """
    folder = Path(folder)
    path = folder / f"step-{step:08d}.pt"
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
        reason = (
            "the disk is full"
            if error.errno in (errno.ENOSPC, errno.EDQUOT)
            else error.strerror or str(error)
        )
        raise UserError(f"cannot write checkpoint {path}: {reason}; earlier checkpoints are intact") from None
    for old in _files(folder)[KEEP:]:
        _remove(old)
    return path


def load_latest(folder: Path | str, map_location="cpu") -> tuple[int, dict] | None:
    """(step, state) of the newest whole checkpoint, or None. A damaged one is named in a warning and passed
    over."""
    for path in _files(Path(folder)):
        problem = _problem(path)
        if problem is None:
            try:
                state = torch.load(path, map_location=map_location, weights_only=True)
            except (
                Exception
            ) as error:  # the sum fits, so the file holds something else than a state: named, passed over
                problem = f"cannot be loaded ({type(error).__name__})"
            else:
                return int(_NAME.fullmatch(path.name)[1]), state
        warnings.warn(f"checkpoint {path} {problem}; using the one before it", stacklevel=2)
    return None


def latest_step(folder: Path | str) -> int | None:
    """Step of the newest whole checkpoint, without loading it; None when there is none."""
    return next((int(_NAME.fullmatch(p.name)[1]) for p in _files(Path(folder)) if _problem(p) is None), None)


def remove(folder: Path | str) -> None:
    """Delete the checkpoints of a finished run, and the folder if nothing else is in it."""
    folder = Path(folder)
    for path in _files(folder):
        _remove(path)
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def write_atomic(path: Path, data) -> None:
    """Replace `path` by `data` (bytes-like): the old file or the whole new one, whatever happens. Raises
    OSError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def sync_folder(folder: Path) -> None:
    """Make renames in `folder` durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _files(folder: Path) -> list[Path]:
    """Checkpoints, newest first."""
    if not folder.is_dir():
        return []
    return sorted((p for p in folder.iterdir() if _NAME.fullmatch(p.name)), reverse=True)


def _sum_path(path: Path) -> Path:
    return path.with_suffix(".sha256")


def _problem(path: Path) -> str | None:
    try:
        wanted = _sum_path(path).read_text().split()[0]
    except (OSError, IndexError, UnicodeDecodeError):
        return "was not finished"
    with open(path, "rb") as file:
        return None if hashlib.file_digest(file, "sha256").hexdigest() == wanted else "is damaged"


def _remove(path: Path) -> None:
    _sum_path(path).unlink(missing_ok=True)
    path.unlink(missing_ok=True)
