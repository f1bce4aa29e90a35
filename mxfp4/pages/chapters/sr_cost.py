"""What stochastic rounding adds to the final loss of full 1D MXFP4, by scale rule and by where it is applied.

If a rule that clips is what turns SR into damage, SR costs under `floor` and `even` and not under `ceil` and `rceil`.
Differences are paired by seed, in nats a token.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from mxfp4.analysis import metrics
from mxfp4.analysis.claims import effect_text
from mxfp4.analysis.effect import Effect
from mxfp4.analysis.study import Study
from mxfp4.pages.frames import ROUNDINGS, RULES, training_cost
from mxfp4.studies.plans import rule_arm

CLIPPING = ("floor", "even")
"""The rules under which a block's maximum may exceed the largest code."""


def sr_cost_frame(study: Study, *, rules: Sequence[str] = RULES) -> pd.DataFrame:
    """rule, where SR is applied, what it costs: final evaluation loss (cost) and last training loss (training) with SR less
    those without, paired; text with interval."""
    rows = []
    for rule in rules:
        for suffix in ("+sr-grad", "+sr"):
            effect = _cost(study, rule, suffix, "")
            if effect is not None:
                arms = {"arm": rule_arm(rule, suffix), "against": rule_arm(rule, "")}
                costs = {"cost": effect_text(effect, unit=False), "training": training_cost(study, **arms)}
                rows.append({"rule": rule, "where": ROUNDINGS[suffix], **costs, **arms})
    return pd.DataFrame(rows, columns=["rule", "where", "cost", "training", "arm", "against"])


def sr_cost_text(study: Study, *, rules: Sequence[str] = RULES) -> str:
    """A few sentences: under which rules SR costs, on every operand and on gradients alone, and what that says of the
    rule. Empty without intervals to tell from."""
    everywhere, gradients, between = (
        {r: e for r in rules if (e := _cost(study, r, *pair)) is not None and e.low <= e.high}
        for pair in (("+sr", ""), ("+sr-grad", ""), ("+sr", "+sr-grad"))
    )
    if not everywhere or not gradients:
        return ""
    text = (
        f"Against rounding to nearest, SR on every operand {_signs(everywhere)}; SR on the gradients alone {_signs(gradients)}. Against SR on the "
        f"gradients alone, SR on every operand {_signs(between)}."
    )
    costs = [r for r, e in everywhere.items() if e.low > 0]
    if free := [r for r in costs if r not in CLIPPING]:
        text += f" So a rule that clips is not all there is to it: SR on every operand costs under {_and(free)} too, where nothing is clipped."
    elif costs:
        text += " So far that is what a rule that clips would do."
    if sum(e.low > 0 for e in between.values()) * 2 > len(between) and not any(e.low > 0 for e in gradients.values()):
        text += " What divides these runs more plainly than the rule is what SR is applied to."
    return text


def _cost(study: Study, rule: str, suffix: str, against: str) -> Effect | None:
    return metrics.attempt("loss_difference", study, arm=rule_arm(rule, suffix), against=rule_arm(rule, against))


def _signs(effects: dict[str, Effect]) -> str:
    """Under which rules the whole interval lies above zero, and under which below."""
    parts = []
    for word, found in (
        ("higher", [r for r, e in effects.items() if e.low > 0]),
        ("lower", [r for r, e in effects.items() if e.high < 0]),
    ):
        if found:
            parts.append(f"ends {word} under {_and(found)}")
    left = len(effects) - sum(e.low > 0 or e.high < 0 for e in effects.values())
    if left:
        parts.append(f"is not told from none under {'the others' if parts else 'any rule'}")
    return " and ".join(parts)


def _and(names: Sequence[str]) -> str:
    return ", ".join(f"`{n}`" for n in names[:-1]) + " and " * (len(names) > 1) + f"`{names[-1]}`"
