"""What stochastic rounding costs, told from made-up losses under each rule."""

import pytest

from mxfp4.analysis.study import studies
from mxfp4.pages.chapters.sr_cost import sr_cost_frame, sr_cost_text
from mxfp4.studies.store import Store
from tests.fakes.studies import config, put

RULES = ("floor", "even", "ceil", "rceil")
NAMES = {"floor": "mxfp4+floor", "even": "mxfp4", "ceil": "mxfp4+ceil", "rceil": "mxfp4+rceil"}


def made(root, everywhere, gradients):
    """A study of three seeds, a little noise, and these costs of SR by rule."""
    store = Store(root)
    for i, (rule, name) in enumerate(NAMES.items()):
        for suffix, cost in (("", 0.0), ("+sr-grad", gradients[rule]), ("+sr", everywhere[rule])):
            for seed in range(3):
                put(store, config(name + suffix, seed), offset=cost + 0.001 * ((i + 2 * seed + len(suffix)) % 3))
    (study,) = studies(store.load())
    return study


def test_sr_that_costs_under_every_rule_is_not_put_down_to_clipping(tmp_path):
    study = made(tmp_path, dict.fromkeys(RULES, 0.1), {**dict.fromkeys(RULES, 0.0), "ceil": -0.05})
    text = sr_cost_text(study)
    assert "SR on every operand ends higher under `floor`, `even`, `ceil` and `rceil`;" in text
    assert "SR on the gradients alone ends lower under `ceil` and is not told from none under the others." in text
    assert "costs under `ceil` and `rceil` too, where nothing is clipped" in text and "what SR is applied to" in text
    assert sr_cost_frame(study)["cost"].str.split().str[0].astype(float).iloc[1] == pytest.approx(0.1, abs=0.005)


def test_sr_that_costs_where_values_are_clipped_alone_is_what_a_clipping_rule_would_do(tmp_path):
    costs = {"floor": 0.1, "even": 0.1, "ceil": 0.0, "rceil": 0.0}
    text = sr_cost_text(made(tmp_path, costs, costs))
    assert (
        "that is what a rule that clips would do" in text
        and "not all there is" not in text
        and "applied to" not in text
    )
    assert "Against SR on the gradients alone, SR on every operand is not told from none under any rule." in text


def test_one_seed_tells_nothing(tmp_path):
    store = Store(tmp_path)
    for arm in ("mxfp4", "mxfp4+sr", "mxfp4+sr-grad"):
        put(store, config(arm))
    (study,) = studies(store.load())
    assert sr_cost_text(study) == "" and len(sr_cost_frame(study)) == 2
