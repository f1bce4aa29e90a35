"""Roughness of evaluation curves: what is left of their second differences once the bend that all seeds share is out.

All runs bend where the learning rate falls and where text comes round again, and an arm that learns more slowly bends
less; neither is rough. Losses in nats a token.
"""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from mxfp4.analysis import bootstrap, token_efficiency
from mxfp4.analysis.effect import Effect, NoEffect, endings_note
from mxfp4.analysis.study import Study


def roughness(study: Study, *, arm: str, reference: str = "fp8") -> Effect:
    """Scatter over seeds of the second differences of the later half of the evaluation curve, over the reference's: what
    the seeds of an arm share is the bend of its curve, and no roughness.

    The interval is that of a ratio of two standard deviations. Second differences of independent errors correlate by
    -2/3 and 1/6 with their neighbours, so that n of them have the freedom of 18/35 n.
    """
    tables = [_second_differences(study, name) for name in (arm, reference)]
    shared = sorted(set.intersection(*(set(t.columns) for t in tables)))
    if len(shared) < 2:
        raise NoEffect("the bend of a curve is told from its roughness by two seeds or more")
    points = tables[0].index.intersection(tables[1].index)
    rest = [t.loc[points, shared].sub(t.loc[points, shared].mean(axis=1), axis=0).to_numpy() for t in tables]
    ours, theirs = (math.sqrt((r**2).sum()) for r in rest)
    if not len(points):
        raise NoEffect(f"{arm} and {reference} have no three evaluations in a row that all their runs reach")
    if not theirs > 1e-9:
        raise NoEffect(f"the curves of {reference} differ by nothing that could be rough")
    freedom = (len(shared) - 1) * len(points) * 18 / 35
    rng = np.random.default_rng(1)
    a, b = rng.chisquare(freedom, (2, token_efficiency.DRAWS))
    low, high = bootstrap.interval(ours / theirs * np.sqrt(b / a))
    over = "the points of the curves in all seeds"
    return Effect(ours / theirs, low, high, "ratio", tuple(shared), over, endings_note(study, arm))


def _second_differences(study: Study, arm: str) -> pd.DataFrame:
    """[tokens, seed] second differences of the later half of the evaluations that every run of `arm` reached."""
    curves = {s: c.dropna(subset="eval_loss").set_index("tokens")["eval_loss"] for s, c in study.curves(arm).items()}
    table = pd.DataFrame(curves).sort_index().dropna()
    return table.iloc[len(table) // 2 :].diff().diff().dropna()
