"""One lock for arms and packings: it ends with its process, and a file system without locks stops nothing."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import threading
import time
import warnings

import pytest

from mxfp4.data.packing import prepare
from mxfp4.errors import Notice
from mxfp4.locks import Lock
from mxfp4.studies.runner import run_plan
from mxfp4.studies.store import Store
from tests.data.test_packing import VOCAB, Tiny
from tests.studies.test_plans import CORPUS, small


def _no_locks(monkeypatch, code: int) -> None:
    def flock(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", flock)


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_warned_about(code, monkeypatch, tmp_path):
    _no_locks(monkeypatch, code)
    lock = Lock(tmp_path / "new" / "arm.lock")
    with pytest.warns(Notice, match="new has no file locks: two processes may do the same work at the same time"):
        assert lock.acquire()
    assert lock.holder() is None and Lock(lock.path).holder() is None
    lock.release()
    assert not lock.path.exists()


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS])
def test_packing_goes_on_without_locks(code, monkeypatch, tmp_path):
    _no_locks(monkeypatch, code)
    with pytest.warns(Notice, match="has no file locks"):
        packed = prepare(Tiny(), VOCAB, root=tmp_path, progress=False)
    assert packed.built and packed.n_tokens("train")
    assert [path.name for path in tmp_path.iterdir()] == [packed.folder.name]


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS])
def test_training_goes_on_without_locks(code, monkeypatch, tmp_path):
    _no_locks(monkeypatch, code)
    store, plan = Store(tmp_path), small(recipes=("bf16",), seeds=(0,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Notice)
        summary = run_plan(plan, store, jobs=1, device="cpu", corpus=CORPUS)
    assert summary.trained == ["bf16-s0"] and store.begun() == []


def test_another_error_is_no_reason_to_go_on(monkeypatch, tmp_path):
    _no_locks(monkeypatch, errno.EIO)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        Lock(tmp_path / "arm.lock").acquire()


def _hold(path, ready, seconds) -> None:
    lock = Lock(path)
    assert lock.acquire()
    ready.set()
    time.sleep(seconds)
    lock.release()


def test_a_second_process_waits_for_the_first(tmp_path):
    context, path = multiprocessing.get_context("spawn"), tmp_path / "arm.lock"
    ready = context.Event()
    process = context.Process(target=_hold, args=(path, ready, 1.0))
    process.start()
    assert ready.wait(60)
    lock = Lock(path)
    assert not lock.acquire() and lock.holder() == f"pid {process.pid} on {os.uname().nodename}"
    assert lock.acquire(wait=True)
    assert Lock(path).holder() == f"pid {os.getpid()} on {os.uname().nodename}"
    lock.release()
    process.join()
    assert process.exitcode == 0 and not path.exists()


def test_looks_at_the_holder_do_not_make_it_busy(tmp_path):
    lock, stop = Lock(tmp_path / "arm.lock"), threading.Event()
    lock.path.touch()

    def look() -> None:
        while not stop.is_set():
            Lock(lock.path).holder()
            time.sleep(0.005)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        for _ in range(20):
            assert lock.acquire()
            lock.release()
    finally:
        stop.set()
        thread.join()
