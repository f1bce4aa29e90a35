"""What a chapter rests on: the records of a plan, what of it is missing, and the line that says so on the
page.

At scale cpu a chapter trains what is missing. At other scales it does so when asked (`train`), as such runs take hours;
else records come from `mxfp4 train` or another machine, and a chapter shows what is there and names the command that
adds the rest.
"""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from mxfp4.analysis.claims import Verdict
from mxfp4.analysis.study import Study, same_setting, studies
from mxfp4.data.corpora import TOY
from mxfp4.data.megatron.names import is_megatron
from mxfp4.errors import UserError
from mxfp4.studies.plans import Plan, parts_of, plan
from mxfp4.studies.scales import Scale, get_scale
from mxfp4.studies.store import Store
from mxfp4.text import count
from mxfp4.training.config import TrainConfig

NAMED = 16
"""How many arms without a run a page names."""


@dataclass(frozen=True)
class Evidence:
    """A study and how much of a plan it holds. Displays itself as a note with the records folded in."""

    plan: Plan
    study: Study | None
    """None while the scale has no record of the plan."""
    missing: tuple[str, ...]
    """Arms of the plan without a record, as recipe-sSEED."""
    substitute: bool = False
    """The study has other settings than the plan: the nearest that the store holds."""
    instead_of: str = ""
    """The scale that was asked for, whose runs are not probed."""

    @property
    def arms(self) -> list[str]:
        """Recipes of the plan that have records, in its order."""
        have = self.study.arms if self.study else {}
        return [r for r in dict.fromkeys(c.recipe for c in self.plan.arms) if r in have]

    def has(self, *arms: str) -> bool:
        """Whether all of `arms` have records here."""
        return self.study is not None and set(arms) <= self.study.arms.keys()

    def need(self) -> Study:
        """The study. UserError with the command that makes it, while there is none."""
        if self.study is None:
            raise UserError(f"no records of plan {self.plan.name} at scale {self.plan.scale.name}: {self.command}")
        return self.study

    @property
    def command(self) -> str:
        scale, corpus = self.plan.scale, self.plan.arms[0].corpus
        part = f" --corpus {corpus}" if _kin(corpus, scale) and corpus != scale.corpus else ""
        return f"mxfp4 train --plan {self.plan.name} --scale {scale.name}{part}"

    def _repr_html_(self) -> str:
        names = self.study.names(*self.arms) if self.study else []
        said = html.escape(self.study.describe(*self.arms) if self.study else f"no records yet of {self._what()}")
        parts = [f"<strong>Evidence.</strong> {said[:1].upper()}{said[1:]}."]
        if self.instead_of:
            parts.append(
                f"Runs of scale {self.instead_of} are not probed, as each is spread over several GPUs; this page shows "
                f"those of scale {self.plan.scale.name}."
            )
        if self.substitute:
            parts.append("These settings are not those of the plan as it stands; they are what the store holds.")
        if self.study is None:
            beyond = f" {self.beyond}" if self.beyond else ""
            parts.append(f"Not run yet at this scale; <code>{html.escape(self.command)}</code> runs it.{beyond}")
        elif self.missing:
            parts.append(self.partial.text())
        return f'<div class="mx-evidence"><p>{" ".join(parts)}</p>{_folded(names)}</div>'

    @property
    def partial(self) -> Partial:
        """A note that the page is partial; it shows nothing where no arm is missing."""
        return _partial(self.missing, self.plan.arms, self.command, self.beyond)

    @property
    def beyond(self) -> str:
        """A sentence where `make reproduce` does not run the plan; empty where it does."""
        scale = self.plan.scale
        if _asked_for(self.plan.name, scale):
            return ""
        return f"Plan {self.plan.name} is no part of <code>make reproduce</code> at scale {scale.name}."

    def __repr__(self) -> str:
        names = self.study.names(*self.arms) if self.study else []
        return f"{self.study.describe(*self.arms) if self.study else 'no records yet'}: {', '.join(names)}"

    def _what(self) -> str:
        """The model and the corpus of the plan, which tell parts of one plan apart."""
        config = self.plan.arms[0]
        experts = f", {config.model.n_experts} experts," if config.model.n_experts else ""
        return f"{count(config.model.n_params_non_embedding())} non-embedding parameters{experts} on {config.corpus}"


@dataclass(frozen=True)
class Partial:
    """The one way in which a page says that it was made from a part of its runs. A run is an arm in one seed."""

    missing: int
    runs: int
    command: str
    absent: tuple[str, ...] = ()
    """Arms without any run."""
    beyond: str = ""
    """That these runs are beyond what is run unasked, as a sentence."""

    def text(self) -> str:
        said = (
            f"<strong>Partial page</strong>: {self.missing} of {self.runs} runs are missing, so means, orders and "
            f"verdicts may still change; <code>{html.escape(self.command)}</code> adds them, "
            "<code>mxfp4 status</code> says what is in work."
        )
        said += f" {self.beyond}" if self.beyond else ""
        if not self.absent:
            return said
        names = ", ".join(f"<code>{html.escape(arm)}</code>" for arm in self.absent[:NAMED])
        more = f" and {len(self.absent) - NAMED} more" if len(self.absent) > NAMED else ""
        return f"{said} No run yet of {names}{more}."

    def _repr_html_(self) -> str:
        return f'<div class="mx-evidence"><p>{self.text()}</p></div>' if self.missing else ""

    def __repr__(self) -> str:
        return f"partial: {self.missing} of {self.runs} runs are missing" if self.missing else ""


def _asked_for(name: str, scale: Scale) -> bool:
    """Whether the plan `all`, which `make reproduce` runs, holds all of plan `name`."""
    return set(parts_of(name, scale)) <= set(parts_of("all", scale))


def _partial(missing: Sequence[str], arms: Sequence[TrainConfig], command: str, beyond: str) -> Partial:
    """missing: as recipe-sSEED, once for each setting of the plan that lacks it."""
    planned = Counter(c.recipe for c in arms)
    lacked = Counter(name.rpartition("-s")[0] for name in missing)
    absent = tuple(r for r, n in planned.items() if lacked[r] == n)
    return Partial(len(missing), len(arms), command, absent, beyond)


class Sources:
    """The studies and records that verdicts come from, displayed as a note for the foot of a page."""

    def __init__(self, verdicts: Iterable[Verdict]):
        used: dict[str, tuple[Study, set[str]]] = {}
        for v in verdicts:
            if v.study is not None:
                used.setdefault(v.study.describe(), (v.study, set()))[1].update(v.claim.arms)
        self.names = {s.describe(*arms): s.names(*arms) for s, arms in used.values() if arms & s.arms.keys()}
        """{what the records are: their run ids}."""

    def _repr_html_(self) -> str:
        parts = [f"<p>{html.escape(said[:1].upper() + said[1:])}.</p>{_folded(n)}" for said, n in self.names.items()]
        body = "".join(parts) or "<p>No records yet.</p>"
        return f'<div class="mx-evidence"><p><strong>Evidence.</strong></p>{body}</div>'

    def __repr__(self) -> str:
        return "; ".join(f"{said}: {', '.join(n)}" for said, n in self.names.items()) or "no records yet"


def _folded(names: Sequence[str]) -> str:
    if not names:
        return ""
    items = "".join(f"<li><code>{html.escape(n)}</code></li>" for n in names)
    return f"<details><summary>{len(names)} records behind this page</summary><ul>{items}</ul></details>"


def gather(
    name: str, scale: str, *, recipes: Sequence[str] | None = None, store: Store | None = None, train: bool = False,
    **overrides,
) -> Evidence:  # fmt: skip
    """The records of the plan `name` at `scale`, trained first where they are missing and scale is cpu or `train` is set.

    At cpu only what `all` holds is trained unasked; a plan beyond it is trained when overrides are given. Interrupted
    (Ctrl-C), training leaves its checkpoints; asked again it goes on, and without `train` the page is made of what there is.
    overrides: `seeds`, or fields of TrainConfig; an empty or zero one is left to the scale. Of a plan with several
    settings the study is that of the first, what is missing is counted over all of them.
    """
    parts = gather_each(name, scale, recipes=recipes, store=store, train=train, **overrides)
    arms = tuple(config for part in parts for config in part.plan.arms)
    missing = tuple(arm for part in parts for arm in part.missing)
    return replace(parts[0], plan=replace(parts[0].plan, arms=arms), missing=missing)


PROBED = "gpu"
"""The scale whose runs stand in on pages about tensors."""


def gather_probed(name: str, scale: str, **given) -> Evidence:
    """As `gather`, at the scale PROBED where runs of `scale` are not probed; the page says so. What is `given` speaks of
    the scale that was asked for, and so not of that one."""
    if get_scale(scale).probe_steps:
        return gather(name, scale, **given)
    return replace(gather(name, PROBED), instead_of=scale)


def partial_of(parts: Sequence[Evidence]) -> Partial:
    """The note for a page that shows several settings of one plan."""
    missing, arms = ([x for part in parts for x in of(part)] for of in (lambda p: p.missing, lambda p: p.plan.arms))
    return _partial(missing, arms, *((parts[0].command, parts[0].beyond) if parts else ("", "")))


def gather_each(
    name: str, scale: str, *, recipes: Sequence[str] | None = None, store: Store | None = None, train: bool = False,
    **overrides,
) -> list[Evidence]:  # fmt: skip
    """As `gather`, one Evidence for each setting of the plan, in its order."""
    store = store or Store()
    given = {k: v for k, v in overrides.items() if v}
    given = _corpus_of(store, get_scale(scale)) | given
    wanted = plan(name, scale, recipes=recipes, **given)
    train = train or (wanted.scale.name == "cpu" and bool(_asked_for(name, wanted.scale) or given))
    if train and any(store.get(c) is None for c in wanted.arms):
        from mxfp4.studies.runner import run_plan  # slow to import, and seldom needed

        summary = run_plan(wanted, store)
        if summary.failed:
            arm, reason = next(iter(summary.failed.items()))
            raise UserError(f"arm {arm} failed: {reason}")
    groups: list[list[TrainConfig]] = []
    for config in wanted.arms:
        group = next((g for g in groups if same_setting(g[0], config)), None)
        groups.append([config]) if group is None else group.append(config)
    candidates = studies(store.load(scale))
    fixed = bool(given) or name in wanted.scale.settings
    # Of several settings the first is the scale's own: no study of text stands in for another source or size.
    return [_evidence(replace(wanted, arms=tuple(g)), candidates, fixed or i > 0) for i, g in enumerate(groups)]


def _kin(corpus: str, scale: Scale) -> bool:
    """Whether `corpus` is the scale's, other shards of it ("c4:768-799"), or the same in Megatron's files."""
    base = corpus.partition(":")[0]
    return base == scale.corpus or (scale.corpus == "c4" and is_megatron(corpus))


def _corpus_of(store: Store, scale: Scale) -> dict[str, str]:
    """{"corpus": ...} where all records of a scale are of one other range of its corpus' shards, or of Megatron's files of
    it: its plan goes on there. Those of the toy count where there are no others."""
    used = {r.config.corpus for r in store.load(scale.name) if _kin(r.config.corpus, scale)}
    used = used - {TOY} or used
    return {"corpus": used.pop()} if len(used) == 1 and scale.corpus not in used else {}


def _evidence(wanted: Plan, candidates: list[Study], fixed: bool) -> Evidence:
    """fixed: no study of another setting may stand in."""
    names = list(dict.fromkeys(c.recipe for c in wanted.arms))
    fitting = [s for s in candidates if same_setting(s.config, wanted.arms[0])]
    study = max(fitting, key=lambda s: len(set(names) & s.arms.keys()), default=None)
    substitute = study is None or not set(names) & study.arms.keys()
    if substitute and not fixed:
        own = [s for s in candidates if s.config.corpus != "synthetic" and not s.config.model.n_experts]
        study = max(own, key=lambda s: (len(set(names) & s.arms.keys()), len(s.records)), default=None)
    have = study.arms if study else {}
    missing = tuple(f"{c.recipe}-s{c.seed}" for c in wanted.arms if c.seed not in have.get(c.recipe, {}))
    return Evidence(
        wanted,
        study if study and set(names) & have.keys() else None,
        missing,
        substitute and study is not None,
    )
