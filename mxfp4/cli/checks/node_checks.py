"""The doctor's look at a node that trains for days: links between its GPUs, their memory errors, the limit on locked
memory, AMD's libraries. Each check returns at most one line, and none where it does not apply."""

from __future__ import annotations

import ctypes.util
import json
import shutil
import subprocess
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from mxfp4.cli.checks import all_reduce
from mxfp4.cli.checks.data_checks import Check
from mxfp4.studies.scales import Scale

TOOL_SECONDS = 20.0
NVIDIA_QUERY = "ecc.mode.current,ecc.errors.uncorrected.volatile.total"


def node_checks(scale: Scale) -> list[Check]:
    """The checks of a machine with GPUs, for running `scale`; none without a GPU."""
    import torch

    if not torch.cuda.is_available():
        return []
    gpus = torch.cuda.device_count()
    checks = [_ecc(), *([_links(gpus, scale), _locked_memory()] if gpus > 1 else [])]
    return checks + ([_libraries()] if torch.version.hip else [])


def _links(gpus: int, scale: Scale) -> Check:
    """An all-reduce over all GPUs; "missing" where it fails and an arm of the scale takes several."""
    name = "all-reduce"
    bandwidth, why = all_reduce.over_gpus(gpus)
    if bandwidth is not None:
        return Check(name, "ok", f"{bandwidth:.0f} GB/s bus bandwidth over {gpus} GPUs (256 MiB, BF16)")
    advice = "run it with NCCL_DEBUG=INFO: `torchrun --standalone --nproc-per-node "
    advice += f"{gpus} -m {all_reduce.__name__}`"
    return Check(name, "missing" if scale.spread else "note", f"fails over {gpus} GPUs: {why}", advice)


def _ecc() -> Check:
    """Uncorrectable memory errors since the driver was loaded, as the vendor's tool counts them."""
    found = _uncorrectable()
    if found is None:
        advice = "amd-smi or nvidia-smi tells it; install one, or run the doctor outside the container"
        return Check("ECC", "note", "not known: no tool that counts memory errors", advice)
    off, counts = found
    if off:
        return Check("ECC", "note", f"off on GPU {_list(off)}", "turn it on: `nvidia-smi -e 1`, then reset the GPU")
    if bad := [gpu for gpu, errors in enumerate(counts) if errors]:
        advice = "reset or replace it: a run on it can diverge without a fault of its own"
        return Check("ECC", "note", f"{sum(counts)} uncorrectable errors on GPU {_list(bad)}", advice)
    return Check("ECC", "ok", f"no uncorrectable errors on {len(counts)} GPUs")


def _uncorrectable() -> tuple[list[int], list[int]] | None:
    """(GPUs without ECC, uncorrectable errors of each GPU); None where no tool answers."""
    if text := _output("amd-smi", "metric", "--ecc", "--json"):
        try:
            counts = list(_counts(json.loads(text)))
        except ValueError:
            counts = []
        return ([], counts) if counts else None
    if text := _output("nvidia-smi", f"--query-gpu={NVIDIA_QUERY}", "--format=csv,noheader,nounits"):
        rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if "," in line]
        off = [gpu for gpu, row in enumerate(rows) if row[0] != "Enabled"]
        return (off, [int(row[1]) if row[1].isdigit() else 0 for row in rows]) if rows else None
    return None


def _counts(data: Any) -> Iterator[int]:
    """Each GPU's count in amd-smi's JSON, whose outer layers differ by version."""
    if isinstance(data, dict):
        if isinstance(count := data.get("total_uncorrectable_count"), int):
            yield count
        data = list(data.values())
    if isinstance(data, list):
        for part in data:
            yield from _counts(part)


def _output(*command: str) -> str | None:
    """What a tool prints; None where it is not there, fails or hangs."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TOOL_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _locked_memory() -> Check:
    """The limit on memory that cannot be swapped out, which RDMA between nodes needs."""
    import resource

    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit == resource.RLIM_INFINITY:
        return Check("locked memory", "ok", "unlimited")
    advice = "RDMA between nodes needs more: `ulimit -l unlimited`, or memlock in the job's or container's limits"
    return Check("locked memory", "note", f"limited to {limit / 1e6:.3g} MB", advice)


def _libraries() -> Check:
    """Whether ROCm's hipBLASLt and AMD's aiter are there."""
    import torch

    own = next((Path(torch.__file__).parent / "lib").glob("libhipblaslt.so*"), None)
    found = {"hipBLASLt": own is not None or ctypes.util.find_library("hipblaslt") is not None}
    try:
        found[f"amd-aiter {metadata.version('amd-aiter')}"] = True
    except metadata.PackageNotFoundError:
        found["amd-aiter"] = False
    text = ", ".join(name if there else f"no {name}" for name, there in found.items())
    advice = "" if all(found.values()) else "optional: faster GEMMs and attention where they are installed"
    return Check("ROCm libraries", "note" if advice else "ok", text, advice)


def _list(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
