"""Compiles a C file for this processor and loads it, from a cache that nobody but this user can write.

The compiled file lies in the user's cache directory, in a folder of mode 0700, under a name that holds the hash of its
source, compiler, flags and processor. A folder or file that another user owns or can write is never loaded. Where there
is no such folder (no home directory, a read-only disk, `noexec`), the file is compiled into a fresh temporary folder
and used from there. Where that fails as well, callers take the PyTorch implementation.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

# No contraction and no fast-math: the bytes are those of the PyTorch implementation.
FLAGS = ("-std=c11", "-O3", "-ffp-contract=off", "-fno-trapping-math", "-shared", "-fPIC")
NATIVE_FLAG = "-mcpu=native" if platform.machine().startswith(("aarch64", "arm", "ppc")) else "-march=native"
WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def load(source: Path) -> ctypes.CDLL | None:
    """The compiled `source`; None without a C compiler, a folder to load from or a little-endian machine."""
    if sys.byteorder != "little":
        return None
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC") or "cc", "gcc", "clang"))), None)
    if compiler is None:
        return None
    for folder in (_cache_folder, _temporary_folder):
        with contextlib.suppress(OSError, subprocess.CalledProcessError), folder() as where:
            return _load_from(where, source, compiler)
        # A full disk fails the compiler too, so the next folder is tried.
    return None


def _load_from(folder: Path, source: Path, compiler: str) -> ctypes.CDLL:
    """The library in `folder`, compiled unless a file of ours is there. Raises OSError and CalledProcessError."""
    command = [compiler, *FLAGS, NATIVE_FLAG]
    about = os.stat(compiler)
    key = repr((source.read_bytes(), command, about.st_size, about.st_mtime_ns, _processor())).encode()
    path = folder / f"{source.stem}_{hashlib.sha256(key).hexdigest()[:20]}.so"
    if _is_private(path, stat.S_ISREG):
        with contextlib.suppress(OSError):  # a damaged file is compiled again
            return ctypes.CDLL(str(path))
    with tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as work:
        made = Path(work) / path.name
        try:
            subprocess.run([*command, "-o", made, source], check=True, capture_output=True, timeout=120)
        except subprocess.TimeoutExpired as error:
            raise OSError(f"{compiler} does not end") from error
        made.chmod(0o700)
        os.replace(made, path)  # only a whole file gets the name
    return ctypes.CDLL(str(path))


@contextlib.contextmanager
def _cache_folder() -> Iterator[Path]:
    """The user's cache folder, made if it is not there. OSError where none is private to this user."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    try:
        root = Path(given) if os.path.isabs(given) else Path.home() / ".cache"  # a relative one is to be ignored
    except RuntimeError as error:  # this user has no home directory
        raise FileNotFoundError(str(error)) from error
    folder = root / "mxfp4"
    root.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    if not _is_private(folder, stat.S_ISDIR):
        raise PermissionError(f"{folder} belongs to another user, or others can write to it")
    folder.chmod(0o700)
    yield folder


@contextlib.contextmanager
def _temporary_folder() -> Iterator[Path]:
    """A fresh folder of mode 0700, removed after use: a loaded library needs its file no more."""
    with tempfile.TemporaryDirectory(prefix="mxfp4-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def _is_private(path: Path, kind: Callable[[int], bool]) -> bool:
    """Whether `path` is of that kind, not a link, owned by this user, and writable by nobody else."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return kind(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & WRITABLE_BY_OTHERS


def _processor() -> str:
    """What tells one instruction set from another: a cache may be shared by several machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.platform() + platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())
