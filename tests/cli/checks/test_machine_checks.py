"""The doctor: complete, quick, honest about what is missing; and `mxfp4 prepare` as a command."""

from __future__ import annotations

import argparse
import gzip
import json
import time
from types import SimpleNamespace

import pytest

from mxfp4.cli.checks import data_checks, machine_checks
from mxfp4.cli.commands import doctor as doctor_command
from mxfp4.cli.commands import prepare as prepare_command
from mxfp4.data.c4 import C4
from mxfp4.data.packing_state import Packing
from mxfp4.data.tokenizer import LLAMA_VOCAB
from mxfp4.data.tokenizer import train as train_tokenizer
from mxfp4.errors import UserError
from mxfp4.numerics.gemm_backends import choice
from mxfp4.studies.scales import SCALES, get_scale
from tests.fakes import tiny_c4


def parse(command, *args: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers(required=True))
    return parser.parse_args(args)


FIT = machine_checks._fit


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """No network, and the dry run, which takes seconds, only where a test is about it."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(machine_checks, "_fit", lambda scale, corpus: [])


def status(name: str, scale: str = "cpu") -> machine_checks.Check:
    return next(c for c in machine_checks.diagnose(scale) if c.name == name)


def test_covers_what_decides_whether_things_work():
    names = {c.name for c in machine_checks.diagnose()}
    assert names >= {
        "python", "torch", "triton", "jupyter-book", "datasets", "device", "path", "C compiler", "browser",
        "packed corpora", "corpus prose", "corpus technical", "disk", "memory", "network",
    }  # fmt: skip


def test_every_absence_comes_with_advice_on_one_line():
    for check in [c for scale in SCALES for c in machine_checks.diagnose(scale)]:
        assert check.status in ("ok", "note", "missing")
        assert check.status == "ok" or check.advice, check
        assert "\n" not in check.value + check.advice


def test_path_is_the_one_that_the_numerics_take():
    from mxfp4.numerics.gemm_backends.choice import matmul_path

    assert status("path").value.startswith(matmul_path("cuda" if "GiB" in status("device").value else "cpu"))


def test_missing_package_is_missing(monkeypatch):
    monkeypatch.setattr(machine_checks, "NEEDED", ("no-such-package-here",))
    checks = machine_checks.diagnose()
    assert not machine_checks.healthy(checks)
    assert status("no-such-package-here").advice


def test_missing_data_wheels_are_missing(monkeypatch, tmp_path):
    def absent(wheel):
        raise UserError("absent")

    monkeypatch.setenv("MXFP4_RUNS", str(tmp_path))
    monkeypatch.setattr("mxfp4.data.prose_wheels.files", absent)
    assert status("corpus prose").status == "missing"
    assert "make data" in status("corpus prose").advice
    monkeypatch.setattr(
        "mxfp4.data.packing_state.state_of", lambda *a, **k: Packing("prose", 2048, True, "packed", 0.0)
    )
    assert status("corpus prose").status == "note"


def test_full_disk_is_missing(monkeypatch):
    usage = type("Usage", (), {"free": 10**8})
    monkeypatch.setattr(machine_checks.shutil, "disk_usage", lambda path: usage)
    assert status("disk").status == "missing"


def test_silent_network_costs_at_most_three_seconds(monkeypatch):
    import socket

    for name in ("HF_HUB_OFFLINE", "http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        start = time.monotonic()
        check = data_checks._network(["C4"])
    assert check.status == "missing" and "MXFP4_C4" in check.advice and "out of reach" in check.value
    assert time.monotonic() - start < 3


@pytest.mark.parametrize("healthy", [True, False])
def test_command_prints_json_and_exit_code(monkeypatch, capsys, healthy):
    check = machine_checks.Check("thing", "ok" if healthy else "missing", "value", "" if healthy else "do this")
    monkeypatch.setattr(machine_checks, "diagnose", lambda scale, corpus: [check])
    args = parse(doctor_command, "doctor", "--json")
    assert doctor_command.run(args) == (0 if healthy else 1)
    assert json.loads(capsys.readouterr().out)["ok"] is healthy
    doctor_command.run(parse(doctor_command, "doctor"))
    out = capsys.readouterr().out
    assert ("ready" in out) if healthy else ("missing thing" in out and "do this" in out)


def test_prepare_command_says_packed_then_already_there(monkeypatch, capsys, tmp_path):
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
    assert "no scale trains with 270 ids: from Python, mxfp4.training.loop.train(config, corpus=PackedCorpus('" in out
    assert prepare_command.run(parse(prepare_command, *command, "--verify")) == 0
    out = capsys.readouterr().out
    assert "already there" in out and "verified" in out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "read by `mxfp4 train --scale mi355x`"),
        (("--tokenizer", "t.json"), "read by `mxfp4 train --scale mi355x`"),
        (("--corpus", "c4:768-799"), "read by `mxfp4 train --scale mi355x --corpus c4:768-799`"),
        (("--shards", "768-799"), "read by `mxfp4 train --scale mi355x --corpus c4:768-799`"),
    ],
)
def test_prepare_says_which_command_reads_it(options, said, tmp_path):
    args = parse(prepare_command, "prepare", "--scale", "mi355x", *options)
    assert prepare_command._reader(args, get_scale("mi355x"), 128256, tmp_path) == said
    args = parse(prepare_command, "prepare", "--scale", "cpu", "--tokenizer", "t.json")
    assert "no scale trains with this tokenizer" in prepare_command._reader(args, get_scale("cpu"), 2048, tmp_path)


def test_prepare_command_refuses_c4_options_for_others():
    with pytest.raises(UserError, match="belong to corpus c4"):
        prepare_command.run(parse(prepare_command, "prepare", "--corpus", "prose", "--shards", "1-2"))


@pytest.mark.parametrize("text", ["", "1-", "a", "1-2-3"])
def test_shard_range_refuses(text):
    with pytest.raises(argparse.ArgumentTypeError):
        prepare_command.shard_range(text)


# Larger scales

DOCUMENT = gzip.compress(b'{"text": "a document"}\n')


BACK_ENDS = {
    "aiter": choice.Status("aiter", "not installed", "pip install amd-aiter"),
    "scaled_mm": choice.Status("scaled_mm", "refused", "odd sizes: 12 of 40 results are wrong"),
    "triton": choice.Status("triton", "usable"),
}


@pytest.fixture
def node(monkeypatch, tmp_path):
    """Eight MI355X under ROCm, a disk with room, a mirror of C4 and the tokenizer, in the eyes of PyTorch."""
    import torch

    about = {"name": "AMD Instinct MI355X", "gcnArchName": "gfx950:sramecc+", "total_memory": 288 * 10**9}
    card = type("Card", (), about | {"major": 9, "minor": 5})
    monkeypatch.setattr(torch.version, "hip", "7.2")
    for name, value in {"is_available": True, "device_count": 8, "get_device_properties": card}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *a, value=value: value)
    monkeypatch.setattr("mxfp4.numerics.native._gpu_path", lambda index: "native")
    monkeypatch.setattr("mxfp4.numerics.native._gpu_fp8_path", lambda index: "native")
    monkeypatch.setattr(choice, "_chain", choice._chain.__wrapped__)
    monkeypatch.setattr(choice, "_status", lambda name, device: BACK_ENDS[name])
    monkeypatch.setattr(machine_checks.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 2 * 10**12}))
    monkeypatch.setattr("mxfp4.studies.memory_check.ram", lambda: 2e12)
    monkeypatch.setattr(machine_checks, "DRIVER_FILE", tmp_path / "driver")
    (tmp_path / "driver").write_text("6.14.14\n")
    (tmp_path / "c4" / "en").mkdir(parents=True)
    for file in C4()._files():
        (tmp_path / "c4" / file).write_bytes(DOCUMENT)
    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setattr("mxfp4.data.tokenizer.load", lambda path: SimpleNamespace(size=LLAMA_VOCAB))
    monkeypatch.setattr("mxfp4.cli.checks.all_reduce.over_gpus", lambda gpus: (300.0, ""))
    monkeypatch.setenv("MXFP4_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("MXFP4_C4", str(tmp_path / "c4"))
    monkeypatch.setenv("MXFP4_LLAMA_TOKENIZER", str(tmp_path / "tokenizer.json"))
    return card


def test_the_papers_node(node, monkeypatch):
    """Nothing is missing where C4 and the tokenizer are at hand; nothing is said of what the scale does not read."""
    monkeypatch.setattr(machine_checks, "_fit", FIT)
    monkeypatch.setattr("mxfp4.data.prose_wheels.files", lambda wheel: pytest.fail("looked for wheels"))
    monkeypatch.setattr("mxfp4.data.hub.unreachable", lambda *a: pytest.fail("asked"))
    checks = {c.name: c for c in machine_checks.diagnose("mi355x")}
    assert [c for c in checks.values() if c.status == "missing"] == [] and "corpus prose" not in checks
    assert "8 x AMD Instinct MI355X, gfx950" in checks["device"].value and "ROCm 7.2" in checks["device"].value
    assert checks["path"].value.startswith("native") and checks["path"].value.endswith("FP4 by triton, else emulated")
    back_ends = {name: (c.status, c.value) for name, c in checks.items() if name.startswith("FP4 GEMM")}
    assert back_ends == {
        "FP4 GEMM aiter": ("ok", "not installed: pip install amd-aiter"),
        "FP4 GEMM scaled_mm": ("note", "refused: odd sizes: 12 of 40 results are wrong"),
        "FP4 GEMM triton": ("ok", "usable"),
    }
    assert checks["llama tokenizer"].status == "ok"
    c4 = checks["corpus c4"]
    assert c4.status == "note" and "not packed; from a local mirror" in c4.value and "CORPUS=c4:768-799" in c4.advice
    assert checks["network"].value.startswith("not tried")
    assert "of 288 GB, 8 x AMD Instinct MI355X" in checks["memory of a GPU"].value
    monkeypatch.setattr(machine_checks.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 10**11}))
    full = status("disk for the runs", "mi355x")
    assert full.status == "missing" and "478" in full.value and "MXFP4_RUNS" in full.advice


def test_a_corpus_of_some_shards(node, tmp_path):
    for file in C4(shards=(800, 1023))._files()[3:]:
        (tmp_path / "c4" / file).unlink()
    whole = status("corpus c4", "mi355x")
    assert whole.status == "missing" and "lacks 224 files" in whole.value and "c4-train.00800-of-01024" in whole.value
    assert "`make reproduce SCALE=mi355x CORPUS=c4:768-799`" in whole.advice
    checks = {c.name: c for c in machine_checks.diagnose("mi355x", "c4:768-799")}
    some = checks["corpus c4:768-799"]
    assert some.status == "note" and some.advice.startswith(
        "`mxfp4 prepare --scale mi355x --corpus c4:768-799` packs it"
    )
    assert [c for c in checks.values() if c.status == "missing"] == []
    (tmp_path / "c4" / C4()._files()[1]).unlink()
    none = {c.name: c for c in machine_checks.diagnose("mi355x", "c4:768-799")}["corpus c4:768-799"]
    assert none.status == "missing" and "validation.00001" in none.value and "CORPUS=" not in none.advice


def test_the_network_is_tried_for_what_must_come_from_it(node, monkeypatch):
    asked = []
    monkeypatch.delenv("MXFP4_C4")
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr("mxfp4.data.hub.unreachable", lambda url, timeout: asked.append(url) or "")
    reached = status("network", "mi355x")
    assert reached.status == "ok" and reached.value.endswith("answers; C4 will come from it") and len(asked) == 1
    monkeypatch.setattr("mxfp4.data.hub.unreachable", lambda *a: "HTTP 429 Too Many Requests")
    busy = status("network", "mi355x")
    assert busy.status == "missing" and "wait a few minutes" in busy.advice
    monkeypatch.setattr(
        "mxfp4.data.packing_state.state_of",
        lambda *a, **k: Packing("c4", 128256, True, "packed, 5 training tokens", 0.0),
    )
    monkeypatch.delenv("MXFP4_LLAMA_TOKENIZER")
    checks = {c.name: c for c in machine_checks.diagnose("mi355x")}
    assert checks["network"].value == "not tried: the corpus is packed" and "llama tokenizer" not in checks


@pytest.mark.parametrize(("login", "wanted"), [(None, "missing"), ("a token", "note")])
def test_a_tokenizer_that_a_login_can_fetch(node, monkeypatch, login, wanted):
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.delenv("MXFP4_LLAMA_TOKENIZER")
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *a, **k: None)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: login)
    monkeypatch.setattr("mxfp4.data.hub.unreachable", lambda *a: "")
    assert status("llama tokenizer", "mi355x").status == wanted
    assert "Llama's tokenizer will come from it" in status("network", "mi355x").value


def test_versions_of_rocm_and_driver_are_checked(node, monkeypatch, tmp_path):
    import torch

    assert status("ROCm", "mi355x").status == status("driver", "mi355x").status == "ok"
    (tmp_path / "driver").write_text("6.12.12\n")
    old = status("driver", "mi355x")
    assert old.status == "missing" and "6.12.12" in old.value and "7.0" in old.advice
    (tmp_path / "driver").unlink()
    assert status("driver", "mi355x").value.startswith("the amdgpu of kernel")
    monkeypatch.setattr(torch.version, "hip", "6.4.43482-0f2d60242")
    old = status("ROCm", "mi355x")
    assert old.status == "missing" and "6.4.43482" in old.value and "TORCH_INDEX=" in old.advice
    assert status("ROCm", "gpu").status == "note"


def test_the_machines_memory_is_the_scales(node, monkeypatch):
    """A process for each GPU, and a copy of 12 bytes a parameter on the way to disk."""
    parameters = get_scale("mi355x").model.n_params()
    need, said = machine_checks.host_memory(get_scale("mi355x"))
    assert need == 8 * 3e9 + 12 * parameters and "8 processes" in said
    need, said = machine_checks.host_memory(get_scale("gpu"))
    assert need == 24 * (3e9 + 12 * get_scale("gpu").model.n_params()) and "24 processes" in said
    monkeypatch.setattr("mxfp4.studies.memory_check.ram", lambda: 64e9)
    small = status("memory", "mi355x")
    assert small.status == "missing" and small.value == "64 GB" and "needs 120 GB" in small.advice
    assert status("memory", "cpu").status == "ok"


@pytest.mark.filterwarnings("ignore:FP4 back end:mxfp4.errors.Notice")
@pytest.mark.parametrize("asked, expected", [("aiter", "missing"), ("emulated", "note"), ("triton", "ok")])
def test_a_back_end_that_is_asked_for_decides_the_path(node, monkeypatch, asked, expected):
    monkeypatch.setattr(machine_checks, "data_checks", lambda *a: [])
    monkeypatch.setenv(choice.VARIABLE, asked)
    path = status("path", "mi355x")
    assert path.status == expected
    if asked == "aiter":
        assert (
            "gemm_backend=aiter is not installed: pip install amd-aiter" in path.value
            and choice.VARIABLE in path.advice
        )


def test_a_node_with_too_little_memory(node, monkeypatch):
    monkeypatch.setattr(machine_checks, "_fit", FIT)
    node.total_memory = 64 * 10**9
    small = status("memory of a GPU", "mi355x")
    assert small.status == "missing" and "which has 64.0 GB" in small.value and "--recompute-every" in small.advice


def test_a_gpu_without_fp4_is_no_obstacle_and_said(node, monkeypatch):
    monkeypatch.setattr("mxfp4.numerics.native._gpu_path", lambda index: "emulated")
    assert "native: FP8" in status("path", "gpu").value
    monkeypatch.setattr("mxfp4.numerics.native._gpu_fp8_path", lambda index: "emulated")
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


def test_tokenizer_and_mirror_that_are_not_what_they_are_called(node, monkeypatch, tmp_path):
    monkeypatch.undo()
    monkeypatch.setenv("MXFP4_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("MXFP4_C4", str(tmp_path / "c4"))
    monkeypatch.setenv("MXFP4_LLAMA_TOKENIZER", str(tmp_path / "tokenizer.json"))
    scale = get_scale("mi355x")

    def found() -> dict[str, machine_checks.Check]:
        return {c.name: c for c in data_checks.data_checks(scale)}

    assert "259 files" in found()["corpus c4"].value
    assert found()["llama tokenizer"].status == "missing" and "is damaged" in found()["llama tokenizer"].value
    (tmp_path / "tokenizer.json").write_bytes(train_tokenizer(["one two"], 300).to_bytes())
    other = found()["llama tokenizer"]
    assert other.status == "missing" and "128256 are needed" in other.value
    last = tmp_path / "c4" / C4()._files()[-1]
    last.write_bytes(DOCUMENT[:-12])
    cut = found()["corpus c4"]
    assert cut.status == "missing" and "c4-train.01023" in cut.value and "fetch it into" in cut.advice
    last.write_bytes(gzip.compress(b""))
    assert "holds 0 documents" in found()["corpus c4"].value


def test_a_folder_without_rights_is_missing(monkeypatch):
    monkeypatch.setattr(machine_checks.os, "access", lambda path, how: False)
    found = status("disk")
    assert found.status == "missing" and "cannot be written" in found.value and "MXFP4_RUNS" in found.advice


def test_network_is_left_alone_where_the_scale_needs_none(monkeypatch):
    monkeypatch.setattr("mxfp4.data.hub.unreachable", lambda *a: pytest.fail("asked"))
    monkeypatch.delenv("HF_HUB_OFFLINE")
    assert status("network").value.startswith("not tried") and status("network", "gpu").value.startswith("not tried")
