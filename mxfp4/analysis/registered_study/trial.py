"""The trial: a fixed quick protocol that compares a recipe with the reference arms.

On a GPU a trial arm is trained exactly like an arm of part `short` of the registered study (`study_arms`): source A,
9.7 M weights, 65 M tokens, a decay over the last 15 %, evaluated in its own forward and in a BF16 forward. The study's
records of that setting are read, also the branches of its longer runs at a third of their budget, which are the
same runs. On the CPU the protocol is a toy: it shows that a recipe trains and how the table reads. Its figures are no
evidence about large models, and all that comes from it is marked.

Records lie in runs/records/trial (toys: trial-toy), so that none counts as one of the study's. An arm that is itself one
of part `short` is the exception: its record is the study's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd
import torch

from mxfp4.analysis.registered_study.estimates import Estimate, paired, smallest_difference, smallest_effect
from mxfp4.analysis.stalled import ending, mean_curve
from mxfp4.errors import UserError
from mxfp4.layers.convert import convert
from mxfp4.layers.recipe import Recipe, recipe
from mxfp4.studies.arm_queue import Summary
from mxfp4.studies.plans import Plan
from mxfp4.studies.registered_arms import study_arms
from mxfp4.studies.registry import load_study
from mxfp4.studies.runner import run_plan
from mxfp4.studies.scales import CPU, GPU, Scale
from mxfp4.studies.store import Record, Store
from mxfp4.training.config import ModelConfig, TrainConfig
from mxfp4.training.forwards import OWN
from mxfp4.training.model import Llama

REFERENCES = ("bf16", "mxfp4", "mxfp4+h16", "ti2d")
"""Arms that the table shows beside the trial's where they have records."""
BASE, QUANTIZED = "bf16", "mxfp4"
"""The arms that differences are taken from; the first is trained where it has no record."""
FORWARDS = (OWN, "bf16")
SCALE, TOY_SCALE = "trial", "trial-toy"
TOY = TrainConfig(
    recipe=BASE, seed=0, scale=TOY_SCALE, corpus="known-entropy",
    model=ModelConfig(vocab_size=128, dim=64, n_layers=2, n_heads=2, n_kv_heads=2, ffn_dim=192, max_seq_len=64),
    seq_len=64, batch_size=16, steps=800, cooldown_steps=120, lr=4e-3, lr_min=0.0, warmup=40, eval_every=200,
    eval_sequences=64, final_eval_sequences=256, eval_forwards=("bf16",),
)  # fmt: skip
"""About a minute an arm on one core. BF16 ends 0.57 nats above the floor, and MXFP4 0.05 above BF16 (three seeds)."""
TOY_SCATTER = 0.01
"""Standard deviation over seeds of an arm's loss in the toy, nats: that of bf16 and mxfp4 over three seeds."""
EXACT_DF = 10_000
"""Degrees of freedom of a scatter that is assumed."""


def load_recipe(text: str) -> Recipe:
    """The recipe of a name or of a JSON file (a path has a slash or ends in .json). UserError in one line."""
    try:
        if "/" not in text and not text.endswith(".json"):
            return recipe(text)
    except ValueError as error:
        raise UserError(str(error)) from None
    try:
        content = Path(text).read_text(encoding="utf-8").strip()
        if not content.startswith("{"):
            raise UserError(f"{text} is not a recipe in JSON: it must be one object, as Recipe.to_json writes it")
        return recipe(content)
    except OSError as error:
        raise UserError(f"cannot read the recipe {text}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"the recipe {text} is not JSON: it is not UTF-8 text") from None
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"recipe {text}: {error}") from None


@dataclass(frozen=True)
class Protocol:
    """What a trial trains, and where else the same runs may have records."""

    base: TrainConfig
    """The BF16 arm of seed 0."""
    scale: Scale
    """How arms are executed."""
    registered: dict[tuple[str, int], list[tuple[TrainConfig, str]]]
    """{(recipe, seed): [(configuration of the study, its branch that is this run)]}; "" is the run itself."""

    @property
    def toy(self) -> bool:
        return self.base.scale == TOY_SCALE

    def config(self, text: str, seed: int) -> TrainConfig:
        """What is trained. text: `Recipe.to_text`."""
        own = [config for config, branch in self.registered.get((text, seed), ()) if not branch]
        return own[0] if own else replace(self.base, recipe=text, seed=seed)

    def sources(self, text: str, seed: int) -> list[tuple[TrainConfig, str]]:
        """Every (configuration, branch) whose record answers for this arm and seed, the study's first."""
        return [*self.registered.get((text, seed), ()), (replace(self.base, recipe=text, seed=seed), "")]


def protocol(device: torch.device) -> Protocol:
    """The trial of a device's type: part `short` of the study on a GPU, the toy elsewhere."""
    if device.type != "cuda":
        return Protocol(TOY, CPU, {})
    short = study_arms("short")
    registered = {(config.recipe, config.seed): [(config, "")] for config in short}
    for config in study_arms("main"):
        if short[0].steps in config.short_budgets:
            registered.setdefault((config.recipe, config.seed), []).append((config, str(short[0].steps)))
    base = replace(short[0], recipe=BASE, seed=0, scale=SCALE, probe_steps=(), light_probe_steps=())
    return Protocol(base, GPU, registered)


@dataclass(frozen=True)
class Run:
    """One arm and seed as the table reads it."""

    seed: int
    run_id: str
    status: str
    """finished, diverged or stalled."""
    excess: dict[str, float]
    """{forward: loss above the entropy of the source, nats a token}; infinite unless finished."""


@dataclass(frozen=True)
class Row:
    """One arm of the table. Excesses and differences are in nats a token, over seeds."""

    recipe: str
    trial: bool
    """Whether it is one of the recipes on trial, not a reference alone."""
    runs: tuple[Run, ...]
    excess: dict[str, Estimate]
    """{forward: mean excess}."""
    less: dict[str, Estimate]
    """{BASE or QUANTIZED: mean difference from it in the own forwards, by paired seeds}."""

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(run.seed for run in self.runs)

    @property
    def failed(self) -> dict[int, str]:
        """{seed: diverged or stalled}."""
        return {run.seed: run.status for run in self.runs if run.status != "finished"}


@dataclass(frozen=True)
class Resolution:
    """The smallest difference between two arms that seeds can show, with power 0.8."""

    scatter: float
    """Standard deviation over seeds of an arm's loss, nats."""
    df: int
    whence: str

    def nats(self, seeds: int) -> float:
        """With so many seeds of both arms. One seed has no scatter of its own and is judged by this one."""
        if seeds > 1:
            return smallest_difference(self.scatter, seeds)
        return smallest_effect(math.sqrt(2) * self.scatter, self.df)


@dataclass(frozen=True)
class Trial:
    """What a trial gave."""

    protocol: Protocol
    seeds: tuple[int, ...]
    rows: tuple[Row, ...]
    """References that are not on trial, then the recipes on trial."""
    resolution: Resolution
    added: tuple[int, ...]
    """Seeds of BASE that were not recorded on this kind of machine and were trained beside the recipes."""
    summary: Summary

    @property
    def setting(self) -> str:
        """One line: what each arm is."""
        config = self.protocol.base
        size, tokens = config.model.n_params_non_embedding() / 1e6, config.tokens / 1e6
        name = "Toy on the CPU" if self.protocol.toy else "Trial"
        seeds = f"seed{'s' * (len(self.seeds) > 1)} {', '.join(map(str, self.seeds))}"
        return f"{name}: {size:.2g} M weights, {tokens:.2g} M tokens of source A ({config.corpus}), {seeds}."

    @property
    def warning(self) -> str:
        """Of a toy, that it is one."""
        return "This is a toy: its figures are no evidence about large models." if self.protocol.toy else ""

    @property
    def notes(self) -> tuple[str, ...]:
        """What the table leaves out, and what was trained beside the recipes."""
        found = []
        if self.added:
            where = f"seed{'s' * (len(self.added) > 1)} {', '.join(map(str, self.added))}"
            found.append(f"{BASE} had no record of {where} on this kind of machine: trained as the pairs' reference.")
        lacking = [name for name in REFERENCES if name not in {row.recipe for row in self.rows}]
        if lacking:
            names = ", ".join(lacking)
            found.append(f"No record on this kind of machine, so left out: {names}. Name one to train it too.")
        return tuple(found)

    @property
    def resolution_text(self) -> str:
        """One or two sentences: the smallest difference that these seeds, and more of them, can show."""
        r, n = self.resolution, len(self.seeds)
        of = f"{n} seed{'s' * (n > 1)} of two arms"
        text = f"Smallest difference that {of} can show (power 0.8): {r.nats(n):.3f} nats"
        more = ", ".join(f"{r.nats(k):.3f} with {k}" for k in (3, 6) if k > n)
        text += f"; {more}" if more else ""
        return f"{text}. Losses scatter by {r.scatter:.4f} nats over seeds ({r.whence})."


def run_trial(
    recipes: Sequence[str], *, seeds: Sequence[int] = (0,), store: Store | None = None, device: torch.device,
    jobs: int | None = None, max_minutes: float | None = None, progress: bool = True,
) -> Trial:  # fmt: skip
    """Train what has no record yet, into the store, and compare.

    Args:
        recipes: Names or paths, see `load_recipe`.
        seeds: Of every recipe on trial.
        jobs: Arms at a time on each device; None: the scale's own number.
        max_minutes: Stop then, with checkpoints; the next call goes on.
        progress: A bar on stderr where that is a terminal.

    Raises:
        UserError: a recipe, a seed or a number of jobs that is not allowed, or no GPU where one is asked for.

    """
    if any(seed < 0 for seed in seeds):
        raise UserError(f"seed {min(seeds)} is not allowed; seeds are 0 or more")
    seeds, store, rules = tuple(dict.fromkeys(seeds)), store or Store(), protocol(device)
    texts = _texts(recipes)
    for name, text in texts.items():
        _check_fit(name, text, rules.base.model)
    lacking = tuple(seed for seed in seeds if not find(store, rules, BASE, seed, device))
    missing = [
        rules.config(text, seed)
        for seed in seeds
        for text in dict.fromkeys([BASE, *texts.values()] if seed in lacking else texts.values())
        if not find(store, rules, text, seed, device)
    ]
    summary = Summary()
    if missing:
        plan = Plan("trial-toy" if rules.toy else "trial", rules.scale, tuple(missing))
        summary = run_plan(
            plan, store, device=device, max_minutes=max_minutes, progress=progress,
            jobs=min(rules.scale.jobs, len(missing)) if jobs is None else jobs,
        )  # fmt: skip
    found = table(store, rules, texts, seeds, device)
    return Trial(rules, seeds, found, resolution(found, rules), () if BASE in texts else lacking, summary)


def _texts(recipes: Iterable[str]) -> dict[str, str]:
    """{name: canonical text}."""
    texts: dict[str, str] = {}
    for made in map(load_recipe, recipes):
        if texts.setdefault(made.name, made.to_text()) != made.to_text():
            raise UserError(f"two of the recipes are called {made.name!r} and differ; give one of them another name")
    return texts


def _check_fit(name: str, text: str, model: ModelConfig) -> None:
    """UserError where the trial's model has a layer that the recipe cannot quantize."""
    try:
        with torch.device("meta"):
            convert(Llama(model), text)
    except ValueError as error:
        raise UserError(f"recipe {name!r} does not fit the trial's model: {error}") from None


def find(store: Store, rules: Protocol, text: str, seed: int, device: torch.device) -> tuple[Record, str] | None:
    """The record of an arm and seed on this kind of machine, and its branch that is the run; None without one."""
    for config, branch in rules.sources(text, seed):
        if (record := store.get(config, device)) is not None:
            return record, branch
    return None


def table(
    store: Store, rules: Protocol, texts: dict[str, str], seeds: Sequence[int], device: torch.device
) -> tuple[Row, ...]:
    """The rows that the records give. texts: {name: canonical text} of the recipes on trial; a reference is shown with
    every seed that it has, a recipe that is none with `seeds`."""
    own = store.load(rules.base.scale)
    records: dict[str, list[tuple[Record, str]]] = {}
    for name, text in {**{name: name for name in REFERENCES}, **texts}.items():
        every = {seed for arm, seed in rules.registered if arm == text} | {r.config.seed for r in own}
        wanted = sorted({*seeds, *every}) if name in REFERENCES else sorted(seeds)
        records[name] = [found for seed in wanted if (found := find(store, rules, text, seed, device))]
    curve = mean_curve(record.curve for record, _ in records[BASE])
    runs = {name: tuple(_run(*one, rules, curve) for one in found) for name, found in records.items() if found}
    order = [*(name for name in runs if name not in texts), *(name for name in texts if name in runs)]
    bases = {name: _values(runs[name], OWN) for name in (BASE, QUANTIZED) if name in runs}
    return tuple(_row(name, name in texts, runs[name], bases) for name in order)


def _run(record: Record, branch: str, rules: Protocol, curve: pd.DataFrame | None) -> Run:
    config, rows, status = record.config, record.evaluations, ending(record, curve)
    rows = rows[(rows["branch"] == branch) & (rows["step"] == rules.base.steps)].set_index("forward")
    if branch:
        status = "finished" if len(rows) else "diverged"
    excess = dict.fromkeys(FORWARDS, math.inf)
    if status == "finished":
        floor = record.windows["floor"]
        excess = {f: float(rows.loc[f, "loss"] - floor[: int(rows.loc[f, "windows"])].mean()) for f in FORWARDS}
    return Run(config.seed, record.run_id, status, excess)


def _values(runs: Iterable[Run], forward: str) -> pd.Series:
    """{seed: excess}."""
    return pd.Series({run.seed: run.excess[forward] for run in runs}, dtype=float)


def _row(name: str, on_trial: bool, runs: tuple[Run, ...], bases: dict[str, pd.Series]) -> Row:
    values = {forward: _values(runs, forward) for forward in FORWARDS}
    excess = {forward: paired(v, pd.Series(0.0, index=v.index)) for forward, v in values.items()}
    less = {base: paired(values[OWN], theirs) for base, theirs in bases.items() if base != name}
    return Row(name, on_trial, runs, excess, less)


def resolution(rows: Iterable[Row], rules: Protocol) -> Resolution:
    """What seeds can show: from the scatter of the references, else of all arms, else as assumed."""
    rows = list(rows)
    for kind, chosen in (("the references'", [r for r in rows if r.recipe in REFERENCES]), ("the trial's own", rows)):
        values = [_values(r.runs, OWN) for r in chosen if not r.failed and len(r.runs) > 1]
        if values:
            df = sum(len(v) - 1 for v in values)
            scatter = math.sqrt(sum((len(v) - 1) * v.var(ddof=1) for v in values) / df)
            return Resolution(scatter, df, f"{kind} records, {df} degrees of freedom")
    if rules.toy:
        return Resolution(TOY_SCATTER, EXACT_DF, "as measured once for the toy")
    return Resolution(load_study().analysis.detectable[0]["scatter"], EXACT_DF, "as the study assumes")
