"""Several ranks in tests: processes over gloo, forked from a server that has loaded once what they need."""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
import traceback
from pathlib import Path

import torch

from mxfp4.training.execution import distributed

SECONDS = 300  # a hang, on a busy machine too
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(
    [
        "mxfp4.studies.arm_queue",
        "mxfp4.training.checkpoints.dcp_folder",
        "torch.distributed.fsdp",
        "torch._dynamo",
        "torch._inductor.config",
        "torch.onnx",
        "triton",
    ]
)


def launch(scenario, size: int, *args, dying: bool = False) -> None:
    """Run `scenario(ranks, *args)` on `size` ranks. dying: one of them is going to be killed; the others then are too."""
    with tempfile.TemporaryDirectory() as folder:
        meeting = f"file://{folder}/meeting"
        processes = [context.Process(target=_rank, args=(scenario, meeting, r, size, args)) for r in range(size)]
        for process in processes:
            process.start()
        multiprocessing.connection.wait([p.sentinel for p in processes], SECONDS)
        for process in processes:
            process.join(1 if dying else SECONDS)
            if process.exitcode is None:
                process.kill()
                process.join()
                assert dying, f"a rank of {scenario.__name__} hung"
    codes = [p.exitcode for p in processes]
    assert (-9 in codes) if dying else codes == [0] * size, codes


def _rank(scenario, meeting, rank, size, args) -> None:
    torch.set_num_threads(1)
    try:
        with distributed.joined("cpu", (meeting, rank, size)) as ranks:
            scenario(ranks, *args)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        raise


def full_state(model) -> dict[str, torch.Tensor]:
    """The whole weights, on every rank."""
    return {name: distributed.whole(p.detach()).clone() for name, p in model.named_parameters()}


def keep(ranks, path: Path, result) -> None:
    """Rank 0 writes what a test looks at."""
    weights = full_state(result.model)
    if ranks.rank == 0:
        torch.save({"weights": weights, "curve": result.curve, "outcome": result.outcome,
                    "windows": result.window_losses}, path)  # fmt: skip
