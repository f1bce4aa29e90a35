"""Packed corpora: token ids in memory-mapped files, batches as a pure function of (step, seed).

    runs/corpus/<name>-<vocab>-<hash>/
        train.bin, validation.bin   little-endian uint16 (uint32 when ids do not fit), EOS after each document, or not
        tokenizer.json
        meta.json                   sources, counts, a SHA-256 for each part: written last

Window i of a split is tokens [i * seq_len, i * seq_len + seq_len + 1): inputs and, shifted by one, targets.
In epoch e the order of the training windows is perm(seed, e), so every arm of a seed sees the same batches
and a run resumes from its step number alone.
"""

from __future__ import annotations

import hashlib
import json
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import LongTensor

from mxfp4.data.documents import SPLITS
from mxfp4.data.tokenizer import TextTokenizer, load
from mxfp4.errors import UserError

FORMAT = 1
META = "meta.json"
EVAL_EPOCH = 2**63  # an epoch that training never reaches: the shuffle of validation windows


def token_dtype(ids: int) -> np.dtype:
    """The smallest type of file that holds ids below `ids`."""
    return np.dtype("<u2") if ids <= 2**16 else np.dtype("<u4")


@lru_cache(maxsize=4)
def permutation(n: int, seed: int, epoch: int) -> np.ndarray:
    """int64 [n], the order of windows in an epoch; from Philox's raw words, which no NumPy changes."""
    key = np.array([seed % 2**64, epoch], dtype=np.uint64)  # a list may pass through float64
    words = np.random.Philox(key=key).random_raw(n)
    return np.argsort(words, kind="stable")


def sha256_range(path: Path, start: int, size: int) -> str:
    """SHA-256 of `size` bytes of a file from `start` on."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        file.seek(start)
        while size > 0 and (block := file.read(min(size, 1 << 22))):
            digest.update(block)
            size -= len(block)
    return digest.hexdigest()


class PackedCorpus:
    """A packed corpus on disk. Opening checks sizes and the tokenizer; `verify()` checks every byte."""

    def __init__(self, folder: Path | str) -> None:
        """UserError names the file that is missing, truncated or not what meta.json says."""
        self.folder = Path(folder)
        try:
            self.meta = json.loads((self.folder / META).read_text())
            self.dtype = np.dtype(self.meta["dtype"])
            splits, wanted = self.meta["splits"], self.meta["tokenizer"]["sha256"]
            fmt = self.meta["format"]
        except FileNotFoundError:
            raise UserError(f"{self.folder / META} does not exist: run `mxfp4 prepare`") from None
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{self.folder / META} is damaged ({error}): run `mxfp4 prepare`") from None
        if fmt != FORMAT:
            raise UserError(f"{self.folder} has packing format {fmt}, {FORMAT} is needed: run `mxfp4 prepare`")
        for split in SPLITS:
            path = self.path(split)
            size, right = (
                path.stat().st_size if path.is_file() else -1,
                splits[split]["tokens"] * self.dtype.itemsize,
            )
            if size != right:
                found = "is missing" if size < 0 else f"has {size} bytes, {right} are right"
                raise UserError(f"{path} {found}: run `mxfp4 prepare`")
        file = self.folder / "tokenizer.json"
        if not file.is_file() or hashlib.sha256(file.read_bytes()).hexdigest() != wanted:
            raise UserError(f"{file} is missing or damaged: run `mxfp4 prepare`")
        self.built = False  # set by prepare: whether that call packed it
        self._ids: dict[str, np.ndarray] = {}

    @property
    def name(self) -> str:
        return self.meta["corpus"]

    @property
    def vocab_size(self) -> int:
        """The size that the model must have; the tokenizer's ids are below it."""
        return self.meta["vocab_size"]

    @property
    def fingerprint(self) -> str:
        """16 hex digits that determine every token: equal fingerprints, equal batches."""
        return self.meta["fingerprint"]

    @property
    def origin(self) -> dict:
        """Where the tokens come from, for a run's record: the hub's revisions, where they came from it."""
        sources = {name: s["revision"] for name, s in self.meta["sources"].items() if s.get("revision")}
        return {
            "append_eod": self.meta.get("append_eod", True),
            "tokenizer": self.meta["tokenizer"],
            "revisions": sources,
        }

    @property
    def tokenizer(self) -> TextTokenizer:
        return load(self.folder / "tokenizer.json")

    def path(self, split: str) -> Path:
        if split not in SPLITS:
            raise UserError(f"unknown split {split!r}; known: {', '.join(SPLITS)}")
        return self.folder / f"{split}.bin"

    def tokens(self, split: str) -> np.ndarray:
        """Read-only memory map of all ids of a split."""
        if split not in self._ids:
            self._ids[split] = np.memmap(self.path(split), dtype=self.dtype, mode="r")
        return self._ids[split]

    def n_tokens(self, split: str) -> int:
        return self.meta["splits"][split]["tokens"] if split in SPLITS else len(self.tokens(split))

    def n_windows(self, split: str, seq_len: int) -> int:
        """Windows of seq_len + 1 tokens (neighbours share one token). UserError when there is none."""
        if seq_len < 1:
            raise UserError(f"seq_len={seq_len} must be at least 1")
        n = (self.n_tokens(split) - 1) // seq_len
        if n < 1:
            raise UserError(f"seq_len={seq_len}: the {split} part of {self.name!r} has {self.n_tokens(split)} tokens")
        return n

    def windows(self, split: str, indices: np.ndarray, seq_len: int) -> LongTensor:
        """[len(indices), seq_len + 1]"""
        at = np.asarray(indices, dtype=np.int64)[:, None] * seq_len + np.arange(seq_len + 1)
        return torch.from_numpy(self.tokens(split)[at].astype(np.int64))

    def window(self, split: str, i: int, seq_len: int) -> LongTensor:
        """[seq_len + 1], window i of a split."""
        n = self.n_windows(split, seq_len)
        if not 0 <= i < n:
            raise UserError(f"window {i}: the {split} part has windows 0 to {n - 1} at seq_len={seq_len}")
        return self.windows(split, np.array([i]), seq_len)[0]

    def batch(self, step: int, batch_size: int, seq_len: int, seed: int) -> LongTensor:
        """[batch_size, seq_len + 1], the training batch of a step (from 0). A pure function.

        Steps take windows perm(seed, epoch)[...] one after the other: none comes twice before an epoch ends.
        """
        if step < 0 or batch_size < 1:
            raise UserError(f"step={step} must be at least 0 and batch_size={batch_size} at least 1")
        n = self.n_windows("train", seq_len)
        position = step * batch_size + np.arange(batch_size, dtype=np.int64)
        indices = [permutation(n, seed, int(e))[int(p)] for e, p in zip(position // n, position % n, strict=True)]
        return self.windows("train", np.array(indices), seq_len)

    def eval_windows(self, n: int | None, seq_len: int) -> LongTensor:
        """[n, seq_len + 1], n fixed validation windows (None: all). The same for every arm and seed.

        The first n as stored (C4, by the MLPerf rule) or the first n of one fixed shuffle (wheel corpora). n
        + 1 windows are n windows and one more.
        """
        available = self.n_windows("validation", seq_len)
        if n is not None and not 1 <= n <= available:
            raise UserError(
                f"{n} evaluation windows asked for: the validation part of {self.name!r} has {available} "
                f"of seq_len={seq_len}, so 1 to {available} are allowed"
            )
        shuffled = self.meta["identity"].get("validation_order") == "shuffled"
        order = permutation(available, 0, EVAL_EPOCH) if shuffled else np.arange(available)
        return self.windows("validation", order[:n], seq_len)

    def bytes_per_token(self, split: str = "validation", windows: LongTensor | None = None) -> float:
        """Bytes of text per target token: bits per byte = nats per token / ln 2 / bytes_per_token.

        Exact for the targets of `windows` ([n, seq_len + 1]; the first column is input alone) when given,
        else the mean of the split. EOS counts as a token of no bytes: its loss is part of the bits, as it
        must be coded too.
        """
        if windows is None:
            counts = self.meta["splits"][split]
            return counts["bytes"] / counts["tokens"]
        targets = windows[:, 1:]
        return float(self._token_bytes()[targets.cpu().numpy()].sum()) / targets.numel()

    def _token_bytes(self) -> np.ndarray:
        if not hasattr(self, "_lengths"):
            self._lengths = self.tokenizer.token_bytes()
        return self._lengths

    def verify(self) -> None:
        """Read every byte. UserError names the file and the part of it that differ from what was packed."""
        at = dict.fromkeys(SPLITS, 0)
        for part in self.meta["parts"]:
            split, size = part["split"], part["tokens"] * self.dtype.itemsize
            if sha256_range(self.path(split), at[split], size) != part["sha256"]:
                raise UserError(
                    f"{self.path(split)} is damaged in part {part['name']!r} (bytes {at[split]} to "
                    f"{at[split] + size}): run `mxfp4 prepare --rebuild`"
                )
            at[split] += size

    def __repr__(self) -> str:
        counts = ", ".join(f"{s} {self.n_tokens(s):,} tokens" for s in SPLITS)
        return f"PackedCorpus({self.name!r}, vocab_size={self.vocab_size}, {counts}, {self.fingerprint})"
