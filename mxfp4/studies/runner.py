"""Runs a plan: trains the arms that are missing, several at a time if asked, and can be stopped at any moment.

Where several arms run at a time (several jobs, or several GPUs), or one arm on several GPUs, each has processes of its
own (`arm_queue`). Ctrl-C (or SIGTERM, or the end of the time) lets every arm leave a checkpoint, from which the next
call carries on, on another number of GPUs if need be. A second Ctrl-C ends at once; then the last periodic checkpoint
counts.

Under torchrun the plan's arms are trained one after the other by all of its ranks together, on one node or several that
share the folder of runs:

    torchrun --nproc-per-node 8 -m mxfp4.cli train --scale mi355x --arm mxfp4+h16
"""

from __future__ import annotations

import os
import sys
import time

import torch
from tqdm import tqdm

from mxfp4.data.packing import prepare
from mxfp4.errors import UserError
from mxfp4.studies.arm_queue import Pool, Summary, stop_on_signal
from mxfp4.studies.devices import Place, chosen_gpus, idle, no_gpu, places
from mxfp4.studies.machine import default_device
from mxfp4.studies.memory_check import check_room
from mxfp4.studies.plans import Plan
from mxfp4.studies.store import Store
from mxfp4.studies.train_arm import arm_name, done, train_arm
from mxfp4.training.config import TrainConfig
from mxfp4.training.execution import distributed
from mxfp4.training.protocols import TokenSource

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
) -> Summary:
    """Train the missing arms of `plan`, `jobs` at a time on each device (None: the scale's own number).

    device: None is every GPU, or the CPU. gpus: on so many of the machine's GPUs (None: all; 0: the CPU). corpus: None
    packs or opens the plan's. max_minutes: stop then, with checkpoints. last_start: begin no arm after so many minutes,
    and finish those in work. progress: a bar, where stderr is a terminal, and a line that names what is there already.
    keep_weights: leave the trained weights too, in runs/weights; an arm that has none is missing, and keeps its record.
    again: first set the records that the plan's arms have aside, in runs/replaced, so that all are missing.
    Every rank of torchrun calls it; all get the summary. Raises UserError when the corpus cannot be had, there are no
    GPUs, or fewer, than the scale's arms need, or an arm needs more memory than there is (`memory_check`).
    """
    device = torch.device(device or ("cpu" if gpus == 0 else default_device()))
    if plan.scale.needs_gpu and device.type != "cuda":
        raise UserError(no_gpu(plan.scale, device.type))
    options = {"corpus": corpus, "max_minutes": max_minutes, "last_start": last_start, "keep_weights": keep_weights,
               "again": again}  # fmt: skip
    if distributed.launched():
        if jobs is not None and jobs != 1:
            raise UserError(f"jobs={jobs}: under torchrun all ranks train one arm at a time")
        if gpus is not None:
            raise UserError(f"gpus={gpus}: under torchrun its --nproc-per-node says how many")
        if device.type == "cuda":
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        with distributed.joined(device) as ranks:
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
    keep_weights: bool, again: bool, progress: bool,
) -> Summary:  # fmt: skip
    ranks = distributed.here()
    started = time.monotonic()
    device = places[0][0]
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
            pool = Pool(plan.scale, store, places, corpus, summary, bar, lambda: passed(last_start), keep_weights)
            pool.run(missing, lambda: interrupted.is_set() or passed(max_minutes))
    summary.seconds = time.monotonic() - started
    return summary


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
