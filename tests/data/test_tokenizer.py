"""The byte-level BPE: deterministic, lossless on any UTF-8, exact in bytes; Llama's when it cannot be had."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys

import pytest

from mxfp4.data.tokenizer import EOS, SMALLEST_VOCAB, load, load_llama, train
from mxfp4.errors import UserError

WORDS = itertools.product(("old", "newer", "third"), ("report", "address"), ("union", "kitchen", "city"))
TEXTS = [f"The {a} {b} of the {c}, number {i}." for i, (a, b, c) in enumerate(WORDS)]

AWKWARD = [
    "",
    " ",
    "\n\n\t \r\n",
    "naïve façade, 深度学习, Привет, שלום, 🧑🏽‍🚀",
    "\x00\x01\x7f",
    "e\u0301 \u200b\ufeff",
    f"text that spells {EOS} and <s>",
    "".join(chr(c) for c in range(0x20, 0x250)),
]


@pytest.fixture(scope="module")
def tok():
    return train(TEXTS, 300)


@pytest.mark.parametrize("text", AWKWARD, ids=range(len(AWKWARD)))
def test_round_trip(tok, text):
    assert tok.decode(tok.encode(text)) == text


def test_round_trip_of_random_unicode(tok):
    rng = random.Random(0)
    for _ in range(200):
        text = "".join(chr(rng.choice([rng.randrange(0xD800), rng.randrange(0xE000, 0x110000)])) for _ in range(20))
        assert tok.decode(tok.encode(text)) == text


def test_batch_equals_one_by_one(tok):
    texts = TEXTS + AWKWARD
    assert tok.encode_batch(texts) == [tok.encode(t) for t in texts]


def test_training_twice_gives_the_same_bytes(tok):
    assert train(TEXTS, 300).to_bytes() == tok.to_bytes()


def test_another_process_gives_the_same_bytes(tok):
    code = f"from mxfp4.data.tokenizer import train; print(train({TEXTS!r}, 300).sha256())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == tok.sha256()


def test_size_and_eos(tok):
    assert tok.size == 300 and tok.eos == 0
    assert max(i for t in TEXTS for i in tok.encode(t)) < 300
    assert any(i >= SMALLEST_VOCAB for i in tok.encode(TEXTS[0]))  # it did merge


def test_eos_in_text_is_text(tok):
    assert tok.eos not in tok.encode(f"a {EOS} b")


@pytest.mark.parametrize("text", TEXTS[:2] + AWKWARD, ids=range(2 + len(AWKWARD)))
def test_token_bytes_add_up(tok, text):
    assert tok.token_bytes()[tok.encode(text)].sum() == len(text.encode())


def test_eos_has_no_bytes(tok):
    assert tok.token_bytes()[tok.eos] == 0
    assert tok.token_bytes()[1:].min() >= 1


def test_vocabulary_too_small(tok):
    with pytest.raises(UserError, match=f"vocab_size=256 must be at least {SMALLEST_VOCAB}"):
        train(TEXTS, 256)


def test_save_and_load(tok, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(tok.to_bytes())
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        again = load(path)
        assert again.sha256() == tok.sha256()
        assert again.encode(f"a {EOS} b") == tok.encode(f"a {EOS} b")


def test_load_names_what_is_absent_or_damaged(tok, tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        load(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(tok.to_bytes()[:500])
    with pytest.raises(UserError, match="is damaged"):
        load(tmp_path)


def test_llama_offline_says_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.delenv("MXFP4_LLAMA_TOKENIZER", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *a, **k: None)
    with pytest.raises(UserError, match="accept the licence.*MXFP4_LLAMA_TOKENIZER") as error:
        load_llama()
    assert "\n" not in str(error.value)


def test_llama_from_a_file_must_be_llama(monkeypatch, tok, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(tok.to_bytes())
    monkeypatch.setenv("MXFP4_LLAMA_TOKENIZER", str(tmp_path))
    with pytest.raises(UserError, match="has 300 ids, 128256 are needed"):
        load_llama()


LONG = " ".join(TEXTS)


def _saved(tok, tmp_path, change):
    """The tokenizer's file after `change`, which gets its parsed JSON."""
    data = json.loads(tok.to_bytes())
    change(data)
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    return tmp_path


def _settings(**settings):
    return lambda data: data.update(settings)


TRUNCATION = {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
PADDING = {"strategy": {"Fixed": 4096}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
           "pad_token": EOS}  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        _settings(truncation=TRUNCATION),
        _settings(padding=PADDING),
        _settings(truncation=TRUNCATION, padding=PADDING),
        lambda data: data["model"].update(dropout=0.5),
    ],
    ids=["truncation", "padding", "both", "dropout"],
)
def test_what_a_file_was_saved_with_changes_no_tokens(tok, tmp_path, change):
    loaded = load(_saved(tok, tmp_path, change))
    assert loaded.encode(LONG) == tok.encode(LONG)
    assert loaded.encode_batch(["a", LONG]) == tok.encode_batch(["a", LONG])
    assert loaded.sha256() == tok.sha256()


def test_a_vocabulary_with_holes_is_refused_with_both_numbers(tok, tmp_path):
    def make_hole(data):
        last = max(data["model"]["vocab"], key=data["model"]["vocab"].get)
        data["model"]["vocab"][last] = 999

    with pytest.raises(UserError, match="has 300 ids and its largest is 999: every id must be below 300"):
        load(_saved(tok, tmp_path, make_hole))


@pytest.mark.parametrize(
    "change",
    [
        _settings(normalizer={"type": "Lowercase"}),
        _settings(normalizer={"type": "NFKC"}),
        _settings(normalizer={"type": "Strip", "strip_left": True, "strip_right": True}),
        _settings(
            pre_tokenizer={"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
        ),
        _settings(pre_tokenizer={"type": "Whitespace"}),
    ],
    ids=["lower case", "NFKC", "strip", "a space in front", "not byte-level"],
)
def test_a_tokenizer_that_changes_text_is_refused(tok, tmp_path, change):
    with pytest.raises(UserError, match="a byte-level tokenizer is needed that changes no text") as error:
        load(_saved(tok, tmp_path, change))
    assert "\n" not in str(error.value)


def test_llama_is_asked_for_at_a_commit(monkeypatch, tok, tmp_path):
    """The pinned one or the environment's; a file that is named has none."""
    from mxfp4.data import tokenizer
    from mxfp4.data.hub import pinned

    monkeypatch.delenv("MXFP4_LLAMA_TOKENIZER", raising=False)
    asked = []
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *a, revision: asked.append(revision))
    assert tokenizer.llama_file() is None and tokenizer.llama_revision() == pinned(tokenizer.LLAMA_REPOSITORY)
    monkeypatch.setenv("MXFP4_LLAMA_REVISION", "1" * 40)
    tokenizer.llama_file()
    assert asked == [pinned(tokenizer.LLAMA_REPOSITORY), "1" * 40]
    monkeypatch.setenv("MXFP4_LLAMA_TOKENIZER", str(tmp_path))
    assert tokenizer.llama_revision() is None
