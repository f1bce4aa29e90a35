"""What the parameters of notebooks may be. A name means the same in every notebook, so its rule goes by the name: what
would fail in a cell, or would be passed over in silence, is refused before a kernel starts. A notebook's own default is
always allowed, and so is any value of a name without a rule.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch

from mxfp4.data.corpora import check_name
from mxfp4.diagnostics.rounding_bias import PRESCALED
from mxfp4.directories import bench_dir
from mxfp4.errors import UserError
from mxfp4.layers.convert import convert
from mxfp4.layers.linear import MXFP4Linear
from mxfp4.layers.recipe import recipe
from mxfp4.numerics.hadamard import SIZES
from mxfp4.numerics.scale_rules import SCALE_RULES
from mxfp4.publish.parameters import Parameter
from mxfp4.studies.plans import plan, plans_of
from mxfp4.studies.registry import load_study
from mxfp4.studies.scales import SCALES, get_scale
from mxfp4.studies.store import Store
from mxfp4.training.model import Llama

LARGEST = 1e30
"""Of a magnitude whose square is not asked for."""


@dataclass(frozen=True)
class Rule:
    """What one value may be; of a list, each of its items."""

    kind: type
    """A parameter of the same name and another type is something else."""
    allows: Callable[[Any, str | None], bool]
    """(value, scale) -> whether it is allowed; raises ValueError with the reason where it has one. scale: the
    notebook's, None for one without."""
    said: Callable[[str | None], str]
    """scale -> what is allowed, in words."""


def _number(kind: type, words: str, test: Callable[[Any], bool]) -> Rule:
    return Rule(kind, lambda value, scale: test(value), lambda scale: words)


def _one_of(kind: type, values: Callable[[str | None], list]) -> Rule:
    def said(scale: str | None) -> str:
        return ", ".join(map(str, values(scale))) or "nothing here"

    return Rule(kind, lambda value, scale: value in values(scale), said)


def _arms(scale: str | None) -> list[str]:
    """Recipes that the plans of a scale train, and those of its records; all scales for a notebook without one."""
    scales = SCALES.values() if scale is None else [get_scale(scale)]
    planned = [c.recipe for s in scales for name in plans_of(s) for c in plan(name, s, seeds=[0]).arms]
    return list(dict.fromkeys([*planned, *(r.config.recipe for r in Store().load(scale))]))


def _benches(kind: str) -> Callable[[str | None], list[str]]:
    def names(scale: str | None) -> list[str]:
        return [path.stem for path in sorted(bench_dir().glob("*.json")) if _kind(path) == kind]

    return names


def _kind(path) -> str | None:
    try:
        data = json.loads(path.read_text())
    except ValueError:
        return None
    return data.get("kind") if isinstance(data, dict) else None


def _layers(scale: str | None) -> list[str]:
    """Full names of the layers that a scale quantizes."""
    with torch.device("meta"):
        model = convert(Llama(get_scale(scale or "cpu").model), "mxfp4")
    return [name for name, module in model.named_modules() if isinstance(module, MXFP4Linear)]


def _said_layers(scale: str | None) -> str:
    names = _layers(scale)
    return f"all, or a pattern that fits one of {names[0]} ... {names[-1]}"


def _is_pattern(value: str, scale: str | None) -> bool:
    return value == "all" or any(fnmatchcase(name, value) for name in _layers(scale))


def _is_corpus(value: str, scale: str | None) -> bool:
    check_name(value)
    return True


RECIPE = Rule(str, lambda value, scale: bool(recipe(value)), lambda scale: "the name of a recipe")
ARM = _one_of(str, _arms)
SHARE = _number(float, "a share above 0 and up to 1", lambda x: 0 < x <= 1)
START = _number(float, "a share from 0 to below 1", lambda x: 0 <= x < 1)
COUNT = _number(int, "at least 1", lambda n: n >= 1)
SEED = _number(int, "from 0 to 2^63 - 1", lambda n: 0 <= n < 2**63)
RULES = {
    "scale": _one_of(str, lambda scale: list(SCALES)),
    "seed": SEED,
    "seeds": SEED,
    **dict.fromkeys(("steps", "blocks", "draws"), COUNT),
    **dict.fromkeys(("at", "targets"), SHARE),
    **dict.fromkeys(("late", "after"), START),
    "amax": _number(float, f"above 0 and up to {LARGEST:g}", lambda x: 0 < x <= LARGEST),
    "outlier": _number(float, f"from 0 to {LARGEST:g}", lambda x: 0 <= x <= LARGEST),
    "target": _number(float, "above 0", lambda x: x > 0),
    **dict.fromkeys(("size", "rotation"), _one_of(int, lambda scale: list(SIZES))),
    "scale_rule": _one_of(str, lambda scale: list(SCALE_RULES)),
    "rules": _one_of(str, lambda scale: [*SCALE_RULES, PRESCALED]),
    **dict.fromkeys(("arm", "arms", "reference"), ARM),
    **dict.fromkeys(("recipe", "recipes", "variants"), RECIPE),
    "layers": Rule(str, _is_pattern, _said_layers),
    "gpu": _one_of(str, _benches("kernels")),
    **dict.fromkeys(("step", "bench"), _one_of(str, _benches("step"))),
    "width": _one_of(str, _benches("width")),
    "cpu": _one_of(str, _benches("cpu")),
    "text": Rule(str, _is_corpus, lambda scale: "the name of a corpus"),
    "record": _one_of(str, _benches("families")),
    "questions": _one_of(str, lambda scale: list(load_study().questions)),
}
"""{name of a parameter: its rule}."""
NOT_NEGATIVE = _number(float, "0 or more", lambda x: x >= 0)


def rule_of(parameter: Parameter) -> Rule | None:
    """The rule of a parameter; None for one that may be anything of its type."""
    rule, default = RULES.get(parameter.name), parameter.default
    if rule is START and not 0 <= default < 1:
        return NOT_NEGATIVE  # not a share there
    return rule if rule is not None and parameter.scalar == rule.kind.__name__ else None


def check(known: Mapping[str, Parameter], values: Mapping[str, Any]) -> None:
    """Refuse what can be known to be wrong, as a UserError that names the value and what is allowed."""
    scale = values.get("scale")
    for name in sorted(values, key=lambda name: name != "scale"):  # others' rules ask for it
        parameter, value = known[name], values[name]
        rule = rule_of(parameter)
        if rule is None or value == parameter.default:
            continue
        several = isinstance(value, (list, tuple))
        if several and not value:
            raise UserError(f"parameter {name}: allowed is at least one item ({parameter.help})")
        for item in value if several else [value]:
            reason = _reason(rule, item, scale)
            if reason is not None:
                raise UserError(f"parameter {name}={item!r}: {reason} ({parameter.help})")
    _check_runs(values)


def _reason(rule: Rule, item: Any, scale: str | None) -> str | None:
    try:
        return None if rule.allows(item, scale) else f"allowed: {rule.said(scale)}"
    except ValueError as error:
        return str(error)


def _check_runs(values: Mapping[str, Any]) -> None:
    """A page trains at scale cpu, or with train=true: else it shows the runs that are there."""
    scale, steps, seeds = (values.get(name) for name in ("scale", "steps", "seeds"))
    if scale in (None, "cpu") or values.get("train") or not (steps or seeds):
        return
    records = Store().load(scale)
    for name, asked, there in (
        ("steps", [steps] if steps else [], {r.config.steps for r in records}),
        ("seeds", seeds or [], {r.config.seed for r in records}),
    ):
        for value in (v for v in asked if v not in there):
            have = f"its records have {', '.join(map(str, sorted(there)))}" if there else "it has no records"
            none = f"no run at scale {scale} has {'so many' if name == 'steps' else 'this one'} ({have})"
            raise UserError(f"parameter {name}={value}: {none}; train=true runs what is missing")
