"""What a verdict says besides its effect: rules that came after the records, reconstructions, stalled arms, whose claim."""

from dataclasses import replace

import pytest

from mxfp4.analysis import published
from mxfp4.analysis.claims import judge_all, load_ledger
from mxfp4.pages.claims_board import Board, decided_by
from mxfp4.studies.store import Store
from tests.fakes.studies import SMALL, config, fill, probe_rows, put

LEDGER = {c.id: c for c in load_ledger()}


def verdict(claim_id, store, **changes):
    (found,) = judge_all([replace(LEDGER[claim_id], **changes)], store.load())
    return found


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "runs")


def test_a_rule_chosen_after_the_records_never_holds(store):
    arms = {"mxfp4+2d+hh16": 1.1, "mxfp4+h16": 1.3}
    fill(store, arms)
    v = verdict("two-sided-both", store)
    assert v.verdict == "suggested by these records" and v.reason == "suggested when below 0 nats"
    assert v.to_dict()["posthoc"] is True and "chosen after records were seen" in v.to_dict()["notes"][0]
    assert "It is suggested when that is below" in decided_by(v)
    assert (
        "rule was chosen after records were seen" in Board([v])._repr_html_()
        and "mx-v-posthoc" in Board([v])._repr_html_()
    )
    assert verdict("two-sided-both", store, posthoc=False).verdict == "holds"
    other = Store(store.root / "other")
    fill(other, {"mxfp4+2d+hh16": 1.3, "mxfp4+h16": 1.1})
    assert verdict("two-sided-both", other).verdict == "contradicted by these records"
    small = Store(store.root / "small")
    fill(small, arms, model=SMALL)
    assert verdict("two-sided-both", small).verdict == "not tested at this scale"


def test_the_claims_whose_rule_came_after_the_records():
    marked = {c.id for c in LEDGER.values() if c.posthoc}
    assert marked == {
        "h2-sr",
        "h2-rht",
        "h2-sr-cost",
        "two-sided-both",
        "explanation-sr-error",
        "explanation-rht-error",
    }


def test_a_net_win_asks_for_the_size_that_its_overhead_asks_for(store):
    assert LEDGER["h4-net"].needs == LEDGER["table1-h16"].needs
    fill(store, {"fp8": 1.0, "mxfp4+h16": 1.05})
    assert verdict("h4-net", store).verdict == verdict("table1-h16", store).verdict == "not tested at this scale"


def test_whose_explanation_is_whose():
    own = [c for c in LEDGER.values() if c.figure == "explanation"]
    press = [c for c in LEDGER.values() if c.figure == "press/explanation"]
    assert {c.paper for c in own} == {"P1"} and {c.arguments["metric"] for c in own} == {"error"}
    assert {c.paper for c in press} == {"press"} and {c.arguments["metric"] for c in press} == {"pattern_next"}
    assert {c.published.mark for c in press} == {"press"}


def test_p1s_explanation_is_about_the_size_of_the_error(store):
    rows = probe_rows("error", {"mxfp4": 0.16, "mxfp4+sr": 0.22, "mxfp4+rht16": 0.14})
    put(store, config("bf16", probe_steps=(100, 500)), probes=rows)
    assert verdict("explanation-sr-error", store).verdict == "suggested by these records"
    assert verdict("explanation-rht-error", store).verdict == "contradicted by these records"


def test_every_claim_that_judges_ti2d_says_that_it_is_a_reconstruction(store):
    for claim in LEDGER.values():
        assert (published.RECONSTRUCTION in claim.notes) == any(a.startswith("ti2d") for a in claim.arms), claim.id
    fill(store, {"ti2d": 1.0, "ti2d-no-qk8": 1.1})
    v = verdict("p2-qk8", store)
    assert "reconstruction of P2" in Board([v])._repr_html_() and published.RECONSTRUCTION in v.to_dict()["notes"]
    assert published.reconstruction_note(["mxfp4", "ti2d+hh16"]) and not published.reconstruction_note(["mxfp4+2d"])


def test_an_arm_that_stalled_is_named_beside_its_effect(store):
    fill(store, {"bf16": 1.0, "ti2d": 1.1})
    for seed in range(3):
        put(store, config("ti2d-no-sr", seed), flat=5.0)
    v = verdict("p2-sr", store)
    assert v.verdict == "holds" and "ti2d-no-sr stalled in seed 0, 1, 2" in v.effect.note
