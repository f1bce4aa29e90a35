"""`mxfp4 bench node`: tiny, on the CPU; and its arithmetic on rows that are made up."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from mxfp4.bench import node, node_prediction
from mxfp4.bench.node import Case, Setting
from mxfp4.cli import main
from mxfp4.studies.plans import plan, steps_worth
from mxfp4.studies.scales import MI355X

TINY = replace(
    node.TINY, seq_len=32, batch_size=4, micro_batches=2,
    model=replace(node.TINY.model, vocab_size=64, dim=32, n_heads=1, ffn_dim=64),
)  # fmt: skip


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(node, "TINY", TINY)
    monkeypatch.setattr(node, "WARM_UP", 1)
    monkeypatch.setattr(node, "STEPS", 2)
    monkeypatch.setattr(node, "ATTENTION", ("auto", "cudnn"))
    monkeypatch.setattr(node.cross_entropy, "CHOICES", ("whole", "chunked"))


@pytest.fixture
def here(small, monkeypatch):
    """Ranks are this process."""
    cpu = torch.device("cpu")
    monkeypatch.setattr(node, "in_processes", lambda case, setting, seconds: [node.measure(case, setting, cpu)])


def test_the_command_measures_each_recipe_twice_and_each_choice_once_and_answers(here, tmp_path, capsys):
    path = tmp_path / "node.json"
    code = main(
        ["bench", "node", "--tiny", "--gpus", "0", "--recipe", "bf16", "--recipe", "mxfp4", "--json", str(path)]
    )
    data = json.loads(path.read_text())
    rows = {row["name"]: row for row in data["rows"]}
    assert list(rows) == [
        "bf16, 4 layers", "mxfp4, 4 layers", "bf16, 2 layers", "mxfp4, 2 layers", "bf16, 4 layers, attention cudnn",
        "bf16, 4 layers, cross entropy whole",
    ]  # fmt: skip
    assert "attention='cudnn' does not run on cpu" in rows.pop("bf16, 4 layers, attention cudnn")["problem"]
    for row in rows.values():
        parts = sum(row[f"{part}_seconds"] for part in ("forward", "backward", "optimizer"))
        assert row["path"] == "emulated" and row["loss"] > 3 and parts == pytest.approx(row["seconds"], rel=0.5)
        assert row["forward_seconds"] > row["optimizer_seconds"] > 0
    assert rows["bf16, 4 layers, cross entropy whole"]["loss"] == pytest.approx(rows["bf16, 4 layers"]["loss"])
    assert (data["kind"], data["ranks"], data["layers"], data["tiny"]) == ("node", 1, 8, True)
    assert data["go"] is (code == 0) and data["machine"]["device_type"] == "cpu" and data["machine"]["torch"]
    said = capsys.readouterr().out
    assert "no FP4 speed: mxfp4 emulated here" in said and ("GO\n" in said)
    assert "FP8 on 8 MI355X: 1.043 s a step (MLPerf v5.1 logs)" in said


def test_two_ranks_measure_and_a_rank_that_fails_is_a_row(small):
    setting = Setting(TINY, 2, 0, ("bf16",), steps=1)
    base = Case("bf16", 1, "auto", "auto", "whole")
    one, other = node.in_processes(base, setting, 200)
    assert (one["ranks"], one["parts"], one["loss"]) == (2, 1, other["loss"])
    (found,) = node.in_processes(replace(base, recipe="none"), replace(setting, ranks=1), 100)
    assert "recipe 'none' is not known" in found["problem"]
    assert node.in_processes(base, setting, 0.0) == [{"problem": "not done after 0 s"}]


def test_what_is_not_reached_is_said_and_no_go(here):
    setting = Setting(TINY, 1, 0, ("bf16",))
    rows = list(node.rows(setting, 0.0))
    assert len(rows) == 4 and all(row["not_reached"] for row in rows)
    answer = node_prediction.text(rows, setting, "none")
    assert "Not reached in the time: bf16, 4 layers; bf16, 2 layers" in answer and "NO-GO" in answer
    assert "NO: not measured: bf16 (bf16, 4 layers: not reached in 0 minutes" in answer


def test_a_mi355x_has_a_case_for_each_usable_gemm_back_end(monkeypatch):
    usable = [node.choice.Status(name, state) for name, state in
              (("aiter", "usable"), ("scaled_mm", "refused"), ("triton", "usable"))]  # fmt: skip
    monkeypatch.setattr(node, "depths", lambda setting: (2, 4))
    monkeypatch.setattr(node, "chip_path", lambda device: "native")
    monkeypatch.setattr(node.choice, "statuses", lambda device: usable)
    monkeypatch.setattr(node.choice, "gemm_backend", lambda device: "aiter")
    found = [case for case in node.cases(Setting(MI355X, 8, 0)) if case.varied == "gemm_backend"]
    assert [case.name for case in found] == [
        "mxfp4, 4 layers, gemm backend triton", "mxfp4+h16, 4 layers, gemm backend triton"
    ]  # fmt: skip


SHALLOW = replace(MI355X, model=replace(MI355X.model, n_layers=6))
"""Of which estimates of memory are made quickly."""


# Arithmetic on made-up rows: a layer takes 0.01 s forward and 0.02 s backward, the optimizer 0.001 s.


def made(recipe, layers, *, path="native", slower=1.0, varied="", **more):
    forward, backward, optimizer = slower * (0.1 + 0.01 * layers), slower * (0.2 + 0.02 * layers), 0.05 + 0.001 * layers
    row = {"recipe": recipe, "layers": layers, "varied": varied, "name": f"{recipe}, {layers} layers", "path": path,
           "seconds": forward + backward + optimizer, "forward_seconds": forward, "backward_seconds": backward,
           "optimizer_seconds": optimizer, "peak_bytes": 10**9 * layers, "communication_share": None, "loss": 11.0}  # fmt: skip
    return row | more


def both(recipe, **more):
    return [made(recipe, layers, **more) for layers in (2, 4)]


def test_two_depths_give_the_step_of_all_layers_and_more_micro_batches_repeat_the_passes():
    (eight,) = node_prediction.predictions(both("bf16"), Setting(SHALLOW, 8, 0, ("bf16",)))
    assert eight.seconds == pytest.approx(0.3 + 6 * 0.03 + 0.05 + 6 * 0.001)
    (one,) = node_prediction.predictions(both("bf16"), Setting(SHALLOW, 1, 0, ("bf16",)))
    assert one.seconds == pytest.approx(8 * (0.3 + 6 * 0.03) + 0.05 + 6 * 0.001)
    assert eight.bytes > 6e9 and one.bytes > 16 * SHALLOW.model.n_params()


def test_hours_of_the_tiers_are_those_of_their_arms():
    setting = Setting(SHALLOW, 8, 0, ("bf16", "fp8"))
    found = node_prediction.predictions([*both("bf16"), *both("fp8", slower=0.5)], setting)
    first, *rest = node_prediction.hours(found, setting)
    bf16, fp8 = (p.seconds for p in found)
    arm = plan("first", SHALLOW).arms[0]
    assert (first.tier, first.arms, first.assumed) == ("first", 12, 6)
    assert first.hours == pytest.approx(steps_worth(arm) * (9 * bf16 + 3 * fp8) / 3600)
    assert rest[-1].hours_in_all == pytest.approx(first.hours + sum(tier.hours for tier in rest))


@pytest.mark.parametrize(
    ("rows", "go", "reason"),
    [
        ([*both("fp8"), *both("mxfp4", slower=0.8)], True, "mxfp4 1.2"),
        ([*both("fp8"), *both("mxfp4", slower=1.1)], False, "mxfp4 0.9"),
        ([*both("fp8"), *both("mxfp4", slower=1.1, path="emulated")], True, "no FP4 speed: mxfp4 emulated here"),
        ([*both("fp8"), *both("mxfp4", slower=0.8, loss=float("nan"))], False, "losses that are not finite"),
        ([*both("fp8"), made("mxfp4", 2)], False, "not measured: mxfp4"),
    ],
)
def test_go_or_no_go(rows, go, reason):
    setting = Setting(SHALLOW, 8, 0, ("fp8", "mxfp4"))
    enough = replace(node_prediction._machine(setting), memory=288e9, gpus=8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(node_prediction, "_machine", lambda setting: enough)
        found = node_prediction.predictions(rows, setting)
        answer = node_prediction.verdict(rows, found, replace(setting, gpus=8))
    assert answer.go is go and any(reason in text for holds, text in answer.reasons if holds is go), answer


def test_memory_that_does_not_fit_is_no_go_and_emulated_fp4_is_not_set_beside_published_fp4():
    setting, rows = Setting(SHALLOW, 8, 8, ("mxfp4+h16",)), both("mxfp4+h16", path="emulated")
    small = replace(node_prediction._machine(replace(setting, gpus=0)), memory=5e9, gpus=8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(node_prediction, "_machine", lambda setting: small)
        found = node_prediction.predictions(rows, setting)
        answer = node_prediction.verdict(rows, found, setting)
    assert not answer.go and any("of 5 GB" in text for holds, text in answer.reasons if not holds)
    assert node_prediction.published(found)[1].endswith("not comparable: emulated here")


def test_a_faster_choice_is_named_as_an_option():
    faster = made("bf16", 4, slower=0.5, varied="attention", attention="aiter")
    slower = made("bf16", 4, slower=2.0, varied="cross_entropy", cross_entropy="whole")
    (line,) = node_prediction.advice([*both("bf16"), faster, slower])
    assert line.startswith("--attention aiter: 0.5")


def test_only_collectives_that_nothing_covers_count_as_communication():
    kernels = [("gemm", 0, 4), ("ncclDevKernel_Generic", 2, 6), ("gemm", 5, 8), ("ncclDevKernel_Generic", 9, 10)]
    assert node.exposed_share(kernels) == pytest.approx(0.2)
    assert node.exposed_share([]) is None
