"""`mxfp4 train --keep-weights` and `mxfp4 export`: from a run to a folder that other programs load."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import pytest
import torch
from safetensors.torch import load_file

from mxfp4 import cli
from mxfp4.cli.commands import train
from mxfp4.cli.commands.export import _again
from mxfp4.data import tokenizer as tokenizers_
from mxfp4.studies import train_arm as arm
from mxfp4.studies.plans import Plan, plan
from mxfp4.studies.runner import run_plan, train_arm
from mxfp4.studies.scales import CPU
from mxfp4.studies.store import Store
from mxfp4.training import weights
from tests.fakes import TINY, FakeCorpus
from tests.fakes.studies import put

SCALE = replace(
    CPU, model=replace(TINY, vocab_size=300), seq_len=16, batch_size=4, steps=4, eval_every=2, eval_sequences=4,
    warmup=1, probe_steps=(), jobs=1,
)  # fmt: skip


@dataclass(frozen=True)
class Packed(FakeCorpus):
    """A corpus with a folder, where its tokenizer lies."""

    vocab_size: int = 300
    folder: object = None


@pytest.fixture
def corpus(tmp_path):
    (tmp_path / "packed").mkdir()
    (tmp_path / "packed" / "tokenizer.json").write_bytes(tokenizers_.train(["one two three"], 300).to_bytes())
    return Packed(folder=tmp_path / "packed")


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setenv("MXFP4_RUNS", str(tmp_path / "runs"))
    return Store()


def an_arm() -> Plan:
    return plan("table1", SCALE, recipes=("mxfp4+h16",), seeds=(0,))


@pytest.mark.parametrize("jobs", [1, 2])
def test_weights_are_kept_where_asked_for_and_exported(jobs, store, corpus, tmp_path, capsys):
    one = an_arm()
    (config,) = one.arms
    run_plan(one, store, corpus=corpus, device="cpu", progress=False)
    assert not (store.root / "weights").exists()
    record = store.get(config, "cpu")
    again = run_plan(one, store, corpus=corpus, device="cpu", progress=False, keep_weights=True, jobs=jobs)
    assert again.trained == ["mxfp4+h16-s0"] and again.present == []
    assert store.get(config, "cpu").data == record.data  # the record stays
    there = run_plan(one, store, corpus=corpus, device="cpu", progress=False, keep_weights=True)
    assert there.trained == [] and there.present == ["mxfp4+h16-s0"]
    assert not store.checkpoint_dir(config, "cpu").exists()

    assert cli.main(["export", record.run_id, str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert f"{tmp_path / 'out'}: mxfp4+h16, seed 0, finished" in said and "without a tokenizer" not in said
    ours = load_file(store.weights_dir(config, "cpu") / "model.safetensors")
    theirs = load_file(tmp_path / "out" / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    assert torch.equal(theirs[name], ours["layers.0.feed_forward.w2.weight"])
    about = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (about["hidden_size"], about["eos_token_id"], about["architectures"]) == (64, 0, ["LlamaForCausalLM"])
    assert (tmp_path / "out" / "tokenizer.json").is_file()


def test_a_stopped_run_is_exported_from_its_checkpoint(store, corpus, tmp_path, capsys):
    (config,) = an_arm().arms
    steps = []
    train_arm(config, store, corpus=corpus, device="cpu", on_step=steps.append, stop=lambda: len(steps) == 2)
    run_id = store.run_id(config, "cpu")
    given = ["--tokenizer", str(corpus.folder), "--dtype", "bfloat16"]
    assert cli.main(["export", run_id, str(tmp_path / "out"), *given]) == 0
    assert "seed 0, step 2," in capsys.readouterr().out
    folder = store.checkpoint_dir(config, "cpu")
    assert cli.main(["export", str(folder), str(tmp_path / "same")]) == 0
    same, out = (load_file(tmp_path / n / "model.safetensors")["model.norm.weight"] for n in ("same", "out"))
    assert out.dtype == torch.bfloat16 and torch.equal(same.bfloat16(), out)


def test_what_is_not_there_is_one_line(store, corpus, tmp_path, capsys):
    assert cli.main(["export", "nothing", str(tmp_path / "out")]) == 1
    assert capsys.readouterr().err == "error: nothing is no run with weights; known: none\n"
    one = an_arm()
    run_plan(one, store, corpus=corpus, device="cpu", progress=False)
    (record,) = store.load()
    assert cli.main(["export", record.run_id, str(tmp_path / "out")]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "`mxfp4 train --scale cpu --arm mxfp4+h16 --seed 0 --keep-weights` trains it again, the record stays" in said
    weights.save(store.weights_dir(one.arms[0], "cpu"), torch.nn.Linear(2, 2), one.arms[0])
    assert cli.main(["export", "nothing", str(tmp_path / "out")]) == 1
    assert capsys.readouterr().err == f"error: nothing is no run with weights; known: {record.run_id}\n"
    assert not (tmp_path / "out").exists()


def test_the_command_that_trains_an_arm_again_trains_that_one_alone_where_it_can():
    sizes = plan("sizes", "gpu", recipes=["mxfp4"], seeds=[1]).arms
    assert [_again(arm).split(" --arm")[0].rpartition(" ")[2] for arm in sizes] == ["sizes", "table1", "sizes"]
    (experts,) = plan("moe", "gpu", recipes=["ti2d"], seeds=[0]).arms
    assert _again(experts) == "mxfp4 train --scale gpu --plan moe --arm ti2d --seed 0"


def test_train_says_where_the_weights_are(store, corpus, monkeypatch, capsys):
    monkeypatch.setattr(train, "chosen_plan", lambda args: an_arm())
    monkeypatch.setattr("mxfp4.studies.runner.prepare", lambda *args, **options: corpus)
    monkeypatch.setattr(arm, "prepare", lambda *args, **options: corpus)
    given = ["train", "--device", "cpu", "--jobs", "1"]
    assert cli.main(given) == 0
    assert "weights" not in capsys.readouterr().out
    for _ in range(2):  # trained, then there already
        assert cli.main([*given, "--keep-weights"]) == 0
        folder = store.weights_dir(an_arm().arms[0], "cpu")
        wanted = f"weights (1) in {folder.parent}, for `mxfp4 export RUN FOLDER`: {folder.name}"
        assert capsys.readouterr().out.splitlines()[1:] == [wanted]
        assert (folder / "model.safetensors").is_file()


def test_a_record_is_exported_as_an_mlperf_log(store, tmp_path, capsys):
    (config,) = an_arm().arms
    put(store, config)
    (record,) = store.load()
    command = ["export", record.run_id, str(tmp_path / "log.txt"), "--format", "mllog"]
    assert cli.main(command) == 0
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert f"{len(lines)} lines of {record.run_id}" in capsys.readouterr().out
    assert sum('"key": "eval_accuracy"' in line for line in lines) == record.curve["eval_loss"].notna().sum()
    assert cli.main(command) == 1 and "is there already" in capsys.readouterr().err
    assert cli.main(["export", "nothing", "x", "--format", "mllog"]) == 1 and "has no record" in capsys.readouterr().err
