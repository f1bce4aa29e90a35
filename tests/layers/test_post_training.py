"""FP4 after training: the search finds scales at least as good as those it starts from, and the forward is what it says."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from mxfp4.errors import UserError
from mxfp4.layers.convert import convert
from mxfp4.layers.linear import MXFP4Linear
from mxfp4.layers.post_training import SearchedLinear, on_grid, quantize_after_training, search
from tests.training.test_branch import PLAIN


def _operands(seed=0, tokens=256, n=64, k=96):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, k, generator=generator) * torch.logspace(-1, 0.5, k)
    return x, torch.randn(n, k, generator=generator) / k**0.5


def _error(layer, x, weight):
    return (layer(x) - x @ weight.T).square().mean()


def test_the_search_beats_scales_that_clip_nothing():
    x, weight = _operands()
    found = SearchedLinear(weight, None, *search(x, weight))
    ones = torch.ones(x.shape[1])
    naive = SearchedLinear(weight, None, weight.abs().amax(1, keepdim=True) / 6, x.abs().max() / 6, ones)
    assert _error(found, x, weight) < 0.7 * _error(naive, x, weight)


def test_shifts_alone_help_where_features_differ():
    x, weight = _operands()
    w_scale, x_scale, shift = search(x, weight)
    assert set(torch.log2(shift).tolist()) <= {-3.0, -2.0, -1.0, 0.0} and len(set(shift.tolist())) > 1
    narrow = x / x.abs().amax(0)
    assert search(narrow, weight)[2].eq(1).all()  # alike features are left as they are
    assert w_scale.shape == (64, 1) and x_scale.shape == ()


def test_the_forward_multiplies_e2m1_values():
    x, weight = _operands()
    bias = torch.arange(64.0)
    w_scale, x_scale, shift = search(x, weight)
    x_values, w_values = on_grid(x / shift / x_scale), on_grid(weight * shift / w_scale)
    grid = {0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0}
    assert set(x_values.abs().unique().tolist()) <= grid and set(w_values.abs().unique().tolist()) <= grid
    expected = (x_values.double() * x_scale) @ (w_values.double() * w_scale).T + bias
    torch.testing.assert_close(
        SearchedLinear(weight, bias, w_scale, x_scale, shift)(x).double(), expected, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("zero", ["a feature", "a row", "all of x"])
def test_zeros_stay_zeros(zero):
    x, weight = _operands()
    if zero == "a feature":
        x[:, 3] = 0
    elif zero == "a row":
        weight[5] = 0
    else:
        x.zero_()
    y = SearchedLinear(weight, None, *search(x, weight))(x)
    assert y.isfinite().all() and (zero != "a row" or y[:, 5].eq(0).all()) and (zero != "all of x" or y.eq(0).all())


def test_each_converted_layer_is_replaced_and_none_without_input():
    model = convert(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32)), "bf16")
    x = torch.randn(40, 64)
    plain = model(x)
    quantize_after_training(model, lambda m: m(x))
    assert [type(m) for m in model] == [SearchedLinear, nn.ReLU, SearchedLinear]
    assert 0 < (model(x) - plain).square().mean() < 0.1 * plain.square().mean()
    unused = convert(nn.ModuleDict({"a": nn.Linear(32, 32), "b": nn.Linear(32, 32)}), "bf16")
    with pytest.raises(ValueError, match="layer 'b' got no input"):
        quantize_after_training(unused, lambda m: m["a"](torch.randn(32, 32)))
    assert isinstance(unused["a"], MXFP4Linear)


def test_a_configuration_takes_it_as_a_last_forward_alone():
    replace(PLAIN, eval_forwards=("bf16",), final_forwards=("llm-fp4",))
    for wrong in ({"recipe": "llm-fp4"}, {"eval_forwards": ("llm-fp4",)}, {"decay_recipes": ("llm-fp4",)}):
        with pytest.raises(UserError, match="llm-fp4"):
            replace(PLAIN, **wrong)
