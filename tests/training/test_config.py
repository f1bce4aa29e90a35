"""Configurations: what they refuse, and what a run's key may depend on."""

from dataclasses import replace

import pytest

from mxfp4.errors import UserError
from mxfp4.training.config import ModelConfig, TrainConfig
from tests.fakes import TINY, tiny_config


def test_round_trip_through_plain_data():
    config = tiny_config(probe_steps=(3, 5), target_loss=2.5)
    assert TrainConfig.from_dict(config.to_dict()) == config


def test_unknown_fields_are_refused_with_the_known_ones():
    with pytest.raises(UserError, match=r"unknown TrainConfig field 'learning_rate'; known: recipe, .*, lr,"):
        TrainConfig.from_dict({**tiny_config().to_dict(), "learning_rate": 1})
    with pytest.raises(UserError, match="unknown ModelConfig field 'depth'"):
        ModelConfig.from_dict({**TINY.to_dict(), "depth": 3})


def test_missing_fields_are_named():
    data = tiny_config().to_dict()
    del data["lr"], data["seed"]
    with pytest.raises(UserError, match="lacks seed, lr"):
        TrainConfig.from_dict(data)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"recipe": "mxfp5"}, "mxfp5"),
        ({"steps": 0}, "steps=0"),
        ({"seed": -1}, "^seed=-1 must not be negative$"),
        ({"seq_len": 33}, "seq_len=33 exceeds the model's max_seq_len=32"),
        ({"micro_batches": 3}, "batch_size=4 must be a multiple of micro_batches=3"),
        ({"lr_min": 1.0}, "lr_min=1.0"),
        ({"stop_at_target": True}, "needs a target_loss"),
    ],
)
def test_values_that_cannot_work_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        tiny_config(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"n_heads": 3},
        {"n_kv_heads": 3},
        {"dim": 0},
        {"rope_scaling_factor": 0.5},
        {"n_experts": 2, "n_experts_per_token": 3},
    ],
)
def test_sizes_that_cannot_work_are_refused(changes):
    with pytest.raises(UserError, match=next(reversed(changes))):
        replace(TINY, **changes)


def test_a_field_at_its_default_is_not_in_the_key_so_that_fields_can_be_added():
    key = tiny_config().key_dict()
    assert "weight_decay" not in key and "append_eod" not in key
    assert "tie_embeddings" not in key["model"] and "rope_scaling_factor" not in key["model"]
    assert tiny_config(weight_decay=0.0).key_dict()["weight_decay"] == 0.0
    assert key["lr"] == tiny_config().lr and key["model"]["dim"] == TINY.dim
