"""The demonstration at full width: rows and sentence from the file, and what stands there without one."""

from __future__ import annotations

import json

import pytest

from mxfp4.pages.chapters import full_width

GIB = 2**30
RUN = {"recipe": "bf16", "layers": 2, "seq_len": 4096, "tokens_per_step": 16384, "tokens_per_second": 1000.0}
ROWS = [
    RUN | {
        "ranks": 2, "from": 0, "first": 20, "last": 140, "peak_bytes": [20 * GIB, 22 * GIB], "estimated_bytes": 20 * GIB,
        "checkpoint": {"a step waited": 3.5, "written after": 8.0}, "killed": 150, "saved": 110,
    },
    RUN | {
        "ranks": 1, "from": 110, "first": 140, "last": 200, "peak_bytes": [40 * GIB], "estimated_bytes": 40 * GIB,
        "checkpoint": {}, "status": "finished", "loss": 6.25,
    },
]  # fmt: skip


@pytest.fixture
def made(tmp_path, monkeypatch):
    monkeypatch.setenv("MXFP4_RUNS", str(tmp_path))
    (tmp_path / "bench").mkdir()
    machine = {"device": "Test GPU", "fp8_path": "native", "path": "emulated", "torch": "2.11"}
    (tmp_path / "bench" / "width-x.json").write_text(json.dumps({"machine": machine, "rows": ROWS}))


def test_a_row_a_run_with_the_largest_peak_of_its_gpus(made):
    before, after = full_width.frame("width-x").to_dict("records")
    assert (before["gpus"], before["steps"], before["end"]) == (2, "0 to 150", "killed; checkpoint of step 110 whole")
    assert (after["gpus"], after["steps"], after["end"]) == (1, "110 to 200", "finished, loss 6.250")
    assert before["peak"] == 22 and before["off"] == pytest.approx(0.1) and after["off"] == 0


def test_the_sentence_has_the_worst_estimate_and_the_checkpoints(made):
    text = full_width.sentence("width-x")
    assert "2 layers, sequences of 4,096 tokens, 16,384 tokens a step, on Test GPU (FP8 native, FP4 emulated" in text
    assert "within 10.0 %" in text and "waited 3.5 to 3.5 s; it was whole 8.0 to 8.0 s" in text


def test_rows_without_a_checkpoint_and_a_note_on_the_figures(made, tmp_path):
    path = tmp_path / "bench" / "width-x.json"
    data = json.loads(path.read_text())
    path.write_text(json.dumps(data | {"rows": data["rows"][1:], "note": "read off"}))
    assert full_width.sentence("width-x").endswith("of the dry run's estimates. The figures are read off.")


def test_without_the_file_it_says_how_to_make_it(made):
    assert full_width.frame("width-y").empty
    assert full_width.sentence("width-y").endswith("--json runs/bench/width-y.json` does it on one GPU or two.")


def test_the_figures_in_the_repository_can_be_read(monkeypatch):
    monkeypatch.delenv("MXFP4_RUNS", raising=False)
    table = full_width.frame("width-h200")
    assert set(table["recipe"]) == {"bf16", "fp8", "mxfp4+h16"} and table["off"].abs().max() < 0.1
