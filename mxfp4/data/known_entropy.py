"""Source A: a synthetic language whose exact next-token probabilities are known, in any amount.

A model's loss on it splits into a part that no model can remove and the model's own excess, so that the cost of
quantization has an absolute scale. No token is ever seen twice. A window of seq_len + 1 tokens is a document of its own,
with one hidden topic. Position by position it continues with

    a definition  with probability `define`: one of slots^2 tokens, each of which says "slot i holds value v"
    a query       with probability `query`, once something is defined: the slot of the k-th last definition, k with
                  weight 1 / k. The next token is its answer: the value that the slot holds
    a word        otherwise. With 1 - `background` one of eight successors of the context, j with weight 1 / j. The
                  context is the last token or, after a share `pairs` of the tokens, the last two. With `background` a
                  word of the topic: Zipf-Mandelbrot over words that it permutes

Successors are hashed from the context, so nothing is stored. At V = 4,096 there are 2.4 k contexts of one token and
6.6 M of two, of which some are met often and most rarely. Topic and answers need the whole window.

Only the topic is hidden. `judge` sums it out exactly (a forward filter); the probabilities it uses are those of the
integer thresholds that `generate` compares with, to about 1e-9. All arithmetic that decides a token is on integers, so
a CPU and a GPU make the same tokens. Random numbers are NumPy's Philox words of (law seed, stream, window): the same in
every release of NumPy.

Two earlier designs had structure that a run finds early, late or never, by luck, so that BF16's seeds scattered by 0.06
and 0.04 nats at 195 M tokens (runs/pilot): text copied after a cue, which takes an induction head (Olsson et al., arXiv
2209.11895), and contexts made of hashed classes of tokens. Here an answer takes one lookup, and a context is the tokens
themselves: many small facts, each learned on its own.
Sources: Zipf-Mandelbrot word frequencies (Mandelbrot 1953); the forward algorithm of hidden Markov models (Rabiner 1989).
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

SUCCESSORS = 8
LEAST_VOCABULARY = 48
LONGEST = 1 << 14
"""Tokens of a window at most."""
_ONE = 1 << 32
_MASK = _ONE - 1
_DRAWS = 5
"""32-bit numbers of a token: component, successor, word, kind, choice."""
_CHUNK_WINDOWS = {"cpu": 512, "cuda": 16384}
"""Windows generated at a time: the loop over positions is Python, so a GPU takes many."""


@dataclass(frozen=True)
class Law:
    """The parameters of the source. Probabilities are shares of 1."""

    vocab_size: int = 4096
    """Tokens: definitions, queries, answers, then words."""
    seed: int = 0
    """Picks the language: successors, classes and topics."""
    zipf_exponent: float = 1.0
    """s in (rank + q)^-s."""
    zipf_shift: float = 2.7
    """q in (rank + q)^-s."""
    pairs: float = 0.4
    """Share of tokens after which the token before them counts too."""
    background: float = 0.1
    """Share of words that come from the topic."""
    topics: int = 16
    """Topics that a window may have, equally likely."""
    slots: int = 0
    """Slots, and values that each may hold; 0: 16, or 4 where the vocabulary is below 1,024."""
    define: float = 0.02
    """Probability of a definition."""
    query: float = 0.03
    """Probability of a query; an answer follows."""

    def __post_init__(self) -> None:
        if self.vocab_size < LEAST_VOCABULARY:
            raise UserError(f"vocab_size={self.vocab_size} must be at least {LEAST_VOCABULARY} for this source")
        if not self.slots:
            object.__setattr__(self, "slots", 16 if self.vocab_size >= 1024 else 4)
        if self.words < SUCCESSORS:
            raise UserError(
                f"slots={self.slots} leaves {self.words} of vocab_size={self.vocab_size} for words: {SUCCESSORS} are needed"
            )

    @property
    def first_query(self) -> int:
        return self.slots * self.slots

    @property
    def first_answer(self) -> int:
        return self.first_query + self.slots

    @property
    def first_word(self) -> int:
        return self.first_answer + self.slots

    @property
    def words(self) -> int:
        return self.vocab_size - self.first_word


class Tables:
    """Integer thresholds and small tables of a law, on one device."""

    def __init__(self, law: Law, device: torch.device) -> None:
        self.law, self.device = law, device
        rank = np.arange(1, law.words + 1, dtype=np.float64)
        self.words_below = self._thresholds((rank + law.zipf_shift) ** -law.zipf_exponent)  # upper edges, by rank
        self.successors_below = self._thresholds(1.0 / np.arange(1, SUCCESSORS + 1))
        self.background_below = round(law.background * _ONE)
        self.define_below = round(law.define * _ONE)
        self.query_below = self.define_below + round(law.query * _ONE)
        tokens = torch.arange(law.vocab_size, dtype=torch.int64)
        self.pair = mix(tokens, law.seed, 3).to(device) < round(law.pairs * _ONE)
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
    def recency_sums(self) -> Tensor:
        """int64 [LONGEST + 1]: running sums of 1 / k in units of 2^-24, from 0."""
        sums = np.cumsum(np.append(0.0, 1.0 / np.arange(1, LONGEST + 1)))
        return self._int(np.round(sums * (1 << 24)))

    def contexts(self, x1: Tensor, x2: Tensor) -> Tensor:
        """A number for the context that the last two tokens make (x1 is the last)."""
        return x1 + torch.where(self.pair[x1], (x2 + 1) * self.law.vocab_size, 0)

    def word(self, u: Tensor) -> Tensor:
        """The word at place u in [0, 2^32) of the Zipf distribution."""
        return torch.searchsorted(self.words_below, u, right=True) + self.law.first_word

    def successor(self, context: Tensor, j: Tensor) -> Tensor:
        """The word that is successor j of a context."""
        return self.word(mix(context * SUCCESSORS + j, self.law.seed, 0))

    def topic_word(self, word: Tensor, topic: Tensor) -> Tensor:
        """What a topic has in the place of `word`."""
        rank = word - self.law.first_word
        return (rank * self.topic_factor[topic] + self.topic_shift[topic]) % self.law.words + self.law.first_word

    @cached_property
    def topic_probs(self) -> Tensor:
        """float64 [topics, vocabulary]: probability of each word in each topic; 0 for other tokens."""
        law = self.law
        found = torch.zeros(law.topics, law.vocab_size, dtype=torch.float64, device=self.device)
        word = torch.arange(law.first_word, law.vocab_size, device=self.device).expand(law.topics, -1)
        topic = torch.arange(law.topics, device=self.device)[:, None]
        return found.scatter_(1, self.topic_word(word, topic), shares(self.words_below).expand(law.topics, -1))


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


def draws(
    law_seed: int, stream: int, first: int, windows: int, length: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """(int64 [length, _DRAWS, windows] of 32-bit numbers, int64 [windows] for the topic), of windows `first` on."""
    words = -(-(length * _DRAWS + 1) // 8) * 4  # 64-bit, a multiple of the four that one call of Philox gives
    key = np.array([law_seed % 2**64, stream % 2**64], dtype=np.uint64)
    raw = np.random.Philox(key=key, counter=first * words // 4).random_raw(windows * words)
    numbers = torch.from_numpy(raw.view(np.int32).reshape(windows, 2 * words)).to(device).long() & _MASK
    body = numbers[:, : length * _DRAWS].T.reshape(length, _DRAWS, windows).contiguous()
    return body, numbers[:, length * _DRAWS].contiguous()


class _Slots:
    """What the definitions, queries and answers so far say of n windows."""

    def __init__(self, law: Law, n: int, length: int, device: torch.device) -> None:
        self.law = law
        self.value = torch.zeros(n, law.slots, dtype=torch.int64, device=device)
        self.defined = torch.zeros(n, length, dtype=torch.int64, device=device)
        """Slots of the definitions, in order."""
        self.count = torch.zeros(n, dtype=torch.int64, device=device)
        self.asked = torch.zeros_like(self.count)
        self.answers_next = torch.zeros(n, dtype=torch.bool, device=device)

    def answer(self) -> Tensor:
        """The token that answers the slot asked last."""
        return self.value.gather(1, self.asked[:, None]).squeeze(1) + self.law.first_answer

    def take(self, token: Tensor) -> None:
        """Take in the next token."""
        defines = token < self.law.first_query
        asks = ~defines & (token < self.law.first_answer)
        slot = torch.where(defines, token // self.law.slots, 0)[:, None]
        value = torch.where(defines, token % self.law.slots, self.value.gather(1, slot).squeeze(1))
        self.value.scatter_(1, slot, value[:, None])
        place = self.count[:, None]
        self.defined.scatter_(1, place, torch.where(defines[:, None], slot, self.defined.gather(1, place)))
        self.count = self.count + defines
        self.asked = torch.where(asks, token - self.law.first_query, self.asked)
        self.answers_next = asks


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
        _from_draws(law, self.numbers[:4], self.topic)  # makes the tables, outside the capture
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
    sums = tables.recency_sums
    x = torch.zeros(windows, length, dtype=torch.int64, device=device)
    slots = _Slots(law, windows, length, device)
    none = torch.zeros_like(topic)
    for t in range(length):
        component, pick, word, kind, choice = numbers[t]
        x1, x2 = (x[:, t - back] if t >= back else none for back in (1, 2))
        j = torch.searchsorted(tables.successors_below, pick, right=True)
        follower = tables.successor(tables.contexts(x1, x2), j)
        token = torch.where(component < tables.background_below, tables.topic_word(tables.word(word), topic), follower)
        back = torch.searchsorted(sums, (choice * sums[slots.count]) >> 32, right=True)  # 1 to count
        slot = slots.defined.gather(1, (slots.count - back).clamp(min=0)[:, None]).squeeze(1)
        asks = (kind < tables.query_below) & (slots.count > 0)
        token = torch.where(asks, slot + law.first_query, token)
        token = torch.where(kind < tables.define_below, (choice * law.first_query) >> 32, token)
        token = torch.where(slots.answers_next, slots.answer(), token)
        slots.take(token)
        x[:, t] = token
    return x.to(torch.int16)


@dataclass(frozen=True)
class Judged:
    """What the law says of windows: of each token but the first, given all before it."""

    log_prob: Tensor
    """float64 [n, length - 1]: ln p of the token that came, nats; minus infinity for one that cannot come."""
    copied: Tensor
    """bool [n, length - 1]: the token is an answer, so the window so far decides it."""


def judge(law: Law, windows: Tensor) -> Judged:
    """The exact probabilities of `windows` [n, length] (any integers; computed where they lie). O(length) work."""
    x = windows.long()
    n, length = x.shape
    tables = _tables(law, str(x.device))
    slots = _Slots(law, n, length, x.device)
    none = torch.zeros_like(x[:, 0])
    weights = shares(tables.successors_below)
    zipf = tables.topic_probs
    defines, asks = tables.define_below / _ONE, (tables.query_below - tables.define_below) / _ONE
    share = tables.background_below / _ONE
    belief = torch.full((n, law.topics), 1 / law.topics, dtype=torch.float64, device=x.device)
    log_prob = torch.zeros(n, length, dtype=torch.float64, device=x.device)
    copied = torch.zeros(n, length, dtype=torch.bool, device=x.device)
    each = torch.arange(SUCCESSORS, device=x.device)
    for t in range(length):
        token = x[:, t]
        x1, x2 = (x[:, t - back] if t >= back else none for back in (1, 2))
        follow = tables.successor(tables.contexts(x1, x2)[:, None], each)
        chain = ((follow == token[:, None]) * weights).sum(1)
        in_topic = belief * ((1 - share) * chain[:, None] + share * zipf[:, token].T)  # [n, topics]
        is_word = token >= law.first_word
        p = in_topic.sum(1) * (1 - defines - asks * (slots.count > 0).double())
        belief = torch.where((is_word & (p > 0))[:, None], in_topic / in_topic.sum(1, keepdim=True), belief)
        p = torch.where(token < law.first_query, defines / law.first_query, torch.where(is_word, p, 0.0))
        p = _add_queries(p, token, slots, tables)
        p = torch.where(slots.answers_next, (token == slots.answer()).double(), p)
        log_prob[:, t], copied[:, t] = p.log(), slots.answers_next
        slots.take(token)
    return Judged(log_prob[:, 1:], copied[:, 1:])


def _add_queries(p: Tensor, token: Tensor, slots: _Slots, tables: Tables) -> Tensor:
    """p, with the probability of those tokens that are queries."""
    law = slots.law
    rows = ((token >= law.first_query) & (token < law.first_answer) & (slots.count > 0)).nonzero().squeeze(1)
    if not len(rows):
        return p
    count, sums = slots.count[rows, None], tables.recency_sums
    k = torch.arange(1, slots.defined.shape[1] + 1, device=p.device)[: int(count.max())]
    by_rank = torch.where(k <= count, torch.diff(sums[: len(k) + 1]), 0).double() / sums[count]
    asked = slots.defined[rows].gather(1, (count - k).clamp(min=0)) == (token[rows] - law.first_query)[:, None]
    return p.index_put((rows,), law.query * (asked * by_rank).sum(1))


@dataclass
class KnownEntropy:
    """The interface of PackedCorpus over the generator: fresh tokens at every step, nothing on disk."""

    law: Law = field(default_factory=Law)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
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
