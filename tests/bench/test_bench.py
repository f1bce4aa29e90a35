"""Benchmarks: what they check and write, on small tensors and without timing anything."""

import json
import time

import pytest
import torch

from mxfp4.bench import cpu as bench_cpu
from mxfp4.bench import kernels as bench_kernels
from mxfp4.bench import results as bench
from mxfp4.bench import step as bench_step
from mxfp4.cli import main
from mxfp4.cli.commands.bench import _line
from mxfp4.numerics.gemm_backends.choice import Status
from tests.fakes.gemm_libraries import StandIn


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
    assert set(ours) == {*bench_kernels.OURS, "unpacked", "rotated, h16", "rotated, both axes, h16"}
    assert all(row["correct"] for row in ours.values())
    n = 512 * 1024
    assert ours["packed, both, h16"]["bytes"] == 2 * n + 2 * (n // 2 + n // 32)
    assert ours["values"]["bytes"] == 4 * n
    assert ours["unpacked"]["bytes"] == n // 2 + n // 32 + 2 * n
    assert ours["rotated, both axes, h16"]["bytes"] == 2 * n + 4 * n
    copy = next(row for row in rows if row["name"] == "copy")
    assert copy["bytes_per_second"] == 4 * n / 0.5
    assert ours["values"]["ratio"] == 1.0
    gemms = [row for row in rows if row["name"].startswith("gemm, emulated")]
    assert len(gemms) == 3 and all(row["correct"] and row["ratio"] == 1.0 for row in gemms)
    assert all(_line(row) for row in rows)


def test_rivals_are_checked_against_ours_and_one_that_fails_is_a_row(small, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function: function)
    rows = {(row["name"], row["who"]): row for row in bench_kernels.rows()}
    for name, who in rows:
        if "twin" in who:
            assert rows[name, who]["correct"] is True, rows[name, who]
    assert rows["packed", "torchao, compiled"]["correct"] is True
    packed = rows["gemm, packed", "tl.dot_scaled alone"]  # there is no GPU to run it, or it ran
    assert "problem" in packed or packed["seconds"] == 0.5
    assert all(_line(row) for row in rows.values())


def test_back_ends_of_the_packed_gemm_are_timed_and_checked(small, monkeypatch):
    found = [Status("aiter", "refused", "one block: wrong"), Status("scaled_mm", "usable"), Status("triton", "usable")]
    monkeypatch.setattr(bench_kernels, "statuses", lambda device: found)
    monkeypatch.setitem(bench_kernels.BACKENDS, "scaled_mm", StandIn("scaled_mm", on_result=lambda y: y * 2))
    monkeypatch.setitem(bench_kernels.BACKENDS, "triton", StandIn("triton"))
    rows = {row["who"]: row for row in bench_kernels._back_ends(torch.randn(64, 64), torch.randn(32, 64), 1.0)}
    assert rows["back end aiter"]["problem"] == "RuntimeError: refused: one block: wrong"
    assert rows["back end triton"]["correct"] and not rows["back end scaled_mm"]["correct"]
    assert (
        rows["back end triton"]["ratio"] == 2.0 and rows["back end triton"]["flops_per_second"] == 2 * 64**2 * 32 / 0.5
    )
    assert all(_line(row) for row in rows.values())


def test_a_failure_is_one_line_and_the_rest_goes_on():
    def fails():
        raise torch.OutOfMemoryError("no room\nfor a second line")

    assert bench.attempt("a", "b", fails) == {"name": "a", "who": "b", "problem": "OutOfMemoryError: no room"}
    assert bench.attempt("a", "b", lambda: {"seconds": 1.0}) == {"name": "a", "who": "b", "seconds": 1.0}


def test_a_step_that_fails_leaves_the_others_their_ratios(monkeypatch):
    seconds = {"bf16": 2.0, "mxfp4": 3.0}
    monkeypatch.setattr(
        bench_step, "_measure", lambda name, steps: {"seconds": seconds[name], "peak_bytes": 10, "loss": 1.0}
    )
    rows = list(bench_step.rows(("bf16", "ti2d", "mxfp4")))
    assert rows[1]["problem"] == "KeyError: 'ti2d'" and "time_ratio" not in rows[1]
    assert rows[2]["time_ratio"] == 1.5 and rows[2]["memory_ratio"] == 1.0


@pytest.mark.parametrize("who, row, code, shown", [
    ("mxfp4", {"seconds": 1.0, "correct": False}, 1, "WRONG"),
    ("mxfp4", {"problem": "RuntimeError: no"}, 1, "RuntimeError: no"),
    ("torchao", {"seconds": 1.0, "correct": False}, 0, "WRONG"),
    ("torchao", {"problem": "RuntimeError: no"}, 0, "RuntimeError: no"),
])  # fmt: skip
def test_what_of_ours_is_wrong_or_failed_fails_the_command(small, monkeypatch, capsys, who, row, code, shown):
    monkeypatch.setattr(bench_cpu, "rows", lambda rivals: iter([{"name": "x", "who": who, **row}]))
    assert main(["bench", "cpu"]) == code
    assert shown in capsys.readouterr().out


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


@pytest.mark.parametrize(
    ("device", "short"),
    [
        ("AMD Instinct MI355X", "mi355x"), ("NVIDIA H200", "h200"), ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"), ("NVIDIA GeForce RTX 4090", "geforce-rtx-4090"), ("", "unknown"),
    ],
)  # fmt: skip
def test_a_device_has_a_short_name(device, short):
    assert bench.bench_name("step", device) == f"step-{short}"


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A machine that PyTorch takes for an MI355X, whose steps take a second, and runs elsewhere than in the project."""
    monkeypatch.setenv("MXFP4_RUNS", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *a: "AMD Instinct MI355X")
    monkeypatch.setattr(bench, "machine", lambda device: {"device": "AMD Instinct MI355X"})
    monkeypatch.setattr(bench_step, "_measure", lambda *a: {"seconds": 1.0, "peak_bytes": 1, "loss": 1.0})
    return tmp_path / "bench" / "step-mi355x.json"


def test_steps_are_written_under_the_name_of_the_device(gpu, capsys):
    from mxfp4.directories import bench_dir

    there = {path.name for path in bench_dir().glob("*.json")}
    assert main(["bench", "step"]) == 0
    assert [row["name"] for row in json.loads(gpu.read_text())["rows"]] == list(bench_step.RECIPES)
    assert f"written to {gpu}" in capsys.readouterr().out
    assert {path.name for path in bench_dir().iterdir()} == there | {gpu.name}  # pages still find the others
    assert not list(gpu.parent.glob("*.new"))


def test_some_recipes_do_not_take_the_place_of_all(gpu, capsys, tmp_path):
    assert main(["bench", "step", "--recipe", "bf16"]) == 0
    assert not gpu.exists() and "not written: --json" in capsys.readouterr().out
    assert main(["bench", "step", "--recipe", "bf16", "--json", str(tmp_path / "some.json")]) == 0
    assert len(json.loads((tmp_path / "some.json").read_text())["rows"]) == 1 and not gpu.exists()


def test_an_interrupted_benchmark_leaves_the_file_that_there_was(gpu, monkeypatch):
    assert main(["bench", "step"]) == 0
    before = gpu.read_bytes()

    def stop(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_step, "_measure", stop)
    assert main(["bench", "step"]) == 130
    assert gpu.read_bytes() == before
