"""What works on this machine and what does not, each "does not" with what to do about it.

A check is "ok", "note" (something optional is absent) or "missing" (the scale in question needs it). Nothing is
changed, nothing is downloaded. It waits for the network, two seconds at most, where the scale needs it (`data_checks`),
and on a machine with several GPUs for an all-reduce (`node_checks`).
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path

from mxfp4.cli.checks.data_checks import Check, data_checks
from mxfp4.directories import make_or_pip, runs_dir
from mxfp4.errors import missing_package
from mxfp4.studies.scales import Scale, get_scale

NEEDED = (
    "torch", "numpy", "pandas", "scipy", "pyarrow", "tokenizers", "datasets", "tqdm", "altair", "vl-convert-python",
    "papermill", "jupytext", "jupyter-book",
)  # fmt: skip
OPTIONAL = {"triton": "the plain PyTorch kernels are used, slower on a GPU; PyTorch for a GPU brings it"}
DISK_GB = 2.0  # scale cpu: corpora, records, checkpoints, site
MEMORY_GB = 3.0  # scale cpu
PROCESS_GB = 3.0
"""Of the machine's memory, for a process that trains on a GPU (assumed: libraries, the driver's context, batches)."""
ROCM, DRIVER = (7, 0), (6, 14)
"""The first ROCm, and the version that its driver (amdgpu 30.10) tells the kernel, with gfx950 (AMD's release notes)."""
DRIVER_FILE = Path("/sys/module/amdgpu/version")


def diagnose(scale: str = "cpu", corpus: str | None = None) -> list[Check]:
    """All checks for running `scale`, in the order they are shown. corpus: instead of the scale's, such as c4:768-799.
    UserError for an unknown one of either."""
    chosen = get_scale(scale).on_corpus(corpus)
    device = _device(scale)
    checks = [
        *_python(), *_packages(), *device, *_rocm(scale), *_node(chosen), _compiler(), _browser(),
        *_if_installed("data", lambda: data_checks(chosen, corpus)), _disk(),
    ]  # fmt: skip
    if device[-1].name == "path" and device[-1].status == "missing":  # which nothing can be computed without
        return checks
    return [
        *checks, *_if_installed("memory", lambda: [_memory(chosen)]), *_if_installed("plans", lambda: _fit(scale, corpus)),
    ]  # fmt: skip


def _if_installed(name: str, checks: Callable[[], list[Check]]) -> list[Check]:
    """Checks that import optional packages; one "missing" in their place where such a package is not there."""
    try:
        return checks()
    except ModuleNotFoundError as error:
        line = missing_package(error)
        if line is None:
            raise
        package, _, command = line.partition(": ")
        return [Check(name, "missing", f"not known: {package}", command)]


def healthy(checks: list[Check]) -> bool:
    """Whether the scale can run."""
    return all(c.status != "missing" for c in checks)


def as_json(checks: list[Check]) -> dict:
    """The checks as plain data, with `ok` for all of them together."""
    return {"ok": healthy(checks), "checks": [asdict(c) for c in checks]}


def _python() -> list[Check]:
    right = sys.version_info >= (3, 11)
    value = f"{platform.python_version()} on {platform.system()} {platform.machine()}, {_cores()} cores"
    return [Check("python", "ok" if right else "missing", value, "" if right else "use Python 3.11 or newer")]


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _packages() -> list[Check]:
    checks = []
    for package in NEEDED:
        version = _version(package)
        advice = "" if version else make_or_pip("env", f"pip install {package}")
        checks.append(Check(package, "ok" if version else "missing", version or "not installed", advice))
    for package, why in OPTIONAL.items():
        version = _version(package)
        checks.append(Check(package, "ok" if version else "note", version or "not installed", "" if version else why))
    return checks


def _device(scale: str) -> list[Check]:
    """The GPU and how it multiplies FP4; "missing" where the scale needs another one."""
    checks = _found_device()
    device, path = checks[0], checks[-1]
    if scale == "cpu" or device.status == "missing":
        return checks
    if device.value.startswith("CPU"):
        advice = device.advice if device.status == "note" else f"scale {scale} needs a GPU that PyTorch sees"
        return [replace(device, status="missing", advice=advice), path]
    if scale == "mi355x" and path.status == "ok" and not path.value.startswith("native"):
        advice = "P1's machine is gfx950 under ROCm; the run is right here, and slow: scale gpu is made for such GPUs"
        return [*checks[:-1], replace(path, status="note", advice=advice)]
    return checks


def _found_device() -> list[Check]:
    try:
        import torch

        from mxfp4.numerics.native import chip_path, fp8_path
    except ImportError as error:
        return [Check("device", "missing", f"torch does not import ({error})", make_or_pip("env", "pip install torch"))]
    if not torch.cuda.is_available():
        return [
            _no_gpu(torch),
            Check("path", "ok", "emulated", "exact up to summation order, no speed-up from FP4"),
        ]
    stack = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
    names = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    first = names[0]
    arch = first.gcnArchName.split(":")[0] if torch.version.hip else f"sm_{first.major}{first.minor}"
    gpu = f"{len(names)} x {first.name}, {arch}, {first.total_memory / 2**30:.0f} GiB each, {stack}"
    if chip_path("cuda:0") == "native":
        return [Check("device", "ok", gpu), *_back_ends("cuda:0"), _native_path("cuda:0", arch)]
    why = f"{arch} has no MXFP4 matrix instructions; gfx950 (MI350X, MI355X) and sm_100 have"
    fp8 = "; native: FP8 GEMMs with one scale a tensor" if fp8_path("cuda:0") == "native" else ""
    return [
        Check("device", "ok", gpu),
        Check("path", "ok", f"emulated{fp8}", f"{why}. FP4 values are right, their speed says nothing"),
    ]


def _back_ends(device: str) -> list[Check]:
    """One line for each FP4 GEMM back end: whether it passes its check here."""
    from mxfp4.numerics.gemm_backends.choice import statuses

    advice = "another back end is used; report this with the versions of PyTorch and of the back end"
    return [
        Check(
            f"FP4 GEMM {found.name}",
            *(("note", str(found), advice) if found.state == "refused" else ("ok", str(found))),
        )
        for found in statuses(device)
    ]


def _native_path(device: str, arch: str) -> Check:
    """Which back end multiplies FP4 on a chip with units for it."""
    from mxfp4.errors import UserError
    from mxfp4.numerics.gemm_backends.choice import EMULATED, VARIABLE, described, gemm_backend

    try:
        name, order = gemm_backend(device), described(device)
    except UserError as error:  # the one that was asked for cannot be used
        return Check("path", "missing", str(error), f"unset {VARIABLE}")
    if name == EMULATED:
        advice = f"{arch} multiplies MXFP4 itself, and no back end is used: see the lines above, and {VARIABLE}"
        return Check("path", "note", "emulated", advice)
    return Check("path", "ok", f"native: MXFP4, MXFP8 and FP8 GEMMs on {arch}; FP4 by {order}")


def _no_gpu(torch) -> Check:
    """Why there is none, where that can be told."""
    kfd, nvidia = Path("/dev/kfd"), Path("/dev/nvidiactl")
    if kfd.exists() and not os.access(kfd, os.R_OK | os.W_OK):
        return Check("device", "note", "CPU; an AMD GPU is there without rights to it", "join groups render and video")
    closed = [p for p in sorted(Path("/dev/dri").glob("renderD*")) if not os.access(p, os.R_OK | os.W_OK)]
    if kfd.exists() and closed:
        return Check("device", "note", f"CPU; no rights to {closed[0]}", "join groups render and video")
    if kfd.exists() and not torch.version.hip:
        advice = "install PyTorch for ROCm: see README, On an MI355X node"
        return Check("device", "note", "CPU; an AMD GPU is there, this PyTorch is not the ROCm one", advice)
    if nvidia.exists() and not torch.version.cuda:
        return Check(
            "device",
            "note",
            "CPU; an NVIDIA GPU is there, this PyTorch is the CPU one",
            "install PyTorch for CUDA",
        )
    if kfd.exists() or nvidia.exists():
        return Check("device", "note", "CPU; a GPU is there, PyTorch cannot use it", "check the driver's version")
    return Check("device", "ok", "CPU, no GPU", "scale cpu works; scales gpu and mi355x need one")


def _rocm(scale: str) -> list[Check]:
    """ROCm under PyTorch and the kernel's driver, against the first that know gfx950; nothing on other stacks."""
    import torch

    hip = torch.version.hip
    if not hip:
        return []
    needed = scale == "mi355x"
    checks = []
    if _number(hip) < ROCM:
        advice = "take PyTorch for a newer one: make env TORCH_INDEX=https://download.pytorch.org/whl/rocm7.2"
        status = "missing" if needed else "note"
        checks.append(Check("ROCm", status, f"PyTorch is built for {hip}, gfx950 needs 7.0 or newer", advice))
    else:
        checks.append(Check("ROCm", "ok", f"PyTorch is built for {hip}"))
    try:
        driver = DRIVER_FILE.read_text().strip()
    except OSError:  # the kernel's own amdgpu has no version but the kernel's
        return [*checks, Check("driver", "ok", f"the amdgpu of kernel {platform.release()}")]
    if needed and _number(driver) < DRIVER:
        advice = "MI355X came with ROCm 7.0's driver, amdgpu 30.10: install that or a newer one"
        return [*checks, Check("driver", "missing", f"amdgpu {driver}, older than 6.14", advice)]
    return [*checks, Check("driver", "ok", f"amdgpu {driver}")]


def _node(scale: Scale) -> list[Check]:
    from mxfp4.cli.checks.node_checks import node_checks

    return node_checks(scale)


def _number(version: str) -> tuple[int, int]:
    """ "7.2.26015-fc0010cf6a" -> (7, 2); (0, 0) for what is no version."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _compiler() -> Check:
    found = next((c for c in (os.environ.get("CC"), "cc", "gcc", "clang") if c and shutil.which(c)), None)
    if found:
        return Check("C compiler", "ok", shutil.which(found) or found)
    return Check(
        "C compiler", "note", "none", "the CPU quantizes slower without; `apt install gcc libc6-dev` brings one"
    )


def _browser() -> Check:
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    found = next((path for n in names if (path := shutil.which(n))), None)
    if found:
        return Check("browser", "ok", found)
    return Check("browser", "note", "no Chromium", "only the test that opens the site needs it: `apt install chromium`")


def _disk() -> Check:
    root = runs_dir()
    existing = next(p for p in (root, *root.parents) if p.exists())
    free = shutil.disk_usage(existing).free / 1e9
    if not os.access(existing, os.W_OK):
        return Check("disk", "missing", f"{existing} cannot be written", "set MXFP4_RUNS to a folder of yours")
    value = f"{free:.0f} GB free for {root}"
    if free < DISK_GB:
        return Check("disk", "missing", value, f"scale cpu needs {DISK_GB:g} GB: make room or set MXFP4_RUNS")
    return Check("disk", "ok", value)


def _memory(scale: Scale) -> Check:
    """The machine's own memory, against what `host_memory` needs."""
    from mxfp4.studies import memory_check as room

    need, said = host_memory(scale)
    try:
        total = room.ram()
    except (ValueError, OSError):
        return Check(
            "memory", "note", "unknown on this system", f"scale {scale.name} needs {need / 1e9:.3g} GB: {said}"
        )
    if total < need:
        return Check(
            "memory", "missing", f"{total / 1e9:.0f} GB", f"scale {scale.name} needs {need / 1e9:.3g} GB: {said}"
        )
    return Check("memory", "ok", f"{total / 1e9:.0f} GB, {need / 1e9:.3g} GB needed")


def host_memory(scale: Scale) -> tuple[float, str]:
    """(bytes of the machine's memory that a scale needs here, what for): a process for each arm or rank at a time, and
    what holds their checkpoints while they are written."""
    from mxfp4.studies.memory_check import GB, STAGED, machine_for, staged

    machine = machine_for(scale.name, None, None)
    if not machine.gpus:
        return MEMORY_GB * GB, "its processes"
    processes = scale.jobs * (scale.ranks_on(machine.gpus) if scale.spread else machine.gpus)
    arms = scale.jobs * (1 if scale.spread else machine.gpus)
    held = staged([scale.config("bf16", 0)] * arms, machine, arms)
    what = f"{processes} processes of {PROCESS_GB:g} GB" + (
        f", {STAGED} bytes a parameter of checkpoints in writing" if held else ""
    )
    return processes * PROCESS_GB * GB + held, what


def _fit(scale: str, corpus: str | None) -> list[Check]:
    """What a dry run of every plan says of memory and disk, for the scales that can be too large."""
    from mxfp4.cli.checks.dry_run import dry_run
    from mxfp4.studies.memory_check import GB, needed
    from mxfp4.studies.plans import plan
    from mxfp4.studies.store import Store

    if scale == "cpu":
        return []
    result = dry_run(plan("all", scale, **({"corpus": corpus} if corpus else {})), Store())
    m, checks = result.machine, []
    if result.memory:
        need = max(needed(memory, m, result.at_a_time) for _, memory in result.memory)
        has = f" of {m.memory / GB:.0f} GB" if m.memory else ""
        checks.append(Check("memory of a GPU", "ok", f"{need / GB:.1f} GB needed{has}, {m.gpus} x {m.what}"))
    total = sum(size for _, size in result.disk)
    elsewhere = "" if m.here else ", not the machine meant"
    room = f"{total / GB:.3g} GB to be written, {result.free / GB:.3g} GB free here{elsewhere}"
    checks.append(Check("disk for the runs", "ok", room))
    names = {"memory": "memory of a GPU", "disk": "disk for the runs"}
    for problem in result.problems:
        what, _, said = problem.partition(": ")
        said, _, advice = said.rpartition(": ")
        name = names.get(what, what)
        checks = [*(c for c in checks if c.name != name), Check(name, "missing", said, advice)]
    return checks
