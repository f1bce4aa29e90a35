"""One process an arm: a lock file that names its holder.

The lock is the kernel's (flock), which ends with the process that holds it, however it dies: no age, no
clock and no left-over pid decide whether it is stale. The file's text (pid and host) is for the message
alone.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
import warnings
from pathlib import Path

from mxfp4.errors import Notice

LOOKS = 3  # before a lock counts as held: a `holder()` of another process has it for a moment


class Lock:
    """`acquire()` says whether this process now holds `path`; `release()` gives it up and removes the
    file."""

    def __init__(self, path: Path):
        self.path = path
        self._handle: int | None = None

    def acquire(self) -> bool:
        """True when held. A file system without locks is warned about and counts as held: records stay
        atomic."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        looks = 0
        while True:
            handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(handle)
                looks += 1
                if looks == LOOKS:
                    return False
                time.sleep(0.01)
                continue
            except OSError as error:
                if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                    os.close(handle)
                    raise
                warnings.warn(
                    f"{self.path.parent} has no file locks: two processes may train the same arm",
                    Notice,
                    stacklevel=2,
                )
            if self._is_current(handle):
                break
            os.close(handle)  # its holder removed the file between open and lock
        os.ftruncate(handle, 0)
        os.write(handle, f"pid {os.getpid()} on {socket.gethostname()}\n".encode())
        self._handle = handle
        return True

    def release(self) -> None:
        if self._handle is not None:
            self.path.unlink(missing_ok=True)
            os.close(self._handle)
            self._handle = None

    def holder(self) -> str | None:
        """ "pid 123 on name" of the process that holds it now; None when nobody does."""
        try:
            handle = os.open(self.path, os.O_RDWR)
        except OSError:
            return None
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return os.read(handle, 1000).decode(errors="replace").strip() or "another process"
        except OSError:
            return None
        finally:
            os.close(handle)
        return None

    def _is_current(self, handle: int) -> bool:
        try:
            return os.path.samestat(os.fstat(handle), os.stat(self.path))
        except FileNotFoundError:
            return False
