"""The lock under which one process at a time trains an arm or packs a corpus.

It is the operating system's lock (flock, through the library filelock), which ends with the process that holds it: no
age, clock or left-over pid decides whether it is stale. The text of the file (pid and host) is for messages alone. On a
file system without locks the work goes on without one and a warning says so: records and packed corpora appear whole,
by a rename, so two processes at the same work lose time and nothing else.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from mxfp4.errors import Notice

NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP})
"""Errors of a file system that has no locks."""
PATIENCE = 0.03
"""Seconds before a lock counts as held: a `holder()` of another process has it for a moment."""


class Lock:
    """`acquire()` says whether this process now holds `path`; `release()` gives it up and removes the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # A soft lock, which is a file that exists, would outlive a process that is killed.
        self._lock = FileLock(path, thread_local=False, fallback_to_soft=False)
        self._held = False

    def acquire(self, *, wait: bool = False) -> bool:
        """Whether this process holds the lock now, or has found that the file system has none.

        Args:
            wait: for another process to give it up, instead of returning False.

        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._lock.acquire(timeout=-1 if wait else PATIENCE, poll_interval=0.01)
        except Timeout:
            return False
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            text = f"{self.path.parent} has no file locks: two processes may do the same work at the same time"
            warnings.warn(text, Notice, stacklevel=2)
        self._held = True
        with contextlib.suppress(OSError):  # a full disk: the lock holds all the same
            self.path.write_text(f"pid {os.getpid()} on {socket.gethostname()}\n")
        return True

    def release(self) -> None:
        """Give the lock up and remove its file; without effect where it is not held."""
        if self._held:
            self.path.unlink(missing_ok=True)  # while it is held: a process that waits looks for the new file
            self._lock.release()
            self._held = False

    def holder(self) -> str | None:
        """ "pid 123 on name" of the process that holds it now; None when nobody does."""
        if not self.path.exists():
            return None
        look = FileLock(self.path, thread_local=False, fallback_to_soft=False)
        try:
            look.acquire(timeout=PATIENCE, poll_interval=0.01)
        except Timeout:
            return self._text() or "another process"
        except OSError:  # no locks here, or no right to look
            return None
        look.release()
        return None

    def _text(self) -> str:
        try:
            return self.path.read_text(errors="replace").strip()
        except OSError:
            return ""


@contextlib.contextmanager
def held(folder: Path, doing: str) -> Iterator[None]:
    """The lock beside `folder`, waited for with a line that says who has it; doing: what it does, as in "packs"."""
    lock = Lock(folder.parent / f".{folder.name}.lock")
    if not lock.acquire():
        holder = lock.holder() or "another process"
        print(f"waiting for another process that {doing} {folder.name} ({holder})", file=sys.stderr)
        lock.acquire(wait=True)
    try:
        yield
    finally:
        lock.release()
