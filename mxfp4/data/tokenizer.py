"""Tokenizers: a byte-level BPE trained here on the training part, or Llama 3.1's from a file or the hub.

Byte-level (GPT-2's alphabet and splitting rule): any UTF-8 text round-trips, nothing is unknown, and each
token stands for a known number of bytes, which makes bits per byte exact. Training is deterministic: the same
texts give the same file. Token 0 is EOS, put after each document; text that happens to spell a special token
is encoded as text.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from mxfp4.data.hub import hub_endpoint, offline, revision_of, status_of, trouble, unreachable
from mxfp4.errors import UserError

EOS = "<|endoftext|>"
SMALLEST_VOCAB = 257  # EOS and the 256 bytes

LLAMA_VOCAB = 128_256
LLAMA_REPOSITORY = "meta-llama/Llama-3.1-8B"
LLAMA_EOS = "<|end_of_text|>"


class TextTokenizer:
    """A Hugging Face tokenizer with the three things that packing needs: ids, EOS, bytes of each token."""

    def __init__(self, inner: Tokenizer) -> None:
        names = [t for t in (EOS, LLAMA_EOS) if inner.token_to_id(t) is not None]
        if not names:
            raise UserError(f"the tokenizer has no end-of-document token; known: {EOS}, {LLAMA_EOS}")
        largest, size = max(inner.get_vocab().values()), inner.get_vocab_size()
        if largest >= size:
            raise UserError(f"the tokenizer has {size} ids and its largest is {largest}: every id must be below {size}")
        inner.encode_special_tokens = True  # not saved in the file, so set here
        # A file keeps these as they were when it was saved; each of them would change the tokens of a text.
        inner.no_truncation()
        inner.no_padding()
        if getattr(inner.model, "dropout", None) is not None:
            inner.model.dropout = None
        self.inner = inner
        self.eos = int(inner.token_to_id(names[0]) or 0)

    @property
    def size(self) -> int:
        """Number of ids: every id is below it."""
        return self.inner.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, no EOS."""
        return self.inner.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, no EOS; on all cores."""
        return [e.ids for e in self.inner.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`; EOS gives nothing, half a character gives U+FFFD."""
        return self.inner.decode([int(i) for i in ids], skip_special_tokens=True)

    def token_bytes(self) -> np.ndarray:
        """int64 [size]: bytes of text that each id stands for. Special tokens stand for none."""
        lengths = np.zeros(self.size, dtype=np.int64)
        for token, i in self.inner.get_vocab(with_added_tokens=False).items():
            lengths[i] = len(token)  # the byte-level alphabet has one character for a byte
        for i, added in self.inner.get_added_tokens_decoder().items():
            lengths[i] = 0 if added.special else len(added.content.encode())
        return lengths

    def to_bytes(self) -> bytes:
        """The tokenizer.json."""
        return self.inner.to_str(pretty=False).encode()

    def sha256(self) -> str:
        return hashlib.sha256(self.to_bytes()).hexdigest()


def train(texts: Iterable[str], vocab_size: int, *, progress: bool = False) -> TextTokenizer:
    """Byte-level BPE with at most `vocab_size` ids (fewer when the texts are too small to fill it)."""
    if vocab_size < SMALLEST_VOCAB:
        raise UserError(f"vocab_size={vocab_size} must be at least {SMALLEST_VOCAB} (256 bytes and EOS)")
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        min_frequency=2,
        show_progress=progress,
    )
    inner.train_from_iterator(texts, trainer)
    return TextTokenizer(inner)


def load(path: str | os.PathLike) -> TextTokenizer:
    """From a tokenizer.json or the folder that holds it. UserError when it is absent or damaged."""
    path = Path(path).expanduser()
    if path.is_dir():
        path = path / "tokenizer.json"
    if not path.is_file():
        raise UserError(f"tokenizer {path} does not exist")
    try:
        loaded = TextTokenizer(Tokenizer.from_file(str(path)))
        _check_lossless(loaded)
        return loaded
    except UserError as error:
        raise UserError(f"tokenizer {path}: {error}") from None
    except Exception as error:  # the library raises bare Exception
        raise UserError(f"tokenizer {path} is damaged ({error})") from None


PROBES = ("Plain words, 12 figures.", "  two  spaces\n\tand a tab", "Naïve façade ﬁ e\u0301 深 🧑🏽‍🚀")
"""Texts that a tokenizer changes which lower-cases, normalizes, strips, adds a space or knows no such character."""


def _check_lossless(tokenizer: TextTokenizer) -> None:
    """UserError unless tokens give the text back and stand for as many bytes as it has."""
    lengths = tokenizer.token_bytes()
    for text in PROBES:
        ids = tokenizer.encode(text)
        back, size = tokenizer.decode(ids), int(lengths[ids].sum())
        if back != text or size != len(text.encode()):
            raise UserError(
                f"its tokens of {text!r} give {back!r} back and stand for {size} of {len(text.encode())} bytes: a "
                "byte-level tokenizer is needed that changes no text"
            )


LLAMA_LOCAL = "point MXFP4_LLAMA_TOKENIZER (or `mxfp4 prepare --tokenizer`) at its tokenizer.json"
LLAMA_HOW = f"accept the licence of {LLAMA_REPOSITORY} on the hub and log in with `hf auth login`, or {LLAMA_LOCAL}"


def llama_file() -> str | None:
    """Where Llama 3.1's tokenizer.json is meant to lie on this machine; None when it is neither named nor cached."""
    if given := os.environ.get("MXFP4_LLAMA_TOKENIZER"):
        return given
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(LLAMA_REPOSITORY, "tokenizer.json", revision=revision_of(LLAMA_REPOSITORY))
    return cached if isinstance(cached, str) else None


def llama_revision() -> str | None:
    """The hub's commit that `load_llama` reads; None where MXFP4_LLAMA_TOKENIZER names a file."""
    return None if os.environ.get("MXFP4_LLAMA_TOKENIZER") else revision_of(LLAMA_REPOSITORY)


def load_llama() -> TextTokenizer:
    """Llama 3.1's tokenizer: MXFP4_LLAMA_TOKENIZER, else the hub's cache, else the hub (gated).

    UserError, one sentence within seconds, when it cannot be had.
    """
    if here := llama_file():
        return checked_llama(load(here))
    from huggingface_hub import hf_hub_download

    if offline():
        raise UserError(f"the Llama 3.1 tokenizer is not in the hub cache and HF_HUB_OFFLINE is set: {LLAMA_HOW}")
    why = unreachable(hub_endpoint())
    status = status_of(why)
    if why and (status is None or status == 429 or status >= 500):  # else its front page is closed, files need not be
        raise UserError(f"the Llama 3.1 tokenizer cannot be fetched: {_refusal(status, why)}")
    try:
        revision = revision_of(LLAMA_REPOSITORY)
        return checked_llama(load(hf_hub_download(LLAMA_REPOSITORY, "tokenizer.json", revision=revision)))
    except UserError:
        raise
    except Exception as error:  # the library's types differ by version
        said = (str(error).strip().splitlines() or [""])[0][:200]
        why = unreachable(hub_endpoint()) or f"{type(error).__name__}: {said}"
        raise UserError(f"the Llama 3.1 tokenizer cannot be fetched: {_refusal(status_of(error), why)}") from error


def _refusal(status: int | None, why: str) -> str:
    """What the hub's answer means, or, without one, `why` there is none, and what to do."""
    if status is None:
        return f"no answer from {hub_endpoint()} ({why}): run `mxfp4 prepare` again once there is, or {LLAMA_LOCAL}"
    return trouble(status, LLAMA_REPOSITORY, allowed_by=LLAMA_HOW, instead=LLAMA_LOCAL)


def checked_llama(tokenizer: TextTokenizer) -> TextTokenizer:
    """`tokenizer`; UserError where it has not as many ids as Llama 3.1's."""
    if tokenizer.size != LLAMA_VOCAB:
        raise UserError(f"this is not Llama 3.1's tokenizer: it has {tokenizer.size} ids, {LLAMA_VOCAB} are needed")
    return tokenizer


LIBRARY_VERSION: str = tokenizers.__version__
