"""The training loop: one configuration to one curve.

Initial weights depend on the seed alone and batches on (step, seed), so the arms of a seed start equal and
see the same tokens: their differences are paired. Losses stay on the device and are fetched rarely, so a
GPU does not wait.

Resuming needs the step number, weights and optimizer state: batches are a function of the step, and
`set_step` makes a recipe's random numbers one. A branch (`branch`) leaves a run for a decay of its own and is undone
after it. A run that was killed and resumed has the bytes of one that was not: on
the CPU with the same number of threads, which decides the order of sums, on a GPU where `deterministic` fixes it.

Inside `distributed.joined` the same loop runs on every rank: each computes its parts of the global batch, and all take
the same decisions from the same numbers, so none waits for one that has stopped.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from mxfp4.errors import Notice, UserError
from mxfp4.training.branch import branches
from mxfp4.training.checkpoints.resume import Checkpoints
from mxfp4.training.config import TrainConfig
from mxfp4.training.execution import distributed
from mxfp4.training.execution.choices import Execution
from mxfp4.training.execution.determinism import fixed_order
from mxfp4.training.monitoring.monitor import Monitor
from mxfp4.training.protocols import Probe, TokenSource, TrainResult
from mxfp4.training.run_state import Run

CHECKPOINT_MINUTES = 1.0


def train(
    config: TrainConfig,
    *,
    corpus: TokenSource | None = None,
    device: torch.device | str | None = None,
    checkpoint_dir: Path | str | None = None,
    checkpoint_minutes: float = CHECKPOINT_MINUTES,
    on_step: Callable[[int], None] | None = None,
    on_phase: Callable[[str], None] = lambda phase: None,
    probe: Probe | None = None,
    progress: bool = True,
    stop: Callable[[], bool] | None = None,
    arms_on_device: Callable[[], int] = lambda: 1,
    monitor: Monitor | None = None,
    **execution: Any,
) -> TrainResult:
    """Train one arm, from its checkpoint if `checkpoint_dir` holds one; on every rank of `distributed.joined` alike.

    corpus: None packs or opens `config.corpus`. device: None is the GPU if there is one.
    checkpoint_minutes: least time between checkpoints (0: one a step); saving takes 2% of the time at most, so a large
    model on a slow host is saved less often. on_step: called with the number of each finished step. on_phase: called
    with one of `liveness.PHASES` before whatever else takes long: a checkpoint, the end. stop: asked after each step;
    True, on any rank, leaves a checkpoint and gives the outcome "paused". arms_on_device: how many train there now, this
    one included; the timings say what the seconds are to be divided by for this one's part of the device's time.
    monitor: what watches the run (rank 0's alone); None is nothing. execution: the fields of `Execution`, such as
    compile, capture, deterministic and recompute_every.
    Raises UserError when the corpus, the checkpoint, the number of ranks or the execution does not fit the
    configuration, or the checkpoint of a pause cannot be written. Another that cannot be is a warning.
    """
    ranks, monitor, chosen = distributed.here(), monitor or Monitor(), Execution(**execution)
    if ranks.size > 1:
        if probe is not None:
            raise UserError(f"probe_steps={config.probe_steps} look at whole tensors: allowed with one rank")
        if branches(config) or config.eval_forwards:
            raise UserError("branches and evaluations in other forwards run on one rank")
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if corpus is None:
        from mxfp4.data.packing import prepare  # slow to import, and not needed for a given corpus

        corpus = prepare(config.corpus, config.model.vocab_size, append_eod=config.append_eod, progress=progress)
    run = Run(config, corpus, device, ranks, arms_on_device, chosen)
    run.prepare()
    todo = branches(config)
    checkpoints = None
    if checkpoint_dir is not None:
        checkpoints = Checkpoints(Path(checkpoint_dir), run.model, run.optimizer, ranks, checkpoint_minutes)
        run.resume(checkpoints)
    bar = tqdm(
        total=config.steps,
        initial=run.step,
        desc=config.recipe,
        unit="step",
        disable=None if progress and ranks.rank == 0 else True,
    )
    with bar, fixed_order() if chosen.deterministic else nullcontext():
        if not run.rows:
            run.evaluate()
        monitor.begin(run)
        while run.status is None or replay(run, checkpoints):
            branch = next((b for b in todo if b.start == run.step and b.name not in run.branched), None)
            if branch is not None:
                run.detour(branch, on_step, stop)
            else:
                monitor.before(run.step + 1)
                run.advance(probe)
                monitor.after(run)
                bar.update(run.step - bar.n)
                if on_step:
                    on_step(run.step)
            if run.status is not None:
                on_phase("checkpoint")  # a replay reads one
                continue
            if {run.step, run.step + 1} <= set(config.probe_steps):
                continue  # the probe compares these two steps; a checkpoint between them would lose the first
            due = checkpoints is not None and ranks.rank == 0 and checkpoints.due()
            paused, due = ranks.any(stop is not None and stop(), due)
            if checkpoints is not None and (paused or due):
                on_phase("checkpoint")
                run.save(checkpoints)
                monitor.rows(run)
            if paused and run.status is None:
                run.status = "paused"
    on_phase("ending")
    if checkpoints is not None:
        checkpoints.close(needed=run.status == "paused")
    monitor.end(run)
    return run.result()


def replay(run: Run, checkpoints: Checkpoints | None) -> bool:
    """Take up a run over ranks before the step at which a value was not finite, from its last checkpoint or from the
    beginning. False where nothing is to be replayed: its `status` is then how it ended. All ranks call it.

    It has ended once the same step, or what follows the same checkpoint, gives such a value again: so each replay
    starts at a later step than the one before. Not for a process by itself, whose arms `mxfp4 train --again` repeats.
    """
    if not run.suspect or checkpoints is None or run.ranks.control is None or run.captured:
        return False
    bad, reason, start = run.rows[-1]["step"], run.reason, checkpoints.last_step()
    before = [r for r in run.replayed if bad == r["step"] or start == r["from"]]
    if before:
        run.reason = f"{reason}; again after a replay from step {before[-1]['from']}"
        return False
    run.begin()
    run.resume(checkpoints)
    if run.step == 0:
        checkpoints.zero_moments()
        run.model.init_weights(run.config.seed)
    run.replayed.append({"step": bad, "reason": reason, "from": run.step})
    if run.ranks.rank == 0:
        text = f"{run.config.recipe}, seed {run.config.seed}: {reason}: replayed once from step {run.step}"
        warnings.warn(text, Notice, stacklevel=2)
    if not run.rows:
        run.evaluate()
    return run.status is None
