"""Each family of transformers models is converted, trains, is saved, reloaded and evaluated twice alike."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers", reason="transformers is not installed (pip install -e '.[hf]')")

import transformers

from mxfp4.adapters.families import FAMILIES, row

QUERY_KEY = {
    "Phi-3": "qkv_proj", "GPT-NeoX": "query_key_value", "BERT": "key, query", "RoBERTa": "key, query", "T5": "k, q",
    "DeepSeek-V3": "kv_a_proj_with_mqa, kv_b_proj, q_a_proj, q_b_proj",
}  # fmt: skip
HEADS = {"BERT": "cls.predictions.decoder", "RoBERTa": "lm_head.decoder", "Whisper": "proj_out", "ViT": "classifier"}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_trains_and_comes_back(name):
    transformers.utils.logging.disable_progress_bar()
    found = row(name)
    assert found.works, found
    assert found.weights > 0.8 and found.flops > 0.8
    assert found.query_key == QUERY_KEY.get(name, "k_proj, q_proj")
    assert found.head == HEADS.get(name, "lm_head")
    assert sum(found.left_out.values()) == pytest.approx(1 - found.weights)
    assert found.losses[1] < found.losses[0]
