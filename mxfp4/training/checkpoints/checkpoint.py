"""The checkpoints of a run: a folder of `step-00000123`, each a folder that `dcp_folder` writes and reads.

A checkpoint without its SHA256SUMS, which is written last, does not count: so a write cut short by a crash or a full
disk is noticed. One whose bytes disagree with its sums is named and set aside, as `step-00000123.damaged`, until its
run is finished, and the one before it is used. The newest KEEP are kept. Nothing here imports PyTorch.
"""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from mxfp4.errors import Notice

KEEP = 2
PLAIN = "run.json"
"""The file of everything that is not a tensor."""
SUMS = "SHA256SUMS"
"""The file without which a checkpoint does not count: the sums of all others, in sha256sum's format."""
DAMAGED = ".damaged"
T = TypeVar("T")
_NAME = re.compile(r"step-(\d{8})")


class Damaged(Exception):
    """A checkpoint that cannot be used; the message ends "checkpoint PATH ..."."""


def path_of(folder: Path | str, step: int) -> Path:
    """Where the checkpoint of `step` lies."""
    return Path(folder) / f"step-{step:08d}"


def step_of(path: Path) -> int:
    """The step in a checkpoint's name."""
    name = _NAME.fullmatch(path.name)
    if name is None:
        raise ValueError(f"{path.name} is no checkpoint's name")
    return int(name[1])


def entries(folder: Path | str) -> list[Path]:
    """Checkpoints, newest first, finished or not."""
    try:
        found = [p for p in Path(folder).iterdir() if _NAME.fullmatch(p.name) and p.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(found, reverse=True)


def finished(path: Path) -> bool:
    """Whether it was written to its end; its bytes are not looked at."""
    return (path / SUMS).is_file()


def latest_step(folder: Path | str) -> int | None:
    """Step of the newest finished checkpoint; None when there is none. Its bytes, which may be many, are not read."""
    return next((step_of(path) for path in entries(folder) if finished(path)), None)


def plain(path: Path) -> dict[str, Any]:
    """What a checkpoint holds beside tensors."""
    return json.loads((path / PLAIN).read_bytes())


def newest(
    paths: Iterable[Path], load: Callable[[Path], T], *, warn: bool = True, resuming: bool = False
) -> tuple[int, T] | None:
    """(step, `load(path)`) of the first of `paths` (see `entries`) that `load` does not find Damaged, or None.

    warn: name those that are passed over, and what is done instead, in warnings. resuming: the run itself asks, and
    sets those aside that were finished once.
    """
    passed: list[tuple[Path, str]] = []
    found: tuple[int, T] | None = None
    for path in paths:
        try:
            found = step_of(path), load(path)
            break
        except Damaged as damage:
            passed.append((path, f"{damage}{_set_aside(path) if resuming else ''}"))
    if not passed or not warn:
        return found
    if found is None:
        each = ", ".join(f"{path.name} {problem}" for path, problem in passed)
        then = ": starting from the beginning" if resuming else ""
        warnings.warn(f"no checkpoint in {passed[0][0].parent} is whole ({each}){then}", Notice, stacklevel=2)
        return None
    for path, problem in passed:
        warnings.warn(f"checkpoint {path} {problem}; going on from step {found[0]}", Notice, stacklevel=2)
    return found


def _set_aside(path: Path) -> str:
    """Rename a damaged checkpoint, so that it counts no longer among the newest; ", now NAME", or nothing for one that
    was never finished, which goes with the next that is."""
    if not finished(path):
        return ""
    aside = path.with_name(f"{path.name}{DAMAGED}")
    try:
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)
    except OSError:
        return ""
    return f", now {aside.name}"


def prune(folder: Path) -> None:
    """Drop all but the newest KEEP, and what a killed run left unfinished. No OSError: a run goes on without it."""
    with suppress(OSError):
        found = entries(folder)
        keep = [path for path in found if finished(path)][:KEEP]
        for path in found:
            if path not in keep:
                _remove(path)


def remove(folder: Path | str) -> None:
    """Delete the checkpoints of a finished run, and the folder if nothing else is in it."""
    folder = Path(folder)
    for path in (*entries(folder), *folder.glob(f"step-*{DAMAGED}")):
        _remove(path)
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def _remove(path: Path) -> None:
    (path / SUMS).unlink(missing_ok=True)  # first: what is half removed does not count
    shutil.rmtree(path, ignore_errors=True)
