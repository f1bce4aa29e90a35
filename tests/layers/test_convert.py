"""What `convert` does to a layer: hooks, attributes, parametrizations, offloading and places stay; the rest is refused.

Roles, names and sizes: test_convert_roles.py.
"""

import copy
import io

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

import mxfp4
from mxfp4 import MXFP4Linear, convert


class Conv1D(nn.Module):
    """As GPT-2's."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(64, 192))


def test_a_converted_model_is_refused_rather_than_left_with_its_recipe():
    model = convert(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), "mxfp4+h16", lambda m, fqn: fqn == "0")
    for name in ("mxfp4", "mxfp4+h16"):
        with pytest.raises(
            ValueError, match=r"^1 layers are MXFP4Linear already, '0' with recipe 'mxfp4\+h16': [^\n]*$"
        ):
            convert(model, name)
        assert type(model[1]) is nn.Linear
    convert(model, "fp8", lambda m, fqn: fqn == "1")  # the others
    assert [layer.recipe.name for layer in model] == ["mxfp4+h16", "fp8"]
    with pytest.raises(ValueError, match="'the model' with recipe"):
        convert(model[0], "fp8")


@pytest.mark.parametrize(
    ("layers", "filter_fn", "what"),
    [
        ({"c_attn": Conv1D(), "c_proj": Conv1D(), "wte": nn.Embedding(9, 64)}, None,
         "convert does not know its 2 Conv1D"),
        ({"wte": nn.Embedding(9, 64), "norm": nn.LayerNorm(64)}, None, "it has no nn.Linear"),
        ({"lm_head": nn.Linear(64, 64)}, None,
         r"output head \(by its name\): left out are its 1 nn.Linear \('lm_head'\)"),
        ({c: nn.Linear(64, 64) for c in "abcd"}, lambda m, fqn: fqn == "wq",
         r"filter_fn holds for none of its 4 nn.Linear \('a', 'b', 'c'\)"),
    ],
)  # fmt: skip
def test_a_model_with_nothing_to_convert_is_refused_with_what_it_has(layers, filter_fn, what):
    with pytest.raises(ValueError, match=f"^no layer to convert to 'mxfp4': {what}$"):
        convert(nn.ModuleDict(layers), "mxfp4", filter_fn)


def quantized(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """What a layer with the weight that `linear` has now gives under mxfp4."""
    plain = nn.Linear(linear.in_features, linear.out_features)
    with torch.no_grad():
        plain.weight.copy_(linear.weight)
        plain.bias.copy_(linear.bias)
    return MXFP4Linear.from_linear(plain, "mxfp4")(x)


@pytest.fixture
def x():
    return torch.randn(32, 64, generator=torch.Generator().manual_seed(0))


def test_a_layer_in_two_places_is_one_quantized_layer_in_both(x):
    layer = nn.Linear(64, 64)
    model = convert(nn.Sequential(layer, nn.ReLU(), layer), "mxfp4")
    assert model[0] is model[2] and isinstance(model[2], MXFP4Linear)
    y = quantized(layer, x).relu()
    assert torch.equal(model(x), quantized(layer, y))
    line = mxfp4.report(model).converted[0]
    assert line.places == 2 and line.weights == 64 * 64 and line.flops == 2 * 2 * 64 * 64


def test_a_layer_that_the_users_code_holds_is_converted_too(x):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(64, 64)
            self.unregistered = [self.a]

        def forward(self, x):
            return self.unregistered[0](x)

    model = convert(Model(), "mxfp4")
    assert torch.equal(model(x), quantized(model.a, x))


def test_hooks_handles_and_attributes_stay(x):
    layer, seen = nn.Linear(64, 64), []
    handles = [
        layer.register_forward_pre_hook(lambda m, args: seen.append("pre")),
        layer.register_forward_hook(lambda m, args, kwargs, y: seen.append("forward"), with_kwargs=True),
        layer.register_full_backward_pre_hook(lambda m, g: seen.append("backward pre")),
        layer.register_full_backward_hook(lambda m, gi, go: seen.append("backward")),
        layer.register_state_dict_post_hook(lambda m, state, prefix, meta: seen.append("state_dict")),
        layer.register_load_state_dict_post_hook(lambda m, keys: seen.append("load")),
    ]
    layer.note = "mine"
    model = convert(nn.Sequential(layer), "mxfp4")
    model(x.clone().requires_grad_()).sum().backward()
    model.load_state_dict(model.state_dict())
    assert seen == ["pre", "forward", "backward pre", "backward", "state_dict", "load"]
    assert model[0].note == "mine"
    for handle in handles:
        handle.remove()
    model(x)
    assert len(seen) == 6


PARAMETRIZED = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "old weight_norm": torch.nn.utils.weight_norm,
    "old spectral_norm": torch.nn.utils.spectral_norm,
    "pruning": lambda m: prune.l1_unstructured(m, "weight", 0.5),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning", "ignore:.*is deprecated.*")
@pytest.mark.parametrize("name", PARAMETRIZED)
def test_a_weight_that_is_computed_is_quantized_as_it_is_computed(name, x):
    torch.manual_seed(0)
    layer = nn.Linear(64, 64)
    PARAMETRIZED[name](layer)
    names = list(layer.state_dict())
    model = convert(nn.Sequential(layer).eval(), "mxfp4")
    assert isinstance(model[0], MXFP4Linear) and list(layer.state_dict()) == names
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    for _ in range(2):  # a change of what it is computed from is seen
        y = model(x)
        torch.testing.assert_close(y, quantized(layer, x))
        y.square().mean().backward()
        before = [p.clone() for p in model.parameters()]
        optimizer.step()
        assert all(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert mxfp4.report(model).quantized_weights == 1
    if hasattr(layer, "parametrizations"):  # torch copies the older ones before their first forward only
        torch.testing.assert_close(copy.deepcopy(model)(x), model(x))


def test_offloaded_layers_compute_as_those_that_are_not(x):
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed (pip install -e '.[hf]')")
    plain = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    y = convert(copy.deepcopy(plain), "mxfp4+h16")(x)
    offloaded = accelerate.cpu_offload(copy.deepcopy(plain), execution_device="cpu")
    assert offloaded[0].weight.is_meta
    convert(offloaded, "mxfp4+h16")
    assert torch.equal(offloaded(x), y) and torch.equal(offloaded(x), y)
    after = accelerate.cpu_offload(convert(copy.deepcopy(plain), "mxfp4+h16"), execution_device="cpu")
    assert torch.equal(after(x), y)
    accelerate.hooks.remove_hook_from_module(offloaded, recurse=True)
    assert torch.equal(offloaded(x), y)
    removed = accelerate.cpu_offload(copy.deepcopy(plain), execution_device="cpu")
    accelerate.hooks.remove_hook_from_module(removed, recurse=True)
    assert torch.equal(convert(removed, "mxfp4+h16")(x), y)


def test_a_layer_whose_forward_was_replaced_is_refused_by_name(x):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model[1].forward = lambda x: x
    with pytest.raises(ValueError, match="^layer '1' cannot be converted: its forward was replaced on the object; lea"):
        convert(model, "mxfp4", lambda m, fqn: True)
    assert type(model[0]) is nn.Linear
    report = mxfp4.report(convert(model, "mxfp4"))
    assert [line.name for line in report.converted] == ["0"]
    assert [(line.name, line.reason) for line in report.left_out] == [("1", "its forward was replaced on the object")]


def test_subclasses_and_quantized_weights_are_listed_by_name():
    class Linear8bit(nn.Linear):
        pass

    class Codes(torch.Tensor):
        pass

    model = nn.Sequential(nn.Linear(64, 64), Linear8bit(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    model[2].weight = nn.Parameter(torch.ones(64, 64, dtype=torch.int8), requires_grad=False)
    model[3].weight = nn.Parameter(torch.zeros(64, 64).as_subclass(Codes))
    report = mxfp4.report(convert(model, "mxfp4"))
    assert {line.name: line.reason for line in report.left_out} == {
        "1": "Linear8bit is a subclass of nn.Linear",
        "2": "its weight is int8; floating-point weights are quantized",
        "3": "its weight is a Codes, not a plain tensor",
    }
    assert report.quantized_weights == 0.25


def test_an_attribute_that_the_layer_would_overwrite_is_refused():
    model = nn.Sequential(nn.Linear(64, 64))
    model[0].fqn = "mine"
    with pytest.raises(
        ValueError, match="^layer '0' has an attribute 'fqn' of its own, which MXFP4Linear uses; rename it$"
    ):
        convert(model, "mxfp4")
    assert type(model[0]) is nn.Linear


def test_a_lazy_layer_is_refused():
    with pytest.raises(ValueError, match="^layer '1' is a LazyLinear without a size; run a batch"):
        convert(nn.Sequential(nn.Linear(64, 64), nn.LazyLinear(64)), "mxfp4")


@pytest.mark.parametrize("padding", [False, True])
def test_transformer_encoder_evaluates_as_it_trains(padding):
    """Its fast path reads the weights of linear1 and linear2 past their forward."""
    torch.manual_seed(0)
    plain = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 2, 128, dropout=0.0, batch_first=True), 2)
    model = convert(copy.deepcopy(plain), "mxfp4")
    x = torch.randn(2, 32, 64)
    mask = torch.arange(32).expand(2, 32) >= torch.tensor([[32], [20]]) if padding else None
    trained = model.train()(x, src_key_padding_mask=mask)
    with torch.no_grad():
        evaluated = model.eval()(x, src_key_padding_mask=mask)
        unconverted = plain.eval()(x, src_key_padding_mask=mask)
    torch.testing.assert_close(evaluated, trained.detach())
    if not padding:
        assert (evaluated - unconverted).abs().max() > 0.01
    left = {line.name: line.reason for line in mxfp4.report(model).left_out}
    assert left["layers.0.self_attn.out_proj"] == (
        "nn.MultiheadAttention reads its matrices itself (NonDynamicallyQuantizableLinear)"
    )
    assert left["layers.0.self_attn.in_proj_weight"] == "nn.MultiheadAttention reads its matrices itself"


def test_a_converted_model_is_copied_and_pickled_with_its_report(x):
    model = convert(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)), "mxfp4")
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert torch.equal(other(x), model(x)) and str(mxfp4.report(other)) == str(mxfp4.report(model))


def test_an_optimizer_made_before_trains_the_converted_model(x):
    model = nn.Sequential(nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = model[0].weight.clone()
    convert(model, "mxfp4")(x).sum().backward()
    optimizer.step()
    assert not torch.equal(model[0].weight, before)
