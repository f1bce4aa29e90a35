"""How far a corpus is packed, and what packing the rest takes, without reading a document or asking a network.

C4's sizes are estimates: 356,317 documents a shard (`c4`) of about 518 tokens of Llama's tokenizer, from the
reference's own count: its README has 47,186,855 tokens in the 91,205 documents held out (mlcommons/training,
small_language_model_pretraining).
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from mxfp4.data.corpora import WheelCorpus, get_corpus
from mxfp4.data.megatron.indexed_dataset import open_dataset
from mxfp4.data.megatron.names import is_megatron, parse
from mxfp4.data.packed_corpus import META, PackedCorpus, token_dtype
from mxfp4.data.packing import JOURNAL, folder_for, work_folder
from mxfp4.data.tokenizer import LLAMA_VOCAB, llama_file
from mxfp4.directories import corpus_dir
from mxfp4.errors import UserError

TOKENS_PER_DOCUMENT = 47_186_855 / 91_205 + 1
"""Of C4, in Llama 3.1's tokens, and one for EOS (which may be left out)."""
WHEEL_BYTES = 30e6
"""More than the packed tokens of any wheel corpus."""


@dataclass(frozen=True)
class Packing:
    """The state of one packed corpus."""

    corpus: str
    vocab_size: int
    done: bool
    text: str
    """In one line: packed, begun or missing, and from what it would be made."""
    bytes_left: float
    """About what packing will still write."""


def state_of(name: str, vocab_size: int, *, root: Path | None = None, append_eod: bool = True) -> Packing:
    """The packing of corpus `name` with `vocab_size` ids. UserError for an unknown name."""
    if name == "synthetic":
        return Packing(name, vocab_size, True, "generated as it is used", 0.0)
    if is_megatron(name):
        return _megatron(name, vocab_size, folder_for(name, vocab_size, root=root))
    corpus = get_corpus(name)
    folder = folder_for(corpus, vocab_size, root=root, append_eod=append_eod)
    if (folder / META).is_file():
        try:
            packed = PackedCorpus(folder)
        except UserError as error:
            return Packing(name, vocab_size, False, f"damaged, is packed again ({error})", _size(corpus, vocab_size))
        return Packing(name, vocab_size, True, f"packed, {packed.n_tokens('train'):,} training tokens", 0.0)
    parts = _journal(work_folder(folder))
    whole = _size(corpus, vocab_size)
    written = sum(p["tokens"] for p in parts) * token_dtype(vocab_size).itemsize
    source = _source(corpus, vocab_size)
    begun = f"{len(parts)} parts packed, goes on there" if parts else "not packed"
    return Packing(name, vocab_size, False, f"{begun}; {source}", max(whole - written, 0.0))


def _megatron(name: str, vocab_size: int, folder: Path) -> Packing:
    files = parse(name)
    found = [open_dataset(prefix) for prefix in (files.train, files.validation) if prefix is not None]
    text = f"{sum(len(d.tokens) for d in found):,} tokens in Megatron's files"
    if not (folder / META).is_file():
        size = sum(path.stat().st_size for d in found for path in d.files.values())
        return Packing(name, vocab_size, False, f"{text}, {size / 1e9:.3g} GB, not hashed yet", 0.0)
    return Packing(name, vocab_size, True, f"{text}, hashed", 0.0)


def unfinished(root: Path | None = None) -> list[tuple[str, int, str]]:
    """(folder, parts done, name of the last one) of packings in work or stopped, sorted."""
    root = root or corpus_dir()
    found = []
    for work in sorted(root.glob(".*.partial")):
        parts = _journal(work)
        last = f"{parts[-1]['split']} {parts[-1]['name']}" if parts else "none"
        found.append((work.name[1:].removesuffix(".partial"), len(parts), last))
    return found


def _journal(work: Path) -> list[dict]:
    try:
        return json.loads((work / JOURNAL).read_text())["parts"]
    except (OSError, ValueError, KeyError):
        return []


def _size(corpus, vocab_size: int) -> float:
    """Bytes of the packed tokens, about."""
    if isinstance(corpus, WheelCorpus):
        return WHEEL_BYTES
    first, last = corpus.shards
    documents = (last - first + 1) * corpus.documents_per_shard + corpus.validation_documents
    return float(documents * TOKENS_PER_DOCUMENT * token_dtype(vocab_size).itemsize)


def _source(corpus, vocab_size: int) -> str:
    if isinstance(corpus, WheelCorpus):
        return "from the data wheels"
    found = [f"from {corpus.describe()}"]
    if vocab_size == LLAMA_VOCAB:
        given = os.environ.get("MXFP4_LLAMA_TOKENIZER")
        here = llama_file()
        if here is None:
            found.append("Llama's tokenizer is not here yet (gated: `mxfp4 doctor --scale mi355x` says how)")
        elif given and not Path(here).expanduser().exists():
            found.append(f"MXFP4_LLAMA_TOKENIZER={given} does not exist")
        else:
            found.append("Llama's tokenizer is here")
    return ", ".join(found)
