"""Sums in a fixed order: the settings come back, and a run repeated on a GPU, or resumed there, has the same bits."""

from dataclasses import replace

import pytest
import torch

from mxfp4.training.execution.determinism import fixed_order
from mxfp4.training.loop import train
from tests.fakes import TINY, FakeCorpus, tiny_config

CORPUS = FakeCorpus()
gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def settings():
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
    )


@pytest.mark.parametrize("fails", [False, True])
def test_pytorchs_settings_come_back(fails):
    before = settings()
    try:
        with fixed_order():
            assert settings() == (True, False, False)
            if fails:
                raise KeyError
    except KeyError:
        pass
    assert settings() == before


def test_a_run_is_within_them_and_leaves_them_as_they_were():
    before, seen = settings(), []
    options = {"progress": False, "deterministic": True, "on_step": lambda _: seen.append(settings())}
    train(tiny_config(steps=2), corpus=CORPUS, device="cpu", **options)
    assert seen == [(True, False, False)] * 2 and settings() == before


def run(name, **options):
    config = tiny_config(recipe=name, model=replace(TINY, max_seq_len=256), seq_len=256, batch_size=16, steps=16)
    return train(config, corpus=CORPUS, device="cuda", progress=False, capture=True, deterministic=True, **options)


@pytest.mark.parametrize("name", [pytest.param(n, marks=gpu) for n in ("bf16", "fp8", "mxfp4+h16", "mxfp4+sr")])
def test_a_run_on_a_gpu_again_and_one_that_was_resumed_have_the_same_bits(name, tmp_path):
    first, again = run(name), run(name)
    halves = iter([False] * 7 + [True])
    assert run(name, checkpoint_dir=tmp_path, stop=lambda: next(halves)).outcome["status"] == "paused"
    resumed = run(name, checkpoint_dir=tmp_path)
    for other in (again, resumed):
        losses = [[row["train_loss"] for row in result.curve[1:]] for result in (first, other)]
        assert losses[0] == losses[1]
        for (key, a), b in zip(first.model.named_parameters(), other.model.parameters(), strict=True):
            assert torch.equal(a, b), key
