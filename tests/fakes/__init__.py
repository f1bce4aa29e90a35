"""Stand-ins that several tests share."""

from dataclasses import dataclass

import torch

from mxfp4.training.config import ModelConfig, TrainConfig


@dataclass(frozen=True)
class FakeCorpus:
    """The interface of a packed corpus over random walks on the vocabulary: learnable, nothing on disk."""

    vocab_size: int = 64
    fingerprint: str = "fake"

    def _windows(self, n: int, seq_len: int, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        steps = torch.randint(1, 4, (n, seq_len + 1), generator=generator)
        return steps.cumsum(dim=1) % self.vocab_size

    def batch(self, step: int, batch_size: int, seq_len: int, seed: int) -> torch.Tensor:
        return self._windows(batch_size, seq_len, 1_000_003 * (seed + 1) + step)

    def eval_windows(self, n: int, seq_len: int) -> torch.Tensor:
        return self._windows(n, seq_len, 1)

    def bytes_per_token(self, split: str = "validation", windows=None) -> float:
        return 4.0


TINY = ModelConfig(vocab_size=64, dim=64, n_layers=1, n_heads=2, n_kv_heads=1, ffn_dim=64, max_seq_len=32)


def tiny_config(**changes) -> TrainConfig:
    """A run of well under a second."""
    values = dict(
        recipe="bf16",
        seed=0,
        model=TINY,
        corpus="fake",
        seq_len=16,
        batch_size=4,
        steps=12,
        lr=1e-2,
        lr_min=1e-3,
        warmup=3,
        eval_every=4,
        eval_sequences=4,
        scale="cpu",
    )
    return TrainConfig(**{**values, **changes})


def tiny_c4(monkeypatch, *, shard: int, validation_file: int, held_out: int) -> None:
    """C4 with so many documents in a training file, in a validation file and held out, for a test's own mirror."""
    from mxfp4.data import c4

    monkeypatch.setattr(c4, "DOCUMENTS_PER_SHARD", shard)
    monkeypatch.setattr(c4, "DOCUMENTS_PER_VALIDATION_FILE", validation_file)
    monkeypatch.setattr(c4, "VALIDATION_DOCUMENTS", held_out)
