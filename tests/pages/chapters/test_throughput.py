"""Table 2: the arithmetic on known curves and speeds, what emulation may not say, the calculator's contours."""

from __future__ import annotations

import json
import math

import pytest

from mxfp4.analysis import metrics, published
from mxfp4.analysis.claims import judge, load_ledger
from mxfp4.analysis.study import Study, studies
from mxfp4.pages.chapters import throughput
from mxfp4.studies.store import Store
from tests.fakes.studies import config, fill, put


@pytest.fixture
def study(tmp_path):
    """FP8 at 1000 tokens a second; H16 with 8 % overhead at 1200 or so, H32 without a difference; another never arrives."""
    store = Store(tmp_path)
    fill(store, {"fp8": 1.0})
    for seed in (0, 1, 2):
        put(store, config("mxfp4+h16", seed), slowdown=1.08, speed=1190.0 + 10 * seed)
        put(store, config("mxfp4+h32", seed), slowdown=1.08, speed=1000.0)
        put(store, config("mxfp4", seed), slowdown=9.0, speed=1200.0)
    (found,) = studies(store.load())
    return found


@pytest.fixture
def native(monkeypatch):
    monkeypatch.setattr(Study, "path", "native")


def test_on_an_emulating_machine_no_speed_up_is_claimed(study):
    assert "no speed-up is claimed" in throughput.path_sentence(study)
    assert throughput.recorded(study, ["fp8", "mxfp4+h16"])["over"].isna().all()
    frame = throughput.gated(study, ["fp8", "mxfp4+h16", "mxfp4+h32"])
    ours = frame[frame["source"].str.startswith("ours")]
    assert set(ours["basis"]) == {"P1's step speed", "the logs' step speed"} and set(ours["arm"]) == {"mxfp4+h16"}
    p1 = ours[ours["basis"] == "P1's step speed"].iloc[0]
    assert p1["end_to_end"] == pytest.approx(1.21 / 1.08, abs=0.01) and p1["e_low"] <= p1["end_to_end"] <= p1["e_high"]
    title = throughput.gated_chart(frame, study, title="T").to_dict()["title"]
    assert title["subtitle"] == throughput.EMULATED
    assert "emulates FP4" in throughput.path_sentence(study)


def test_the_benchmark_is_of_the_gpu_of_the_runs(study):
    assert throughput.bench_of(None) == throughput.bench_of(study) == "step-h200"  # of the CPU
    (record,) = [r for r in study.records if (r.config.recipe, r.config.seed) == ("fp8", 0)]
    record.machine.update(device_type="cuda", device="AMD Instinct MI355X")
    assert throughput.bench_of(Study((record,))) == "step-mi355x"


def test_on_native_hardware_both_halves_are_measured(study, native):
    assert throughput.recorded(study, ["mxfp4+h16"])["over"].iloc[0] == pytest.approx(1.2)
    frame = throughput.gated(study, ["mxfp4+h16"]).set_index("basis")
    own = frame.loc["step speed and overhead measured"]
    assert own["end_to_end"] == pytest.approx(1.2 / 1.08, abs=0.01) and own["e_low"] < own["end_to_end"] < own["e_high"]
    chart = throughput.gated_chart(frame.reset_index(), study, title="T").to_dict()
    assert chart["title"]["subtitle"] == ["measured on native FP4"]
    assert "measurements of Table 2" in throughput.path_sentence(study)


def test_an_arm_that_never_arrives_has_only_an_upper_bound(study):
    effect = metrics.measured_end_to_end(study, arm="mxfp4")
    assert effect.low == 0.0 and effect.high < 1 and "does not reach" in effect.note


def test_the_claim_is_decided_on_native_hardware_alone(study, monkeypatch):
    (claim,) = [c for c in load_ledger() if c.id == "table2-measured"]
    assert judge(claim, [study]).verdict == "not tested at this scale"
    monkeypatch.setattr(Study, "path", "native")
    assert judge(claim, [study]).verdict == "holds"


def test_published_rows_are_the_sources(study):
    frame = throughput.gated(None, ["mxfp4+h16"])
    assert list(frame["source"]) == ["P1, Table 2 (P1)", *["press article on P1 (press)"] * 2, "MLPerf logs (log)"]
    assert frame["end_to_end"].iloc[0] == pytest.approx(1.21 / 1.08)
    assert list(frame["stated"]) == ["1.12x end to end", *["+9-10 % end to end"] * 2, "1.14x by minutes"]
    assert list(frame["arithmetic"])[:3] == ["1.21 / 1.08 = 1.12", "1.20 / 1.09 = 1.10", "1.20 / 1.08 = 1.11"]
    printed = throughput.gated_table(frame)
    assert printed["overhead"].iloc[0] == "+8.0%" and printed["end_to_end"].iloc[3] == "1.15"
    title = throughput.gated_chart(frame, None, title="T").to_dict()["title"]
    assert title["subtitle"] == ["no records of this scale yet: published figures alone"]


def test_intervals_are_printed(study):
    printed = throughput.gated_table(throughput.gated(study, ["mxfp4+h16"]))
    assert printed["overhead"].iloc[-1].startswith("+8.") and "[" in printed["end_to_end"].iloc[-1]


@pytest.fixture
def bench(tmp_path, monkeypatch):
    monkeypatch.setenv("MXFP4_RUNS", str(tmp_path))
    names = {"bf16": 0.1, "fp8": 0.2, "mxfp4+h16": 0.25, "mxfp4+h32": 0.26, "mxfp4, packed": 0.3}
    rows = [{"name": n, "seconds": s} for n, s in names.items()] + [{"name": "ti2d", "problem": "no"}]
    machine = {"device": "Chip", "torch": "2", "triton": "3", "path": "emulated"}
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "step-x.json").write_text(json.dumps({"machine": machine, "rows": rows}))


def test_a_benchmark_is_read_against_fp8(bench):
    frame, machine = throughput.benched("step-x")
    assert list(frame["recipe"]) == ["bf16", "fp8", "mxfp4+h16", "mxfp4+h32"] and set(frame["against"]) == {"fp8"}
    assert frame.set_index("recipe")["ratio"]["mxfp4+h16"] == pytest.approx(1.25)
    assert throughput.step_chart(frame, machine, title="T").to_dict()["title"]["subtitle"][1].startswith("the price of")
    assert machine.endswith("FP8 emulated, FP4 emulated")
    sizes = throughput.block_sizes("step-x")
    assert list(sizes["ratio"]) == [published.figure("h16-h32").low, pytest.approx(1.04)]


def test_a_benchmark_with_another_fp8_than_the_runs_says_so(study):
    assert study.fp8_path == "emulated" and throughput.other_fp8("a chip, FP8 emulated, FP4 emulated", study) == ""
    assert "FP8 is emulated in the runs above" in throughput.other_fp8("a chip, FP8 native, FP4 emulated", study)


def test_without_a_benchmark(bench):
    frame, machine = throughput.benched("none")
    assert frame.empty and machine == "not run" and len(throughput.block_sizes("none")) == 1


def test_contours_are_where_the_end_to_end_speed_is_constant():
    frame = throughput.contours()
    assert set(frame["level"]) == set(throughput.LEVELS)
    for row in frame.itertuples():
        assert row.speed / (1 + row.overhead / 100) == pytest.approx(row.level)
        assert throughput.SPEEDS[0] <= row.speed <= throughput.SPEEDS[1]


def test_the_calculator_starts_at_table_2_and_has_two_sliders(study):
    spec = throughput.calculator(throughput.gated(study, ["mxfp4+h16"]), title="T").to_dict()
    sliders = {p["name"]: p for p in spec["params"]}
    assert sliders["step_speed"]["value"] == 1.21 and sliders["token_overhead"]["value"] == pytest.approx(8)
    assert all(p["bind"]["input"] == "range" for p in sliders.values())
    assert math.isclose(sliders["step_speed"]["bind"]["max"], 2.0)
