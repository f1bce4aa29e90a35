"""Contrasts and verdicts: against scipy in a reader's own lines, on made-up studies, and in the corners."""

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from mxfp4.analysis.registered_study import contrasts, estimates
from mxfp4.analysis.registered_study.contrasts import NOT_RUN, NOT_SEEN, VERDICTS, Tables, count_verdict, decide, judge
from mxfp4.analysis.registered_study.estimates import (
    Estimate,
    factorial_effect,
    holm,
    paired,
    rank_correlation,
    ratio,
    smallest_difference,
    smallest_effect,
    unpaired,
)
from mxfp4.errors import UserError
from mxfp4.studies.registry import Rule, load_study

STUDY = load_study()
BUDGETS = {"full": 0.0, "third": 0.3, "two_thirds": 0.1}


def series(*values):
    return pd.Series(values, index=range(len(values)), dtype=float)


def table(costs=(), *, scatter=0.004, noise=None, failed=(), seed=0):
    """The table of a whole study: BF16 ends at 3 nats, an arm at `costs` (0.05) above it.

    noise: {arm: scatter}; failed: {(arm, seed): status}.
    """
    rng, costs, rows = np.random.default_rng(seed), dict(costs), []
    noise, failed = dict(noise or {}), dict(failed)
    for name, runs in STUDY.runs.items():
        for arm, seeds in runs.arms.items():
            for s in range(seeds):
                error = rng.normal(size=2) * noise.get(arm, scatter)
                for budget in runs.budgets:
                    for forward, e in zip(("own", "bf16"), error, strict=True):
                        cost = 0.0 if arm == "bf16" else costs.get((arm, forward), costs.get(arm, 0.05))
                        loss = 3 + BUDGETS[budget] + cost + e
                        rows.append((name, arm, s, budget, forward, loss, loss - 2.5, loss, 0.5 - cost / 4, 0.8 - cost,
                                     failed.get((arm, s), "finished")))  # fmt: skip
    columns = ["runs", "arm", "seed", "budget", "forward", "loss", "excess", "training", "top1", "copying", "status"]
    return pd.DataFrame(rows, columns=columns)


def verdicts(*args, probes=None, **kwargs):
    return {v.claim.id: v for v in judge(STUDY, table(*args, **kwargs), probes)}


# A reader's own lines


def test_a_reader_gets_the_same_numbers_from_scipy():
    frame = table({"mxfp4": 0.08})
    final = frame.query("runs == 'main' and budget == 'full' and forward == 'own'")
    loss = final.pivot(index="seed", columns="arm", values="loss")
    pairs = {"h3-h16": ("mxfp4+h16", "mxfp4", 0), "h1-wgrad": ("mxfp4", "mxfp4-fprop-dgrad", 0),
             "h2-sr": ("mxfp4+sr", "mxfp4", 0), "sr-grad": ("mxfp4+sr-grad", "mxfp4", 0),
             "p2-2d": ("ti2d", "ti2d-no-2d", 0), "p2-perplexity": ("ti2d", "bf16", 0.013)}  # fmt: skip
    p = {}
    for name, (arm, reference, bound) in pairs.items():
        test = stats.ttest_rel(loss[arm], loss[reference] + bound)
        p[name] = test.pvalue
    worst, adjusted = 0.0, {}
    for k, name in enumerate(sorted(p, key=p.get)):
        worst = adjusted[name] = max(worst, min(1, (6 - k) * p[name]))
    found = {v.claim.id: v for v in judge(STUDY, frame)}
    assert {c.id for c in STUDY.primaries} == set(pairs)
    for name, (arm, reference, _) in pairs.items():
        d = loss[arm] - loss[reference]
        half = stats.t.ppf(0.975, 5) * d.std() / math.sqrt(6)
        e = found[name].estimate
        assert (e.value, e.low, e.high) == pytest.approx((d.mean(), d.mean() - half, d.mean() + half))
        assert (e.p, found[name].p) == pytest.approx((p[name], adjusted[name]))


def test_the_code_has_the_numbers_of_the_registered_analysis():
    a = STUDY.analysis
    assert (a.confidence, a.family_error, a.power) == (estimates.CONFIDENCE, estimates.LEVEL, estimates.POWER)
    assert a.equivalence == {"margin": contrasts.MARGIN, "confidence": estimates.CONFIDENCE_90}
    assert tuple(a.verdicts) == ("holds", "does not hold", "undecided", "depends on the forward", NOT_SEEN, NOT_RUN)
    assert set(a.verdicts) == set(VERDICTS)


def test_the_smallest_effects_are_those_of_the_registered_table():
    for row in STUDY.analysis.detectable:
        last, first = (smallest_difference(row["scatter"], 6, level) for level in (0.05, 0.05 / 6))
        assert (round(last, 3), round(first, 3)) == (row["last"], row["first"])


def test_the_smallest_effect_has_its_power():
    rng = np.random.default_rng(0)
    effect = smallest_difference(0.01, 6)
    a, b = rng.normal(0, 0.01, (2, 6, 4000))
    assert (stats.ttest_rel(a + effect, b).pvalue <= 0.05).mean() == pytest.approx(0.8, abs=0.025)
    assert smallest_effect(0.01, 1) > 0.05 and smallest_effect(0.01, 1, 0.05 / 6) > 1 / 3  # two seeds: a wide tail
    assert smallest_effect(0.0, 5) == 0 and math.isnan(smallest_effect(math.nan, 5))


# Coverage on made-up studies


def test_intervals_cover_whatever_the_arms_scatter():
    rng, n, truth = np.random.default_rng(1), 2000, 0.03
    hits = np.zeros(2)
    for _ in range(n):
        common = rng.normal(0, 0.01, 6)  # what the arms of a seed share
        a, b = (common + rng.normal(0, s, 6) for s in (0.003, 0.02))
        e = paired(pd.Series(a + truth), pd.Series(b))
        hits += e.low <= truth <= e.high, e.low90 <= truth <= e.high90
    assert 0.93 <= hits[0] / n <= 0.97 and 0.88 <= hits[1] / n <= 0.92


def test_holm_keeps_the_family_wise_error():
    """All six contrasts null, over arms that scatter differently and share arms."""
    rng, n = np.random.default_rng(2), 2000
    arms = {arm: rng.normal(0, s, (n, 6)) for arm, s in zip("abcdefgh", np.linspace(0.004, 0.02, 8), strict=True)}
    pairs = ["ba", "ac", "da", "ea", "gh", "gf"]
    p = [stats.ttest_rel(arms[x], arms[y], axis=1).pvalue for x, y in pairs]
    wrong = [min(holm(dict(zip(pairs, row, strict=True))).values()) <= 0.05 for row in np.array(p).T]
    assert np.mean(wrong) <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / n)


def test_fieller_covers():
    rng, n = np.random.default_rng(3), 1000
    hits = 0
    for _ in range(n):
        third = rng.normal(0.05, 0.01, 6)
        full = 1.4 * 0.05 + 0.5 * (third - 0.05) + rng.normal(0, 0.008, 6)
        e = ratio(pd.Series(full), pd.Series(third))
        hits += e.low <= 1.4 <= e.high
    assert 0.93 <= hits / n <= 0.97


# The parts


def test_holm_by_hand():
    p = {"a": 0.01, "b": 0.04, "c": 0.03, "d": math.nan}
    assert holm(p) == pytest.approx({"a": 0.04, "c": 0.09, "b": 0.09, "d": 1.0})
    assert list(holm(p)) == list(p) and holm({}) == {}


def test_welch_is_scipys():
    x, y = series(0.05, 0.06, 0.055), series(0.03, 0.05, 0.01, 0.02, 0.04, 0.03)
    test = stats.ttest_ind(x, y, equal_var=False)
    e = unpaired(x, y)
    assert (e.low, e.high) == pytest.approx(tuple(test.confidence_interval(0.95)))
    assert e.p == pytest.approx(test.pvalue) and e.n == 3


def test_one_seed_against_many_is_a_prediction():
    y = series(0.03, 0.05, 0.01, 0.02, 0.04, 0.03)
    half = stats.t.ppf(0.975, 5) * y.std() * math.sqrt(1 + 1 / 6)
    e = unpaired(series(0.09), y)
    assert (e.low, e.high) == pytest.approx((0.06 - half, 0.06 + half)) and "one seed on one side" in e.note
    for a, b in ((series(), y), (series(1.0), series(2.0)), (series(math.inf, 1.0), y)):
        assert math.isnan(unpaired(a, b).value) and "no test of two settings" in unpaired(a, b).note


def test_few_seeds_have_no_test():
    e = paired(series(3.0), series(2.9))
    assert e.value == pytest.approx(0.1) and math.isnan(e.p) and e.note == "1 shared seed; a test needs 2"
    e = paired(series(), series(1.0, 2.0))
    assert math.isnan(e.value) and e.note == "0 shared seeds; a test needs 2"
    assert paired(pd.Series({0: 1.0, 1: 2.0}), pd.Series({1: 1.0, 2: 2.0})).n == 1


def test_nan_leaves_its_seed_out_and_is_named():
    e = paired(series(3.1, math.nan, 3.3, 3.2), series(3.0, 3.0, 3.1, 3.0))
    assert e.n == 3 and e.note == "no value in seed 1" and e.value == pytest.approx(np.mean([0.1, 0.2, 0.2]))
    e = paired(series(3.1, math.nan), series(3.0, 3.0))
    assert math.isnan(e.p) and "no value in seed 1" in e.note


def test_a_failed_run_makes_it_a_sign_test():
    good, bad = series(*[3.0] * 6), series(*[math.inf] * 6)
    e = paired(bad, good)
    assert e.value == math.inf and math.isnan(e.low) and e.p == pytest.approx(2 / 64)
    assert "above in 6 of 6 seeds, below in 0" in e.note
    assert paired(good, bad).side(0) == -1
    some = paired(series(math.inf, 3.1, 2.9, 3.1), series(3.0, 3.0, 3.0, 3.0))
    assert some.p == pytest.approx(0.625) and some.side(0) == 0
    assert paired(bad, bad).p == 1 and math.isnan(paired(bad, bad).value)


def test_no_scatter_is_exact():
    e = paired(series(1.0, 1.0, 1.0), series(0.0, 0.0, 0.0), bound=0.5)
    assert (e.low, e.high, e.p) == (1, 1, 0) and paired(series(1.0, 1.0), series(1.0, 1.0)).p == 1


def test_ratio_without_an_interval():
    e = ratio(series(0.05, 0.06, 0.04), series(0.01, -0.01, 0.002))
    assert math.isnan(e.low) and e.note.startswith("no interval: the cost at a third")
    assert "no ratio" in ratio(series(0.05, math.inf), series(0.01, 0.02)).note
    e = ratio(series(0.06, 0.062, 0.058), series(0.03, 0.031, 0.029), bound=1)
    assert e.value == pytest.approx(2) and e.low <= 2 <= e.high and e.p < 0.01


def test_rank_correlation():
    x = pd.Series(dict(zip("abcdef", (1, 2, 3, 4, 5, math.inf), strict=True)))
    e = rank_correlation(x, x)
    assert e.value == pytest.approx(1) and e.p == pytest.approx(2 / 720) and e.n == 6 and math.isnan(e.low)
    y = pd.Series(dict(zip("abcdef", (2, 1, 4, 3, 6, 5), strict=True)))
    assert rank_correlation(x, y).value == pytest.approx(stats.spearmanr(x, y).statistic)
    assert "no order to compare" in rank_correlation(x[:3], y).note
    assert "no order to compare" in rank_correlation(x * 0 + 1, y).note


# Factorials

BLOCKS = STUDY.factorials["blocks"]


def cells(truth, seeds=1, noise=0.0, bad=()):
    """Cells whose value is the sum of truth[effect] times the coded levels (-1/2 or 1/2, an interaction twice that)."""
    rng = np.random.default_rng(0)
    rows = []
    for (levels, arm), s in ((cell, s) for cell in BLOCKS.cells() for s in range(seeds)):
        value = sum(t * np.prod([2 * levels[f] - 1 for f in e.split(":")]) / 2 for e, t in truth.items())
        rows.append({**levels, "seed": s, "value": math.inf if arm in bad else 1 + value + noise * rng.normal()})
    return pd.DataFrame(rows)


@pytest.mark.parametrize("seeds", [1, 3])
def test_factorial_effects_are_recovered(seeds):
    truth = {"W": -0.2, "G": 0.1, "G:SR": -0.05}
    frame = cells(truth, seeds, noise=1e-6)
    for effect in BLOCKS.effects():
        e = factorial_effect(frame, effect, list(BLOCKS.factors))
        assert e.value == pytest.approx(truth.get(effect, 0), abs=1e-5), effect
    assert e.over == ("seeds" if seeds > 1 else "settings of the other factors") and e.n == (3 if seeds > 1 else 4)


def test_a_main_effect_by_hand():
    frame = cells({}, noise=0.1)
    wide = frame.pivot(index=["X", "G", "SR"], columns="W", values="value")
    e = factorial_effect(frame, "W", list(BLOCKS.factors))
    assert e.p == pytest.approx(stats.ttest_rel(wide[1], wide[0]).pvalue) and e.n == 8
    assert e.value == pytest.approx((wide[1] - wide[0]).mean())


def test_failed_cells_are_left_out_in_pairs_and_counted():
    frame = cells({"W": -0.2}, noise=1e-6, bad=("mxfp4+rceil", "mxfp4+rceil+2d-w+2d-x"))
    e = factorial_effect(frame, "W", list(BLOCKS.factors))
    assert e.n == 6 and e.note == "2 of 8 settings left out, where a cell failed or is missing"
    assert e.value == pytest.approx(-0.2, abs=1e-5)
    e = factorial_effect(frame[frame["SR"] == 1].iloc[:4], "W", list(BLOCKS.factors))
    assert "left out" in e.note and math.isnan(e.p)
    assert math.isnan(factorial_effect(frame[:0], "W", list(BLOCKS.factors)).value)


# Verdicts

ABOVE, BELOW = Rule("above", 0), Rule("below", 0)


def estimate(value, half, n=6, half90=None):
    half90 = half * 0.78 if half90 is None else half90
    p = 0.01 if abs(value) > half else 0.5
    return Estimate(value, value - half, value + half, value - half90, value + half90, p, n, half / 2.57, n - 1)


@pytest.mark.parametrize(
    "rule, value, half, verdict",
    [
        (ABOVE, 0.05, 0.01, "holds"),
        (ABOVE, 0.01, 0.005, "holds"),  # significant, though small
        (ABOVE, -0.05, 0.01, "does not hold"),
        (ABOVE, 0.005, 0.01, "does not hold"),  # equivalent
        (ABOVE, -0.01, 0.02, NOT_SEEN),  # no room for 0.02 above, room below
        (ABOVE, 0.01, 0.03, "undecided"),
        (BELOW, 0.01, 0.02, NOT_SEEN),
        (BELOW, -0.01, 0.03, "undecided"),
        (Rule("different", 0), -0.05, 0.01, "holds"),
        (Rule("different", 0), 0.0, 0.01, "does not hold"),
        (Rule("different", 0), 0.01, 0.02, "undecided"),
        (Rule("equal", 0.02), 0.01, 0.005, "holds"),
        (Rule("equal", 0.02), 0.05, 0.01, "does not hold"),
        (Rule("equal", 0.02), 0.02, 0.01, "undecided"),
    ],
)
def test_each_verdict(rule, value, half, verdict):
    e = estimate(value, half)
    assert decide(rule, e, e.p) == verdict


def test_a_bound_that_is_not_0_has_no_equivalence():
    e = replace(estimate(0.01, 0.005), p=0.3)
    assert decide(Rule("below", 0.013), e, e.p) == "undecided"
    assert decide(Rule("below", 0.013), replace(e, p=0.01), 0.01) == "holds"
    assert decide(ABOVE, estimate(0.005, 0.01), 0.5, loss=False) == "undecided"


def test_an_adjusted_p_decides():
    e = estimate(0.05, 0.01)
    assert decide(ABOVE, e, 0.06) == "undecided" and decide(ABOVE, e, 0.05) == "holds"


def test_signs_that_differ_depend_on_the_forward():
    up, down, none = estimate(0.05, 0.01), estimate(-0.05, 0.01), estimate(-0.01, 0.03)
    assert decide(ABOVE, up, up.p, bf16=down) == "depends on the forward"
    assert decide(ABOVE, up, up.p, bf16=none) == "holds" and decide(ABOVE, up, up.p, bf16=up) == "holds"


def test_no_verdict_without_a_value():
    assert decide(ABOVE, paired(series(1.0), series()), math.nan) == "undecided"
    assert decide(Rule("equal", 0.02), paired(series(*[math.inf] * 6), series(*[1.0] * 6)), 0.03) == "undecided"
    assert decide(ABOVE, paired(series(*[math.inf] * 6), series(*[1.0] * 6)), 0.03) == "holds"


@pytest.mark.parametrize(
    "events, every, verdict",
    [("111", "all", "holds"), ("000", "all", NOT_SEEN), ("010", "all", "undecided"), ("1", "all", "undecided"),
     ("000", "none", "holds"), ("111", "none", "does not hold"), ("", "all", "undecided")],
)  # fmt: skip
def test_counts(events, every, verdict):
    found, e = count_verdict(pd.Series([c == "1" for c in events], dtype=bool), every)
    assert found == verdict and e.note == f"{events.count('1')} of {len(events)} seeds"


# Whole studies


def test_a_study_from_table_to_verdicts():
    costs = {"mxfp4": 0.1, "mxfp4+h16": 0.03, "mxfp4+sr": 0.4, "mxfp4-fprop-dgrad": 0.06, "fp8": 0.0,
             "mxfp4+rht16": 0.03, "ti2d": 0.04}  # fmt: skip
    found = verdicts(costs)
    assert list(found) == [c.id for c in STUDY.claims] and {v.verdict for v in found.values()} <= set(VERDICTS)
    expected = {
        "h3-h16": "holds",
        "h1-wgrad": "holds",
        "h2-sr": "holds",
        "sr-grad": "holds",
        "p2-perplexity": "does not hold",
        "h2-sr-converges": "holds",
        "h2-rht-converges": NOT_SEEN,
        "h3-half": "holds",
        "h4-h16": "holds",
        "h1-largest-step": "does not hold",
        "budget-mxfp4": "undecided",
    }
    assert {name: found[name].verdict for name in expected} == expected
    assert "after Holm" in found["h1-wgrad"].reason and "after Holm" not in found["h3-half"].reason
    assert "smallest effect seen with power 0.8: " in found["p2-perplexity"].reason
    assert "(last to first Holm step)" in found["p2-perplexity"].reason


def test_the_forward_can_turn_a_claim():
    found = verdicts({("mxfp4+h16", "own"): 0.02, ("mxfp4+h16", "bf16"): 0.2, "mxfp4": 0.1})
    assert found["h3-h16"].verdict == "depends on the forward" and found["weights-h16"].verdict == "does not hold"


def test_failed_runs_are_counted_in_the_reason():
    failed = {("mxfp4+sr", s): "stalled" if s else "diverged" for s in range(6)}
    found = verdicts(failed=failed)
    assert "mxfp4+sr diverged or stalled in 6 of 6 seeds" in found["h2-sr"].reason
    assert found["h2-sr"].verdict == "undecided" and found["sr-xw"].verdict == "holds"  # Holm; a plain sign test
    assert found["h2-sr-converges"].verdict == "holds" and "no ratio" in found["budget-sr"].reason
    assert "settings left out" in found["sr-xw-factor"].reason
    assert found["h3-h16"].estimate.n == 6


def test_an_empty_study_decides_nothing():
    found = judge(STUDY, table()[:0])
    assert {v.verdict for v in found} == {"not run"}
    assert "no records of mxfp4+h16 in main" in found[0].reason and found[0].p == 1


def test_short_borrows_the_branches_of_main():
    t = Tables(STUDY, table({"mxfp4": 0.1}))
    third = t.values("main", "mxfp4", "own", "third")
    assert t.values("short", "mxfp4", "own").equals(third) and len(third) == 6
    assert len(t.values("short", "mxfp4+sr-xw", "own")) == 1 and len(t.cells(STUDY.factorials["rounding"], "own")) == 16


def test_token_overhead_is_the_cost_over_the_gain_of_an_e_fold():
    claim, frame = STUDY.claim("h4-h16"), table({"mxfp4+h16": 0.06, "fp8": 0.0}, scatter=0)
    e = Tables(STUDY, frame).estimate(claim)
    assert e.value == pytest.approx(0.06 / (0.3 / math.log(3)))
    flat = frame.assign(loss=3.0)
    assert "gains nothing" in Tables(STUDY, flat).estimate(claim).note


def test_probes_and_ranks():
    arms = [a for a in STUDY.runs["main"].arms if a != "bf16"]
    each = [(i, arm, s) for i, arm in enumerate(arms) for s in range(3)]
    rows = [("main", arm, s, probe, i + 0.01 * s) for probe in STUDY.probes for i, arm, s in each]
    probes = pd.DataFrame(rows, columns=["runs", "arm", "seed", "probe", "value"])
    found = verdicts({arm: 0.1 * i for i, arm in enumerate(arms)}, probes=probes)
    assert found["forward-predicts"].verdict == "holds" and found["forward-predicts"].estimate.value == pytest.approx(1)
    assert found["press-wgrad-pattern"].verdict == "holds" and found["press-wgrad-pattern"].estimate.n == 3
    assert found["p1-sr-error"].estimate.value == pytest.approx(2)


def test_two_rows_for_one_run_are_refused():
    frame = table()
    with pytest.raises(UserError, match="bf16 of runs main has two rows for one seed"):
        judge(STUDY, pd.concat([frame, frame[:1]]))


def test_one_seed_has_an_effect_and_no_p_value():
    runs = table({"mxfp4": 0.1})
    verdicts = {v.claim.id: v for v in judge(STUDY, runs[runs["seed"] == 0])}
    found = verdicts["h3-h16"]
    assert found.verdict == "undecided" and "1 seed" in found.reason
    assert all("nan" not in v.reason for v in verdicts.values())
