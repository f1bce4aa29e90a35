"""The compiled C file: one cache a user, nothing loaded that another user could have written, no home directory needed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from mxfp4.numerics.kernels.cpu import library
from mxfp4.numerics.kernels.cpu.quantize import SOURCE

pytestmark = pytest.mark.skipif(library.load(SOURCE) is None, reason="no C compiler")


@pytest.fixture
def cache(monkeypatch, tmp_path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    return tmp_path / "cache" / "mxfp4"


@pytest.fixture
def built(cache) -> Path:
    library.load(SOURCE)
    (path,) = cache.iterdir()
    return path


def _loaded(monkeypatch) -> list[Path]:
    seen: list[Path] = []
    real = library.ctypes.CDLL
    monkeypatch.setattr(library.ctypes, "CDLL", lambda path: (seen.append(Path(path)), real(path))[1])
    return seen


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_folder_and_file_are_this_users_alone(cache, umask):
    before = os.umask(umask)
    try:
        assert library.load(SOURCE) is not None
    finally:
        os.umask(before)
    (path,) = cache.iterdir()
    assert cache.stat().st_mode & 0o777 == 0o700 and path.stat().st_mode & 0o022 == 0


def test_a_second_process_compiles_nothing(built, monkeypatch):
    monkeypatch.setattr(library.subprocess, "run", None)
    assert library.load(SOURCE) is not None


@pytest.mark.parametrize("damage", ["writable by all", "writable by the group", "a link", "damaged", "another user's"])
def test_a_file_that_is_not_ours_alone_is_replaced_and_never_loaded(built, monkeypatch, tmp_path, damage):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))  # a path that this process has not loaded yet
    path, foreign = tmp_path / "other" / "mxfp4" / built.name, tmp_path / "foreign.so"
    path.parent.mkdir(parents=True)
    foreign.write_bytes(b"not a library")
    if damage == "a link":
        path.symlink_to(foreign)
    else:
        shutil.copy(foreign, path)
    if damage == "another user's":
        if os.geteuid() != 0:
            pytest.skip("only root can give files away")
        os.chown(path, 12345, 12345)
    elif damage != "a link":
        path.chmod({"writable by all": 0o777, "writable by the group": 0o770}.get(damage, 0o700))
    seen = _loaded(monkeypatch)
    assert library.load(SOURCE) is not None
    assert len(seen) == (2 if damage == "damaged" else 1), "a file that others can write was loaded"
    assert path.lstat().st_mode & 0o170777 == 0o100700 and path.stat().st_uid == os.geteuid()


@pytest.mark.parametrize("folder", ["writable by all", "another user's", "a link"])
def test_a_folder_that_is_not_ours_alone_is_left_for_a_private_one(cache, monkeypatch, tmp_path, folder):
    cache.parent.mkdir()
    real = tmp_path / "elsewhere"
    (real if folder == "a link" else cache).mkdir()
    if folder == "a link":
        cache.symlink_to(real)
    elif folder == "another user's":
        if os.geteuid() != 0:
            pytest.skip("only root can give folders away")
        os.chown(cache, 12345, 12345)
    else:
        cache.chmod(0o777)
    seen = _loaded(monkeypatch)
    assert library.load(SOURCE) is not None
    assert [path.is_relative_to(tmp_path / "tmp") for path in seen] == [True]
    assert list(cache.iterdir()) == [] and list((tmp_path / "tmp").iterdir()) == []


def test_an_old_folder_of_ours_becomes_private(cache):
    cache.mkdir(parents=True)
    cache.chmod(0o755)
    assert library.load(SOURCE) is not None
    assert cache.stat().st_mode & 0o777 == 0o700


def test_without_a_home_directory_quantization_works(tmp_path):
    code = (
        "import pathlib, torch, mxfp4\n"
        "def none(): raise RuntimeError('Could not determine home directory.')\n"
        "pathlib.Path.home = none\n"
        "from mxfp4.numerics.kernels.cpu import quantize\n"
        "assert quantize.kernel() is not None\n"
        "x = torch.randn(4, 64); assert torch.equal(mxfp4.quantize(x).dequantize(), mxfp4.fake_quantize(x))\n"
    )
    env = {k: v for k, v in os.environ.items() if k not in ("HOME", "XDG_CACHE_HOME")}
    done = subprocess.run([sys.executable, "-c", code], env={**env, "TMPDIR": str(tmp_path)}, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    assert list(tmp_path.glob("mxfp4-*")) == []


@pytest.mark.parametrize("given", ["", "relative/cache"])
def test_a_cache_directory_that_is_no_absolute_path_is_ignored(given, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", given)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert library.load(SOURCE) is not None
    assert [path.name for path in tmp_path.iterdir()] == [".cache"]


def test_without_any_folder_to_write_to_there_is_no_library(cache, monkeypatch):
    def full(*_, **__):
        raise OSError("no space")

    monkeypatch.setattr(tempfile, "TemporaryDirectory", full)
    assert library.load(SOURCE) is None
