"""Source A: its probabilities are exact, its tokens a pure function, its pieces what the law says."""

from dataclasses import replace

import pytest
import torch

from mxfp4.data.known_entropy import LONGEST, KnownEntropy, Law, Tables, generate, judge, mix, shares
from mxfp4.errors import UserError

CPU = torch.device("cpu")
TOY = Law(vocab_size=48, pairs=0.4, topics=4, define=0.1, query=0.15)


def next_token_probs(law: Law, windows: torch.Tensor, t: int) -> torch.Tensor:
    """float64 [n, vocabulary]: p(token at t | windows[:, :t]), by asking for each token in turn."""
    columns = []
    for token in range(law.vocab_size):
        asked = torch.cat([windows[:, :t], torch.full((len(windows), 1), token)], dim=1)
        columns.append(judge(law, asked).log_prob[:, -1].exp())
    return torch.stack(columns, dim=1)


@pytest.mark.parametrize("law", [TOY, replace(TOY, background=0.9), replace(TOY, define=0.0, query=0.0)], ids=str)
def test_the_probabilities_of_all_tokens_sum_to_one(law):
    windows = generate(law, 0, 0, 40, 40, CPU).long()
    for t in (1, 2, 3, 10, 25, 39):
        assert next_token_probs(law, windows, t).sum(1) == pytest.approx(torch.ones(40), abs=1e-9)


def test_tokens_come_as_often_as_the_law_says():
    """The mean of -ln p over generated tokens is the mean entropy of the law, within 4 standard errors."""
    windows = generate(TOY, 0, 0, 400, 40, CPU).long()
    log_prob = judge(TOY, windows).log_prob
    differences = []
    for t in (1, 5, 20, 39):
        p = next_token_probs(TOY, windows, t)
        entropy = -(p * p.clamp(min=1e-300).log()).sum(1)
        differences.append(entropy + log_prob[:, t - 1])
    d = torch.cat(differences)
    assert abs(d.mean()) < 4 * d.std() / len(d) ** 0.5
    assert d.std() > 0.5  # the test could fail


def test_the_whole_law_is_judged_right_at_its_real_size():
    source = KnownEntropy()
    judged = source.judge(source.eval_windows(64, 512))
    assert torch.isfinite(judged.log_prob).all()
    assert 2.5 < -judged.log_prob.mean() < 3.1
    assert judged.copied.double().mean() == pytest.approx(0.03 * 0.9, rel=0.2)
    assert (judged.log_prob[judged.copied] == 0).all()


def test_an_answer_is_the_value_defined_last():
    law = Law(vocab_size=48)  # 4 slots of 4 values
    define = lambda slot, value: 4 * slot + value
    query, answer = law.first_query, law.first_answer
    window = torch.tensor([[define(1, 2), define(1, 3), define(0, 0), query + 1, answer + 3, query + 0, answer + 0]])
    judged = judge(law, window)
    assert judged.copied.tolist() == [[False, False, False, True, False, True]]
    assert judged.log_prob[0, 3] == judged.log_prob[0, 5] == 0
    # Slot 1 was defined second and third to last, with weights 1/2 and 1/3 of 1 + 1/2 + 1/3.
    assert judged.log_prob[0, 2].exp() == pytest.approx(0.03 * (5 / 6) / (11 / 6), rel=1e-6)
    wrong = window.clone()
    wrong[0, 4] = answer + 2
    assert judge(law, wrong).log_prob[0, 3] == -torch.inf
    undefined = torch.tensor([[law.first_word, query]])
    assert judge(law, undefined).log_prob[0, 0] == -torch.inf


def test_windows_do_not_depend_on_how_many_are_made_at_a_time():
    many = generate(TOY, 3, 0, 12, 30, CPU)
    assert torch.equal(many[5:7], generate(TOY, 3, 5, 2, 30, CPU))
    assert not torch.equal(many[:6], many[6:])
    assert not torch.equal(many, generate(TOY, 4, 0, 12, 30, CPU))
    assert not torch.equal(many, generate(replace(TOY, seed=1), 3, 0, 12, 30, CPU))


def test_batches_are_fresh_at_every_step_and_seed():
    source = KnownEntropy(TOY)
    batches = {(step, seed): source.batch(step, 4, 16, seed) for step in range(3) for seed in range(2)}
    rows = torch.cat(list(batches.values()))
    assert rows.shape == (24, 17) and len({tuple(row.tolist()) for row in rows}) == 24
    assert torch.equal(source.batch(2, 4, 16, 1), batches[2, 1])
    assert torch.equal(source.eval_windows(8, 16)[:3], source.eval_windows(3, 16))
    long = source.batch(130, 8, 16, 0)  # across two chunks
    assert torch.equal(long[4:], source.batch(261, 4, 16, 0))


def test_the_fingerprint_knows_the_law():
    laws = [Law(), Law(seed=1), Law(vocab_size=2048), Law(background=0.2), Law(query=0.02)]
    assert len({KnownEntropy(law).fingerprint for law in laws}) == len(laws)
    assert KnownEntropy().fingerprint == KnownEntropy().fingerprint


def test_topics_permute_the_words():
    tables = Tables(Law(vocab_size=64), CPU)
    probs = tables.topic_probs
    assert probs.sum(1) == pytest.approx(torch.ones(16), abs=1e-9)
    expected = shares(tables.words_below).sort().values
    for row in probs:
        assert torch.equal(row[tables.law.first_word :].sort().values, expected)
    assert len({tuple(row.tolist()) for row in probs}) == 16


def test_the_hash_is_even():
    values = mix(torch.arange(1 << 16), 0, 0)
    assert int(values.min()) >= 0 and int(values.max()) < 1 << 32
    counts = torch.bincount(values >> 28, minlength=16).double()
    assert (
        float(((counts - 4096) ** 2 / 4096).sum()) < 40
    )  # chi-square of 15 degrees of freedom: beyond it once in 2,000


@pytest.mark.parametrize(
    ("what", "says"),
    [
        (lambda: Law(vocab_size=32), "vocab_size=32 must be at least 48"),
        (lambda: Law(vocab_size=290, slots=16), "slots=16 leaves 2 of vocab_size=290"),
        (lambda: KnownEntropy(TOY).batch(-1, 4, 16, 0), "step=-1"),
        (lambda: KnownEntropy(TOY).eval_windows(0, 16), "0 evaluation windows"),
        (lambda: KnownEntropy(TOY).batch(0, 4, LONGEST, 0), f"seq_len={LONGEST}"),
    ],
)
def test_bad_arguments_are_named(what, says):
    with pytest.raises(UserError, match=says):
        what()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_makes_the_same_tokens():
    law, gpu = Law(), torch.device("cuda")
    assert torch.equal(generate(law, 1, 3, 64, 513, CPU), generate(law, 1, 0, 128, 513, gpu)[3:67].cpu())
    windows = generate(law, 0, 0, 8, 513, CPU)
    assert judge(law, windows).log_prob == pytest.approx(judge(law, windows.cuda()).log_prob.cpu(), abs=1e-9)
