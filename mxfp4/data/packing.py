"""`prepare`: corpus and vocabulary size to a packed corpus on disk, once.

Packing goes part by part into a folder beside the final one. After each part the tokens are flushed and a
journal is replaced atomically, so a packing that stops (killed, full disk, hub gone) goes on at the part
where it stopped. A finished folder is renamed into place. A lock makes a second process wait for the first;
should the lock not work (some network file systems), the rename still lets only one whole folder win.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator
from importlib import metadata
from itertools import islice
from pathlib import Path
from typing import IO

import numpy as np
from tqdm import tqdm

from mxfp4.data import tokenizer as tokenizers_
from mxfp4.data.corpora import get_corpus
from mxfp4.data.documents import SPLITS, Corpus, Document, Part, fingerprint
from mxfp4.data.known_entropy import KnownEntropy, Law
from mxfp4.data.megatron.corpus import MegatronCorpus, folder_of, open_corpus
from mxfp4.data.megatron.names import is_megatron
from mxfp4.data.packed_corpus import FORMAT, META, PackedCorpus, sha256_range, token_dtype
from mxfp4.data.synthetic import SyntheticCorpus
from mxfp4.data.tokenizer import LLAMA_VOCAB, TextTokenizer
from mxfp4.directories import corpus_dir
from mxfp4.errors import UserError
from mxfp4.locks import held

JOURNAL = "journal.json"
REVISION = "tokenizer-revision"
BATCH = 512  # documents encoded at a time
SAID_AFTER = 10.0  # seconds: a part that took longer is said when it is packed, on terminals and in logs
TOKENIZER_BYTES = 200_000_000  # training text that a tokenizer sees at most: enough for 16k merges, bounded on C4


def folder_for(
    corpus: str | Corpus,
    vocab_size: int,
    *,
    root: Path | None = None,
    tokenizer: str | None = None,
    append_eod: bool = True,
) -> Path:
    """Where the packed corpus lies or would lie. Known without reading a document."""
    if is_megatron(corpus):
        return folder_of(corpus, vocab_size, Path(root) if root else corpus_dir())
    corpus = get_corpus(corpus) if isinstance(corpus, str) else corpus
    what = {"format": FORMAT, "corpus": corpus.name, "vocab_size": vocab_size, **corpus.identity()}
    if not append_eod:
        what["append_eod"] = False
    if tokenizer is not None and vocab_size != LLAMA_VOCAB:
        what["tokenizer"] = tokenizers_.load(tokenizer).sha256()
    key = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:12]
    return (Path(root) if root else corpus_dir()) / f"{corpus.name}-{vocab_size}-{key}"


def work_folder(folder: Path) -> Path:
    """Where a packing lies until it is whole."""
    return folder.parent / f".{folder.name}.partial"


def prepare(
    corpus: str | Corpus,
    vocab_size: int,
    *,
    root: Path | str | None = None,
    progress: bool = True,
    tokenizer: str | None = None,
    rebuild: bool = False,
    append_eod: bool = True,
    **options: object,
) -> PackedCorpus | SyntheticCorpus | MegatronCorpus:
    """The packed corpus, packed now if it is not there or damaged (`.built` says which).

    corpus: a name of mxfp4.data.corpora.CORPORA, "synthetic", "megatron:PREFIX", or a Corpus. vocab_size: of the byte-level
    BPE that is trained on the training part; 128256 takes Llama 3.1's tokenizer. root: folder of packed
    corpora, default runs/corpus. tokenizer: a tokenizer.json to use instead: with 128256 ids Llama 3.1's, as
    MXFP4_LLAMA_TOKENIZER names it; with others a folder of its own (to measure one corpus with another's
    vocabulary). append_eod: put the end-of-document token after each document of text (Megatron's --append-eod); the
    tokens of a Megatron dataset and of the generators stay as they are. options: c4's `shards` and `root` (as
    `c4_root`), synthetic's fields. Errors are UserError, one line each.
    """
    if corpus == "known-entropy":
        return KnownEntropy(Law(vocab_size=vocab_size, **options))
    if corpus == "synthetic":
        return SyntheticCorpus(vocab_size=vocab_size, **options)
    if is_megatron(corpus):
        return open_corpus(
            corpus, vocab_size, Path(root) if root else corpus_dir(), rebuild=rebuild, progress=progress,
            token_bytes=lambda: _token_bytes(tokenizer, vocab_size),
        )  # fmt: skip
    if isinstance(corpus, str):
        if "c4_root" in options:
            options["root"] = options.pop("c4_root")
        corpus = get_corpus(corpus, **options)
    folder = folder_for(corpus, vocab_size, root=root, tokenizer=tokenizer, append_eod=append_eod)
    given = _given(tokenizer, vocab_size)
    if not rebuild and (packed := _whole(folder, given)):
        return packed
    try:
        with held(folder, "packs"):
            if not rebuild and (packed := _whole(folder, given)):  # another process packed it while this one waited
                return packed
            _pack(corpus, vocab_size, folder, given, append_eod, progress)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        free = shutil.disk_usage(folder.parent).free
        raise UserError(
            f"disk full while packing {corpus.name!r} into {folder.parent} ({free / 1e9:.1f} GB free): make "
            "room or set MXFP4_RUNS, then run `mxfp4 prepare` again; it goes on where it stopped"
        ) from None
    packed = PackedCorpus(folder)
    packed.built = True
    return packed


def _token_bytes(tokenizer: str | None, vocab_size: int) -> np.ndarray | None:
    """Bytes of text of each id; None where the tokenizer of such a vocabulary is not on this machine."""
    file = tokenizer or (tokenizers_.llama_file() if vocab_size == LLAMA_VOCAB else None)
    return tokenizers_.load(file).token_bytes() if file else None


def _given(tokenizer: str | None, vocab_size: int) -> TextTokenizer | None:
    """The tokenizer that was named, checked to be Llama 3.1's where the vocabulary is."""
    if tokenizer is None:
        return None
    loaded = tokenizers_.load(tokenizer)
    return tokenizers_.checked_llama(loaded) if vocab_size == LLAMA_VOCAB else loaded


def _whole(folder: Path, tokenizer: TextTokenizer | None) -> PackedCorpus | None:
    """The packing in `folder`, None if it is not there or damaged; UserError if it is another tokenizer's."""
    if not folder.exists():
        return None
    try:
        packed = PackedCorpus(folder)
    except UserError as error:
        tqdm.write(f"packing again: {str(error).removesuffix(': run `mxfp4 prepare`')}", file=sys.stderr)
        return None
    if tokenizer is not None and tokenizer.sha256() != packed.meta["tokenizer"]["sha256"]:
        raise UserError(
            f"{folder} was packed with another tokenizer than the one named: --rebuild packs it with this one"
        )
    return packed


def _pack(
    corpus: Corpus, vocab_size: int, folder: Path, given: TextTokenizer | None, append_eod: bool, progress: bool
) -> None:
    parts = corpus.parts()
    work = work_folder(folder)
    work.mkdir(exist_ok=True)
    tok = _tokenizer(parts, vocab_size, work, given, progress)
    if tok.size > vocab_size:
        raise UserError(f"vocab_size={vocab_size}: the tokenizer has {tok.size} ids")
    dtype = token_dtype(vocab_size)
    done = _resume(work, tok, dtype)
    held_out: set[bytes] = set()
    with contextlib.ExitStack() as stack:
        out = {s: stack.enter_context((work / f"{s}.bin").open("ab")) for s in SPLITS}
        finished = {(d["split"], d["name"]): d for d in done}
        # Parts that are done are skipped, but training must still know what is held out.
        took: list[float] = []  # seconds of the training parts packed here
        for i, part in enumerate(parts, 1):
            if part.split == "validation" and (part.split, part.name) in finished:
                held_out.update(fingerprint(d.text) for d in part.documents())
            if (part.split, part.name) not in finished:
                start = time.monotonic()
                place = f"{i} of {len(parts)}"
                done.append(_pack_part(part, tok, append_eod, dtype, out[part.split], held_out, progress, place))
                _write_json(work / JOURNAL, {"tokenizer": tok.sha256(), "parts": done})
                took += [time.monotonic() - start] * (part.split == "train")
                if progress and time.monotonic() - start >= SAID_AFTER:
                    left = sum((p.split, p.name) not in finished for p in parts[i:])
                    tqdm.write(_said(done[-1], f"{i} of {len(parts)}", left, took), file=sys.stderr)
    _finish(corpus, vocab_size, tok, append_eod, dtype, done, work)
    if folder.exists():  # damaged, or --rebuild
        shutil.rmtree(folder)
    try:
        work.rename(folder)
    except OSError:  # a process that the lock did not stop was faster: keep its folder if it is whole
        PackedCorpus(folder)
        shutil.rmtree(work, ignore_errors=True)


def _said(done: dict, place: str, left: int, took: list[float]) -> str:
    """One line on a part that is packed: what it held and, by those before, how long the rest will take."""
    total: Counter = Counter()
    for counts in done["sources"].values():
        total.update(counts)
    text = (
        f"packed {done['split']} {done['name']} ({place}): {total['documents']:,} documents, {total['bytes']:,} bytes, "
        f"{total['tokens']:,} tokens"
    )
    if not took or not left:
        return text
    return f"{text}; about {sum(took) / len(took) * left / 60:.0f} min for the {left} left"


def _tokenizer(
    parts: list[Part], vocab_size: int, work: Path, given: TextTokenizer | None, progress: bool
) -> TextTokenizer:
    file = work / "tokenizer.json"
    if file.is_file():
        with contextlib.suppress(UserError):
            begun = tokenizers_.load(file)
            if given is None or given.sha256() == begun.sha256():
                return begun
    revision = ""
    if given is not None:
        tok = given
    elif vocab_size == LLAMA_VOCAB:
        tok = tokenizers_.load_llama()
        revision = tokenizers_.llama_revision() or ""
    else:
        show = tqdm(desc="tokenizer", unit=" documents", disable=None if progress else True)
        tok = tokenizers_.train(_sample(parts, show), vocab_size)
        show.close()
    _write(work / REVISION, revision.encode())
    _write(file, tok.to_bytes())
    return tokenizers_.load(file)


def _sample(parts: list[Part], show: tqdm) -> Iterator[str]:
    """Training text for the tokenizer: the first TOKENIZER_BYTES of the training part, nothing held out."""
    held_out: set[bytes] = set()
    taken = 0
    for part in parts:
        for doc in part.documents():
            mark = fingerprint(doc.text)
            if part.split == "validation":
                held_out.add(mark)
            elif mark not in held_out:
                taken += len(doc.text)
                show.update()
                yield doc.text
                if taken >= TOKENIZER_BYTES:
                    return


def _resume(work: Path, tok: TextTokenizer, dtype: np.dtype) -> list[dict]:
    """Parts that an earlier, stopped packing finished. What was written after the last of them is cut off."""
    try:
        journal = json.loads((work / JOURNAL).read_text())
        done = journal["parts"] if journal["tokenizer"] == tok.sha256() else []
    except (OSError, ValueError, KeyError):
        done = []
    sizes = dict.fromkeys(SPLITS, 0)
    for i, part in enumerate(done):
        path, size = work / f"{part['split']}.bin", part["tokens"] * dtype.itemsize
        if not path.is_file() or sha256_range(path, sizes[part["split"]], size) != part["sha256"]:
            done = done[:i]
            break
        sizes[part["split"]] += size
    for split, size in sizes.items():
        with (work / f"{split}.bin").open("ab") as file:
            file.truncate(size)
    return done


def _pack_part(
    part: Part,
    tok: TextTokenizer,
    append_eod: bool,
    dtype: np.dtype,
    out: IO[bytes],
    held_out: set[bytes],
    progress: bool,
    place: str,
) -> dict:
    digest, tokens, removed = hashlib.sha256(), 0, 0
    end = [tok.eos] if append_eod else []
    counts: dict[str, Counter] = {}
    show = tqdm(
        desc=f"pack {part.split} {part.name} ({place})",
        total=part.size_hint or None,
        unit=" documents",
        disable=None if progress else True,
    )
    with show:
        documents = part.documents()
        while docs := list(islice(documents, BATCH)):
            show.update(len(docs))
            kept: list[Document] = []
            for doc in docs:
                mark = fingerprint(doc.text)
                if part.split == "validation":
                    held_out.add(mark)
                elif mark in held_out:
                    removed += 1
                    continue
                kept.append(doc)
            for doc, ids in zip(kept, tok.encode_batch([d.text for d in kept]), strict=True):
                ids = [*ids, *end]
                data = np.array(ids, dtype=dtype).tobytes()
                out.write(data)
                digest.update(data)
                tokens += len(ids)
                count = counts.setdefault(doc.source, Counter())
                count.update(documents=1, tokens=len(ids), bytes=len(doc.text.encode()))
    out.flush()
    os.fsync(out.fileno())
    return {
        "split": part.split,
        "name": part.name,
        "tokens": tokens,
        "sha256": digest.hexdigest(),
        "removed": removed,
        "sources": {k: dict(v) for k, v in counts.items()},
    }


def _finish(
    corpus: Corpus,
    vocab_size: int,
    tok: TextTokenizer,
    append_eod: bool,
    dtype: np.dtype,
    done: list[dict],
    work: Path,
) -> None:
    splits = {}
    for split in SPLITS:
        total: Counter = Counter(documents=0, tokens=0, bytes=0)
        sources: dict[str, Counter] = {}
        for part in (d for d in done if d["split"] == split):
            for source, counts in part["sources"].items():
                total.update(counts)
                sources.setdefault(source, Counter()).update(counts)
        splits[split] = {**total, "sources": {k: dict(v) for k, v in sources.items()}}
    content = "".join(f"{d['split']} {d['sha256']}\n" for d in done) + tok.sha256()
    meta = {
        "format": FORMAT,
        "corpus": corpus.name,
        "identity": corpus.identity(),
        "sources": corpus.provenance(),
        "vocab_size": vocab_size,
        "dtype": dtype.str,
        "fingerprint": hashlib.sha256(content.encode()).hexdigest()[:16],
        "tokenizer": {
            "sha256": hashlib.sha256((work / "tokenizer.json").read_bytes()).hexdigest(),
            "ids": tok.size,
            "revision": _noted_revision(work),
        },
        "append_eod": append_eod,
        "splits": splits,
        "removed_duplicates": sum(d["removed"] for d in done),
        "parts": done,
        "packages": {p: metadata.version(p) for p in ("tokenizers", "datasets", "numpy")},
    }
    _write_json(work / META, meta)
    (work / JOURNAL).unlink(missing_ok=True)
    (work / REVISION).unlink(missing_ok=True)


def _noted_revision(work: Path) -> str | None:
    """The hub's commit that the tokenizer came from; None for one of a file, or trained here."""
    file = work / REVISION
    return file.read_text().strip() or None if file.is_file() else None


def _write_json(path: Path, value: dict) -> None:
    _write(path, json.dumps(value, indent=1, sort_keys=True).encode())


def _write(path: Path, data: bytes) -> None:
    """Atomic: the file is the old one or the whole new one."""
    temporary = path.with_name(path.name + ".new")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
