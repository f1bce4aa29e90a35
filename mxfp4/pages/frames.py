"""Frames for the charts and tables of the evidence chapters, from a study's records.

Bands and intervals say what they are over: a band is the range over seeds, an interval that of the metric (`metrics`).
An arm without records gets no row, one that diverged ends where it diverged.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import pandas as pd

from mxfp4.analysis import bootstrap, metrics, published, training_loss
from mxfp4.analysis.claims import effect_text
from mxfp4.analysis.effect import Effect
from mxfp4.analysis.study import Study
from mxfp4.errors import UserError
from mxfp4.studies.plans import ROUNDINGS as SUFFIXES
from mxfp4.studies.plans import rule_arm

ROUNDINGS = dict(zip(SUFFIXES, ("nearest", "stochastic on gradients", "stochastic everywhere"), strict=True))
"""{what it adds to a recipe's name: which rounding}."""
_SHORT = {
    "mxfp4-fprop": "Fprop",
    "mxfp4-fprop-dgrad": "+ Dgrad",
    "mxfp4": "+ Wgrad: all three",
    "mxfp4+sr": "all, SR",
    "mxfp4+rht16": "all, random H16",
    "mxfp4+h16": "all, H16",
}
RULES = ("floor", "even", "ceil", "rceil")
TRAINING = ("training, nats over BF16", "evaluation less training")
"""Headings of `training_columns`."""
LOSSES = ("arm", "nats over BF16", *TRAINING, "outcome")
"""The columns of `arms_frame` without overheads."""
TRAINING_NOTE = (
    f"Training loss is the mean over the last {training_loss.LAST:.0%} of the steps, less BF16's on the same batches. Evaluation "
    "less training loss is what an arm gains from text that it has seen before."
)
"""For the caption of a table with the columns TRAINING."""


def evaluations(study: Study, arms: Iterable[str]) -> pd.DataFrame:
    """arm, seed, tokens, eval_loss of every evaluation after the first step. UserError when no arm has
    records."""
    frames = []
    for arm in arms:
        for seed, curve in study.curves(arm).items():
            points = curve.dropna(subset="eval_loss")[["tokens", "eval_loss"]]
            frames.append(points[points["tokens"] > 0].assign(arm=arm, seed=seed))
    if not frames:
        raise UserError(f"none of the arms has records: {', '.join(arms)}")
    return pd.concat(frames, ignore_index=True)


def span(study: Study) -> float:
    """Tokens of the budget; where runs stop at a target, those of the finished run that stopped first."""
    if not study.config.stop_at_target:
        return study.tokens
    ends = [
        c["tokens"].max() for arm in study.arms for s, c in study.curves(arm).items() if s not in study.cut_short(arm)
    ]
    return min(ends, default=study.tokens)


def mean_curves(study: Study, arms: Sequence[str], *, after: float = 0.0) -> pd.DataFrame:
    """arm, tokens, loss (mean over seeds), low, high (range over seeds), seeds; from the share `after` of the
    `span`.

    Points that some seed of the arm lacks, after it diverged, are left out: their mean would jump.
    """
    frame = evaluations(study, arms)
    frame = frame[frame["tokens"] >= after * span(study)]
    return _spread(frame, "eval_loss").rename(columns={"mean": "loss"})


def difference_curves(study: Study, arms: Sequence[str], reference: str, *, after: float = 0.0) -> pd.DataFrame:
    """arm, tokens, difference (to the reference's loss at equal tokens and seed, mean), low, high (range),
    seeds."""
    frame = evaluations(study, dict.fromkeys((*arms, reference)))
    base = frame[frame["arm"] == reference][["seed", "tokens", "eval_loss"]].rename(columns={"eval_loss": "base"})
    frame = frame.merge(base, on=["seed", "tokens"])
    frame = frame[(frame["arm"] != reference) & (frame["tokens"] >= after * span(study))]
    frame = frame.assign(difference=frame["eval_loss"] - frame["base"])
    return _spread(frame, "difference").rename(columns={"mean": "difference"})


def _spread(frame: pd.DataFrame, column: str) -> pd.DataFrame:
    order = list(dict.fromkeys(frame["arm"]))
    grouped = frame.groupby(["arm", "tokens"])[column].agg(["mean", "min", "max", "count"]).reset_index()
    grouped = grouped[grouped["count"] == grouped.groupby("arm")["count"].transform("max")]
    grouped = grouped.rename(columns={"min": "low", "max": "high", "count": "seeds"})
    return grouped.sort_values("arm", key=lambda c: c.map(order.index), kind="stable").reset_index(drop=True)


def outcome_text(study: Study, arm: str) -> str:
    """ "3 finished", or how many stalled (`mxfp4.analysis.stalled`), and how many diverged and when."""
    records = study.arms.get(arm, {})
    gone, stuck = study.diverged(arm), study.stalled(arm)
    finished = len(records) - len(gone) - len(stuck)
    steps = ", ".join(str(records[s].outcome["step"]) for s in gone)
    parts = [f"{finished} finished"] if finished else []
    parts += [f"{len(stuck)} stalled (seed {', '.join(map(str, stuck))})"] if stuck else []
    parts += [f"{len(gone)} diverged (step {steps})"] if gone else []
    return ", ".join(parts) or "not run"


def _overhead_text(effect: Effect | None) -> str:
    if effect is None:
        return "–"
    if metrics.is_bound(effect):
        if math.isnan(effect.low):
            return f"more than {100 * effect.value:.0f}"
        return f"more than {effect_text(effect, unit=False)}"
    return effect_text(effect, unit=False)


def columns(study: Study, ats: Sequence[float]) -> dict[str, float]:
    """{heading of an overhead's column: share of the reference's budget at which its target loss is read}: one for each
    of `ats`, or the one target at which the study's runs stop."""
    if study.config.stop_at_target:
        return {f"at {study.config.target_loss:g} nats": metrics.AT}
    return {f"at {100 * at:.3g} %": at for at in ats}


def read_at(study: Study, ats: Sequence[float], reference: str = "FP8") -> str:
    """At which loss overheads are read, as it follows "read"; `ats` as in `columns`."""
    if study.config.stop_at_target:
        return f"at {study.config.target_loss:g} nats a token, where a run stops"
    where = f"{ats[0]:.0%} of its budget" if len(ats) == 1 else "the share of its budget that heads the column"
    return f"at the loss that {reference} has at {where}"


def bound_text(study: Study, at: float) -> str:
    """How far the overhead of an arm that misses its target can be known, as a sentence."""
    if study.config.stop_at_target:
        return "An arm that misses the target is known to need more than its budget."
    return (
        f"A later target leaves less room to an arm that misses it: at {at:.0%} no bound can exceed {1 / at - 1:.0%}."
    )


def table1_frame(study: Study, *, ats: Sequence[float] = (0.5, 0.7, 0.85)) -> pd.DataFrame:
    """P1's Table 1 beside ours, a row an arm: P1's text, our overheads at several targets, loss difference,
    outcome."""
    rows = []
    for row in published.table1().itertuples():
        read = columns(study, ats).items()
        ours = {name: _overhead_text(metrics.attempt("overhead", study, arm=row.recipe, at=at)) for name, at in read}
        ends = _ends(study, row.recipe, {"FP8": "fp8"})
        rows.append({"scope": row.scope, "stabiliser": row.stabiliser, "P1": row.text, **ours, **ends})
    return pd.DataFrame(rows)


def arms_frame(study: Study, arms: Sequence[str], *, ats: Sequence[float] = (0.5, 0.7, 0.85)) -> pd.DataFrame:
    """The columns of our side of `table1_frame` for any arms that have records."""
    rows = []
    for arm in arms:
        if arm in study.arms:
            read = columns(study, ats).items()
            ours = {name: _overhead_text(metrics.attempt("overhead", study, arm=arm, at=at)) for name, at in read}
            rows.append({"arm": arm, **ours, **_ends(study, arm, {"FP8": "fp8", "BF16": "bf16"})})
    return pd.DataFrame(rows)


def _ends(study: Study, arm: str, references: dict[str, str]) -> dict:
    found = {}
    for name, against in references.items():
        effect = metrics.attempt("loss_difference", study, arm=arm, against=against)
        found[f"nats over {name}"] = effect_text(effect, unit=False) if effect else "–"
    return {**found, **training_columns(study, arm), "outcome": outcome_text(study, arm)}


def training_columns(study: Study, arm: str) -> dict[str, str]:
    """{heading of TRAINING: text}: the training loss of `arm` over BF16's with its interval, and how far the evaluation loss
    lies above the training loss, nats a token."""
    effect = metrics.attempt("training_loss_difference", study, arm=arm)
    gap = training_loss.evaluation_gap(study, arm)
    texts = (effect_text(effect, unit=False) if effect else "–", "–" if math.isnan(gap) else f"{gap:+.3f}")
    return dict(zip(TRAINING, texts, strict=True))


def with_training(frame: pd.DataFrame, study: Study) -> pd.DataFrame:
    """`frame`, which has a column `arm`, with those of `training_columns` after its own."""
    return frame.assign(**{name: [training_columns(study, arm)[name] for arm in frame["arm"]] for name in TRAINING})


def scatter(study: Study, *, reference: str = "fp8") -> tuple[bootstrap.Scatter, int, int] | None:
    """(scatter, arms, seeds) of final losses, over the seeds of the reference and the arms that finished all of them; None
    with fewer than 2 seeds and 3 arms."""
    seeds = sorted(study.arms.get(reference, {}))
    if len(seeds) < 2:
        return None
    table = bootstrap.final_table(study, seeds)
    return (bootstrap.scatter(table), *table.shape) if len(table) > 2 else None


def scatter_text(study: Study, *, reference: str = "fp8") -> str:
    """A few sentences: `scatter`, the standard error of a difference of two arms that follows from it, and who stands
    apart."""
    found = scatter(study, reference=reference)
    if found is None:
        return "There are too few arms and seeds here to say how much one run differs from its repetition."
    noise, arms, seeds = found
    text = (
        f"Over {arms - len(noise.apart)} arms and {seeds} seeds the final losses scatter by {noise.sd:.4f} nats around what arm "
        f"and seed explain: batches and initial weights are shared, and yet a small change of arithmetic sends a run on another "
        f"way. A difference of two arms over {seeds} seeds has a standard error of about {noise.sd * math.sqrt(2 / seeds):.4f} "
        f"nats; to halve it takes {4 * seeds} seeds."
    )
    if noise.apart:
        each = ", ".join(f"`{arm}` ({sd:.4f})" for arm, sd in sorted(noise.apart.items()))
        text += f" Not counted among them, as they scatter far more than the others (Cochran's test at 1 %): {each}."
    arm, share = noise.most
    if share > 0.7:
        text += (
            f" {share:.0%} of that variance is of `{arm}`. So few arms and seeds cannot tell whether it scatters more than the others "
            "(Cochran's test at 1 %), so it stays among them and makes the intervals of all wider."
        )
    return text


def turning_text(study: Study) -> str:
    """Whether runs end above an evaluation before. Text seen several times is learned by heart by every arm of a seed, so
    where few runs do, it is these arms' own training."""
    rises = {}
    for arm, seeds in study.arms.items():
        for record in seeds.values():
            losses = record.curve["eval_loss"].dropna()
            if record.outcome["status"] == "finished" and len(losses) > 1:
                rises.setdefault(arm, []).append(losses.iloc[-1] - losses.min())
    above = {arm: r for arm, rs in rises.items() if (r := [x for x in rs if x > 0])}
    if not above:
        return "No run ends above an evaluation before its last."
    runs, risen = sum(map(len, rises.values())), [x for rs in above.values() for x in rs]
    text = (
        f"{len(risen)} of {runs} runs end above their lowest evaluation, by {sum(risen) / len(risen):.4f} nats on average and "
        f"{max(risen):.4f} at most"
    )
    if 2 * len(risen) < runs:
        each = ", ".join(f"`{arm}`" for arm in sorted(above))
        return (
            f"{text}: of {each}. That text which is seen several times is being learned by heart would show in all arms, as they "
            "see the same; so it is rather how these arms train."
        )
    return (
        f"{text}. They have begun to learn by heart a text that they see several times; all arms of a seed see it alike, but "
        "differences of that size say little about an arm."
    )


def overhead_points(study: Study, *, at: float = metrics.AT) -> pd.DataFrame:
    """For the chart of Table 1: label, whose ("P1", "ours"), value, low, high (percent), reached (False: a
    bound)."""
    rows = []
    for row in published.table1().itertuples():
        label = _SHORT[row.recipe]
        finite = math.isfinite(row.low)
        low, high = (100 * row.low, 100 * row.high) if finite else (math.nan, math.nan)
        rows.append(
            {
                "label": label,
                "whose": "P1",
                "value": (low + high) / 2,
                "low": low,
                "high": high,
                "reached": finite,
            }
        )
        effect = metrics.attempt("overhead", study, arm=row.recipe, at=at)
        if effect is not None:
            reached = not metrics.is_bound(effect)
            low, high = percent_ends(effect, at)
            rows.append(
                {
                    "label": label,
                    "whose": "ours",
                    "value": 100 * effect.value,
                    "low": low,
                    "high": high,
                    "reached": reached,
                }
            )
    return pd.DataFrame(rows)


def disagreement_frame(study: Study, *, rules: Sequence[str] = RULES, reference: str = "bf16") -> pd.DataFrame:
    """rule, rounding, arm, difference (final loss to the reference, nats), low, high, seeds, outcome; arms
    with records."""
    rows = []
    for rule in rules:
        for suffix, rounding in ROUNDINGS.items():
            arm = rule_arm(rule, suffix)
            effect = metrics.attempt("loss_difference", study, arm=arm, against=reference)
            if effect is not None:
                whose = {"rule": rule, "rounding": rounding, "arm": arm}
                rows.append({**whose, **_span(effect), "outcome": outcome_text(study, arm)})
    columns = ["rule", "rounding", "arm", "difference", "low", "high", "seeds", "outcome", "text"]
    return pd.DataFrame(rows, columns=columns)


def gap_frame(study: Study, arms: Sequence[str], *, reference: str = "bf16") -> pd.DataFrame:
    """arm, difference (final loss to the reference, nats), low, high, seeds, outcome, text; arms with records."""
    rows = []
    for arm in arms:
        effect = metrics.attempt("loss_difference", study, arm=arm, against=reference) if arm != reference else None
        if effect is not None:
            rows.append({"arm": arm, **_span(effect), "outcome": outcome_text(study, arm)})
    return pd.DataFrame(rows, columns=["arm", *_SPAN, "outcome"])


_SPAN = ("difference", "low", "high", "seeds", "text")


def _span(effect: Effect) -> dict:
    """Value and interval for a chart: an interval that is not known, or open, has the value's length 0."""
    known = math.isfinite(effect.low) and math.isfinite(effect.high)
    low, high = (effect.low, effect.high) if known else (effect.value, effect.value)
    return dict(zip(_SPAN, (effect.value, low, high, len(effect.seeds), effect_text(effect)), strict=True))


def percent_ends(effect: Effect, at: float) -> tuple[float, float]:
    """Ends of an overhead's interval for a chart, percent: an open one ends where the budget does, an unknown one is 0
    long."""
    if math.isnan(effect.low):
        return 100 * effect.value, 100 * effect.value
    return 100 * effect.low, 100 * (effect.high if math.isfinite(effect.high) else max(1 / at - 1, effect.value))


def target_frame(study: Study, arms: Sequence[str], *, reference: str = "fp8", ats: Sequence[float]) -> pd.DataFrame:
    """arm, at (percent of the reference's budget), overhead, low, high (percent): where the target is reached.

    An arm that diverged or stalled in some seed has not converged, whatever it had reached before, and gets no row.
    """
    rows = []
    for arm in (a for a in arms if a != reference and not study.cut_short(a)):
        for at in ats:
            e = metrics.attempt("overhead", study, arm=arm, reference=reference, at=at)
            if e is not None and not metrics.is_bound(e):
                low, high = percent_ends(e, at)
                rows.append({"arm": arm, "at": 100 * at, "overhead": 100 * e.value, "low": low, "high": high})
    return pd.DataFrame(rows, columns=["arm", "at", "overhead", "low", "high"])


def sr_by_shape_frame(study: Study) -> pd.DataFrame:
    """shape, with, without (arms), cost, training: what SR on the gradients adds to the final evaluation loss and to the last
    training loss, paired; of pairs with records."""
    pairs = {
        "1x32, even": ("mxfp4+sr-grad", "mxfp4"), "1x32, rceil": ("mxfp4+rceil+sr-grad", "mxfp4+rceil"),
        "32x32, rceil (P2's recipe)": ("ti2d", "ti2d-no-sr"),
    }  # fmt: skip
    rows = []
    for shape, (arm, against) in pairs.items():
        effect = metrics.attempt("loss_difference", study, arm=arm, against=against)
        if effect is not None:
            cost, training = effect_text(effect, unit=False), training_cost(study, arm, against)
            rows.append({"shape": shape, "with": arm, "without": against, "cost": cost, "training": training})
    return pd.DataFrame(rows, columns=["shape", "with", "without", "cost", "training"])


def training_cost(study: Study, arm: str, against: str) -> str:
    """Last training loss of `arm` less that of `against` as text, with its interval, nats a token."""
    effect = metrics.attempt("training_loss_difference", study, arm=arm, against=against)
    return effect_text(effect, unit=False) if effect else "–"
