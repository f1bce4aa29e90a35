"""Training loss at the end of a run, and how far the evaluation loss lies above it.

The arms of a seed see the same batches in the same order, so their training losses are paired. On text that comes round
several times the evaluation loss alone hides a part of an arm's cost: BF16 memorises more of the text than an FP4 arm,
which costs it nothing in training loss and something in evaluation loss.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd

from mxfp4.analysis.effect import Effect, NoEffect, endings_note, estimate, final_losses
from mxfp4.analysis.study import Study

LAST = 0.05
"""Share of the steps, at the end of the budget, over which training losses are averaged."""
REFERENCE = "bf16"


def last_training_losses(study: Study, arm: str) -> dict[int, float]:
    """{seed: mean training loss over the last 5 % of the steps, nats a token}; infinite where the arm was ended before
    its budget.

    Raises:
        NoEffect: The runs stop at a target loss, each at another step: they have no last batches in common.

    """
    if study.config.stop_at_target:
        raise NoEffect("runs that stop at a target loss have no last batches in common")
    gone, first = study.cut_short(arm), (1 - LAST) * study.config.steps
    losses = {seed: curve.loc[curve["step"] > first, "train_loss"].mean() for seed, curve in study.curves(arm).items()}
    return {seed: math.inf if seed in gone else float(loss) for seed, loss in losses.items()}


def training_loss_difference(study: Study, *, arm: str, against: str = REFERENCE) -> Effect:
    """Mean training loss over the last 5 % of the steps of `arm` less that of `against`, nats a token, paired by seed on the
    same batches."""
    ours, theirs = (last_training_losses(study, name) for name in (arm, against))
    values = {seed: ours[seed] - theirs[seed] for seed in ours.keys() & theirs.keys()}
    return estimate(values, "nats", endings_note(study, arm, against))


def evaluation_gap(study: Study, arm: str) -> float:
    """Final evaluation loss less the last training loss of `arm`, nats a token, mean over the seeds that finished; NaN
    without one, or where runs stop at a target."""
    try:
        training = last_training_losses(study, arm)
    except NoEffect:
        return math.nan
    final = final_losses(study, arm)
    gaps = [final[seed] - loss for seed, loss in training.items() if math.isfinite(loss)]
    return float(np.mean(gaps)) if gaps else math.nan


def final_table(study: Study, seeds: Sequence[int]) -> pd.DataFrame:
    """[arm, seed] last training losses of the arms that finished all of `seeds`."""
    found = {arm: last_training_losses(study, arm) for arm, runs in study.arms.items() if set(seeds) <= runs.keys()}
    whole = {arm: [x[s] for s in seeds] for arm, x in found.items() if all(math.isfinite(x[s]) for s in seeds)}
    return pd.DataFrame.from_dict(whole, orient="index", columns=list(seeds), dtype=float)
