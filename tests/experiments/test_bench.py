"""Benchmarks: what they check and write, on small tensors and without timing anything."""

import json
import time

import pytest
import torch

from mxfp4.experiments import bench, bench_cpu, bench_kernels
from mxfp4.experiments.cli import main
from mxfp4.experiments.commands.bench import _line


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(bench_cpu, "SIZE", 256)
    monkeypatch.setattr(bench_cpu, "TOY", (64, 64))
    monkeypatch.setattr(bench_cpu, "cpu_seconds", lambda call: (call(), (0.5, 0.25))[1])
    monkeypatch.setattr(bench_kernels, "DEVICE", "cpu")
    for name, size in (("ROWS", 512), ("COLUMNS", 1024), ("GEMM", 64)):
        monkeypatch.setattr(bench_kernels, name, size)
    monkeypatch.setattr(bench_kernels, "gpu_seconds", lambda call, repeat=1: (call(), 0.5)[1])


def test_cpu_writes_every_row_with_its_machine(small, tmp_path, capsys):
    target = tmp_path / "deep" / "cpu.json"
    assert main(["bench", "cpu", "--no-rivals", "--json", str(target)]) == 0
    data = json.loads(target.read_text())
    assert data["kind"] == "cpu" and data["machine"]["device_type"] == "cpu"
    packed = {row["who"]: row for row in data["rows"] if row["name"] == "packed"}
    assert packed["mxfp4, twin"]["correct"] is True
    assert all(row["correct"] in (True, None) for row in data["rows"])
    assert packed["mxfp4, twin"]["elements_per_second"] == 256 * 256 / 0.5
    assert "mxfp4, twin" in capsys.readouterr().out


def test_kernels_check_each_result_and_count_its_bytes(small):
    rows = list(bench_kernels.rows(rivals=False))
    ours = {row["name"]: row for row in rows if row["who"] == "mxfp4" and "bytes" in row}
    assert set(ours) == set(bench_kernels.OURS)
    assert all(row["correct"] for row in ours.values())
    n = 512 * 1024
    assert ours["packed, both, h16"]["bytes"] == 2 * n + 2 * (n // 2 + n // 32)
    assert ours["values"]["bytes"] == 4 * n
    copy = next(row for row in rows if row["name"] == "copy")
    assert copy["bytes_per_second"] == 4 * n / 0.5
    assert ours["values"]["ratio"] == 1.0
    assert all(_line(row) for row in rows)


def test_a_wrong_result_fails_the_command(small, monkeypatch, capsys):
    monkeypatch.setattr(
        bench_cpu, "rows", lambda rivals: iter([{"name": "x", "who": "y", "seconds": 1.0, "correct": False}])
    )
    assert main(["bench", "cpu"]) == 1
    assert "WRONG" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
@pytest.mark.parametrize("what", ["kernels", "step"])
def test_without_a_gpu_one_line_says_so(what, capsys):
    assert main(["bench", what]) == 1
    assert capsys.readouterr().err.startswith(f"error: mxfp4 bench {what} needs a GPU")


def test_cpu_time_is_a_median_and_stops_at_its_limit():
    calls = []
    wall, processor = bench.cpu_seconds(lambda: (calls.append(1), time.sleep(0.02)), repeat=50, limit=0.05)
    assert 0.02 <= wall < 1 and processor < wall
    assert len(calls) < 10
