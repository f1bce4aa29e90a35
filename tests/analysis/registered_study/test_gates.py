"""The gates of source A, on made-up tables."""

import math

import numpy as np
import pandas as pd
import pytest

from mxfp4.analysis.registered_study.gates import gates
from mxfp4.analysis.registered_study.tables import COLUMNS, PROBE_COLUMNS
from mxfp4.studies.registry import load_study

STUDY = load_study()


def runs(part="main", full=(3.0, 3.004, 2.996), fall=0.22, arm="bf16"):
    rows = []
    for seed, loss in enumerate(full):
        for budget, add in (("full", 0.0), ("third", fall)):
            rows.append(
                {"runs": part, "arm": arm, "seed": seed, "budget": budget, "forward": "own", "loss": loss + add}
            )
            rows.append({**rows[-1], "forward": "bf16", "loss": 99.0})
    return pd.DataFrame(rows, columns=COLUMNS)


def probes(**values):
    rows = [
        (part, "mxfp4", 0, f"{tensor}-kurtosis", v)
        for part, pair in values.items()
        for tensor, v in zip("xg", pair, strict=True)
    ]
    return pd.DataFrame(rows, columns=PROBE_COLUMNS)


def by_gate(*tables):
    return gates(STUDY, *tables).set_index("gate")


def test_a_good_source_passes():
    found = by_gate(
        pd.concat([runs(), runs("ladder", full=(2.5,), fall=0.1)]), probes(main=(6.0, 8.0), text=(5.5, 9.0))
    )
    assert found["passed"].tolist() == [True] * 5
    assert found.loc["slope", "value"] == pytest.approx(0.22 / math.log(3))
    assert found.loc["scatter", "value"] == pytest.approx(np.std([3.0, 3.004, 2.996], ddof=1))
    assert found.loc["kurtosis g", "value"] == pytest.approx(8 / 9 - 1) and found.loc["slope", "n"] == 3


def test_each_gate_can_fail():
    table = pd.concat([runs(full=(3.0, 3.02, 2.98), fall=0.1), runs("ladder", full=(2.5,), fall=0.05)])
    found = by_gate(table, probes(main=(8.0, 4.0), text=(5.5, 9.0)))
    assert found["passed"].tolist() == [False] * 5


def test_without_records_no_gate_is_passed_or_failed():
    found = by_gate(runs()[:0], probes())
    assert found["passed"].tolist() == [None] * 5
    assert by_gate(runs(full=(3.0,)), probes()).loc["scatter", "passed"] is None  # one seed has no scatter
    assert by_gate(runs(arm="mxfp4"), probes()).loc["slope", "passed"] is None
