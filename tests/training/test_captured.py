"""A step replayed as a CUDA graph trains as one launched kernel by kernel, eager and compiled (needs a GPU)."""

import math

import pytest
import torch
from fakes import FakeCorpus, tiny_config

from mxfp4.training.loop import train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
CORPUS = FakeCorpus()


def run(config, **options):
    return train(config, corpus=CORPUS, device="cuda", progress=False, **options)


# Twelve steps, of which nine are replays; the learning rate is warmed up and decays within them. BF16 sums in another
# order (an attention's backward, a fused norm) may move a loss by a few of its 2^-9.
@pytest.mark.parametrize("name", ["bf16", "fp8", "mxfp4+h16", "mxfp4+sr", "mxfp4+rht16", "ti2d", "nvfp4"])
@pytest.mark.parametrize("compile", [False, True])
def test_the_captured_step_gives_the_same_curve_and_weights(name, compile):
    if compile and name not in ("bf16", "mxfp4+sr"):
        pytest.skip("compiling is tried with two recipes")
    config = tiny_config(recipe=name, seq_len=32, batch_size=8)
    plain, captured = run(config, compile=compile), run(config, compile=compile, capture=True)
    for ours, theirs in zip(captured.curve, plain.curve, strict=True):
        for column in ("train_loss", "grad_norm", "eval_loss", "lr"):
            if not math.isnan(theirs[column]):
                assert ours[column] == pytest.approx(theirs[column], rel=0.02), (ours["step"], column)
    start = train(tiny_config(recipe=name, steps=1, warmup=10**9), corpus=CORPUS, device="cuda", progress=False).model
    for (key, a), b, c in zip(
        captured.model.named_parameters(), plain.model.parameters(), start.parameters(), strict=True
    ):
        assert (a - b).norm() < 0.1 * (b - c).norm(), key  # as far as the training moved it


def test_random_numbers_and_the_learning_rate_go_on_in_replays():
    config = tiny_config(recipe="mxfp4+sr", steps=8)
    result = run(config, capture=True)
    counter = result.model.layers[0].attention.wq.rng[1].item()
    assert counter >> 20 == 8 and counter & 0xFFFFF > 0
    assert result.curve[-1]["lr"] == pytest.approx(config.lr_min)


def test_a_captured_run_goes_on_from_its_checkpoint(tmp_path):
    config = tiny_config(recipe="mxfp4+h16", steps=10)
    whole = run(config, capture=True)
    halves = iter([False] * 4 + [True])
    assert run(config, capture=True, checkpoint_dir=tmp_path, stop=lambda: next(halves)).outcome["status"] == "paused"
    resumed = run(config, capture=True, checkpoint_dir=tmp_path)
    assert [r["step"] for r in resumed.curve] == list(range(11))
    assert resumed.outcome["final_loss"] == pytest.approx(whole.outcome["final_loss"], rel=0.02)
