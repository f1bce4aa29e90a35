"""C4 (en), from the hub through the `datasets` JSON loader or from a local mirror: only the root differs.

Split and shards follow the MLPerf "Llama 3.1 8B" reference: training documents from shards 768-1023 as its
README says (its code's default is 768-895), validation from the first 91,205 documents of the validation
files. A local root is a folder with the hub's layout, en/c4-train.00768-of-01024.json.gz and so on; of the validation
files it need hold those that feed the first documents, the first three. Each shard is one part, so a packing that stops
goes on at the shard where it stopped.

Sizes (the dataset card of allenai/c4): `en` has 364,868,892 training documents in 1024 files and 364,608 for validation
in 8, written in equal parts: 356,317 or 356,318 a file, and 45,576. A file read to its end that holds another number is
not C4's, or not all of it, and is refused: its documents would train under the identity of C4.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path

from mxfp4.data.documents import Document, Part
from mxfp4.data.hub import hub_endpoint, offline, pinned, revision_of, status_of, trouble, unreachable
from mxfp4.errors import UserError

REPOSITORY = "allenai/c4"
TRAIN_SHARDS, VALIDATION_SHARDS = 1024, 8
DEFAULT_SHARDS = (768, 1023)
TRAIN_DOCUMENTS_IN_ALL, VALIDATION_DOCUMENTS_IN_ALL = 364_868_892, 364_608
VALIDATION_DOCUMENTS = 91_205
DOCUMENTS_PER_SHARD = TRAIN_DOCUMENTS_IN_ALL // TRAIN_SHARDS
DOCUMENTS_PER_VALIDATION_FILE = VALIDATION_DOCUMENTS_IN_ALL // VALIDATION_SHARDS

ALTERNATIVES = (
    "point MXFP4_C4 (or --root) at a local mirror that holds en/c4-train.*.json.gz, or use --corpus prose, "
    "technical or synthetic, which need no network"
)


def check_hub() -> None:
    """UserError, one sentence, when the hub cannot be used."""
    if offline():
        raise UserError(f"C4 from the hub was asked for, but HF_HUB_OFFLINE forbids it: {ALTERNATIVES}")
    if why := unreachable(f"{hub_endpoint()}/api/datasets/{REPOSITORY}"):
        if status := status_of(why):
            raise UserError(f"C4 from the hub was asked for, but {_refusal(status, REPOSITORY)}")
        raise UserError(
            f"C4 from the hub was asked for, but {hub_endpoint()} cannot be reached ({why}): {ALTERNATIVES}"
        )


def _refusal(status: int, what: str) -> str:
    return trouble(
        status, what, allowed_by="log in again with `hf auth login`, or " + ALTERNATIVES, instead=ALTERNATIVES
    )


def _train_file(shard: int) -> str:
    return f"en/c4-train.{shard:05d}-of-{TRAIN_SHARDS:05d}.json.gz"


@dataclass
class C4:
    """C4 en. `shards`: inclusive range of training shards. `root`: a folder; None: MXFP4_C4, else the hub."""

    shards: tuple[int, int] = DEFAULT_SHARDS
    root: str | os.PathLike | None = None
    validation_documents: int = field(default_factory=lambda: VALIDATION_DOCUMENTS)
    name: str = "c4"
    documents_per_shard: int = field(default_factory=lambda: DOCUMENTS_PER_SHARD)
    documents_per_validation_file: int = field(default_factory=lambda: DOCUMENTS_PER_VALIDATION_FILE)
    revision: str | None = None
    """Commit of the hub's repository; None: MXFP4_C4_REVISION, else the pinned one. Of a mirror it says nothing."""

    def __post_init__(self) -> None:
        first, last = self.shards
        if not 0 <= first <= last < TRAIN_SHARDS:
            raise UserError(f"shards {first}-{last}: the range must lie within 0-{TRAIN_SHARDS - 1}")
        if self.validation_documents < 1:
            raise UserError(f"validation_documents={self.validation_documents} must be at least 1")
        given = self.root or os.environ.get("MXFP4_C4")
        self.local = Path(given).expanduser() if given else None
        self.commit = revision_of(REPOSITORY, self.revision) if self.local is None else None

    def describe(self) -> str:
        """Where it comes from and which shards, in a few words; how many files a mirror lacks."""
        shards = f"shards {self.shards[0]}-{self.shards[1]}"
        if self.local is None:
            return f"the hub, {shards}"
        missing = self.missing()
        return f"a local mirror, {shards}" + (f", which lacks {len(missing)} files" if missing else "")

    def missing(self) -> list[str]:
        """Files that the local mirror lacks, as en/NAME; none of the hub."""
        return [] if self.local is None else [f for f in self._files() if not (self.local / f).is_file()]

    def longest_run(self) -> tuple[int, int] | None:
        """The longest range of neighbouring shards that the local mirror holds; None without any."""
        best, start = None, None
        for i in range(TRAIN_SHARDS + 1):
            there = self.local is not None and i < TRAIN_SHARDS and (self.local / _train_file(i)).is_file()
            if there and start is None:
                start = i
            elif not there and start is not None:
                best = max(best or (start, i - 1), (start, i - 1), key=lambda run: run[1] - run[0])
                start = None
        return best

    def identity(self) -> dict:
        other = self.commit not in (None, pinned(REPOSITORY))
        return {
            "dataset": REPOSITORY,
            "config": "en",
            "train_shards": list(self.shards),
            "validation_documents": self.validation_documents,
            "validation_order": "as stored",  # the MLPerf rule: the first sequences, unshuffled
            **({"revision": self.commit} if other else {}),
        }

    def provenance(self) -> dict:
        if self.local is None:
            return {"c4": {"location": f"hf://datasets/{REPOSITORY}", "revision": self.commit}}
        sizes = "".join(f"{f} {(self.local / f).stat().st_size}\n" for f in self._files())
        return {
            "c4": {
                "location": "local mirror",
                "file_sizes_sha256": hashlib.sha256(sizes.encode()).hexdigest(),
            }
        }

    def _files(self) -> list[str]:
        first, last = self.shards
        return self._validation_files() + [_train_file(i) for i in range(first, last + 1)]

    def _validation_files(self) -> list[str]:
        """Those that feed the first documents."""
        n = min(-(-self.validation_documents // self.documents_per_validation_file), VALIDATION_SHARDS)
        return [f"en/c4-validation.{i:05d}-of-{VALIDATION_SHARDS:05d}.json.gz" for i in range(n)]

    def parts(self) -> list[Part]:
        if self.local is None:
            check_hub()
        else:
            if missing := self.missing():
                named = f"{missing[0]} and {len(missing) - 1} more" if len(missing) > 1 else missing[0]
                fewer = (
                    "" if "validation" in missing[0] else ", take the shards that are there (--corpus c4:FIRST-LAST)"
                )
                raise UserError(
                    f"C4 mirror {self.local} lacks {named}: add what is missing{fewer}, or unset MXFP4_C4 to use the hub"
                )
        first, _ = self.shards
        held_out = Part("validation", "validation", self._validation, self.validation_documents)
        shards = self._files()[len(self._validation_files()) :]
        return [held_out] + [
            Part(
                "train",
                f"shard {first + i}",
                partial(self._shard, f, self.documents_per_shard, 1),
                self.documents_per_shard,
            )
            for i, f in enumerate(shards)
        ]

    def _validation(self) -> Iterator[Document]:
        documents = (d for f in self._validation_files() for d in self._shard(f, self.documents_per_validation_file))
        yield from islice(documents, self.validation_documents)

    def _shard(self, file: str, documents: int, spare: int = 0) -> Iterator[Document]:
        """The documents of a file; UserError at its end if they were not so many, or up to `spare` more."""
        texts = _from_hub(file, self.commit) if self.local is None else _from_disk(self.local / file)
        try:
            read = 0
            for text in texts:
                read += 1
                yield Document("c4", text)
            if not documents <= read <= documents + spare:
                raise UserError(f"C4 file {file} holds {read:,} documents, {documents:,} are right: {self._again()}")
        except UserError:
            raise
        except Exception as error:  # the loader's failures have no common type: gzip, JSON, Arrow, HTTP
            raise UserError(f"C4 file {file} {self._trouble(file, error)}") from error

    def _again(self) -> str:
        if self.local is None:
            return "run `mxfp4 prepare` again; it goes on where it stopped"
        return f"fetch it into {self.local} again; `mxfp4 prepare` then goes on where it stopped"

    def _trouble(self, file: str, error: Exception) -> str:
        """What went wrong with a file and what to do, in one line."""
        last = (str(error).strip().splitlines() or [""])[-1][:200]
        what = f"could not be read ({type(error).__name__}: {last})"
        if self.local is not None:
            return f"{what}: {self._again()}"
        if status := status_of(error):
            return f"could not be read: {_refusal(status, file)}"
        if why := unreachable(hub_endpoint()):
            return (
                f"could not be read, {hub_endpoint()} cannot be reached any more ({why}): run `mxfp4 prepare` again "
                "once it can; it goes on where it stopped"
            )
        return f"{what}: {self._again()}"


def _from_hub(file: str, revision: str | None) -> Iterator[str]:
    from datasets import load_dataset

    logging.getLogger("datasets").setLevel(logging.CRITICAL)  # it logs a traceback of its own before it raises
    address = f"hf://datasets/{REPOSITORY}@{revision}/{file}"
    rows = load_dataset("json", data_files=[address], split="train", streaming=True).select_columns(["text"])
    for batch in rows.iter(batch_size=1000):
        yield from batch["text"]


def _from_disk(path: Path) -> Iterator[str]:
    """The texts of a file by its very name: `datasets` reads [, ], *, ? and :: in a path as a pattern."""
    if path.stat().st_size == 0:
        raise EOFError("the file is empty")
    with gzip.open(path) as lines:
        for line in lines:
            if line.strip():
                text = json.loads(line)["text"]
                if not isinstance(text, str):
                    raise TypeError(f"a text is {text!r}")
                yield text
