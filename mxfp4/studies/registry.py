"""The registered study: reads and checks book/study.yml, and finds in git when each claim was written and changed.

The file holds the runs, the claims and the rules that judge them. `load_study` turns it into dataclasses and refuses
what it does not know. `registrations` reads the file's history: a claim's commit is computed, never typed.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable
from dataclasses import MISSING, dataclass, field, fields
from itertools import combinations, product
from pathlib import Path
from typing import Any

import yaml

from mxfp4.directories import checkout, project_dir
from mxfp4.errors import UserError
from mxfp4.layers.recipe import recipe

PAPERS = ("P1", "P2", "press", "ours")
KINDS = ("primary", "exploratory")
RULES = ("below", "above", "equal", "different", "in_seeds")
BUDGETS = ("full", "third", "two_thirds")
TABLE1 = "table1"
"""The predictor that ranks arms by the overheads of P1's Table 1."""


@dataclass(frozen=True)
class Runs:
    """Arms that share source, model, budget and batches."""

    source: str
    """A key of the study's sources."""
    weights: int
    tokens: int
    """Full token budget of an arm."""
    tokens_a_step: int
    budgets: list[str]
    """Where a branch decays: full, third, two_thirds of the budget."""
    arms: dict[str, int]
    """{recipe name: count of seeds}."""
    borrows: dict[str, str] = field(default_factory=dict)
    """{runs, budget}: branches of another entry that are the same runs as a full budget here."""


@dataclass(frozen=True)
class Factorial:
    """A full factorial of two-level factors."""

    runs: str
    base: str
    """Recipe that every cell starts from."""
    factors: dict[str, list[str]]
    """{factor: [modifier at level 0, modifier at level 1]}; "" adds nothing."""
    joint: dict[str, list[str]] = field(default_factory=dict)
    """{modifier: [modifiers that it stands for together]}."""

    def cells(self) -> list[tuple[dict[str, int], str]]:
        """({factor: level}, arm) of every cell."""
        return [(dict(zip(self.factors, levels, strict=True)), self._arm(levels)) for levels in
                product((0, 1), repeat=len(self.factors))]  # fmt: skip

    def _arm(self, levels: tuple[int, ...]) -> str:
        modifiers = [pair[level] for pair, level in zip(self.factors.values(), levels, strict=True) if pair[level]]
        for name, parts in self.joint.items():
            if set(parts) <= set(modifiers):
                first = modifiers.index(parts[0])
                modifiers = [name if i == first else m for i, m in enumerate(modifiers) if i == first or m not in parts]
        return "+".join([self.base, *modifiers])

    def effects(self) -> list[str]:
        """Main effects "W" and two-way interactions "W:X"."""
        return [*self.factors, *(":".join(pair) for pair in combinations(self.factors, 2))]


@dataclass(frozen=True)
class Probe:
    """A quantity that a probe measures in a run (see `mxfp4.diagnostics.probe`)."""

    metric: str
    gemm: str
    tensor: str
    of: str
    """own: tensors of the arm's own run; bf16: the recipe applied to the tensors of the BF16 run."""
    steps: str = "all"
    """Steps that the mean is over: all probed ones, or the last."""


@dataclass(frozen=True)
class Analysis:
    """The numbers and the sentences that judge the claims."""

    confidence: float
    family_error: float
    equivalence: dict[str, float]
    """{margin: nats, confidence}."""
    power: float
    probe_seeds: int
    gates: dict[str, float]
    """Bounds that source A must pass on BF16: see `gates.gates`."""
    detectable: list[dict[str, float]]
    """Rows {scatter, last, first}, nats."""
    outcomes: dict[str, str]
    rules: list[str]
    verdicts: dict[str, str]


@dataclass(frozen=True)
class Contrast:
    """What is compared. One of four forms: arm (with or without reference), weights, arms (a rank correlation of
    their costs with the predictor), factorial."""

    outcome: str
    arm: str = ""
    reference: str = ""
    weights: dict[str, float] = field(default_factory=dict)
    """{arm: weight} of a linear combination."""
    arms: list[str] = field(default_factory=list)
    predictor: str = ""
    """A probe, or table1."""
    probe: str = ""
    factorial: str = ""
    effect: str = ""
    """A factor, or two of them apart by a colon."""
    budget: str = "full"

    @property
    def terms(self) -> dict[str, float]:
        """{arm: weight} of a difference or a linear combination."""
        return self.weights or {self.arm: 1.0, **({self.reference: -1.0} if self.reference else {})}

    @property
    def names(self) -> list[str]:
        """The arms that are named, the reference last."""
        return list(dict.fromkeys(filter(None, [self.arm, *self.weights, *self.arms, self.reference])))


@dataclass(frozen=True)
class Rule:
    """What must be true of the contrast."""

    kind: str
    """below, above, equal (within), different (from), in_seeds."""
    bound: float | str
    """A number; all or none for in_seeds."""


@dataclass(frozen=True)
class Claim:
    """One registered claim."""

    id: str
    paper: str
    question: str
    kind: str
    """primary or exploratory."""
    claim: str
    """The claim in our words, one sentence."""
    runs: str
    contrast: Contrast
    holds: Rule
    fails_when: str
    """What would make it not hold."""
    other_runs: str = ""
    """Runs whose same contrast is taken off: the claim is about the difference of the two."""
    reference_runs: str = ""
    """Runs that the reference is of, where they are not the arm's."""


@dataclass(frozen=True)
class RegisteredStudy:
    """The whole of book/study.yml."""

    sources: dict[str, str]
    runs: dict[str, Runs]
    factorials: dict[str, Factorial]
    analysis: Analysis
    probes: dict[str, Probe]
    questions: dict[str, str]
    claims: list[Claim]

    @property
    def primaries(self) -> list[Claim]:
        return [c for c in self.claims if c.kind == "primary"]

    def claim(self, name: str) -> Claim:
        by_id = {c.id: c for c in self.claims}
        return by_id[_one_of("claim", name, by_id)]

    def arms(self, runs: str) -> dict[str, int]:
        """{arm: count of seeds} of an entry of runs, with the arms that it borrows."""
        own = self.runs[runs]
        return {**(self.arms(own.borrows["runs"]) if own.borrows else {}), **own.arms}

    def seeds(self, claim: Claim) -> int:
        """The count of seeds that every arm of the claim has."""
        arms, contrast = self.arms(claim.runs), claim.contrast
        if contrast.factorial:
            return min(arms[arm] for _, arm in self.factorials[contrast.factorial].cells())
        if contrast.probe and self.probes[contrast.probe].of == "bf16":
            return min(self.analysis.probe_seeds, arms["bf16"])
        if contrast.outcome == "misses":  # the reference enters by the mean over its own seeds
            return arms[contrast.arm]
        others = self.arms(claim.reference_runs or claim.runs)
        counts = [(others if name == contrast.reference else arms)[name] for name in contrast.names]
        probed = contrast.probe or contrast.predictor in self.probes
        return min([*counts, self.analysis.probe_seeds] if probed else counts)


def study_path() -> Path:
    """The file of the registered study."""
    return project_dir() / "book" / "study.yml"


def load_study(path: Path | str | None = None) -> RegisteredStudy:
    """The study of a file, checked. UserError names the value that is wrong and what is allowed."""
    if path is None:
        checkout("the registered study")
    path = Path(path) if path is not None else study_path()
    try:
        data = yaml.safe_load(path.read_text())
    except OSError as error:
        raise UserError(f"cannot read the study {path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        raise UserError(f"the study {path} is not YAML{f' at line {mark.line + 1}' if mark else ''}") from None
    study = _build(RegisteredStudy, data, f"study {path.name}")
    _check_runs(study)
    seen: set[str] = set()
    for claim in study.claims:
        if claim.id in seen:
            raise UserError(f"claim {claim.id!r} is in the study twice; ids are unique")
        seen.add(claim.id)
        try:
            _check_claim(study, claim)
        except UserError as error:
            raise UserError(f"claim {claim.id!r}: {error}") from None
    return study


_PARTS = {"runs": Runs, "factorials": Factorial, "probes": Probe}


def _build(cls: type, data: Any, where: str) -> Any:
    """A dataclass of this module from plain data; unknown and missing fields are refused."""
    if not isinstance(data, dict):
        raise UserError(f"{where} is not a set of fields; it needs: {', '.join(f.name for f in fields(cls))}")
    known = [f.name for f in fields(cls)]
    for name in data:
        _one_of(f"{where}: field", name, known)
    for f in fields(cls):
        if f.name not in data and f.default is MISSING and f.default_factory is MISSING:
            raise UserError(f"{where} lacks the field {f.name!r}")
    data = dict(data)
    if cls is RegisteredStudy:
        for name, part in _PARTS.items():
            data[name] = {key: _build(part, value, f"{name} {key!r}") for key, value in data[name].items()}
        data["analysis"] = _build(Analysis, data["analysis"], "analysis")
        names = [c.get("id") if isinstance(c, dict) else c for c in data["claims"]]
        data["claims"] = [_build(Claim, c, f"claim {n!r}") for c, n in zip(data["claims"], names, strict=True)]
    if cls is Claim:
        where, holds = f"claim {data['id']!r}", data["holds"]
        if not isinstance(holds, dict) or len(holds) != 1:
            raise UserError(f"{where}: holds={holds!r} is not one rule; allowed: {', '.join(RULES)}")
        data["holds"] = Rule(*next(iter(holds.items())))
        data["contrast"] = _build(Contrast, data["contrast"], f"{where}: contrast")
    return cls(**data)


def _one_of(what: str, value: str, allowed: Iterable[str]) -> str:
    allowed = list(allowed)
    if value not in allowed:
        raise UserError(f"{what} {value!r} is not known; allowed: {', '.join(allowed)}")
    return value


def _check_runs(study: RegisteredStudy) -> None:
    for name, runs in study.runs.items():
        _one_of(f"runs {name!r}: source", runs.source, study.sources)
        for budget in runs.budgets:
            _one_of(f"runs {name!r}: budget", budget, BUDGETS)
        for arm, seeds in runs.arms.items():
            if not isinstance(seeds, int) or seeds < 1:
                raise UserError(f"runs {name!r}: arm {arm!r} has {seeds!r} seeds; allowed: 1 or more")
        if runs.borrows:
            _one_of(f"runs {name!r}: borrows runs", runs.borrows.get("runs", ""), set(study.runs) - {name})
            _one_of(f"runs {name!r}: borrows budget", runs.borrows.get("budget", ""), BUDGETS)
    for name, factorial in study.factorials.items():
        _one_of(f"factorial {name!r}: runs", factorial.runs, study.runs)
        for _, arm in factorial.cells():
            _one_of(f"factorial {name!r}: arm", arm, study.arms(factorial.runs))


def _check_claim(study: RegisteredStudy, claim: Claim) -> None:
    c, rule = claim.contrast, claim.holds
    _one_of("paper", claim.paper, PAPERS)
    _one_of("kind", claim.kind, KINDS)
    _one_of("question", claim.question, study.questions)
    for name in filter(None, (claim.runs, claim.other_runs, claim.reference_runs)):
        _one_of("runs", name, study.runs)
    _one_of("outcome", c.outcome, study.analysis.outcomes)
    _one_of("budget", c.budget, study.runs[claim.runs].budgets)
    _one_of("rule", rule.kind, RULES)
    if rule.kind == "in_seeds":
        _one_of("in_seeds", rule.bound, ("all", "none"))
    elif isinstance(rule.bound, bool) or not isinstance(rule.bound, (int, float)):
        raise UserError(f"bound {rule.bound!r} of {rule.kind} is not a number")
    if (c.outcome in ("misses", "stalled")) != (rule.kind == "in_seeds"):
        raise UserError(f"rule {rule.kind!r} does not fit outcome {c.outcome!r}; in_seeds goes with misses and stalled")
    if sum(map(bool, (c.arm, c.weights, c.arms, c.factorial))) != 1:
        raise UserError("the contrast needs exactly one of: arm, weights, arms, factorial")
    if c.factorial:
        _one_of("factorial", c.factorial, study.factorials)
        _one_of("effect", c.effect, study.factorials[c.factorial].effects())
    if c.arms:
        _one_of("predictor", c.predictor, [TABLE1, *study.probes])
    if (c.factorial or c.arms) and rule.bound != 0:
        raise UserError(f"bound {rule.bound!r}: the bound of a factorial effect or a rank correlation is 0")
    if (c.outcome == "probe") != bool(c.probe):
        raise UserError("a contrast has the outcome probe and names a probe, or neither")
    if c.probe and study.probes[_one_of("probe", c.probe, study.probes)].of == "bf16":
        for arm in c.names:
            try:
                recipe(arm)
            except ValueError as error:
                raise UserError(str(error)) from None
        return
    for arm in c.names:
        of = claim.reference_runs if arm == c.reference and claim.reference_runs else claim.runs
        for runs in filter(None, (of, claim.other_runs)):
            _one_of(f"arm of runs {runs!r}", arm, study.arms(runs))


# History. What a claim says is its entry and what the entry refers to: the setting and the seeds of its runs, its
# probe, its factorial. Comments, order and layout of the file are not part of it.


@dataclass(frozen=True)
class Registration:
    """When a claim was written and changed."""

    registered: str | None
    """The first commit that holds the claim with its present text; None where there is none (see `note`)."""
    changed: tuple[str, ...] = ()
    """The commits that changed the claim after the commit that added it, oldest first."""
    note: str = ""
    """Why no commit is given."""


def registrations(path: Path | str | None = None) -> dict[str, Registration]:
    """{claim id: registration}, and one more for "analysis", from the history of the study's file."""
    path = (Path(path) if path is not None else study_path()).resolve()
    present = claim_texts(yaml.safe_load(path.read_text()))
    commits, note = _commits(path)
    history: dict[str, list[tuple[str, str | None]]] = {name: [] for name in present}
    for commit in commits:
        try:
            texts = claim_texts(yaml.safe_load(_git(path.parent, "show", f"{commit}:./{path.name}") or ""))
        except yaml.YAMLError:
            continue
        for name, seen in history.items():
            text = texts.get(name)
            if text != (seen[-1][1] if seen else None):
                seen.append((commit, text))
    found = {}
    for name, seen in history.items():
        first = next((commit for commit, text in seen if text == present[name]), None)
        changed = tuple(commit for commit, _ in seen[1:])
        found[name] = Registration(first, changed, "" if first else note or "this text is not committed")
    return found


def changed_after(registration: Registration, commit: str, path: Path | str | None = None) -> tuple[str, ...]:
    """The changes of a claim that `commit`, such as that of the study's first record, does not contain."""
    folder = (Path(path) if path is not None else study_path()).resolve().parent
    return tuple(c for c in registration.changed if _git(folder, "merge-base", "--is-ancestor", c, commit) is None)


def claim_texts(data: Any) -> dict[str, str]:
    """{claim id: what it says}, and "analysis", of a study's plain data; any version of the file is read."""
    if not isinstance(data, dict):
        return {}
    runs = {k: v for k, v in (data.get("runs") or {}).items() if isinstance(v, dict)}
    texts = {"analysis": json.dumps(data.get("analysis"), sort_keys=True)}
    for entry in data.get("claims") or []:
        contrast = entry.get("contrast") or {}
        naming = {k: contrast[k] for k in ("arm", "reference", "weights", "arms") if contrast.get(k)}
        named = Contrast("", **naming).names
        said: dict[str, Any] = {"claim": entry}
        for name in filter(None, (entry.get(k) for k in ("runs", "other_runs", "reference_runs"))):
            of = runs.get(name, {})
            seeds = {arm: n for arm, n in (of.get("arms") or {}).items() if arm in named}
            said[f"runs {name}"] = {**{k: v for k, v in of.items() if k != "arms"}, "seeds": seeds}
        for part, key in (("probes", "probe"), ("probes", "predictor"), ("factorials", "factorial")):
            said[key] = (data.get(part) or {}).get(contrast.get(key))
        texts[str(entry.get("id"))] = json.dumps(said, sort_keys=True)
    return texts


def _commits(path: Path) -> tuple[list[str], str]:
    """The commits that changed a file, oldest first, and why there are none."""
    if _git(path.parent, "rev-parse", "--is-inside-work-tree") != "true":
        return [], "not a git checkout"
    if _git(path.parent, "rev-parse", "--is-shallow-repository") == "true":
        return [], "the checkout holds only the last part of its history; git fetch --unshallow gets the rest"
    listed = _git(path.parent, "log", "--reverse", "--topo-order", "--format=%H", "--", path.name)
    return (listed or "").split(), ""


def _git(folder: Path, *arguments: str) -> str | None:
    """What a git command prints; None where it fails or there is no git."""
    try:
        done = subprocess.run(["git", "-C", folder, *arguments], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
