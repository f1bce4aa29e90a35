"""The Megatron adapter: what a converted spec builds, what its layers compute, on one rank and on two.

Megatron asks for CUDA's current device and its states of random numbers; `megatron` gives it the CPU and none. The
package needs Python 3.12; its wheel's Python files also work with 3.11.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import mxfp4
from mxfp4 import MXFP4Linear
from mxfp4.errors import UserError
from tests.fakes.ranks import launch

pytest.importorskip("megatron.core", reason="megatron-core is not installed (pip install megatron-core==0.19.2)")

from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

from mxfp4.adapters.megatron import MXFP4ColumnParallelLinear, MXFP4RowParallelLinear, quantized_spec

T, D = 32, 64
LINEARS = ("self_attention.linear_proj", "self_attention.linear_qkv", "mlp.linear_fc1", "mlp.linear_fc2")


def on_cpu(patch) -> None:
    patch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    patch.setattr(CudaRNGStatesTracker, "fork", lambda self, name="": nullcontext())
    patch.setattr(megatron_random, "_fork_rng", nullcontext)
    patch.setattr(megatron_random, "_get_all_rng_states", tuple)
    patch.setattr(megatron_random, "_set_all_rng_states", lambda: None)


@pytest.fixture(autouse=True)
def megatron(monkeypatch, tmp_path):
    on_cpu(monkeypatch)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def config(**how) -> TransformerConfig:
    defaults = {
        "num_layers": 2, "hidden_size": D, "num_attention_heads": 2, "ffn_hidden_size": 128, "hidden_dropout": 0.0,
        "attention_dropout": 0.0, "add_bias_linear": True, "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu, "bias_activation_fusion": False, "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False, "normalization": "RMSNorm", "use_cpu_initialization": True,
    }  # fmt: skip
    return TransformerConfig(**{**defaults, **how})


def a_model(name: str | None, *, seed: int = 0, **how) -> GPTModel:
    spec = get_gpt_layer_local_spec(normalization="RMSNorm", num_experts=how.get("num_moe_experts"))
    torch.manual_seed(0)
    return GPTModel(
        config(**how), quantized_spec(spec, name, seed=seed) if name else spec, vocab_size=128, max_sequence_length=T,
        position_embedding_type="learned_absolute", share_embeddings_and_output_weights=False,
    )  # fmt: skip


def loss_of(model: GPTModel) -> torch.Tensor:
    ids = torch.randint(0, 128, (2, T), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(1, 1, T, T, dtype=torch.bool).triu(1)
    return model(ids, torch.arange(T).expand(2, T), mask, labels=ids).mean()


def layers(model) -> dict[str, MXFP4Linear]:
    return {name: m for name, m in model.named_modules() if isinstance(m, MXFP4Linear)}


def gradients(model) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss_of(model).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def test_linear_layers_of_the_blocks_are_converted_and_parameters_stay():
    stock, ours = a_model(None), a_model("mxfp4+h16")
    assert {f"decoder.layers.{i}.{name}.quantized" for i in (0, 1) for name in LINEARS} == set(layers(ours))
    assert [name for name, _ in stock.named_parameters()] == [name for name, _ in ours.named_parameters()]
    assert stock.state_dict().keys() == ours.state_dict().keys()
    column, row = ours.decoder.layers[1].mlp.linear_fc1, ours.decoder.layers[1].mlp.linear_fc2
    assert isinstance(column, MXFP4ColumnParallelLinear) and isinstance(row, MXFP4RowParallelLinear)
    assert column.weight.partition_dim == 0 and row.weight.partition_dim == 1
    assert column.quantized.fqn == "layers.1.mlp.linear_fc1"
    for a, b in zip(stock.parameters(), ours.parameters(), strict=True):
        assert torch.equal(a, b)


def test_without_quantization_a_model_computes_what_it_did():
    stock, ours = a_model(None), a_model("fp32")
    torch.testing.assert_close(loss_of(ours), loss_of(stock))
    theirs, found = gradients(stock), gradients(ours)
    for name, grad in theirs.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-4, atol=1e-6)


def test_a_layer_computes_what_mxfp4linear_does():
    column = a_model("mxfp4+rht16", seed=7).decoder.layers[0].mlp.linear_fc1
    linear = torch.nn.Linear(D, 256, bias=False)
    linear.weight = torch.nn.Parameter(column.weight.detach().clone())
    ours = MXFP4Linear.from_linear(linear, "mxfp4+rht16", fqn="layers.0.mlp.linear_fc1", seed=7)
    for m in (column, ours):
        mxfp4.set_step(m, 3)
    x = torch.randn(T, 2, D, generator=torch.Generator().manual_seed(2))
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, bias = column(a)
    (y.square().sum()).backward()
    (y_ := ours(b)).square().sum().backward()
    assert torch.equal(y, y_) and torch.equal(a.grad, b.grad) and torch.equal(column.weight.grad, ours.weight.grad)
    assert bias is column.bias  # skip_bias_add: Megatron adds it


def test_the_report_names_parts_and_what_stays():
    done = mxfp4.report(a_model("mxfp4+tail15", num_layers=4))
    assert {line.part for line in done.converted} == {"all layers", "bf16 tail"}
    assert {line.name for line in done.converted if line.part == "bf16 tail"} == {
        f"decoder.layers.3.{name}.weight" for name in LINEARS
    }
    assert {line.name for line in done.left_out if line.weights} == {"output_layer.weight"}
    assert {line.weight_format for line in mxfp4.report(a_model("ti2d")).converted if "linear_qkv" in line.name} == {
        "mxfp8"
    }


def test_recomputation_rounds_as_the_first_forward_did():
    how = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    found = []
    for more in ({}, how):
        model = a_model("mxfp4+sr", **more)
        mxfp4.set_step(model, 1)
        loss = loss_of(model) + loss_of(model)  # two forwards before the first backward
        loss.backward()
        found.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_experts_are_converted_and_routers_are_not():
    model = a_model("mxfp4", num_moe_experts=4, moe_router_topk=2, moe_ffn_hidden_size=64, add_bias_linear=False)
    names = set(layers(model))
    assert "decoder.layers.0.mlp.experts.local_experts.3.linear_fc2.quantized" in names
    assert not any("router" in name for name in names)
    loss_of(model).backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if "linear_fc" in name)


def test_what_cannot_be_converted_is_refused_by_name():
    class OtherLinear(torch.nn.Linear):
        def __init__(self, inner, outer, **how):
            super().__init__(inner, outer)

    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    spec.submodules.self_attention.submodules.linear_proj = OtherLinear

    def build(spec):
        return TransformerLayer if spec is None else spec(config(), layer_number=1)

    with pytest.raises(UserError, match=r"self_attention\.linear_proj: OtherLinear cannot be converted"):
        build(quantized_spec(spec, "mxfp4"))
    left = build(quantized_spec(spec, "mxfp4", skip=("linear_proj",)))
    assert type(left.self_attention.linear_proj) is OtherLinear and len(layers(left)) == 3
    with pytest.raises(UserError, match="'Linear' is no TransformerLayer"):
        quantized_spec(ModuleSpec(torch.nn.Linear), "mxfp4")
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.linear_fc1'.*180"):
        quantized_spec(get_gpt_layer_local_spec(), "mxfp4")(config(ffn_hidden_size=90), layer_number=1)
    whole = TransformerBlockSubmodules(layer_specs=[get_gpt_layer_local_spec()] * 2)
    converted = quantized_spec(whole, "mxfp4").layer_specs
    assert [issubclass(s.module, TransformerLayer) and s.module is not TransformerLayer for s in converted] == [
        True
    ] * 2
    assert whole == replace(whole) and whole.layer_specs[0].module is TransformerLayer


def _mlp(rank: int, world: int, sequence_parallel: bool) -> list[torch.Tensor]:
    """(Y, dX, dW, dW) of both layers of an MLP on `world` ranks, by a recipe without random numbers."""
    how = {"tensor_model_parallel_size": world, "sequence_parallel": sequence_parallel, "gated_linear_unit": False}
    spec = get_gpt_layer_local_spec()
    spec.submodules = replace(spec.submodules, input_layernorm=IdentityOp, pre_mlp_layernorm=IdentityOp)
    mlp = quantized_spec(spec, "mxfp4")(config(**how), layer_number=1).mlp
    for linear, shape, dim in ((mlp.linear_fc1, (128, D), 0), (mlp.linear_fc2, (D, 128), 1)):
        whole = torch.randn(shape, generator=torch.Generator().manual_seed(dim)) / 8
        with torch.no_grad():
            linear.weight.copy_(whole.chunk(world, dim)[rank])
    x, g = (torch.randn(2 * T, 2, D, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    if sequence_parallel:
        x, g = x.chunk(world)[rank], g.chunk(world)[rank]
    x.requires_grad_()
    y, _ = mlp.linear_fc2(torch.nn.functional.silu(mlp.linear_fc1(x)[0]))
    y.backward(g)
    return [t.detach() for t in (y, x.grad, mlp.linear_fc1.weight.grad, mlp.linear_fc2.weight.grad)]


def _on_two_ranks(ranks, path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        on_cpu(patch)
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
        for sequence_parallel in (False, True):
            y, dx, fc1, fc2 = torch.load(path)
            if sequence_parallel:
                y, dx = y.chunk(2)[ranks.rank], dx.chunk(2)[ranks.rank]
            expected = [y, dx, fc1.chunk(2)[ranks.rank], fc2.chunk(2, 1)[ranks.rank]]
            for found, one in zip(_mlp(ranks.rank, 2, sequence_parallel), expected, strict=True):
                torch.testing.assert_close(found, one)


def test_tensor_and_sequence_parallel_layers_compute_what_one_rank_does(tmp_path):
    torch.save(_mlp(0, 1, False), tmp_path / "one")
    launch(_on_two_ranks, 2, tmp_path / "one")
