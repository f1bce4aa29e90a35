"""The bootstrap over seeds and windows: against closed forms, its coverage, and what falls back on seeds alone."""

import math

import numpy as np
import pandas as pd
import pytest
from scipy.stats import f

from mxfp4.analysis import bootstrap, metrics
from mxfp4.analysis.effect import SEEDS_AND_WINDOWS
from mxfp4.analysis.study import Study, studies
from mxfp4.analysis.token_efficiency import crossings
from mxfp4.studies.store import Store
from tests.fakes.studies import config, put

NOISE = np.random.default_rng(0).normal(0, 0.05, 64)
NOISE -= NOISE.mean()


def study_of(tmp_path, arms, seeds=(0, 1, 2)):
    """arms: {recipe: (slowdown, offsets of seeds, window noise)}."""
    store = Store(tmp_path)
    for recipe, (slowdown, offsets, windows) in arms.items():
        for seed in seeds:
            put(store, config(recipe, seed), slowdown=slowdown, offset=offsets[seed], windows=windows)
    (found,) = studies(store.load())
    return found


ZERO = (0.0, 0.0, 0.0)


def test_means_are_of_resampled_rows_and_columns():
    values = np.arange(12.0).reshape(3, 4) ** 2
    rows, weights = bootstrap.draws(3, 4)
    expected = [np.mean([weights[i] @ values[r] for r in rows[i]]) for i in range(50)]
    assert bootstrap.means(values)[:50] == pytest.approx(expected)
    assert weights.sum(axis=1) == pytest.approx(np.ones(len(weights)))
    assert bootstrap.means(values).mean() == pytest.approx(values.mean(), rel=0.02)


def test_spread_is_that_of_seeds_and_of_windows_together():
    """Means of independent draws: the variances of the two factors add up."""
    rng = np.random.default_rng(1)
    seeds, windows = rng.normal(0, 0.02, (8, 1)), rng.normal(0, 0.3, (1, 200))
    both = bootstrap.means(seeds + windows)
    parts = seeds.var() / 8 + windows.var() / 200
    assert both.var() == pytest.approx(parts, rel=0.1)


def test_interval_covers_the_truth_as_often_as_it_says():
    """200 made-up experiments with 12 seeds and 60 windows, true mean 0."""
    rng, inside = np.random.default_rng(2), 0
    for _ in range(200):
        d = rng.normal(0, 1, (12, 1)) + rng.normal(0, 2, (1, 60)) + rng.normal(0, 1, (12, 60))
        low, high = bootstrap.interval(bootstrap.means(d))
        inside += low <= 0 <= high
    assert 0.88 < inside / 200 < 0.99


def test_a_difference_counts_windows_that_disagree_and_not_what_they_share(tmp_path):
    same = study_of(tmp_path / "same", {"bf16": (1.0, ZERO, NOISE), "mxfp4": (1.1, ZERO, NOISE)})
    apart = study_of(tmp_path / "apart", {"bf16": (1.0, ZERO, NOISE), "mxfp4": (1.1, ZERO, -NOISE)})
    a, b = (metrics.loss_difference(s, arm="mxfp4", against="bf16") for s in (same, apart))
    assert a.value == pytest.approx(b.value, abs=1e-6) and a.over == b.over == SEEDS_AND_WINDOWS
    assert a.high - a.low < 1e-5
    error = 2 * NOISE.std() / math.sqrt(len(NOISE))
    assert b.high - b.low == pytest.approx(2 * 1.96 * error, rel=0.1)


def test_an_interaction_may_name_an_arm_twice(tmp_path):
    study = study_of(tmp_path, {"bf16": (1.0, ZERO, NOISE), "mxfp4": (1.1, ZERO, -NOISE)})
    assert metrics.interaction(study, arms=["mxfp4", "bf16", "mxfp4", "bf16"]).value == 0
    twice = metrics.interaction(study, arms=["mxfp4", "bf16", "bf16", "mxfp4"])
    once = metrics.loss_difference(study, arm="mxfp4", against="bf16")
    assert twice.value == pytest.approx(2 * once.value) and twice.high == pytest.approx(2 * once.high)


def test_an_overhead_moves_with_the_windows(tmp_path):
    same = study_of(tmp_path / "same", {"fp8": (1.0, ZERO, NOISE), "mxfp4": (1.1, ZERO, NOISE)})
    apart = study_of(tmp_path / "apart", {"fp8": (1.0, ZERO, NOISE), "mxfp4": (1.1, ZERO, -NOISE)})
    a, b = (metrics.overhead(s, arm="mxfp4") for s in (same, apart))
    assert a.value == b.value == pytest.approx(0.1, abs=0.01) and a.high - a.low < 0.01
    assert b.low < 0.1 < b.high and b.high - b.low > 5 * (a.high - a.low)
    pair = metrics.overhead_difference(apart, arm="mxfp4", against="fp8")
    assert (pair.low, pair.high) == pytest.approx((b.low, b.high), abs=1e-9)


def test_an_arm_with_fewer_seeds_is_read_at_the_target_of_all(tmp_path):
    """A third seed of the reference lies far from the other two, and moves the target away from theirs."""
    store = Store(tmp_path)
    for seed, slowdown in enumerate((1.0, 1.0, 3.0)):
        put(store, config("fp8", seed), slowdown=slowdown)
    for seed in range(2):
        put(store, config("mxfp4", seed), offset=0.05)
    (study,) = studies(store.load())
    early, late = (
        metrics.target_loss(s, "fp8", 0.7) for s in (study, Study(tuple(r for r in study.records if r.config.seed < 2)))
    )
    means = [bootstrap.overheads(study, "mxfp4", "fp8", target, 0.7, (0, 1)).mean() for target in (early, late)]
    assert early > late + 0.1 and means[0] < 0.7 * means[1]
    assert means[0] == pytest.approx(metrics.overhead(study, arm="mxfp4").value, rel=0.02)


def test_one_seed_has_no_interval_and_a_diverged_run_falls_back_on_seeds(tmp_path):
    one = study_of(tmp_path / "one", {"bf16": (1.0, ZERO, NOISE), "mxfp4": (1.1, ZERO, -NOISE)}, seeds=(0,))
    assert math.isnan(metrics.loss_difference(one, arm="mxfp4", against="bf16").low)
    assert math.isnan(metrics.overhead(one, arm="mxfp4", reference="bf16").low)
    store = Store(tmp_path / "gone")
    for seed in range(3):
        put(store, config("bf16", seed))
        put(store, config("mxfp4", seed), diverged_at=500 if seed == 2 else None)
    (gone,) = studies(store.load())
    effect = metrics.loss_difference(gone, arm="mxfp4", against="bf16")
    assert effect.value == math.inf and effect.over == "seeds, their range"


def test_crossings_of_many_targets_are_those_of_one():
    curve = pd.DataFrame([(0, 6.0), (100, 4.0), (200, 3.0), (300, 3.2), (400, 2.9)], columns=["tokens", "eval_loss"])
    targets = np.array([7.0, 6.0, 5.0, 4.0, 3.1, 3.0, 2.95, 2.9, 2.8])
    expected = [0, 0, 50, 100, 190, 200, 300 + 100 * 0.25 / 0.3, 400, math.inf]
    assert crossings(curve, targets) == pytest.approx(expected)


def test_scatter_of_many_arms_keeps_chance_from_holding(tmp_path):
    """Twelve arms that are one arm, three seeds: pairs whose three differences have one sign are common, and the
    bootstrap alone calls a quarter of them different; with the floor the share is that of the level."""
    rng, told, alone = np.random.default_rng(4), [], []
    for i in range(12):
        store, names = (
            Store(tmp_path / str(i)),
            [f"mxfp4+h{n}" for n in (16, 32, 64, 128)] + ["bf16", "fp8", "mxfp4", "mxfp4+sr"],
        )
        for name in names:
            for seed in range(3):
                put(store, config(name, seed), offset=rng.normal(0, 0.02))
        (study,) = studies(store.load())
        for a, b in zip(names[::2], names[1::2], strict=True):
            effect = metrics.loss_difference(study, arm=a, against=b)
            told.append(effect.low > 0 or effect.high < 0)
            low, high = bootstrap.interval(bootstrap.means(bootstrap.combined(study, {a: 1, b: -1}, (0, 1, 2))))
            alone.append(low > 0 or high < 0)
    assert np.mean(alone) > 0.12 and np.mean(told) < 0.1


def table_of(values):
    return pd.DataFrame(values, index=[f"arm{i}" for i in range(len(values))])


def test_noise_of_means_has_students_spread():
    table = table_of(np.random.default_rng(3).normal(0, 1, (6, 4)))
    (one, other) = bootstrap.run_noise(table, ["arm0", "another"])
    found = bootstrap.scatter(table)
    assert found.freedom == 15 and not found.apart
    low, high = bootstrap.interval(one - other)  # of an arm and one that is not in the table: the pool's
    assert high == pytest.approx(2.131 * found.sd * math.sqrt(2 / 4), rel=0.03) and low == pytest.approx(
        -high, rel=0.05
    )
    assert bootstrap.run_noise(table[:1], ["arm0"]) is None and bootstrap.run_noise(table[[0]], ["arm0"]) is None
    assert bootstrap.run_noise(table[:0], ["arm0"]) is None


def test_a_share_of_scatter_is_outlying_by_the_f_test_of_one_arm_against_the_rest():
    for arms, freedom in ((3, 1), (4, 2), (10, 1), (10, 2), (45, 2)):
        critical = f.isf(0.01 / arms, freedom, (arms - 2) * freedom)  # of the arm's variance over that of the others
        for factor, told in ((0.99, False), (1.01, True)):
            own = factor * critical / (arms - 2)  # squares, those of the others being 1
            share = own / (own + 1) * (arms - 1) / arms
            assert bootstrap._outlying(share, arms, freedom) is told, (arms, freedom)


def test_one_wild_arm_of_four_is_found():
    """It moves the means of seeds and so seems to share its scatter with the other three."""
    values = np.random.default_rng(8).normal(0, 0.001, (4, 3))
    values[2] += (0.0, 0.5, -0.4)
    found = bootstrap.scatter(table_of(values))
    assert set(found.apart) == {"arm2"} and found.sd < 0.003


@pytest.mark.parametrize(
    "arms, seeds, times, least",
    [
        (45, 3, 1.0, 0.95),
        (45, 3, 2.0, 0.91),
        (10, 3, 3.0, 0.87),
        (8, 2, 1.0, 0.95),
        (8, 2, 2.0, 0.91),
        (2, 3, 1.0, 0.92),
    ],
)
def test_intervals_are_right_as_often_as_they_say(arms, seeds, times, least):
    """600 made-up studies; an arm that scatters `times` as much as the others, too little for a test to find."""
    rng, inside = np.random.default_rng(9), 0
    for _ in range(600):
        table = table_of(rng.normal(0, 1, (arms, seeds)) * np.array([times] + [1] * (arms - 1))[:, None])
        (ours, theirs), d = bootstrap.run_noise(table, ["arm0", "arm1"]), table.loc["arm0"] - table.loc["arm1"]
        low, high = bootstrap.interval(d.mean() + ours - theirs)
        inside += low <= 0 <= high
    assert inside / 600 > least


def test_a_comparison_weighs_its_own_scatter_against_the_pool():
    """Closed form: own 2 degrees of freedom, the pool's count as 2, so Student's with 4."""
    values = np.random.default_rng(10).normal(0, 0.01, (10, 3))
    values[:2] = [[0, 0.05, 0], [0, 0, 0.03]]
    found, (ours, theirs) = bootstrap.scatter(table_of(values)), bootstrap.run_noise(table_of(values), ["arm0", "arm1"])
    own = (values[0] - values[1]).var(ddof=1) / 2
    half = 2.776 * math.sqrt((2 * own + 2 * found.sd**2) / 4 * 2 / 3)
    assert not found.apart and bootstrap.interval(ours - theirs)[1] == pytest.approx(half, rel=0.04)


def test_arms_that_hardly_train_do_not_widen_the_intervals_of_others():
    values = np.random.default_rng(5).normal(0, 0.02, (12, 3))
    wild = np.random.default_rng(6).normal(0, 1, (2, 3))
    calm, both = table_of(values), table_of(np.vstack([values, wild]))
    alone, found = bootstrap.scatter(calm), bootstrap.scatter(both)
    assert not alone.apart and set(found.apart) == {"arm12", "arm13"}
    assert (found.sd, found.freedom) == (pytest.approx(alone.sd, rel=1e-12), alone.freedom)
    own = wild - values.mean(axis=0)
    assert list(found.apart.values()) == pytest.approx(list(own.std(axis=1, ddof=1)))
    tame, rough = (bootstrap.interval(bootstrap.run_noise(both, ["arm0", "arm13"])[i])[1] for i in (0, 1))
    assert tame == pytest.approx(bootstrap.interval(bootstrap.run_noise(calm, ["arm0"])[0])[1], rel=0.03)
    assert rough == pytest.approx(4.303 * own[1].std(ddof=1) / math.sqrt(3), rel=0.06)


def test_arms_that_scatter_alike_stand_together():
    """At the level of 1 % hardly any of 300 made-up studies loses an arm, whatever their numbers of arms and seeds."""
    rng = np.random.default_rng(7)
    for shape in ((3, 2), (5, 3), (45, 3), (8, 12)):
        lost = sum(bool(bootstrap.scatter(table_of(rng.normal(0, 1, shape))).apart) for _ in range(300))
        assert lost / 300 < 0.025, shape
    same = table_of(np.ones((5, 3)))
    assert bootstrap.scatter(same).sd == 0 and not bootstrap.scatter(same).apart


def test_an_overhead_is_as_uncertain_as_the_scatter_of_crossings_says(tmp_path):
    """Closed form: a run's crossing moves with its slowdown, so the logarithms of those are the table."""
    store, rng = Store(tmp_path), np.random.default_rng(5)
    arms = {"fp8": 1.0, "bf16": 1.0, "mxfp4": 1.15, "mxfp4+h16": 1.05, "mxfp4+h32": 1.05, "mxfp4-fprop": 1.02}
    noise = {name: rng.normal(0, 0.05, 3) for name in arms}
    for name, slowdown in arms.items():
        for seed in range(3):
            put(store, config(name, seed), slowdown=slowdown * math.exp(noise[name][seed]))
    (study,) = studies(store.load())
    pool = bootstrap.scatter(pd.DataFrame(noise).T)
    assert not pool.apart

    def half(arm, against, overhead):
        own = (noise[arm] - noise[against]).var(ddof=1) / 2
        return 2.776 * math.sqrt((2 * own + 2 * pool.sd**2) / 4 * 2 / 3) * (1 + overhead)

    effect = metrics.overhead(study, arm="mxfp4", at=0.6)
    assert (effect.high - effect.low) / 2 == pytest.approx(half("mxfp4", "fp8", effect.value), rel=0.1)
    apart = metrics.overhead_difference(study, arm="mxfp4", against="mxfp4+h16", at=0.6)
    assert (apart.high - apart.low) / 2 == pytest.approx(half("mxfp4", "mxfp4+h16", effect.value), rel=0.1)
