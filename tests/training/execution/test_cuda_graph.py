"""A step replayed as a CUDA graph trains as one launched kernel by kernel, eager and compiled; and one that fails."""

import gc
import math
from contextlib import contextmanager, nullcontext

import pytest
import torch

from mxfp4.training.execution.cuda_graph import WARM_UP, CapturedStep
from mxfp4.training.loop import train
from tests.fakes import FakeCorpus, tiny_config


def on_gpu(test):
    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")(test))


CORPUS = FakeCorpus()


def run(config, **options):
    return train(config, corpus=CORPUS, device="cuda", progress=False, **options)


# Twelve steps, of which nine are replays; the learning rate is warmed up and decays within them. BF16 sums in another
# order (an attention's backward, a fused norm) may move a loss by a few of its 2^-9.
@on_gpu
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


@on_gpu
def test_random_numbers_and_the_learning_rate_go_on_in_replays():
    config = tiny_config(recipe="mxfp4+sr", steps=8)
    result = run(config, capture=True)
    counter = result.model.layers[0].attention.wq.draws.state[1].item()
    assert counter >> 20 == 8 and counter & 0xFFFFF > 0
    assert result.curve[-1]["lr"] == pytest.approx(config.lr_min)


@on_gpu
def test_a_captured_run_goes_on_from_its_checkpoint(tmp_path):
    config = tiny_config(recipe="mxfp4+h16", steps=10)
    whole = run(config, capture=True)
    halves = iter([False] * 4 + [True])
    assert run(config, capture=True, checkpoint_dir=tmp_path, stop=lambda: next(halves)).outcome["status"] == "paused"
    resumed = run(config, capture=True, checkpoint_dir=tmp_path)
    assert [r["step"] for r in resumed.curve] == list(range(11))
    assert resumed.outcome["final_loss"] == pytest.approx(whole.outcome["final_loss"], rel=0.02)


class Graph:
    """Stands for a CUDA graph: recorded inside `torch.cuda.graph`, it can be replayed once that ends."""

    recorded = False

    def replay(self):
        assert self.recorded, "a graph is replayed that was never recorded"


@contextmanager
def recording(graph, stream):
    assert not gc.isenabled()
    yield
    graph.recorded = True


@pytest.mark.parametrize("at", range(1, WARM_UP + 2))
def test_a_step_that_raises_counts_for_nothing_and_is_captured_when_it_works(at, monkeypatch):
    class Stream:
        wait_stream = staticmethod(lambda other: None)

    fakes = {"Stream": lambda device: Stream, "current_stream": lambda device: Stream, "CUDAGraph": Graph}
    fakes |= {"stream": lambda stream: nullcontext(), "graph": recording}
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    fails, calls = [at], []

    def step(batch):
        calls.append(batch)
        if len(calls) in fails:
            raise KeyError("step")
        return batch.sum()

    captured, batch, results, collecting = CapturedStep(step), torch.ones(3), [], gc.isenabled()
    for _ in range(WARM_UP + 4):
        try:
            results.append(captured(batch))
        except KeyError:
            assert captured.graph is None and gc.isenabled() == collecting
    assert len(calls) == WARM_UP + 2  # the failed one, the warm-up, the capture; all others replay
    assert results == [3] * (WARM_UP + 3)
