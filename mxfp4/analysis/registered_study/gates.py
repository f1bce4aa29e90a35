"""The gates that source A passes, on BF16 alone, before the study's main runs.

| gate        | asks                                                                                              |
|-------------|---------------------------------------------------------------------------------------------------|
| slope       | does the loss still fall, so that a cost in tokens is a cost in loss: 9.7 M weights, 195 M tokens |
| slope_large | the same at 29.5 M weights and 590 M tokens                                                       |
| scatter     | do seeds end close together, so that a few of them show small costs                               |
| kurtosis x, | are the blocks of X and G, which MXFP4 rounds, as peaked as on text                               |
| kurtosis g  |                                                                                                   |
"""

from __future__ import annotations

import math

import pandas as pd

from mxfp4.studies.registry import RegisteredStudy

REFERENCE = "bf16"


def gates(study: RegisteredStudy, runs: pd.DataFrame, probes: pd.DataFrame) -> pd.DataFrame:
    """gate, value, bound, passed (None where records are missing), n (seeds), of the tables of `tables`.

    Slopes are in nats an e-fold of tokens, the scatter in nats, kurtosis as the relative difference from text's.
    """
    bounds = study.analysis.gates
    rows = [("slope", *_slope(runs, "main"), 1), ("slope_large", *_slope(runs, "ladder"), 1)]
    final = _finals(runs, "main", "full")
    rows.append(("scatter", float(final.std()) if len(final) > 1 else math.nan, len(final), -1))
    for tensor in ("x", "g"):
        rows.append((f"kurtosis {tensor}", *_kurtosis(probes, f"{tensor}-kurtosis"), -1))
    found = []
    for gate, value, n, side in rows:
        bound = bounds[gate.split()[0]]
        passed = None if math.isnan(value) else bool(value >= bound if side > 0 else abs(value) <= bound)
        found.append({"gate": gate, "value": value, "bound": bound, "passed": passed, "n": n})
    return pd.DataFrame(found)


def _finals(runs: pd.DataFrame, part: str, budget: str) -> pd.Series:
    rows = runs[
        (runs["runs"] == part) & (runs["arm"] == REFERENCE) & (runs["forward"] == "own") & (runs["budget"] == budget)
    ]
    return rows.set_index("seed")["loss"].astype(float).dropna()


def _slope(runs: pd.DataFrame, part: str) -> tuple[float, int]:
    """Fall of the loss from a third of the budget to the whole, an e-fold of tokens; and how many seeds."""
    falls = (_finals(runs, part, "third") - _finals(runs, part, "full")).dropna()
    return (float(falls.mean()) / math.log(3) if len(falls) else math.nan), len(falls)


def _kurtosis(probes: pd.DataFrame, probe: str) -> tuple[float, int]:
    """Relative difference of the block kurtosis of what MXFP4 rounds in BF16's runs, source A from text."""
    rows = probes[(probes["probe"] == probe) & (probes["arm"] == "mxfp4")]
    ours, theirs = (rows[rows["runs"] == part]["value"] for part in ("main", "text"))
    n = min(len(ours), len(theirs))
    return (float(ours.mean() / theirs.mean()) - 1 if n else math.nan), n
