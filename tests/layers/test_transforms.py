"""torch.func on converted layers: first derivatives and vmap as a loop gives them; what has no right value is refused."""

import copy

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jacfwd, jacrev, jvp, stack_module_state, vmap

from mxfp4 import MXFP4Linear, set_step

RECIPES = ["mxfp4+h16", "ti2d-no-sr", "fp8", "nvfp4", "tetrajet", "quartet"]


def model(recipe: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        MXFP4Linear(64, 64, recipe=recipe, fqn="a"), nn.ReLU(), MXFP4Linear(64, 64, recipe=recipe, fqn="b")
    )


def weights(layers: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in layers.named_parameters()}


def loss_of(layers):
    return lambda parameters, x: functional_call(layers, parameters, (x,)).square().mean()


def eager(layers, x) -> dict[str, torch.Tensor]:
    set_step(layers, 1)
    layers.zero_grad()
    layers(x).square().mean().backward()
    return {name: p.grad.clone() for name, p in layers.named_parameters()}


@pytest.mark.parametrize("recipe", [*RECIPES, "mxfp4+sr"])
def test_a_gradient_and_per_sample_gradients_are_a_loops(recipe):
    layers, x = model(recipe), torch.randn(3, 40, 64)
    expected = [eager(layers, each) for each in x]
    set_step(layers, 1)
    found = grad(loss_of(layers))(weights(layers), x[0])
    assert all(torch.equal(found[name], value) for name, value in expected[0].items())
    set_step(layers, 1)
    found = vmap(grad(loss_of(layers)), (None, 0), randomness="same")(weights(layers), x)
    for name, value in found.items():
        assert torch.allclose(value, torch.stack([each[name] for each in expected]), rtol=1e-5, atol=1e-7), name


def test_a_gradient_of_a_batched_loss_misses_nothing():
    """The transform outside hides that X and W want gradients."""
    layers, x = model("mxfp4+h16"), torch.randn(3, 40, 64)
    total = lambda parameters: vmap(lambda each: loss_of(layers)(parameters, each))(x).sum()
    found = grad(total)(weights(layers))
    for name, value in found.items():
        expected = sum(eager(layers, each)[name] for each in x)
        assert torch.allclose(value, expected, rtol=1e-4, atol=1e-6), name


def test_models_side_by_side():
    several = [copy.deepcopy(model("mxfp4+h16")) for _ in range(3)]
    for layers in several:
        torch.nn.init.normal_(layers[0].weight)
    x = torch.randn(33, 64)
    parameters, buffers = stack_module_state(several)
    y = vmap(lambda p, b: functional_call(several[0], (p, b), (x,)))(parameters, buffers)
    assert torch.equal(y, torch.stack([layers(x) for layers in several]))


def test_samples_draw_as_vmaps_randomness_says():
    layers, x = model("mxfp4+sr"), torch.randn(1, 40, 64).expand(3, 40, 64)
    with pytest.raises(RuntimeError, match='randomness="error" is set'):
        vmap(layers)(x)
    set_step(layers, 1)
    alone = layers(x[0])
    set_step(layers, 1)
    assert torch.equal(vmap(layers, randomness="same")(x), alone.expand(3, -1, -1))
    found = []
    for _ in range(2):
        set_step(layers, 1)
        found.append(vmap(layers, randomness="different")(x))
    assert torch.equal(*found) and torch.equal(found[0][0], alone)
    assert not torch.equal(found[0][0], found[0][1]) and not torch.equal(found[0][1], found[0][2])
    layers.eval()
    assert torch.equal(vmap(layers)(x)[2], layers(x[2]))


@pytest.mark.parametrize("recipe", ["mxfp4", "quartet"])
def test_what_has_no_right_value_is_refused_in_a_line(recipe):
    layers, x = model(recipe), torch.randn(32, 64)
    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        jvp(layers, (x,), (x,))
    if recipe == "mxfp4":  # quartet draws, which vmap refuses first
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            jacfwd(lambda each: layers(each).sum(0))(x)
        assert jacrev(lambda each: layers(each).sum(0))(x).shape == (64, 32, 64)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        layers(forward_ad.make_dual(x, x))
    with pytest.raises(RuntimeError, match="cannot differentiate twice"):
        grad(lambda a: grad(lambda b: layers(b).square().sum())(a).sum())(x)
