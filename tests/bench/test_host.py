"""`mxfp4 bench host`: a row for each layer and mode, each beside nn.Linear in the same mode."""

from __future__ import annotations

import json

import pytest

from mxfp4.bench import host
from mxfp4.cli import main

SMALL = ["--in-features", "64", "--out-features", "32", "--tokens", "32", "--iterations", "3", "--device", "cpu"]


def test_rows_have_the_ratio_to_nn_linear(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(host, "WARM_UP", 1)
    path = tmp_path / "host.json"
    recipes = ["--recipe", "mxfp4+h16", "--recipe", "quartet"]
    assert main(["bench", "host", "--eager", *SMALL, *recipes, "--json", str(path)]) == 0
    data = json.loads(path.read_text())
    assert data["kind"] == "host"
    first, *rest = data["rows"]
    assert first["name"] == host.LINEAR and first["linear_ratio"] == 1 and first["who"] == "torch"
    assert [row["name"] for row in rest] == ["mxfp4+h16", "quartet"]
    for row in rest:
        assert row["linear_ratio"] == pytest.approx(row["seconds"] / first["seconds"])
        assert (row["in_features"], row["out_features"], row["tokens"], row["device"]) == (64, 32, 32, "cpu")
    assert "x nn.Linear" in capsys.readouterr().out


def test_a_layer_that_fails_is_a_row_and_the_rest_goes_on():
    found = list(host.rows("cpu", host.Sizes(48, 32, 32), ("mxfp4", "bf16"), (False,), 2))
    assert [("problem" in row) for row in found] == [False, True, False]
    assert "in_features=48 is not a multiple of 32" in found[1]["problem"]


def test_compiled_layers_are_compared_with_the_compiled_linear(monkeypatch):
    seen = []
    monkeypatch.setattr(host, "_measure", lambda name, *rest: (seen.append((name, rest[2])), {"seconds": 2.0})[1])
    found = list(host.rows("cpu", recipes=("fp8",)))
    assert seen == [(host.LINEAR, False), ("fp8", False), (host.LINEAR, True), ("fp8", True)]
    assert [row["name"] for row in found][2:] == ["nn.Linear, compiled", "fp8, compiled"]


def test_ti2d_and_nvfp4_are_measured_where_they_quantize():
    for name in host.RECIPES[1:]:
        assert host.layer(name, "cpu", host.Sizes(32, 32, 32)).recipe.wgrad.a.format not in ("bf16", "fp32")
