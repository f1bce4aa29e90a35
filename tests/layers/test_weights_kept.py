"""Quantized weights that forwards share: the same results, made once, and never those of another weight."""

import copy
import pickle
from contextlib import nullcontext

import pytest
import torch

from mxfp4 import convert, recipe, set_step
from mxfp4.layers import linear
from mxfp4.layers.linear import MXFP4Linear, weights_kept, weights_made
from mxfp4.training.evaluation import token_loss
from mxfp4.training.loop import train
from mxfp4.training.model import build_model
from tests.fakes import TINY, FakeCorpus, tiny_config


@pytest.fixture
def made(monkeypatch):
    """Counts how often a weight is quantized."""
    counts = []
    honest = linear.quantize_tensor

    def counted(t, plan, seed, amax=None):
        counts.extend(["w"] * (plan.tensor == "w"))
        return honest(t, plan, seed, amax)

    monkeypatch.setattr(linear, "quantize_tensor", counted)
    return counts


def gradients(recipe, keep, parts=3):
    model = convert(build_model(TINY, 0), recipe)
    set_step(model, 1)

    def run():
        for seed in range(parts):
            token_loss(model, torch.randint(64, (2, 17), generator=torch.Generator().manual_seed(seed))).backward()

    if keep:
        with weights_kept(model):
            run()
    else:
        run()
    assert all(m.weight_cache is None for m in model.modules() if isinstance(m, MXFP4Linear))
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize(
    "recipe", ["mxfp4+h16", "mxfp4+sr-grad", "mxfp4+sr", "mxfp4+rht16", "fp8", "fp8+delayed", "mxfp4+2d", "nvfp4"]
)
def test_kept_weights_change_no_bit(recipe, made):
    plain = gradients(recipe, keep=False)
    without = len(made)
    kept = gradients(recipe, keep=True)
    assert all(torch.equal(a, b) for a, b in zip(plain, kept, strict=True))
    draws = recipe in ("mxfp4+sr", "mxfp4+rht16")  # for weights: a new draw at every forward, as without
    assert len(made) - without == (without if draws else without // 3)


def routes():
    """Ways in which a weight changes, as (name, function of the layer and a new weight)."""

    def optimizer(layer, new):
        layer.weight.grad = layer.weight.detach() - new
        torch.optim.SGD([layer.weight], lr=1.0).step()

    def fused(layer, new):
        layer.weight.grad = torch.ones_like(layer.weight)
        torch.optim.AdamW([layer.weight], lr=0.1, fused=True).step()

    def another_tensor(layer, new):
        layer.weight.data = new.clone()
        layer.weight.data = new.clone()  # the allocator may give it the first one's address

    def another_part(layer, new):
        stack = torch.stack([layer.weight.detach(), new])
        layer.weight = torch.nn.Parameter(stack[0])
        layer(torch.randn(32, 64))
        layer.weight = torch.nn.Parameter(stack[1])

    def turned(layer, new):
        layer.weight = torch.nn.Parameter(layer.weight.detach().view(64, 32).t())

    return {
        "optimizer": optimizer,
        "fused optimizer": fused,
        "load_state_dict": lambda layer, new: layer.load_state_dict({"weight": new}),
        "in place": lambda layer, new: layer.weight.detach().copy_(new),
        "another tensor": another_tensor,
        "another part of one tensor": another_part,
        "the same memory in another order": turned,
        "another recipe": lambda layer, new: setattr(layer, "recipe", recipe("mxfp4").for_layer("")),
        "another parameter": lambda layer, new: setattr(layer, "weight", torch.nn.Parameter(new.clone())),
    }


@pytest.mark.parametrize("route", routes())
def test_a_weight_that_changes_inside_is_seen(route):
    layer = MXFP4Linear(64, 32, bias=False, recipe="mxfp4+h16")
    x, new = torch.randn(32, 64), torch.randn(32, 64)
    with weights_kept(layer):
        before = layer(x)
        assert torch.equal(before, layer(x))
        routes()[route](layer, new)
        after = layer(x)
    assert torch.equal(after, layer(x)) and not torch.equal(after, before)


def test_weights_made_in_inference_mode_are_used_and_not_kept(made):
    """PyTorch does not count their changes."""
    x, new = torch.randn(32, 64), torch.randn(32, 64)
    with torch.inference_mode():
        layer = MXFP4Linear(64, 32, bias=False, recipe="mxfp4+h16")
        with weights_kept(layer):
            before = layer(x)
            layer.weight.copy_(new)
            after = layer(x)
        assert torch.equal(after, layer(x)) and not torch.equal(after, before)


@pytest.mark.parametrize("way", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_a_copy_made_inside_keeps_nothing(way):
    layer = MXFP4Linear(64, 32, bias=False, recipe="mxfp4+h16")
    x = torch.randn(32, 64)
    with weights_kept(layer):
        before = layer(x)
        copied = way(layer)
    assert torch.equal(copied(x), before) and copied.weight_cache is None
    copied.weight.data.mul_(2)
    assert not torch.equal(copied(x), before)


def test_a_weight_written_through_data_is_seen_after_leaving():
    layer = MXFP4Linear(64, 32, bias=False, recipe="mxfp4+h16")
    x = torch.randn(32, 64)
    with weights_kept(layer):
        before = layer(x)
    layer.weight.data.copy_(torch.randn(32, 64))
    with weights_kept(layer):
        assert not torch.equal(layer(x), before)


def test_evaluation_and_training_do_not_share():
    """Without gradients the operand of Dgrad is not made; a training forward after it makes it."""
    layer = MXFP4Linear(64, 32, bias=False, recipe="mxfp4+h16")
    x = torch.randn(32, 64, requires_grad=True)
    with weights_kept(layer):
        with torch.no_grad():
            layer(x)
        layer(x).sum().backward()
    kept = x.grad.clone()
    x.grad = None
    layer(x).sum().backward()
    assert torch.equal(kept, x.grad)


def test_nothing_is_kept_after_an_error():
    layer = MXFP4Linear(64, 32, recipe="mxfp4")
    with pytest.raises(ValueError, match=r"\(3, 65\) must end in in_features=64"), weights_kept(layer):
        layer(torch.randn(3, 65))
    assert layer.weight_cache is None


def test_the_loop_quantizes_a_weight_once_a_step_and_once_an_evaluation(made, monkeypatch):
    config = tiny_config(recipe="mxfp4+h16", steps=2, micro_batches=4, eval_every=2, eval_sequences=3)
    result = train(config, corpus=FakeCorpus(), device="cpu", progress=False)
    layers = sum(isinstance(m, MXFP4Linear) for m in result.model.modules())
    assert len(made) == layers * (2 + 2)  # two steps, the evaluations of steps 0 and 2
    monkeypatch.setattr(MXFP4Linear, "keepable", property(lambda self: False))
    made.clear()
    plain = train(config, corpus=FakeCorpus(), device="cpu", progress=False)
    assert len(made) == layers * (2 * 4 + 2 * 3)
    assert repr(plain.curve) == repr(result.curve)


@pytest.mark.parametrize("recipe", ["mxfp4+h16", "fp8"])
def test_weights_made_before_serve_compiled_blocks(recipe, made, monkeypatch):
    """Through the graph that a compiler makes; in one graph, though some operands share a scale."""
    torch._dynamo.reset()
    tokens = [torch.randint(64, (2, 17), generator=torch.Generator().manual_seed(i)) for i in range(3)]
    results, counts, graphs = [], [], []
    for compiled, once in ((False, False), (True, True)):
        model = convert(build_model(TINY, 0), recipe)
        set_step(model, 1)
        if compiled:
            model.layers[0].compile(backend="eager")
        made.clear()
        torch._dynamo.utils.counters.clear()
        with weights_made(model) if once else nullcontext():
            for part in tokens:
                token_loss(model, part).backward()
        assert all(m.weight_made is None for m in model.modules() if isinstance(m, MXFP4Linear))
        results.append([p.grad for p in model.parameters()])
        counts.append(len(made))
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert graphs == [0, 1]
    assert counts[0] == 3 * 7 and counts[1] == 7


def test_weights_that_draw_random_numbers_are_not_made_before():
    layer = MXFP4Linear(64, 32, bias=False, recipe="mxfp4+sr")
    with weights_made(layer):
        assert layer.weight_made is None


@pytest.mark.parametrize("route", ["optimizer", "fused optimizer", "load_state_dict", "in place"])
def test_weights_made_before_are_not_used_once_one_changes(route):
    layer = MXFP4Linear(64, 32, bias=False, recipe="mxfp4+h16")
    x, new = torch.randn(32, 64), torch.randn(32, 64)
    with weights_made(layer):
        before = layer(x)
        routes()[route](layer, new)
        after = layer(x)
        assert copy.deepcopy(layer).weight_made is None
    assert torch.equal(after, layer(x)) and not torch.equal(after, before)


def test_weights_made_for_another_dtype_are_not_used():
    layer = MXFP4Linear(64, 32, bias=False, recipe="mxfp4")
    x = torch.randn(32, 64)
    with weights_made(layer, torch.bfloat16):
        assert torch.equal(layer(x), MXFP4Linear.from_linear(layer, "mxfp4")(x))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert layer(x).dtype == torch.bfloat16
