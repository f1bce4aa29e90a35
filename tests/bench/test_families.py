"""`mxfp4 bench families`: a row holds what the page shows, and a family that fails is a row too."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers", reason="transformers is not installed (pip install -e '.[hf]')")

import transformers

from mxfp4.adapters import families as adapter
from mxfp4.bench import families


def test_a_row_is_checked_and_says_its_transformers(monkeypatch):
    monkeypatch.setattr(adapter, "FAMILIES", {"Llama": adapter.FAMILIES["Llama"], "None": None})
    good, bad = families.rows("mxfp4")
    assert (good["name"], good["who"], good["correct"]) == ("Llama", "mxfp4, mxfp4", True)
    assert good["transformers"] == transformers.__version__
    assert good["left_out"] == {"lm_head: output head (get_output_embeddings)": pytest.approx(1 / 11)}
    assert bad["name"] == "None" and "problem" in bad and "correct" not in bad
