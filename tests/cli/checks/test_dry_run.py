"""The dry run: its figures are the sources', it refuses what cannot fit with the number, it changes nothing."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from mxfp4.analysis.claims import load_ledger
from mxfp4.cli import main
from mxfp4.cli.checks import dry_run as module
from mxfp4.cli.checks.dry_run import budget_hours, costs_of, dry_run, steps_worth, tiers
from mxfp4.cli.checks.dry_run_text import as_json, text, tiers_text
from mxfp4.errors import UserError
from mxfp4.studies import runner
from mxfp4.studies.plans import plan
from mxfp4.studies.store import Store
from mxfp4.training.checkpoints import durable_files
from mxfp4.training.memory import estimate
from tests.fakes.studies import put

RECORDED = Path(__file__).resolve().parents[3] / "runs"
TIMED = ("bf16", "fp8", "mxfp4", "mxfp4+h16", "mxfp4+sr", "mxfp4-fprop", "mxfp4-fprop-dgrad+rht16")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A runs folder of its own, no mirror, no GPU, and a disk with room."""
    monkeypatch.setenv("MXFP4_RUNS", str(tmp_path))
    for name in ("MXFP4_C4", "MXFP4_LLAMA_TOKENIZER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *a, **k: None)
    free(monkeypatch, 10**13)


def free(monkeypatch, size: int) -> None:
    monkeypatch.setattr(durable_files.shutil, "disk_usage", lambda path: type("Usage", (), {"free": size}))


def large(recipes=("fp8", "mxfp4+h16", "mxfp4"), **changes):
    found = plan("table1", "mi355x", recipes=recipes)
    return replace(found, scale=replace(found.scale, **changes)) if changes else found


def test_papers_scale_on_any_machine(tmp_path):
    result = dry_run(large(), Store(tmp_path))
    assert (result.machine.gpus, result.machine.memory, result.problems) == (8, 288e9, ())
    costs = {c.arm.config.recipe: c for c in result.costs}
    # by hand: ten-run minutes x 8 GPUs; budget of 11,213 steps at the logged step time, and 31 evaluations (at the
    # beginning, every 384 steps, at the end) of 1,024 sequences, each a third of a step on 32
    assert costs["fp8"].gpu_hours_to_target == pytest.approx(99.31 / 60 * 8)
    assert costs["mxfp4+h16"].gpu_hours_left == pytest.approx((11213 + 31 * 1024 / 32 / 3) * 0.874 * 8 / 3600)
    assert costs["mxfp4"].gpu_hours_left is None and costs["mxfp4"].source == "unknown"
    config, memory = result.memory[0]
    assert (
        memory.peak
        == estimate(config, ranks=8, compiled=True, native=True, attention="auto", cross_entropy="chunked").peak
    )
    said = text(result)
    for part in ("1.04 ", "(MLPerf v5.1 logs (log))", "unknown: 1", "own are unknown", "8 C V", "gated"):
        assert part in said, part
    assert re.search(r"189\.\d+ GB  packed tokens of c4\n", said) and "nothing found that keeps it" in said
    assert said.endswith("on such a machine, which this is not")
    assert list(tmp_path.iterdir()) == []


def test_memory_that_is_too_small_is_refused_with_both_numbers(capsys):
    arguments = ["train", "--dry-run", "--scale", "mi355x", "--arm", "fp8"]
    assert main(arguments) == 0
    assert main([*arguments, "--gpus", "1", "--gpu-memory", "141"]) == 1
    last = capsys.readouterr().out.strip().splitlines()[-1]
    found = re.fullmatch(r"cannot run: memory: fp8 needs ([\d.]+) GB of each MI355X, which has 141.0 GB: .*", last)
    one = estimate(large(["fp8"]).arms[0], compiled=True, native=True, attention="auto", cross_entropy="chunked")
    assert float(found[1]) == pytest.approx((one.peak + one.reserve) / 1e9, abs=0.05) and float(found[1]) > 141


def test_choices_of_execution_are_shown_and_counted_and_refused_where_they_cannot_work(capsys):
    arguments = ["train", "--dry-run", "--scale", "mi355x", "--arm", "fp8", "--reduce-dtype", "bfloat16"]
    once = ["--no-reshard-after-forward", "--weights-once", "--attention", "flash"]
    assert main([*arguments, *once]) == 0
    said = capsys.readouterr().out
    assert (
        "execution  attention=flash, cross_entropy=chunked, reshard_after_forward=False, weights_once=True, "
        "reduce_dtype=bfloat16\n"
    ) in said
    assert "all blocks gathered" in said and "quantized W, kept" in said and "parts before, whole, BF16" in said
    assert main([*arguments, "--weights-once"]) == 1
    assert "weights_once=True on 8 ranks needs reshard_after_forward=False" in capsys.readouterr().err


def test_recomputation_makes_room():
    without, with_ = (dry_run(large(["fp8"], recompute_every=n), Store(), gpus=2) for n in (0, 1))
    assert with_.memory[0][1].peak < 0.7 * without.memory[0][1].peak


def test_disk_that_is_too_small_is_refused_where_the_runs_would_be(monkeypatch, tmp_path):
    free(monkeypatch, 10**6)
    small = plan("table1", "cpu")
    (problem,) = dry_run(small, Store(tmp_path)).problems
    assert re.match(r"disk: 0\.\d GB are still to be written and 0\.0 GB are free for .*MXFP4_RUNS", problem)
    assert dry_run(large(), Store(tmp_path)).problems == ()  # the disk meant is another machine's
    assert "not the machine meant" in text(dry_run(large(), Store(tmp_path)))


def test_a_begun_arm_has_the_evaluations_that_are_left():
    config = large(["fp8"]).arms[0]
    assert steps_worth(config, 11213 - 384) == pytest.approx(384 + 2 * 1024 / 32 / 3)  # at 11,136 and the last step


def test_other_numbers_of_gpus_take_as_many_gpu_hours_and_other_times(tmp_path):
    eight, two = (dry_run(large(["fp8"]), Store(tmp_path), gpus=n) for n in (8, 2))
    assert two.costs[0].gpu_hours_left == eight.costs[0].gpu_hours_left
    assert two.costs[0].seconds_per_step == 4 * eight.costs[0].seconds_per_step == pytest.approx(4 * 1.043)
    days = [float(re.search(r", ([\d.]+) days on (\d) GPUs", text(r))[1]) for r in (eight, two)]
    assert days[1] == pytest.approx(4 * days[0], rel=0.01) and days[0] == pytest.approx(26.8 / 8 / 24, rel=0.01)
    assert "scaled from 8 GPUs" in text(two) and "scaled" not in text(eight)


def test_records_of_several_ranks_give_gpu_hours_and_the_time_of_a_step(tmp_path, monkeypatch):
    monkeypatch.setattr("mxfp4.studies.store.matmul_path", lambda device: "emulated")
    small, store = plan("table1", "cpu", recipes=["bf16", "fp8"], seeds=[0]), Store(tmp_path)
    together = replace(small, scale=replace(small.scale, ranks_per_arm=2, micro_batches=2))
    put(store, small.arms[0], ranks=2)
    left = dry_run(replace(together, arms=tuple(replace(a, micro_batches=2) for a in small.arms)), store, gpus=0).costs
    assert [c.gpu_hours_left for c in left] == [pytest.approx(2 * 1.1 / 3600)] * 2
    assert left[1].seconds_per_step == pytest.approx(1.1 / small.arms[0].steps)


def test_every_arm_has_a_memory_line(tmp_path):
    lines = text(dry_run(large(None), Store(tmp_path))).splitlines()
    titles = [
        line.removeprefix("memory of a GPU: ") for line in lines if re.search(r"B parameters: peak [\d.]+ GB", line)
    ]
    named = [name for title in titles for name in title.partition(", 8.03 B")[0].split(", ")]
    assert sorted(named) == sorted({a.recipe for a in large(None).arms}) and 1 < len(titles) < len(named)


def test_the_host_holds_checkpoints_in_writing(tmp_path, monkeypatch):
    result = dry_run(large(), Store(tmp_path))
    assert result.staging == 12 * large().arms[0].model.n_params() and "memory of the host: 96.4 GB, pinned" in text(
        result
    )
    there = replace(result.machine, host=50e9)
    monkeypatch.setattr(module, "machine_for", lambda *a: there)
    (problem,) = dry_run(large(), Store(tmp_path)).problems
    assert problem.startswith("host memory: 96.4 GB hold") and "the machine has 50.0 GB" in problem
    three = plan("table1", "gpu", recipes=["fp8"])  # share a GPU
    assert dry_run(three, Store(tmp_path)).staging == 3 * 12 * three.arms[0].model.n_params()


def test_the_disk_holds_three_checkpoints_of_an_arm(tmp_path):
    ((name, size),) = [row for row in dry_run(large(), Store(tmp_path)).disk if row[0].startswith("checkpoints")]
    assert size == 3 * 12 * large().arms[0].model.n_params()
    assert name == (
        "checkpoints: 3 of 12 bytes a parameter for each arm in work (1), the largest 96.4 GB; one every 20 min at most, "
        "and only where it has room"
    )


def test_kept_weights_are_on_the_disk_and_an_arm_without_them_is_left(tmp_path):
    store, small = Store(tmp_path), plan("table1", "cpu", recipes=["bf16", "fp8"], seeds=[0])
    put(store, small.arms[0])
    without, with_ = (dry_run(small, store, keep_weights=keep) for keep in (False, True))
    sizes = [dict(r.disk).get("weights: 4 bytes a parameter", 0) for r in (without, with_)]
    assert sizes == [0, 2 * 4 * small.arms[0].model.n_params()]
    assert [c.arm.done for c in without.costs + with_.costs] == [True, False, False, False]
    assert with_.costs[0].gpu_hours_left == pytest.approx(1.1 / 3600)


def test_what_the_seeds_decide_and_what_three_would_cost(tmp_path):
    one, three = (plan("table1", "mi355x", seeds=seeds) for seeds in (None, (0, 1, 2)))
    result = dry_run(one, Store(tmp_path))
    (line,) = (x for x in text(result).splitlines() if x.startswith("seeds: "))
    assert [t["name"] for t in as_json(result)["tiers"]] == ["first", "table1"] and "\ntable1  13 " in text(result)
    found = re.match(
        r"seeds: with 0 alone (\d+) claims .* need 3 seeds of an arm \(--seed 0 --seed 1 --seed 2, ([\d,]+) GPU", line
    )
    needy = [
        c for c in load_ledger() if c.arms and set(c.arms) <= {a.recipe for a in one.arms} and c.needs["seeds"] == 3
    ]
    assert 0 < int(found[1]) <= len(needy)
    hours = sum(c.gpu_hours_left or 0 for c in dry_run(three, Store(tmp_path)).costs)
    assumed = (
        sum(a.recipe not in ("fp8", "mxfp4+h16") for a in three.arms) * steps_worth(one.arms[0]) * 1.043 * 8 / 3600
    )
    assert float(found[2].replace(",", "")) == pytest.approx(hours + assumed, rel=0.01)
    assert "seeds: " not in text(dry_run(three, Store(tmp_path)))
    assert "seeds: " not in text(dry_run(plan("table1", "cpu"), Store(tmp_path)))  # too small, whatever the seeds


def test_hours_of_the_tiers_add_up(tmp_path, monkeypatch, capsys):
    """`mxfp4 plan` shows them; other scales have none."""
    whole, store = plan("all", "mi355x"), Store(tmp_path)
    costs = costs_of(whole.status(store, "cuda"), 8)
    found = tiers(whole, costs)
    assert [(t.name, t.arms) for t in found][:2] == [("first", 12), ("table1", 13)]
    assert sum(t.arms for t in found) == len(costs) and sum(t.assumed for t in found) == len(costs) - 6
    assert found[-1].gpu_hours_in_all == pytest.approx(budget_hours(costs))
    assert 300 < found[0].gpu_hours == found[0].gpu_hours_in_all < 320
    monkeypatch.setenv("MXFP4_RUNS", str(tmp_path))
    assert main(["plan", "--scale", "mi355x", "--plan", "first"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("first  ")]
    assert line.split() == ["first", "12", "12", "308", "308", f"{found[0].gpu_hours / 8:.3g}"]
    small = plan("all", "cpu")
    assert tiers_text(tiers(small, costs_of(small.status(store, "cpu"), 1)), 0) == []


def test_other_gpu_counts(tmp_path):
    assert dry_run(large(["fp8"]), Store(tmp_path), gpus=16).memory[0][1].peak < 288e9
    three, two = (dry_run(large(["fp8"]), Store(tmp_path), gpus=n) for n in (3, 2))
    assert three.memory[0][1].peak == two.memory[0][1].peak and "on 2 GPUs together" in text(three)  # 16 parts
    with pytest.raises(UserError, match="gpus=-1 must be 0"):
        dry_run(large(), Store(tmp_path), gpus=-1)


@pytest.mark.parametrize(("gpus", "ranks"), [(3, 2), (5, 4), (6, 4), (7, 4), (12, 8), (24, 16), (8, 8), (32, 16)])
def test_gpus_that_idle_are_named_by_dry_run_and_trainer_alike(gpus, ranks, tmp_path, monkeypatch, capsys):
    """The trainer gets as far as where arms go; what then trains is a stand-in."""
    wanted, unused = large(["fp8"]), gpus % ranks
    lines = [x for x in text(dry_run(wanted, Store(tmp_path), gpus=gpus)).splitlines() if x.startswith("unused")]
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    taken = []
    monkeypatch.setattr(runner, "_run", lambda plan, store, where, **options: taken.extend(where))
    runner.run_plan(wanted, Store(tmp_path), device="cuda")
    said = capsys.readouterr().err.splitlines()
    assert {len(place) for place in taken} == {ranks} and len({d for p in taken for d in p}) == gpus - unused
    assert [line.removeprefix("unused").strip() for line in lines] == said
    assert len(said) == (unused > 0)
    if unused:
        assert said[0].startswith(f"{unused} of {gpus} GPUs idle: an arm takes {ranks}, as {gpus} do not share its 16 ")
        assert said[0].endswith("none idles with 1, 2, 4, 8, 16, or a multiple of 16")


def test_what_the_trainer_would_refuse_for_want_of_gpus_is_refused(tmp_path):
    wanted = large(["fp8"], ranks_per_arm=4)
    with pytest.raises(UserError, match="4 ranks an arm need 4 GPUs, there are 2"):
        dry_run(wanted, Store(tmp_path), gpus=2)
    said = text(dry_run(wanted, Store(tmp_path), gpus=5))
    assert "1 of 5 GPUs idle: an arm takes 4; none idles with a multiple of 4" in said


def test_arms_that_share_a_group_of_gpus_share_its_memory(tmp_path):
    one, two = (dry_run(large(["fp8"], jobs=n), Store(tmp_path), gpus=8, memory_gb=200) for n in (1, 2))
    assert (one.at_a_time, two.at_a_time) == (1, 2)
    assert not one.problems and "for 2 arms at a time" in two.problems[0]


def test_what_is_done_costs_nothing_and_gives_the_speed_of_the_rest(tmp_path):
    store, small = Store(tmp_path), plan("table1", "cpu", recipes=["bf16", "mxfp4"], seeds=[0])
    put(store, small.arms[0], arms_on_device=2)
    result = dry_run(small, store)
    done, left = result.costs
    assert done.source == "done" and done.gpu_hours_left == 0
    assert left.seconds_per_step == pytest.approx(1.1 / 2 / small.arms[0].steps)  # fake_studies: 1.0 s and 0.1 s
    assert left.gpu_hours_left == pytest.approx(1.1 / 3600 / 2), "two arms shared the device"
    assert "records: 1 of 2 arms" in text(result) and "records of this scale" in text(result)


def test_what_training_would_refuse_is_refused_with_nothing_left_to_train(tmp_path):
    store, small = Store(tmp_path), plan("table1", "cpu", recipes=["bf16"], seeds=[0])
    put(store, small.arms[0])
    for refused in ({"memory_gb": -5}, {"gpus": -1}):
        (value,) = refused.values()
        with pytest.raises(UserError, match=f"={value} must be"):
            dry_run(small, store, **refused)
    with pytest.raises(UserError, match="recompute_every=-2 must be"):
        dry_run(replace(small, scale=replace(small.scale, recompute_every=-2)), store)


def test_what_is_too_large_is_told_what_helps_there(tmp_path):
    def use(arms, **given):
        (problem,) = dry_run(arms, Store(tmp_path), **given).problems
        return problem.partition(" GB: use ")[2]

    one_gpu = plan("table1", "gpu", recipes=["fp8"])
    alone = replace(one_gpu, scale=replace(one_gpu.scale, jobs=1))
    assert use(one_gpu, memory_gb=8) == "fewer arms at a time (--jobs) or --recompute-every 1"
    assert use(alone, memory_gb=2) == "--recompute-every 1"
    assert use(replace(alone, scale=replace(alone.scale, recompute_every=1)), memory_gb=2) == ""
    assert use(large(["fp8"]), gpus=1, memory_gb=100) == "more GPUs (--gpus) or --recompute-every 1"


def test_scale_gpu_counts_the_arms_that_share_a_gpu(tmp_path):
    one, four = (dry_run(replace(p, scale=replace(p.scale, jobs=n)), Store(tmp_path), memory_gb=80)
                 for p in [plan("table1", "gpu", recipes=["mxfp4+h16"])] for n in (1, 40))  # fmt: skip
    assert one.problems == () and "for 40 arms at a time" in four.problems[0] and "80.0 GB" in four.problems[0]


def test_shards_are_part_of_the_plan(tmp_path, capsys):
    assert main(["train", "--dry-run", "--scale", "mi355x", "--arm", "fp8", "--corpus", "c4:768-799"]) == 0
    out = capsys.readouterr().out
    assert "shards 768-799" in out and re.search(r" 23\.\d+ GB  packed tokens of c4:768-799", out)
    assert main(["train", "--dry-run", "--scale", "mi355x", "--corpus", "c4:7-"]) == 1
    assert "c4:768-895" in capsys.readouterr().err


def test_memory_is_within_a_tenth_of_what_gpus_measured():
    """The committed records of scale gpu: compiled, without probes, which need memory of their own."""
    records = [
        r for r in Store(RECORDED).load("gpu")
        if r.config.recipe in TIMED and not r.config.probe_steps and not r.config.model.n_experts
    ]  # fmt: skip
    if not records:
        pytest.skip("no records of scale gpu in this checkout")
    for r in records:
        expected = estimate(r.config, compiled=True, native=r.paths[0] == "native", fp8=r.paths[1] == "native").peak
        assert expected == pytest.approx(r.timings["peak_memory_bytes"], rel=0.1), r.run_id
