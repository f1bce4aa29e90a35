"""Files that survive a crash: the old content or the whole new one, and renames that last."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path


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


def free_space(folder: Path) -> float:
    """Bytes that are free for `folder`, which need not exist yet. Raises OSError."""
    return float(shutil.disk_usage(next(p for p in (folder, *folder.absolute().parents) if p.exists())).free)


def why(error: OSError) -> str:
    """A few words for what keeps a file from being written."""
    return "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror or str(error)
