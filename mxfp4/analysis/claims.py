"""Claims: the ledger book/claims.yml, and verdicts computed from records.

A verdict is one of VERDICTS. It needs records of every arm of the claim, the scale that the claim asks for,
and an interval that lies on one side of the claim's rule; the effect is given wherever there is one, whatever
the verdict. A claim whose rule was chosen after records were seen (`posthoc`) never "holds": the same records
cannot suggest a rule and test it, so its verdict says what these records suggest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path

import yaml

from mxfp4.analysis import published
from mxfp4.analysis.effect import Effect, NoEffect, NoProbe
from mxfp4.analysis.metrics import METRICS, arms_of, check_arguments
from mxfp4.analysis.study import Study, studies
from mxfp4.directories import project_dir
from mxfp4.errors import UserError
from mxfp4.text import count

VERDICTS = {
    "holds": "the interval lies where the claim says",
    "does not hold": "the interval lies wholly elsewhere",
    "suggested by these records": "the interval lies where the claim says, by a rule chosen after records were seen",
    "contradicted by these records": "the interval lies wholly elsewhere, by a rule chosen after records were seen",
    "undecided": "tested at a sufficient scale, and the interval allows both answers",
    "not tested at this scale": "the records are smaller, fewer or of other hardware than the claim needs",
    "no records": "an arm of the claim has not been run, or not been probed",
}
POSTHOC = {"holds": "suggested by these records", "does not hold": "contradicted by these records"}
"""The verdicts of a claim with `posthoc` in place of those that `decide` gives."""
DECISIVE = ("holds", "does not hold", *POSTHOC.values(), "undecided")
"""Verdicts on records that meet what the claim needs."""
PAPERS = ("P1", "press", "P2", "both", "others")
RULES = ("above", "below", "at_least", "at_most", "between", "within_factor")
RULE_AFTER_RECORDS = "The rule was chosen after records were seen: new records have to confirm it."
NEEDS = ("parameters", "tokens", "seeds", "not_seeds", "path", "source", "model")


@dataclass(frozen=True)
class Claim:
    """One entry of the ledger."""

    id: str
    """Short name, unique."""
    paper: str
    """Whose claim it is: P1, press, P2, both, others."""
    claim: str
    """The claim in our words."""
    figure: str
    """Name of the published figure."""
    metric: str
    """Name of the metric that tests it."""
    arguments: dict
    """Arguments of the metric."""
    holds: dict
    """One rule: {above: 0}."""
    needs: dict
    """Least parameters (non-embedding), tokens an arm, seeds; not_seeds, which suggested the claim and so do not count;
    path; source (text or synthetic: text if unsaid) and model (dense or experts: dense if unsaid) of the studies that
    may decide."""
    scale_note: str
    """What scale could still change."""
    chapter: str
    """The chapter that shows it."""
    logs: str = ""
    """Name of the figure from public logs, if there is one."""
    posthoc: bool = False
    """Whether the rule was chosen after records were seen."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of the verdict must know besides the effect's own note."""
        said = (published.reconstruction_note(self.arms), RULE_AFTER_RECORDS if self.posthoc else "")
        return tuple(filter(None, said))

    @property
    def arms(self) -> tuple[str, ...]:
        return arms_of(self.metric, self.arguments)

    @property
    def published(self) -> published.Figure:
        return published.figure(self.figure)


@dataclass(frozen=True)
class Verdict:
    """What the records say about one claim."""

    claim: Claim
    verdict: str
    """A key of VERDICTS."""
    reason: str
    """Why, in one line."""
    effect: Effect | None = None
    study: Study | None = None

    def to_dict(self) -> dict:
        """Plain JSON data; numbers that are not finite are null."""
        c, f = self.claim, self.claim.published
        e, s = self.effect, self.study
        return {
            "id": c.id, "paper": c.paper, "claim": c.claim,
            "published": {"text": f.text, "source": f.source, "mark": f.mark},
            "verdict": self.verdict, "reason": self.reason,
            "metric": c.metric, "arguments": c.arguments, "rule": rule_text(c, e),
            "effect": None if e is None else {
                "value": _finite(e.value), "low": _finite(e.low), "high": _finite(e.high), "unit": e.unit,
                "of": e.of, "over": e.over, "note": e.note, "seeds": list(e.seeds),
            },
            "study": None if s is None else {
                "scale": s.scale, "parameters": s.parameters, "tokens": s.tokens, "corpus": s.config.corpus,
                "path": s.path, "records": s.names(*c.arms),
            },
            "posthoc": c.posthoc, "notes": list(c.notes), "scale_note": c.scale_note, "chapter": c.chapter,
        }  # fmt: skip


def ledger_path() -> Path:
    return project_dir() / "book" / "claims.yml"


def load_ledger(path: Path | str | None = None) -> list[Claim]:
    """The claims of a ledger file, checked. UserError names what is wrong and what is allowed."""
    path = Path(path) if path is not None else ledger_path()
    try:
        data = yaml.safe_load(path.read_text())
    except OSError as error:
        raise UserError(f"cannot read the ledger {path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark else ""
        raise UserError(f"the ledger {path} is not YAML{where}") from None
    if not isinstance(data, dict) or not isinstance(data.get("claims"), list):
        raise UserError(f"the ledger {path} has no list `claims`")
    found: dict[str, Claim] = {}
    for entry in data["claims"]:
        claim = _claim(entry, data.get("needs") or {})
        if claim.id in found:
            raise UserError(f"claim {claim.id!r} is in the ledger twice; ids are unique")
        found[claim.id] = claim
    return list(found.values())


def _claim(entry: dict, needs: dict) -> Claim:
    name = entry.get("id", "without an id") if isinstance(entry, dict) else entry
    if not isinstance(entry, dict):
        raise UserError(f"claim {name!r} is not a set of fields")
    known = [f.name for f in fields(Claim)]
    for key in entry:
        if key not in known:
            raise UserError(f"claim {name!r}: unknown field {key!r}; known: {', '.join(known)}")
    entry = {"arguments": {}, **entry}
    required = [f.name for f in fields(Claim) if f.default is MISSING]
    for key in required:
        if key not in entry:
            raise UserError(f"claim {name!r} lacks {key}; it needs: {', '.join(required)}")
    if not isinstance(entry.get("posthoc", False), bool):
        raise UserError(f"claim {name!r}: posthoc={entry['posthoc']!r} is not true or false")
    preset = entry["needs"]
    if isinstance(preset, str):
        if preset not in needs:
            raise UserError(f"claim {name!r}: needs {preset!r} is not known; known: {', '.join(needs)}")
        preset = needs[preset]
    for key in preset:
        if key not in NEEDS:
            raise UserError(f"claim {name!r}: unknown need {key!r}; known: {', '.join(NEEDS)}")
    if entry["paper"] not in PAPERS:
        raise UserError(f"claim {name!r}: paper {entry['paper']!r} is not known; known: {', '.join(PAPERS)}")
    claim = Claim(**{**entry, "needs": preset})
    try:
        check_arguments(claim.metric, claim.arguments)
        for figure in filter(None, (claim.figure, claim.logs)):
            published.figure(figure)
        _check_rule(claim)
    except UserError as error:
        raise UserError(f"claim {name!r}: {error}") from None
    return claim


def _check_rule(claim: Claim) -> None:
    if not isinstance(claim.holds, dict) or len(claim.holds) != 1 or next(iter(claim.holds)) not in RULES:
        raise UserError(f"holds={claim.holds!r} is not one rule; known: {', '.join(RULES)}")
    (rule, bound), f = next(iter(claim.holds.items())), claim.published
    if rule == "within_factor" and not (bound > 1 and 0 < f.low <= f.high < math.inf):
        raise UserError(f"rule within_factor={bound} needs a factor above 1 and a positive published figure")


def _region(claim: Claim) -> tuple[float, float, bool]:
    """(low, high, whether the ends belong to it) of where the effect must lie."""
    (rule, bound), f = next(iter(claim.holds.items())), claim.published
    return {
        "above": lambda: (bound, math.inf, False),
        "below": lambda: (-math.inf, bound, False),
        "at_least": lambda: (bound, math.inf, True),
        "at_most": lambda: (-math.inf, bound, True),
        "between": lambda: (*bound, True),
        "within_factor": lambda: (f.low / bound, f.high * bound, True),
    }[rule]()


def rule_text(claim: Claim, effect: Effect | None = None) -> str:
    """The rule in words, its bounds in the unit of `effect`."""
    (rule, bound), (low, high, _) = next(iter(claim.holds.items())), _region(claim)
    factor, unit = _PRINT[effect.unit][::2] if effect is not None and effect.unit in _PRINT else (1, "")
    of = f" {effect.of}" if effect is not None and effect.of else ""
    low, high = (f"{factor * end:.3g}{unit}" for end in (low, high))
    if rule == "within_factor":
        return f"between {low} and {high}{of}: the published range, and a factor of {bound} around it"
    if rule == "between":
        return f"between {low} and {high}{of}"
    if effect is not None and effect.unit == "seeds":
        return f"{rule.replace('_', ' ')} {bound * len(effect.seeds):g} seeds"
    return f"{rule.replace('_', ' ')} {low if rule in ('above', 'at_least') else high}{of}"


def decide(claim: Claim, effect: Effect) -> str:
    """ "holds", "does not hold" or "undecided", by where the interval lies."""
    low, high, closed = _region(claim)
    a, b = effect.low, effect.high
    if math.isnan(a) or math.isnan(b):
        return "undecided"
    if closed:
        inside, outside = low <= a and b <= high, b < low or a > high
    else:  # an interval open to infinity still lies inside a region that is open to infinity
        inside = (low < a or low == -math.inf) and (b < high or high == math.inf)
        outside = b <= low or a >= high
    return "holds" if inside else "does not hold" if outside else "undecided"


def shortfall(claim: Claim, study: Study, effect: Effect | None) -> list[str]:
    """What the study lacks of what the claim needs, each "least (here so much)"; empty when nothing."""
    lacks = []
    for name, have in (("parameters", study.parameters), ("tokens", study.tokens)):
        if have < claim.needs.get(name, 0):
            lacks.append(f"{count(claim.needs[name])} {name} (here {count(have)})")
    seeds = len(effect.seeds) if effect is not None else len(study.seeds)
    if seeds < claim.needs.get("seeds", 1):
        lacks.append(f"{claim.needs['seeds']} seeds (here {seeds})")
    if study.path != claim.needs.get("path", study.path):
        lacks.append(f"{claim.needs['path']} FP4 (here {study.path})")
    return lacks


def judge(claim: Claim, candidates: Sequence[Study]) -> Verdict:
    """The verdict on one claim, from the study that can say most about it.

    Of the studies with records of every arm, one that meets the claim's needs is preferred, then one with an effect
    that lacks the fewest of them, then the larger one (`candidates` is in that order, as `studies` gives it).
    """
    candidates = [s.without(claim.needs.get("not_seeds", ())) for s in candidates if _is_about(claim, s)]
    candidates = [s for s in candidates if s.records]
    whole = [s for s in candidates if set(claim.arms) <= s.arms.keys()]
    if not whole:
        have = max(candidates, key=lambda s: len(set(claim.arms) & s.arms.keys()), default=None)
        missing = [a for a in claim.arms if have is None or a not in have.arms]
        aside = claim.needs.get("not_seeds", ())
        of = f" in a seed other than {', '.join(map(str, aside))}, which suggested the claim" if aside else ""
        return Verdict(claim, "no records", f"not run{of}: {', '.join(missing)}", None, have)
    judged = [_judge(claim, study) for study in whole]
    decisive = [v for v in judged if v.verdict in DECISIVE]
    with_effect = sorted(
        (v for v in judged if v.effect is not None), key=lambda v: len(shortfall(claim, v.study, v.effect))
    )
    return (decisive or with_effect or judged)[0]


def _is_about(claim: Claim, study: Study) -> bool:
    """Whether the study has the kind of source and model that the claim is of."""
    source = "synthetic" if study.config.corpus == "synthetic" else "text"
    model = "experts" if study.config.model.n_experts else "dense"
    return (source, model) == (claim.needs.get("source", "text"), claim.needs.get("model", "dense"))


def _judge(claim: Claim, study: Study) -> Verdict:
    try:
        effect = METRICS[claim.metric](study, **claim.arguments)
    except NoProbe as error:
        return Verdict(claim, "no records", str(error), None, study)
    except NoEffect as error:
        lack = shortfall(claim, study, None)
        if not lack:
            return Verdict(claim, "undecided", str(error), None, study)
        return Verdict(claim, "not tested at this scale", f"needs {', '.join(lack)}", None, study)
    lack = shortfall(claim, study, effect)
    if lack:
        return Verdict(claim, "not tested at this scale", f"needs {', '.join(lack)}", effect, study)
    if math.isnan(effect.low) or math.isnan(effect.high):
        return Verdict(claim, "not tested at this scale", f"one of {effect.over}: no interval", effect, study)
    verdict = decide(claim, effect)
    if claim.posthoc:
        return Verdict(
            claim, POSTHOC.get(verdict, verdict), f"suggested when {rule_text(claim, effect)}", effect, study
        )
    return Verdict(claim, verdict, f"holds when {rule_text(claim, effect)}", effect, study)


def judge_all(claims: Iterable[Claim], records: Iterable) -> list[Verdict]:
    """Verdicts on `claims` from `records` (of one scale or several)."""
    candidates = studies(records)
    return [judge(claim, candidates) for claim in claims]


# unit: factor, sign, what follows the value, decimals
_PRINT = {
    "share": (100, "+", " %", 1), "part": (100, "", " %", 1), "nats": (1, "+", " nats", 4),
    "ratio": (1, "", "x", 3),
    "cosine": (1, "+", "", 3), "number": (1, "+", "", 2),
}  # fmt: skip


_ROUNDING = 1e-12
"""What the arithmetic of means leaves of a difference of equal numbers."""


def effect_text(effect: Effect | None, *, unit: bool = True) -> str:
    """ "+8.4 % [+7.9, ∞] of fp8's tokens": value and interval in the effect's unit and what it is a share of; both are
    left out where a heading says them."""
    if effect is None:
        return "none"
    if effect.unit == "seeds":
        return f"{effect.value * len(effect.seeds):.0f} of {len(effect.seeds)} seeds converge"
    factor, sign, name, decimals = _PRINT[effect.unit]
    ends = [x * factor for x in (effect.value, effect.low, effect.high) if math.isfinite(x) and abs(x) > _ROUNDING]
    if ends and max(map(abs, ends)) < 10.0**-decimals:  # small effects keep two digits
        decimals = 1 - math.floor(math.log10(max(map(abs, ends))))

    def one(x: float) -> str:
        if math.isinf(x):
            return "∞" if x > 0 else "-∞"
        x = 0.0 if abs(x) <= _ROUNDING else x * factor  # and no "-0.0"
        return f"{x:{sign}.{decimals}f}" if abs(x) < 1e7 else f"{x:{sign}.2e}"

    value = one(effect.value) + (name if unit else "")
    if not (math.isnan(effect.low) or math.isnan(effect.high)):
        value += f" [{one(effect.low)}, {one(effect.high)}]"
    return f"{value} {effect.of}" if unit and effect.of else value


def _finite(x: float) -> float | None:
    return x if math.isfinite(x) else None
