"""The bias of stochastic rounding at a block's maximum, measured: it depends on where in a binade the maximum
lies.

A scale rule that clips (floor, even) lets amax / scale exceed E2M1's largest value, 6; stochastic rounding
cannot round such a value up, so its mean is 6 and its bias is negative. Under ceil and rceil nothing exceeds
6. Scaling by 3/4 before rounding and back after (Tseng et al.), at the scale of the values as they were,
brings the largest value that floor lets through, just below 8, to just below 6.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
import torch

import mxfp4
from mxfp4.errors import UserError
from mxfp4.numerics.scale_rules import SCALE_RULES

PRESCALE = 0.75
PRESCALED = "floor, scaled by 3/4"


def sr_bias_frame(rules: Sequence[str], *, points: int = 49, draws: int = 64, seed: int = 0) -> pd.DataFrame:
    """rule, amax (in [4, 8): a binade of FP32), bias (percent of amax), error (of that mean, one sigma,
    percent).

    rules: scale rules, or PRESCALED. Each point is the mean over `draws` blocks of one amax, which sets the
    scale, and 31 values of that size (three quarters of it where scaled), which are looked at.
    """
    amax = torch.linspace(4, 8, points + 1, dtype=torch.float64)[:-1].float()
    frames = []
    for rule in rules:
        if rule != PRESCALED and rule not in SCALE_RULES:
            raise UserError(f"scale rule {rule!r} is not known; known: {', '.join(SCALE_RULES)}, {PRESCALED}")
        factor, name = (PRESCALE, "floor") if rule == PRESCALED else (1.0, rule)
        blocks = (factor * amax)[:, None, None].repeat(1, draws, 32)
        blocks[..., 0] = amax[:, None]
        rounded = mxfp4.fake_quantize(blocks, scale_rule=name, rounding="stochastic", seed=seed)
        relative = 100 * (rounded[..., 1:].double().flatten(1) / factor / amax[:, None].double() - 1)
        frames.append(pd.DataFrame({
            "rule": rule, "amax": amax.numpy().astype(np.float64), "bias": relative.mean(1).numpy(),
            "error": relative.std(1).numpy() / relative.shape[1] ** 0.5,
        }))  # fmt: skip
    return pd.concat(frames, ignore_index=True)


def bias_summary(frame: pd.DataFrame) -> pd.DataFrame:
    """rule, mean bias over the binade, largest bias (percent), share of the binade whose bias exceeds four
    sigma."""
    rows = []
    for rule, part in frame.groupby("rule", sort=False):
        biased = part["bias"].abs() > 4 * part["error"].clip(lower=1e-9)
        rows.append({"rule": rule, "mean": part["bias"].mean(), "worst": part["bias"].min(), "share": biased.mean()})
    return pd.DataFrame(rows)
