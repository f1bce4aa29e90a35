"""Benchmarks, their shared part: rows of results with the machine they come from, and who else is measured.

Each benchmark checks results first, then reports medians, its rivals in the same run. What fails becomes a row with a
`problem` and the rest goes on. A speed of emulated FP4 is what a training step pays for emulating FP4 on a chip without
it; it is never the speed of FP4 arithmetic.
"""

from __future__ import annotations

import json
import re
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from mxfp4.directories import bench_dir, runs_dir
from mxfp4.studies.machine import git_state, machine

MAKERS = ("AMD", "NVIDIA", "Instinct")


def write(path: Path, kind: str, device: str, rows: list[dict], **more: object) -> None:
    """{kind, machine, git, rows} and `more` as JSON at `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {"kind": kind, "machine": machine(device), "git": git_state(), "rows": rows, **more}
    new = path.with_name(path.name + ".new")
    new.write_text(json.dumps(data, indent=1) + "\n")
    new.replace(path)


def short_name(device: str) -> str:
    """A device's name for a file: of "AMD Instinct MI355X" mi355x, of "NVIDIA H200" h200; where no word is a model, all
    of them but the maker, as in geforce-rtx-4090. Records have the name in `machine["device"]`."""
    words = re.findall(r"[A-Za-z0-9]+", device)
    model = next((word for word in words if re.fullmatch(r"[A-Za-z]+\d+[A-Za-z0-9]*", word)), None)
    return (model or "-".join(word for word in words if word not in MAKERS) or "unknown").lower()


def bench_name(kind: str, device: str) -> str:
    """The name under which a benchmark on `device` is kept in runs/bench, such as step-mi355x."""
    return f"{kind}-{short_name(device)}"


def kept_at(kind: str, device: str) -> Path:
    """The file of `bench_name`. A new folder of benchmarks begins with those of the project: pages read one folder."""
    own, project = runs_dir() / "bench", bench_dir()
    if not own.is_dir() and project.is_dir():
        shutil.copytree(project, own)
    return own / f"{bench_name(kind, device)}.json"


def attempt(name: str, who: str, measure: Callable[[], dict]) -> dict:
    """{name, who} and what `measure` returns; where it raises, {name, who, problem} with the error in one line."""
    try:
        return {"name": name, "who": who, **measure()}
    except Exception as error:  # a rival may fail in any way, and its failure is the result
        text = f"{type(error).__name__}: {error}".strip()
        return {"name": name, "who": who, "problem": text.splitlines()[0][:300]}


def gpu_seconds(call: Callable, repeat: int = 25) -> float:
    """Median time of `call` on the GPU, by events; what the caches hold is overwritten before each.

    Overwriting takes about a quarter of a millisecond, so that the next call is queued before the GPU is free for it.
    """
    flush = torch.empty(1 << 30, dtype=torch.int8, device="cuda")
    for _ in range(3):
        call()
    events = []
    for _ in range(repeat):
        flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        events.append((start, end))
    torch.cuda.synchronize()
    return statistics.median(s.elapsed_time(e) for s, e in events) / 1e3


def cpu_seconds(call: Callable, repeat: int = 7, limit: float = 8.0) -> tuple[float, float]:
    """Median wall and processor time of `call` (all its threads): `repeat` times, fewer once `limit` seconds are spent.

    Where other programs run, only the second tells calls apart.
    """
    call()
    times: list[tuple[float, float]] = []
    while len(times) < repeat and sum(wall for wall, _ in times) < limit:
        wall, processor = time.perf_counter(), time.process_time()
        call()
        times.append((time.perf_counter() - wall, time.process_time() - processor))
    return statistics.median(t[0] for t in times), statistics.median(t[1] for t in times)


def torchao_to_mx() -> Callable:
    """Torchao's quantizer, x -> (scale, codes) in E2M1 with the floor rule. ImportError where there is no torchao."""
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    return lambda x: to_mx(x, torch.float4_e2m1fn_x2, 32)
