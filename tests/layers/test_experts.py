"""Experts in 3-D parameters: each through a quantized layer of its own; parameters and state_dict as they were."""

import copy
import io

import pytest
import torch
from torch import nn

import mxfp4
from mxfp4 import MXFP4Linear, convert, recipe
from mxfp4.layers import experts

T, D, F, E, K = 24, 64, 32, 4, 2


class Experts(nn.Module):
    """As transformers 5 writes and marks them (`use_experts_implementation`)."""

    def __init__(self, transposed=False, gated=True, biased=False):
        super().__init__()
        self.num_experts, self.is_transposed, self.has_gate, self.has_bias = E, transposed, gated, biased
        generator = torch.Generator().manual_seed(0)

        def stacked(n_out, n_in):
            w = torch.randn(E, n_out, n_in, generator=generator) * n_in**-0.5
            return nn.Parameter(w.transpose(1, 2).contiguous() if transposed else w)

        first = "gate_up_proj" if gated else "up_proj"
        setattr(self, first, stacked(2 * F if gated else F, D))
        self.down_proj = stacked(D, F)
        if biased:
            setattr(self, first + "_bias", nn.Parameter(torch.randn(E, 2 * F if gated else F, generator=generator)))
            self.down_proj_bias = nn.Parameter(torch.randn(E, D, generator=generator))
        self.act_fn = nn.SiLU()

    def _apply_gate(self, x):
        gate, up = x.chunk(2, dim=-1)
        return self.act_fn(gate) * up

    def linear(self, x, name, e):
        weight = getattr(self, name)[e]
        y = x @ (weight if self.is_transposed else weight.t())
        return y + getattr(self, name + "_bias")[e] if self.has_bias else y

    def forward(self, hidden_states, top_k_index, top_k_weights):
        y = torch.zeros_like(hidden_states)
        for e in range(E):
            rows, slot = torch.where(top_k_index == e)
            inner = self.linear(hidden_states[rows], experts.projections(self)[0], e)
            inner = self._apply_gate(inner) if self.has_gate else self.act_fn(inner)
            y = y.index_add(0, rows, self.linear(inner, "down_proj", e) * top_k_weights[rows, slot, None])
        return y


class Mixture(nn.Module):
    def __init__(self, **how):
        super().__init__()
        self.router, self.experts, self.top_k = nn.Linear(D, E, bias=False), Experts(**how), K

    def forward(self, x):
        weights, index = self.router(x).softmax(-1).topk(K)
        return self.experts(x, index, top_k_weights=weights)


def batch():
    return torch.randn(T, D, generator=torch.Generator().manual_seed(1))


LAYOUTS = [
    {}, {"transposed": True, "biased": True}, {"gated": False}, {"transposed": True, "gated": False}, {"biased": True},
]  # fmt: skip


@pytest.mark.parametrize("how", LAYOUTS)
def test_without_quantization_they_compute_what_they_did(how):
    torch.manual_seed(0)
    plain = Mixture(**how)
    model = convert(copy.deepcopy(plain), "fp32")
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
    for m in (plain, model):
        m(batch()).square().sum().backward()
    torch.testing.assert_close(model(batch()), plain(batch()), rtol=1e-4, atol=1e-5)
    for (name, a), b in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.parametrize("how", LAYOUTS)
def test_each_expert_is_an_mxfp4linear_of_its_own(how):
    """The same as a layer an expert, made by hand."""
    model = convert(Mixture(**how), "mxfp4+h16")
    name = experts.projections(model.experts)[0]
    stacked = getattr(model.experts, name)
    x = batch()
    for e in range(E):
        weight = stacked[e].t() if model.experts.is_transposed else stacked[e]
        alone = nn.Linear(D, weight.shape[0], bias=False)
        alone.weight = nn.Parameter(weight.detach().clone())
        (layer, matrix, _) = model.experts._experts_of(name)[e]
        y = layer(x, matrix)
        assert torch.equal(y, MXFP4Linear.from_linear(alone, "mxfp4+h16", fqn=layer.fqn)(x))
        assert layer.fqn == f"experts.{e}.{name}" and layer.weight is None
    assert not torch.equal(model(x), Mixture(**how)(x))


def test_experts_draw_numbers_of_their_own():
    model = Mixture().eval()
    with torch.no_grad():
        model.experts.gate_up_proj.copy_(model.experts.gate_up_proj[:1].expand(E, -1, -1).clone())
    convert(model, "mxfp4+sr").train()
    mxfp4.set_step(model, 3)
    ys = [layer(batch(), matrix) for layer, matrix, _ in model.experts._experts_of("gate_up_proj")]
    assert all(not torch.equal(ys[0], y) for y in ys[1:])


def test_slots_of_other_ranks_and_no_tokens():
    """An index of `num_experts` means an expert elsewhere."""
    model = convert(Mixture(), "fp32").experts
    x, weights = batch(), torch.ones(T, K)
    index = torch.full((T, K), E)
    index[:5, 0] = 2
    plain = Experts()(x, index, weights)
    torch.testing.assert_close(model(x, index, weights), plain, rtol=1e-4, atol=1e-5)
    empty = model(x[:0], index[:0], weights[:0])
    assert empty.shape == (0, D)
    assert model(x, torch.full((T, K), E), weights).abs().max() == 0


def test_copies_pickles_and_training_steps():
    torch.manual_seed(0)
    model = convert(Mixture(), "mxfp4")
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert torch.equal(other(batch()), model(batch())) and isinstance(other.experts, Experts)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = copy.deepcopy(model.state_dict())
    model(batch()).square().mean().backward()
    optimizer.step()
    assert all(not torch.equal(before[n], p) for n, p in model.state_dict().items())
    with pytest.raises(ValueError, match="'experts' with recipe 'mxfp4': convert an unconverted model"):
        convert(model, "fp8", lambda m, fqn: "experts" in fqn)


def test_parts_of_the_recipe_and_the_report():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.mlp = Mixture()
            self.q_proj = nn.Linear(D, D)

    model = nn.Module()
    model.layers = nn.ModuleList(Block() for _ in range(8))
    convert(model, "ti2d+tail15")
    assert model.layers[0].mlp.experts.recipes["down_proj"].fprop.a.format == "mxfp4"
    assert model.layers[7].mlp.experts.recipes["down_proj"].fprop.a.format == "bf16"
    report = mxfp4.report(model)
    line = next(x for x in report.converted if x.name == "layers.0.mlp.experts.gate_up_proj")
    assert line.shape == (E, 2 * F, D) and line.weights == E * 2 * F * D and line.flops == 2 * K * 2 * F * D
    assert {x.reason for x in report.left_out} == {"router (Linear)"}


def test_a_filter_leaves_experts_out_and_sizes_that_do_not_fit_are_refused():
    model = nn.Sequential(nn.Linear(D, D), Mixture())
    report = mxfp4.report(convert(model, "mxfp4", lambda m, fqn: isinstance(m, nn.Linear) and fqn == "0"))
    assert {line.name: line.reason for line in report.left_out} == dict.fromkeys(
        ("1.router", "1.experts.gate_up_proj", "1.experts.down_proj"), "filter_fn"
    )
    model = Mixture()
    model.experts.down_proj = nn.Parameter(torch.zeros(E, 40, F))
    with pytest.raises(ValueError, match=r"^layer 'experts.down_proj': out_features=40 is not a multiple .* filter_fn"):
        convert(model, recipe("mxfp4"))
    assert type(model.experts) is Experts


def test_a_filter_that_fails_for_experts_says_so():
    with pytest.raises(
        ValueError, match=r"^filter_fn fails for 'experts', which is no nn.Linear but Experts: .*in_features"
    ):
        convert(Mixture(), "mxfp4", lambda m, fqn: m.in_features > 64)


def test_what_is_known_and_not_supported_is_refused_by_name():
    class GroupedExperts(nn.Module):
        def __init__(self):
            super().__init__()
            self.w1 = nn.Parameter(torch.zeros(E, F, D))

    model = nn.ModuleDict({"wq": nn.Linear(D, D), "experts": GroupedExperts()})
    with pytest.raises(
        ValueError,
        match=r"^'experts': TorchTitan's grouped experts \(GroupedExperts\) cannot be converted; leave it out",
    ):
        convert(model, "mxfp4")
    report = mxfp4.report(convert(model, "mxfp4", lambda m, fqn: fqn == "wq"))
    assert [(line.name, line.reason) for line in report.left_out] == [("experts.w1", "filter_fn")]
    assert report.quantized_weights == pytest.approx(1 / 3)


def test_experts_split_among_ranks_are_refused():
    model = nn.Sequential(nn.Linear(D, D), Mixture())
    model[1].experts._is_expert_parallel = True
    with pytest.raises(ValueError, match=r"^layer '1.experts' cannot be converted: its experts are split among ranks"):
        convert(model, "mxfp4", lambda m, fqn: "router" not in fqn)
