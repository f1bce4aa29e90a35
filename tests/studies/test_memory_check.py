"""Training refuses what cannot fit before it begins, with the dry run's number, and takes the options it advises."""

import re
from dataclasses import replace

import pytest
import torch

from mxfp4.cli import main
from mxfp4.cli.checks.dry_run import dry_run
from mxfp4.errors import UserError
from mxfp4.studies import memory_check, runner
from mxfp4.studies.plans import plan
from mxfp4.studies.runner import run_plan
from mxfp4.studies.scales import SCALES
from mxfp4.studies.store import Store
from tests.fakes import TINY, FakeCorpus
from tests.studies.test_runner_on_ranks import ALONE, TOGETHER, arms

CORPUS = FakeCorpus()


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.setenv("MXFP4_RUNS", str(tmp_path))


def gpus(monkeypatch, number, size=288e9):
    """So many GPUs in the eyes of PyTorch."""
    about = type("About", (), {"name": "GPU", "total_memory": size, "gcnArchName": "gfx000", "major": 0, "minor": 0})
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: number)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device=0: about)
    for name in ("matmul_path", "fp8_path"):
        monkeypatch.setattr(memory_check, name, lambda device: "native")
    monkeypatch.setattr(memory_check, "ram", lambda: 1e12)


def trained(monkeypatch, tmp_path, capsys, *options):
    """What `mxfp4 train` would start: (scale, places), or the line that it says instead."""
    taken = []
    monkeypatch.setattr(runner.Pool, "run", lambda self, missing, stop: taken.append((self.scale, self.places)))
    monkeypatch.setattr(runner, "prepare", lambda *a, **k: None)
    monkeypatch.setattr("mxfp4.studies.store.matmul_path", lambda device: "native")
    monkeypatch.setattr("mxfp4.studies.store.fp8_path", lambda device: "native")
    code = main(["train", "--scale", "mi355x", "--arm", "fp8", "--quiet", *options])
    return taken[0] if code == 0 else capsys.readouterr().err.strip()


@pytest.mark.parametrize("scale", [name for name in SCALES if name != "cpu"])
@pytest.mark.parametrize("option", [[], ["--device", "cpu"], ["--gpus", "0"]])
def test_a_scale_for_gpus_is_refused_without_one(scale, option, monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["train", "--scale", scale, "--arm", "fp8", *option]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: scale '{scale}' trains on a GPU, and device 'cpu' is none: see `mxfp4 doctor")


def test_a_gpu_that_is_too_small_is_refused_with_the_number_of_the_dry_run(monkeypatch, tmp_path, capsys):
    gpus(monkeypatch, 1, 192e9)
    said = trained(monkeypatch, tmp_path, capsys)
    problem, *_ = dry_run(plan("table1", "mi355x", recipes=["fp8"]), Store(tmp_path), gpus=1).problems
    assert said == f"error: {problem}"
    assert re.match(r"error: memory: fp8 needs 2\d\d.\d GB of each GPU, which has 192.0 GB: ", said)
    assert not list(tmp_path.glob("checkpoints/*"))
    scale, where = trained(monkeypatch, tmp_path, capsys, "--recompute-every", "1")  # its own advice
    assert scale.execution()["recompute_every"] == 1 and where == [(torch.device("cuda"),)]


def test_minutes_between_checkpoints_are_the_scales_or_as_asked_for(monkeypatch, tmp_path, capsys):
    gpus(monkeypatch, 1, 288e9)
    own, _ = trained(monkeypatch, tmp_path, capsys, "--recompute-every", "1")
    asked, _ = trained(monkeypatch, tmp_path, capsys, "--recompute-every", "1", "--checkpoint-minutes", "7.5")
    assert [s.checkpoint_minutes for s in (own, asked, *SCALES.values())] == [20.0, 7.5, 1.0, 1.0, 20.0]
    for bad in ("0", "-1", "nan", "inf"):
        said = trained(monkeypatch, tmp_path, capsys, "--checkpoint-minutes", bad)
        assert said == f"error: --checkpoint-minutes {bad} must be a positive number of minutes"


def test_some_of_the_gpus_are_taken(monkeypatch, tmp_path, capsys):
    gpus(monkeypatch, 8)
    _, where = trained(monkeypatch, tmp_path, capsys, "--gpus", "4")
    assert where == [tuple(torch.device("cuda", i) for i in range(4))]
    assert trained(monkeypatch, tmp_path, capsys, "--gpus", "9") == "error: gpus=9: allowed here are 1 to 8"
    assert "goes with --dry-run" in trained(monkeypatch, tmp_path, capsys, "--gpu-memory", "90")
    assert "leave one of them out" in trained(monkeypatch, tmp_path, capsys, "--gpus", "9", "--device", "cpu")


def test_a_host_that_cannot_hold_the_checkpoints_in_writing_is_refused(monkeypatch, tmp_path, capsys):
    gpus(monkeypatch, 8)
    monkeypatch.setattr(memory_check, "ram", lambda: 90e9)
    said = trained(monkeypatch, tmp_path, capsys)
    assert said.startswith("error: host memory: 96.4 GB hold the checkpoints in writing (12 bytes a parameter, pinned)")
    monkeypatch.setattr(memory_check, "ram", lambda: 100e9)
    assert len(trained(monkeypatch, tmp_path, capsys)[1][0]) == 8


def test_memory_of_the_cpu_is_shared_by_its_ranks_and_jobs(tmp_path, monkeypatch):
    need = 2 * 2 * memory_check.PROCESS_BYTES  # the arm is tiny
    monkeypatch.setattr(memory_check, "ram", lambda: need)
    with pytest.raises(UserError, match=r"memory: mxfp4\+sr needs 2.4 GB of the CPU's memory for 4 arms"):
        run_plan(arms(TOGETHER), Store(tmp_path), jobs=2, device="cpu", corpus=CORPUS, progress=False)
    assert not list(tmp_path.glob("checkpoints/*/*"))


def test_recomputation_changes_no_byte_of_a_curve_and_no_key(tmp_path):
    """Of a recipe that draws random numbers, on two blocks, on one rank and on two."""
    for scale in (ALONE, TOGETHER):
        records = []
        for every in (0, 1):
            store = Store(tmp_path / f"{scale.ranks_per_arm}-{every}")
            wanted = replace(scale, model=replace(TINY, n_layers=2), recompute_every=every)
            run_plan(arms(wanted), store, device="cpu", corpus=CORPUS, progress=False)
            records += store.load("cpu")
        plain, again = records
        assert plain.key == again.key and plain.curve.equals(again.curve)
        assert ("recompute_every" in plain.timings, again.timings["recompute_every"]) == (False, 1)


def test_a_container_s_limit_counts(tmp_path, monkeypatch):
    limit, none = tmp_path / "memory.max", tmp_path / "none"
    monkeypatch.setattr(memory_check, "CGROUP_LIMITS", (str(none), str(limit)))
    whole = memory_check.ram()
    limit.write_text("max\n")
    assert memory_check.ram() == whole
    limit.write_text("1000000\n")
    assert memory_check.ram() == 1e6
