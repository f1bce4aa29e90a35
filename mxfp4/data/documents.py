"""Documents of a corpus, the parts it is packed in, and what packing asks of it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

SPLITS = ("train", "validation")


@dataclass(frozen=True)
class Document:
    """A text and the name of the source that it comes from."""

    source: str
    text: str


@dataclass(frozen=True)
class Part:
    """A piece of a split that is packed as one unit; after an interruption, packing goes on at the next."""

    split: str
    name: str
    documents: Callable[[], Iterator[Document]]
    size_hint: int = 0
    """Documents in it, for a progress bar; 0 when unknown."""


class Corpus(Protocol):
    """What packing needs from a corpus."""

    name: str

    def identity(self) -> dict:
        """What determines the documents (JSON), known without reading them: pins, shards, cut."""

    def parts(self) -> list[Part]:
        """Validation first, so that its documents can be kept out of training."""

    def provenance(self) -> dict:
        """Per source: package and version or location, and a hash of the files read (JSON)."""


def fingerprint(text: str) -> bytes:
    """Equal for texts that differ in case and white space only (16 bytes)."""
    return hashlib.sha256(" ".join(text.casefold().split()).encode("utf-8", "surrogatepass")).digest()[:16]
