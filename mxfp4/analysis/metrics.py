"""Metrics that test claims: functions of a study's records that give one effect with its interval.

Losses are compared within a seed, and the interval is a bootstrap over seeds and evaluation windows (`bootstrap`), or
over seeds alone for what windows say nothing of (`effect.estimate`); probes exist for few seeds, so their interval is
a bootstrap over the layers looked at. An overhead is read at a target loss that the reference reaches early enough for
slower arms to reach it too: the mean loss of the reference at the share `at` of its budget (or the fixed target of a
study that stops there). An arm that does not reach the target has an overhead of at least what its budget allowed: the
effect is then a bound, and its interval is open upwards.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np

from mxfp4.analysis import bootstrap, published, token_efficiency
from mxfp4.analysis.effect import (
    SEEDS_AND_WINDOWS,
    Effect,
    NoEffect,
    combination,
    endings_note,
    estimate,
    final_losses,
    last_losses,
    widened,
)  # fmt: skip
from mxfp4.analysis.probe_metrics import predicts_loss, probe, probe_difference
from mxfp4.analysis.roughness import roughness
from mxfp4.analysis.study import Study
from mxfp4.analysis.training_loss import training_loss_difference
from mxfp4.errors import UserError
from mxfp4.studies.store import Record

ARM_ARGUMENTS = ("arm", "against", "reference", "arms", "probed", "probed_against")
"""Arguments of a metric that name arms which must have records."""
AT = 0.7
"""Default share of the reference's budget at which the target loss is read: leaves room for 43 % overhead."""
CONVERGED_AT = 2 / 3
"""Default share of the reference's budget whose loss an arm must reach to count as converged."""


MISSED = "does not reach the target in its budget"


def is_bound(effect: Effect) -> bool:
    """Whether an overhead is only known to exceed what the budget allowed, as the arm missed the target."""
    return MISSED in effect.note


def target_loss(study: Study, reference: str, at: float) -> float:
    """The loss, nats a token, at which overheads are read: see the module's docstring. Of runs that diverged before, what
    they had last is no loss at that share; NoEffect when all did."""
    if study.config.stop_at_target:
        return study.config.target_loss
    losses = []
    for curve in study.curves(reference).values():
        points = curve.dropna(subset="eval_loss").sort_values("tokens")
        if points["tokens"].max() >= at * study.tokens * (1 - 1e-9):
            losses.append(np.interp(at * study.tokens, points["tokens"], points["eval_loss"]))
    if not losses:
        raise NoEffect(f"no run of {reference} gets to {at:.3g} of its budget")
    return float(np.mean(losses))


@dataclass(frozen=True)
class _Overhead:
    """The overhead of one arm in one seed; `bound` when the arm did not reach the target in its budget."""

    value: float
    bound: bool


def _overheads(study: Study, arm: str, reference: str, target: float) -> dict[int, _Overhead]:
    """{seed: overhead} over the seeds in which the reference reaches the target."""
    ours, theirs = study.curves(arm), study.curves(reference)
    found = {}
    for seed in sorted(ours.keys() & theirs.keys()):
        base = token_efficiency.crossing(theirs[seed], target)
        if not base:
            continue
        reached = token_efficiency.crossing(ours[seed], target)
        tokens = study.tokens if reached is None else reached
        found[seed] = _Overhead(tokens / base - 1, reached is None)
    if not found:
        raise NoEffect(f"{reference} does not reach the target of {target:.3f} nats a token in a seed that {arm} has")
    return found


def _bounded(effect: Effect, above: list[str], below: list[str]) -> Effect:
    """Open the interval upwards for arms of `above` that missed the target, downwards for those of
    `below`."""
    parts = [f"{arm} {MISSED}" for arm in (*above, *below)]
    note = "; ".join(p for p in (effect.note, *parts) if p)
    high = math.inf if above else effect.high
    low = -math.inf if below else effect.low
    return replace(effect, low=low, high=high, note=note)


def _tokens_of(reference: str) -> str:
    return f"of {reference}'s tokens"


def overhead(study: Study, *, arm: str, reference: str = "fp8", at: float = AT) -> Effect:
    """Extra tokens of `arm` to the loss that the reference has at the share `at` of its budget, as a share of the
    reference's."""
    target = target_loss(study, reference, at)
    found = _overheads(study, arm, reference, target)
    values = {s: o.value for s, o in found.items()}
    effect = estimate(values, "share", endings_note(study, arm, reference), _tokens_of(reference))
    effect = _resampled(effect, bootstrap.overheads(study, arm, reference, target, at, sorted(found)))
    if arm != reference:
        effect = widened(effect, _noisy(study, {arm: effect.value, reference: 0.0}, reference, target, effect.seeds))
    effect = replace(effect, low=-1.0 if effect.low < -1 else effect.low)  # no run takes less than no tokens
    return _bounded(effect, [arm] if any(o.bound for o in found.values()) else [], [])


def _resampled(effect: Effect, samples: np.ndarray | None) -> Effect:
    """`effect` with the interval of a bootstrap over seeds and windows, where there is one and more than one seed."""
    if samples is None or len(effect.seeds) < 2:
        return effect
    low, high = bootstrap.interval(samples)
    never = "" if np.isfinite(samples).all() else "in some resamples the target is not reached"
    note = "; ".join(p for p in (effect.note, never) if p)
    return replace(effect, low=low, high=high, over=SEEDS_AND_WINDOWS, note=note)


def _noisy(
    study: Study, overheads: dict[str, float], reference: str, target: float, seeds: tuple[int, ...]
) -> np.ndarray | None:
    """Samples of the first arm's overhead over `reference` less the second's, by the scatter of crossings. Where the second
    is the reference itself, its crossing is what the first one's is a multiple of."""
    if len(seeds) < 2:
        return None
    noise = bootstrap.run_noise(bootstrap.crossing_table(study, target, seeds), list(overheads))
    if noise is None:
        return None
    (ours, theirs), (n, m) = (
        overheads.values(),
        np.clip(noise, -300, 300),
    )  # what the tails of few seeds have no float for
    if list(overheads)[1] == reference:
        return (1 + ours) / (1 + theirs) * np.exp(n - m) - 1
    return (1 + ours) * np.exp(n) - (1 + theirs) * np.exp(m)


def overhead_difference(study: Study, *, arm: str, against: str, reference: str = "fp8", at: float = AT) -> Effect:
    """Overhead of `arm` less that of `against`, each to the loss that the reference has at the share `at` of its budget,
    paired by seed: 0.1 is ten percent points more tokens."""
    target = target_loss(study, reference, at)
    a, b = _overheads(study, arm, reference, target), _overheads(study, against, reference, target)
    shared = {s for s in a.keys() & b.keys() if not (a[s].bound and b[s].bound)}
    if not shared:
        raise NoEffect(f"neither {arm} nor {against} reaches the target in its budget")
    note = endings_note(study, arm, against, reference)
    effect = estimate({s: a[s].value - b[s].value for s in shared}, "share", note, _tokens_of(reference))
    samples = [bootstrap.overheads(study, name, reference, target, at, sorted(shared)) for name in (arm, against)]
    if all(x is not None and np.isfinite(x).all() for x in samples):
        effect = _resampled(effect, samples[0] - samples[1])
    if arm != against:
        parts = {name: float(np.mean([x[s].value for s in shared])) for name, x in ((arm, a), (against, b))}
        effect = widened(effect, _noisy(study, parts, reference, target, effect.seeds))
    above = [arm] if any(a[s].bound for s in shared) else []
    below = [against] if any(b[s].bound for s in shared) else []
    return _bounded(effect, above, below)


def convergence(study: Study, *, arm: str, reference: str = "fp8", at: float = CONVERGED_AT) -> Effect:
    """Share of the seeds in which `arm` reaches, within its budget, the loss that the reference has at the share `at` of
    its own.

    As in P1, a run that diverges has not converged, even if it had reached that loss before. The note says how much worse
    than the reference a run may end and still pass: a rule that no plausible arm fails is no test.
    """
    target = target_loss(study, reference, at)
    found = _overheads(study, arm, reference, target)
    gone = study.cut_short(arm)
    reached = [0.0 if o.bound or seed in gone else 1.0 for seed, o in found.items()]
    note = f"given {1 / at:.2g} times the tokens of {reference}"
    finished = [loss for loss in final_losses(study, reference).values() if math.isfinite(loss)]
    if finished and not study.config.stop_at_target:
        note += f"; an arm that ends up to {target - np.mean(finished):.2f} nats above {reference} passes"
    note = "; ".join(p for p in (endings_note(study, arm, reference), note) if p)
    return Effect(
        float(np.mean(reached)), min(reached), max(reached), "seeds", tuple(found), "seeds, their range", note
    )


def loss_difference(study: Study, *, arm: str, against: str) -> Effect:
    """Last evaluation of `arm` less that of `against`, nats a token, paired by seed."""
    return combination(study, [(arm, 1), (against, -1)], "nats")


def perplexity_increase(study: Study, *, arm: str, against: str = "bf16") -> Effect:
    """Perplexity of `arm` over that of `against`, less 1, at the last evaluation."""
    effect = loss_difference(study, arm=arm, against=against)
    return replace(
        effect,
        value=_expm1(effect.value),
        low=_expm1(effect.low),
        high=_expm1(effect.high),
        unit="share",
        of=f"of {against}'s perplexity",
    )


def _expm1(x: float) -> float:
    """exp(x) - 1, infinite where no float holds it."""
    return math.expm1(x) if x < 700 or math.isnan(x) else math.inf


def interaction(study: Study, *, arms: list[str]) -> Effect:
    """(first - second) - (third - fourth) of the last evaluations, nats: how much more the first change
    costs."""
    if len(arms) != 4:
        raise UserError(f"interaction takes four arms, got {len(arms)}")
    return combination(study, list(zip(arms, (1, -1, -1, 1), strict=True)), "nats")


def remaining_gap(study: Study, *, arm: str, against: str, reference: str = "fp8") -> Effect:
    """Share of the loss gap of `against` to the reference that `arm` still has at the end: 0 closes it, 1
    leaves it."""
    found = last_losses(study, (arm, against, reference))
    a, b, r = (found[name] for name in (arm, against, reference))
    shared = sorted(a.keys() & b.keys() & r.keys())
    if not shared:
        raise NoEffect("no seed in which all arms have an answer")
    top = np.array([a[s] - r[s] for s in shared])
    bottom = np.array([b[s] - r[s] for s in shared])
    note = endings_note(study, arm, against)
    if not (np.isfinite(top).all() and np.isfinite(bottom).all()):
        raise NoEffect(note or "an arm has no finite loss at the end")
    if abs(bottom.mean()) < 1e-12:
        raise NoEffect(f"{against} ends where {reference} does: there is no gap to have a share of")
    value = float(top.mean() / bottom.mean())
    low = high = math.nan
    over = "seeds"
    if len(shared) > 1:  # a ratio of means: resample both, not their ratios, whose denominators may be near 0
        over = SEEDS_AND_WINDOWS
        gaps, noise = [None], None
        if not study.config.stop_at_target:
            gaps = [bootstrap.combined(study, {name: 1, reference: -1}, shared) for name in (arm, against)]
            noise = bootstrap.run_noise(bootstrap.final_table(study, shared), [arm, against, reference])
        if any(g is None for g in gaps):
            over, gaps = "seeds", [top[:, None], bottom[:, None]]
        samples = [[bootstrap.means(g) for g in gaps]]
        if noise is not None:
            samples.append([top.mean() + noise[0] - noise[2], bottom.mean() + noise[1] - noise[2]])
        if all(bootstrap.interval(under)[0] > 0 for _, under in samples):
            low, high = zip(*(bootstrap.interval(above / under) for above, under in samples), strict=True)
            low, high = min(low), max(high)
        else:
            low, high = -math.inf, math.inf
            note = "; ".join(p for p in (note, f"{against} is not behind {reference} beyond doubt") if p)
    return Effect(value, low, high, "part", tuple(shared), over, note, f"of {against}'s gap to {reference}")


def published_order(study: Study, *, reference: str = "fp8", at: float = AT) -> Effect:
    """Share of the pairs of Table 1 whose order of overhead, at the share `at` of the reference's budget, is the published
    one, mean over seeds; pairs that it ranks equal are out."""
    table = published.table1()
    target = target_loss(study, reference, at)
    found = {arm: _overheads(study, arm, reference, target) for arm in table["recipe"]}
    middle = dict(zip(table["recipe"], (table["low"] + table["high"]) / 2, strict=True))
    pairs = [(a, b) for a in middle for b in middle if middle[a] < middle[b]]
    values = {}
    for seed in set.intersection(*(set(f) for f in found.values())):
        ours = {arm: math.inf if f[seed].bound else f[seed].value for arm, f in found.items()}
        values[seed] = float(np.mean([ours[a] < ours[b] for a, b in pairs]))
    effect = estimate(values, "part", of=f"of the {len(pairs)} pairs that Table 1 orders")
    return replace(effect, low=max(effect.low, 0.0), high=min(effect.high, 1.0))


def end_to_end(study: Study, *, arm: str, reference: str = "fp8", at: float = AT) -> Effect:
    """P1's step speed-up over (1 + our overhead, read at the share `at` of the reference's budget): above 1 steps as fast
    as P1's would pay. Our own steps emulate FP4 and are in it nowhere."""
    o = overhead(study, arm=arm, reference=reference, at=at)
    speed = published.figure("step-speed")
    with np.errstate(divide="ignore"):  # an overhead that may be -100 %
        value, high, low = (float(token_efficiency.speedup(speed.low, x)) for x in (o.value, o.low, o.high))
    note = "; ".join(p for p in (o.note, f"step speed {speed.text} from {speed.source}") if p)
    return replace(o, value=value, low=low, high=high, unit="ratio", note=note, of="at P1's step speed")


def measured_end_to_end(study: Study, *, arm: str, reference: str = "fp8", at: float = AT) -> Effect:
    """Our own step speed (of records alone on their device) over (1 + our overhead), within a seed: above 1 the faster
    steps pay."""
    found = _overheads(study, arm, reference, target_loss(study, reference, at))
    ours, theirs = ({s: speed(r) for s, r in study.arms[n].items()} for n in (arm, reference))
    values = {s: v for s, o in found.items() if not math.isnan(v := ours[s] / theirs[s] / (1 + o.value))}
    if not values:
        raise NoEffect("no records that were alone on their device")
    effect = estimate(values, "ratio", endings_note(study, arm, reference))
    effect = _bounded(effect, [], [arm] if any(found[s].bound for s in values) else [])
    return replace(effect, low=max(effect.low, 0.0))


def throughput_ratio(study: Study, *, arm: str, against: str) -> Effect:
    """Training tokens a second of `arm` over those of `against`, of records that had their device to themselves."""
    a, b = ({s: speed(r) for s, r in study.arms[n].items()} for n in (arm, against))
    ratios = {s: a[s] / b[s] for s in a.keys() & b.keys() if not math.isnan(a[s] / b[s])}
    if not ratios:
        raise NoEffect("no records that were alone on their device")
    return estimate(ratios, "ratio")


def speed(record: Record) -> float:
    """Training tokens a second; NaN where other arms shared the device, or the run was too short to time."""
    alone = record.timings.get("arms_on_device") == 1
    return record.timings["tokens_per_second"] or math.nan if alone else math.nan


METRICS: dict[str, Callable[..., Effect]] = {
    f.__name__: f
    for f in (
        overhead,
        overhead_difference,
        convergence,
        loss_difference,
        training_loss_difference,
        perplexity_increase,
        interaction,
        remaining_gap,
        roughness,
        published_order,
        end_to_end,
        measured_end_to_end,
        throughput_ratio,
        probe,
        probe_difference,
        predicts_loss,
    )
}


def check_arguments(metric: str, arguments: dict) -> None:
    """UserError for an unknown metric, an unknown argument or a missing one, naming the known ones."""
    if metric not in METRICS:
        raise UserError(f"unknown metric {metric!r}; known: {', '.join(METRICS)}")
    known = dict(list(inspect.signature(METRICS[metric]).parameters.items())[1:])
    for name in arguments:
        if name not in known:
            raise UserError(f"metric {metric} has no argument {name!r}; known: {', '.join(known)}")
    missing = [n for n, p in known.items() if p.default is p.empty and n not in arguments]
    if missing:
        raise UserError(f"metric {metric} lacks {', '.join(missing)}")


def arms_of(metric: str, arguments: dict) -> tuple[str, ...]:
    """The arms whose records a metric needs."""
    parameters = inspect.signature(METRICS[metric]).parameters
    given = {n: arguments.get(n, p.default) for n, p in parameters.items() if n in ARM_ARGUMENTS}
    names: list[str] = list(published.table1()["recipe"]) if metric == "published_order" else []
    for value in given.values():
        names += [value] if isinstance(value, str) else value if isinstance(value, Iterable) else []
    return tuple(dict.fromkeys(names))


def attempt(metric: str, study: Study, **arguments) -> Effect | None:
    """The effect; None where an arm has no records or they cannot answer."""
    if not set(arms_of(metric, arguments)) <= study.arms.keys():
        return None
    try:
        return METRICS[metric](study, **arguments)
    except NoEffect:
        return None
