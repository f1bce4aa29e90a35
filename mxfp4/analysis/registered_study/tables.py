"""From records to the tables that the registered study is judged by (`contrasts`).

A record belongs to a part of the study when its configuration is one of the part's. One run gives rows for several
budgets (its branches) and forwards; a decay in BF16 gives rows of the part bf16-decay.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import pandas as pd

from mxfp4.analysis.stalled import REFERENCE, ending, mean_curve
from mxfp4.studies.registered_arms import CORPORA, DECAYED, study_arms
from mxfp4.studies.registry import Probe, RegisteredStudy
from mxfp4.studies.store import Record
from mxfp4.training.config import TrainConfig
from mxfp4.training.forwards import OWN

LAST_STEPS = 64
"""Steps over which the training loss is averaged."""
COLUMNS = [
    "runs",
    "arm",
    "seed",
    "budget",
    "forward",
    "loss",
    "excess",
    "training",
    "top1",
    "copying",
    "status",
    "run_id",
]
PROBE_COLUMNS = ["runs", "arm", "seed", "probe", "value"]


def members(
    study: RegisteredStudy, records: Iterable[Record], text: str = CORPORA["B"]
) -> dict[str, list[Record]]:  # fmt: skip
    """{part of the study: its records}, parts without records left out. text: the corpus of source B."""
    by_config = {record.config: record for record in records}
    arms = {part: study_arms(part, text) for part in study.runs if part != DECAYED}
    found = {part: [by_config[c] for c in configs if c in by_config] for part, configs in arms.items()}
    return {part: records for part, records in found.items() if records}


def runs_table(study: RegisteredStudy, records: Iterable[Record], text: str = CORPORA["B"]) -> pd.DataFrame:
    """The table of runs: see `contrasts`, and run_id."""
    rows: list[dict] = []
    for part, found in members(study, records, text).items():
        reference = mean_curve(r.curve for r in found if r.config.recipe == REFERENCE)
        for record in found:
            rows += _run_rows(part, record, reference)
    return pd.DataFrame(rows, columns=COLUMNS)


def _run_rows(part: str, record: Record, reference: pd.DataFrame | None) -> Iterator[dict]:
    config = record.config
    status = ending(record, reference)
    evaluations = record.evaluations
    for branch, budget in budgets(config).items():
        is_decay = branch in config.decay_recipes
        rows = evaluations[(evaluations["branch"] == branch) & (evaluations["step"] == _end(config, branch))]
        about = {"runs": DECAYED if is_decay else part, "arm": config.recipe, "seed": config.seed, "budget": budget,
                 "run_id": record.run_id}  # fmt: skip
        if rows.empty:  # it did not come so far
            for forward in (OWN, *config.eval_forwards):
                yield {**about, "forward": forward, "status": "stalled" if status == "stalled" else "diverged",
                       "loss": math.nan}  # fmt: skip
            continue
        training = _last_training_loss(record, branch)
        for row in rows[rows["forward"].isin([OWN, *config.eval_forwards])].itertuples():
            yield {
                **about, "forward": row.forward, "loss": row.loss, "excess": row.loss - _floor(record, row.windows),
                "training": training, "top1": row.top1, "copying": row.copy_top1,
                "status": status if budget == "full" and not is_decay else "finished",
            }  # fmt: skip


def budgets(config: TrainConfig) -> dict[str, str]:
    """{branch: name of its budget in the study}; the run itself is the branch ""."""
    thirds = {1: "third", 2: "two_thirds"}
    short = {str(b): thirds.get(round(3 * b / config.steps), str(b)) for b in config.short_budgets}
    return {"": "full", **short, **dict.fromkeys(config.decay_recipes, "full")}


def _end(config: TrainConfig, branch: str) -> int:
    return int(branch) if branch.isdigit() else config.steps


def _floor(record: Record, windows: int) -> float:
    return float(record.windows["floor"][:windows].mean()) if "floor" in record.windows else math.nan


def _last_training_loss(record: Record, branch: str) -> float:
    rows = record.branches[record.branches["branch"] == branch] if branch else record.curve
    return float(rows["train_loss"].dropna().tail(LAST_STEPS).mean())


def probes_table(study: RegisteredStudy, records: Iterable[Record], text: str = CORPORA["B"]) -> pd.DataFrame:
    """The table of probes: means over layers and probed steps, one number a probe, recipe that was applied, and seed."""
    rows: list[dict] = []
    for part, found in members(study, records, text).items():
        for record in found:
            for name, probe in study.probes.items():
                if probe.of == "bf16" and record.config.recipe != "bf16":
                    continue
                means = _probe_means(record.probes, probe)
                if probe.of == OWN:
                    means = means[means.index == record.config.recipe]
                about = {"runs": part, "seed": record.config.seed, "probe": name}
                rows += [{**about, "arm": recipe, "value": float(value)} for recipe, value in means.items()]
    return pd.DataFrame(rows, columns=PROBE_COLUMNS)


def _probe_means(rows: pd.DataFrame, probe: Probe) -> pd.Series:
    """{recipe: mean over layers, then over steps}."""
    rows = rows[(rows["metric"] == probe.metric) & (rows["gemm"] == probe.gemm) & (rows["tensor"] == probe.tensor)]
    rows = rows[(rows["layer"] != "all") & rows["value"].notna()]
    if probe.steps == "last" and len(rows):
        rows = rows[rows["step"] == rows["step"].max()]
    return rows.groupby(["recipe", "step"])["value"].mean().groupby("recipe").mean()


def matrix(records: Iterable[Record]) -> pd.DataFrame:
    """Trained in, evaluated in: arm, seed, forward, loss, top1, copying, of the last evaluation of each run."""
    rows = []
    for record in records:
        last = record.evaluations
        last = last[(last["branch"] == "") & (last["step"] == record.config.steps)]
        rows.append(last.assign(arm=record.config.recipe, seed=record.config.seed, run_id=record.run_id))
    frame = pd.concat(rows, ignore_index=True) if rows else pd.DataFrame(columns=["arm", "seed", "forward", "loss"])
    return frame.rename(columns={"copy_top1": "copying"}).drop(columns=["branch", "step"], errors="ignore")
