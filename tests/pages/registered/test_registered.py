"""The registered study on the pages: every sentence in all its variants, frames against the tables, boards."""

import math

import numpy as np
import pandas as pd
import pytest

from mxfp4.analysis.registered_study.contrasts import VERDICTS, Tables
from mxfp4.analysis.registered_study.estimates import Estimate
from mxfp4.errors import UserError
from mxfp4.pages.registered import answer as answers
from mxfp4.pages.registered.factorials import effects_chart, factorial_effects, failed_cells
from mxfp4.pages.registered.forest import curves_chart, forest, forest_caption, matrix_chart
from mxfp4.pages.registered.study_report import COST_COLUMNS, StudyReport
from mxfp4.pages.registered.summary import Summary
from mxfp4.pages.registered.verdict_board import SHORT, VerdictBoard, VerdictStrip
from tests.analysis.registered_study.test_contrasts import STUDY, table

COSTS = {
    "mxfp4": 0.13,
    "mxfp4+h16": 0.06,
    "mxfp4+sr": 0.2,
    "ti2d": 0.1,
    ("ti2d", "bf16"): 0.3,
    "ti2d-no-2d": 0.2,
    "ti2d+hh16": 0.2,
    "mxfp4+rht16": 0.12,
    "mxfp4+sr-grad": 0.12,
}


def made(runs: pd.DataFrame) -> StudyReport:
    report = StudyReport(STUDY, ())
    report.__dict__["tables"] = Tables(STUDY, runs)
    return report


@pytest.fixture(scope="module")
def full():
    return made(table(COSTS))


@pytest.fixture(scope="module")
def empty():
    return made(table()[:0])


def test_the_answer_says_what_the_records_say(full):
    text = answers.answer(full)
    assert "**`mxfp4+h16` ends lowest" in text and "lowers the loss of full MXFP4 (\N{MINUS SIGN}0.0" in text
    assert "raises it, as P1 says" in text and "does not stay within 1.3 %" in text
    assert "they need the forward they trained with" in text
    words = [word for word in text.split() if any(map(str.isalpha, word))]
    assert 90 <= len(words) <= 150


def test_the_answer_turns_with_the_records():
    other = {"mxfp4": 0.1, "mxfp4+h16": 0.2, "mxfp4+sr": 0.05, "mxfp4+sr-grad": 0.02, "ti2d": 0.001}
    text = answers.answer(made(table(other)))
    assert "`ti2d` ends lowest" in text and "rotation does not lower the loss of full MXFP4 (+0.1" in text
    assert "Contrary to P1" in text and "gradients alone lowers it" in text and "stays within 1.3 %" in text
    assert "they need the forward" not in text


def test_no_effect_is_told_from_a_wrong_sign():
    alike = dict.fromkeys(["mxfp4", "mxfp4+h16", "mxfp4+sr", "mxfp4+sr-grad"], 0.1)
    text = answers.answer(made(table(alike)))
    assert "does not lower the loss of full MXFP4 by as much as 0.02 nats" in text


def test_scatter_leaves_the_answer_undecided():
    text = answers.answer(made(table(COSTS, scatter=0.3)))
    assert "Whether P1's fixed Hadamard rotation lowers the loss of full MXFP4 is undecided" in text


def test_without_records_nothing_is_claimed(empty):
    text = answers.answer(empty)
    assert text.startswith("No two MXFP4 recipes have enough runs") and "0 of its 63 main runs" in text
    assert "[the first study](first_study.html)" in text
    assert "rotation" not in text
    shown = answers.recipe_table(empty)
    assert (shown["own forward"] == "\N{EN DASH}").all() and (shown["seeds"] == 0).all()


def test_one_recipe_alone_is_not_called_the_best():
    runs = table(COSTS)
    assert answers.answer(made(runs[runs["arm"].isin(["bf16", "mxfp4"])])).startswith("No two MXFP4 recipes")
    assert answers.answer(made(runs[runs["seed"] == 0])).startswith("No two MXFP4 recipes")


@pytest.mark.parametrize(
    ("estimate", "text"),
    [
        (Estimate(0.1234), "+0.123 nats"),
        (Estimate(-0.1, -0.2, 0.05), "\N{MINUS SIGN}0.100 nats [\N{MINUS SIGN}0.200, +0.050]"),
        (Estimate(math.inf), "no finite loss"),
    ],
)
def test_effects_in_words(estimate, text):
    assert answers.in_nats(estimate) == text


def test_costs_are_paired_differences(full):
    costs = full.costs(["mxfp4"]).set_index("forward")
    runs = full.tables.runs
    own = runs[(runs["runs"] == "main") & (runs["budget"] == "full") & (runs["forward"] == "own")].set_index("seed")[
        "loss"
    ]
    arms = runs.loc[
        (runs["runs"] == "main") & (runs["budget"] == "full") & (runs["forward"] == "own"), "arm"
    ].to_numpy()
    expected = (own[arms == "mxfp4"] - own[arms == "bf16"]).mean()
    assert costs.loc["own forward", "cost"] == pytest.approx(expected)
    assert costs.loc["own forward", "low"] < expected < costs.loc["own forward", "high"]


def test_charts_and_captions_of_full_partial_and_no_records(full, empty):
    costs = full.costs()
    forest(costs, title="t").to_dict()
    assert "costs +0.2" in forest_caption(costs) and "95 % intervals over seeds." in forest_caption(costs)
    runs = table(COSTS, failed={("mxfp4+sr", 1): "stalled"})
    caption = forest_caption(made(runs).costs(["mxfp4", "mxfp4+sr", "mxfp4-wgrad"]))
    assert "diverged or stalled: mxfp4+sr (1)." in caption
    one = made(runs[runs["seed"] == 0]).costs(["mxfp4", "ti2d"])
    assert "2 of 2 arms have one seed and no interval" in forest_caption(one)
    forest(one, title="t").to_dict()
    nothing = empty.costs()
    assert list(nothing.columns) == COST_COLUMNS and forest_caption(nothing) == "No arm shares a seed with bf16 yet."
    forest(nothing, title="t").to_dict()


def test_factorials(full, empty):
    effects = factorial_effects(full, "blocks")
    assert list(effects["effect"])[:4] == ["W", "X", "G", "SR"] and len(effects) == 10
    effects_chart(effects, title="t").to_dict()
    assert failed_cells(full, "blocks").empty
    failed = failed_cells(made(table(failed={("mxfp4+rceil+2d-w", 0): "stalled"})), "blocks")
    assert failed[["W", "X", "G", "SR"]].to_numpy().tolist() == [[1, 0, 0, 0]] and list(failed["failed"]) == [1]
    assert factorial_effects(empty, "rotation").empty and failed_cells(empty, "rotation").empty


def test_decays_are_compared_with_bf16_of_main(full, empty):
    assert set(full.decay_costs()["arm"]) == set(STUDY.runs["bf16-decay"].arms)
    assert empty.decay_costs().empty


def test_the_matrix_and_curves_can_be_drawn():
    matrix = pd.DataFrame({"arm": ["bf16", "mxfp4"], "forward": ["own", "bf16"], "cost": [0.0, -0.1], "seeds": [2, 2]})
    spec = matrix_chart(matrix, title="t").to_dict()
    assert [row["text"] for row in next(iter(spec["datasets"].values()))] == ["+0.000", "\N{MINUS SIGN}0.100"]
    curves = pd.DataFrame(
        {"arm": ["a"], "tokens": [1e6], "loss": [3.0], "excess": [np.nan], "low": [3.0], "high": [3.1], "seeds": [1]}
    )
    line = curves_chart(curves, title="t", order=["a"]).to_dict()["layer"][1]
    assert line["encoding"]["y"]["field"] == "loss"


def test_the_board_holds_every_claim_once_and_the_strip_links_to_it(full):
    board = VerdictBoard(full.verdicts, counts=True)._repr_html_()
    strip = VerdictStrip(full.verdicts)._repr_html_()
    for claim in STUDY.claims:
        assert board.count(f'id="claim-{claim.id}"') == 1
        assert strip.count(f'claims.html#claim-{claim.id}"') == 1
    assert strip.count("mx-primary") == 6 and set(SHORT) == set(VERDICTS)
    few = VerdictBoard(full.verdicts_on("H1"))._repr_html_()
    assert "claim-h1-wgrad" in few and "claim-h3-h16" not in few
    with pytest.raises(UserError, match="question 'H9' is unknown; known: H1, "):
        full.verdicts_on("H9")


def test_a_summary_names_effects_and_evidence(full, empty):
    summary = Summary(full, "Which?", ["h3-h16", "p2-top1"], ["main", "ladder"])
    assert [text.split(",")[0] for _, text in summary.answers] == ["holds", full.verdict("p2-top1").verdict]
    assert "nats" in summary.answers[0][1] and "nats" not in summary.answers[1][1]
    assert "0 of 63 runs of 9.7 M weights on 195 M tokens" in summary.evidence and "29.5 M weights" in summary.evidence
    assert Summary(empty, "Which?", ["h3-h16"]).answers[0][1] == "not run"
    assert "Which?" in summary._repr_html_() and "Which?" in repr(summary)
    with pytest.raises(UserError, match="h9"):
        repr(Summary(full, "Which?", ["h9"]))
