"""Stalled runs: those that stop learning far above the reference.

A scale may end a run as stalled by its own curve (`training.divergence.StallRule`). A run that spends its whole budget is
judged here.

Let T be a run's tokens and T_ref the tokens at which the mean evaluation curve of BF16 had the run's loss. A run is
stalled when, over the last quarter of its budget, T_ref advances less than 5 % as fast as T, and T_ref / T at the end is
below 0.25. A run that is shorter than its budget is never called stalled: early in training every curve can look flat.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import pandas as pd

from mxfp4.analysis.token_efficiency import crossings
from mxfp4.studies.store import Record

REFERENCE = "bf16"
LAST = 0.25
"""Share of the budget, at its end, over which the advance is measured."""
ADVANCE = 0.05
"""Least advance of T_ref for each token of a run that still learns."""
BEHIND = 0.25
"""Largest T_ref / T of a stalled run."""


def mean_curve(curves: Iterable[pd.DataFrame]) -> pd.DataFrame | None:
    """Mean over runs of the evaluation curve.

    Args:
        curves: One table a run, with the columns tokens and eval_loss (nats a token, NaN where not evaluated).

    Returns:
        tokens, eval_loss at the evaluations that all runs have; None without a run or a common evaluation.

    """
    columns = [c.dropna(subset="eval_loss").set_index("tokens")["eval_loss"] for c in curves]
    if not columns:
        return None
    table = pd.concat(columns, axis=1, join="inner").mean(axis=1).sort_index()
    return table.rename("eval_loss").rename_axis("tokens").reset_index() if len(table) else None


def is_stalled(curve: pd.DataFrame, reference: pd.DataFrame | None, budget: float) -> bool:
    """Whether a run is stalled by the definition at the top of this module.

    Args:
        curve: tokens and eval_loss of the run.
        reference: `mean_curve` of BF16. Without one no run is called stalled.
        budget: Tokens of a whole run.

    """
    points = curve.dropna(subset="eval_loss").sort_values("tokens")
    if reference is None or points.empty or points["tokens"].iloc[-1] < budget * (1 - 1e-9):
        return False
    losses = np.interp([(1 - LAST) * budget, budget], points["tokens"], points["eval_loss"])
    before, end = crossings(reference, losses)
    if not math.isfinite(end):  # the run ends below every loss that BF16 had
        return False
    return bool((end - before) / (LAST * budget) < ADVANCE and end / budget < BEHIND)


def ending(record: Record, reference: pd.DataFrame | None) -> str:
    """finished, diverged or stalled: how the run ended, or, if it spent its budget, whether it stalled beside `reference`."""
    status = record.outcome["status"]
    return "stalled" if status == "finished" and is_stalled(record.curve, reference, record.config.tokens) else status
