"""The TorchTitan adapter: what the converter replaces, that its layers compute what ours do, and a run of the trainer.

TorchTitan takes a machine without a GPU for one with CUDA. Its own tests lift that gate; `cpu_for_cuda` does here.
"""

from __future__ import annotations

import json
import multiprocessing
import socket
from contextlib import nullcontext
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist

import mxfp4
from mxfp4 import MXFP4Linear

pytest.importorskip("triton", reason="triton is not installed, which TorchTitan imports (`make test` installs it)")
pytest.importorskip("torchtitan", reason="torchtitan is not installed (pip install -e '.[titan]')")

from torchtitan.components.metrics import DeviceMemStats
from torchtitan.config import ConfigManager
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
from torchtitan.models.common.dist_gemm import RowParallelLinear
from torchtitan.models.common.linear import ScaledBiasRowwiseLinear
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.models.llama3 import model_registry
from torchtitan.protocols.module import Module

from mxfp4.adapters import torchtitan as titan
from mxfp4.errors import UserError
from mxfp4.studies.scales import get_scale

MODULE = ["--module", "mxfp4.training.adapters.torchtitan"]


def spec_of(name: str | None, flavor: str = "debugmodel", **how):
    """TorchTitan's Llama, converted to a recipe, its attention one that a CPU has."""
    converters = [titan.MXFP4LinearConverter.Config(recipe=name, **how)] if name else None
    return without_flex(model_registry(flavor, converters=converters))


def without_flex(spec):
    for _, _, parent, attribute in list(spec.model.traverse(FlexAttention.Config)):
        setattr(parent, attribute, ScaledDotProductAttention.Config())
    return spec


def built(spec, seed: int = 0):
    with torch.device("meta"):
        model = spec.model.build()
    model.verify_module_protocol()
    model.to_empty(device="cpu")
    torch.manual_seed(seed)
    with torch.no_grad():
        model.init_states()
    return model


def layers(model) -> dict[str, MXFP4Linear]:
    return {name: m for name, m in model.named_modules() if isinstance(m, MXFP4Linear)}


def gradients(model, tokens):
    y = model(tokens)
    y.float().square().mean().backward()
    return y, {name: p.grad for name, p in model.named_parameters()}


def test_every_linear_but_the_head_is_replaced_and_names_stay():
    stock, ours = built(spec_of(None)), built(spec_of("mxfp4+h16"))
    found = layers(ours)
    parts = ("attention.qkv_linear.wqkv", "attention.wo", "feed_forward.w1", "feed_forward.w2", "feed_forward.w3")
    assert set(found) == {f"layers.{i}.{part}" for i in range(6) for part in parts}
    assert all(layer.fqn == name and layer.recipe.name == "mxfp4+h16" for name, layer in found.items())
    theirs = stock.state_dict()
    assert theirs.keys() == ours.state_dict().keys()
    assert all(torch.equal(theirs[name], value) for name, value in ours.state_dict().items())


@pytest.mark.parametrize("name", ["mxfp4+h16", "mxfp4+rht16", "nvfp4", "quartet", "fp8"])
def test_a_converted_configuration_computes_what_a_converted_model_does(name):
    config, model = built(spec_of(name, seed=5)), mxfp4.convert(_as_plain(built(spec_of(None))), name, seed=5)
    tokens = torch.randint(0, 2048, (2, 32), generator=torch.Generator().manual_seed(0))
    for m in (config, model):
        mxfp4.set_step(m, 3)
    (y, grads), (y_, grads_) = gradients(config, tokens), gradients(model, tokens)
    assert torch.equal(y, y_)
    assert all(torch.equal(grads[name], grads_[name]) for name in grads_)


def _as_plain(model):
    """TorchTitan's Linear is a subclass of nn.Linear, which `mxfp4.convert` leaves alone: put plain ones in."""
    for name, m in list(model.named_modules()):
        if isinstance(m, torch.nn.Linear):
            plain = torch.nn.Linear(m.in_features, m.out_features, bias=False, device="meta")
            plain.weight = m.weight
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, plain)
    return model


def test_a_recipe_that_tells_q_k_and_v_apart_gets_three_matrices():
    model = built(spec_of("ti2d"))
    found = layers(model)
    qkv = {w: found[f"layers.0.attention.qkv_linear.{w}"] for w in ("wq", "wk", "wv")}
    assert [layer.recipe.fprop.a.format for layer in qkv.values()] == ["mxfp8", "mxfp8", "mxfp4"]
    assert len({int(layer.draws.state[0]) for layer in qkv.values()}) == 3
    stock = built(spec_of(None))
    assert model.state_dict().keys() == stock.state_dict().keys()
    for w, layer in qkv.items():  # the same distribution, and not ones or zeros
        assert layer.weight.std().item() == pytest.approx(0.02, rel=0.02), w
    model.load_state_dict(stock.state_dict())
    assert torch.equal(qkv["wk"].weight, stock.state_dict()["layers.0.attention.qkv_linear.wk.weight"])


def test_the_tail_stays_in_bf16():
    found = layers(built(spec_of("mxfp4+tail15")))  # 15 % of 6 layers: one
    formats = [found[f"layers.{i}.attention.wo"].recipe.fprop.a.format for i in range(6)]
    assert formats == ["mxfp4"] * 5 + ["bf16"]


def test_what_cannot_work_is_refused_before_anything_is_built():
    with pytest.raises(ValueError, match="recipe 'mxfp5' is not known"):
        spec_of("mxfp5")
    spec = spec_of(None)
    spec.model.layers[0].feed_forward.w1.out_features = 100
    with pytest.raises(ValueError, match=r"layers.0.feed_forward.w1.*100"):
        titan.MXFP4LinearConverter.Config(recipe="mxfp4").build().convert(spec.model)
    converted = spec_of("mxfp4+h16").model
    with pytest.raises(
        ValueError, match=r"no Linear.Config to convert to 'mxfp4'; .* has 1 Linear.Config, \d+ TitanLinear"
    ):
        titan.MXFP4LinearConverter.Config(recipe="mxfp4").build().convert(converted)


DIM, HIDDEN, EXPERTS = 64, 96, 4


def experts_config(**how):
    def normal(weight):
        torch.nn.init.normal_(weight, std=0.1)

    init = {"w1_EFD": normal, "w2_EDF": normal, "w3_EFD": normal}
    return GroupedExperts.Config(dim=DIM, hidden_dim=HIDDEN, num_experts=EXPERTS, param_init=init, **how)


def converted_experts(recipe: str):
    made = titan.MXFP4LinearConverter.Config(recipe=recipe, seed=3).build().convert(experts_config()).build()
    assert all(isinstance(m, Module) for m in made.modules())
    torch.manual_seed(0)
    with torch.no_grad():
        made.init_states()
    return made


def routed(module):
    """(Y, dX, dW) of rows of which an expert gets none and two belong to no expert."""
    x = torch.randn(42, DIM, generator=torch.Generator().manual_seed(1)).requires_grad_()
    y = module(x, torch.tensor([10, 0, 13, 17]))
    y[:40].square().sum().backward()
    return [y[:40].detach(), x.grad, *(p.grad for p in module.parameters())]


def test_unquantized_experts_are_torchtitans():
    stock = experts_config().build()
    ours = converted_experts("bf16")
    stock.load_state_dict(ours.state_dict())
    for a, b in zip(routed(ours), routed(stock), strict=True):
        a, b = (t[:40] if t.shape == (42, DIM) else t for t in (a, b))  # the others of dX are left unset there
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2 * b.abs().max().item())  # BF16, other orders of sums


def test_experts_compute_as_a_layer_each():
    ours = converted_experts("mxfp4+rht16")
    mxfp4.set_step(ours, 5)
    y, dx, dw1, dw2, dw3 = routed(ours)
    assert len({layer.draws.key(0) for layer in layers(ours).values()}) == 3 * EXPERTS
    expert, rows = 2, slice(10, 23)
    alone = {}
    for name, weight in (("w1", ours.w1_EFD), ("w2", ours.w2_EDF), ("w3", ours.w3_EFD)):
        linear = torch.nn.Linear(weight.shape[2], weight.shape[1], bias=False)
        linear.weight = torch.nn.Parameter(weight[expert].detach().clone())
        alone[name] = MXFP4Linear.from_linear(linear, "mxfp4+rht16", fqn=f".{expert}.{name}", seed=3)
        mxfp4.set_step(alone[name], 5)
    x = torch.randn(42, DIM, generator=torch.Generator().manual_seed(1))[rows].bfloat16().requires_grad_()
    inner = torch.nn.functional.silu(alone["w1"](x)) * alone["w3"](x)
    out = alone["w2"](inner).float()
    out.square().sum().backward()
    assert torch.equal(out, y[rows])
    for name, grad in (("w1", dw1), ("w2", dw2), ("w3", dw3)):
        assert torch.equal(alone[name].weight.grad, grad[expert]), name
    assert not dw1[1].any() and torch.equal(dx[40:], torch.zeros(2, DIM))


def test_what_would_run_in_bf16_is_refused_by_name():
    def refused(match, model, **how):
        converter = titan.MXFP4LinearConverter.Config(recipe="mxfp4", **how).build()
        with pytest.raises(UserError, match=match):
            converter.convert(model)

    refused(
        r"layers\.0\.attention\.qkv_linear: tp_gemm_backend='dist_gemm' \(AllGatherFusedQKVLinear\)",
        model_registry("debugmodel", tp_gemm_backend="dist_gemm").model,
    )
    model = model_registry("debugmodel").model
    attention = model.layers[1].attention
    for kind, match in (
        (RowParallelLinear, r"layers\.1\.attention\.wo: tp_gemm_backend='dist_gemm'"),
        (ScaledBiasRowwiseLinear, r"layers\.1\.attention\.wo: ScaledBiasRowwiseLinear .* skip=\[\.\.\., 'wo'\]"),
    ):
        attention.wo = kind.Config(in_features=256, out_features=256)
        refused(match, model)
    left_out = titan.MXFP4LinearConverter.Config(recipe="mxfp4", skip=["wo", "lm_head"]).build().convert(model)
    assert type(left_out.layers[1].attention.wo) is ScaledBiasRowwiseLinear.Config

    class OtherExperts(GroupedExperts):
        @dataclass(kw_only=True, slots=True)
        class Config(GroupedExperts.Config):
            pass

    block = model.layers[1].feed_forward
    block.w1 = OtherExperts.Config(dim=DIM, hidden_dim=HIDDEN, num_experts=EXPERTS)
    refused(r"layers\.1\.feed_forward\.w1: .*OtherExperts cannot be converted", model, skip=["wo"])
    block.w1 = experts_config()
    refused(r"w1: compile.enable=True does not work", model, skip=["wo"], model_compile_enabled=True)
    block.w1 = replace(experts_config(), hidden_dim=100)
    with pytest.raises(ValueError, match=r"layers\.1\.feed_forward\.w1.*100"):
        titan.MXFP4LinearConverter.Config(recipe="mxfp4", skip=["wo"]).build().convert(model)


def test_experts_of_several_ranks_are_refused():
    class Dims:
        ep, tp = 2, 1

    with pytest.raises(UserError, match="ep=2 splits the experts"):
        converted_experts("mxfp4").parallelize(Dims())


def test_a_block_compiles_whole():
    model = built(spec_of("mxfp4+rht16"))
    mxfp4.set_step(model, 1)
    feed_forward = model.layers["0"].feed_forward
    x = torch.randn(1, 32, 256, generator=torch.Generator().manual_seed(0))
    eager = feed_forward(x)
    mxfp4.set_step(model, 1)
    compiled = torch.compile(feed_forward, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), eager)


def test_the_8b_configuration_is_p1s_and_takes_any_recipe():
    config = ConfigManager().parse_args([*MODULE, "--config", "llama3_8b", "--recipe", "mxfp4+rceil+sr"])
    assert isinstance(config, titan.MXFP4Trainer.Config) and config.recipe == "mxfp4+rceil+sr"
    model = config.model_spec.model
    assert (model.dim, len(model.layers), model.layers[0].feed_forward.w1.out_features) == (4096, 32, 14336)
    sizes = config.training.seq_len, config.training.global_batch_size, config.training.max_norm
    assert sizes == (8192, 32, 1.0)
    (group,) = config.optimizer.param_groups
    assert group.optimizer_kwargs == {"lr": 8e-4, "betas": (0.9, 0.95), "eps": 1e-5, "weight_decay": 0.1}
    schedule = config.lr_scheduler
    assert (schedule.warmup_steps, schedule.total_steps, schedule.decay_type) == (128, 1_200_000, "cosine")
    assert config.validator.freq * 32 == 12_288
    assert config.compile.enable and config.activation_checkpoint is None
    scale = get_scale("mi355x")
    assert (config.training.steps, config.validator.freq, config.validator.steps * 8) == (
        scale.steps, scale.eval_every, scale.eval_sequences
    )  # fmt: skip
    assert (group.optimizer_kwargs["lr"], schedule.warmup_steps, schedule.total_steps, schedule.min_lr_factor) == (
        scale.lr, scale.warmup, scale.decay_steps, scale.lr_min / scale.lr
    )  # fmt: skip
    converted = titan.MXFP4LinearConverter.Config(recipe=config.recipe).build().convert(model)
    assert sum(isinstance(n, titan.TitanLinear.Config) for _, n, *_ in converted.traverse(titan.Linear.Config)) == 160


@pytest.fixture
def cpu_for_cuda(monkeypatch):
    """TorchTitan on the CPU, one rank; what PyTorch 2.13 lacks of the nightly that it was released for, left out."""
    import torchtitan.components.metrics as metrics
    import torchtitan.distributed.parallel_dims as parallel_dims
    import torchtitan.distributed.utils as distributed
    import torchtitan.trainer as trainer
    from torchtitan.tools import utils

    class Memory:
        device_name = "cpu"

        def get_peak_stats(self):
            return DeviceMemStats(0, 0, 0, 0, 0, 0)

        def reset_peak_stats(self):
            pass

    for module in (utils, distributed, parallel_dims, metrics, trainer):
        for name, value in (("device_type", "cpu"), ("device_module", torch.cpu)):
            monkeypatch.setattr(module, name, value, raising=False)
    monkeypatch.setattr(metrics, "build_device_memory_monitor", Memory)
    monkeypatch.setattr(distributed, "set_pg_timeouts", lambda **_: None)
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }.items():
        monkeypatch.setenv(name, value)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def tokenizer_folder(folder):
    from mxfp4.data.tokenizer import train

    (folder / "tokenizer.json").write_bytes(train(["one two three"], 300).to_bytes())
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>"})
    )
    return folder


def a_run(tmp_path, steps: int, out: str, name: str = "mxfp4+rht16"):
    texts = tmp_path / "texts"
    texts.mkdir(exist_ok=True)
    rows = [{"text": f"After {i} comes {i + 1}, and after that {i + 2}. " * 4} for i in range(300)]
    (texts / "data.json").write_text("\n".join(map(json.dumps, rows)))
    arguments = {
        "recipe": name, "hf_assets_path": tokenizer_folder(tmp_path), "dump_folder": tmp_path / out, "debug.seed": 1,
        "dataloader.dataset_path": texts, "training.steps": steps, "training.local_batch_size": 2,
        "training.seq_len": 64, "lr_scheduler.total_steps": 8, "checkpoint.interval": 2,
        "parallelism.pipeline_parallel_schedule": "1F1B",
    }  # fmt: skip
    flags = [x for key, value in arguments.items() for x in (f"--{key}", str(value))]
    switches = ["--training.disable_cuda_graphs", "--checkpoint.enable", "--debug.no-enable_structured_logging"]
    config = ConfigManager().parse_args([*MODULE, "--config", "llama3_debugmodel", *flags, *switches])
    without_flex(config.model_spec)
    trainer = config.build()
    trainer.train()
    weights = {name: p.detach().full_tensor() for name, p in trainer.model_parts[0].named_parameters()}
    trainer.close()
    dist.destroy_process_group()
    return trainer, weights


def test_histories_of_delayed_scaling_are_resumed(cpu_for_cuda, tmp_path):
    def histories(trainer):
        return {n: b for n, b in trainer.model_parts[0].named_buffers() if n.endswith("amax_history")}

    straight, weights = a_run(tmp_path, 3, "straight", "fp8+delayed")
    assert len(histories(straight)) == 6 * 5 and all(b[:, :3].all() for b in histories(straight).values())
    a_run(tmp_path, 2, "stopped", "fp8+delayed")
    again, resumed = a_run(tmp_path, 3, "stopped", "fp8+delayed")
    assert all(torch.equal(weights[name], resumed[name]) for name in weights)
    assert all(torch.equal(b, histories(again)[name]) for name, b in histories(straight).items())


def test_the_trainer_trains_and_a_resumed_run_is_the_uninterrupted_one(cpu_for_cuda, tmp_path):
    trainer, straight = a_run(tmp_path, 4, "straight")
    some = next(iter(layers(trainer.model_parts[0]).values()))
    assert int(some.draws.state[1]) == (4 << 20) + 1  # set_step, then one forward; none for the recomputation
    a_run(tmp_path, 2, "stopped")
    _, resumed = a_run(tmp_path, 4, "stopped")
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)


def test_tensor_parallelism_outside_spmd_types_is_refused():
    base = titan.llama3_debugmodel()
    config = replace(base, parallelism=replace(base.parallelism, tensor_parallel_degree=2, spmd_backend="full_dtensor"))
    with pytest.raises(UserError, match="spmd_backend='full_dtensor'"):
        titan.MXFP4Trainer(config)


def test_delayed_scaling_of_split_layers_is_refused():
    base = titan.llama3_debugmodel()
    split = replace(base.parallelism, tensor_parallel_degree=2, spmd_backend="spmd_types")
    with pytest.raises(UserError, match=r"'fp8\+delayed' with tensor_parallel_degree=2 is not supported"):
        titan.MXFP4Trainer(replace(base, recipe="fp8+delayed", parallelism=split))


def _two_layers(rank: int, world: int, name: str, results) -> None:
    """Results of a column-parallel and a row-parallel layer on `world` ranks: (Y, dX, dW, dW) as arrays."""
    import torchtitan.distributed.parallel_dims as parallel_dims
    import torchtitan.distributed.utils as distributed
    from torchtitan.config import ParallelismConfig
    from torchtitan.models.common.decoder_sharding import colwise_config, rowwise_config

    torch.set_num_threads(1)
    parallel_dims.device_type = "cpu"
    distributed.set_spmd_backend("spmd_types")
    made = []
    for fqn, n, k, sharding in (("up", 256, 64, colwise_config()), ("down", 128, 256, rowwise_config())):
        config = titan.TitanLinear.Config(in_features=k, out_features=n, recipe=name, fqn=fqn)
        config.sharding_config = sharding if world > 1 else None
        layer = config.build()
        with torch.no_grad():
            layer.weight.copy_(torch.randn(n, k, generator=torch.Generator().manual_seed(n)))
        made.append(layer)
    context = nullcontext()
    if world > 1:
        dims = parallel_dims.ParallelDims.from_config(
            ParallelismConfig(tensor_parallel_degree=world, data_parallel_shard_degree=1), world
        )
        for layer in made:
            layer.parallelize(dims)
        context = distributed.get_spmd_context(parallel_dims=dims, spmd_typechecking=False)()
    x = torch.randn(2, 32, 64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    with context:
        y = made[1](torch.nn.functional.silu(made[0](x)))
    y.backward(torch.randn(2, 32, 128, generator=torch.Generator().manual_seed(2)))
    results[rank] = [t.detach().numpy() for t in (y, x.grad, *(layer.weight.grad for layer in made))]


def _a_rank(rank: int, world: int, port: int, name: str, results) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    _two_layers(rank, world, name, results)
    dist.barrier()
    dist.destroy_process_group()


def test_a_layer_split_between_two_ranks_computes_what_one_does():
    one: dict = {}
    _two_layers(0, 1, "mxfp4+rht16", one)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    with multiprocessing.get_context("spawn").Manager() as manager:
        shared = manager.dict()
        torch.multiprocessing.spawn(_a_rank, (2, port, "mxfp4+rht16", shared), nprocs=2)
        a, b = ([torch.from_numpy(t) for t in shared[rank]] for rank in (0, 1))
    y, dx, up, down = (torch.from_numpy(t) for t in one[0])
    torch.testing.assert_close(a[0], y)
    torch.testing.assert_close(a[1] + b[1], dx)
    torch.testing.assert_close(torch.cat([a[2], b[2]], dim=0), up)
    torch.testing.assert_close(torch.cat([a[3], b[3]], dim=1), down)
    assert not torch.allclose(a[1], dx)
