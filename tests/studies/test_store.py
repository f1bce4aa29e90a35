"""The run store: found by what determines a result, whole or not at all, mergeable, nowhere but under
runs/."""

import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch

import mxfp4
from mxfp4.analysis.study import studies
from mxfp4.errors import UserError
from mxfp4.locks import Lock
from mxfp4.numerics.native import PATHS
from mxfp4.studies import store as store_module
from mxfp4.studies.store import Store
from mxfp4.training.loop import train
from mxfp4.training.protocols import TrainResult
from tests.fakes import FakeCorpus, tiny_config


def result(loss=3.0, status="finished", probes=()):
    row = {"step": 0, "tokens": 0, "train_loss": float("nan"), "eval_loss": loss}
    outcome = {
        "status": status,
        "step": 12,
        "tokens": 768,
        "reason": None,
        "final_loss": loss,
        "final_bpb": 1.0,
        "target": None,
    }
    timings = {"train_seconds": 1.0, "evaluate_seconds": 0.1, "tokens_per_second": 700.0}
    return TrainResult([row], list(probes), [3.0, 3.5], outcome, timings, None)


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "runs")


def test_a_record_comes_back(store):
    config = tiny_config(recipe="mxfp4+h16")
    trained = train(config, corpus=FakeCorpus(), device="cpu", progress=False)
    probe = {
        "step": 1,
        "recipe": "mxfp4",
        "layer": "all",
        "gemm": "wgrad",
        "tensor": "g",
        "metric": "error",
        "value": 0.1,
    }
    trained.probes.append(probe)
    assert store.get(config, "cpu") is None
    record = store.put(config, trained, "cpu", corpus="fake")
    again = store.get(config, "cpu")
    assert again.window_losses == pytest.approx(trained.window_losses, abs=1e-6)
    assert again.config == config and again.outcome == trained.outcome and again.run_id == record.run_id
    pd.testing.assert_frame_equal(again.curve, pd.DataFrame(trained.curve))
    assert again.probes.to_dict("records") == [probe]
    data = json.loads((record.folder / "record.json").read_text())
    assert data["recipe"] == json.loads(mxfp4.recipe("mxfp4+h16").to_json())
    assert data["machine"]["path"] == "emulated" and data["machine"]["torch"] and data["corpus"] == "fake"
    assert data["semantics_version"] == mxfp4.SEMANTICS_VERSION
    assert str(Path.home()) not in json.dumps(data) and os.uname().nodename not in json.dumps(data["machine"])


def test_the_key_is_of_what_determines_the_result(store, monkeypatch):
    config = tiny_config()
    keys = {
        store.key(c, "cpu")
        for c in (config, replace(config, seed=1), replace(config, lr=0.5), replace(config, recipe="fp8"))
    }
    keys.add(store.key(config, "cuda"))
    monkeypatch.setattr(mxfp4, "SEMANTICS_VERSION", mxfp4.SEMANTICS_VERSION + 1)
    keys.add(store.key(config, "cpu"))
    assert len(keys) == 6 and all(len(k) == 64 for k in keys)


def test_records_of_another_semantics_version_are_left_out(store, monkeypatch):
    config = tiny_config()
    store.put(config, result(), "cpu")
    monkeypatch.setattr(mxfp4, "SEMANTICS_VERSION", mxfp4.SEMANTICS_VERSION + 1)
    with pytest.warns(UserWarning, match="1 records .* another semantics version"):
        assert store.load() == []
    assert store.get(config, "cpu") is None


@pytest.mark.parametrize(
    "damage", ["no json", "cut json", "flipped curve", "no curve", "other config", "list", "binary"]
)
def test_a_damaged_record_is_named_and_never_read(store, damage):
    config = tiny_config()
    folder = store.put(config, result(), "cpu").folder
    about = folder / "record.json"
    if damage == "no json":
        about.unlink()
    elif damage == "cut json":
        about.write_bytes(about.read_bytes()[:-20])
    elif damage == "flipped curve":
        data = bytearray((folder / "curve.parquet").read_bytes())
        data[len(data) // 2] ^= 1
        (folder / "curve.parquet").write_bytes(data)
    elif damage == "no curve":
        (folder / "curve.parquet").unlink()
    elif damage == "other config":
        data = json.loads(about.read_text())
        data["config"]["lr"] = 0.123
        about.write_text(json.dumps(data))
    else:
        about.write_bytes(b"[]" if damage == "list" else b"\xff\x00")
    for read in (lambda: store.get(config, "cpu"), lambda: store.load("cpu") or None):
        with pytest.warns(UserWarning, match=folder.name):
            assert read() is None
    with pytest.warns(UserWarning, match=folder.name):
        assert store.put(config, result(2.5), "cpu").outcome["final_loss"] == 2.5  # the arm can be stored again
    assert [r.outcome["final_loss"] for r in store.load("cpu")] == [2.5]


def test_a_crash_while_writing_leaves_no_record(store, monkeypatch):
    config = tiny_config()

    def crash(source, target):
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "rename", crash)
    with pytest.raises(KeyboardInterrupt):
        store.put(config, result(), "cpu")
    monkeypatch.undo()
    assert store.get(config, "cpu") is None and store.load() == []


def test_a_full_disk_is_one_line_and_changes_nothing(store, monkeypatch):
    config = tiny_config()
    store.put(replace(config, seed=1), result(), "cpu")

    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match="the disk is full; nothing was changed"):
        store.put(config, result(), "cpu")
    monkeypatch.undo()
    assert len(store.load()) == 1 and len(list((store.root / "records" / "cpu").iterdir())) == 1


def test_the_first_of_two_equal_records_is_kept(store):
    config = tiny_config()
    store.put(config, result(3.0), "cpu")
    assert store.put(config, result(2.0), "cpu").outcome["final_loss"] == 3.0


def test_stores_merge_by_copying_and_duplicates_resolve(store, tmp_path):
    other = Store(tmp_path / "other")
    for seed in (2, 0):
        store.put(tiny_config(seed=seed), result(seed), "cpu")
    for seed in (1, 2):
        other.put(tiny_config(seed=seed), result(seed), "cpu")
    for folder in (other.root / "records" / "cpu").iterdir():
        shutil.copytree(folder, store.root / "records" / "cpu" / folder.name, dirs_exist_ok=True)
    twice = next((store.root / "records" / "cpu").glob("*-s0-*"))
    shutil.copytree(twice, twice.with_name(twice.name + " (copy)"))
    records = store.load("cpu")
    assert [r.config.seed for r in records] == [0, 1, 2] and [r.run_id for r in records] == [
        r.run_id for r in store.load()
    ]
    assert records[0].folder == twice


def test_paused_runs_have_no_record(store):
    with pytest.raises(UserError, match="'paused'"):
        store.put(tiny_config(), result(status="paused"), "cpu")


@pytest.mark.parametrize("scale", ["../x", "/etc", "a/b", "..", ".", "", "a\0b", "a" * 33, "A", "a\n"])
def test_a_scale_cannot_lead_outside(store, scale):
    config = tiny_config(scale=scale)
    for call in (
        lambda: store.folder(config),
        lambda: store.checkpoint_dir(config),
        lambda: store.put(config, result(), "cpu"),
    ):
        with pytest.raises(UserError, match="is not a name"):
            call()


@pytest.mark.parametrize("name", ["../../x", "/etc/passwd", "a\0b", "x" * 5000, "..", "", "mxfp4+../h16", "é\n"])
def test_a_recipe_name_cannot_lead_outside(store, name):
    config = tiny_config()
    object.__setattr__(config, "recipe", name)  # past the check of recipes
    folder = store.folder(config, "cpu")
    assert folder.parent == store.root / "records" / "cpu" and len(folder.name) < 100
    assert set(folder.name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")


def test_tables_are_readable_with_datasets_offline(store, tmp_path, monkeypatch):
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    from datasets import load_dataset

    for seed in (0, 1):
        store.put(tiny_config(seed=seed), result(seed), "cpu")
    files = sorted(str(p) for p in store.root.glob("records/cpu/*/curve.parquet"))
    rows = load_dataset("parquet", data_files=files, split="train", cache_dir=str(tmp_path / "cache"))
    assert sorted(zip(rows["arm"], rows["seed"], rows["eval_loss"], strict=True)) == [
        ("bf16", 0, 0.0),
        ("bf16", 1, 1.0),
    ]


HOLD = """
import sys, time
from pathlib import Path
from mxfp4.locks import Lock
lock = Lock(Path(sys.argv[1]))
assert lock.acquire()
print("held", flush=True)
time.sleep(600)
"""


def test_a_lock_ends_with_its_process_whatever_the_clock_says(tmp_path):
    path = tmp_path / "arm.lock"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, path], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
    )
    assert holder.stdout.readline() == "held\n"
    lock = Lock(path)
    os.utime(path, (0, 0))  # as old as can be: still held
    assert not lock.acquire() and lock.holder().startswith(f"pid {holder.pid} on ")
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    os.utime(path, (2**33, 2**33))  # from the future: free all the same
    assert lock.holder() is None
    assert lock.acquire() and lock.holder().startswith(f"pid {os.getpid()} on ")
    lock.release()
    assert not path.exists() and lock.holder() is None


def test_a_record_says_where_its_tokens_come_from(store):
    origin = {"revisions": {"c4": "0" * 40}}
    assert store.put(tiny_config(), result(), "cpu", corpus="fake", origin=origin).data["corpus_origin"] == origin
    assert "corpus_origin" not in store.put(tiny_config(seed=1), result(), "cpu", corpus="fake").data


def test_a_record_from_before_window_losses_is_read(store):
    record = store.put(tiny_config(), result(), "cpu", corpus="fake")
    data = json.loads((record.folder / "record.json").read_text())
    del data["window_losses"]
    (record.folder / "record.json").write_text(json.dumps(data))
    assert store.get(tiny_config(), "cpu").window_losses == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
@pytest.mark.parametrize(
    "path, fp8, backend",
    [*((*paths, None) for paths in PATHS), ("native", None, None), ("emulated", None, None),
     ("native", "native", "aiter"), ("native", "native", "triton"), ("emulated", "emulated", "emulated")],
)  # fmt: skip
def test_records_of_gpus_are_found_where_there_is_none(store, path, fp8, backend):
    """A native GPU's key differs from an emulating one's; a laptop that reads a study can have neither. Records from
    before FP8 was decided apart, or a back end chosen, say nothing of it, and keep their keys."""
    config = tiny_config()
    record = store.put(config, result(), "cpu", corpus="fake")
    data = json.loads((record.folder / "record.json").read_text())
    assert data["machine"].pop("fp8_path") == data["machine"].pop("gemm_backend") == "emulated"
    said = {name: value for name, value in (("fp8_path", fp8), ("gemm_backend", backend)) if value}
    data["machine"] |= {"device_type": "cuda", "path": path, **said}
    of_native = backend if path == "native" else None
    data["key"] = store_module._key(config, "cuda", (path, fp8 or path), data["semantics_version"], of_native)
    (record.folder / "record.json").write_text(json.dumps(data))
    record.folder.rename(record.folder.with_name(store_module._run_id(config, data["key"])))
    found = store.get(config, "cuda")
    assert found.paths == (path, fp8 or path) and found.gemm_backend == of_native
    assert store.get(config, "cpu") is None and found.paths in [r.paths for r in store.load()]
    (study,) = studies([found])
    assert ("FP8 native" in study.describe()) == (found.paths == ("emulated", "native"))
    assert (f"FP4 native by {backend}" in study.describe()) == (of_native is not None)


def test_the_back_end_is_in_the_key_of_native_runs_alone(store, monkeypatch):
    config, keys = tiny_config(), {}
    for path in ("native", "emulated"):
        monkeypatch.setattr(store_module, "_paths", lambda device, path=path: (path, path))
        for name in ("aiter", "triton"):
            monkeypatch.setattr(store_module, "gemm_backend", lambda device, name=name: name)
            keys[path, name] = store.key(config, "cuda")
    assert keys["native", "aiter"] != keys["native", "triton"]
    assert keys["emulated", "aiter"] == keys["emulated", "triton"]
    assert keys["emulated", "triton"] == store_module._key(
        config, "cuda", ("emulated", "emulated"), mxfp4.SEMANTICS_VERSION
    )


def test_records_of_two_back_ends_are_two_studies(store):
    record = store.put(tiny_config(), result(), "cpu", corpus="fake")
    native = {**record.machine, "path": "native", "fp8_path": "native"}
    found = [
        replace(record, data={**record.data, "machine": native | {"gemm_backend": name}})
        for name in ("aiter", "triton")
    ]
    assert len(studies(found)) == 2


def test_the_fp8_path_is_in_the_key_where_it_is_not_the_fp4_path(monkeypatch):
    """So keys of the CPU, and of chips with both or neither, are those from before there were two."""
    keys = {paths: store_module._key(tiny_config(), "cuda", paths, 1) for paths in PATHS}
    assert len(set(keys.values())) == 3
    what = {"config": tiny_config().key_dict(), "device": "cuda", "semantics": 1}
    for path in ("native", "emulated"):
        text = json.dumps({**what, "path": path}, sort_keys=True, separators=(",", ":"))
        assert keys[path, path] == hashlib.sha256(text.encode()).hexdigest()


def test_records_of_two_fp8_paths_are_two_studies(store):
    record = store.put(tiny_config(), result(), "cpu", corpus="fake")
    other = replace(record, data={**record.data, "machine": {**record.machine, "fp8_path": "native"}})
    assert len(studies([record, other])) == 2
