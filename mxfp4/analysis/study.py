"""Studies: records that differ in recipe and seed alone, so that their differences are paired.

Records of one scale may still differ in model, corpus, budget or machine (a size axis, a second corpus, other
overrides of a plan); arms are compared within a study and never across two.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import pandas as pd

from mxfp4.analysis import stalled
from mxfp4.studies.store import Record
from mxfp4.text import count
from mxfp4.training.config import TrainConfig

ARM_FIELDS = (
    "recipe",
    "seed",
    "probe_steps",
    "light_probe_steps",
    "target_loss",
    "short_budgets",
    "decay_recipes",
    "final_forwards",
)
"""Fields of TrainConfig in which the records of a study may differ: none of them changes the data or the
model."""


@dataclass(frozen=True)
class Study:
    """Records of one setting, at most one for each recipe and seed."""

    records: tuple[Record, ...]

    @property
    def config(self) -> TrainConfig:
        """The configuration of one record: read from it what all of them share."""
        return self.records[0].config

    @property
    def scale(self) -> str:
        return self.config.scale

    @cached_property
    def arms(self) -> dict[str, dict[int, Record]]:
        """{recipe: {seed: record}}."""
        found: dict[str, dict[int, Record]] = {}
        for record in self.records:
            found.setdefault(record.config.recipe, {})[record.config.seed] = record
        return found

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(sorted({r.config.seed for r in self.records}))

    def without(self, seeds: Iterable[int]) -> Study:
        """The records of other seeds; there may be none."""
        left = set(seeds)
        return Study(tuple(r for r in self.records if r.config.seed not in left)) if left else self

    @property
    def parameters(self) -> int:
        """Parameters without the embedding and the LM head."""
        return self.config.model.n_params_non_embedding()

    @property
    def tokens(self) -> int:
        """The token budget of an arm."""
        return self.config.tokens

    @property
    def path(self) -> str:
        """native, emulated: how FP4 products were computed."""
        return self.records[0].paths[0]

    @property
    def fp8_path(self) -> str:
        """The same of FP8 products with one scale a tensor."""
        return self.records[0].paths[1]

    @property
    def gemm_backend(self) -> str | None:
        """What multiplied packed FP4; None where nothing did."""
        return self.records[0].gemm_backend

    def curves(self, arm: str) -> dict[int, pd.DataFrame]:
        """{seed: curve} of an arm; empty for an arm without records."""
        return {seed: record.curve for seed, record in self.arms.get(arm, {}).items()}

    def diverged(self, arm: str) -> tuple[int, ...]:
        """Seeds in which the arm diverged."""
        return tuple(s for s, r in sorted(self.arms.get(arm, {}).items()) if r.outcome["status"] == "diverged")

    def cut_short(self, arm: str) -> tuple[int, ...]:
        """Seeds in which the arm was ended before its budget, as it diverged or stalled: its last loss is no result."""
        return tuple(s for s, r in sorted(self.arms.get(arm, {}).items()) if r.outcome["status"] != "finished")

    @cached_property
    def _reference_curve(self) -> pd.DataFrame | None:
        gone = self.cut_short(stalled.REFERENCE)
        return stalled.mean_curve(c for seed, c in self.curves(stalled.REFERENCE).items() if seed not in gone)

    def ending(self, record: Record) -> str:
        """finished, diverged or stalled (`mxfp4.analysis.stalled`; without a BF16 run no arm is called stalled)."""
        return stalled.ending(record, self._reference_curve)

    def stalled(self, arm: str) -> tuple[int, ...]:
        """Seeds in which the arm stalled."""
        return tuple(s for s, r in sorted(self.arms.get(arm, {}).items()) if self.ending(r) == "stalled")

    @cached_property
    def probes(self) -> pd.DataFrame:
        """Probe rows of all arms: arm (what was trained), seed, recipe (what was applied), step, layer, gemm,
        ..."""
        frames = []
        for record in self.records:
            rows = record.probes
            if len(rows):
                own = {} if "recipe" in rows else {"recipe": record.config.recipe}
                frames.append(rows.assign(arm=record.config.recipe, seed=record.config.seed, **own))
        columns = ["arm", "seed", "recipe", "step", "layer", "gemm", "tensor", "metric", "value"]
        return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=columns)

    def describe(self, *arms: str) -> str:
        """One line: scale, model, corpus, tokens, arms, seeds, path. arms: counts these alone (default all)."""
        mine = {arm: found for arm, found in self.arms.items() if not arms or arm in arms}
        seeds = sorted({seed for found in mine.values() for seed in found})
        experts = f", {self.config.model.n_experts} experts" if self.config.model.n_experts else ""
        many = f"{len(mine)} arm{'s' if len(mine) != 1 else ''}"
        return (
            f"scale {self.scale}: {count(self.parameters)} non-embedding parameters{experts}, "
            f"{count(self.tokens)} tokens of {self.config.corpus} an arm, {many}, "
            f"seed{'s' if len(seeds) != 1 else ''} {', '.join(map(str, seeds))}, "
            f"{self.records[0].machine['device_type']}, FP4 {self.path}"
            + (f" by {self.gemm_backend}" if self.gemm_backend is not None else "")
            + (f", FP8 {self.fp8_path}" if self.fp8_path != self.path else "")
        )

    def names(self, *arms: str) -> list[str]:
        """Run ids of the records of `arms` (default all), sorted: what a page names as its evidence."""
        return sorted(r.run_id for r in self.records if not arms or r.config.recipe in arms)


def setting(config: TrainConfig) -> dict:
    """What the configurations of a study share."""
    return {k: v for k, v in config.to_dict().items() if k not in ARM_FIELDS}


def same_setting(a: TrainConfig, b: TrainConfig) -> bool:
    return setting(a) == setting(b)


def studies(records: Iterable[Record]) -> list[Study]:
    """The records sorted into studies, the largest budget of parameters times tokens first, then the most
    records. Those of the registered study and of trials, which are evaluated in several forwards, are judged by
    `registered_study` and are left out."""
    groups: dict[str, list[Record]] = {}
    for record in (r for r in records if not r.config.eval_forwards):
        what = [setting(record.config), record.machine["device_type"], record.paths, record.gemm_backend]
        groups.setdefault(json.dumps(what, sort_keys=True), []).append(record)
    # Of two records of an arm and seed the probed one counts: it comes last, and `arms` keeps the last.
    found = [Study(tuple(sorted(g, key=lambda r: (len(r.config.probe_steps), r.run_id)))) for g in groups.values()]
    return sorted(found, key=lambda s: (-s.parameters * s.tokens, -len(s.records), s.describe()))
