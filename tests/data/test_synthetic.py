"""The source of known entropy: its stated law is the law of its tokens."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from mxfp4.data.packing import prepare
from mxfp4.data.synthetic import COPY, MARKER, MARKER_PROB, Law, SyntheticCorpus, _State, conditionals, generate
from mxfp4.errors import UserError


@pytest.fixture(scope="module")
def source() -> SyntheticCorpus:
    return SyntheticCorpus(vocab_size=128)


def test_laws_sum_to_one_at_every_position(source):
    x = source.eval_windows(40, 200).numpy()
    law, state = Law(128, 0), _State(len(x))
    for t in range(x.shape[1]):
        p = conditionals(law, x, t, state)
        assert np.allclose(p.sum(axis=1), 1, atol=1e-12) and (p >= 0).all()
        state.advance(x, t)


def test_every_token_is_possible_under_its_law(source):
    assert torch.isfinite(source.log_prob(source.eval_windows(100, 256))).all()


def test_realised_entropy_is_the_exact_one(source):
    """-log p - H is a martingale difference: its mean is 0 within 4 standard errors, in any range."""
    windows = source.eval_windows(400, 256)
    excess = -source.log_prob(windows) - source.entropy(windows)
    for part in (excess, excess[:, :20], excess[:, 20:90], excess[:, 200:]):
        error = part.std() / math.sqrt(part.numel())
        assert abs(part.mean()) < 4 * error
    assert excess.std() > 0.5  # the tokens are random, the test is not vacuous


def test_frequencies_after_one_prefix_are_the_stated_ones():
    """A prefix drawn once, its next token drawn 20,000 times: a chi-square test of the conditional itself."""
    law = Law(32, 7)
    rng = np.random.default_rng(0)
    base = rng.random((1, 120, 4))
    base[0, 60, 3] = 0.0  # a marker at 60, so that 61 is a cue and 62... a copy
    base[0, :60, 3] = base[0, 61:, 3] = 0.9
    for t in (1, 30, 61, 62, 77, 100):
        u = np.repeat(base[:, : t + 1], 20_000, axis=0)
        u[:, t] = rng.random((20_000, 4))
        x = generate(law, u)
        state = _State(1)
        for i in range(t):
            state.advance(x[:1], i)
        p = conditionals(law, x[:1], t, state)[0]
        seen = np.bincount(x[:, t], minlength=32)
        assert seen[p == 0].sum() == 0
        expected = 20_000 * p[p > 0]
        chi2, freedom = ((seen[p > 0] - expected) ** 2 / expected).sum(), (p > 0).sum() - 1
        assert abs(chi2 - freedom) < 4 * math.sqrt(2 * freedom), t


def test_there_is_something_to_learn_in_context(source):
    """Knowing the past is worth much more than the frequencies, and copies are nearly certain."""
    windows = source.eval_windows(200, 256)
    counts = torch.bincount(windows.flatten(), minlength=128).double()
    frequencies = counts / counts.sum()
    unigram = -(frequencies * frequencies.clamp_min(1e-12).log()).sum()
    assert source.entropy(windows).mean() < unigram - 0.5
    assert (source.log_prob(windows) > math.log(0.9)).double().mean() > 0.1


def test_markers_come_as_often_as_stated(source):
    windows = source.eval_windows(300, 256)
    share = (windows[:, 64:] == MARKER).double().mean()
    assert 0.5 < share * (1 / MARKER_PROB + COPY + 1) < 1.6


def test_batches_are_pure_fresh_and_apart_from_evaluation(source):
    a = source.batch(5, 4, 64, seed=1)
    assert a.shape == (4, 65) and a.dtype == torch.int64 and a.max() < 128
    assert torch.equal(a, SyntheticCorpus(vocab_size=128).batch(5, 4, 64, seed=1))
    others = [source.batch(6, 4, 64, 1), source.batch(5, 4, 64, 2), source.eval_windows(24, 64)[20:]]
    assert not any(torch.equal(a, b) for b in others)
    assert torch.equal(source.eval_windows(3, 64), source.eval_windows(7, 64)[:3])


def test_batches_cross_chunk_borders(monkeypatch):
    source = SyntheticCorpus(vocab_size=64)
    whole = torch.cat([source.batch(i, 1, 50, 3) for i in range(10)])
    monkeypatch.setattr("mxfp4.data.synthetic._CHUNK_TOKENS", 51 * 4)
    assert torch.equal(whole, source.batch(0, 10, 50, 3))


def test_another_law_seed_is_another_source(source):
    other = SyntheticCorpus(vocab_size=128, law_seed=1)
    assert other.fingerprint != source.fingerprint
    assert not torch.equal(other.eval_windows(2, 64), source.eval_windows(2, 64))


def test_prepare_gives_it_without_a_file(tmp_path):
    source = prepare("synthetic", 128, root=tmp_path)
    assert isinstance(source, SyntheticCorpus) and not list(tmp_path.iterdir())
    assert math.isnan(source.bytes_per_token())


def test_refusals():
    with pytest.raises(UserError, match="vocab_size=8"):
        SyntheticCorpus(vocab_size=8)
    with pytest.raises(UserError, match="0 evaluation windows"):
        SyntheticCorpus().eval_windows(0, 16)
    with pytest.raises(UserError, match="step=-1"):
        SyntheticCorpus().batch(-1, 1, 16, 0)
