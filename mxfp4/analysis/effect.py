"""Effects: what a metric found, with its interval, and how one is estimated over seeds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from mxfp4.analysis import bootstrap, token_efficiency
from mxfp4.analysis.study import Study
from mxfp4.errors import UserError


@dataclass(frozen=True)
class Effect:
    """What a metric found."""

    value: float
    low: float
    """Interval; NaN when it is not known, infinite when open."""
    high: float
    unit: str
    """How it is printed: share (signed percent), part (percent of a whole), seeds (how many of them), nats,
    ratio, cosine, number."""
    seeds: tuple[int, ...]
    over: str = "seeds"
    """What the interval is over."""
    note: str = ""
    """What else a reader must know: seeds that diverged, a bound."""
    of: str = ""
    """What a percentage is of, or what a number borrows, as it follows the number: "of fp8's tokens"."""


class NoEffect(UserError):
    """The records are there and cannot answer: the reason in one line."""


class NoProbe(NoEffect):
    """The runs are there and were not probed for this."""


def final_losses(study: Study, arm: str) -> dict[int, float]:
    """{seed: last evaluation}, infinite where the arm was ended before its budget."""
    gone = study.cut_short(arm)
    return {s: math.inf if s in gone else c["eval_loss"].dropna().iloc[-1] for s, c in study.curves(arm).items()}


def last_losses(study: Study, arms: Iterable[str]) -> dict[str, dict[int, float]]:
    """{arm: {seed: loss}} to compare: each arm's last evaluation. Where runs stop at a target those are alike, so there
    it is the last evaluation that all of `arms` have in a seed; infinite where the arm was ended before its
    budget."""
    arms = list(arms)
    if not study.config.stop_at_target:
        return {arm: final_losses(study, arm) for arm in arms}
    found: dict[str, dict[int, float]] = {arm: {} for arm in arms}
    for seed in set.intersection(*(set(study.curves(arm)) for arm in arms)):
        losses = {
            arm: study.curves(arm)[seed].dropna(subset="eval_loss").set_index("tokens")["eval_loss"] for arm in arms
        }
        whole = [arm for arm in arms if seed not in study.cut_short(arm)]
        end = min((losses[arm].index[-1] for arm in whole), default=None)
        for arm in arms if whole else ():
            found[arm][seed] = losses[arm].get(end, math.nan) if arm in whole else math.inf
    return found


def estimate(values: dict[int, float], unit: str, note: str = "", of: str = "") -> Effect:
    """Mean, and an interval over seeds: a bootstrap's, and no narrower than Student's, which knows how few seeds there
    are. With a value that is infinite it is the range. NaN values say nothing."""
    values = {s: float(v) for s, v in values.items() if not math.isnan(v)}
    if not values:
        raise NoEffect("no seed in which all arms have an answer")
    if all(map(math.isfinite, values.values())):
        e = token_efficiency.paired_mean(values)
        effect = Effect(e.mean, e.low, e.high, unit, e.seeds, note=note, of=of)
        alone = pd.DataFrame([values, dict.fromkeys(values, 0.0)], index=["ours", "nothing"])
        noise = bootstrap.run_noise(alone, ["ours", "nothing"])
        return widened(effect, None if noise is None else e.mean + noise[0] - noise[1])
    many = len(values) > 1
    low, high = (min(values.values()), max(values.values())) if many else (math.nan, math.nan)
    over = "seeds, their range"
    return Effect(float(np.mean(list(values.values()))), low, high, unit, tuple(sorted(values)), over, note, of)


SEEDS_AND_WINDOWS = "seeds and evaluation windows"


def combination(study: Study, terms: Sequence[tuple[str, float]], unit: str) -> Effect:
    """The sum over terms (arm, weight) of weight times final loss, paired by seed: ("a", 1), ("b", -1) is a difference.

    Where runs stop at a target the loss is that of `last_losses`, and the interval over seeds alone. Else the interval
    is that of `bootstrap`; over seeds alone where a record keeps no losses of windows. One seed has none,
    as windows alone say nothing of another seed; with an arm that diverged it is the range.
    """
    weights: dict[str, float] = {}
    for arm, weight in terms:
        weights[arm] = weights.get(arm, 0) + weight
    final = last_losses(study, weights)
    shared = sorted(set.intersection(*(set(f) for f in final.values())))
    values = {s: sum(w * final[arm][s] for arm, w in weights.items()) for s in shared}
    effect = estimate(values, unit, endings_note(study, *weights))
    if len(shared) < 2 or not math.isfinite(effect.value) or study.config.stop_at_target:
        return effect
    matrix = bootstrap.combined(study, weights, shared)
    if matrix is not None:
        low, high = bootstrap.interval(bootstrap.means(matrix))
        effect = replace(effect, low=low, high=high, over=SEEDS_AND_WINDOWS)
    noise = bootstrap.run_noise(bootstrap.final_table(study, shared), list(weights))
    return widened(effect, None if noise is None else effect.value + np.array(list(weights.values())) @ noise)


def widened(effect: Effect, samples: np.ndarray | None) -> Effect:
    """`effect` with an interval that holds that of `samples` as well, if there are any."""
    if samples is None:
        return effect
    low, high = bootstrap.interval(samples)
    return replace(effect, low=min(low, effect.low), high=max(high, effect.high))


def endings_note(study: Study, *arms: str) -> str:
    """Which of `arms` diverged or stalled in which seeds; empty when none did."""
    parts = [
        f"{arm} {ending} in seed {', '.join(map(str, seeds))}"
        for arm in dict.fromkeys(arms)
        for ending, seeds in (("diverged", study.diverged(arm)), ("stalled", study.stalled(arm)))
        if seeds
    ]
    return "; ".join(parts)
