"""The doctor's look at a node: an all-reduce that can fail or hang, memory errors as the vendors' tools print them."""

from __future__ import annotations

import json
import resource
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from mxfp4.cli.checks import all_reduce, node_checks
from mxfp4.studies.scales import CPU, MI355X
from tests.fakes.ranks import launch


def bandwidth(ranks):
    assert all_reduce.measure(torch.device("cpu"), size=2**16, repeats=2) > 0


def test_bandwidth_is_measured_over_ranks():
    launch(bandwidth, 2)


RANK = "import os, time; rank = os.environ['RANK']; "


@pytest.mark.parametrize(
    ("program", "found"),
    [
        ("print('NCCL INFO'); rank == '0' and print('bus bandwidth 312.5')", (312.5, "")),
        ("rank == '1' and (_ for _ in ()).throw(RuntimeError('no link')); time.sleep(60)",
         (None, "rank 1: RuntimeError: no link")),
        ("rank == '1' and os._exit(9); time.sleep(60)", (None, "rank 1: exit code 9")),
        ("rank == '1' and time.sleep(60)", (None, "no answer within 1 s")),
    ],
)  # fmt: skip
def test_an_all_reduce_that_fails_or_hangs_ends_in_time(monkeypatch, program, found):
    monkeypatch.setattr(all_reduce, "COMMAND", [sys.executable, "-S", "-c", RANK + program])
    started = time.monotonic()
    assert all_reduce.over_gpus(2, seconds=1 if found[1].startswith("no") else 30) == found
    assert time.monotonic() - started < 30


def test_links_that_fail_are_missing_where_an_arm_takes_several_gpus(monkeypatch):
    monkeypatch.setattr(all_reduce, "over_gpus", lambda gpus: (None, "no answer within 90 s"))
    assert node_checks._links(8, MI355X).status == "missing" and node_checks._links(8, CPU).status == "note"
    monkeypatch.setattr(all_reduce, "over_gpus", lambda gpus: (312.5, ""))
    assert node_checks._links(8, MI355X).value.startswith("312 GB/s")


def amd(*counts):
    return [
        {"gpu": i, "ecc": {"total_correctable_count": 7, "total_uncorrectable_count": n}} for i, n in enumerate(counts)
    ]


@pytest.mark.parametrize(
    ("tool", "text", "status", "said"),
    [
        ("amd-smi", json.dumps(amd(0, 0)), "ok", "no uncorrectable errors on 2 GPUs"),
        ("amd-smi", json.dumps({"gpu_data": amd(0, 3)}), "note", "3 uncorrectable errors on GPU 1"),
        ("amd-smi", "no JSON", "note", "not known"),
        ("nvidia-smi", "Enabled, 0\nEnabled, 0\n", "ok", "no uncorrectable errors on 2 GPUs"),
        ("nvidia-smi", "Enabled, 2\nEnabled, 0\n", "note", "2 uncorrectable errors on GPU 0"),
        ("nvidia-smi", "Disabled, [N/A]\nEnabled, 0\n", "note", "off on GPU 0"),
        (None, None, "note", "not known"),
    ],
)
def test_memory_errors(monkeypatch, tool, text, status, said):
    monkeypatch.setattr(node_checks, "_output", lambda name, *options: text if name == tool else None)
    check = node_checks._ecc()
    assert check.status == status and said in check.value and (status == "ok") == (not check.advice)


def test_a_tool_that_fails_or_is_not_there_says_nothing():
    assert node_checks._output("no-such-tool-here") is None and node_checks._output("false") is None
    assert node_checks._output("echo", "a") == "a\n"


@pytest.mark.parametrize(("limit", "status"), [(resource.RLIM_INFINITY, "ok"), (8 * 2**20, "note")])
def test_limit_on_locked_memory(monkeypatch, limit, status):
    monkeypatch.setattr(resource, "getrlimit", lambda what: (limit, limit))
    assert node_checks._locked_memory().status == status


def test_what_is_looked_at_depends_on_the_machine(monkeypatch):
    assert torch.cuda.is_available() or node_checks.node_checks(MI355X) == []
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(is_available=lambda: True, device_count=lambda: 8))
    monkeypatch.setattr(all_reduce, "over_gpus", lambda gpus: (312.5, ""))
    monkeypatch.setattr(torch.version, "hip", "7.2")
    monkeypatch.setattr(node_checks.metadata, "version", lambda name: {"amd-aiter": "0.1.7"}[name])
    checks = {c.name: c for c in node_checks.node_checks(MI355X)}
    assert list(checks) == ["ECC", "all-reduce", "locked memory", "ROCm libraries"]
    assert "amd-aiter 0.1.7" in checks["ROCm libraries"].value
