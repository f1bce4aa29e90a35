"""Plans: their arms, what is left of them, and running them in one process, in several, and through kills."""

import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

import mxfp4
from mxfp4 import cli
from mxfp4.analysis.study import setting
from mxfp4.cli.commands import plan as command
from mxfp4.errors import UserError
from mxfp4.studies.plans import BASES, FULL, SMALL, TIERS, Plan, plan, plans_of, tier_of
from mxfp4.studies.runner import arm_name, run_plan, train_arm
from mxfp4.studies.scales import CPU, SCALES
from mxfp4.studies.store import Store
from mxfp4.text import duration
from tests.fakes import TINY, FakeCorpus
from tests.fakes.studies import put

CORPUS = FakeCorpus()
SCALE = replace(
    CPU, model=TINY, seq_len=16, batch_size=4, steps=12, eval_every=4, eval_sequences=4, warmup=3,
    probe_steps=(),
)  # fmt: skip


def small(recipes=("bf16", "mxfp4+sr"), seeds=(0, 1), **fields_) -> Plan:
    return plan("table1", SCALE, recipes=recipes, seeds=seeds, **fields_)


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "runs")


EACH = [(name, scale) for scale in SCALES for name in plans_of(SCALES[scale])]


@pytest.mark.parametrize(("name", "scale"), EACH)
def test_arms_of_a_setting_differ_in_recipe_and_seed_alone(name, scale):
    arms = plan(name, scale).arms
    assert len(set(arms)) == len(arms)
    groups: dict[str, list] = {}
    for arm in arms:
        groups.setdefault(str(setting(arm)), []).append(arm)
    assert len(groups) == len(SCALES[scale].settings_of(name))
    for group in groups.values():
        assert len({(a.recipe, a.seed) for a in group}) == len(group)
        assert {a.recipe for a in group} == {a.recipe for a in arms}
    assert {a.probe_steps for a in arms if a.seed} <= {()}


@pytest.mark.parametrize("name", ["cpu", "gpu"])
def test_plans_share_their_references(name):
    """The size axis holds the study's own size, probed as there; another source or model is never mixed in."""
    scale = SCALES[name]
    table1, sizes = plan("table1", scale).arms, plan("sizes", scale).arms
    assert {c for c in sizes if c.model == scale.model and c.seed == 0} <= set(table1)
    assert not {c for n in ("moe", "synthetic") for c in plan(n, scale).arms} & set(table1)


def test_three_sizes_a_factor_of_three_apart_at_one_rule():
    scale = SCALES["gpu"]
    sizes = [scale.config("bf16", 0, **s) for s in scale.settings_of("sizes")]
    small, own, large = (c.model.n_params_non_embedding() for c in sizes)
    assert 2.7 < own / small < 3.3 and 2.7 < large / own < 3.3 and sizes[1] == scale.config("bf16", 0)
    for c in sizes:
        assert c.model.dim % 128 == c.model.ffn_dim % 128 == 0 and c.model.head_dim == 64
        assert c.lr * c.model.dim == pytest.approx(scale.lr * scale.model.dim) and c.tokens == sizes[1].tokens


def test_experts_have_the_dense_models_active_weights():
    scale = SCALES["gpu"]
    (model,) = {c.model for c in plan("moe", scale).arms}
    active = replace(model, n_experts=2).n_params_non_embedding() - model.n_layers * 2 * model.dim
    assert (model.n_experts, model.n_experts_per_token) == (8, 2)
    assert active == scale.model.n_params_non_embedding()


def test_all_is_every_plan_and_on_a_laptop_a_few():
    assert set(plan("all", "gpu").arms) == {c for n in plans_of(SCALES["gpu"]) for c in plan(n, "gpu").arms}
    assert len(plan("all", "cpu").arms) < 50
    assert plans_of(SCALES["mi355x"]) == ("first", "table1", "disagreement", "p2", "others", "two-sided")


def test_the_largest_scale_runs_in_tiers():
    """P1's main result with its seeds, then the rest of table 1, then the others; elsewhere seeds come last."""
    scale, arms = SCALES["mi355x"], plan("all", "mi355x").arms
    tiers = [tier_of(a, scale) for a in arms]
    assert list(dict.fromkeys(tiers)) == list(TIERS) and tiers == sorted(tiers, key=TIERS.index)
    first = plan("first", "mi355x").arms
    assert [(a.recipe, a.seed) for a in arms[:12]] == [(a.recipe, a.seed) for a in first]
    assert [a.seed for a in first] == [0] * 4 + [1] * 4 + [2] * 4 and {a.recipe for a in first} == set(FULL["first"])
    assert set(plan("table1", "mi355x").arms) <= {a for a, t in zip(arms, tiers, strict=True) if t != "rest"}
    assert {tier_of(a, SCALES["gpu"]) for a in plan("all", "gpu").arms} == {None}
    with pytest.raises(UserError, match="unknown plan 'first' at scale 'gpu'"):
        plan("first", "gpu")


def test_the_first_tiers_seeds_are_for_its_own_recipes():
    named = plan("all", "mi355x", recipes=["ti2d", "mxfp4"]).arms
    assert [(a.recipe, a.seed) for a in named] == [("mxfp4", 0), ("mxfp4", 1), ("mxfp4", 2), ("ti2d", 0)]


def test_a_run_that_stops_learning_is_ended_at_the_largest_scale_alone():
    assert [plan("table1", s).arms[0].stall_evaluations for s in ("cpu", "gpu", "mi355x")] == [0, 0, 5]


@pytest.mark.parametrize("name", ["others", "two-sided", "sizes", "moe", "synthetic"])
def test_plans_that_no_laptop_asks_for_by_itself_run_there(name, store):
    few = {"steps": 2, "eval_every": 2, "warmup": 1, "eval_sequences": 2, "probe_steps": ()}
    wanted = plan(name, "cpu", **few)
    fake = {c.model.vocab_size: FakeCorpus(c.model.vocab_size) for c in wanted.arms}
    for config in wanted.arms:
        corpus = None if config.corpus == "synthetic" else fake[config.model.vocab_size]
        assert train_arm(config, store, corpus=corpus, device="cpu") == "finished", config.recipe
    assert len(wanted.records(store, "cpu")) == len(wanted.arms)


def test_table_1_has_the_papers_scopes_and_stabilisers():
    names = {a.recipe for a in plan("table1", "cpu").arms}
    scopes = ("mxfp4-fprop", "mxfp4-fprop-dgrad", "mxfp4")
    assert names == {
        "bf16",
        "fp8",
        *scopes,
        "mxfp4+h32",
        *(f"{s}+{x}" for s in scopes for x in ("sr", "rht16", "h16")),
    }
    assert {"mxfp4-dgrad", "mxfp4-wgrad"} < {a.recipe for a in plan("table1", "gpu").arms}


def test_every_recipe_of_every_plan_is_one_and_no_two_mean_the_same():
    for recipes in (*SMALL.values(), *FULL.values()):
        meanings = {replace(mxfp4.recipe(r), name="").to_json() for r in recipes}
        assert len(meanings) == len(recipes)


def test_seeds_come_last():
    seeds = [a.seed for a in plan("all", "gpu").arms]
    assert seeds == sorted(seeds)


def test_another_corpus_leaves_the_plan_about_one_on_its_own():
    """Its model has that corpus's vocabulary, in which no text could be written."""
    arms = plan("all", "gpu", corpus="technical").arms
    wanted = {("technical", SCALES["gpu"].model.vocab_size), ("synthetic", 1024)}
    assert {(a.corpus, a.model.vocab_size) for a in arms} == wanted


def test_unknown_names_are_refused():
    with pytest.raises(UserError, match="unknown plan 'table2' .*known: table1, disagreement, .*, synthetic, all"):
        plan("table2", "cpu")
    with pytest.raises(UserError, match="unknown plan 'sizes' at scale 'mi355x'"):
        plan("sizes", "mi355x")
    with pytest.raises(UserError, match="scale 'tpu' is not known; allowed: cpu, gpu, mi355x"):
        plan("table1", "tpu")
    with pytest.raises(UserError, match="unknown TrainConfig field 'stepz'"):
        plan("table1", "cpu", stepz=3)
    with pytest.raises(ValueError, match="mxfp5"):
        plan("table1", "cpu", recipes=["mxfp5"])


def test_running_twice_trains_once_and_says_so(store, capsys):
    first = run_plan(small(), store, jobs=1, device="cpu", corpus=CORPUS)
    names = ["bf16-s0", "mxfp4+sr-s0", "bf16-s1", "mxfp4+sr-s1"]
    assert first.trained == names and not first.present
    assert capsys.readouterr().err == ""  # no bar where stderr is no terminal
    second = run_plan(small(), store, jobs=1, device="cpu", corpus=CORPUS)
    assert second.present == names and not second.trained
    assert capsys.readouterr().err == f"already there (4): {' '.join(names)}\n"
    assert len(store.load("cpu")) == 4 and not store.begun()


def test_a_scale_for_a_gpu_is_refused_elsewhere_before_its_corpus_is_packed(store):
    with pytest.raises(UserError, match="scale 'gpu' trains on a GPU, and device 'cpu' is none"):
        run_plan(plan("table1", "gpu", recipes=["bf16"], seeds=[0]), store, device="cpu")


def test_what_is_left_and_what_it_costs(store):
    wanted = small()
    assert [a.seconds for a in wanted.status(store, "cpu")] == [None] * 4
    run_plan(small(recipes=("bf16",), seeds=(0,)), store, jobs=1, device="cpu", corpus=CORPUS)
    status = wanted.status(store, "cpu")
    assert [a.done for a in status] == [True, False, False, False]
    assert status[0].seconds == 0.0 and all(a.seconds > 0 for a in status[1:])
    timings = status[0].record.timings
    assert status[2].seconds == pytest.approx(timings["train_seconds"] + timings["evaluate_seconds"])
    assert [r.config.seed for r in wanted.records(store, "cpu")] == [0]


def test_arms_that_shared_a_device_cost_their_part_of_its_time(store):
    (one,) = small(recipes=("bf16",), seeds=(0,)).arms
    for shared, wanted in ((1, 1.1), (4, 1.1 / 4)):
        put(store, one, arms_on_device=shared)  # fake_studies: 1.0 s and 0.1 s
        assert small(recipes=("bf16",), seeds=(1,)).status(store, "cpu")[0].seconds == pytest.approx(wanted)
        shutil.rmtree(store.folder(one, "cpu"))


def test_arms_of_several_ranks_cost_the_time_of_each(store):
    (one,) = small(recipes=("bf16",), seeds=(0,)).arms
    put(store, one, ranks=8)  # fake_studies: 1.0 s and 0.1 s
    assert small(recipes=("bf16",), seeds=(1,)).status(store, "cpu")[0].seconds == pytest.approx(8 * 1.1)


def test_the_cost_of_a_size_without_records_follows_its_weights(store):
    run_plan(small(recipes=("bf16",), seeds=(0,)), store, jobs=1, device="cpu", corpus=CORPUS)
    settings = ({}, {"model": replace(TINY, dim=128)})
    own, wide = (plan("table1", SCALE, recipes=["fp8"], seeds=[0], **s) for s in settings)
    assert wide.status(store, "cpu")[0].seconds > 2 * own.status(store, "cpu")[0].seconds > 0


def test_what_an_estimate_rests_on_and_experts_are_not_measured_by_dense_runs(store, monkeypatch, capsys):
    """A step of experts is neither captured nor compiled: a dense model's speed says nothing about it."""
    own, wide, experts, more = (
        plan("table1", SCALE, recipes=["fp8"], seeds=[0], model=replace(TINY, **m)).arms[0]
        for m in ({}, {"dim": 128}, {"n_experts": 4}, {"n_experts": 8})
    )
    wanted = Plan("mixed", SCALE, (own, replace(own, seed=1), replace(own, recipe="mxfp4"), wide, experts, more))

    def bases():
        return [(a.basis, a.seconds is None) for a in wanted.status(store, "cpu")]

    assert bases() == [("", True)] * 6
    put(store, own)
    known = [("", False), (BASES[0], False), (BASES[1], False), (BASES[2], False)]
    assert bases() == [*known, ("", True), ("", True)]
    monkeypatch.setenv("MXFP4_RUNS", str(store.root))
    monkeypatch.setattr(command, "chosen_plan", lambda args, name=None: wanted)
    assert cli.main(["plan", "--plan", "table1"]) == 0
    said = capsys.readouterr().out
    left = sum(a.seconds or 0 for a in wanted.status(store, "cpu"))
    *_, cost, adds = said.splitlines()
    (one,) = store.load("cpu")
    assert cost.endswith(
        f"about {duration(left)} of one {one.machine['device']} from measured speeds (1 by this arm, 1 by other arms of its "
        "model, 1 by other models), and 2 arms not measured yet: no record of such a model at this scale"
    )
    assert adds == "`mxfp4 train --scale cpu --plan table1` trains them"
    assert said.count("missing, not measured yet") == 2 and said.count("(by other models)") == 1
    put(store, experts)
    assert bases()[4:] == [("", False), (BASES[2], False)] and bases()[3] == known[3]


def test_several_processes_give_the_bytes_of_one(store, tmp_path):
    one = Store(tmp_path / "one")
    run_plan(small(), one, jobs=1, device="cpu", corpus=CORPUS)
    summary = run_plan(small(), store, jobs=2, device="cpu", corpus=CORPUS)
    assert sorted(summary.trained) == sorted(arm_name(a) for a in small().arms)
    for a, b in zip(one.load("cpu"), store.load("cpu"), strict=True):
        assert a.run_id == b.run_id
        assert a.curve["eval_loss"].dropna().to_list() == pytest.approx(
            b.curve["eval_loss"].dropna().to_list(), rel=1e-5
        )


class Broken(FakeCorpus):
    """Fails, or kills its process, at a step of seed 1."""

    def batch(self, step, batch_size, seq_len, seed):
        if seed == 1 and step == 3:
            if self.fingerprint == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("two\nlines")
        return super().batch(step, batch_size, seq_len, seed)


def test_an_arm_that_fails_takes_nothing_with_it(store):
    summary = run_plan(small(recipes=("bf16",), seeds=(0, 1, 2)), store, jobs=1, device="cpu", corpus=Broken())
    assert summary.failed == {
        "bf16-s1": "RuntimeError: two lines; twice at step 3: the arm's own fault"
    } and summary.trained == [
        "bf16-s0",
        "bf16-s2",
    ]


def test_an_arm_whose_process_is_killed_takes_nothing_with_it(store):
    corpus = Broken(fingerprint="kill")
    summary = run_plan(small(recipes=("bf16",), seeds=(1, 0)), store, jobs=2, device="cpu", corpus=corpus)
    why = "its process ended with exit code -9; twice at step 3: the arm's own fault"
    assert summary.failed == {"bf16-s1": why} and summary.trained == ["bf16-s0"]


@pytest.mark.parametrize("jobs", [1, 2])
def test_the_end_of_the_time_leaves_checkpoints_and_the_next_call_goes_on(store, jobs):
    wanted = small(recipes=("bf16",), steps=200_000)
    summary = run_plan(wanted, store, jobs=jobs, device="cpu", corpus=CORPUS, max_minutes=3 / 60)
    assert len(summary.paused) == jobs and len(summary.left) == 2 - jobs and not summary.failed
    steps = [b.step for b in store.begun()]
    assert len(steps) == jobs and min(steps) > 0 and store.begun()[0].holder is None
    again = run_plan(wanted, store, jobs=jobs, device="cpu", corpus=CORPUS, max_minutes=3 / 60)
    assert len(again.paused) == jobs and min(b.step for b in store.begun()) > min(steps)


RUN = """
import sys
import torch
torch.set_num_threads(1)
sys.path.insert(0, {tests!r})
from tests.studies.test_plans import SCALE, Watched, small
from mxfp4.studies.store import Store
from mxfp4.studies.runner import run_plan
if __name__ == "__main__":
    plan = small(recipes=("bf16",), seeds=(0,), steps={steps})
    print(run_plan(plan, Store({root!r}), jobs={jobs}, device="cpu", corpus=Watched(path={watched!r})))
"""


@dataclass(frozen=True)
class Watched(FakeCorpus):
    """Leaves a file when its third batch is read, so that a test knows that a run has steps behind it."""

    path: str = ""

    def batch(self, step, batch_size, seq_len, seed):
        if step == 3:
            Path(self.path).touch()
        return super().batch(step, batch_size, seq_len, seed)


def started(store, jobs, steps=100_000):
    """A process that trains, once it has steps behind it."""
    watched = store.root.parent / "stepped"
    code = RUN.format(
        tests=str(Path(__file__).parents[2]), root=str(store.root), jobs=jobs, steps=steps, watched=str(watched)
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)
    deadline = time.monotonic() + 120
    while not watched.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert watched.exists(), "the process did not begin to train"
    return process


@pytest.mark.parametrize("jobs", [1, 2])
def test_ctrl_c_leaves_a_checkpoint(store, jobs):
    process = started(store, jobs)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert "stopped with 1 paused and 0 not begun" in output
    assert store.begun()[0].step > 0 and store.begun()[0].holder is None


def test_workers_end_when_their_parent_is_killed_and_a_second_process_waits_for_the_first(store):
    process = started(store, 2)
    process.send_signal(signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 30
    while store.begun()[0].holder and time.monotonic() < deadline:
        time.sleep(0.1)
    assert store.begun()[0].holder is None and store.begun()[0].step > 0


def test_two_processes_with_one_arm_train_it_once(store):
    first = started(store, 1, steps=400)
    wanted = small(recipes=("bf16",), seeds=(0,), steps=400)
    summary = run_plan(wanted, store, jobs=1, device="cpu", corpus=CORPUS)
    output, _ = first.communicate(timeout=120)
    assert "1 arms trained" in output and summary.elsewhere == ["bf16-s0"] and not summary.trained
    assert "0 arms trained" in str(summary) and "1 by another process" in str(summary)
    assert len(store.load("cpu")) == 1 and not store.begun()


@pytest.mark.parametrize("jobs", [1, 2])
def test_no_arm_begins_after_the_last_start(store, jobs):
    summary = run_plan(small(), store, jobs=jobs, device="cpu", corpus=CORPUS, last_start=0)
    assert not summary.trained and not summary.paused and len(summary.left) == len(small().arms)
    assert "run it again to go on" in str(summary)
