"""What ran: device, versions and git state, as plain JSON data for run records. No host or user names."""

from __future__ import annotations

import os
import platform
import subprocess
import tempfile
from functools import lru_cache
from importlib import metadata
from pathlib import Path

import torch

import mxfp4
from mxfp4.numerics.gemm_backends.choice import gemm_backend, matmul_path
from mxfp4.numerics.native import fp8_path

PACKAGES = ("torch", "triton", "numpy")


def default_device() -> torch.device:
    """The GPU if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def machine(device: torch.device | str) -> dict:
    """The device and the software under it."""
    device = torch.device(device)
    about = {
        "device_type": device.type,
        "device": _cpu_name(),
        "threads": torch.get_num_threads(),
        "path": matmul_path(device),
        "fp8_path": fp8_path(device),
        "gemm_backend": gemm_backend(device),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "rocm": torch.version.hip,
        **{name: version(name) for name in PACKAGES},
    }
    if about["gemm_backend"] == "aiter":
        about["amd-aiter"] = version("amd-aiter")
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        about["device"] = properties.name
        about["device_memory_bytes"] = properties.total_memory
        nvidia = f"sm_{properties.major}{properties.minor}"  # there gcnArchName is the card's name
        about["architecture"] = properties.gcnArchName if torch.version.hip else nvidia
    return about


def version(package: str) -> str | None:
    """Installed version, or None. torch's own carries its build (+cpu, +rocm)."""
    if package == "torch":
        return torch.__version__
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@lru_cache
def git_state() -> dict | None:
    """{"commit", "dirty", "tree"} of the checkout this package runs from; None outside one.

    dirty: package files differ from the commit's. tree: git's own hash of the package folder as it is, so that a commit
    which holds the very code can be found later: `git rev-parse COMMIT:mxfp4` gives the same.
    """
    package = Path(mxfp4.__file__).resolve().parent
    top = _git(package, "rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != package.parent:  # e.g. installed into an environment inside another repo
        return None
    status = _git(package, "status", "--porcelain", "--", str(package))
    return {"commit": _git(package, "rev-parse", "HEAD"), "dirty": bool(status), "tree": tree_hash(package)}


def tree_hash(folder: Path) -> str | None:
    """Git's hash of the files in `folder`, ignored ones left out; None without git."""
    with tempfile.TemporaryDirectory() as scratch:  # an index and objects of its own: the checkout's stay as they are
        there = _git(folder, "rev-parse", "--path-format=absolute", "--git-path", "objects")
        if there is None:
            return None
        objects = Path(scratch, "objects")
        objects.mkdir()
        own = {"GIT_INDEX_FILE": f"{scratch}/index", "GIT_OBJECT_DIRECTORY": str(objects),
               "GIT_ALTERNATE_OBJECT_DIRECTORIES": there}  # fmt: skip
        if _git(folder, "add", "--all", ".", env=own) is None:
            return None
        return _git(folder, "write-tree", f"--prefix={_git(folder, 'rev-parse', '--show-prefix')}", env=own)


def _git(folder: Path, *arguments: str, env: dict[str, str] | None = None) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", folder, *arguments],
            capture_output=True,
            text=True,
            timeout=20,
            env={**os.environ, **(env or {})},
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


@lru_cache
def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    name = next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")),
        platform.processor(),
    )
    return f"{name or 'CPU'}, {os.cpu_count()} cores"
