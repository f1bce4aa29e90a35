"""A corpus of Megatron datasets: `megatron:PREFIX[,VALIDATION_PREFIX][,samples=N]`, trained on as they lie.

    megatron:/data/c4-train.en_6_text_document,/data/c4-validation-91205-samples.en_text_document

are the files that MLCommons distributes for its Llama 3.1 8B benchmark. Prefixes are absolute, since a run is keyed by
the name. Without a validation prefix the last 3 % of the documents are held out, as Megatron's `--split 97,3,0` does.

What is the reference's: files, tokens (no end-of-document token between documents of C4), and, for a seed, the
order of training samples, with N the samples of its whole schedule (default: 1.2 M steps of 32 sequences, so most
epochs are shuffled together and a document may come again early; see mxfp4.data.megatron.sample_order). Documents equal
to a validation document are kept.

What differs: validation samples are read as stored, as the reference's README says, where GPTDataset would shuffle
them; one training prefix, no blends.

runs/corpus/megatron-<vocabulary>-<hash>/ holds meta.json and the orders. meta.json has the SHA-256 of each file beside
its size and time of change: while these are as they were, the file is not read again. A file that changed is hashed
anew; another content is refused.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mxfp4.data.megatron.indexed_dataset import IndexedDataset, open_dataset
from mxfp4.data.megatron.names import NAME, Files, parse
from mxfp4.data.megatron.sample_order import SampleOrder, build_order
from mxfp4.errors import UserError
from mxfp4.locks import held

FORMAT = 1
META = "meta.json"
VALIDATION_SHARE = 0.03


def folder_of(name: str, vocab_size: int, root: Path) -> Path:
    """Where hashes and orders lie or would lie."""
    key = hashlib.sha256(json.dumps([FORMAT, name, vocab_size]).encode()).hexdigest()[:12]
    return root / f"{NAME}-{vocab_size}-{key}"


def open_corpus(
    name: str,
    vocab_size: int,
    root: Path,
    *,
    token_bytes: Callable[[], np.ndarray | None] = lambda: None,
    rebuild: bool = False,
    progress: bool = False,
) -> MegatronCorpus:
    """The corpus `name`; its files are hashed and checked the first time, and where they changed.

    Args:
        name: see this module.
        vocab_size: ids of the model; every id of the files must be below it.
        root: folder of packed corpora.
        token_bytes: gives the bytes of text of each id, int64 [ids]; None where the tokenizer is not at hand.
        rebuild: hash again, and take the files as they are now.
        progress: show a bar.

    Raises:
        UserError: files absent, damaged, of another format or vocabulary, or other than when they were first hashed.

    """
    files, folder = parse(name), folder_of(name, vocab_size, root)
    opened = {"train": open_dataset(files.train)}
    if files.validation is not None:
        opened["validation"] = open_dataset(files.validation)
    built = False
    if rebuild or _stale(folder, opened):
        with held(folder, "prepares"):
            if rebuild or _stale(folder, opened):  # another process may have done it while this one waited
                _hash(files, vocab_size, folder, opened, rebuild, progress)
                built = True
    return MegatronCorpus(folder, json.loads((folder / META).read_text()), opened, token_bytes, built)


def _read(folder: Path) -> dict | None:
    try:
        meta = json.loads((folder / META).read_text())
        return meta if meta["format"] == FORMAT else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _stamps(dataset: IndexedDataset) -> dict[str, list[int]]:
    """Size and time of change of each file, by which a change is noticed without reading it."""
    return {kind: [(s := path.stat()).st_size, s.st_mtime_ns] for kind, path in dataset.files.items()}


def _stale(folder: Path, opened: dict[str, IndexedDataset]) -> bool:
    meta = _read(folder)
    return meta is None or any(meta["files"][split]["stamps"] != _stamps(d) for split, d in opened.items())


def _hash(
    files: Files, vocab_size: int, folder: Path, opened: dict[str, IndexedDataset], rebuild: bool, progress: bool
) -> None:
    """Write meta.json. UserError where a file has another content than it had before, unless `rebuild`."""
    before = None if rebuild else _read(folder)
    found = {}
    for split, dataset in opened.items():
        stamps = _stamps(dataset)
        scanned = dataset.scan(vocab_size, progress=progress)
        sums = {"bin": scanned.bin_sha256, "idx": scanned.idx_sha256}
        found[split] = {"sha256": sums, "stamps": stamps, "largest_id": scanned.largest_id}
        for kind, path in dataset.files.items():
            known = before["files"][split]["sha256"][kind] if before else sums[kind]
            if known != sums[kind]:
                raise UserError(
                    f"{path} changed: its SHA-256 was {known[:12]}..., it is {sums[kind][:12]}... now; restore it, or "
                    "take it as it is with `mxfp4 prepare --rebuild`"
                )
    splits = {}
    for split, (dataset, part) in _split(opened).items():
        size = int(np.sum(dataset.lengths[part.start : part.stop], dtype=np.int64))
        splits[split] = {"documents": len(part), "tokens": size}
    content = [FORMAT, files.samples, splits, {split: f["sha256"] for split, f in found.items()}]
    meta = {
        "format": FORMAT,
        "corpus": files.name,
        "vocab_size": vocab_size,
        "samples": files.samples,
        "splits": splits,
        "files": found,
        "fingerprint": hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16],
    }
    if rebuild:
        shutil.rmtree(folder, ignore_errors=True)  # orders of the files as they were
    folder.mkdir(parents=True, exist_ok=True)
    new = folder / f"{META}.new"
    new.write_text(json.dumps(meta, indent=1, sort_keys=True))
    new.replace(folder / META)


def _split(opened: dict[str, IndexedDataset]) -> dict[str, tuple[IndexedDataset, range]]:
    """The dataset and the sequences of each split."""
    train = opened["train"]
    n = len(train.lengths)
    if "validation" in opened:
        validation = opened["validation"]
        return {"train": (train, range(n)), "validation": (validation, range(len(validation.lengths)))}
    cut = round((1 - VALIDATION_SHARE) * n)  # Megatron's rule: round(share * sequences)
    return {"train": (train, range(cut)), "validation": (train, range(cut, n))}


class MegatronCorpus:
    """An open corpus: batches as a pure function of (step, seed). `open_corpus` makes it."""

    def __init__(
        self,
        folder: Path,
        meta: dict,
        opened: dict[str, IndexedDataset],
        token_bytes: Callable[[], np.ndarray | None],
        built: bool,
    ) -> None:
        self.folder, self.meta, self.built = folder, meta, built
        self._opened, self._parts, self._token_bytes = opened, _split(opened), token_bytes
        self._order = lru_cache(maxsize=2)(self._open_order)

    @property
    def name(self) -> str:
        return self.meta["corpus"]

    @property
    def vocab_size(self) -> int:
        return self.meta["vocab_size"]

    @property
    def fingerprint(self) -> str:
        """16 hex digits that determine every batch: of the files' SHA-256, the split and the number of samples."""
        return self.meta["fingerprint"]

    @property
    def origin(self) -> dict:
        """Where the tokens come from, for a run's record."""
        files = {"train": self._opened["train"].prefix.name}
        if "validation" in self._opened:
            files["validation"] = self._opened["validation"].prefix.name
        return {"files": {split: {"prefix": p, **self.meta["files"][split]["sha256"]} for split, p in files.items()}}

    def n_tokens(self, split: str) -> int:
        return self.meta["splits"][split]["tokens"]

    def n_windows(self, split: str, seq_len: int) -> int:
        """Windows of seq_len + 1 tokens as stored, neighbours sharing one. UserError when there is none."""
        if seq_len < 1:
            raise UserError(f"seq_len={seq_len} must be at least 1")
        n = (self.n_tokens(split) - 1) // seq_len
        if n < 1:
            raise UserError(f"seq_len={seq_len}: the {split} part of {self.name!r} has {self.n_tokens(split)} tokens")
        return n

    def batch(self, step: int, batch_size: int, seq_len: int, seed: int) -> Tensor:
        """[batch_size, seq_len + 1], the training batch of a step (from 0), in Megatron's order. A pure function."""
        if step < 0 or batch_size < 1:
            raise UserError(f"step={step} must be at least 0 and batch_size={batch_size} at least 1")
        order = self._order(seq_len, seed)
        end = (step + 1) * batch_size
        if end > len(order.shuffle):
            raise UserError(
                f"step {step} needs {end} samples, the order of {self.name!r} has {len(order.shuffle)}: name more, as "
                f"in {self.name.partition(',samples=')[0]},samples={2 * end}"
            )
        samples = [self._sample(order, int(order.shuffle[i]), seq_len) for i in range(end - batch_size, end)]
        return torch.from_numpy(np.stack(samples))

    def _sample(self, order: SampleOrder, k: int, seq_len: int) -> np.ndarray:
        """int64 [seq_len + 1]: sample k of the documents joined."""
        (first, offset), (last, end) = order.starts[k].tolist(), order.starts[k + 1].tolist()
        dataset, pieces = self._opened["train"], []
        for place in range(first, last + 1):
            i = int(order.documents[place])
            start, stop = offset if place == first else 0, end + 1 if place == last else None
            pieces.append(dataset.sequence(i, start, stop))
        return np.concatenate(pieces, dtype=np.int64)

    def _open_order(self, seq_len: int, seed: int) -> SampleOrder:
        """Built by the first process that asks for it, then memory-mapped by all."""
        folder = self.folder / f"order-{seq_len}-{seed}"
        if not folder.is_dir():
            with held(folder, "prepares"):
                if not folder.is_dir():
                    dataset, part = self._parts["train"]
                    work = self.folder / f".{folder.name}.partial"
                    shutil.rmtree(work, ignore_errors=True)
                    work.mkdir(parents=True)
                    build_order(dataset.lengths, part, self.meta["samples"], seq_len, seed).save(work)
                    work.rename(folder)
        return SampleOrder.load(folder)

    def eval_windows(self, n: int | None, seq_len: int) -> Tensor:
        """[n, seq_len + 1], the first n validation windows as stored (None: all)."""
        available = self.n_windows("validation", seq_len)
        if n is not None and not 1 <= n <= available:
            raise UserError(
                f"{n} evaluation windows asked for: the validation part of {self.name!r} has {available} "
                f"of seq_len={seq_len}, so 1 to {available} are allowed"
            )
        dataset, part = self._parts["validation"]
        begin = int(dataset.pointers[part.start]) // dataset.tokens.itemsize
        at = begin + np.arange(n or available)[:, None] * seq_len + np.arange(seq_len + 1)
        return torch.from_numpy(dataset.tokens[at].astype(np.int64))

    def bytes_per_token(self, split: str = "validation", windows: Tensor | None = None) -> float:
        """Bytes of text per target token of `windows` ([n, seq_len + 1]); NaN without them or without the tokenizer."""
        lengths = self._lengths if windows is not None else None
        if windows is None or lengths is None:
            return float("nan")
        targets = windows[:, 1:].cpu().numpy()
        return float(lengths[targets].sum()) / targets.size if targets.max() < len(lengths) else float("nan")

    @cached_property
    def _lengths(self) -> np.ndarray | None:
        return self._token_bytes()

    def verify(self) -> None:
        """Read every byte. UserError names the file that is not as it was when it was first hashed."""
        for split, dataset in self._opened.items():
            scanned = dataset.scan(self.vocab_size)
            for kind, found in (("bin", scanned.bin_sha256), ("idx", scanned.idx_sha256)):
                if found != self.meta["files"][split]["sha256"][kind]:
                    raise UserError(f"{dataset.files[kind]} changed since it was first hashed: fetch it again")

    def __repr__(self) -> str:
        return f"MegatronCorpus({self.name!r}, vocab_size={self.vocab_size}, {self.fingerprint})"
