"""Layers whose weight is computed, masked, or read by another module: the same numerics as without, or refused by name."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm

import mxfp4
from mxfp4 import MXFP4Linear, convert


def pruned(linear):
    return prune.l1_unstructured(prune.l1_unstructured(linear, "weight", 0.5), "bias", 0.5)


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
@pytest.mark.parametrize(
    "wrap", [weight_norm, spectral_norm, pruned, parametrizations.weight_norm, parametrizations.spectral_norm]
)
@pytest.mark.parametrize("before", [True, False])
def test_a_computed_weight_is_quantized_at_each_forward(wrap, before):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 64)), torch.randn(32, 64)
    model[0] = wrap(model[0]) if before else model[0]
    convert(model, "mxfp4+h16")
    model[0] = model[0] if before else wrap(model[0])
    outputs = []
    for _ in range(2):
        model.train()(x).square().mean().backward()
        assert all(p.grad is not None for p in model.parameters())
        torch.optim.SGD(model.parameters(), 0.5).step()
        model.eval()(x)  # a hook computes the weight here, a parametrization at each use
        plain = nn.Linear(64, 64)
        plain.weight, plain.bias = (nn.Parameter(t.detach().clone()) for t in (model[0].weight, model[0].bias))
        outputs.append(model(x))
        assert torch.equal(outputs[-1], MXFP4Linear.from_linear(plain, "mxfp4+h16")(x))
    assert not torch.equal(*outputs)


def test_a_linear_layer_that_attention_reads_is_left_out_or_refused():
    """nn.MultiheadAttention multiplies with `out_proj.weight` itself, whatever class it has."""
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(64, 2), "linear": nn.Linear(64, 64)})
    model.attention.out_proj = nn.Linear(64, 64)
    with pytest.raises(
        ValueError, match="^layer 'attention.out_proj' cannot be converted: nn.MultiheadAttention reads"
    ):
        convert(copy.deepcopy(model), "mxfp4", lambda m, fqn: True)
    with pytest.warns(UserWarning, match="convert leaves 60% .* in modules that it cannot convert"):
        convert(model, "mxfp4")
    assert [line.name for line in mxfp4.report(model).converted] == ["linear"]


def test_subclasses_of_linear_layers_are_warned_of():
    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model = nn.ModuleList([Doubled(64, 64), nn.Bilinear(8, 8, 64), nn.Linear(64, 64)])
    with pytest.warns(UserWarning, match=r"convert leaves 67% .*\(1 Doubled, 1 Bilinear\)"):
        convert(model, "mxfp4")
    reasons = {line.name: line.reason for line in mxfp4.report(model).left_out}
    assert reasons["0"] == "Doubled is a subclass of nn.Linear"
    assert reasons["1.weight"] == "convert does not know Bilinear (a 3-D parameter)"
    with pytest.raises(ValueError, match="convert does not know its 1 Doubled"):
        convert(nn.Sequential(Doubled(64, 64)), "mxfp4")


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_refused(layout):
    model = convert(nn.Sequential(nn.Linear(64, 64)), "mxfp4").eval()
    nested = torch.nested.nested_tensor([torch.randn(8, 64), torch.randn(5, 64)], layout=layout)
    with pytest.raises(TypeError, match="^layer '0' got a nested tensor"):
        model(nested)


def test_an_encoder_made_of_a_converted_layer_evaluates_quantized():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 2, 128, dropout=0.0, batch_first=True)
    x, mask = torch.randn(2, 32, 64), torch.arange(32).expand(2, 32) >= torch.tensor([[32], [20]])
    plain = nn.TransformerEncoder(copy.deepcopy(layer), 2).eval()
    with pytest.warns(UserWarning):  # of convert, and of torch for the path that it leaves
        model = nn.TransformerEncoder(convert(layer, "mxfp4"), 2)
    trained = model(x, src_key_padding_mask=mask)
    with torch.no_grad():
        evaluated, unconverted = (m.eval()(x, src_key_padding_mask=mask) for m in (model, plain))
    valid = ~mask
    torch.testing.assert_close(evaluated[valid], trained[valid].detach())
    assert (evaluated[valid] - unconverted[valid]).abs().max() > 0.01
