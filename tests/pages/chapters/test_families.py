"""The page of model families: the committed record is whole, and its table says what the record holds."""

import json

import pytest

pytest.importorskip("transformers", reason="transformers is not installed (pip install -e '.[hf]')")

from mxfp4.adapters.families import FAMILIES
from mxfp4.errors import UserError
from mxfp4.pages.chapters import families


def test_the_committed_record_has_every_family_and_all_work():
    frame = families.frame()
    assert list(frame["family"]) == list(FAMILIES)
    assert set(frame["reloaded"]) == set(frame["repeated"]) == {"yes"}
    assert frame["weights"].between(0.8, 1).all() and frame["flops"].between(0.8, 1).all()
    left = frame.set_index("family")["left_out"]
    assert left["Llama"] == "lm_head (output head) 9.1%"
    assert left["GptOss"].startswith("router 0.2%; lm_head (output head)")
    assert families.answer().startswith("16 of 16 families train with mxfp4+h16")
    assert "At least 83.5%" in families.answer() and "ViT has the smallest share" in families.answer()


def test_a_missing_and_a_failed_record_are_said(tmp_path, monkeypatch):
    monkeypatch.setenv("MXFP4_RUNS", str(tmp_path))
    (tmp_path / "bench").mkdir()
    with pytest.raises(UserError, match="families.json does not exist: `mxfp4 bench families"):
        families.frame()
    rows = [{"name": "Llama", "who": "mxfp4", "problem": "ValueError: no"}]
    (tmp_path / "bench" / "families.json").write_text(json.dumps({"kind": "families", "rows": rows}))
    with pytest.raises(UserError, match=r"Llama failed \(ValueError: no\)"):
        families.frame()
