"""Extra backward passes: they compute what the training step computes, and leave nothing behind."""

from dataclasses import replace

import pytest
import torch

from mxfp4.diagnostics.extra_backward import capturing, gradients, quantized_layers, recipe_of, swapped, untouched
from mxfp4.layers.convert import convert
from mxfp4.layers.linear import set_step
from mxfp4.layers.recipe import recipe
from mxfp4.training.evaluation import token_loss
from mxfp4.training.model import build_model
from tests.fakes import TINY, FakeCorpus


def model_of(name: str, **changes):
    return convert(build_model(replace(TINY, **changes), 0), name)


def batch(n=2):
    return FakeCorpus().batch(0, n, 16, 0)


def test_gradients_are_those_of_the_training_step_to_the_bit():
    model = model_of("mxfp4+sr")
    with untouched(model):
        got = gradients(model, batch(), 7)
        other = gradients(model, batch(), 7, draw=1)
    set_step(model, 7)
    token_loss(model, batch()).backward()
    for name, p in model.named_parameters():
        assert torch.equal(got[name], p.grad), name
    assert not torch.equal(got["layers.0.attention.wq.weight"], other["layers.0.attention.wq.weight"])


def test_a_swapped_recipe_computes_as_a_model_converted_to_it():
    model, other = model_of("mxfp4+sr"), model_of("mxfp4+h16")
    with untouched(model):
        got = gradients(model, batch(), 1, "mxfp4+h16")
    token_loss(other, batch()).backward()
    for name, p in other.named_parameters():
        assert torch.equal(got[name], p.grad), name
    assert {m.recipe.name for m in quantized_layers(model).values()} == {"mxfp4+sr"}


def test_untouched_restores_gradients_buffers_random_numbers_recipes_and_mode_also_after_an_error():
    model = model_of("mxfp4+sr")
    set_step(model, 3)
    token_loss(model, batch()).backward()
    model.train()
    grads = [p.grad for p in model.parameters()]
    values = [g.clone() for g in grads]
    buffers = [b.clone() for b in model.buffers()]
    weights = [p.detach().clone() for p in model.parameters()]
    state = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="inside"), untouched(model):
        torch.rand(3)
        model.eval()
        gradients(model, batch(), 9, "bf16")
        raise RuntimeError("inside")
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training and all(m.training for m in model.modules())
    assert all(p.grad is g for p, g in zip(model.parameters(), grads, strict=True))
    assert all(torch.equal(g, v) for g, v in zip(grads, values, strict=True))
    assert all(torch.equal(b, v) for b, v in zip(model.buffers(), buffers, strict=True))
    assert all(torch.equal(p, v) for p, v in zip(model.parameters(), weights, strict=True))


def test_captured_tensors_are_those_of_the_layer():
    model = model_of("fp32")
    layers = quantized_layers(model)
    with untouched(model), capturing(layers) as seen:
        got = gradients(model, batch(), 1)
    assert list(seen) == list(layers)
    for fqn, c in seen.items():
        assert len(c.x) % 32 == 0
        torch.testing.assert_close(c.exact("wgrad"), got[f"{fqn}.weight"], rtol=1e-4, atol=1e-7)
    assert not any(m._forward_hooks for m in layers.values())


def test_experts_without_tokens_are_left_out():
    model = model_of("fp32", n_experts=8, n_experts_per_token=1)
    with untouched(model), capturing(quantized_layers(model)) as seen:
        gradients(model, batch(1)[:, :3], 1)  # two tokens reach at most two experts
    experts = {fqn.split(".experts.")[1][0] for fqn in seen if ".experts." in fqn}
    assert 1 <= len(experts) <= 2


def test_a_recipe_that_does_not_fit_a_layer_leaves_it_its_own():
    model = model_of("bf16")
    layer = quantized_layers(model)["layers.0.attention.wk"]  # 64 -> 32
    assert recipe_of(layer, "mxfp4", 1).name == "mxfp4"
    assert recipe_of(layer, "mxfp4+h64", 1) is layer.recipe
    with swapped(model, "mxfp4"):
        assert layer.recipe.fprop == recipe("mxfp4").fprop
    assert layer.recipe.name == "bf16"
