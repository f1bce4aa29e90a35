"""Losses on the source of known entropy, split into the irreducible part and an arm's own excess.

The source (`training.synthetic`) knows the law of each token given all before it. So for the very windows that models
are evaluated on, the loss of a model that knew the law is computed exactly: the mean of -ln p over their tokens. What
an arm's loss has above it is its own. All arms are evaluated on the same windows: the excess is paired by window too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pandas as pd

from mxfp4.analysis import bootstrap
from mxfp4.analysis.claims import effect_text
from mxfp4.analysis.effect import SEEDS_AND_WINDOWS, Effect, endings_note, estimate, final_losses, widened  # fmt: skip
from mxfp4.analysis.study import Study
from mxfp4.data.synthetic import SyntheticCorpus
from mxfp4.errors import UserError
from mxfp4.pages import frames


@lru_cache(maxsize=4)
def _exact(vocab_size: int, windows: int, seq_len: int) -> tuple[str, np.ndarray, float]:
    source = SyntheticCorpus(vocab_size=vocab_size)
    tokens = source.eval_windows(windows, seq_len)
    log_prob = source.log_prob(tokens).mean(dim=1).numpy()
    return source.fingerprint, -log_prob, float(source.entropy(tokens).mean())


def irreducible(study: Study) -> np.ndarray:
    """[window] the loss of a model that knows the law, nats a token. UserError when the runs saw another source."""
    config = study.config
    if config.corpus != "synthetic":
        raise UserError(f"corpus {config.corpus!r} has no known entropy; synthetic has")
    fingerprint, losses, _ = _exact(config.model.vocab_size, config.eval_sequences, config.seq_len)
    seen = {r.data["corpus"] for r in study.records}
    if seen != {fingerprint}:
        raise UserError(f"runs on source {', '.join(sorted(seen - {fingerprint}))} cannot be judged by {fingerprint}")
    return losses


def entropy(study: Study) -> float:
    """Mean entropy of the evaluated tokens given all before them, nats: what `irreducible` scatters around."""
    return _exact(study.config.model.vocab_size, study.config.eval_sequences, study.config.seq_len)[2]


def excess(study: Study, *, arm: str) -> Effect:
    """Final loss of `arm` above the irreducible one, nats a token."""
    floor = irreducible(study)
    values = {s: loss - float(floor.mean()) for s, loss in final_losses(study, arm).items()}
    effect = estimate(values, "nats", endings_note(study, arm))
    matrix = bootstrap.panel(study, arm, effect.seeds)
    if matrix is None or matrix.shape[1] != len(floor) or len(effect.seeds) < 2:
        return effect
    return replace(widened(effect, bootstrap.means(matrix - floor)), over=SEEDS_AND_WINDOWS)


def excess_ratio(study: Study, *, arm: str, reference: str = "bf16") -> Effect:
    """Excess of `arm` over the irreducible loss, as a multiple of the reference's excess."""
    floor = irreducible(study)
    ours, theirs = final_losses(study, arm), final_losses(study, reference)
    shared = sorted(ours.keys() & theirs.keys())
    ratios = {s: (ours[s] - floor.mean()) / (theirs[s] - floor.mean()) for s in shared}
    effect = estimate(ratios, "ratio", endings_note(study, arm, reference))
    panels = [bootstrap.panel(study, name, shared) for name in (arm, reference)]
    if any(p is None or p.shape[1] != len(floor) for p in panels) or len(shared) < 2:
        return effect
    samples = [[bootstrap.means(p - floor) for p in panels]]
    table = bootstrap.final_table(study, shared)
    noise = bootstrap.run_noise(table, [arm, reference])
    if noise is not None and arm != reference:
        noise = noise + bootstrap.seed_noise(table)
        means = [np.mean([x[s] for s in shared]) - floor.mean() for x in (ours, theirs)]
        samples.append([m + n for m, n in zip(means, noise, strict=True)])
    if any(bootstrap.interval(under)[0] <= 0 for _, under in samples):
        note = "; ".join(p for p in (effect.note, f"{reference} is not above the law's loss beyond doubt") if p)
        return replace(effect, low=-np.inf, high=np.inf, over=SEEDS_AND_WINDOWS, note=note)
    low, high = zip(*(bootstrap.interval(above / under) for above, under in samples), strict=True)
    return replace(effect, low=min(low), high=max(high), over=SEEDS_AND_WINDOWS)


def excess_frame(study: Study, arms: Sequence[str], *, reference: str = "bf16") -> pd.DataFrame:
    """arm, loss, excess with its interval (numbers and text), ratio to the reference's, outcome; arms with records."""
    rows = []
    for arm in (a for a in arms if a in study.arms):
        e = excess(study, arm=arm)
        ratio = excess_ratio(study, arm=arm, reference=reference) if reference in study.arms else None
        rows.append(
            {
                "arm": arm, "loss": float(np.mean(list(final_losses(study, arm).values()))), "difference": e.value,
                "low": e.low if np.isfinite(e.low) else e.value, "high": e.high if np.isfinite(e.high) else e.value,
                "text": effect_text(e, unit=False), "ratio": effect_text(ratio) if ratio else "–",
                "seeds": len(e.seeds), "outcome": frames.outcome_text(study, arm),
            }
        )  # fmt: skip
    return pd.DataFrame(rows)


def excess_curves(study: Study, arms: Sequence[str], *, after: float = 0.0) -> pd.DataFrame:
    """arm, tokens, excess (mean over seeds), low, high (range over seeds), from the share `after` of the budget."""
    floor = float(irreducible(study).mean())
    frame = frames.mean_curves(study, arms, after=after)
    for column in ("loss", "low", "high"):
        frame[column] -= floor
    return frame.rename(columns={"loss": "excess"})


def in_words(study: Study, arms: Sequence[str], *, reference: str = "bf16") -> str:
    """A sentence: what the law leaves, what the reference has above it, and which arm adds most and least."""
    floor = float(irreducible(study).mean())
    own = excess(study, arm=reference).value
    text = f"Of {reference}'s loss {floor:.3f} nats are the source's own, {own:.3f} the model's."
    added = {a: excess(study, arm=a).value - own for a in arms if a in study.arms and a != reference}
    finite = {a: v for a, v in added.items() if np.isfinite(v)}
    if not finite:
        return text
    worst, best = max(finite, key=finite.get), min(finite, key=finite.get)
    return (
        f"{text} {worst} adds most to that ({finite[worst]:+.4f} nats, {finite[worst] / own:+.1%} of it), {best} least "
        f"({finite[best]:+.4f} nats, {finite[best] / own:+.1%})."
    )
