"""Runs a plan: trains the arms that are missing, several at a time if asked, and can be stopped at any moment.

Where several arms run at a time (several jobs, or several GPUs), or one arm on several GPUs, each has processes of its
own (`arm_queue`). Ctrl-C (or SIGTERM, or the end of the time) lets every arm leave a checkpoint, from which the next
call carries on, on another number of GPUs if need be. A second Ctrl-C ends at once; then the last periodic checkpoint
counts.

Under torchrun the plan's arms are trained one after the other by all of its ranks together, on one node or several that
share the folder of runs:

    torchrun --nproc-per-node 8 --max-restarts 2 -m mxfp4.cli train --scale mi355x --arm mxfp4+h16

There no process watches the ranks: each ends itself when it makes no step for too long, torchrun ends the others, and
with --max-restarts starts all of them again, from the last checkpoint.
"""

from __future__ import annotations

import os
import sys
import time
import uuid
from dataclasses import replace
from datetime import timedelta

import torch
from tqdm import tqdm

from mxfp4.data.packing import prepare
from mxfp4.errors import UserError
from mxfp4.studies.arm_queue import Pool, Summary
from mxfp4.studies.devices import Place, chosen_gpus, idle, no_gpu, places
from mxfp4.studies.failures import TOLERANCE, Tolerance
from mxfp4.studies.machine import default_device
from mxfp4.studies.memory_check import check_room
from mxfp4.studies.plans import Plan
from mxfp4.studies.store import Store
from mxfp4.studies.train_arm import arm_name, done, train_arm
from mxfp4.training.config import TrainConfig
from mxfp4.training.execution import distributed
from mxfp4.training.execution.signals import stop_on_signal
from mxfp4.training.monitoring.monitor import Monitoring
from mxfp4.training.protocols import TokenSource

SHARED_SECONDS = 10.0
"""A file that another node made becomes visible within this time."""

__all__ = ["Summary", "arm_name", "run_plan", "train_arm"]


def run_plan(
    plan: Plan,
    store: Store,
    *,
    jobs: int | None = None,
    device: torch.device | str | None = None,
    corpus: TokenSource | None = None,
    max_minutes: float | None = None,
    last_start: float | None = None,
    progress: bool = True,
    keep_weights: bool = False,
    gpus: int | None = None,
    again: bool = False,
    tolerance: Tolerance = TOLERANCE,
    monitoring: Monitoring | None = None,
) -> Summary:
    """Train the missing arms of `plan`, `jobs` at a time on each device (None: the scale's own number).

    device: None is every GPU, or the CPU. gpus: on so many of the machine's GPUs (None: all; 0: the CPU). corpus: None
    packs or opens the plan's. max_minutes: stop then, with checkpoints. last_start: begin no arm after so many minutes,
    and finish those in work. progress: a bar, where stderr is a terminal, and a line that names what is there already.
    keep_weights: leave the trained weights too, in runs/weights; an arm that has none is missing, and keeps its record.
    monitoring: how the runs are watched; None writes each run's log and nothing else.
    again: first set the records that the plan's arms have aside, in runs/replaced, so that all are missing.
    tolerance: how long to wait for an arm that makes no progress, and how often to try again what failed (`failures`).
    Every rank of torchrun calls it; all get the summary. Raises UserError when the corpus cannot be had, there are no
    GPUs, or fewer, than the scale's arms need, or an arm needs more memory than there is (`memory_check`).
    """
    device = torch.device(device or ("cpu" if gpus == 0 else default_device()))
    if plan.scale.needs_gpu and device.type != "cuda":
        raise UserError(no_gpu(plan.scale, device.type))
    plan = replace(plan, scale=plan.scale.on_device(device.type))
    options = {"corpus": corpus, "max_minutes": max_minutes, "last_start": last_start, "keep_weights": keep_weights,
               "again": again, "tolerance": tolerance, "monitoring": monitoring or Monitoring()}  # fmt: skip
    if distributed.launched():
        if jobs is not None and jobs != 1:
            raise UserError(f"jobs={jobs}: under torchrun all ranks train one arm at a time")
        if gpus is not None:
            raise UserError(f"gpus={gpus}: under torchrun its --nproc-per-node says how many")
        if device.type == "cuda":
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        timeout, flight = timedelta(minutes=tolerance.collective_minutes), store.log_file(plan.scale.name).parent
        with distributed.joined(device, timeout=timeout, flight=flight) as ranks:
            _check_shared(store, ranks)
            return _run(plan, store, [(device,)], **options, progress=progress and ranks.rank == 0)
    jobs = plan.scale.jobs if jobs is None else jobs
    if jobs < 1:
        raise UserError(f"jobs={jobs} must be at least 1")
    gpus = chosen_gpus(gpus, device)
    where = places(device, jobs, plan.scale.ranks_on(gpus), gpus)
    if gpus and device.index is None and progress:
        unused = idle(plan.scale, gpus)
        if unused:
            tqdm.write(unused, file=sys.stderr)
    return _run(plan, store, where, **options, progress=progress)


def _run(
    plan: Plan, store: Store, places: list, *, corpus, max_minutes: float | None, last_start: float | None,
    keep_weights: bool, again: bool, tolerance: Tolerance, monitoring: Monitoring, progress: bool,
) -> Summary:  # fmt: skip
    ranks = distributed.here()
    started = time.monotonic()
    device = places[0][0]
    for config in plan.arms:
        monitoring.check(config.steps)
    if again:
        moved = [to for config in plan.arms if (to := store.set_aside(config, device))] if ranks.rank == 0 else []
        if moved and progress:
            names = " ".join(to.name for to in moved)
            tqdm.write(f"to be run again, their records are in {moved[0].parent}: {names}", file=sys.stderr)
        ranks.agree(None)  # the others look after that
    present, missing = [], []
    for arm in plan.status(store, device):
        if arm.done and done(arm.config, store, device, keep_weights):
            present.append(arm_name(arm.config))
        else:
            missing.append((arm.config, arm.step))
    present, missing = ranks.agree((present, missing))  # another process may store a record between two looks
    summary = Summary(present=present)
    if present and progress:
        tqdm.write(f"already there ({len(present)}): {' '.join(present)}", file=sys.stderr)
    if ranks.rank == 0:
        needed = {store.run_id(config, device) for config, _ in missing}
        removed = store.remove_left_over(plan.scale.name, but=needed)
        if removed and progress:
            text = f"removed checkpoints of finished runs, left by a crash ({len(removed)}): {' '.join(removed)}"
            tqdm.write(text, file=sys.stderr)
    if missing:
        _check_room([config for config, _ in missing], plan, places, ranks)
        if corpus is None and ranks.rank == 0:
            corpora = {(config.corpus, config.model.vocab_size, config.append_eod) for config, _ in missing}
            for name, vocab_size, append_eod in sorted(corpora):  # once, before the arms ask for it
                prepare(name, vocab_size, append_eod=append_eod, progress=progress)
        ranks.agree(None)  # the others wait for it
        bar = tqdm(
            total=sum(config.steps for config, _ in missing),
            initial=sum(step for _, step in missing),
            unit="step",
            desc=f"{plan.name} ({len(missing)} arms)",
            disable=None if progress else True,
        )

        def passed(minutes: float | None) -> bool:
            return minutes is not None and time.monotonic() > started + 60 * minutes

        with bar, stop_on_signal() as interrupted:
            pool = Pool(plan.scale, store, places, corpus, summary, bar, lambda: passed(last_start), keep_weights,
                        tolerance, monitoring)  # fmt: skip
            pool.run(missing, lambda: interrupted.is_set() or passed(max_minutes))
    summary.seconds = time.monotonic() - started
    return summary


def _check_shared(store: Store, ranks: distributed.Ranks) -> None:
    """UserError where ranks on other nodes do not see rank 0's folder of runs: each would write its own checkpoints."""
    if ranks.size == int(os.environ["LOCAL_WORLD_SIZE"]):
        return
    mark = store.root / f".shared-{ranks.agree(uuid.uuid4().hex)}"
    if ranks.rank == 0:
        store.root.mkdir(parents=True, exist_ok=True)
        mark.touch()
    ranks.agree(None)
    until = time.monotonic() + SHARED_SECONDS
    while not (seen := mark.exists()) and time.monotonic() < until:
        time.sleep(0.1)
    blind = [rank for rank, sees in enumerate(ranks.gather(seen)) if not sees]
    if ranks.rank == 0:
        mark.unlink()
    if blind:
        raise UserError(
            f"ranks {blind[0]} to {blind[-1]} do not see {store.root} of rank 0: all nodes must share the folder of runs; "
            "set MXFP4_RUNS to one on a shared file system"
        )


def _check_room(configs: list[TrainConfig], plan: Plan, places: list[Place], ranks: distributed.Ranks) -> None:
    """UserError where `configs` cannot fit, before anything is packed or trained."""
    together = distributed.launched()
    device = places[0][0]
    here = int(os.environ["LOCAL_WORLD_SIZE"]) if together else len({d for place in places for d in place})
    check_room(
        configs, plan.scale, device,
        ranks=ranks.size if together else len(places[0]),
        at_a_time=1 if together else sum(place == places[0] for place in places),
        gpus=here if device.type == "cuda" else 0,
        nodes=ranks.size // here if together else 1,
    )  # fmt: skip
