"""Packing: what is on disk is the documents, batches are a pure function, damage is survived."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from mxfp4.data import packing
from mxfp4.data.documents import Document, Part
from mxfp4.data.packed_corpus import PackedCorpus, permutation, token_dtype
from mxfp4.data.packing import folder_for, prepare
from mxfp4.errors import UserError

VOCAB = 300


@dataclass
class Tiny:
    """A corpus of four parts made up here; one training document equals a validation document."""

    name: str = "tiny"
    salt: str = ""
    fail_at: str = ""
    delay: float = 0.0
    read: list[str] = field(default_factory=list)

    def identity(self) -> dict:
        return {"salt": self.salt}

    def provenance(self) -> dict:
        return {"tiny": {"version": "1"}}

    def texts(self, split: str, name: str) -> list[str]:
        if split == "validation":
            return [f"held out {i}: the quick fox {self.salt}" for i in range(20)]
        return [f"part {name} document {i}: the lazy dog {self.salt}" for i in range(40)] + (
            ["Held out  3: THE quick fox " + self.salt] if name == "b" else []
        )

    def parts(self) -> list[Part]:
        def documents(split: str, name: str):
            self.read.append(name)
            for i, text in enumerate(self.texts(split, name)):
                if name == self.fail_at and i == 20:
                    raise UserError(f"part {name} is broken")
                time.sleep(self.delay)
                yield Document("tiny", text)

        return [
            Part(s, n, lambda s=s, n=n: documents(s, n))
            for s, n in (("validation", "v"), ("train", "a"), ("train", "b"), ("train", "c"))
        ]


@pytest.fixture(scope="module")
def packed(tmp_path_factory) -> PackedCorpus:
    return prepare(Tiny(), VOCAB, root=tmp_path_factory.mktemp("corpus"), progress=False)


def test_files_hold_the_documents_joined_by_eos(packed):
    tiny, tok = Tiny(), packed.tokenizer
    for split, parts in (("validation", "v"), ("train", "abc")):
        ids = packed.tokens(split)
        ends = np.flatnonzero(ids == tok.eos)
        texts = [tok.decode(chunk[chunk != tok.eos]) for chunk in np.split(ids, ends + 1)][:-1]
        wanted = [t for p in parts for t in tiny.texts(split, p) if not t.startswith("Held")]
        assert texts == wanted
        assert ids[-1] == tok.eos


def test_meta_counts_and_the_duplicate_left_out(packed):
    meta = packed.meta
    assert meta["removed_duplicates"] == 1
    assert meta["splits"]["train"]["documents"] == 120
    wanted = sum(len(t.encode()) for t in Tiny().texts("validation", "v"))
    assert meta["splits"]["validation"]["bytes"] == wanted
    assert packed.bytes_per_token("validation") == pytest.approx(wanted / packed.n_tokens("validation"))
    assert meta["packages"]["tokenizers"]


def test_tokenizer_sees_training_text_alone(tmp_path):
    """The validation text is made of a word that training never has: no token may spell it."""

    class Secret(Tiny):
        def texts(self, split, name):
            return ["zyzzyva zyzzyva zyzzyva " * 20] * 9 if split == "validation" else ["plain words here"] * 30

    tok = prepare(Secret(), VOCAB, root=tmp_path, progress=False).tokenizer
    assert len(tok.encode("zyzzyva")) == len("zyzzyva")
    assert len(tok.encode("plain")) < len("plain")


@pytest.mark.parametrize(("ids", "dtype"), [(300, "<u2"), (65536, "<u2"), (65537, "<u4"), (128256, "<u4")])
def test_token_dtype(ids, dtype):
    assert token_dtype(ids) == np.dtype(dtype)


def test_second_call_reads_nothing(tmp_path):
    first, second = Tiny(), Tiny()
    assert prepare(first, VOCAB, root=tmp_path, progress=False).built
    assert not prepare(second, VOCAB, root=tmp_path, progress=False).built
    assert second.read == []


def test_packing_twice_gives_the_same_files(packed, tmp_path):
    again = prepare(Tiny(), VOCAB, root=tmp_path, progress=False)
    assert again.fingerprint == packed.fingerprint
    names = sorted(p.name for p in packed.folder.iterdir())
    assert names == ["meta.json", "tokenizer.json", "train.bin", "validation.bin"]
    assert all((again.folder / n).read_bytes() == (packed.folder / n).read_bytes() for n in names)


def test_folder_depends_on_what_determines_the_tokens(tmp_path):
    folders = {folder_for(c, v, root=tmp_path) for c in (Tiny(), Tiny(salt="x")) for v in (300, 400)}
    assert len(folders) == 4


# Batches


def test_window_is_a_slice(packed):
    ids = packed.tokens("train")
    assert packed.window("train", 3, 16).tolist() == ids[48:65].tolist()
    last = packed.n_windows("train", 16) - 1
    assert len(packed.window("train", last, 16)) == 17
    with pytest.raises(UserError, match=f"windows 0 to {last}"):
        packed.window("train", last + 1, 16)


def test_batch_is_pure_and_differs_between_seeds(packed):
    a = packed.batch(3, 4, 16, seed=1)
    assert a.shape == (4, 17) and a.dtype == torch.int64
    packed.batch(7, 4, 16, seed=2)
    assert torch.equal(a, PackedCorpus(packed.folder).batch(3, 4, 16, seed=1))
    assert not torch.equal(a, packed.batch(3, 4, 16, seed=2))


def test_no_window_comes_twice_before_an_epoch_ends(packed):
    n = packed.n_windows("train", 16)
    windows = torch.cat([packed.batch(s, 5, 16, seed=1) for s in range(2 * n // 5 + 1)])
    every = sorted(map(tuple, packed.windows("train", np.arange(n), 16).tolist()))
    first, second = windows[:n].tolist(), windows[n : 2 * n].tolist()
    assert sorted(map(tuple, first)) == every
    assert sorted(map(tuple, second)) == every
    assert first != second


def test_batches_of_any_size_take_the_same_windows(packed):
    assert torch.equal(packed.batch(0, 6, 16, 1), torch.cat([packed.batch(i, 2, 16, 1) for i in range(3)]))


def test_permutation_is_the_recorded_one():
    """Records made with one NumPy must mean the same batches with the next."""
    assert permutation(8, 1, 0).tolist() == [3, 5, 2, 7, 0, 6, 1, 4]
    assert permutation(99, -5, 3).tolist() != permutation(99, -6, 3).tolist()  # 64-bit keys, not rounded
    assert sorted(permutation(1000, -5, 3).tolist()) == list(range(1000))


@pytest.mark.parametrize(("step", "size", "length"), [(-1, 4, 16), (0, 0, 16), (0, 4, 0), (0, 4, 10**6)])
def test_batch_refuses_what_cannot_be(packed, step, size, length):
    with pytest.raises(UserError, match="must be at least|has [0-9]+ tokens"):
        packed.batch(step, size, length, 0)


def test_eval_windows_are_fixed_and_nested(packed):
    assert torch.equal(packed.eval_windows(3, 16), packed.eval_windows(5, 16)[:3])
    n = packed.n_windows("validation", 16)
    assert packed.eval_windows(None, 16).shape == (n, 17)
    for wrong in (0, n + 1):
        with pytest.raises(UserError, match=f"1 to {n} are allowed"):
            packed.eval_windows(wrong, 16)


def test_eval_windows_shuffled_cover_every_window_once(packed, tmp_path):
    class Shuffled(Tiny):
        def identity(self):
            return {"validation_order": "shuffled"}

    other = prepare(Shuffled(), VOCAB, root=tmp_path, progress=False)
    assert other.fingerprint == packed.fingerprint
    a, b = packed.eval_windows(None, 16).tolist(), other.eval_windows(None, 16).tolist()
    assert a != b and sorted(a) == sorted(b)


def test_bytes_of_windows_are_those_of_their_targets(packed):
    windows = packed.eval_windows(4, 16)
    texts = [packed.tokenizer.inner.decode(w[1:].tolist(), skip_special_tokens=True) for w in windows]
    assert packed.bytes_per_token(windows=windows) == sum(len(t.encode()) for t in texts) / (4 * 16)


# Bad days


@pytest.mark.parametrize("name", ["train.bin", "validation.bin", "tokenizer.json", "meta.json"])
@pytest.mark.parametrize("damage", ["truncate", "remove"])
def test_damage_is_named_on_open_and_mended_by_prepare(packed, tmp_path, name, damage):
    folder = prepare(Tiny(), VOCAB, root=tmp_path, progress=False).folder
    file = folder / name
    file.unlink() if damage == "remove" else os.truncate(file, file.stat().st_size - 2)
    with pytest.raises(UserError, match=rf"{name}.*run `mxfp4 prepare`") as error:
        PackedCorpus(folder)
    assert "\n" not in str(error.value)
    mended = prepare(Tiny(), VOCAB, root=tmp_path, progress=False)
    assert mended.built and mended.fingerprint == packed.fingerprint


def test_verify_names_the_part_with_a_flipped_bit(tmp_path):
    packed = prepare(Tiny(), VOCAB, root=tmp_path, progress=False)
    packed.verify()
    at = (packed.meta["parts"][1]["tokens"] + 5) * 2  # parts: v, a, b, c
    with packed.path("train").open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))
    again = prepare(Tiny(), VOCAB, root=tmp_path, progress=False)
    with pytest.raises(UserError, match=r"train.bin is damaged in part 'b'.*--rebuild"):
        again.verify()
    prepare(Tiny(), VOCAB, root=tmp_path, progress=False, rebuild=True).verify()


def test_packing_goes_on_after_a_broken_part(packed, tmp_path):
    with pytest.raises(UserError, match="part c is broken"):
        prepare(Tiny(fail_at="c"), VOCAB, root=tmp_path, progress=False, tokenizer=_tokenizer_file(packed))
    second = Tiny()
    result = prepare(second, VOCAB, root=tmp_path, progress=False, tokenizer=_tokenizer_file(packed))
    assert "a" not in second.read and "b" not in second.read
    assert result.fingerprint == packed.fingerprint


def _tokenizer_file(packed) -> str:
    return str(packed.folder / "tokenizer.json")


def _prepare_in_child(root, delay: float) -> None:
    prepare(Tiny(delay=delay), VOCAB, root=root, progress=False)


def test_kill_while_packing_then_again(packed, tmp_path):
    context = multiprocessing.get_context("spawn")
    child = context.Process(target=_prepare_in_child, args=(tmp_path, 0.02))
    child.start()
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob(".*.partial/journal.json")) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    assert list(tmp_path.glob(".*.partial/journal.json")) and not list(tmp_path.glob("tiny-*"))
    result = prepare(Tiny(), VOCAB, root=tmp_path, progress=False)
    result.verify()
    assert result.fingerprint == packed.fingerprint


def test_two_processes_at_once(packed, tmp_path):
    context = multiprocessing.get_context("spawn")
    children = [context.Process(target=_prepare_in_child, args=(tmp_path, 0.002)) for _ in range(2)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [c.exitcode for c in children] == [0, 0]
    result = PackedCorpus(folder_for(Tiny(), VOCAB, root=tmp_path))
    result.verify()
    assert result.fingerprint == packed.fingerprint
    assert not list(tmp_path.glob(".*.partial"))


def test_full_disk_says_what_to_do_and_keeps_what_is_done(packed, tmp_path, monkeypatch):
    real, calls = packing.os.fsync, []

    def full(fd):
        calls.append(fd)
        if len(calls) == 5:
            raise OSError(28, "No space left on device")
        real(fd)

    monkeypatch.setattr(packing.os, "fsync", full)
    with pytest.raises(UserError, match="disk full while packing 'tiny'.*MXFP4_RUNS"):
        prepare(Tiny(), VOCAB, root=tmp_path, progress=False)
    monkeypatch.undo()
    assert prepare(Tiny(), VOCAB, root=tmp_path, progress=False).fingerprint == packed.fingerprint


def test_another_format_is_refused(tmp_path):
    packed = prepare(Tiny(), VOCAB, root=tmp_path, progress=False)
    meta = json.loads((packed.folder / "meta.json").read_text()) | {"format": 99}
    (packed.folder / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(UserError, match="format 99"):
        PackedCorpus(packed.folder)


def test_tokenizer_larger_than_the_vocabulary_is_refused(packed, tmp_path):
    with pytest.raises(UserError, match="vocab_size=280: the tokenizer has 300 ids"):
        prepare(Tiny(), 280, root=tmp_path, progress=False, tokenizer=_tokenizer_file(packed))
