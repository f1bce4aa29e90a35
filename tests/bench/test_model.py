"""The benchmark of attention and cross-entropy, tiny and on the CPU: what it checks, counts and writes."""

import json

import pytest
import torch

from mxfp4.bench import model as bench_model
from mxfp4.cli import main
from mxfp4.training.execution import attention, cross_entropy

SIZES = bench_model.Sizes(tokens=32, heads=4, kv_heads=2, head_dim=16, vocab_size=100)


@pytest.fixture
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(bench_model, "DEVICE", "cpu")
    monkeypatch.setattr(bench_model, "_measured", lambda call, repeat: (call(), (0.5, 1000))[1])
    monkeypatch.setattr(torch, "compile", lambda function, **how: function)
    attention.check_backend.cache_clear()
    cross_entropy._part.cache_clear()
    yield
    cross_entropy._part.cache_clear()


def test_every_choice_is_a_row_and_one_that_cannot_run_says_why(on_the_cpu):
    rows = {row["name"]: row for row in bench_model.rows(SIZES)}
    assert len(rows) == len(attention.BACKENDS) + 4
    for name in ("repeat", "auto", "flash", "math"):
        row = rows[f"attention, {name}"]
        assert row["seconds"] == 0.5 and row["flops_per_second"] == 3.5 * 2 * 32**2 * 64 / 0.5
    assert "does not run on cpu" in rows["attention, cudnn"]["problem"]
    assert "is not installed" in rows["attention, aiter"]["problem"]
    for name in ("whole", "chunked", "chunked, compiled"):
        row = rows[f"cross-entropy, {name}"]
        assert row["correct"] and row["peak_bytes"] == 1000


def test_a_wrong_loss_is_said(on_the_cpu, monkeypatch):
    honest = cross_entropy.mean_loss
    monkeypatch.setattr(cross_entropy, "mean_loss", lambda *a: honest(*a) * 1.01)
    rows = {row["name"]: row for row in bench_model.rows(SIZES)}
    assert rows["cross-entropy, whole"]["correct"] and rows["cross-entropy, chunked"]["correct"] is False


def test_the_command_writes_a_record_beside_the_others(on_the_cpu, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("MXFP4_RUNS", str(tmp_path))
    rows = bench_model.rows
    monkeypatch.setattr(bench_model, "rows", lambda: rows(SIZES))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *a: "AMD Instinct MI355X")
    monkeypatch.setattr("mxfp4.bench.results.machine", lambda device: {"device": "AMD Instinct MI355X"})
    assert main(["bench", "model"]) == 0
    data = json.loads((tmp_path / "bench" / "model-mi355x.json").read_text())
    assert data["kind"] == "model" and {row["name"] for row in data["rows"]} >= {
        "attention, auto",
        "cross-entropy, whole",
    }
    said = capsys.readouterr().out
    assert "1.000e+03 B at the peak" in said and "model-mi355x.json" in said
