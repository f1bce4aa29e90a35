"""The trial: what it trains, what it reuses, and its table, on a toy cut down to seconds and on made-up records."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import mxfp4
from mxfp4 import cli
from mxfp4.analysis.registered_study import trial
from mxfp4.analysis.registered_study.trial import REFERENCES, Trial, load_recipe, protocol, resolution, run_trial, table
from mxfp4.cli.commands.trial import as_json, as_text
from mxfp4.errors import UserError
from mxfp4.layers.recipe import recipe
from mxfp4.publish.link_check import _outside, _read
from mxfp4.studies.arm_queue import Summary
from mxfp4.studies.registered_arms import study_arms
from mxfp4.studies.store import Store
from mxfp4.studies.train_arm import train_arm
from mxfp4.training.config import ModelConfig
from mxfp4.training.protocols import TrainResult

CPU = torch.device("cpu")
TINY = replace(
    trial.TOY, model=ModelConfig(48, 32, 1, 1, 1, 32, 32), seq_len=32, batch_size=2, steps=8, cooldown_steps=2,
    warmup=2, eval_every=4, eval_sequences=4, final_eval_sequences=4,
)  # fmt: skip
FLOOR = 2.0
GPU_RULES = protocol(torch.device("cuda"))


@pytest.fixture(autouse=True)
def tiny(monkeypatch, tmp_path):
    """The toy in a second, with runs of its own."""
    monkeypatch.setattr(trial, "TOY", TINY)
    monkeypatch.setenv("MXFP4_RUNS", str(tmp_path / "runs"))


@pytest.fixture
def idea(tmp_path):
    """The path of a recipe that no name composes."""
    made = recipe("mxfp4+h16")
    made = replace(made, name="My.idea", wgrad=recipe("mxfp4+sr-grad").wgrad, bf16_tail=0.5)
    path = tmp_path / "idea.json"
    path.write_text(made.to_json())
    return path


def run_ids(scale="trial-toy"):
    return sorted(r.run_id for r in Store().load(scale))


def test_a_toy_is_trained_beside_bf16_and_marked_everywhere(idea, capsys):
    assert cli.main(["trial", str(idea), "--device", "cpu"]) == 0
    out, err = capsys.readouterr()
    assert "Toy on the CPU" in out and "no evidence about large models" in out
    assert "bf16 had no record of seed 0" in out and "left out: mxfp4, mxfp4+h16, ti2d" in out
    assert [line.split()[:2] for line in out.splitlines() if line.startswith("* ")] == [["*", "My.idea"]]
    assert "step/s" not in err, "a bar only on a terminal"
    bf16, ours = run_ids()
    assert bf16.startswith("bf16-s0-") and ours.startswith("my-idea-s0-")
    (record,) = [r for r in Store().load() if r.run_id == ours]
    assert record.config.recipe == load_recipe(str(idea)).to_text() and record.data["recipe"]["name"] == "My.idea"
    page, png = (Store().root / "trials" / f"trial-toy-my-idea-s0.{kind}" for kind in ("html", "png"))
    assert f"chart: {page}" in out and png.read_bytes().startswith(b"\x89PNG")
    assert "TOY" in page.read_text() and "no evidence about large models" in page.read_text()


def test_what_is_recorded_is_not_trained_again(idea, capsys, monkeypatch):
    assert cli.main(["trial", str(idea), "mxfp4", "--device", "cpu", "--jobs", "1"]) == 0
    first, before = capsys.readouterr().out, run_ids()
    idea.write_text(json.dumps(json.loads(idea.read_text()), indent=4))  # another text, the same recipe
    monkeypatch.setattr(trial, "run_plan", lambda *_, **__: pytest.fail("nothing is missing"))
    assert cli.main(["trial", str(idea), "mxfp4", "--device", "cpu"]) == 0
    again = capsys.readouterr().out
    assert run_ids() == before and "had no record" not in again
    rows = [[line for line in text.splitlines() if line.startswith("*")] for text in (first, again)]
    assert rows[0] == rows[1] and len(rows[0]) == 2


def test_json_alone_on_stdout(capsys):
    assert cli.main(["trial", "mxfp4", "--device", "cpu", "--seeds", "0", "1", "1", "--jobs", "1", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["toy"] and "no evidence" in data["warning"] and data["seeds"] == [0, 1]
    bf16, ours = data["rows"]
    assert not bf16["on_trial"] and ours["on_trial"] and ours["seeds"] == [0, 1]
    difference = ours["excess"]["own"]["value"] - bf16["excess"]["own"]["value"]
    assert ours["less"]["bf16"]["value"] == pytest.approx(difference) and ours["less"]["bf16"]["seeds"] == 2
    assert ours["less"]["bf16"]["low"] <= difference <= ours["less"]["bf16"]["high"]
    assert data["smallest_difference"]["seeds"] == 2 and len(data["charts"]) == 2


def test_an_interrupted_trial_goes_on_where_it_stopped(idea, capsys):
    whole = run_trial([str(idea)], device=CPU, store=Store(Store().root / "whole"), progress=False)
    store = Store()
    assert cli.main(["trial", str(idea), "--device", "cpu", "--max-minutes", "0"]) == 130
    assert "run it again to go on" in capsys.readouterr().err
    config = protocol(CPU).config(load_recipe(str(idea)).to_text(), 0)
    assert train_arm(config, store, device=CPU, stop=lambda: True) == "paused"
    assert [run.run_id for run in store.begun()] == [store.run_id(config, CPU)]
    there = run_trial([str(idea)], device=CPU, store=store, progress=False)
    assert store.begun() == [] and there.rows[-1].runs == whole.rows[-1].runs


def test_a_failed_arm_is_named_and_the_others_stay(capsys, monkeypatch):
    def fails(config, store, **options):
        if config.recipe != "bf16":
            raise UserError("no room")
        return train_arm(config, store, **options)

    monkeypatch.setattr("mxfp4.studies.arm_queue.train_arm", fails)
    assert cli.main(["trial", "mxfp4", "--device", "cpu", "--jobs", "1"]) == 1
    out, err = capsys.readouterr()
    assert "error: mxfp4-s0 could not be trained: no room" in err and "bf16" in out and "chart" not in out


@pytest.mark.parametrize("content, said", [
    (None, "cannot read the recipe {path}: No such file"),
    ("nonsense", "is not a recipe in JSON: it must be one object"),
    ('{"name": "x",', "not JSON: Expecting property name"),
    ('{"name": "x", "colour": 1}', "Recipe field='colour' is not known; allowed: 'bf16_tail'"),
    ('{"name": "mxfp4"}', "name 'mxfp4' is taken: a built-in recipe of that name differs"),
])  # fmt: skip
def test_a_file_that_is_no_recipe_is_one_line(content, said, tmp_path, capsys):
    path = tmp_path / "r.json"
    if content is not None:
        path.write_text(content)
    assert cli.main(["trial", str(path), "--device", "cpu"]) == 1
    err = capsys.readouterr().err
    assert said.format(path=path) in err and err.count("\n") == 1


@pytest.mark.parametrize("argv, said", [
    (["mxpf4+2d"], "recipe 'mxpf4+2d' is not known; did you mean mxfp4+2d?"),
    (["mxfp4", "--seeds", "-1"], "seed -1 is not allowed"),
    (["mxfp4", "--jobs", "0"], "jobs=0 must be at least 1"),
    (["mxfp4+h64"], "recipe 'mxfp4+h64' does not fit the trial's model: layer"),
])  # fmt: skip
def test_other_errors_are_one_line(argv, said, capsys):
    assert cli.main(["trial", *argv, "--device", "cpu"]) == 1
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1


def test_two_recipes_of_one_name_are_refused(idea, tmp_path):
    other = tmp_path / "other.json"
    other.write_text(replace(load_recipe(str(idea)), bf16_tail=0.0).to_json())
    with pytest.raises(UserError, match="two of the recipes are called 'My.idea' and differ"):
        run_trial([str(idea), str(other)], device=CPU)


# On a GPU: the configurations are the study's, and so are the records that answer.


def test_a_gpu_trial_is_part_short_of_the_study():
    short = study_arms("short")
    studied = {config for part in ("main", "short") for config in study_arms(part)}
    assert GPU_RULES.config("mxfp4+rceil", 0) in short, "an arm of the study is trained as the study's"
    own = GPU_RULES.config("mxfp4+h32", 0)
    assert own not in studied and own.scale == "trial"
    assert replace(short[0], recipe="mxfp4+h32", scale="trial", probe_steps=(), light_probe_steps=()) == own
    main = next(c for c in study_arms("main") if (c.recipe, c.seed) == ("ti2d", 1))
    assert GPU_RULES.sources("ti2d", 1)[0] == (main, str(own.steps)) and own.steps in main.short_budgets
    as_branch = replace(
        main, steps=own.steps, cooldown_steps=main.cooldown_of(own.steps), short_budgets=(), decay_recipes=(),
        final_forwards=(), probe_steps=(), light_probe_steps=(), eval_every=own.eval_every, scale="trial",
    )  # fmt: skip
    assert as_branch == GPU_RULES.config("ti2d", 1), "a branch at a third is the same run"


def put(store, config, excess, *, branch="", status="finished", bf16=None):
    """A made-up record: at the end of `branch` both forwards have this excess (bf16: that of the BF16 forward)."""
    end = int(branch or config.steps)
    losses = {"own": FLOOR + excess, "bf16": FLOOR + (excess if bf16 is None else bf16)}
    done = status == "finished"
    rows = [
        {"branch": branch, "step": end, "tokens": end * config.tokens_per_step, "forward": forward, "windows": 2,
         "loss": loss, "top1": 0.5, "copy_top1": 0.5}
        for forward, loss in losses.items()
    ]  # fmt: skip
    steps = [s for s in range(0, config.steps + 1, config.eval_every) if done or s < config.steps / 2]
    curve = [
        {"step": s, "tokens": s * config.tokens_per_step, "train_loss": 3.0, "grad_norm": 1.0, "lr": config.lr,
         "eval_loss": FLOOR + max(excess, 3 - 2.9 * s / config.steps), "eval_bpb": math.nan}
        for s in steps
    ]  # fmt: skip
    outcome = {"status": status, "step": config.steps, "tokens": config.tokens, "reason": None, "final_loss": 1.0,
               "final_bpb": None, "target": None}  # fmt: skip
    timings = {"train_seconds": 1.0, "evaluate_seconds": 0.1, "tokens_per_second": 1.0, "arms_on_device": 1}
    windows = {"own": [losses["own"]] * 2, "bf16": [losses["bf16"]] * 2, "floor": [FLOOR - 0.1, FLOOR + 0.1]}
    kept = (rows, [], windows) if done else ([], [], {})
    store.put(config, TrainResult(curve, [], [], outcome, timings, None, *kept), CPU)


def by_recipe(rows):
    return {row.recipe: row for row in rows}


@pytest.fixture
def recorded():
    """Six seeds of three references, as branches of the study's main runs."""
    store, rng = Store(), np.random.default_rng(0)
    for config in study_arms("main"):
        if config.recipe in REFERENCES[:3]:
            cost = {"bf16": 0.0, "mxfp4": 0.1, "mxfp4+h16": 0.04}[config.recipe]
            put(store, config, 0.3 + cost + rng.normal(0, 0.007), branch="1980", bf16=0.3 + cost / 2)
    return store


def test_the_table_reads_the_studys_branches_and_the_trials_records(recorded):
    texts = {name: recipe(name).to_text() for name in ("mxfp4+h32", "mxfp4+rceil")}
    for seed, excess in ((0, 0.35), (1, 0.36), (2, 0.34)):
        put(recorded, GPU_RULES.config(texts["mxfp4+h32"], seed), excess)
    put(recorded, GPU_RULES.config("mxfp4+rceil", 0), 0.38)
    rows = table(recorded, GPU_RULES, texts, (0, 1, 2), CPU)
    assert [(r.recipe, r.trial, len(r.runs)) for r in rows] == [
        ("bf16", False, 6), ("mxfp4", False, 6), ("mxfp4+h16", False, 6), ("mxfp4+h32", True, 3),
        ("mxfp4+rceil", True, 1),
    ]  # fmt: skip
    found = by_recipe(rows)
    assert found["mxfp4"].less["bf16"].value == pytest.approx(0.1, abs=0.02) and found["mxfp4"].less["bf16"].n == 6
    assert found["mxfp4"].excess["bf16"].value == pytest.approx(0.35)
    ours = found["mxfp4+h32"]
    assert ours.excess["own"].value == pytest.approx(0.35)
    half = 4.303 * 0.01 / math.sqrt(3)
    assert ours.excess["own"].high - ours.excess["own"].value == pytest.approx(half, rel=1e-3)
    assert ours.less["bf16"].n == ours.less["mxfp4"].n == 3 and ours.less["mxfp4"].value < 0
    assert math.isnan(found["mxfp4+rceil"].excess["own"].low), "one seed has no interval"
    assert found["mxfp4+rceil"].runs[0].run_id == recorded.run_id(next(
        c for c in study_arms("short") if (c.recipe, c.seed) == ("mxfp4+rceil", 0)), CPU)  # fmt: skip


def made(rows, seeds=(0, 1, 2)):
    return Trial(GPU_RULES, seeds, rows, resolution(rows, GPU_RULES), (), Summary())


def test_the_table_in_words_and_as_data(recorded):
    texts = {"mxfp4+h32": "mxfp4+h32"}
    put(recorded, GPU_RULES.config("mxfp4+h32", 0), 0.35)
    rows = table(recorded, GPU_RULES, texts, (0,), CPU)
    text = as_text(made(rows, (0,)))
    assert "oy" not in text and "9.7 M weights, 65 M tokens of source A (known-entropy), seed 0" in text
    line = next(line for line in text.splitlines() if line.startswith("*"))
    assert line.split()[:4] == ["*", "mxfp4+h32", "0", "0.3500"] and line.count("±") == 0
    assert next(line for line in text.splitlines() if line.startswith("   mxfp4+h16")).count("±") == 4
    assert "0-5" in text and "left out: ti2d" in text
    assert all(len(line) < 121 for line in text.splitlines())
    assert as_json(made(rows, (0,)))["rows"][-1]["less"]["mxfp4"]["low"] is None
    json.dumps(as_json(made(rows, (0,))), allow_nan=False)


def test_what_seeds_can_show_follows_from_the_recorded_scatter(recorded):
    rows = table(recorded, GPU_RULES, {}, (0,), CPU)
    found = resolution(rows, GPU_RULES)
    assert found.df == 15 and 0.004 < found.scatter < 0.011 and found.whence.startswith("the references'")
    assert found.nats(1) > found.nats(6) > 0 and found.nats(3) > found.nats(6)
    nothing = resolution([], GPU_RULES)
    assert nothing.scatter == 0.007 and "as the study assumes" in made(()).resolution_text
    assert nothing.nats(6) == pytest.approx(0.014, abs=5e-4)


def test_runs_that_fail_have_no_numbers(recorded):
    texts = {"mxfp4+h32": "mxfp4+h32", "mxfp4+ceil": "mxfp4+ceil"}
    put(recorded, GPU_RULES.config("mxfp4+h32", 0), 0.35)
    put(recorded, GPU_RULES.config("mxfp4+h32", 1), 9.0, status="diverged")
    for seed in (0, 1):  # it stays where BF16 was at the start
        put(recorded, GPU_RULES.config("mxfp4+ceil", seed), 2.9)
    found = by_recipe(table(recorded, GPU_RULES, texts, (0, 1), CPU))
    assert found["mxfp4+h32"].failed == {1: "diverged"} and found["mxfp4+ceil"].failed == {0: "stalled", 1: "stalled"}
    text = as_text(made(tuple(found.values()), (0, 1)))
    assert "diverged in 1 of 2" in text and "stalled in 2 of 2" in text and "failed" in text


def test_the_page_opens_offline(recorded, tmp_path):
    from mxfp4.pages.trial_chart import caption, frame, write

    put(recorded, GPU_RULES.config("mxfp4+h32", 0), 0.35)
    put(recorded, GPU_RULES.config("mxfp4+ceil", 0), 9.0, status="diverged")
    texts = {"mxfp4+h32": "mxfp4+h32", "mxfp4+ceil": "mxfp4+ceil"}
    done = made(table(recorded, GPU_RULES, texts, (0,), CPU), (0,))
    drawn = frame(done)
    assert set(drawn["arm"]) == {"bf16", "mxfp4", "mxfp4+h16", "mxfp4+h32"} and len(drawn) == 8
    assert set(drawn[drawn["arm"] == "mxfp4+h32"]["kind"]) == {"on trial"} and "mxfp4+ceil (diverged)" in caption(done)
    page, png = write(done, tmp_path / "trials")
    assert page.name == "trial-mxfp4-h32-mxfp4-ceil-s0.html" and png.is_file()
    text, parsed = page.read_text(), _read(page)
    assert not [address for address in parsed.loads + parsed.links if _outside(address)]
    bundle = max(text.split("<script"), key=len)
    assert "http" not in text.replace(bundle, "") and "vega.github.io/editor" not in text
    assert text.count("</script>") == 3 and "window.mxfp4Vega" in bundle


def test_the_frame_of_records_shows_a_recipe_by_its_name(idea):
    run_trial([str(idea)], device=CPU, progress=False)
    frame = mxfp4.records("trial-toy")
    assert set(frame["arm"]) == {"bf16", "My.idea"} and set(frame["forward"]) == {"own", "bf16"}
    assert set(frame["step"]) == {0, 4, 8}
