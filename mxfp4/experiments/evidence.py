"""What a chapter rests on: the records of a plan, what of it is missing, and the line that says so on the
page.

At scale cpu a chapter trains what is missing. At other scales records come from a machine that has them, are
merged into the store, and a chapter shows what is there and names the command that adds the rest.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mxfp4.errors import UserError
from mxfp4.experiments.claims import Verdict
from mxfp4.experiments.plan import Plan, plan
from mxfp4.experiments.store import Store
from mxfp4.experiments.study import Study, main_study, same_setting, studies


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

    @property
    def arms(self) -> list[str]:
        """Recipes of the plan that have records, in its order."""
        have = self.study.arms if self.study else {}
        return [r for r in dict.fromkeys(c.recipe for c in self.plan.arms) if r in have]

    def need(self) -> Study:
        """The study. UserError with the command that makes it, while there is none."""
        if self.study is None:
            raise UserError(
                f"no records of plan {self.plan.name} at scale {self.plan.scale.name}: {self.command}"
            )
        return self.study

    @property
    def command(self) -> str:
        return f"mxfp4 train --plan {self.plan.name} --scale {self.plan.scale.name}"

    def _repr_html_(self) -> str:
        names = self.study.names(*self.arms) if self.study else []
        said = html.escape(self.study.describe() if self.study else "no records yet")
        parts = [f"<strong>Evidence.</strong> {said[:1].upper()}{said[1:]}."]
        if self.substitute:
            parts.append(
                "These settings are not those of the plan as it stands; they are what the store holds."
            )
        if self.missing:
            parts.append(
                f"Partial: {len(self.missing)} of {len(self.plan.arms)} arms are missing; "
                f"<code>{html.escape(self.command)}</code> adds them."
            )
        return f'<div class="mx-evidence"><p>{" ".join(parts)}</p>{_folded(names)}</div>'

    def __repr__(self) -> str:
        names = self.study.names(*self.arms) if self.study else []
        return f"{self.study.describe() if self.study else 'no records yet'}: {', '.join(names)}"


class Sources:
    """The studies and records that verdicts come from, displayed as a note for the foot of a page."""

    def __init__(self, verdicts: Iterable[Verdict]):
        self.names: dict[str, set[str]] = {}
        for v in verdicts:
            if v.study is not None:
                self.names.setdefault(v.study.describe(), set()).update(v.study.names(*v.claim.arms))

    def _repr_html_(self) -> str:
        parts = [
            f"<p>{html.escape(said[:1].upper() + said[1:])}.</p>{_folded(sorted(n))}"
            for said, n in self.names.items()
        ]
        body = "".join(parts) or "<p>No records yet.</p>"
        return f'<div class="mx-evidence"><p><strong>Evidence.</strong></p>{body}</div>'

    def __repr__(self) -> str:
        return (
            "; ".join(f"{said}: {', '.join(sorted(n))}" for said, n in self.names.items()) or "no records yet"
        )


def _folded(names: Sequence[str]) -> str:
    if not names:
        return ""
    items = "".join(f"<li><code>{html.escape(n)}</code></li>" for n in names)
    return f"<details><summary>{len(names)} records behind this page</summary><ul>{items}</ul></details>"


def gather(
    name: str, scale: str, *, recipes: Sequence[str] | None = None, store: Store | None = None, **overrides
) -> Evidence:
    """The records of the plan `name` at `scale`, trained first where scale is cpu and they are missing.

    overrides: `seeds`, or fields of TrainConfig; an empty or zero one is left to the scale.
    """
    store = store or Store()
    given = {k: v for k, v in overrides.items() if v}
    wanted = plan(name, scale, recipes=recipes, **given)
    if wanted.scale.name == "cpu" and any(store.get(c) is None for c in wanted.arms):
        summary = wanted.run(store)
        if summary.failed:
            arm, reason = next(iter(summary.failed.items()))
            raise UserError(f"arm {arm} failed: {reason}")
    names = list(dict.fromkeys(c.recipe for c in wanted.arms))
    fitting = [s for s in studies(store.load(scale)) if same_setting(s.config, wanted.arms[0])]
    study = max(fitting, key=lambda s: len(set(names) & s.arms.keys()), default=None)
    substitute = study is None or not set(names) & study.arms.keys()
    if substitute and not given:
        study = main_study(store, scale, arms=names)
    have = study.arms if study else {}
    missing = tuple(f"{c.recipe}-s{c.seed}" for c in wanted.arms if c.seed not in have.get(c.recipe, {}))
    return Evidence(
        wanted,
        study if study and set(names) & have.keys() else None,
        missing,
        substitute and study is not None,
    )
