"""A source of known entropy: tokens whose exact conditional law is known at every position, in any amount.

A model's loss on it splits into an irreducible part and the model's own excess, so that the damage done by
quantization has an absolute scale. Each window of seq_len + 1 tokens is a sequence of its own. Token 0 is a
marker, the others are words with Zipf frequencies. With x[:t] known the law of x[t] is, in text,

    MARKER_PROB                  the marker (once there is enough history to copy from) otherwise (1 -
    UNIFORM) * table[class(x[t-2]), x[t-1]] + UNIFORM * zipf       a sparse order-2 Markov chain

and after a marker at m, where r = m - COPY is the end of the copyable history,

    x[m+1], the cue:   the empirical law of x[r - RANGE : r], the last RANGE copyable tokens x[m+2 ...], COPY
    tokens:  (1 - COPY_NOISE) * [what followed the cue's last occurrence in x[:r]] + COPY_NOISE * zipf

A marker inside a cue or a copy has no effect. So frequent pairs, rare pairs and copying in context (what
induction heads do) can each be learnt, and each is exact: no hidden state. Random numbers are Philox words of
(law seed, stream, window index); NumPy keeps those the same in every release.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, field
from functools import lru_cache

import numpy as np
import torch
from torch import LongTensor, Tensor

from mxfp4.errors import UserError

MARKER = 0
CLASSES = 16
SUCCESSORS = 8
UNIFORM = 0.1
MARKER_PROB = 1 / 48
COPY = 16
RANGE = 64
COPY_NOISE = 0.05

_TEXT, _CUE, _COPY = 0, 1, 2
_CHUNK_TOKENS = 1 << 20
_DRAWS = 4  # uniform numbers used for a token


def _uniform(key: tuple[int, int], start: int, count: int) -> np.ndarray:
    """float64 [count] in [0, 1): a Philox stream from number `start` on, a multiple of 4."""
    words = np.random.Philox(
        key=np.array([k % 2**64 for k in key], dtype=np.uint64),  # a list would pass through float64
        counter=start // 4,
    ).random_raw(count)
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


class Law:
    """The tables of the chain, drawn from `seed`, and the state that a prefix leaves behind."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        self.vocab_size = vocab_size
        weights = np.concatenate([[0.0], 1.0 / (np.arange(1, vocab_size) + 2.0)])  # the marker is no word
        self.zipf = weights / weights.sum()
        self.zipf_cdf = np.cumsum(self.zipf)
        key = (seed, 2**63)
        n = CLASSES * vocab_size * SUCCESSORS
        draws = _uniform(key, 0, n + (-n) % 4)
        self.successors = self._word(draws[:n]).reshape(CLASSES, vocab_size, SUCCESSORS)
        rank = 1.0 / np.arange(1, SUCCESSORS + 1)
        self.successor_probs = rank / rank.sum()
        self.successor_cdf = np.cumsum(self.successor_probs)
        self.classes = (_uniform(key, n + (-n) % 4, vocab_size) * CLASSES).astype(np.int64)

    def _word(self, u: np.ndarray) -> np.ndarray:
        return np.minimum(np.searchsorted(self.zipf_cdf, u, side="right"), self.vocab_size - 1)

    def markov(self, x: np.ndarray, t: int) -> np.ndarray:
        """[n, SUCCESSORS] words that may follow; a missing x[-1] or x[-2] counts as the marker."""
        last = x[:, t - 1] if t >= 1 else np.zeros(len(x), np.int64)
        before = x[:, t - 2] if t >= 2 else np.zeros(len(x), np.int64)
        return self.successors[self.classes[before], last]


class _State:
    """For n windows at position t: mode, copy left, where the copy reads. A function of x[:, :t]."""

    def __init__(self, n: int) -> None:
        self.mode = np.zeros(n, np.int64)
        self.left = np.zeros(n, np.int64)
        self.source = np.zeros(n, np.int64)

    def advance(self, x: np.ndarray, t: int) -> None:
        """Take in x[:, t]."""
        token = x[:, t]
        copying, cued = self.mode == _COPY, np.flatnonzero(self.mode == _CUE)
        marked = (self.mode == _TEXT) & (token == MARKER)
        self.left[copying] -= 1
        self.source[copying] += 1
        self.mode[copying & (self.left == 0)] = _TEXT
        if len(cued):  # the marker stood at t - 1
            end = t - 1 - COPY
            hits = x[cued, :end][:, ::-1] == token[cued, None]
            self.mode[cued], self.left[cued] = _COPY, COPY
            self.source[cued] = end - hits.argmax(axis=1)  # one after the last occurrence
        self.mode[marked] = _CUE


def _may_mark(t: int) -> bool:
    return t >= COPY + RANGE // 4


def generate(law: Law, uniforms: np.ndarray) -> np.ndarray:
    """int64 [n, length] sequences from uniform numbers [n, length, _DRAWS]."""
    n, length, _ = uniforms.shape
    x = np.zeros((n, length), np.int64)
    state = _State(n)
    rows = np.arange(n)
    for t in range(length):
        u = uniforms[:, t]
        pick = np.minimum(np.searchsorted(law.successor_cdf, u[:, 1], side="right"), SUCCESSORS - 1)
        zipf = law._word(u[:, 2])
        token = np.where(u[:, 0] < UNIFORM, zipf, law.markov(x, t)[rows, pick])
        if _may_mark(t):
            token[u[:, 3] < MARKER_PROB] = MARKER
        copying = state.mode == _COPY
        if copying.any():
            copied = x[rows, np.minimum(state.source, length - 1)]
            token = np.where(copying, np.where(u[:, 0] < COPY_NOISE, zipf, copied), token)
        cue = np.flatnonzero(state.mode == _CUE)
        if len(cue):
            end = t - 1 - COPY
            width = min(RANGE, end)
            token[cue] = x[cue, end - width + (u[cue, 1] * width).astype(np.int64)]
        x[:, t] = token
        state.advance(x, t)
    return x


def conditionals(law: Law, x: np.ndarray, t: int, state: _State) -> np.ndarray:
    """float64 [n, vocab]: the law of x[:, t] given x[:, :t], `state` being that of position t."""
    n = len(x)
    p = np.zeros((n, law.vocab_size))
    text, cue, copy = (np.flatnonzero(state.mode == m) for m in (_TEXT, _CUE, _COPY))
    if len(text):
        mark = MARKER_PROB if _may_mark(t) else 0.0
        words = law.markov(x[text], t)
        p[text] = (1 - mark) * UNIFORM * law.zipf
        for k, probability in enumerate(law.successor_probs):  # a word may stand in the table twice
            p[text, words[:, k]] += (1 - mark) * (1 - UNIFORM) * probability
        p[text, MARKER] += mark
    if len(cue):
        end = t - 1 - COPY
        width = min(RANGE, end)
        for j in range(end - width, end):
            p[cue, x[cue, j]] += 1 / width
    if len(copy):
        p[copy] = COPY_NOISE * law.zipf
        p[copy, x[copy, state.source[copy]]] += 1 - COPY_NOISE
    return p


@lru_cache(maxsize=4)
def _law(vocab_size: int, seed: int) -> Law:
    return Law(vocab_size, seed)


@lru_cache(maxsize=3)
def _chunk(vocab_size: int, law_seed: int, stream: int, index: int, size: int, seq_len: int) -> np.ndarray:
    """Windows [index * size, (index + 1) * size) of a stream; many, as the loop over positions is Python."""
    per_window = (seq_len + 1) * _DRAWS
    u = _uniform((law_seed, stream), index * size * per_window, size * per_window)
    return generate(_law(vocab_size, law_seed), u.reshape(size, seq_len + 1, _DRAWS))


@dataclass
class SyntheticCorpus:
    """The interface of PackedCorpus over the generator: fresh tokens at every step, nothing on disk."""

    vocab_size: int = 1024
    law_seed: int = 0
    name: str = "synthetic"
    built: bool = field(default=False, repr=False)

    def __post_init__(self) -> None:
        if self.vocab_size < 2 * SUCCESSORS:
            raise UserError(f"vocab_size={self.vocab_size} must be at least {2 * SUCCESSORS} for the synthetic source")

    @property
    def meta(self) -> dict:
        names = ("CLASSES", "SUCCESSORS", "UNIFORM", "MARKER_PROB", "COPY", "RANGE", "COPY_NOISE")
        what = {k: v for k, v in asdict(self).items() if k != "built"}
        return {"corpus": self.name, **what, "law": {k.lower(): globals()[k] for k in names}}

    @property
    def fingerprint(self) -> str:
        """16 hex digits of a short sample: changes when the law or the generator does."""
        return hashlib.sha256(self.eval_windows(8, 255).numpy().tobytes()).hexdigest()[:16]

    def n_windows(self, split: str, seq_len: int) -> int:
        """Without end, for all that a counter can count."""
        return 2**62 // ((seq_len + 1) * _DRAWS)

    def batch(self, step: int, batch_size: int, seq_len: int, seed: int) -> LongTensor:
        """[batch_size, seq_len + 1] never seen at another step. A pure function."""
        if step < 0 or batch_size < 1:
            raise UserError(f"step={step} must be at least 0 and batch_size={batch_size} at least 1")
        return self._windows(1 + seed, step * batch_size, batch_size, seq_len)

    def eval_windows(self, n: int | None, seq_len: int) -> LongTensor:
        """[n, seq_len + 1], always the same (None: 64)."""
        n = 64 if n is None else n
        if n < 1:
            raise UserError(f"{n} evaluation windows asked for: at least 1 is needed")
        return self._windows(0, 0, n, seq_len)

    def _windows(self, stream: int, start: int, n: int, seq_len: int) -> LongTensor:
        if seq_len < 1:
            raise UserError(f"seq_len={seq_len} must be at least 1")
        size = max(1, _CHUNK_TOKENS // (seq_len + 1)) if stream else n
        pieces = []
        while n > 0:
            index, offset = divmod(start, size)
            take = min(n, size - offset)
            pieces.append(_chunk(self.vocab_size, self.law_seed, stream, index, size, seq_len)[offset : offset + take])
            start, n = start + take, n - take
        return torch.from_numpy(np.concatenate(pieces))

    def bytes_per_token(self, split: str = "validation", windows: LongTensor | None = None) -> float:
        """NaN: these tokens stand for no text, so bits per byte mean nothing."""
        return float("nan")

    def log_prob(self, windows: LongTensor) -> Tensor:
        """float64 [n, seq_len]: ln p(target | all before it), nats. Minus the mean: irreducible loss."""
        return self._exact(windows)[0]

    def entropy(self, windows: LongTensor) -> Tensor:
        """float64 [n, seq_len]: entropy of each target given all before it, nats."""
        return self._exact(windows)[1]

    def _exact(self, windows: LongTensor) -> tuple[Tensor, Tensor]:
        x = windows.cpu().numpy()
        law, state, rows = _law(self.vocab_size, self.law_seed), _State(len(x)), np.arange(len(x))
        log_prob, entropy = np.zeros((2, len(x), x.shape[1] - 1))
        state.advance(x, 0)
        with np.errstate(divide="ignore"):
            for t in range(1, x.shape[1]):
                p = conditionals(law, x, t, state)
                log_prob[:, t - 1] = np.log(p[rows, x[:, t]])
                entropy[:, t - 1] = -(p * np.log(np.where(p > 0, p, 1.0))).sum(axis=1)
                state.advance(x, t)
        return torch.from_numpy(log_prob), torch.from_numpy(entropy)

    def verify(self) -> None:
        """Nothing is stored, so nothing can be damaged."""
