"""Bandwidth of an all-reduce over a node's GPUs, measured in processes of its own, so that a hang can be ended.

    torchrun --standalone --nproc-per-node 8 -m mxfp4.cli.checks.all_reduce

Bus bandwidth is bytes / time * 2 (n - 1) / n for n ranks: what each rank's links carry, whatever n is. Source: nccl-tests,
PERFORMANCE.md.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed as dist

BYTES = 256 * 2**20
REPEATS = 10
SECONDS = 90.0
"""Time limit of the whole check: the start of the processes, and RCCL's, takes most of it."""
NAME = "bus bandwidth"
COMMAND = [sys.executable, "-m", "mxfp4.cli.checks.all_reduce"]


def measure(device: torch.device, size: int = BYTES, repeats: int = REPEATS) -> float:
    """Bus bandwidth in GB/s of an all-reduce of `size` bytes in BF16; every rank of the process group calls it.

    Raises RuntimeError where the sum is wrong.
    """
    ranks = dist.get_world_size()
    tensor = torch.ones(size // 2, dtype=torch.bfloat16, device=device)
    dist.all_reduce(tensor)
    if tensor[0].item() != ranks or tensor[-1].item() != ranks:
        raise RuntimeError(f"an all-reduce of ones over {ranks} ranks gives {tensor[0].item():g}")
    tensor.zero_()
    _wait(device)
    started = time.perf_counter()
    for _ in range(repeats):
        dist.all_reduce(tensor)
    _wait(device)
    seconds = (time.perf_counter() - started) / repeats
    return size / seconds * 2 * (ranks - 1) / ranks / 1e9


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    dist.barrier()


def over_gpus(gpus: int, seconds: float = SECONDS) -> tuple[float | None, str]:
    """(GB/s, "") of an all-reduce over `gpus` GPUs of this machine; (None, why) where it fails or takes longer.

    Not through torchrun, whose ranks have sessions of their own and outlive it where they hang.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    meeting = {"WORLD_SIZE": gpus, "LOCAL_WORLD_SIZE": gpus, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as files:
        ranks = []
        for rank in range(gpus):
            env = {**os.environ, **{k: str(v) for k, v in (meeting | {"RANK": rank, "LOCAL_RANK": rank}).items()}}
            log = files.enter_context(open(f"{folder}/{rank}", "w"))
            ranks.append(subprocess.Popen(COMMAND, stdout=log, stderr=log, env=env))
        until = time.monotonic() + seconds
        while any(p.poll() is None for p in ranks) and not any(p.poll() for p in ranks) and time.monotonic() < until:
            time.sleep(0.05)
        codes = [process.poll() for process in ranks]  # of a failure the first: the others wait for that rank
        for process in ranks:
            process.kill()
            process.wait()
        said = [Path(folder, str(rank)).read_text(errors="replace").splitlines() for rank in range(gpus)]
    failed = next((rank for rank, code in enumerate(codes) if code), None)
    if failed is not None:
        lines = [line.strip() for line in said[failed] if "Error" in line]
        return None, f"rank {failed}: {(lines or [f'exit code {codes[failed]}'])[-1][:200]}"
    found = [line.rpartition(" ")[2] for line in said[0] if line.startswith(NAME)]
    if None in codes or not found:
        return None, f"no answer within {seconds:g} s"
    return float(found[0]), ""


def main() -> None:
    """One rank of `over_gpus`; rank 0 prints the bandwidth."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    bandwidth = measure(device)
    if dist.get_rank() == 0:
        print(NAME, f"{bandwidth:.1f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
