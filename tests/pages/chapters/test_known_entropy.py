"""Excess over a known entropy: exact for losses that are made from the law itself."""

from dataclasses import replace

import pytest

from mxfp4.analysis.study import studies
from mxfp4.data.synthetic import SyntheticCorpus
from mxfp4.errors import UserError
from mxfp4.pages import evidence_charts
from mxfp4.pages.chapters import known_entropy
from mxfp4.pages.charts import render
from mxfp4.studies.store import Store
from tests.fakes.studies import SMALL, config, put

SOURCE = SyntheticCorpus(64)
SETTING = {"corpus": "synthetic", "model": replace(SMALL, vocab_size=64), "seq_len": 96, "eval_sequences": 8}


def study_of(tmp_path, excesses, fingerprint=SOURCE.fingerprint):
    """{arm: final loss above the irreducible one}, three seeds, each 0.001 apart."""
    store, floor = Store(tmp_path), -SOURCE.log_prob(SOURCE.eval_windows(8, 96)).mean(dim=1).numpy()
    for arm, above in excesses.items():
        for seed in range(3):
            c = config(arm, seed, **SETTING)
            loss = floor.mean() + above + 0.001 * seed
            end = 3 + 3 / 11 + 0.003 * seed  # where a made-up curve ends
            put(store, c, offset=loss - end, windows=floor - floor.mean(), corpus=fingerprint)
    (found,) = studies(store.load())
    return found


def test_excess_is_what_lies_above_the_law(tmp_path):
    study = study_of(tmp_path, {"bf16": 0.2, "mxfp4": 0.3})
    e = known_entropy.excess(study, arm="mxfp4")
    assert e.value == pytest.approx(0.301, abs=1e-6)
    student = 4.303 * 0.001 / 3**0.5  # of three seeds
    assert (e.low, e.high) == pytest.approx((0.301 - student, 0.301 + student), rel=2e-3), (
        "windows cancel, seeds are few"
    )
    ratio = known_entropy.excess_ratio(study, arm="mxfp4")
    assert ratio.value == pytest.approx(1.5, abs=0.01) and ratio.low < 1.5 < ratio.high


def put_run(store, arm, seed, offset, floor):
    """A record of the source whose windows scatter as the source's entropy does."""
    about = {"windows": floor - floor.mean(), "corpus": SOURCE.fingerprint}
    put(store, config(arm, seed, **SETTING), offset=offset, **about)


def test_a_ratio_of_excesses_is_as_uncertain_as_the_scatter_of_losses(tmp_path):
    store, floor = Store(tmp_path), -SOURCE.log_prob(SOURCE.eval_windows(8, 96)).mean(dim=1).numpy()
    for i, arm in enumerate(("bf16", "mxfp4", "mxfp4+h16", "fp8")):
        for seed in range(3):
            away = (
                0.01 * ((7 * i + 3 * seed) % 5 - 2) if i > 1 else 0.0
            )  # the two arms compared happen to repeat exactly
            end, loss = 3 + 3 / 11 + 0.003 * seed, floor.mean() + (0.3 if i else 0.2) + away
            put_run(store, arm, seed, loss - end, floor)
    (study,) = studies(store.load())
    ratio = known_entropy.excess_ratio(study, arm="mxfp4")
    assert ratio.value == pytest.approx(1.5) and ratio.low < 1.4 and ratio.high > 1.6
    own = known_entropy.excess_ratio(study, arm="bf16")
    assert (own.low, own.value, own.high) == pytest.approx((1, 1, 1))


def test_a_ratio_of_excesses_moves_with_what_seeds_do_to_all_arms(tmp_path):
    """A shift that arms share leaves their difference alone and not their ratio: Student's interval of the shift."""
    store, floor = Store(tmp_path), -SOURCE.log_prob(SOURCE.eval_windows(8, 96)).mean(dim=1).numpy()
    for arm, above in (("bf16", 0.2), ("mxfp4", 0.3)):
        for seed, shift in enumerate((-0.01, 0.0, 0.01)):
            end, loss = 3 + 3 / 11 + 0.003 * seed, floor.mean() + above + shift
            put_run(store, arm, seed, loss - end, floor)
    (study,) = studies(store.load())
    ratio, half = known_entropy.excess_ratio(study, arm="mxfp4"), 4.303 * 0.01 / 3**0.5
    assert (ratio.low, ratio.high) == pytest.approx(
        ((0.3 + half) / (0.2 + half), (0.3 - half) / (0.2 - half)), rel=0.03
    )


def test_a_reference_that_may_have_no_excess_leaves_the_ratio_open(tmp_path):
    ratio = known_entropy.excess_ratio(study_of(tmp_path, {"bf16": 0.001, "mxfp4": 0.3}), arm="mxfp4")
    assert (ratio.low, ratio.high) == (-float("inf"), float("inf")) and "beyond doubt" in ratio.note


def test_entropy_and_irreducible_loss_agree_within_sampling(tmp_path):
    study = study_of(tmp_path, {"bf16": 0.2})
    assert known_entropy.irreducible(study).mean() == pytest.approx(known_entropy.entropy(study), abs=0.15)


def test_tables_sentences_and_charts(tmp_path):
    study = study_of(tmp_path, {"bf16": 0.2, "mxfp4": 0.3, "mxfp4+h16": 0.25})
    arms = ["bf16", "mxfp4", "mxfp4+h16", "ti2d"]
    frame = known_entropy.excess_frame(study, arms)
    assert list(frame["arm"]) == arms[:3] and frame["ratio"].iloc[0].startswith("1.000x")
    text = known_entropy.in_words(study, arms)
    assert "mxfp4 adds most to that (+0.1000 nats" in text and "mxfp4+h16 least (+0.0500 nats" in text
    assert known_entropy.excess_curves(study, arms[:2])["excess"].iloc[-1] == pytest.approx(0.301, abs=1e-6)
    render(evidence_charts.gaps(frame, title="T", unit="u"), "a caption")


def test_other_sources_are_refused(tmp_path):
    with pytest.raises(UserError, match="cannot be judged by"):
        known_entropy.excess(study_of(tmp_path / "a", {"bf16": 0.2}, fingerprint="another"), arm="bf16")
    store = Store(tmp_path / "b")
    put(store, config("bf16"))
    with pytest.raises(UserError, match="corpus 'fake' has no known entropy"):
        known_entropy.excess(studies(store.load())[0], arm="bf16")
