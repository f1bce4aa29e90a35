"""The kernel chapter's data: the roofline's arithmetic, and tables over benchmark files that may lack rivals or steps."""

from __future__ import annotations

import json

import pytest

from mxfp4.analysis import published
from mxfp4.bench import kernels as bench_kernels
from mxfp4.errors import UserError
from mxfp4.pages import roofline
from mxfp4.pages.chapters import kernels as kernel_tables
from mxfp4.publish.notebook import records_fingerprint


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """Writes a benchmark file into a runs folder of its own."""
    monkeypatch.setenv("MXFP4_RUNS", str(tmp_path))
    (tmp_path / "bench").mkdir()

    def write(name: str, rows: list[dict]):
        machine = {"device": "Chip", "torch": "1", "triton": "2"}
        (tmp_path / "bench" / f"{name}.json").write_text(json.dumps({"machine": machine, "rows": rows}))

    return write


def test_the_roofline_is_the_slower_of_operations_and_bytes():
    compute, memory = roofline.gemm_seconds(16384, 4096, 4096, "mxfp4")
    assert compute == pytest.approx(2 * 16384 * 4096 * 4096 / 10.1e15)
    assert memory == pytest.approx(((16384 + 4096) * 4096 * 0.53125 + 16384 * 4096 * 2) / 8e12)
    frame = roofline.gemms()
    assert len(frame) == 4 * 3 * 3
    assert (frame["flops_per_second"] <= max(published.MI355X_FLOPS.values()) * 1.0001).all()
    assert (frame.groupby(["layer", "format"])["gemm"].nunique() == 3).all()
    thin = roofline.gemm_seconds(32, 4096, 4096, "mxfp4")
    assert thin[1] > thin[0]  # few tokens: bound by bytes


def test_ways_to_quantize_differ_by_their_bytes_alone():
    fused, two, copies = roofline.WAYS
    assert fused.bytes_an_element("mxfp4") == 2 + 2 * 0.53125
    assert two.bytes_an_element("mxfp4") - fused.bytes_an_element("mxfp4") == 2
    assert copies.bytes_an_element("mxfp4") - fused.bytes_an_element("mxfp4") == 10
    shares = roofline.shares()
    assert shares["gemms"].nunique() == 1
    assert shares["share"].is_monotonic_increasing and shares["over_fp8"].is_monotonic_decreasing
    assert 1 < shares["over_fp8"].iloc[0] < published.MI355X_FLOPS["mxfp4"] / published.MI355X_FLOPS["fp8"]


def test_the_committed_isa_report_covers_every_kernel_and_spills_nothing():
    from mxfp4.bench.isa import ARCHS, kernels_of

    frame = kernel_tables.isa()
    assert set(zip(frame["arch"], frame["kernel"], strict=True)) == {(a, k) for a in ARCHS for k in kernels_of(a)}
    assert not frame["memory"].any() and frame["chips"].notna().all()
    assert kernel_tables.multiplying(frame)["units"].str.contains("mfma_scale|block_scale").all()
    assert list(kernel_tables.quantizing(frame)["kernel"])[:2] == ["quantize", "quantize h16"]


def test_rivals_stand_beside_ours_and_a_failed_one_says_why(bench):
    bench("k", [
        {"name": "copy", "who": "torch", "bytes_per_second": 4e12},
        {"name": "packed", "who": "mxfp4", "seconds": 1e-4, "bytes": 10, "ratio": 0.9, "correct": True},
        {"name": "packed", "who": "torchao", "seconds": 5e-4, "bytes": 10, "ratio": 0.18, "correct": True},
        {"name": "values", "who": "mxfp4", "seconds": 2e-4, "bytes": 10, "ratio": 0.9, "correct": True},
        {"name": "values", "who": "twin", "problem": "RuntimeError: no"},
        {"name": "gemm, bf16", "who": "library", "seconds": 1e-3, "flops_per_second": 7e14},
        {"name": "gemm, emulated", "who": "mxfp4", "seconds": 2e-3, "ratio": 0.5},
    ])  # fmt: skip
    frame = kernel_tables.rows("k")
    assert list(kernel_tables.quantizers(frame)["name"]) == ["packed", "packed", "values"]
    assert list(kernel_tables.products(frame)["who"]) == ["library", "mxfp4"]
    rivals = kernel_tables.against_rivals(frame).set_index("who")
    assert list(rivals.index) == ["torchao", "twin"]
    assert rivals.loc["torchao", "times"] == pytest.approx(5) and rivals.loc["twin", "problem"] == "RuntimeError: no"
    kernel_tables.ratio_chart(kernel_tables.quantizers(frame), "t").to_dict()


def test_without_rivals_steps_or_a_file_tables_are_empty(bench, tmp_path):
    bench("k", [{"name": "packed", "who": "mxfp4", "seconds": 1e-4, "bytes": 10, "ratio": 0.9}])
    assert kernel_tables.against_rivals(kernel_tables.rows("k")).empty
    assert kernel_tables.products(kernel_tables.rows("k")).empty
    assert kernel_tables.rows("step").empty
    (tmp_path / "bench" / "broken.json").write_text("{")
    with pytest.raises(UserError, match=r"broken.json is damaged .*: write it again"):
        kernel_tables.rows("broken")


def test_h32_against_h16_by_each_source():
    frame = kernel_tables.sizes_of_rotation("kernels-h200").set_index("source")
    assert frame.loc["P1, text", "ratio"] == published.figure("h16-h32").low
    assert (frame["ratio"] >= 1).all() and len(frame) == 7


def test_the_cpu_table_counts_in_torchaos_times(bench):
    bench("c", [
        {"name": "packed", "who": "mxfp4, C", "seconds": 1.0, "processor_seconds": 1.0, "elements_per_second": 8.0},
        {"name": "packed", "who": "torchao", "seconds": 9.0, "processor_seconds": 4.0, "elements_per_second": 2.0},
        {"name": "values", "who": "mxfp4", "seconds": 1.0, "processor_seconds": 1.0, "elements_per_second": 8.0},
    ])  # fmt: skip
    frame = kernel_tables.cpu("c")
    assert frame["times"].iloc[0] == 4 and frame["times"].iloc[1] == 1 and frame["times"].isna().iloc[2]


def test_a_new_benchmark_makes_chapters_run_again(bench):
    bench("k", [])
    before = records_fingerprint()
    bench("k", [{"name": "packed", "who": "mxfp4"}])
    assert records_fingerprint() != before


def test_the_benchmark_of_kernels_names_what_the_chapter_compares():
    assert {"packed, both, h16", "packed, both, h32"} <= set(bench_kernels.OURS)
