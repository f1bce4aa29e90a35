"""Megatron-LM's indexed datasets: token ids in PREFIX.bin, what is where in PREFIX.idx, memory-mapped.

Format, as megatron/core/datasets/indexed_dataset.py of Megatron-LM core 0.19 writes it, little-endian:

| .idx | type | what |
|---|---|---|
| header | 9 bytes | `MMIDIDX` and two zero bytes |
| version | uint64 | 1 |
| dtype code | uint8 | of the ids in .bin: 4 is int32, 8 is uint16 |
| sequence count S | uint64 | |
| document count D + 1 | uint64 | |
| lengths | int32 [S] | tokens of each sequence |
| pointers | int64 [S] | where each sequence starts in .bin, in bytes |
| document indices | int64 [D + 1] | the first sequence of each document, and S |

The .bin holds the ids of all sequences, one after the other. A multimodal index has S bytes more and is refused.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from mxfp4.errors import UserError

HEADER = b"MMIDIDX\x00\x00"
VERSION = 1
DTYPES: dict[int, np.dtype] = {4: np.dtype("<i4"), 8: np.dtype("<u2")}
"""Types of token ids by their code. Megatron has six more, for other data."""
_FIXED = struct.Struct("<9sQBQQ")
BLOCK = 1 << 24


@dataclass(frozen=True)
class Scanned:
    """What reading every byte of a dataset found."""

    bin_sha256: str
    idx_sha256: str
    largest_id: int


@dataclass(frozen=True)
class IndexedDataset:
    """An open dataset. Arrays are read-only memory maps."""

    prefix: Path
    """The files' common path, without .bin and .idx."""
    lengths: np.ndarray
    """int32 [sequences], in tokens."""
    pointers: np.ndarray
    """int64 [sequences], in bytes."""
    document_indices: np.ndarray
    """int64 [documents + 1]."""
    tokens: np.ndarray
    """int32 or uint16 [tokens]."""

    @property
    def files(self) -> dict[str, Path]:
        return _files(self.prefix)

    def sequence(self, i: int, start: int, end: int | None = None) -> np.ndarray:
        """Ids `start` to `end` (exclusive; None: the last) of sequence `i`."""
        first = int(self.pointers[i]) // self.tokens.itemsize
        return self.tokens[first + start : first + (int(self.lengths[i]) if end is None else end)]

    def scan(self, vocab_size: int, *, progress: bool = False) -> Scanned:
        """Read every byte. UserError where the index contradicts itself or an id is not below `vocab_size`."""
        idx, path = self.files["idx"], self.files["bin"]
        lengths = np.array(self.lengths, dtype=np.int64)
        starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]) * self.tokens.itemsize
        if lengths.min() < 0 or not np.array_equal(starts, self.pointers):
            raise UserError(f"{idx} is damaged: its pointers are not the sums of its lengths; fetch it again")
        if np.any(np.diff(self.document_indices) < 0):
            raise UserError(f"{idx} is damaged: its document indices do not ascend; fetch it again")
        digest, smallest, largest = hashlib.sha256(), 0, 0
        bar = tqdm(
            desc=f"hash {path.name}", total=path.stat().st_size, unit="B", unit_scale=True,
            disable=None if progress else True,
        )  # fmt: skip
        with bar, path.open("rb") as file:
            while block := file.read(BLOCK):
                digest.update(block)
                ids = np.frombuffer(block, dtype=self.tokens.dtype)
                smallest, largest = min(smallest, int(ids.min())), max(largest, int(ids.max()))
                bar.update(len(block))
        if smallest < 0 or largest >= vocab_size:
            wrong = smallest if smallest < 0 else largest
            raise UserError(
                f"{path} holds token {wrong}, ids 0 to {vocab_size - 1} are allowed with vocab_size={vocab_size}: take "
                "the vocabulary size of the tokenizer that made it"
            )
        with idx.open("rb") as index:
            return Scanned(digest.hexdigest(), hashlib.file_digest(index, "sha256").hexdigest(), largest)


def _files(prefix: Path) -> dict[str, Path]:
    return {kind: prefix.with_name(f"{prefix.name}.{kind}") for kind in ("bin", "idx")}


def open_dataset(prefix: Path) -> IndexedDataset:
    """The dataset PREFIX.bin and PREFIX.idx. Reads the index's head and compares sizes; `IndexedDataset.scan` reads all.

    Raises UserError that names the file: absent, of another format, version or type, truncated, or of another size than
    the index says.
    """
    files = _files(prefix)
    for path in files.values():
        if not path.is_file():
            raise UserError(f"{path} does not exist: a Megatron dataset is PREFIX.bin and PREFIX.idx; name the PREFIX")
    idx, data = files["idx"], files["bin"]
    size, bin_size = idx.stat().st_size, data.stat().st_size
    with idx.open("rb") as file:
        head = file.read(_FIXED.size)
    if not head.startswith(HEADER):
        raise UserError(f"{idx} does not start with {HEADER!r}: it is no index of a Megatron dataset")
    if len(head) < _FIXED.size:
        raise UserError(f"{idx} is truncated: it has {size} bytes; fetch it again")
    _, version, code, sequences, documents = _FIXED.unpack(head)
    if version != VERSION:
        raise UserError(f"{idx} has format version {version}, {VERSION} is known: write it with Megatron-LM core")
    if code not in DTYPES:
        known = ", ".join(f"{c} ({d.name})" for c, d in DTYPES.items())
        raise UserError(f"{idx} has dtype code {code}, token ids have one of {known}")
    if sequences < 1:
        raise UserError(f"{idx} has no sequences: tokenize the documents again")
    wanted = _FIXED.size + 12 * sequences + 8 * documents
    if size != wanted:
        why = "it is multimodal, which is not supported" if size == wanted + sequences else "fetch it again"
        raise UserError(f"{idx} has {size} bytes, {sequences} sequences need {wanted}: {why}")
    at = _FIXED.size
    lengths = np.memmap(idx, dtype="<i4", mode="r", offset=at, shape=(sequences,))
    pointers = np.memmap(idx, dtype="<i8", mode="r", offset=at + 4 * sequences, shape=(sequences,))
    indices = np.memmap(idx, dtype="<i8", mode="r", offset=at + 12 * sequences, shape=(documents,))
    if documents < 1 or indices[0] != 0 or indices[-1] != sequences:
        raise UserError(f"{idx} is damaged: its documents do not cover its {sequences} sequences; fetch it again")
    dtype = DTYPES[code]
    right = int(pointers[-1]) + int(lengths[-1]) * dtype.itemsize
    if bin_size != right:
        raise UserError(f"{data} has {bin_size} bytes, its index says {right}: fetch both files again")
    if right == 0:
        raise UserError(f"{data} is empty: tokenize the documents again")
    return IndexedDataset(prefix, lengths, pointers, indices, np.memmap(data, dtype=dtype, mode="r"))
