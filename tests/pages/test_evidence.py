"""Frames, charts and notes of the evidence chapters; the recomputed MLPerf figures; the bias of stochastic
rounding."""

import math
from dataclasses import replace

import pandas as pd
import pytest

from mxfp4 import cli
from mxfp4.analysis import metrics, published
from mxfp4.analysis.claims import judge_all, load_ledger
from mxfp4.analysis.study import studies
from mxfp4.diagnostics.rounding_bias import PRESCALED, bias_summary, sr_bias_frame
from mxfp4.errors import UserError
from mxfp4.pages import charts, evidence_charts, frames
from mxfp4.pages.chapters import mlperf as logs
from mxfp4.pages.chapters import probe_findings
from mxfp4.pages.charts import render
from mxfp4.pages.evidence import NAMED, Partial, Sources, gather, gather_each, partial_of
from mxfp4.studies.arm_queue import Summary
from mxfp4.studies.plans import LAPTOP, PLANS
from mxfp4.studies.scales import SCALES
from mxfp4.studies.store import Store
from mxfp4.text import count
from tests.fakes.studies import config, fill, put

ARMS = {"bf16": 0.99, "fp8": 1.0, "mxfp4-fprop": 1.08, "mxfp4": 1.26, "mxfp4+h16": lambda s: 1.08 + 0.01 * s,
        "mxfp4+sr": math.inf, "mxfp4+rht16": 1.8}  # fmt: skip


@pytest.fixture
def study(tmp_path):
    (found,) = studies(fill(Store(tmp_path), ARMS).load())
    return found


def test_table1_beside_ours(study):
    frame = frames.table1_frame(study).set_index(["scope", "stabiliser"])
    plain, sr = frame.loc["Fprop + Dgrad + Wgrad", "none"], frame.loc["all three", "stochastic rounding"]
    assert plain["P1"] == "26-27 %" and plain["at 70 %"].startswith("+26")
    assert sr["P1"] == "does not converge" and sr["at 85 %"].startswith("more than +1")
    assert sr["outcome"] == "3 diverged (step 500, 500, 500)" and sr["nats over FP8"].startswith("∞")
    assert frame.loc["Fprop + Dgrad", "none"]["at 70 %"] == "–"  # not run


def test_curves_end_where_an_arm_diverged(study):
    frame = frames.mean_curves(study, ["fp8", "mxfp4+sr"])
    last = frame.groupby("arm")["tokens"].max() / study.tokens
    assert last["fp8"] == 1 and last["mxfp4+sr"] == 0.5
    assert (frame["low"] <= frame["loss"]).all() and (frame["loss"] <= frame["high"]).all()
    assert (frames.mean_curves(study, ["fp8"], after=0.6)["tokens"] >= 0.6 * study.tokens).all()
    with pytest.raises(UserError, match="none of the arms has records: ti2d"):
        frames.mean_curves(study, ["ti2d"])


def test_a_mean_does_not_jump_when_one_seed_ends(tmp_path):
    store = fill(Store(tmp_path), {"mxfp4": lambda s: math.inf if s == 2 else 1.0})
    frame = frames.mean_curves(studies(store.load())[0], ["mxfp4"])
    assert set(frame["seeds"]) == {3} and frame["tokens"].max() == config("mxfp4").tokens / 2


def test_differences_are_within_a_seed(study):
    frame = frames.difference_curves(study, ["mxfp4"], "fp8")
    assert set(frame["arm"]) == {"mxfp4"} and (frame["difference"] > 0).all()
    assert (frame["high"] - frame["low"]).max() < 1e-9  # the seeds' own levels cancel


def test_overhead_points_keep_bounds_apart(study):
    frame = frames.overhead_points(study).set_index(["label", "whose"])
    assert not frame.loc[("all, SR", "P1"), "reached"]
    assert not frame.loc[("all, random H16", "ours"), "reached"]
    assert frame.loc[("+ Wgrad: all three", "ours"), "value"] == pytest.approx(26, abs=1)


def test_every_chart_is_valid_and_has_a_title(study, tmp_path):
    table, results = published.mlperf_curves(), published.mlperf_results()
    store = fill(
        Store(tmp_path / "rules"),
        {"bf16": 1, "mxfp4": 1.1, "mxfp4+sr": 1.2, "mxfp4+rceil": 1.1, "mxfp4+rceil+sr": math.inf},
    )
    frame = frames.disagreement_frame(studies(store.load())[0])
    assert len(frame) == 4 and frame["difference"].max() == math.inf
    made = [
        evidence_charts.learning_curves(
            frames.mean_curves(study, ["fp8", "mxfp4"]), y="loss", title="T", y_title="nats"
        ),
        evidence_charts.overheads(frames.overhead_points(study), title="T", subtitle="S"),
        evidence_charts.rule_by_rounding(
            frame, title="T", rules=frames.RULES, roundings=list(frames.ROUNDINGS.values()), reference="bf16"
        ),
        evidence_charts.sr_bias(sr_bias_frame(["rceil"], points=4, draws=2), title="T", rules=["rceil"]),
        evidence_charts.mlperf(table, 3.3, logs.crossings(table, 3.3), title="T"),
        logs.break_even_chart(results),
    ]
    for chart in made:
        assert chart.to_dict()["title"]


def test_mlperf_arithmetic():
    table, results = published.mlperf_curves(), published.mlperf_results()
    cross, grid = logs.crossings(table, published.TARGET), logs.grid_samples(table, published.TARGET)
    # by hand: FP8 3.318 -> 3.291 between evaluations 13 and 14, MXFP4 3.315 -> 3.291 between 14 and 15
    # FP8's evaluations come after 12,256, 24,544, ... sequences
    assert list(table[table["arm"] == "FP8"]["samples"][:2]) == [12256, 24544]
    assert cross["FP8"] == pytest.approx(12256 + 12288 * (12 + 0.018 / 0.027))
    assert cross["MXFP4 + H16"] == pytest.approx(12288 * (14 + 0.015 / 0.024))
    assert grid == {"FP8": 12256 + 13 * 12288, "MXFP4 + H16": 15 * 12288}
    # both sets' samples are plain means of ten runs that end on these grids: four and six, eight and two
    assert results.set_index("arm")["samples"].to_dict() == {
        "FP8": round((4 * grid["FP8"] + 6 * (grid["FP8"] + 12288)) / 10),
        "MXFP4 + H16": round((8 * grid["MXFP4 + H16"] + 2 * (grid["MXFP4 + H16"] + 12288)) / 10),
    }
    assert logs.sample_overhead(results) == pytest.approx(0.0413, abs=1e-4)
    assert logs.step_speed(results) == pytest.approx(1.193, abs=1e-3)
    speed = logs.speed_frame(results)
    assert speed["end_to_end"].iloc[0] == pytest.approx(1.21 / 1.08) and speed["stated"].iloc[-1] == "1.14x by minutes"
    press = speed[speed["mark"] == "press"]
    assert list(press["arithmetic"]) == ["1.20 / 1.09 = 1.10", "1.20 / 1.08 = 1.11"]
    end = published.figure("press/end-to-end")
    assert (end.low, end.high) == (1.09, 1.10) and "99.97" in published.MEANS_NOTE and "12,256" in published.MEANS_NOTE
    stated = published.figure("press/overhead")
    assert (stated.low, stated.high, stated.text) == (0.08, 0.09, "8-9 %")
    drawn = logs.break_even_chart(results).layer[2].data
    assert list(drawn["source"]) == ["P1, Table 2", "press article on P1", "press article on P1", "MLPerf logs"]
    quantum = logs.overhead_frame(table, results, 3.3)["overhead"].iloc[0]
    assert 0.065 < quantum < 0.07
    assert len(logs.overhead_frame(table, results, 3.0)) == 4  # neither curve gets there
    assert logs.perplexity_frame(3.3)["perplexity"].iloc[0] == pytest.approx(math.exp(3.3))
    one = logs.uncertainty_frame(results).iloc[0]
    assert one["low"] < one["value"] < one["high"]


def test_sr_is_biased_only_where_a_rule_clips():
    summary = bias_summary(sr_bias_frame(["floor", "even", "ceil", "rceil", PRESCALED], points=17, draws=64)).set_index(
        "rule"
    )
    # floor: values in (6, 8) round to 6, so the worst bias is toward 6/8 - 1; even: to 6/7 - 1
    assert summary.loc["floor", "worst"] == pytest.approx(100 * (6 / 7.7647 - 1), abs=0.01)
    assert -15 < summary.loc["even", "worst"] < -10
    assert (summary.loc[["ceil", "rceil", PRESCALED], "share"] == 0).all()
    with pytest.raises(UserError, match="scale rule 'up' is not known"):
        sr_bias_frame(["up"])


def test_gather_says_what_is_missing(tmp_path):
    store = Store(tmp_path)
    c = replace(SCALES["gpu"].config("bf16", 0), corpus="prose")
    put(store, c)
    evidence = gather("table1", "gpu", store=store)
    assert (
        evidence.arms == ["bf16"] and not evidence.substitute and len(evidence.missing) == len(evidence.plan.arms) - 1
    )
    page = evidence._repr_html_()
    assert "mxfp4 train --plan table1 --scale gpu" in page and "bf16-s0-" in page and "Partial" in page
    with pytest.raises(UserError, match="no records of plan p2 at scale mi355x: mxfp4 train --plan p2 --scale mi355x"):
        gather("p2", "mi355x", store=store).need()


def test_arms_without_a_run_are_named_and_those_with_one_are_not(tmp_path):
    store = Store(tmp_path)
    for recipe in ("bf16", "fp8"):
        put(store, SCALES["gpu"].config(recipe, 0))
    page = gather("others", "gpu", store=store)._repr_html_()
    assert "22 of 24 runs are missing" in page and "<code>quartet</code>" in page and "<code>fp8</code>" not in page
    partial = Partial(40, 60, "c", tuple(f"arm{i}" for i in range(NAMED + 3)))
    assert f"arm{NAMED - 1}</code> and 3 more" in partial.text() and f"arm{NAMED}<" not in partial.text()


def test_a_study_of_text_does_not_count_for_the_other_settings_of_a_plan(tmp_path):
    store = Store(tmp_path)
    put(store, SCALES["gpu"].config("bf16", 0))
    whole = gather("all", "gpu", store=store)
    assert len(whole.missing) == len(whole.plan.arms) - 1


def test_sources_count_the_arms_that_verdicts_are_of(tmp_path):
    store = fill(Store(tmp_path), {"bf16": 1.0, "fp8": 1.0, "mxfp4": 1.2, "mxfp4+h16": 1.1, "ti2d": 1.0})
    claim = next(c for c in load_ledger() if c.id == "h3-loss")
    sources = Sources(judge_all([claim], store.load()))
    ((said, names),) = sources.names.items()
    assert "3 arms" in said and len(names) == 9 and not any(n.startswith(("ti2d", "bf16")) for n in names)


def test_gather_falls_back_to_other_settings_and_says_so(tmp_path):
    store = fill(Store(tmp_path), {"bf16": 1.0, "fp8": 1.0}, seeds=(0,))
    evidence = gather("table1", "gpu", store=store)
    assert (
        evidence.substitute and evidence.arms == ["bf16", "fp8"] and "not those of the plan" in evidence._repr_html_()
    )
    with pytest.raises(UserError, match="no records"):
        gather("table1", "gpu", store=store, steps=77).need()


def test_square_blocks_are_spoken_of_where_there_are_any():
    said = [
        probe_findings.square_blocks(pd.DataFrame({"arm": ["mxfp4", other]})) for other in ("mxfp4+2d", "mxfp4+2d+h16")
    ]
    assert said[0].startswith("Square blocks stand at zero") and said[1].startswith("No arm here has square blocks")


def test_an_arm_keeps_its_colour_where_fp8_is_not_drawn(study):
    arms = ["fp8", "mxfp4", "mxfp4+h16"]
    with_fp8 = evidence_charts.learning_curves(frames.mean_curves(study, arms), y="loss", title="T", y_title="nats")
    frame = frames.difference_curves(study, arms, "fp8")
    without = evidence_charts.learning_curves(frame, y="difference", title="T", y_title="nats")
    scales = [chart.to_dict()["layer"][0]["encoding"]["color"]["scale"] for chart in (with_fp8, without)]
    colours = [dict(zip(s["domain"], s["range"], strict=True)) for s in scales]
    assert "fp8" in colours[0] and colours[1] == {arm: colours[0][arm] for arm in arms[1:]}


def test_sources_without_records():
    assert "No records yet" in Sources([])._repr_html_()


def test_counts():
    assert [count(n) for n in (29_497_856, 1.47e9, 950, 61_440)] == ["29.5 M", "1.47 B", "950", "61.4 k"]


def test_plans_with_several_settings_give_a_study_each_and_none_stands_in(tmp_path):
    store, scale = Store(tmp_path), SCALES["gpu"]
    for setting in scale.settings_of("sizes")[1:]:
        put(store, scale.config("bf16", 0, **setting))
    small, own, large = gather_each("sizes", "gpu", store=store)
    assert small.study is None and own.has("bf16") and large.has("bf16") and not large.has("bf16", "fp8")
    assert own.study.parameters < large.study.parameters and not (own.substitute or large.substitute)
    assert "Not run yet at this scale" in small._repr_html_() and "--plan sizes --scale gpu" in small._repr_html_()
    whole = gather("sizes", "gpu", store=store)
    assert len(whole.plan.arms) == 45 and len(whole.missing) == 43 and whole.study is None
    assert not gather("synthetic", "gpu", store=store).has("bf16"), "text does not stand in for the source"


def test_a_laptop_trains_no_plan_that_was_not_asked_for(tmp_path):
    for name in ("others", "two-sided", "moe"):
        assert gather(name, "cpu", store=Store(tmp_path)).study is None
    assert not (tmp_path / "records").exists()


def test_a_page_says_where_its_runs_are_no_part_of_reproduce(tmp_path):
    """On a laptop `all` leaves the sizes out, so that a page of them stays partial after it."""
    store, cpu = Store(tmp_path), SCALES["cpu"]
    put(store, cpu.config("bf16", 0))  # the scale's own size, which table1 has
    parts = gather_each("sizes", "cpu", store=store)
    said = "Plan sizes is no part of <code>make reproduce</code> at scale cpu."
    assert said in partial_of(parts)._repr_html_() and said in gather("sizes", "cpu", store=store).partial.text()
    missing, own, _ = (part._repr_html_() for part in parts)
    assert said in missing and "Not run yet" in missing and said in own and "Partial" in own
    for name in ("sizes", "table1"):
        assert "no part of" not in partial_of(gather_each(name, "gpu", store=store))._repr_html_()


def test_the_help_of_a_plan_names_what_a_laptop_runs_unasked(capsys):
    with pytest.raises(SystemExit):
        cli.main(["train", "--help"])
    said = " ".join(capsys.readouterr().out.split()).replace("- ", "-")  # the help breaks lines at hyphens
    assert f"`make reproduce` runs: every plan of the scale, but at cpu {', '.join(LAPTOP)} alone)" in said
    assert f"{', '.join(name for name in PLANS if name != 'first')} or all" in said and "at mi355x: first" in said


def test_a_difference_far_beyond_the_others_stands_at_the_edge_with_its_size():
    spans = {"low": [0.0, 0.01, 0.01, 0.02, 1.6], "high": [0.02, 0.03, 0.05, 0.06, 1.8]}
    rows = {"arm": list("abcde"), "difference": [0.01, 0.02, 0.03, 0.04, 1.7], "text": "", "seeds": 1, "outcome": ""}
    frame = pd.DataFrame(rows | spans | {"model": "dense"})
    for chart in (
        evidence_charts.gaps(frame, title="T", unit="u"),
        evidence_charts.gaps_by(frame, "model", title="T", unit="u"),
    ):
        _, points, beyond = chart.layer
        assert list(points.data["difference"]) == [0.01, 0.02, 0.03, 0.04]
        assert list(beyond.data["label"]) == ["1.70 \u25b6"]
        assert beyond.data["difference"].max() == pytest.approx(0.06)
        assert chart.to_dict()["title"]["subtitle"] == [charts.CUT]
        render(chart, "a caption")
    assert evidence_charts.gaps(frame[:4], title="T", unit="u").to_dict()["title"] == "T"


def test_a_page_of_another_scale_trains_what_is_missing_when_asked(tmp_path, monkeypatch):
    small = replace(
        SCALES["cpu"], name="gpu", steps=4, warmup=1, eval_every=2, eval_sequences=2, probe_steps=(), settings={}
    )
    monkeypatch.setitem(SCALES, "gpu", small)
    asked = []
    monkeypatch.setattr("mxfp4.studies.runner.run_plan", lambda plan, store: asked.append(plan.arms) or Summary())
    assert gather("table1", "gpu", store=Store(tmp_path), recipes=["fp8"]).study is None and not asked
    assert gather("table1", "gpu", store=Store(tmp_path), recipes=["fp8"], train=True).study is None
    assert [[c.recipe for c in arms] for arms in asked] == [["fp8"] * len(small.seeds_of("table1"))]
    monkeypatch.setattr("mxfp4.studies.runner.run_plan", lambda plan, store: Summary(failed={"fp8-s0": "no luck"}))
    with pytest.raises(UserError, match="arm fp8-s0 failed: no luck"):
        gather("table1", "gpu", store=Store(tmp_path), recipes=["fp8"], train=True)


@pytest.mark.parametrize("corpus", ["c4:768-799", "megatron:/data/a,/data/b", "c4:toy"])
def test_runs_on_other_files_of_the_corpus_are_gone_on_with_there(tmp_path, corpus):
    """Other shards, Megatron's files, the toy; the toy gives way to real text."""
    store, scale = Store(tmp_path), SCALES["mi355x"]
    put(store, scale.on_corpus(corpus).config("fp8", 0, corpus=corpus), corpus="c4")
    found = gather("table1", "mi355x", store=store)
    assert found.arms == ["fp8"] and not found.substitute and "fp8-s0" not in found.missing
    assert found.command == f"mxfp4 train --plan table1 --scale mi355x --corpus {corpus}"
    if corpus == "c4:toy":
        put(store, scale.config("fp8", 0, corpus="c4:768-895"), corpus="c4")
        assert gather("table1", "mi355x", store=store).command.endswith("--corpus c4:768-895")
    put(store, scale.config("fp8", 0), corpus="c4")
    assert gather("table1", "mi355x", store=store).command == "mxfp4 train --plan table1 --scale mi355x"


def test_the_cost_of_sr_by_block_shape_is_of_pairs_that_were_run(tmp_path):
    store = Store(tmp_path)
    offsets = {"mxfp4": 0.1, "mxfp4+sr-grad": 0.15, "ti2d": 0.2, "ti2d-no-sr": 0.9, "mxfp4+rceil": 0.1}
    for arm, offset in offsets.items():
        put(store, config(arm), offset=offset)
    (study,) = studies(store.load())
    found = frames.sr_by_shape_frame(study).set_index("shape")["cost"].astype(float)
    assert found.round(2).to_dict() == {"1x32, even": 0.05, "32x32, rceil (P2's recipe)": -0.7}


def test_overheads_by_target_and_gaps(study):
    frame = frames.target_frame(study, ["fp8", "mxfp4", "mxfp4+h16", "mxfp4+sr", "ti2d"], ats=[0.3, 0.5, 0.95])
    mxfp4 = frame[frame["arm"] == "mxfp4"].set_index("at")["overhead"]
    assert mxfp4.index.to_list() == [30, 50], "at 95 % of the budget an arm that is 26 % slower has not got there"
    assert mxfp4.to_list() == pytest.approx([26, 26], abs=1)
    assert set(frame["arm"]) == {"mxfp4", "mxfp4+h16"}
    gaps = frames.gap_frame(study, ["bf16", "mxfp4", "mxfp4+sr", "ti2d"])
    assert list(gaps["arm"]) == ["mxfp4", "mxfp4+sr"] and gaps["difference"].iloc[1] == math.inf
    both = gaps.assign(model="dense")
    for chart in (
        evidence_charts.overhead_by_target(frame, title="T", reference="FP8"), evidence_charts.gaps(gaps, title="T", unit="u"),
        evidence_charts.gaps_by(both, "model", title="T", unit="u"),
    ):  # fmt: skip
        render(chart, "a caption")


def test_scatter_is_what_arm_and_seed_do_not_explain(tmp_path):
    store, noise = Store(tmp_path), {("fp8", 0): 0.02, ("mxfp4", 1): -0.03}
    for arm, offset in (("fp8", 0.0), ("mxfp4", 0.1), ("mxfp4+h16", 0.05)):
        for seed in range(2):
            put(store, config(arm, seed), offset=offset + noise.get((arm, seed), 0))
    put(store, config("mxfp4+sr", 0))  # lacks a seed
    (study,) = studies(store.load())
    noise, arms, seeds = frames.scatter(study)
    # differences of the two seeds: 0.02, 0.03, 0 around their mean; a run's variance is half of a difference's
    wanted = math.sqrt((0.0033333**2 + 0.0133333**2 + 0.0166667**2) / 2 / 2)
    assert (arms, seeds) == (3, 2) and noise.sd == pytest.approx(wanted, rel=1e-3)
    text = frames.scatter_text(study)
    assert f"{noise.sd:.4f} nats" in text and "takes 8 seeds" in text and "variance is of" not in text
    put(store, config("mxfp4+2d", 0), offset=0.3)
    put(store, config("mxfp4+2d", 1))
    (study,) = studies(store.load())
    most, share = frames.scatter(study)[0].most
    assert (
        most == "mxfp4+2d"
        and share > 0.7
        and f"{share:.0%} of that variance is of `mxfp4+2d`." in frames.scatter_text(study)
    )
    assert frames.scatter(study, reference="bf16") is None and "too few" in frames.scatter_text(study, reference="bf16")


def test_an_interval_that_is_open_by_chance_is_not_printed_as_a_bound(tmp_path):
    """Both arms reach the target, one so late that resamples of its windows do not."""
    store, late = Store(tmp_path), 1 / 0.85
    for seed in range(3):
        put(store, config("fp8", seed), windows=(-0.3, 0.3))
        put(store, config("mxfp4", seed), slowdown=0.95 * late, windows=(0.3, -0.3))
    (study,) = studies(store.load())
    effect = metrics.overhead(study, arm="mxfp4", at=0.85)
    assert effect.high == math.inf and not metrics.is_bound(effect) and "in some resamples" in effect.note
    text = frames.arms_frame(study, ["mxfp4"], ats=[0.85])["at 85 %"].iloc[0]
    assert not text.startswith("more than") and text.endswith("∞]")
    row = frames.target_frame(study, ["mxfp4"], ats=[0.85]).iloc[0]
    assert row["high"] == pytest.approx(100 * (1 / 0.85 - 1))


def test_runs_that_end_above_an_earlier_evaluation_are_counted(tmp_path):
    store = fill(Store(tmp_path), {"fp8": 1.0, "mxfp4": 1.1}, seeds=(0, 1))
    (study,) = studies(store.load())
    assert frames.turning_text(study) == "No run ends above an evaluation before its last."
    curve = study.arms["mxfp4"][1].curve
    last = curve["eval_loss"].dropna().index[-1]
    curve.loc[last, "eval_loss"] = curve["eval_loss"].min() + 0.05
    before = curve["eval_loss"].dropna()
    rise = before.iloc[-1] - before.min()
    text = frames.turning_text(study)
    assert f"1 of 4 runs end above their lowest evaluation, by {rise:.4f} nats" in text
    assert "of `mxfp4`. " in text and "rather how these arms train" in text
    for seed in (0, 1):
        curve = study.arms["fp8"][seed].curve
        curve.loc[curve["eval_loss"].dropna().index[-1], "eval_loss"] = curve["eval_loss"].min() + 0.05
    assert frames.turning_text(study).startswith(
        "3 of 4 runs"
    ) and "They have begun to learn by heart" in frames.turning_text(study)
