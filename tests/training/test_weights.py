"""Kept weights: what was trained comes back, whole or not at all, and the folder is read by other programs."""

from __future__ import annotations

import errno
import json

import pytest
import torch
from safetensors import safe_open

from mxfp4.errors import UserError
from mxfp4.training import weights
from mxfp4.training.loop import train
from tests.fakes import FakeCorpus, tiny_config
from tests.fakes.checkpoints import leave
from tests.fakes.ranks import full_state, launch


@pytest.fixture(scope="module")
def trained():
    config = tiny_config(recipe="mxfp4+h16", steps=3)
    return config, train(config, corpus=FakeCorpus(), progress=False).model


def test_what_was_trained_comes_back(trained, tmp_path):
    config, model = trained
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text("{}")
    weights.save(tmp_path / "a" / "run", model, config, tokenizer)
    found = weights.load(tmp_path / "a" / "run")
    assert (found.config, found.step) == (config, None)
    assert found.tokenizer.read_text() == "{}"
    assert found.tensors.keys() == model.state_dict().keys()
    assert all(torch.equal(found.tensors[name], value) for name, value in model.state_dict().items())
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == ["run"]
    with safe_open(tmp_path / "a" / "run" / "model.safetensors", framework="pt") as file:
        assert json.loads(file.metadata()["config"])["recipe"] == "mxfp4+h16"


def test_a_checkpoint_serves_as_well(trained, tmp_path):
    config, model = trained
    assert not weights.kept(tmp_path)
    leave(tmp_path, 2, {f"model.{name}": p for name, p in model.named_parameters()}, {"config": config.to_dict()})
    found = weights.load(tmp_path)
    assert (found.config, found.step, found.tokenizer) == (config, 2, None)
    assert found.tensors.keys() == model.state_dict().keys()
    assert all(torch.equal(found.tensors[name], value) for name, value in model.state_dict().items())


def two_ranks(ranks, folder):
    config, steps = tiny_config(recipe="mxfp4+h16", steps=4, micro_batches=2), []
    options = {"corpus": FakeCorpus(), "device": "cpu", "progress": False}
    result = train(config, **options)
    weights.save(folder / "kept", result.model, config)
    paused = train(
        config, checkpoint_dir=folder / "paused", on_step=steps.append, stop=lambda: len(steps) == 2, **options
    )
    for name, model in (("kept", result.model), ("paused", paused.model)):
        if hasattr(model, "reshard"):
            model.reshard()
        state = full_state(model)
        if ranks.rank == 0:
            torch.save(state, folder / f"{name}.pt")


def test_weights_spread_over_two_ranks_come_back_whole(tmp_path):
    launch(two_ranks, 2, tmp_path)
    for name, step in (("kept", None), ("paused", 2)):
        found, right = weights.load(tmp_path / name), torch.load(tmp_path / f"{name}.pt", weights_only=True)
        assert (found.step, found.config.steps) == (step, 4)
        assert found.tensors.keys() == right.keys()
        assert all(torch.equal(found.tensors[n], value) for n, value in right.items())
    (file, *_) = (tmp_path / "paused" / "step-00000002").glob("*.distcp")
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.warns(UserWarning, match="is damaged"), pytest.raises(UserError, match="nor a whole checkpoint"):
        weights.load(tmp_path / "paused")


def test_a_full_disk_leaves_what_was_there(trained, tmp_path, monkeypatch):
    config, model = trained
    weights.save(tmp_path / "run", model, config)

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(weights, "save_file", full)
    with pytest.raises(UserError, match="cannot write weights .*run: the disk is full"):
        weights.save(tmp_path / "run", model, config)
    assert [p.name for p in tmp_path.iterdir()] == ["run"]
    assert weights.load(tmp_path / "run").config == config


def test_what_is_no_model_is_named(trained, tmp_path):
    with pytest.raises(UserError, match="holds neither model.safetensors nor a whole checkpoint"):
        weights.load(tmp_path)
    weights.save(tmp_path / "run", trained[1], trained[0])
    file = tmp_path / "run" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(UserError, match="is damaged or not of a run"):
        weights.load(tmp_path / "run")
