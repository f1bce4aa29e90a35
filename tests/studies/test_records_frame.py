"""One table of all evaluations: of new records, of old ones, and the way to read another kind of table."""

from __future__ import annotations

import glob
import math
import subprocess
import sys

import pandas as pd
import pytest

import mxfp4
from mxfp4.errors import UserError
from mxfp4.studies.records_frame import COLUMNS
from mxfp4.studies.store import Store
from mxfp4.training.protocols import TrainResult
from tests.fakes.studies import config, put


@pytest.fixture
def store(monkeypatch, tmp_path):
    """One old record at scale gpu; at scale cpu one with evaluations in two forwards."""
    monkeypatch.setenv("MXFP4_RUNS", str(tmp_path))
    store = Store()
    put(store, config("mxfp4", 1))
    c = config(
        "bf16", scale="cpu", steps=100, eval_every=100, cooldown_steps=10, eval_forwards=("bf16",), short_budgets=(50,)
    )
    rows = [
        {"branch": branch, "step": step, "tokens": step * c.tokens_per_step, "forward": forward, "windows": 16,
         "loss": 2.5, "top1": 0.4, "copy_top1": math.nan}
        for branch, step in (("", 0), ("50", 50), ("", 100))
        for forward in ("own", "bf16")
    ]  # fmt: skip
    curve = [
        {"step": s, "tokens": s, "train_loss": 3.0, "grad_norm": 1.0, "eval_loss": 2.5, "eval_loss_bf16": 2.5}
        for s in (0, 100)
    ]
    outcome = {"status": "finished", "step": 100, "tokens": 1, "reason": None, "final_loss": 2.5, "final_bpb": 1.0,
               "target": None}  # fmt: skip
    timings = {"train_seconds": 1.0, "evaluate_seconds": 0.1, "tokens_per_second": 1.0}
    store.put(c, TrainResult(curve, [], [], outcome, timings, None, rows, [], {"own": [2.5]}), "cpu")
    return store


def test_every_evaluation_is_a_row(store):
    frame = mxfp4.records()
    assert list(frame.columns) == list(COLUMNS) and set(frame["scale"]) == {"cpu", "gpu"}
    new = mxfp4.records("cpu")
    assert len(new) == 6 and list(new["branch"].unique()) == ["", "50"] and set(new["forward"]) == {"own", "bf16"}
    assert set(new["arm"]) == {"bf16"} and set(new["windows"]) == {16} and set(new["top1"]) == {0.4}
    one = new.iloc[-1]
    assert (one["corpus"], one["budget"], one["tokens"]) == ("fake", 100 * 1024 * 64, 100 * 1024 * 64)


def test_old_records_give_the_losses_of_their_curve(store):
    old = mxfp4.records("gpu")
    (record,) = store.load("gpu")
    assert len(old) == len(record.curve) and set(old["forward"]) == {"own"} and set(old["branch"]) == {""}
    assert list(old["loss"]) == list(record.curve["eval_loss"]) and old["top1"].isna().all()
    assert set(old["run_id"]) == {record.run_id} and set(old["windows"]) == {8} and set(old["seed"]) == {1}
    assert old["weights"].iloc[0] == record.config.model.n_params_non_embedding()


def test_no_records_and_no_such_name(store):
    empty = mxfp4.records("mi355x")
    assert empty.empty and list(empty.columns) == list(COLUMNS)
    with pytest.raises(UserError, match="is not a name"):
        mxfp4.records("../gpu")


def test_one_kind_of_table_is_read_by_its_file_name(store, tmp_path):
    files = sorted(glob.glob(str(tmp_path / "records/*/*/curve.parquet")))
    table = pd.concat(map(pd.read_parquet, files), ignore_index=True)
    assert set(table["arm"]) == {"bf16", "mxfp4"} and {"eval_loss_bf16", "eval_bpb"} <= set(table.columns)
    assert table["run_id"].nunique() == 2


def test_importing_the_package_imports_no_pandas():
    code = "import sys, mxfp4; mxfp4.records; assert 'records' in mxfp4.__all__; sys.exit('pandas' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    with pytest.raises(AttributeError, match="no attribute 'recordz'"):
        getattr(mxfp4, "recordz")  # noqa: B009
