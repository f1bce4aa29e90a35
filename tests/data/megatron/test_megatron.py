"""Megatron datasets: what the format says, what is refused, and the order of samples against a naive one."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy as np
import pytest

from mxfp4.data.megatron import sample_order
from mxfp4.data.megatron.indexed_dataset import open_dataset
from mxfp4.data.megatron.names import parse
from mxfp4.data.megatron.sample_order import build_order
from mxfp4.data.packing import prepare
from mxfp4.errors import UserError

VOCAB = 1000


def write(prefix: Path, documents: list[list[int]], code: int = 4) -> Path:
    """A dataset, from the format's description alone."""
    kind = {4: "i", 8: "H"}[code]
    lengths = [len(d) for d in documents]
    starts = [sum(lengths[:i]) * struct.calcsize(kind) for i in range(len(lengths))]
    n = len(documents)
    index = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, n, n + 1)
    index += struct.pack(f"<{n}i", *lengths) + struct.pack(f"<{n}q", *starts) + struct.pack(f"<{n + 1}q", *range(n + 1))
    prefix.with_name(prefix.name + ".idx").write_bytes(index)
    flat = [t for d in documents for t in d]
    prefix.with_name(prefix.name + ".bin").write_bytes(struct.pack(f"<{len(flat)}{kind}", *flat))
    return prefix


def documents_of(n: int, seed: int = 0) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(0, VOCAB, size).tolist() for size in random.integers(1, 40, n)]


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    monkeypatch.setenv("MXFP4_RUNS", str(tmp_path / "runs"))
    train, held = documents_of(60), documents_of(9, seed=1)
    names = write(tmp_path / "c4.en_6_text", train), write(tmp_path / "val.text", held)
    return f"megatron:{names[0]},{names[1]},samples=200", train, held


@pytest.mark.parametrize("code", [4, 8])
def test_documents_come_back(tmp_path, code):
    written = documents_of(5)
    dataset = open_dataset(write(tmp_path / "a.b", written, code))
    assert [dataset.sequence(i, 0).tolist() for i in range(5)] == written
    assert dataset.sequence(1, 2, 3).tolist() == written[1][2:3]


def naive_order(lengths, samples, seq_len, seed):
    """GPTDataset's rule, spelled out: all tokens of the shuffled documents in one list of (document, offset)."""
    epoch = sum(lengths)
    epochs = 1
    while epochs * epoch < samples * seq_len + 1:
        epochs += 1
    before = ((epochs - 1) * epoch - 1) // seq_len
    separate = epochs > 1 and samples - before < int(0.8 * ((epoch - 1) // seq_len))
    random = np.random.RandomState(seed)
    documents = []
    for n in [epochs - 1, 1] if separate else [epochs]:
        block = np.array(list(range(len(lengths))) * n, dtype=np.int32)
        random.shuffle(block)
        documents += block.tolist()
    stream = [(d, i) for d in documents for i in range(lengths[d])]
    total = (len(stream) - 1) // seq_len
    places = []
    for start, end in [(0, before), (before, total)] if separate else [(0, total)]:
        block = np.arange(start, end, dtype=np.uint32)
        random.shuffle(block)
        places += block.tolist()
    return [[stream[k * seq_len + i] for i in range(seq_len + 1)] for k in places]


@pytest.mark.parametrize(("samples", "chunk"), [(20, 1 << 20), (200, 7), (149, 50), (400, 1 << 20)])
def test_samples_come_in_megatrons_order(corpus, monkeypatch, samples, chunk):
    """One epoch; several, with the last one shuffled in or apart; sums over chunks."""
    monkeypatch.setattr(sample_order, "CHUNK", chunk)
    name, train, _ = corpus
    wanted = naive_order([len(d) for d in train], samples, 16, seed=5)
    packed = prepare(name.replace("=200", f"={samples}"), VOCAB, progress=False)
    found = [packed.batch(step, 1, 16, seed=5)[0].tolist() for step in range(len(wanted))]
    assert len(wanted) >= samples
    assert found == [[train[d][i] for d, i in sample] for sample in wanted]


def test_both_kinds_of_last_epoch_are_tested(corpus):
    lengths = np.array([len(d) for d in corpus[1]], dtype=np.int32)
    last = {}
    for samples in (149, 200):
        order = build_order(lengths, range(60), samples, 16, 5)
        last[samples] = sorted(order.documents[-60:].tolist()) == list(range(60))
    assert last == {149: False, 200: True}


def test_a_batch_is_a_function_of_step_and_seed(corpus):
    packed = prepare(corpus[0], VOCAB, progress=False)
    batch = packed.batch(3, 4, 16, seed=1)
    assert batch.shape == (4, 17) and batch.tolist() != packed.batch(3, 4, 16, seed=2).tolist()
    again = prepare(corpus[0], VOCAB, progress=False)
    assert not again.built and again.batch(3, 4, 16, seed=1).tolist() == batch.tolist()
    with pytest.raises(UserError, match="needs 4000 samples, the order .* has .*: name more, as in .*,samples=8000"):
        packed.batch(999, 4, 16, seed=1)


def test_validation_is_read_as_stored(corpus):
    name, _, held = corpus
    flat = [t for d in held for t in d]
    assert prepare(name, VOCAB, progress=False).eval_windows(3, 16).tolist() == [
        flat[i * 16 : i * 16 + 17] for i in range(3)
    ]


def test_without_a_validation_prefix_the_last_documents_are_held_out(corpus):
    name, train, _ = corpus
    packed = prepare(f"{name.partition(',')[0]},samples=20", VOCAB, progress=False)
    assert packed.meta["splits"]["train"]["documents"] == 58 and packed.meta["splits"]["validation"]["documents"] == 2
    flat = train[58] + train[59]
    assert packed.eval_windows(1, 8)[0].tolist() == flat[:9]
    trained = {t for step in range(packed.n_windows("train", 8)) for t in packed.batch(step, 1, 8, 0)[0].tolist()}
    assert trained <= {t for d in train[:58] for t in d}


def test_a_file_is_hashed_once_and_a_change_is_noticed(corpus, monkeypatch):
    from mxfp4.data.megatron.indexed_dataset import IndexedDataset

    name = corpus[0]
    scans = []
    scan = IndexedDataset.scan
    monkeypatch.setattr(
        IndexedDataset, "scan", lambda self, *a, **k: scans.append(self.prefix.name) or scan(self, *a, **k)
    )
    first = prepare(name, VOCAB, progress=False)
    prepare(name, VOCAB, progress=False).batch(0, 2, 16, 0)
    assert scans == ["c4.en_6_text", "val.text"]
    file = parse(name).train.with_name("c4.en_6_text.bin")
    os.utime(file, ns=(1, 1))  # touched, not changed
    assert prepare(name, VOCAB, progress=False).fingerprint == first.fingerprint and len(scans) == 4
    data = bytearray(file.read_bytes())
    data[0] ^= 1
    file.write_bytes(data)
    with pytest.raises(UserError, match=r"c4.en_6_text.bin changed: its SHA-256 was .*--rebuild"):
        prepare(name, VOCAB, progress=False)
    with pytest.raises(UserError, match=r"c4.en_6_text.bin changed since"):
        first.verify()
    assert prepare(name, VOCAB, progress=False, rebuild=True).fingerprint != first.fingerprint


def test_the_fingerprint_is_of_files_and_samples(corpus):
    name, _, _ = corpus
    packed = prepare(name, VOCAB, progress=False)
    assert prepare(name, 2 * VOCAB, progress=False).fingerprint == packed.fingerprint
    assert prepare(name.replace("=200", "=201"), VOCAB, progress=False).fingerprint != packed.fingerprint
    assert set(packed.origin["files"]["train"]) == {"prefix", "bin", "idx"}
    assert np.isnan(packed.bytes_per_token(windows=packed.eval_windows(2, 8)))


def change(position: int, value: bytes):
    return lambda data: data[:position] + value + data[position + len(value) :]


DAMAGE = {
    "header": ("idx", change(0, b"X"), "does not start with"),
    "version": ("idx", change(9, struct.pack("<Q", 2)), "format version 2, 1 is known"),
    "dtype": ("idx", change(17, b"\x07"), r"dtype code 7, .* 4 \(int32\), 8 \(uint16\)"),
    "head": ("idx", lambda data: data[:20], "truncated: it has 20 bytes"),
    "idx cut": ("idx", lambda data: data[:-1], r"has \d+ bytes, 60 sequences need"),
    "multimodal": ("idx", lambda data: data + bytes(60), "multimodal"),
    "empty": ("idx", lambda data: data[:18] + struct.pack("<QQq", 0, 1, 0), "no sequences"),
    "bin cut": ("bin", lambda data: data[:-4], r"has \d+ bytes, its index says"),
    "bin long": ("bin", lambda data: data + bytes(4), r"has \d+ bytes, its index says"),
    "pointers": ("idx", change(34 + 4 * 60 + 8, struct.pack("<q", 1)), "pointers are not the sums"),
    "documents": ("idx", change(34 + 12 * 60 + 8, struct.pack("<q", 61)), "do not ascend"),
    "ends": ("idx", lambda data: data[:-8] + struct.pack("<q", 59), "do not cover its 60 sequences"),
    "negative": ("bin", change(0, struct.pack("<i", -1)), "holds token -1, ids 0 to 999 are allowed"),
    "vocabulary": ("bin", change(8, struct.pack("<i", 1000)), "holds token 1000, .*vocab_size=1000"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_named_in_one_line(corpus, case):
    kind, damage, message = DAMAGE[case]
    file = parse(corpus[0]).train.with_name(f"c4.en_6_text.{kind}")
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(UserError, match=message) as error:
        prepare(corpus[0], VOCAB, progress=False)
    assert "\n" not in str(error.value) and str(file) in str(error.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("megatron:data/x", "no absolute path"),
        ("megatron:", "no absolute path"),
        ("megatron:/a,/b,/c", "one or two prefixes"),
        ("megatron:/a,samples=0", "no absolute path"),
        ("megatron:/a.bin", "name the prefix '/a', without .bin"),
        ("megatron:/nowhere/a", "a.bin does not exist: a Megatron dataset is"),
    ],
)
def test_a_malformed_name_is_refused(name, message):
    with pytest.raises(UserError, match=message):
        prepare(name, VOCAB, progress=False)


def test_too_many_epochs_for_an_index_are_refused():
    with pytest.raises(UserError, match="name fewer, as in megatron:PREFIX,samples=100000"):
        build_order(np.full(50, 2, dtype=np.int32), range(50), 10**9, 64, 0)
