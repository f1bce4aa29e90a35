"""Metrics of claims about tensors: means and differences of what probes saw in the layers of a run.

Probes exist for few seeds, so an interval is a bootstrap over the layers looked at.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from mxfp4.analysis import token_efficiency
from mxfp4.analysis.effect import Effect, NoEffect, NoProbe, last_losses
from mxfp4.analysis.study import Study
from mxfp4.errors import UserError


def probe(
    study: Study, *, metric: str, probed: str, gemm: str = "", tensor: str = "", recipe: str | None = None
) -> Effect:
    """Mean of a probe metric over the layers and steps looked at in the runs of `probed`.

    recipe: what was applied to the tensors; the arm's own if not said (see `mxfp4.diagnostics.probe`).
    """
    rows = _by_layer(study, metric, probed, gemm, tensor, recipe)
    return _over_layers(rows.mean(axis=1), metric, tensor, "share" if metric.endswith("bias") else "part")


def probe_difference(
    study: Study,
    *,
    metric: str,
    probed: str,
    gemm: str = "",
    tensor: str = "",
    recipe: str | None = None,
    against_recipe: str | None = None,
    probed_against: str | None = None,
    against_metric: str | None = None,
) -> Effect:
    """A probe metric less another one of the same layers: another recipe, another arm or another metric."""
    a = _by_layer(study, metric, probed, gemm, tensor, recipe).mean(axis=1)
    other = against_metric or metric
    b = _by_layer(study, other, probed_against or probed, gemm, tensor, against_recipe or recipe).mean(axis=1)
    return _over_layers((a - b).dropna(), metric, tensor, "share")


def _by_layer(study: Study, metric: str, arm: str, gemm: str, tensor: str, recipe: str | None) -> pd.DataFrame:
    """(seed, layer) x step of one probe metric, layers only."""
    rows = study.probes
    recipe = recipe or arm
    chosen = rows[
        (rows["arm"] == arm) & (rows["recipe"] == recipe) & (rows["metric"] == metric)
        & (rows["gemm"] == gemm) & (rows["tensor"] == tensor) & (rows["layer"] != "all")
    ].dropna(subset="value")  # fmt: skip
    if chosen.empty:
        raise NoProbe(f"no probe of {metric} ({gemm or 'any'} {tensor}, {recipe}) in the records of {arm}")
    return chosen.pivot_table(index=["seed", "layer"], columns="step", values="value")


SHARES_OF_VALUES = ("clipped", "flushed", "scale_changes", "code_changes", "changes")
"""Metrics that count values; other percentages are of a norm or, of a bias, of the tensor's own length."""


def _of(metric: str, tensor: str) -> str:
    name = {"dx": "dX", "dw": "dW"}.get(tensor, tensor.upper())
    if metric == "mismatch_to_error":
        return "of the quantization error"
    what = "of the values" if metric in SHARES_OF_VALUES else "of the norm"
    return f"{what} of {name}" if name else what


def _over_layers(values: pd.Series, metric: str, tensor: str, unit: str) -> Effect:
    if values.empty:
        raise NoProbe(f"no layer in which both sides of {metric} were probed")
    if metric.startswith(("pattern", "cosine")):
        unit = "cosine"
    if metric.startswith(("kurtosis", "peak", "log2")):
        unit = "number"
    e = token_efficiency.paired_mean(dict(enumerate(values.to_numpy())))
    seeds = tuple(sorted({int(seed) for seed, _ in values.index}))
    of = _of(metric, tensor) if unit in ("part", "share") else ""
    return Effect(e.mean, e.low, e.high, unit, seeds, f"{len(values)} layers", of=of)


def predicts_loss(
    study: Study, *, metric: str, arms: list[str], gemm: str = "", tensor: str = "", reference: str = "bf16"
) -> Effect:
    """Spearman's rank correlation, over `arms`, of a probe metric with the final loss over the reference.

    Losses are means over the seeds that every arm has: the reference's luck in a seed would rank arms of others.
    """
    losses = last_losses(study, [*arms, reference])
    seeds = sorted(set.intersection(*(set(found) for found in losses.values())))
    if not seeds:
        raise NoEffect("the arms have no seed in common")
    points = []
    for arm in arms:
        x = _by_layer(study, metric, arm, gemm, tensor, None).to_numpy()
        y = [losses[arm][s] - losses[reference][s] for s in seeds]
        points.append((float(np.nanmean(x)), float(np.mean(y))))
    points = np.array(points)
    if len(points) < 4:
        raise UserError(f"predicts_loss needs four arms or more, got {len(points)}")
    ranks = pd.DataFrame(points).rank()
    draws = np.random.default_rng(0).integers(len(points), size=(2000, len(points)))
    resampled = [ranks.iloc[d] for d in draws]
    values = [float(r[0].corr(r[1])) for r in resampled if r[0].nunique() > 1 and r[1].nunique() > 1]
    if not values:
        raise NoEffect(f"the arms do not differ in {metric} or in loss: there is no order to compare")
    low, high = np.quantile(values, [0.025, 0.975])
    return Effect(
        float(ranks[0].corr(ranks[1])), float(low), float(high), "cosine", tuple(seeds), f"{len(points)} arms"
    )
