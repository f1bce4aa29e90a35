"""One arm of a plan, trained into the store: by this process, or by this rank together with the others of its run."""

from __future__ import annotations

from collections.abc import Callable

import torch

from mxfp4.data.packing import prepare
from mxfp4.diagnostics.probe import Probe
from mxfp4.layers.recipe import shown_name
from mxfp4.studies.machine import default_device
from mxfp4.studies.store import AGAIN, Record, Store
from mxfp4.training import weights
from mxfp4.training.config import TrainConfig
from mxfp4.training.execution import distributed
from mxfp4.training.loop import train
from mxfp4.training.monitoring.monitor import Monitor, Monitoring
from mxfp4.training.protocols import TokenSource


def arm_name(config: TrainConfig) -> str:
    """Recipe and seed, as tables and progress bars show an arm."""
    return f"{shown_name(config.recipe)}-s{config.seed}"


def done(
    config: TrainConfig, store: Store, device: torch.device | str | None, keep_weights: bool = False
) -> Record | None:
    """The record of an arm that has nothing left to do; None also while weights that are to be kept are not there."""
    record = store.get(config, device)
    return record if not keep_weights or weights.kept(store.weights_dir(config, device)) else None


def train_arm(
    config: TrainConfig,
    store: Store,
    *,
    corpus: TokenSource | None = None,
    device: torch.device | str | None = None,
    on_step: Callable[[int], None] | None = None,
    on_phase: Callable[[str], None] = lambda phase: None,
    stop: Callable[[], bool] | None = None,
    keep_weights: bool = False,
    monitoring: Monitoring | None = None,
    **execution,
) -> str:
    """Train one arm into the store: "finished", "diverged", "stalled", "paused", or "busy" when another process is at it.

    keep_weights: leave the trained weights too; an arm that has a record and no weights is trained again, and keeps its
    record. monitoring: how the run is watched; what that writes lies in `Store.log_dir`. execution: the fields of
    `Execution`, and `checkpoint_minutes` and `arms_on_device` of `train`. On several ranks all call it alike; rank 0 holds
    the lock and writes the record.
    """
    device = torch.device(device) if device is not None else default_device()
    if device.index is not None:
        torch.cuda.set_device(device)
    ranks = distributed.here()
    first = ranks.rank == 0
    folder = store.checkpoint_dir(config, device)
    lock = store.lock(config, device)
    if not ranks.agree(first and lock.acquire()):
        return "busy"
    try:
        record = done(config, store, device, keep_weights) if first else None  # another process may have just stored it
        status = ranks.agree(record.outcome["status"] if record else None)
        if status is None:
            if corpus is None:
                corpus = prepare(config.corpus, config.model.vocab_size, append_eod=config.append_eod, progress=False)
            if first and store.get(config, device):
                folder.mkdir(parents=True, exist_ok=True)
                (folder / AGAIN).touch()
            probe = Probe() if config.probe_steps or config.light_probe_steps else None
            monitor = Monitor()
            if first and monitoring is not None:
                where = store.log_dir(config, device)
                monitor = monitoring.monitor(arm_name(config), config.steps, where, config.to_dict())
            try:
                result = train(
                    config, corpus=corpus, device=device, checkpoint_dir=folder, on_step=on_step, on_phase=on_phase,
                    probe=probe, progress=False, stop=stop, monitor=monitor, **execution,
                )  # fmt: skip
            except BaseException as error:
                monitor.failed(error)
                raise
            status = result.outcome["status"]
            if status == "paused":
                return status
            if keep_weights:
                weights.save(store.weights_dir(config, device), result.model, config, weights.tokenizer_of(corpus))
            if first:
                store.put(config, result, device, corpus=corpus.fingerprint, origin=getattr(corpus, "origin", None))
        if first:
            store.remove_checkpoints(folder)
        return status
    finally:
        lock.release()
