"""Plans: which arms a study needs, what of it is in the store, what the rest will cost.

An arm differs from its neighbours in the recipe alone. Plans overlap (every one has its references); the
store knows an arm by its configuration, so nothing is trained twice. Arms are ordered by what is asked
first, seeds last, so a plan that is cut short has all arms of the first seed.

| plan         | question                                                                              |
|--------------|---------------------------------------------------------------------------------------|
| first        | P1's main result, with seeds enough to decide it (at scale mi355x)                    |
| table1       | P1: which GEMM does MXFP4 hurt, which stabiliser helps                                |
| disagreement | does stochastic rounding fail by itself, or with a clipping rule                      |
| p2           | P2: which ingredient of the transposition-invariant recipe counts                     |
| others       | recipes of other papers                                                               |
| two-sided    | can a rotation and a scale that survives the transpose be had together                |
| sizes        | do the costs of table1 grow or shrink with the model: three sizes, a factor 3 apart   |
| moe          | does P2's recipe do for a mixture of experts what it does for a dense model           |
| synthetic    | how much of an arm's loss is its own: a source of known entropy                       |
| all          | those that the scale is for, in this order                                            |

At scale mi355x an arm takes a day of a node, so "all" runs in tiers there: "first", then the rest of "table1", then the
other plans, each with all of its seeds before the next begins.

At scale gpu also "study", the registered study, and its parts by name (`registered_arms`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mxfp4.data.corpora import TOY
from mxfp4.errors import UserError
from mxfp4.studies.registered_arms import study_arms, study_parts
from mxfp4.studies.scales import Scale, get_scale
from mxfp4.studies.store import Record, Store
from mxfp4.training.checkpoints import checkpoint
from mxfp4.training.config import ModelConfig, TrainConfig

SCOPES = ("mxfp4-fprop", "mxfp4-fprop-dgrad", "mxfp4")
STABILISERS = ("sr", "rht16", "h16")
TABLE1 = (
    "bf16",
    "fp8",
    *SCOPES,
    *(f"mxfp4+{s}" for s in STABILISERS),
    "mxfp4+h32",
    *(f"{scope}+{s}" for scope in SCOPES[:2] for s in STABILISERS),
)
ONE_GEMM = ("mxfp4-dgrad", "mxfp4-wgrad")
P2 = ("bf16", "ti2d", "ti2d-no-2d", "ti2d-no-rceil", "ti2d-no-sr", "ti2d-no-qk8")
BLOCK_SHAPES = ("mxfp4+2d-w", "mxfp4+2d")
ROUNDINGS = ("", "+sr-grad", "+sr")


def rule_arm(rule: str, rounding: str) -> str:
    """The recipe of full 1D MXFP4 with a scale rule and one of ROUNDINGS; `even` is the rule a recipe has unsaid."""
    return f"mxfp4{'' if rule == 'even' else '+' + rule}{rounding}"


def rule_by_rounding(rules: Sequence[str]) -> tuple[str, ...]:
    """`rule_arm` with each scale rule and each rounding."""
    return tuple(rule_arm(rule, rounding) for rule in rules for rounding in ROUNDINGS)


# The recipes of each plan, and the fewer of a laptop's scale.
FULL = {
    "first": ("bf16", "fp8", "mxfp4", "mxfp4+h16"),
    "table1": (*TABLE1, *ONE_GEMM),
    "disagreement": (
        "bf16",
        *rule_by_rounding(("floor", "even", "ceil", "rceil")),
        "mxfp4+sr+prescale",
        "mxfp4+frht16",
        "mxfp4+h16-wgrad",
    ),
    "p2": (*P2, *BLOCK_SHAPES),
    "others": ("bf16", "fp8", "nvfp4", "tseng", "tetrajet", "quartet", "mxfp4+h16+tail15", "mxfp4+h16"),
    "two-sided": (
        "bf16",
        "mxfp4",
        "mxfp4+h16",
        "mxfp4+2d",
        "mxfp4+2d+h16",
        "mxfp4+hh16",
        "mxfp4+2d+hh16",
        "ti2d",
        "ti2d+hh16",
    ),
    "sizes": ("bf16", "fp8", "mxfp4-fprop-dgrad", "mxfp4", "mxfp4+h16"),
    "moe": ("bf16", "mxfp4+2d", "ti2d", "mxfp4+h16"),
    "synthetic": ("bf16", "fp8", *SCOPES[1:], *(f"mxfp4+{s}" for s in STABILISERS), "ti2d"),
}
SMALL = {
    **FULL,
    "table1": TABLE1,
    "disagreement": ("bf16", *rule_by_rounding(("even", "rceil"))),
    "p2": P2,
    "synthetic": ("bf16", "mxfp4", "mxfp4+h16"),
}
PLANS = tuple(FULL)
OWN_SETTINGS = ("sizes", "moe", "synthetic")
"""Plans that a scale has only with settings for them."""
TIERS = ("first", "table1", "rest")
"""What "all" runs one after the other at a scale with seeds of its own for the first."""
FORWARD = 1 / 3
"""Assumed: an evaluation's share of the time of a step on as many sequences; the rest is the backward."""
LAPTOP = ("table1", "disagreement", "p2", "synthetic")
"""Plans of a laptop's `all`, which is to take minutes; the others run when they are asked for."""


def steps_worth(config: TrainConfig, step: int = 0) -> float:
    """What is left of an arm after `step` in training steps, with its evaluations at their part of a step's time."""
    evaluations = math.ceil(config.steps / config.eval_every) - step // config.eval_every + (step == 0)
    return config.steps - step + evaluations * config.eval_sequences / config.batch_size * FORWARD


def plans_of(scale: Scale) -> tuple[str, ...]:
    """Names of the plans that can be run at a scale, in the order of `all`."""
    own = {"first": scale.seeds, **dict.fromkeys(OWN_SETTINGS, scale.settings)}
    return tuple(name for name in PLANS if name not in own or name in own[name])


def tier_of(config: TrainConfig, scale: Scale) -> str | None:
    """Which of TIERS an arm of `scale` belongs to; None where the scale has no tiers."""
    if "first" not in plans_of(scale):
        return None
    named = (name for name in TIERS if name in FULL and config.recipe in FULL[name])
    return next((name for name in named if config.seed in scale.seeds_of(name)), TIERS[-1])


def parts_of(name: str, scale: Scale) -> tuple[str, ...]:
    """The plans that `name` stands for: those of `all`, or itself. UserError lists the known names."""
    if scale.name == "gpu" and name in study_parts():
        return (name,)
    if name == "all":
        return LAPTOP if scale.name == "cpu" else plans_of(scale)
    if name not in plans_of(scale):
        own = study_parts() if scale.name == "gpu" else []
        known = ", ".join([*plans_of(scale), *own, "all"])
        raise UserError(f"unknown plan {name!r} at scale {scale.name!r}; known: {known}")
    return (name,)


def plan(
    name: str,
    scale: str | Scale,
    *,
    recipes: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
    **overrides,
) -> Plan:
    """The plan `name` at a scale: one of PLANS, or "all".

    recipes, seeds: instead of the plan's own. overrides: fields of TrainConfig that every arm takes, such
    as steps or corpus; a plan that is about a corpus (`Scale.settings`) keeps it. UserError lists the known names.
    """
    scale = (get_scale(scale) if isinstance(scale, str) else scale).on_corpus(overrides.get("corpus"))
    known = SMALL if scale.name == "cpu" else FULL
    if scale.name == "gpu" and name in study_parts():
        arms = [
            c
            for c in study_arms(name)
            if (recipes is None or c.recipe in recipes) and (seeds is None or c.seed in seeds)
        ]
        if not arms:
            there = study_arms(name)
            raise UserError(
                f"plan {name!r} has none of the arms {', '.join(recipes or ['(any)'])} with seeds "
                f"{', '.join(map(str, seeds or ['(any)']))}; it has {', '.join(dict.fromkeys(c.recipe for c in there))} "
                f"with seeds up to {max(c.seed for c in there)}"
            )
        return Plan(name, scale, tuple(replace(config, **overrides) for config in arms))
    wanted: dict[TrainConfig, None] = {}
    for part in parts_of(name, scale):
        for seed in seeds if seeds is not None else scale.seeds_of(part):
            for setting in scale.settings_of(part):
                own = {k: v for k, v in setting.items() if k == "corpus"}  # its model has the vocabulary of that one
                for r in recipes if recipes is not None else known[part]:
                    if part == name or part != "first" or r in known[part]:  # its seeds are for its own recipes
                        wanted.setdefault(scale.config(r, seed, **{**setting, **overrides, **own}))

    def order(config: TrainConfig) -> tuple[int, int]:
        tier = tier_of(config, scale)
        return TIERS.index(tier) if tier else 0, config.seed

    # Tier after tier; all arms of a seed before the next seed; within one, plan after plan.
    return Plan(name, scale, tuple(sorted(wanted, key=order)))


BASES = ("this arm", "other arms of its model", "other models")
"""What an estimate may rest on: records of the recipe in the model, of other recipes in it, or of other models of this
scale by their active weights, dense ones for dense and those with experts for experts: no step of experts is captured
or compiled."""


@dataclass(frozen=True)
class ArmStatus:
    """Where one arm of a plan stands."""

    config: TrainConfig
    record: Record | None
    """Its record, if it is done."""
    step: int
    """Step of its checkpoint, 0 without one."""
    seconds: float | None
    """What the rest of it is estimated to take of devices' time, that of all its ranks together; 0 when done, None where
    nothing like it is measured."""
    basis: str = ""
    """What that rests on, one of BASES; empty when done or not measured."""

    @property
    def done(self) -> bool:
        return self.record is not None


@dataclass(frozen=True)
class Plan:
    """An ordered list of arms."""

    name: str
    scale: Scale
    arms: tuple[TrainConfig, ...]

    def status(self, store: Store, device=None) -> list[ArmStatus]:
        """Each arm: done, begun or missing, and its cost."""
        trial = self.arms[0].corpus == TOY if self.arms else False
        records = [r for r in store.load(self.scale.name) if (r.config.corpus == TOY) == trial]  # no toy foretells 8B
        costs = {model: _seconds_per_token(records, model) for model in {a.model for a in self.arms}}
        elsewhere = {experts: _seconds_per_unit(records, experts) for experts in (False, True)}
        found = []
        for config in self.arms:
            cost = costs[config.model]
            record = store.get(config, device)
            step = 0 if record else checkpoint.latest_step(store.checkpoint_dir(config, device)) or 0
            unit = elsewhere[bool(config.model.n_experts)]
            rates = (cost.get(config.recipe), cost.get(""), None if unit is None else unit * _work(config.model))
            known = [(basis, rate) for basis, rate in zip(BASES, rates, strict=True) if rate is not None]
            if record or not known:
                found.append(ArmStatus(config, record, step, 0.0 if record else None))
            else:
                basis, rate = known[0]
                rest = (config.steps - step) * config.tokens_per_step
                found.append(ArmStatus(config, None, step, rest * rate, basis))
        return found

    def first(self, store: Store, minutes: float, device=None) -> Plan:
        """The missing arms, in order, that are estimated to take so many minutes of one device together."""
        missing = [arm for arm in self.status(store, device) if not arm.done]
        return replace(self, arms=tuple(arm.config for arm in (slices(missing, minutes) or [[]])[0]))

    def records(self, store: Store, device=None) -> list[Record]:
        """The records of the arms that are done, in the plan's order."""
        return [r for config in self.arms if (r := store.get(config, device)) is not None]


def slices(missing: Sequence[ArmStatus], minutes: float) -> list[list[ArmStatus]]:
    """Arms cut, in their order, into lists that each take at most so many minutes of one device; a longer arm is alone. An
    arm that is not measured ends a list."""
    found: list[list[ArmStatus]] = []
    used = math.inf
    for arm in missing:
        seconds = math.inf if arm.seconds is None else arm.seconds
        if used + seconds > minutes * 60:
            found.append([])
            used = 0.0
        found[-1].append(arm)
        used += seconds
    return found


def device_seconds(record: Record) -> float:
    """What a run took of devices' time: an arm that shared its device had its part, one on several ranks had several."""
    timings = record.timings
    sharing = timings.get("arms_on_device", get_scale(record.config.scale).jobs)
    return (timings["train_seconds"] + timings["evaluate_seconds"]) / sharing * timings.get("ranks", 1)


def _seconds_per_token(records: list[Record], model: ModelConfig) -> dict[str, float]:
    """{recipe: seconds of a device that a token of this model took, evaluation included}; "" is the mean over recipes."""
    took: dict[str, list[float]] = {}
    for record in records:
        if record.config.model == model and record.outcome["tokens"]:
            took.setdefault(record.config.recipe, []).append(device_seconds(record) / record.outcome["tokens"])
    means = {name: sum(values) / len(values) for name, values in took.items()}
    return {**means, "": sum(means.values()) / len(means)} if means else {}


def _work(model: ModelConfig) -> int:
    """Weights that a token meets."""
    active = replace(model, n_experts=min(model.n_experts, model.n_experts_per_token))
    return active.n_params_non_embedding() + model.vocab_size * model.dim


def _seconds_per_unit(records: list[Record], experts: bool) -> float | None:
    """Seconds a token and active weight, the mean over models with or without experts; None without a record."""
    models = {record.config.model for record in records if bool(record.config.model.n_experts) == experts}
    rates = [_seconds_per_token(records, m)[""] / _work(m) for m in models if _seconds_per_token(records, m)]
    return sum(rates) / len(rates) if rates else None
