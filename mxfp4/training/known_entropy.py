"""Source A: a synthetic language whose exact next-token probabilities are known, in any amount.

A model's loss on it splits into a part that no model can remove and the model's own excess, so that the cost of
quantization has an absolute scale. No token is ever seen twice. A window of seq_len + 1 tokens is a document of its own.
Token 0 is a marker, tokens 1 to V - 1 are words. A window draws one hidden topic. Then, position by position:

    text    with probability `marker` the marker (once there are HISTORY tokens to copy from); otherwise
            with 1 - `background`: one of eight successors of the context, j with weight 1 / j. How far the context
            reaches depends on the last word (`orders`): that word alone, or with classes of the one or two before it
            with `background`: a word of the window's topic: Zipf-Mandelbrot over words that the topic permutes
    cue     after a marker: the token d places before it, d with weight 1 / d
    copy    after a cue: the tokens that followed the cue's last occurrence before the marker. It ends after n >= 2
            tokens with n^-1.5 (64 at most), or before a marker; then text again. Where it ends is hidden

Successors are hashed from the context, so nothing is stored. At V = 4,096 there are 1.4 k contexts of order 1, 0.13 M of
order 2 and 1.7 M of order 3: the first are learned within millions of tokens, the last not within a billion, which
gives the slow, even fall of the loss that text has. The hidden variables are the topic and whether a copy goes on. `log_prob` sums them out exactly (a forward
filter over 2 x topics states); the probabilities it uses are those of the integer thresholds that `generate` compares
with, to about 1e-9. All arithmetic that decides a token is on integers, so a CPU and a GPU make the same tokens.

Random numbers are NumPy's Philox words of (law seed, stream, window): the same in every release of NumPy.
Sources: Zipf-Mandelbrot word frequencies (Mandelbrot 1953); copying after a cue is what induction heads learn (Olsson
et al., arXiv 2209.11895); the forward algorithm of hidden Markov models (Rabiner 1989).
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, lru_cache
from math import gcd

import numpy as np
import torch
from torch import LongTensor, Tensor

from mxfp4.errors import UserError

MARKER = 0
SUCCESSORS = 8
HISTORY = 16
MAX_COPY = 64
LEAST_VOCABULARY = 32
LONGEST = 1 << 14
"""Tokens of a window at most: where a token stood last is kept in 16 bits."""
_TEXT, _CUE, _COPY = 0, 1, 2
_ONE = 1 << 32
_MASK = _ONE - 1
_DRAWS = 6
"""32-bit numbers of a token: component, successor, word, marker, end of a copy, distance of a cue."""
_CHUNK_WINDOWS = {"cpu": 512, "cuda": 16384}
"""Windows generated at a time: the loop over positions is Python, so a GPU takes many."""


@dataclass(frozen=True)
class Law:
    """The parameters of the source. Probabilities are shares of 1."""

    vocab_size: int = 4096
    """Tokens, the marker included."""
    seed: int = 0
    """Picks the language: successors, classes and topics."""
    zipf_exponent: float = 1.0
    """s in (rank + q)^-s."""
    zipf_shift: float = 2.7
    """q in (rank + q)^-s."""
    orders: tuple[tuple[float, int, int], ...] = ((0.35, 1, 1), (0.35, 16, 1), (0.2, 128, 1), (0.1, 128, 32))
    """(share of words, classes of the token before, classes of the one before that): what counts after such a word."""
    background: float = 0.1
    """Share of text that comes from the topic."""
    topics: int = 16
    """Topics that a window may have, equally likely."""
    marker: float = 0.0185
    """Probability of a marker in text: about 15 % of all tokens are then copied."""
    copy_exponent: float = 1.5
    """A copy has n tokens with probability n^-copy_exponent, 2 to 64."""

    def __post_init__(self) -> None:
        if self.vocab_size < LEAST_VOCABULARY:
            raise UserError(f"vocab_size={self.vocab_size} must be at least {LEAST_VOCABULARY} for this source")
        object.__setattr__(self, "orders", tuple(tuple(order) for order in self.orders))

    @property
    def words(self) -> int:
        return self.vocab_size - 1


class Tables:
    """Integer thresholds and small tables of a law, on one device."""

    def __init__(self, law: Law, device: torch.device) -> None:
        self.law, self.device = law, device
        rank = np.arange(1, law.vocab_size, dtype=np.float64)
        self.words_below = self._thresholds((rank + law.zipf_shift) ** -law.zipf_exponent)  # [words]: upper edges
        self.successors_below = self._thresholds(1.0 / np.arange(1, SUCCESSORS + 1))
        lengths = np.arange(2, MAX_COPY + 1, dtype=np.float64) ** -law.copy_exponent
        hazard = np.concatenate([[0.0, 0.0], lengths / np.cumsum(lengths[::-1])[::-1]])  # [n]: copied so far
        self.ends_below = self._int(np.minimum(np.round(hazard * _ONE), _ONE))
        self.background_below = round(law.background * _ONE)
        self.marker_below = round(law.marker * _ONE)
        tokens = torch.arange(law.vocab_size, dtype=torch.int64)
        self.near, self.far = mix(tokens, law.seed, 1).to(device), mix(tokens, law.seed, 2).to(device)
        share, near, far = (torch.tensor(column) for column in zip(*law.orders, strict=True))
        order = torch.searchsorted((share.cumsum(0) / share.sum() * _ONE).long(), mix(tokens, law.seed, 3), right=True)
        order = order.clamp(max=len(law.orders) - 1)
        self.near_classes, self.far_classes = near[order].to(device), far[order].to(device)
        self.most = int(near.max()), int(far.max())
        units = [a for a in range(law.words // 7 + 1, law.words) if gcd(a, law.words) == 1]
        draws = mix(torch.arange(law.topics, dtype=torch.int64), law.seed, 4)
        self.topic_factor = torch.tensor([units[int(d) % len(units)] for d in draws], device=device)
        self.topic_shift = (mix(torch.arange(law.topics, dtype=torch.int64), law.seed, 5) % law.words).to(device)

    def _int(self, values: np.ndarray) -> Tensor:
        return torch.tensor(values.astype(np.int64), device=self.device)

    def _thresholds(self, weights: np.ndarray) -> Tensor:
        """Upper edges in [0, 2^32] of intervals with these weights; the last is 2^32."""
        edges = np.round(np.cumsum(weights) / weights.sum() * _ONE)
        return self._int(np.append(edges[:-1], _ONE))

    @cached_property
    def near_weights(self) -> Tensor:
        """int64 [LONGEST + 1]: running sums of 1 / d in units of 2^-24, from 0."""
        sums = np.cumsum(np.append(0.0, 1.0 / np.arange(1, LONGEST + 1)))
        return self._int(np.round(sums * (1 << 24)))

    def contexts(self, x1: Tensor, x2: Tensor, x3: Tensor) -> Tensor:
        """A number for the context that the last three tokens make (x1 is the last)."""
        near, far = self.near[x2] % self.near_classes[x1], self.far[x3] % self.far_classes[x1]
        return (x1 * self.most[0] + near) * self.most[1] + far

    def word(self, u: Tensor) -> Tensor:
        """The word at place u in [0, 2^32) of the Zipf distribution."""
        return torch.searchsorted(self.words_below, u, right=True) + 1

    def successor(self, context: Tensor, j: Tensor) -> Tensor:
        """The word that is successor j of a context."""
        return self.word(mix(context * SUCCESSORS + j, self.law.seed, 0))

    def topic_word(self, rank: Tensor, topic: Tensor) -> Tensor:
        """The word that has `rank` (from 1) in a topic."""
        return ((rank - 1) * self.topic_factor[topic] + self.topic_shift[topic]) % self.law.words + 1

    @cached_property
    def topic_probs(self) -> Tensor:
        """float64 [topics, vocabulary]: probability of each word in each topic; 0 for the marker."""
        found = torch.zeros(self.law.topics, self.law.vocab_size, dtype=torch.float64, device=self.device)
        rank = torch.arange(1, self.law.vocab_size, device=self.device).expand(self.law.topics, -1)
        topic = torch.arange(self.law.topics, device=self.device)[:, None]
        return found.scatter_(1, self.topic_word(rank, topic), shares(self.words_below).expand(self.law.topics, -1))


def shares(below: Tensor) -> Tensor:
    """float64: the probabilities of intervals with these upper edges."""
    return torch.diff(below, prepend=below.new_zeros(1)).double() / _ONE


def mix(x: Tensor, seed: int, purpose: int) -> Tensor:
    """A hash of non-negative int64 x to [0, 2^32): two rounds of MurmurHash3's finalizer. Products wrap at 64 bits, which
    keeps the low 32 right."""
    x = (x ^ (x >> 32)) & _MASK
    for salt in ((seed * 0x9E3779B1 + purpose * 0x7FEB352D + 0x68E31DA4) & _MASK, 0x3C6EF372):
        x = (x + salt) & _MASK
        x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _MASK
        x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _MASK
        x = x ^ (x >> 16)
    return x


@lru_cache(maxsize=8)
def _tables(law: Law, device: str) -> Tables:
    return Tables(law, torch.device(device))


def draws(law_seed: int, stream: int, first: int, windows: int, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(int64 [length, _DRAWS, windows] of 32-bit numbers, int64 [windows] for the topic), of windows `first` on."""
    words = -(-(length * _DRAWS + 1) // 8) * 4  # 64-bit, a multiple of the four that one call of Philox gives
    key = np.array([law_seed % 2**64, stream % 2**64], dtype=np.uint64)
    raw = np.random.Philox(key=key, counter=first * words // 4).random_raw(windows * words)
    numbers = torch.from_numpy(raw.view(np.int32).reshape(windows, 2 * words)).to(device).long() & _MASK
    body = numbers[:, : length * _DRAWS].T.reshape(length, _DRAWS, windows).contiguous()
    return body, numbers[:, length * _DRAWS].contiguous()


class _Copying:
    """What a prefix says for certain of n windows: mode, where a copy reads, how much it has copied."""

    def __init__(self, n: int, vocab_size: int, device: torch.device) -> None:
        self.mode = torch.zeros(n, dtype=torch.int64, device=device)
        self.source, self.copied = torch.zeros_like(self.mode), torch.zeros_like(self.mode)
        self.seen_at = torch.zeros(n, vocab_size, dtype=torch.int16, device=device)
        """Where each token stood last, tokens t - 2 and earlier."""

    def remember(self, x: Tensor, t: int) -> None:
        if t >= 2:
            place = torch.full_like(x[:, :1], t - 2, dtype=torch.int16)
            self.seen_at.scatter_(1, x[:, t - 2, None], place)

    def after_cue(self, cued: Tensor, token: Tensor) -> None:
        """Where `cued`, token was a cue: the copy starts after its last occurrence before the marker."""
        start = self.seen_at.gather(1, token[:, None]).squeeze(1).long() + 1
        self.source = torch.where(cued, start, self.source)
        self.copied = torch.where(cued, 0, self.copied)


def generate(law: Law, stream: int, first: int, windows: int, length: int, device: torch.device) -> Tensor:
    """int16 [windows, length]: windows `first` and following of a stream. A pure function, the same on every device."""
    numbers, topic = draws(law.seed, stream, first, windows, length, device)
    if device.type == "cuda":
        return _graph(law, windows, length, str(device))(numbers, topic)
    return _from_draws(law, numbers, topic)


@lru_cache(maxsize=2)
class _graph:
    """`_from_draws` as a CUDA graph: its 20,000 small kernels take longer to launch one by one than to run."""

    def __init__(self, law: Law, windows: int, length: int, device: str) -> None:
        self.numbers = torch.zeros(length, _DRAWS, windows, dtype=torch.int64, device=device)
        self.topic = torch.zeros(windows, dtype=torch.int64, device=device)
        _from_draws(law, self.numbers[: HISTORY + 4], self.topic)  # makes the tables, outside the capture
        torch.cuda.synchronize(device)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.x = _from_draws(law, self.numbers, self.topic)

    def __call__(self, numbers: Tensor, topic: Tensor) -> Tensor:
        self.numbers.copy_(numbers)
        self.topic.copy_(topic)
        self.graph.replay()
        return self.x.clone()


def _from_draws(law: Law, numbers: Tensor, topic: Tensor) -> Tensor:
    """int16 [windows, length] from `draws`."""
    length, _, windows = numbers.shape
    device = topic.device
    tables = _tables(law, str(device))
    topic = topic % law.topics
    sums = tables.near_weights
    x = torch.zeros(windows, length, dtype=torch.int64, device=device)
    state = _Copying(windows, law.vocab_size, device)
    none = torch.zeros_like(topic)
    for t in range(length):
        component, pick, word, mark, end, distance = numbers[t]
        state.remember(x, t)
        x1, x2, x3 = (x[:, t - back] if t >= back else none for back in (1, 2, 3))
        j = torch.searchsorted(tables.successors_below, pick, right=True)
        follower = tables.successor(tables.contexts(x1, x2, x3), j)
        token = torch.where(component < tables.background_below, tables.topic_word(tables.word(word), topic), follower)
        if t >= HISTORY:
            token = torch.where(mark < tables.marker_below, MARKER, token)
            copied = x.gather(1, state.source.clamp(max=t)[:, None]).squeeze(1)
            stops = (end < tables.ends_below[state.copied]) | (copied == MARKER)
            copying = (state.mode == _COPY) & ~stops
            back = torch.searchsorted(sums[: t + 1], (distance * sums[t - 1]) >> 32, right=True)  # 1 to t - 1
            cued = state.mode == _CUE
            cue = x.gather(1, (t - 1 - back).clamp(min=0)[:, None]).squeeze(1)
            token = torch.where(cued, cue, torch.where(copying, copied, token))
            state.after_cue(cued, token)
            state.source, state.copied = state.source + copying, state.copied + copying
            marked = (token == MARKER) & ~cued & ~copying
            state.mode = torch.where(cued | copying, _COPY, torch.where(marked, _CUE, _TEXT))
        x[:, t] = token
    return x.to(torch.int16)


@dataclass(frozen=True)
class Judged:
    """What the law says of windows: of each token but the first, given all before it."""

    log_prob: Tensor
    """float64 [n, length - 1]: ln p of the token that came, nats."""
    copied: Tensor
    """bool [n, length - 1]: the token follows a cue, and the copy is certain to go on: p = 1."""


def judge(law: Law, windows: Tensor) -> Judged:
    """The exact probabilities of `windows` [n, length] (any integers; computed where they lie). O(length) work."""
    x = windows.long()
    n, length = x.shape
    tables = _tables(law, str(x.device))
    sums = tables.near_weights
    state = _Copying(n, law.vocab_size, x.device)
    none = torch.zeros_like(x[:, 0])
    weights = shares(tables.successors_below)
    goes_on = 1 - tables.ends_below.double() / _ONE
    zipf = tables.topic_probs
    belief = torch.zeros(2, n, law.topics, dtype=torch.float64, device=x.device)  # [text, copy], sums to 1
    belief[0] = 1 / law.topics
    log_prob = torch.zeros(n, length, dtype=torch.float64, device=x.device)
    certain = torch.zeros(n, length, dtype=torch.bool, device=x.device)
    each = torch.arange(SUCCESSORS, device=x.device)
    for t in range(length):
        token = x[:, t]
        state.remember(x, t)
        x1, x2, x3 = (x[:, t - back] if t >= back else none for back in (1, 2, 3))
        follow = tables.successor(tables.contexts(x1, x2, x3)[:, None], each)
        chain = ((follow == token[:, None]) * weights).sum(1)
        mark = tables.marker_below / _ONE if t >= HISTORY else 0.0
        share = tables.background_below / _ONE
        text = (1 - mark) * ((1 - share) * chain[:, None] + share * zipf[:, token].T)  # [n, topics]
        text = torch.where((token == MARKER)[:, None], mark, text)
        copied = x.gather(1, state.source.clamp(max=t)[:, None]).squeeze(1)
        stays = torch.where(copied == MARKER, 0.0, goes_on[state.copied])[:, None]
        copy = belief[1] * stays
        fresh = (belief[0] + belief[1] * (1 - stays)) * text
        copy = copy * (copied == token)[:, None]
        cued = state.mode == _CUE
        p_cue = _cue_probs(x, t, cued, sums)
        p = torch.where(cued, p_cue, (fresh + copy).sum(1))
        log_prob[:, t] = p.log()
        certain[:, t] = (state.mode == _COPY) & (state.copied < 2) & (copied != MARKER)
        new = torch.stack([fresh, copy]) / p[None, :, None]
        topic = belief.sum(0)
        after = torch.stack([torch.zeros_like(topic), topic])
        belief = torch.where(cued[None, :, None], after, new)
        state.after_cue(cued, token)
        state.source, state.copied = state.source + ~cued, state.copied + ~cued
        state.copied.clamp_(max=MAX_COPY)
        might = belief[1].sum(1) > 0
        marked = (token == MARKER) & ~cued & ~(certain[:, t])
        state.mode = torch.where(cued, _COPY, torch.where(marked, _CUE, torch.where(might, _COPY, _TEXT)))
    return Judged(log_prob[:, 1:], certain[:, 1:])


def _cue_probs(x: Tensor, t: int, cued: Tensor, sums: Tensor) -> Tensor:
    """float64 [n]: probability of x[:, t] as the cue after a marker at t - 1; 0 where `cued` is not."""
    p = torch.zeros(len(x), dtype=torch.float64, device=x.device)
    rows = cued.nonzero().squeeze(1)
    if len(rows):
        by_distance = torch.diff(sums[:t]).double() / sums[t - 1]  # d = 1 to t - 1
        same = x[rows, : t - 1].flip(1) == x[rows, t, None]
        p[rows] = (same * by_distance).sum(1)
    return p


@dataclass
class KnownEntropy:
    """The interface of PackedCorpus over the generator: fresh tokens at every step, nothing on disk."""

    law: Law = field(default_factory=Law)
    device: torch.device = torch.device("cpu")
    """Where windows are made and returned."""
    name: str = "known-entropy"
    built: bool = field(default=False, repr=False)
    _chunks: OrderedDict = field(default_factory=OrderedDict, repr=False, compare=False)

    @property
    def vocab_size(self) -> int:
        return self.law.vocab_size

    @property
    def meta(self) -> dict:
        return {"corpus": self.name, "vocab_size": self.vocab_size, "law": asdict(self.law)}

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits of a short sample: changes when the law or the generator does."""
        sample = generate(self.law, 0, 0, 16, 512, torch.device("cpu"))
        return hashlib.sha256(sample.numpy().tobytes()).hexdigest()[:16]

    def on(self, device: torch.device) -> KnownEntropy:
        """The same source, generating on `device`."""
        return replace(self, device=device, _chunks=OrderedDict())

    def n_windows(self, split: str, seq_len: int) -> int:
        """Without end, for all that a counter can count."""
        return 2**62 // ((seq_len + 1) * _DRAWS)

    def batch(self, step: int, batch_size: int, seq_len: int, seed: int) -> LongTensor:
        """int64 [batch_size, seq_len + 1] never seen at another step. A pure function."""
        if step < 0 or batch_size < 1:
            raise UserError(f"step={step} must be at least 0 and batch_size={batch_size} at least 1")
        return self._windows(1 + seed, step * batch_size, batch_size, seq_len)

    def eval_windows(self, n: int | None, seq_len: int) -> LongTensor:
        """int64 [n, seq_len + 1], always the same, the first n of more (None: 64)."""
        n = 64 if n is None else n
        if n < 1:
            raise UserError(f"{n} evaluation windows asked for: at least 1 is needed")
        return self._windows(0, 0, n, seq_len)

    def _windows(self, stream: int, start: int, n: int, seq_len: int) -> LongTensor:
        if not 1 <= seq_len < LONGEST:
            raise UserError(f"seq_len={seq_len} must lie in 1 to {LONGEST - 1}")
        size, pieces = _CHUNK_WINDOWS.get(self.device.type, 512), []
        while n > 0:
            index, offset = divmod(start, size)
            take = min(n, size - offset)
            pieces.append(self._chunk(stream, index, size, seq_len + 1)[offset : offset + take])
            start, n = start + take, n - take
        return torch.cat(pieces).long()

    def _chunk(self, stream: int, index: int, size: int, length: int) -> Tensor:
        """Windows [index * size, (index + 1) * size) of a stream, of which the last two chunks asked for are kept."""
        key = (stream, index, length)
        if key not in self._chunks:
            while len(self._chunks) > 1:
                self._chunks.popitem(last=False)
            self._chunks[key] = generate(self.law, stream, index * size, size, length, self.device)
        return self._chunks[key]

    def bytes_per_token(self, split: str = "validation", windows: LongTensor | None = None) -> float:
        """NaN: these tokens stand for no text, so bits per byte mean nothing."""
        return float("nan")

    def judge(self, windows: Tensor, rows: int = 1024) -> Judged:
        """`judge` of many windows, `rows` at a time."""
        parts = [judge(self.law, part) for part in windows.split(rows)]
        return Judged(*(torch.cat([getattr(p, name) for p in parts]) for name in ("log_prob", "copied")))

    def verify(self) -> None:
        """Nothing is stored, so nothing can be damaged."""
