"""C4 on bad days: shards that are damaged, a hub that throttles, refuses or goes away, a full disk. Nothing packed is
lost, and the message says what to do."""

from __future__ import annotations

import errno
import gzip
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from mxfp4.data import c4, packing
from mxfp4.data.c4 import C4
from mxfp4.data.packing import prepare
from mxfp4.data.packing_state import state_of, unfinished
from mxfp4.data.tokenizer import load_llama
from mxfp4.errors import UserError
from tests.fakes import tiny_c4

VOCAB = 300
SHARDS = (4, 6)


def shard(root, name: str, texts: list[str]) -> None:
    (root / "en").mkdir(parents=True, exist_ok=True)
    rows = "".join(json.dumps({"text": t, "url": "http://example.com"}) + "\n" for t in texts)
    (root / "en" / name).write_bytes(gzip.compress(rows.encode()))


def train_file(i: int) -> str:
    return f"c4-train.{i:05d}-of-01024.json.gz"


@pytest.fixture
def mirror(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("MXFP4_RUNS", str(tmp_path / "runs"))
    tiny_c4(monkeypatch, shard=60, validation_file=40, held_out=40)
    root = tmp_path / "c4"
    shard(root, "c4-validation.00000-of-00008.json.gz", [f"held out text {i}" for i in range(40)])
    for i in range(SHARDS[0], SHARDS[1] + 1):
        shard(root, train_file(i), [f"train text {i} {j}" for j in range(60)])
    return root


def pack(mirror, **options):
    return prepare("c4", VOCAB, progress=False, c4_root=mirror, shards=SHARDS, **options)


@pytest.fixture
def whole(mirror, tmp_path):
    """Tokens and tokenizer of a packing without any fault."""
    made = prepare("c4", VOCAB, root=tmp_path / "other", progress=False, c4_root=mirror, shards=SHARDS)
    return made.fingerprint, str(made.folder / "tokenizer.json")


def truncated(data: bytes) -> bytes:
    return data[: len(data) // 2]


def flipped(data: bytes) -> bytes:
    at = len(data) - 6  # in the checksum: all documents can be read before it is noticed
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def not_json(data: bytes) -> bytes:
    return gzip.compress(gzip.decompress(data)[:500] + b'{"text": "half a row')


@pytest.mark.parametrize(
    "damage", [truncated, flipped, not_json, lambda data: b""], ids=["truncated", "flipped", "json", "empty"]
)
def test_a_damaged_shard_is_named_and_packing_goes_on_after_it(mirror, whole, damage):
    fingerprint, tokenizer = whole
    file = mirror / "en" / train_file(5)
    good = file.read_bytes()
    file.write_bytes(damage(good))
    with pytest.raises(
        UserError, match=rf"{train_file(5)} could not be read .*again; `mxfp4 prepare` then goes on"
    ) as error:
        pack(mirror, tokenizer=tokenizer)
    assert "\n" not in str(error.value)
    assert [parts for _, parts, _ in unfinished()] == [2]  # validation and shard 4
    file.write_bytes(good)
    (mirror / "en" / train_file(4)).unlink()  # what is packed is not read again
    (mirror / "en" / train_file(4)).touch()
    made = pack(mirror, tokenizer=tokenizer)
    made.verify()
    assert made.fingerprint == fingerprint and unfinished() == []


def test_half_a_shard_is_refused_and_nothing_of_it_kept(mirror, whole):
    """Well-formed, its documents too few: it would train under the identity of C4."""
    fingerprint, tokenizer = whole
    file = mirror / "en" / train_file(5)
    good = file.read_bytes()
    shard(mirror, train_file(5), [f"train text 5 {j}" for j in range(30)])
    with pytest.raises(
        UserError, match=rf"{train_file(5)} holds 30 documents, 60 are right: fetch it .*goes on"
    ) as error:
        pack(mirror, tokenizer=tokenizer)
    assert "\n" not in str(error.value) and [parts for _, parts, _ in unfinished()] == [2]
    file.write_bytes(good)
    assert pack(mirror, tokenizer=tokenizer).fingerprint == fingerprint


@pytest.mark.parametrize(("documents", "right"), [(59, False), (60, True), (61, True), (62, False)])
def test_a_shard_of_c4_has_one_of_two_sizes(mirror, documents, right):
    """364,868,892 documents in 1024 equal parts."""
    shard(mirror, train_file(5), [f"train text 5 {j}" for j in range(documents)])
    part = C4(root=mirror, shards=(5, 5)).parts()[1]
    if right:
        assert len(list(part.documents())) == documents
    else:
        with pytest.raises(UserError, match=f"holds {documents} documents"):
            list(part.documents())


def validation_file(i: int) -> str:
    return f"c4-validation.{i:05d}-of-00008.json.gz"


def test_validation_files_must_be_those_of_the_first_documents(mirror, monkeypatch):
    """Others would be evaluated under the same identity."""
    tiny_c4(monkeypatch, shard=60, validation_file=40, held_out=91)
    texts = [[f"held out {i} {j}" for j in range(40)] for i in range(3)]
    shard(mirror, validation_file(0), texts[0])
    shard(mirror, validation_file(2), texts[2])
    with pytest.raises(UserError, match=rf"lacks en/{validation_file(1)}: add what is missing, or unset") as error:
        pack(mirror)
    assert "\n" not in str(error.value) and unfinished() == []
    shard(mirror, validation_file(1), texts[1])
    made = pack(mirror)
    assert made.meta["splits"]["validation"]["documents"] == 91
    assert made.meta["identity"]["validation_documents"] == 91


def test_too_few_validation_documents_are_said_before_a_training_shard_is_packed(mirror, whole):
    shard(mirror, validation_file(0), [f"held out text {i}" for i in range(39)])
    with pytest.raises(UserError, match=rf"{validation_file(0)} holds 39 documents, 40 are right: fetch it"):
        pack(mirror, tokenizer=whole[1])
    assert [parts for _, parts, _ in unfinished()] == [0]


def test_what_a_shard_held_is_said_and_recorded(mirror, whole, monkeypatch, capsys):
    monkeypatch.setattr(packing, "SAID_AFTER", 0.0)
    made = prepare("c4", VOCAB, c4_root=mirror, shards=SHARDS, tokenizer=whole[1])
    held = {p["name"]: p["sources"]["c4"] for p in made.meta["parts"]}
    size = sum(len(f"train text 4 {j}") for j in range(60))
    assert held["shard 4"]["documents"] == 60 and held["shard 4"]["bytes"] == size
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("packed train shard 4 (2 of 4)")]
    assert len(said) == 1 and f": 60 documents, {size:,} bytes, " in said[0] and "for the 2 left" in said[0]


def test_a_full_disk_in_the_middle_of_a_shard(mirror, whole, monkeypatch):
    fingerprint, tokenizer = whole
    real, calls = packing.Counter.update, []

    def full(self, *args, **counts):
        calls.append(1)
        if len(calls) == 130:  # in the second training shard
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(self, *args, **counts)

    monkeypatch.setattr(packing.Counter, "update", full)
    with pytest.raises(UserError, match="disk full while packing 'c4' .* it goes on where it stopped"):
        pack(mirror, tokenizer=tokenizer)
    monkeypatch.setattr(packing.Counter, "update", real)
    assert pack(mirror, tokenizer=tokenizer).fingerprint == fingerprint


class Hub(BaseHTTPRequestHandler):
    """Answers every request with the status of its server."""

    def do_HEAD(self):
        self.send_response(self.server.status)
        self.end_headers()

    do_GET = do_HEAD

    def log_message(self, *args):
        pass


@pytest.fixture
def hub(monkeypatch):
    for name in ("MXFP4_C4", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        server.status = 200
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        yield server
        server.shutdown()


def test_a_hub_that_throttles_at_once(hub):
    hub.status = 429
    with pytest.raises(
        UserError, match=r"throttles \(HTTP 429\): wait .*`hf auth login`.* goes on where it stopped"
    ) as error:
        C4().parts()
    assert "\n" not in str(error.value)


SAID = {
    403: r"does not give .* \(HTTP 403\): ",
    404: r"has no .* \(HTTP 404\): correct HF_ENDPOINT if it is wrong, or point MXFP4_",
    429: r"throttles \(HTTP 429\): wait",
    503: r"trouble of its own \(HTTP 503\): wait",
}


@pytest.mark.parametrize(("status", "said"), [(401, SAID[403].replace("403", "401")), *SAID.items()])
def test_each_answer_of_the_hub_has_its_own_line(hub, status, said):
    hub.status = status
    with pytest.raises(UserError, match=f"C4 from the hub .*{said}") as error:
        C4().parts()
    assert "\n" not in str(error.value)


class Refused(Exception):
    """As huggingface_hub raises: the answer hangs on it."""

    def __init__(self, status: int | None):
        super().__init__(f"{status} from the hub\nand more")
        self.response = type("Response", (), {"status_code": status})


@pytest.mark.parametrize(
    ("status", "gone", "said"),
    [(status, False, said) for status, said in SAID.items()]
    + [
        (None, True, "cannot be reached any more.* it goes on where it stopped"),
        (None, False, r"Refused: and more\): run .* it goes on"),
    ],
)
def test_a_hub_that_fails_in_the_middle_of_a_shard(hub, monkeypatch, status, gone, said):
    rows = type("Rows", (), {})()
    rows.select_columns = lambda columns: rows

    def some_then_fail(batch_size):
        yield {"text": ["one", "two"]}
        if gone:
            monkeypatch.setattr(c4, "unreachable", lambda url: "no answer")
        raise Refused(status)

    rows.iter = some_then_fail
    monkeypatch.setattr("datasets.load_dataset", lambda *a, **k: rows)
    part = C4(shards=(4, 4)).parts()[1]
    documents = part.documents()
    assert [next(documents).text for _ in range(2)] == ["one", "two"]
    with pytest.raises(UserError, match=f"{train_file(4)} .*{said}") as error:
        next(documents)
    assert "\n" not in str(error.value)


def test_the_number_of_a_shard_is_no_status(hub, monkeypatch):
    monkeypatch.setattr(c4, "unreachable", lambda url: "")
    file = train_file(429)
    said = C4(shards=(429, 429))._trouble(file, OSError(f"cannot open {file}"))
    assert said.startswith(f"could not be read (OSError: cannot open {file}): run") and "throttles" not in said
    assert "throttles" in C4()._trouble(file, OSError("HTTP Error 429: Too Many Requests"))


@pytest.fixture
def no_tokenizer(hub, monkeypatch, tmp_path):
    monkeypatch.delenv("MXFP4_LLAMA_TOKENIZER", raising=False)
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *a, **k: None)
    return hub


TOKENIZER_SAID = {
    **SAID,
    401: r"does not give .* \(HTTP 401\): accept the licence .*MXFP4_LLAMA_TOKENIZER",
    403: r"does not give .* \(HTTP 403\): accept the licence .*MXFP4_LLAMA_TOKENIZER",
}


@pytest.mark.parametrize("wrapped", [False, True], ids=["bare", "wrapped"])
@pytest.mark.parametrize(("status", "said"), TOKENIZER_SAID.items())
def test_each_answer_about_the_tokenizer_has_its_own_line(no_tokenizer, monkeypatch, status, said, wrapped):
    """Only a refusal is about the licence. The library hides some answers behind an error about the connection."""

    def refuse(*args, **options):
        if wrapped:
            raise FileNotFoundError("Please check your connection\nand more") from Refused(status)
        raise Refused(status)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", refuse)
    with pytest.raises(UserError, match=f"Llama 3.1 tokenizer cannot be fetched: .*{said}") as error:
        load_llama()
    assert "\n" not in str(error.value) and ("licence" in str(error.value)) == (status in (401, 403))


@pytest.mark.parametrize("status", [429, 503])
def test_a_hub_that_is_busy_is_not_asked_for_the_tokenizer(no_tokenizer, monkeypatch, status):
    no_tokenizer.status = status
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *a, **k: pytest.fail("asked"))
    with pytest.raises(UserError, match=SAID[status]):
        load_llama()


def test_a_hub_whose_front_page_is_closed_may_still_have_the_tokenizer(no_tokenizer, monkeypatch):
    no_tokenizer.status = 403
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *a, **k: "/nowhere/tokenizer.json")
    with pytest.raises(UserError, match="tokenizer /nowhere/tokenizer.json does not exist"):
        load_llama()


def test_no_network_for_the_tokenizer(no_tokenizer, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(
        UserError, match="no answer from http://127.0.0.1:9 .*: run `mxfp4 prepare` again once there is, or point"
    ):
        load_llama()


def test_evaluation_takes_the_first_documents_as_they_are_stored(mirror):
    made = pack(mirror)
    windows = made.eval_windows(5, 16)
    ids = torch.from_numpy(made.tokens("validation")[: 5 * 16 + 1].astype("int64"))
    assert torch.equal(windows, torch.stack([ids[i * 16 : i * 16 + 17] for i in range(5)]))
    assert made.tokenizer.decode(windows[0].tolist()).startswith("held out text 0")


def test_the_rules_numbers():
    """91,205 documents feed 1,024 sequences of 8192 (MLPerf); the README's shards, not the code's, are the default.
    The files' sizes come from the card's totals; three of those for validation hold the documents."""
    assert c4.VALIDATION_DOCUMENTS == 91_205 and C4().shards == (768, 1023)
    assert (c4.DOCUMENTS_PER_SHARD, c4.DOCUMENTS_PER_VALIDATION_FILE) == (356_317, 45_576)
    assert C4()._validation_files() == [f"en/{validation_file(i)}" for i in range(3)]
    assert C4().identity()["validation_order"] == "as stored"


def test_the_state_of_a_packing(mirror, monkeypatch, whole):
    monkeypatch.setenv("MXFP4_C4", str(mirror))
    name = "c4:4-6"
    before = state_of(name, VOCAB)
    assert not before.done and "not packed; from a local mirror, shards 4-6" in before.text and before.bytes_left > 0
    (mirror / "en" / train_file(6)).rename(mirror / "away")
    assert "lacks 1 files" in state_of(name, VOCAB).text
    (mirror / "away").rename(mirror / "en" / train_file(6))
    made = prepare(name, VOCAB, progress=False)
    after = state_of(name, VOCAB)
    assert after.done and after.bytes_left == 0 and f"{made.n_tokens('train'):,}" in after.text
    made.path("train").unlink()
    assert "damaged" in state_of(name, VOCAB).text


def test_a_tokenizer_that_is_named_packs_where_training_looks(mirror, whole, monkeypatch, tmp_path):
    """With Llama's number of ids; another tokenizer than a packing's own is refused, and begins a stopped one anew."""
    from mxfp4.data.packing import folder_for
    from mxfp4.data.tokenizer import train

    monkeypatch.setattr(packing, "LLAMA_VOCAB", VOCAB)
    monkeypatch.setattr("mxfp4.data.tokenizer.LLAMA_VOCAB", 262)  # ids of these two
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    for file, text in ((one, "train text and more"), (two, "some other words")):
        file.write_bytes(train([text] * 9, 262).to_bytes())
    broken = mirror / "en" / train_file(6)
    good = broken.read_bytes()
    broken.write_bytes(good[:20])
    with pytest.raises(UserError, match="could not be read"):
        pack(mirror, tokenizer=str(two))
    broken.write_bytes(good)
    made = pack(mirror, tokenizer=str(one))
    assert made.tokenizer.to_bytes() == one.read_bytes() and made.folder == folder_for(C4(shards=SHARDS), VOCAB)
    assert not pack(mirror).built and not pack(mirror, tokenizer=str(one)).built
    with pytest.raises(UserError, match="packed with another tokenizer than the one named: --rebuild"):
        pack(mirror, tokenizer=str(two))
    with pytest.raises(UserError, match="does not exist"):
        pack(mirror, tokenizer=str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match="not Llama 3.1's tokenizer"):
        pack(mirror, tokenizer=whole[1])


def test_longest_run_of_a_mirror(mirror, tmp_path):
    assert C4(root=mirror, shards=(0, 9)).longest_run() == SHARDS
    (mirror / "en" / train_file(5)).unlink()
    shard(mirror, train_file(1022), ["a"])
    shard(mirror, train_file(1023), ["a"])
    assert C4(root=mirror).longest_run() == (1022, 1023)
    assert C4(root=tmp_path / "none").longest_run() is None
