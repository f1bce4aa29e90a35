"""The order in which Megatron-LM's GPTDataset gives samples: the same arrays for the same seed.

After megatron/core/datasets/gpt_dataset.py of Megatron-LM core 0.19, in three steps with one numpy RandomState(seed):

1. Document index: the documents of all epochs, shuffled together. If the samples that are asked for take less than 80 %
   of the last epoch, that epoch is shuffled by itself and comes last.
2. Sample index: sample k begins at token k * seq_len of these documents joined, and has seq_len + 1 tokens.
3. Shuffle index: the order of the samples; where the last epoch is separate, its samples stay last.

Number of epochs: the fewest that hold the samples asked for. So this number is a part of the order. A corpus of
one prefix is read: Megatron's blend of one prefix adds 0.5 % to the samples asked for, which changes the arrays only
where that crosses an epoch, or the 80 %.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from mxfp4.errors import UserError

SEPARATE_BELOW = 0.80
"""Share of the last epoch's samples below which it is shuffled by itself (Megatron's threshold)."""
CHUNK = 1 << 22
"""Documents whose lengths are summed at a time."""
LARGEST = 2**31 - 1
"""Entries of a document index at most: 8.6 GB."""


@dataclass(frozen=True)
class SampleOrder:
    """The three indices."""

    documents: np.ndarray
    """int32 [epochs * documents]: sequences of the dataset."""
    starts: np.ndarray
    """int64 [samples + 1, 2]: where each sample begins, as a place in `documents` and an offset in tokens."""
    shuffle: np.ndarray
    """uint32 [samples]."""

    def save(self, folder: Path) -> None:
        for name in _names():
            np.save(folder / f"{name}.npy", getattr(self, name))

    @classmethod
    def load(cls, folder: Path) -> SampleOrder:
        """Memory-mapped."""
        return cls(*(np.load(folder / f"{name}.npy", mmap_mode="r") for name in _names()))


def _names() -> list[str]:
    return [f.name for f in fields(SampleOrder)]


def build_order(lengths: np.ndarray, sequences: range, samples: int, seq_len: int, seed: int) -> SampleOrder:
    """The order of at least `samples` samples.

    Args:
        lengths: int32 [all sequences], in tokens.
        sequences: those that are trained on.
        samples: how many are asked for.
        seq_len: tokens of a sample, without the one that is only a target.
        seed: of the RandomState.

    Raises:
        UserError: too few tokens for a sample, or more documents in all epochs than an index can have.

    """
    epoch = int(np.sum(lengths[sequences.start : sequences.stop], dtype=np.int64))
    if epoch <= seq_len:
        raise UserError(f"seq_len={seq_len}: the training part has {epoch} tokens, at least {seq_len + 1} are needed")
    epochs = max(-(-(samples * seq_len + 1) // epoch), 1)
    if epochs * len(sequences) > LARGEST:
        raise UserError(
            f"samples={samples} of {seq_len} tokens are {epochs} epochs of {len(sequences)} documents, too many for an "
            "index: name fewer, as in megatron:PREFIX,samples=100000"
        )
    before_last = ((epochs - 1) * epoch - 1) // seq_len
    separate = epochs > 1 and samples - before_last < int(SEPARATE_BELOW * ((epoch - 1) // seq_len))
    random = np.random.RandomState(seed % 2**32)
    blocks = (epochs - 1, 1) if separate else (epochs,)
    documents = np.concatenate([_shuffled(np.tile(_range(sequences), n), random) for n in blocks])
    starts = _starts(lengths, documents, (epochs * epoch - 1) // seq_len, seq_len)
    total = len(starts) - 1
    ranges = ((0, before_last), (before_last, total)) if separate else ((0, total),)
    shuffle = np.concatenate([_shuffled(np.arange(*ends, dtype=np.uint32), random) for ends in ranges])
    return SampleOrder(documents, starts, shuffle)


def _range(sequences: range) -> np.ndarray:
    return np.arange(sequences.start, sequences.stop, dtype=np.int32)


def _shuffled(array: np.ndarray, random: np.random.RandomState) -> np.ndarray:
    random.shuffle(array)
    return array


def _starts(lengths: np.ndarray, documents: np.ndarray, samples: int, seq_len: int) -> np.ndarray:
    starts = np.empty((samples + 1, 2), dtype=np.int64)
    lengths = np.array(lengths)  # a memory map's random reads are slow
    known = passed = 0
    for begin in range(0, len(documents), CHUNK):
        sizes = lengths[documents[begin : begin + CHUNK]].astype(np.int64)
        ends = passed + np.cumsum(sizes)
        upto = min(samples + 1, (int(ends[-1]) - 1) // seq_len + 1)  # samples that begin before the chunk ends
        tokens = np.arange(known, upto, dtype=np.int64) * seq_len
        at = np.searchsorted(ends, tokens, side="right")
        starts[known:upto, 0] = begin + at
        starts[known:upto, 1] = tokens - (ends[at] - sizes[at])
        known, passed = max(upto, known), int(ends[-1])
    return starts
