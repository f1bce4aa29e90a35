"""Verdicts: from made-up records, every one of them; and the ledger, its checks and the book's own."""

import json
import math
from dataclasses import replace

import pytest
import yaml

from mxfp4 import cli
from mxfp4.analysis import published
from mxfp4.analysis.claims import VERDICTS, decide, effect_text, judge_all, ledger_path, load_ledger, rule_text
from mxfp4.analysis.effect import Effect
from mxfp4.analysis.metrics import AT
from mxfp4.directories import project_dir
from mxfp4.errors import UserError
from mxfp4.layers.recipe import recipe
from mxfp4.pages.claims_board import Board, decided_by
from mxfp4.studies.scales import SCALES
from mxfp4.studies.store import Store
from tests.fakes.studies import BIG, SMALL, config, fill, probe_rows, put

LEDGER = {c.id: c for c in load_ledger()}
REAL = {"fp8": 1.0, "mxfp4-fprop-dgrad": 1.1}


def verdict(claim_id, store, **changes):
    (found,) = judge_all([replace(LEDGER[claim_id], **changes)], store.load())
    return found


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "runs")


def test_holds(store):
    v = verdict("h1-wgrad", fill(store, {**REAL, "mxfp4": lambda s: 1.25 + 0.01 * s}))
    assert v.verdict == "holds" and v.effect.low > 0.1 and v.effect.seeds == (0, 1, 2) and v.study.scale == "gpu"
    assert v.reason == "holds when above 0 % of fp8's tokens"


def test_does_not_hold(store):
    v = verdict("h1-wgrad", fill(store, {**REAL, "mxfp4": 1.05}))
    assert v.verdict == "does not hold" and v.effect.high < 0


def test_an_interval_across_the_rule_is_undecided(store):
    v = verdict("h1-wgrad", fill(store, {**REAL, "mxfp4": lambda s: (1.05, 1.1, 1.2)[s]}))
    assert v.verdict == "undecided" and v.effect.low < 0 < v.effect.high


def test_a_small_model_is_not_a_test_but_its_effect_is_shown(store):
    v = verdict("h1-wgrad", fill(store, {**REAL, "mxfp4": 1.25}, model=SMALL, scale="cpu"))
    assert v.verdict == "not tested at this scale" and v.effect.low > 0.1
    assert "20 M parameters (here" in v.reason


def test_few_tokens_and_other_hardware_are_no_test(store):
    v = verdict("h1-wgrad", fill(store, {**REAL, "mxfp4": 1.25}, batch_size=1))
    assert v.verdict == "not tested at this scale" and "19 M tokens (here 1.02 M)" in v.reason
    fill(store, {"mxfp4+h16": 1.0, "mxfp4+h32": 1.0})
    v = verdict("h16-h32", store)
    assert v.verdict == "not tested at this scale" and v.reason == "needs native FP4 (here emulated)"
    assert v.effect.value == 1


def test_one_seed_only(store):
    fill(store, {**REAL, "mxfp4": 1.25}, seeds=(0,))
    v = verdict("h1-wgrad", store)
    assert v.verdict == "not tested at this scale" and v.reason == "needs 3 seeds (here 1)" and v.effect.value > 0.1
    v = verdict("h1-wgrad", store, needs={"seeds": 1})
    assert v.verdict == "not tested at this scale" and "no interval" in v.reason


def test_missing_arms_are_named(store):
    v = verdict("h1-wgrad", fill(store, REAL))
    assert v.verdict == "no records" and v.reason == "not run: mxfp4" and v.effect is None
    assert verdict("h1-wgrad", Store(store.root / "empty")).verdict == "no records"


def test_arms_without_a_shared_seed_have_no_effect(store):
    fill(store, {"fp8": 1.0, "mxfp4-fprop-dgrad": 1.1}, seeds=(0, 1, 2))
    fill(store, {"mxfp4": 1.2}, seeds=(3, 4, 5))
    v = verdict("h1-wgrad", store)
    assert v.effect is None and v.verdict in ("undecided", "not tested at this scale") and "does not reach" in v.reason


def test_a_run_that_was_not_probed_is_no_record(store):
    fill(store, {"bf16": 1.0})
    v = verdict("p2-mismatch", store)
    assert v.verdict == "no records" and "no probe of scale_changes" in v.reason


def test_divergence_decides(store):
    fill(store, {**REAL, "mxfp4+sr": math.inf, "mxfp4": math.inf, "mxfp4+h16": 1.08})
    v = verdict("h2-sr", store, posthoc=False)
    assert v.verdict == "holds" and v.effect.value == 0 and "diverged in seed 0, 1, 2" in v.effect.note
    assert verdict("h1-wgrad", store).verdict == "holds"  # a bound from below is above zero
    v = verdict("h3-loss", store)
    assert v.verdict == "holds" and v.effect.low == -math.inf and v.effect.high < 0
    v = verdict("h2-sr-cost", store)
    assert v.effect is None and v.verdict == "undecided"  # both arms are gone: neither is worse


def test_a_converging_arm_refutes_that_it_does_not(store):
    fill(store, {"fp8": 1.0, "mxfp4+sr": 1.2})
    assert verdict("h2-sr", store, posthoc=False).verdict == "does not hold"


def test_convergence_is_asked_at_two_thirds_of_fp8s_budget(store):
    """An arm that needs 1.6 times FP8's tokens passed when it was asked at half of the budget; now it fails."""
    fill(store, {"fp8": 1.0, "mxfp4+sr": 1.6, "mxfp4+rht16": 1.4})
    assert LEDGER["h2-sr"].arguments["at"] == LEDGER["h2-rht"].arguments["at"] == pytest.approx(2 / 3, abs=1e-3)
    assert verdict("h2-sr", store, posthoc=False).verdict == "holds"
    assert verdict("h2-sr", store, posthoc=False, arguments={"arm": "mxfp4+sr", "at": 0.5}).verdict == "does not hold"
    assert verdict("h2-rht", store, posthoc=False).verdict == "does not hold"


def test_partly_converging_is_undecided(store):
    fill(store, {"fp8": 1.0, "mxfp4+sr": lambda s: math.inf if s == 2 else 1.2})
    v = verdict("h2-sr", store)
    assert v.verdict == "undecided" and "nats above fp8 passes" in v.effect.note


def test_the_study_that_decides_is_taken_not_the_largest(store):
    arms = {**REAL, "mxfp4": 1.25}
    fill(store, arms)  # decides
    fill(store, {**REAL, "mxfp4": 1.05}, seeds=(0,), steps=4000)  # larger, one seed
    v = verdict("h1-wgrad", store)
    assert v.verdict == "holds" and v.study.tokens == config("fp8").tokens


def test_of_studies_that_all_fall_short_the_one_that_lacks_least_is_shown(store):
    fill(store, {"fp8": 1.0, "mxfp4": 1.26})  # three seeds, too small a model
    fill(store, {"fp8": 1.0, "mxfp4": 1.05}, seeds=(0,), steps=4000)  # larger, and one seed besides
    v = verdict("table1-all", store)
    assert v.study.tokens == config("fp8").tokens and v.effect.seeds == (0, 1, 2)
    assert v.reason.startswith("needs 1 B parameters") and "seeds" not in v.reason


def test_seeds_that_suggested_a_claim_do_not_test_it(store):
    arms = {"mxfp4+rceil+sr-grad": 1.1, "mxfp4+rceil": 1.1, "ti2d": 1.1, "ti2d-no-sr": 1.5}
    fill(store, arms, seeds=(0,))
    v = verdict("sr-by-shape", store)
    assert v.verdict == "no records" and "in a seed other than 0, which suggested the claim" in v.reason
    fill(store, arms, seeds=(1, 2))
    v = verdict("sr-by-shape", store)
    assert v.verdict == "holds" and v.effect.seeds == (1, 2)


def test_arms_of_different_studies_are_not_compared(store):
    fill(store, REAL)
    fill(store, {"mxfp4": 1.25}, corpus="other")
    assert verdict("h1-wgrad", store).verdict == "no records"


def test_sizes_need_a_large_model_and_the_published_range(store):
    fill(store, {"fp8": 1.0, "mxfp4": 1.26})
    assert verdict("table1-all", store).verdict == "not tested at this scale"
    assert verdict("table1-all", store, needs={"seeds": 3}).verdict == "holds"
    assert "0.173 and 0.405" in rule_text(LEDGER["table1-all"])
    fill(Store(store.root / "b"), {"fp8": 1.0, "mxfp4": 1.05})
    assert verdict("table1-all", Store(store.root / "b"), needs={"seeds": 3}).verdict == "does not hold"


def test_properties_of_the_format_are_decided_at_any_scale(store):
    small = config("bf16", model=SMALL, scale="cpu", probe_steps=(100, 500))
    rows = probe_rows("scale_changes", {"mxfp4": 0.3}, gemm="", tensor="w")
    rows += probe_rows("changes", {"mxfp4+2d": 0.0}, gemm="", tensor="w", spread=0)
    put(store, small, probes=rows)
    assert verdict("p2-mismatch", store).verdict == "holds"
    assert verdict("p2-consistent", store).verdict == "holds"


@pytest.mark.parametrize(
    "holds, low, high, expected",
    [
        ({"above": 0}, 0.1, math.inf, "holds"),
        ({"above": 0}, 0, 1, "undecided"),
        ({"above": 0}, -2, 0, "does not hold"),
        ({"below": 0}, -math.inf, -0.1, "holds"),
        ({"at_most": 0}, 0, 0, "holds"),
        ({"at_most": 0}, 0, 1, "undecided"),
        ({"at_least": 0.9}, 0.9, 1, "holds"),
        ({"between": [1, 2]}, 1, 2, "holds"),
        ({"between": [1, 2]}, 2.1, 3, "does not hold"),
        ({"above": 0}, math.nan, math.nan, "undecided"),
    ],
)
def test_rules(holds, low, high, expected):
    claim = replace(LEDGER["h1-wgrad"], holds=holds)
    assert decide(claim, Effect(0.0, low, high, "share", (0, 1))) == expected


def write(tmp_path, change):
    entry = {
        "id": "x",
        "paper": "P1",
        "claim": "C.",
        "figure": "h1",
        "metric": "overhead",
        "arguments": {"arm": "mxfp4"},
        "holds": {"above": 0},
        "needs": "any",
        "scale_note": "s",
        "chapter": "ablation",
    }
    data = {"needs": {"any": {"seeds": 1}}, "claims": [entry]}
    change(data, entry)
    path = tmp_path / "claims.yml"
    path.write_text(yaml.safe_dump(data))
    return path


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda d, e: d["claims"].append(dict(e)), "claim 'x' is in the ledger twice"),
        (lambda d, e: e.update(metrc="overhead"), "unknown field 'metrc'; known: id, paper"),
        (lambda d, e: e.update(metric="overhed"), "unknown metric 'overhed'; known: overhead"),
        (lambda d, e: e["arguments"].update(att=1), "no argument 'att'; known: arm"),
        (lambda d, e: e.update(figure="h9"), "published figure 'h9' is not known; known: "),
        (lambda d, e: e.update(holds={"over": 0}), "is not one rule; known: above"),
        (
            lambda d, e: e.update(holds={"within_factor": 2}),
            "needs a factor above 1 and a positive published figure",
        ),
        (lambda d, e: e.update(needs="much"), "needs 'much' is not known; known: any"),
        (lambda d, e: e.update(needs={"sedes": 3}), "unknown need 'sedes'; known: parameters"),
        (lambda d, e: e.update(paper="P3"), "paper 'P3' is not known; known: P1, press, P2"),
        (lambda d, e: e.update(posthoc="yes"), "claim 'x': posthoc='yes' is not true or false"),
        (lambda d, e: e.pop("chapter"), "lacks chapter"),
        (lambda d, e: d.pop("claims"), "has no list `claims`"),
    ],
)
def test_a_wrong_ledger_is_refused_in_one_line(tmp_path, change, said):
    with pytest.raises(UserError, match=said) as error:
        load_ledger(write(tmp_path, change))
    assert "\n" not in str(error.value)


def test_a_ledger_that_is_not_there_or_not_yaml(tmp_path):
    with pytest.raises(UserError, match="cannot read the ledger"):
        load_ledger(tmp_path / "none.yml")
    (tmp_path / "bad.yml").write_text("claims: [")
    with pytest.raises(UserError, match="is not YAML at line"):
        load_ledger(tmp_path / "bad.yml")


def test_the_books_ledger():
    for claim in LEDGER.values():
        for arm in claim.arms:
            recipe(arm)
        assert (project_dir() / "book" / f"{claim.chapter}.md").is_file() or claim.chapter in toc(), claim.id
        assert claim.claim.endswith(".") and claim.scale_note.endswith("."), claim.id
    wanted = set().union(*(set(c.arms) for c in LEDGER.values()))
    from mxfp4.studies.plans import plan

    assert wanted <= {c.recipe for c in plan("all", SCALES["gpu"]).arms}, "a claim needs an arm that no plan trains"


def test_the_gpu_scale_is_large_enough_for_the_claims_it_is_to_decide():
    """Of every need that asks for a size short of the papers' own, some arms of scale gpu have it."""
    from mxfp4.studies.plans import plan

    arms = plan("all", SCALES["gpu"]).arms
    for name in ("trend", "known"):
        needs = yaml.safe_load(ledger_path().read_text())["needs"][name]
        fitting = [
            c for c in arms
            if (c.corpus == "synthetic") == (needs.get("source") == "synthetic")
            and bool(c.model.n_experts) == (needs.get("model") == "experts")
            and c.model.n_params_non_embedding() >= needs["parameters"] and c.tokens >= needs["tokens"]
        ]  # fmt: skip
        assert len({c.seed for c in fitting}) >= needs["seeds"], name


def toc():
    return [c["file"] for c in yaml.safe_load((ledger_path().parent / "_toc.yml").read_text())["chapters"]]


def test_command(store, monkeypatch, capsys):
    monkeypatch.setenv("MXFP4_RUNS", str(store.root))
    fill(store, {**REAL, "mxfp4": 1.25, "mxfp4+sr": math.inf})
    assert cli.main(["claims", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    by_id = {d["id"]: d for d in data}
    assert len(data) == len(LEDGER) and {d["verdict"] for d in data} <= set(VERDICTS)
    assert by_id["h1-wgrad"]["verdict"] == "holds" and len(by_id["h1-wgrad"]["study"]["records"]) == 9
    assert by_id["h1-wgrad"]["published"]["mark"] == "P1" and by_id["h1-wgrad"]["effect"]["seeds"] == [
        0,
        1,
        2,
    ]
    assert cli.main(["claims", "--id", "h2-sr", "--scale", "gpu"]) == 0
    out = capsys.readouterr().out
    assert "SUGGESTED BY THESE RECORDS" in out and "1 claims: 1 suggested by these records" in out and "diverged" in out
    assert "note: The rule was chosen after records were seen" in out
    assert cli.main(["claims", "--id", "h7"]) == 1 and "'h7' is not in the ledger; known" in capsys.readouterr().err
    assert cli.main(["claims", "--scale", "moon"]) == 1 and "scale 'moon' is not known" in capsys.readouterr().err


def test_board_shows_every_claim_escaped(store):
    fill(store, {**REAL, "mxfp4": 1.25, "mxfp4+sr": math.inf})
    verdicts = judge_all(LEDGER.values(), store.load())
    verdicts[0] = replace(verdicts[0], reason="<script>")
    page = Board(verdicts)._repr_html_()
    assert all(f'id="claim-{name}"' in page for name in LEDGER) and "<script>" not in page and "&lt;script&gt;" in page
    assert page.count('<div class="mx-claim"') == len(LEDGER)


def test_effects_are_printed_with_their_unit():
    assert effect_text(Effect(0.084, 0.079, math.inf, "share", (0,))) == "+8.4 % [+7.9, ∞]"
    assert effect_text(Effect(0.0213, math.nan, math.nan, "nats", (0,))) == "+0.0213 nats"
    assert effect_text(Effect(-4.2e-5, -5e-5, -3e-5, "share", (0,))) == "-0.0042 % [-0.0050, -0.0030]"
    assert effect_text(Effect(1 / 3, 0, 1, "seeds", (0, 1, 2))) == "1 of 3 seeds converge"
    assert effect_text(Effect(1.12, 1.1, 1.13, "ratio", (0,))) == "1.120x [1.100, 1.130]"
    assert effect_text(None) == "none"
    part = Effect(0.4, 0.3, 0.5, "part", (0, 1, 2), of="of the gap")
    assert effect_text(part) == "40.0 % [30.0, 50.0] of the gap"
    assert effect_text(part, unit=False) == "40.0 [30.0, 50.0]"


def test_a_percentage_says_what_it_is_of(store):
    """On the board, in the verdict's rule and in the text of every claim whose effect is a percentage."""
    names = sorted({a for c in LEDGER.values() for a in c.arms})
    slowdowns = {name: 1.3 if name == "mxfp4" else 1.0 + 0.01 * i for i, name in enumerate(names)}
    fill(store, slowdowns, seeds=(1, 2))
    seen: dict[str, list] = {name: [] for name in names}  # seed 0 is probed for all that claims ask for
    for a in (c.arguments for c in LEDGER.values() if c.metric.startswith("probe")):
        where = {"gemm": a.get("gemm", ""), "tensor": a["tensor"]}
        seen[a["probed"]] += probe_rows(a["metric"], {a.get("recipe", a["probed"]): 0.2}, **where)
        other = a.get("probed_against", a["probed"])
        recipe_ = a.get("against_recipe", a.get("recipe", other))
        if (other, recipe_) != (a["probed"], a.get("recipe", a["probed"])):
            seen[other] += probe_rows(a["metric"], {recipe_: 0.1}, **where)
    for name, rows in seen.items():
        put(store, config(name, 0), slowdown=slowdowns[name], probes=rows)
    verdicts = {v.claim.id: v for v in judge_all(LEDGER.values(), store.load())}
    percent = [v for v in verdicts.values() if v.effect is not None and v.effect.unit in ("share", "part")]
    metrics = {"overhead", "overhead_difference", "remaining_gap", "published_order", "perplexity_increase"}
    assert metrics | {"probe", "probe_difference"} == {v.claim.metric for v in percent}
    for v in percent:
        assert v.effect.of.startswith("of "), v.claim.id
        assert effect_text(v.effect).endswith(v.effect.of) and v.effect.of in rule_text(v.claim, v.effect), v.claim.id
    assert verdicts["fig2-coincide"].effect.of == "of mxfp4's gap to fp8"
    assert verdicts["fig2-coincide"].reason.endswith("of mxfp4's gap to fp8")
    order = verdicts["table1-order"]
    assert order.effect.of == "of the 13 pairs that Table 1 orders"
    assert order.effect.of in Board([order])._repr_html_() and order.to_dict()["effect"]["of"] == order.effect.of
    assert not verdicts["fig2-rough"].effect and not verdicts["p2-2d"].effect.of, "a difference of losses is of nothing"


def test_published_figures_have_a_source_and_a_mark():
    for name, figure in published.FIGURES.items():
        assert figure.source and figure.mark in published.MARKS and figure.text, name
    with pytest.raises(UserError, match="mark 'P9' is not known"):
        published.Figure("x", "y", "P9")


def test_what_a_metric_assumes_is_said_and_whose_step_speed_it_is(store):
    fill(store, {"fp8": 1.0, "mxfp4+h16": 1.08})
    v = verdict("h4-net", store, needs={"seeds": 3})
    assert "reference=fp8" in decided_by(v) and f"at={AT}" in decided_by(v)
    assert v.effect.of == "at P1's step speed" and v.reason == "holds when above 1x at P1's step speed"


def test_claims_of_one_kind_of_study_are_not_decided_by_another(store):
    """A larger mixture of experts or a synthetic source never speaks for the dense model on text, nor the other way."""
    few = {"parameters": 20_000_000, "tokens": 1, "seeds": 3}
    arms = {"bf16": 1.0, "ti2d": 1.001, "fp8": 1.0, "mxfp4": 1.25, "mxfp4-fprop-dgrad": 1.1}
    fill(store, arms, model=replace(BIG, n_experts=8))
    assert (
        verdict("p2-experts", store, needs={**few, "model": "experts"}).verdict == "holds"
        and verdict("p2-perplexity", store, needs=few).verdict == "no records"
    )
    fill(store, arms, corpus="synthetic")
    assert verdict("h1-known-entropy", store).verdict == "holds" and verdict("h1-wgrad", store).verdict == "no records"
    fill(store, {"ti2d": 1.3, "bf16": 1.0})
    assert verdict("p2-experts", store, needs={**few, "model": "experts"}).verdict == "holds"
    assert verdict("p2-perplexity", store, needs=few).verdict == "does not hold"


def test_what_rounding_leaves_of_nothing_is_printed_as_nothing():
    assert effect_text(Effect(0.0, -5e-16, 5e-16, "nats", (0, 1))) == "+0.0000 nats [+0.0000, +0.0000]"
    assert effect_text(Effect(-1e-17, -1e-17, 0.002, "nats", (0, 1))) == "+0.0000 nats [+0.0000, +0.0020]"
    assert effect_text(Effect(1e36, -1.0, 1e120, "share", (0, 1))) == "+1.00e+38 % [-100.0, +1.00e+122]"
