"""Plans: which arms a study needs, what of it is in the store, what the rest will cost.

An arm differs from its neighbours in the recipe alone. Plans overlap (every one has its references); the
store knows an arm by its configuration, so nothing is trained twice. Arms are ordered by what is asked
first, seeds last, so a plan that is cut short has all arms of the first seed.

| plan         | question                                                        |
|--------------|-----------------------------------------------------------------|
| table1       | P1: which GEMM does MXFP4 hurt, which stabiliser helps          |
| p2           | P2: which ingredient of the transposition-invariant recipe counts|
| disagreement | does stochastic rounding fail by itself, or with a clipping rule|
| others       | recipes of other papers                                         |
| all          | these, in order                                                 |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mxfp4.errors import UserError
from mxfp4.experiments.scales import Scale, get_scale
from mxfp4.experiments.store import Record, Store
from mxfp4.training import checkpoint
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


def rule_by_rounding(rules: Sequence[str]) -> tuple[str, ...]:
    """Full 1D MXFP4 with each scale rule and each rounding; `even` is the rule a recipe has unsaid."""
    return tuple(f"mxfp4{'' if rule == 'even' else '+' + rule}{r}" for rule in rules for r in ROUNDINGS)


# Recipes of each plan: at a laptop's scale, and at every other.
SMALL = {"table1": TABLE1, "p2": P2, "disagreement": ("bf16", *rule_by_rounding(("even", "rceil")))}
FULL = {
    "table1": (*TABLE1, *ONE_GEMM),
    "p2": (*P2, *BLOCK_SHAPES),
    "disagreement": (
        "bf16",
        *rule_by_rounding(("floor", "even", "ceil", "rceil")),
        "mxfp4+sr+prescale",
        "mxfp4+frht16",
        "mxfp4+h16-wgrad",
    ),
    "others": ("nvfp4", "tseng", "tetrajet", "mxfp4+h16+tail15"),
}


def plan(
    name: str,
    scale: str | Scale,
    *,
    recipes: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
    **overrides,
) -> Plan:
    """The plan `name` ("table1", "p2", "disagreement", "others", "all") at a scale.

    recipes, seeds: instead of the plan's own. overrides: fields of TrainConfig that every arm takes, such
    as steps or corpus. UserError lists the known names.
    """
    scale = get_scale(scale) if isinstance(scale, str) else scale
    known = SMALL if scale.name == "cpu" else FULL
    if name != "all" and name not in known:
        raise UserError(f"unknown plan {name!r} at scale {scale.name!r}; known: {', '.join([*known, 'all'])}")
    wanted: dict[tuple[int, str], None] = {}
    for part in known if name == "all" else (name,):
        for seed in seeds if seeds is not None else scale.seeds_of(part):
            for r in recipes if recipes is not None else known[part]:
                wanted.setdefault((seed, r))
    # All arms of a seed before the next seed; within one, plan after plan.
    order = sorted(wanted, key=lambda pair: pair[0])
    return Plan(name, scale, tuple(scale.config(r, seed, **overrides) for seed, r in order))


@dataclass(frozen=True)
class ArmStatus:
    """Where one arm of a plan stands."""

    config: TrainConfig
    record: Record | None
    """Its record, if it is done."""
    step: int
    """Step of its checkpoint, 0 without one."""
    seconds: float | None
    """What the rest of it is estimated to take from records of this scale; 0 when done, None when unknown."""

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
        records = store.load(self.scale.name)
        costs = {model: _seconds_per_token(records, model) for model in {a.model for a in self.arms}}
        found = []
        for config in self.arms:
            cost = costs[config.model]
            record = store.get(config, device)
            step = 0 if record else checkpoint.latest_step(store.checkpoint_dir(config, device)) or 0
            rate = cost.get(config.recipe, cost.get(""))
            rest = (config.steps - step) * config.tokens_per_step
            found.append(
                ArmStatus(config, record, step, 0.0 if record else None if rate is None else rest * rate)
            )
        return found

    def records(self, store: Store, device=None) -> list[Record]:
        """The records of the arms that are done, in the plan's order."""
        return [r for config in self.arms if (r := store.get(config, device)) is not None]

    def run(self, store: Store | None = None, jobs: int | None = None, **options):
        """Train what is missing: see `mxfp4.experiments.workers.run_plan`."""
        from mxfp4.experiments.workers import run_plan  # workers import plans

        return run_plan(self, store or Store(), jobs=jobs, **options)


def _seconds_per_token(records: list[Record], model: ModelConfig) -> dict[str, float]:
    """{recipe: seconds a token of this model took, evaluation included}; "" is the mean over recipes."""
    took: dict[str, list[float]] = {}
    for record in records:
        if record.config.model == model and record.outcome["tokens"]:
            seconds = record.timings["train_seconds"] + record.timings["evaluate_seconds"]
            took.setdefault(record.config.recipe, []).append(seconds / record.outcome["tokens"])
    means = {name: sum(values) / len(values) for name, values in took.items()}
    return {**means, "": sum(means.values()) / len(means)} if means else {}
