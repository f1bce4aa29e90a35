"""Two ranks over gloo, one start for all checks: tensor parallelism, and the draws of ranks under each framework."""

from __future__ import annotations

import copy
import json
import os
import tempfile
import traceback

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from mxfp4 import MXFP4Linear, convert, set_step
from mxfp4.errors import UserError
from tests.fakes.ranks import launch

FIXED = ("mxfp4", "mxfp4+h16", "mxfp4+2d+rceil", "mxfp4+hh16+2d", "mxfp8")
"""Recipes without random numbers."""
CHECKS = {}


def check(function):
    CHECKS[function.__name__] = function
    return function


def pair(recipe: str, hidden: int = 128) -> nn.Sequential:
    """Column-wise, then row-wise layers, as in a feed-forward block."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 64))
    return convert(layers, recipe, allow_unmatched=True)


def split(model: nn.Sequential, mesh, **options) -> nn.Sequential:
    return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel(**options)})


def whole(t):
    return t.full_tensor() if isinstance(t, DTensor) else t


def results(model, x, grad) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    y = model(x)
    whole(y).backward(grad)
    return [whole(y).detach(), whole(x.grad), *(whole(p.grad) for p in model.parameters())]


def data(*shape) -> tuple[torch.Tensor, torch.Tensor]:
    make = torch.Generator().manual_seed(1)
    return torch.randn(shape, generator=make), torch.randn(shape, generator=make)


def same(a, b) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def near(a, b) -> bool:
    """Up to the order of FP32 sums: an operand that is rounded to another FP4 value moves results by far more."""
    return all((x - y).abs().max() <= 1e-6 * x.abs().max() for x, y in zip(a, b, strict=True))


# Tensor parallelism


@check
def columns_and_rows_equal_one_rank(ranks):
    for recipe in FIXED:
        one = pair(recipe)
        two = split(copy.deepcopy(one), ranks.mesh)
        assert near(results(one, *data(40, 64)), results(two, *data(40, 64))), recipe


@check
def a_converted_parallel_model_is_a_parallel_converted_model(ranks):
    one = pair("mxfp4+h16")
    two = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
    two.load_state_dict(one.state_dict())
    two = convert(split(two, ranks.mesh), "mxfp4+h16")
    assert near(results(one, *data(40, 64)), results(two, *data(40, 64)))


@check
def bf16_is_near_one_rank(ranks):
    one = pair("bf16")
    two = split(copy.deepcopy(one), ranks.mesh)
    for a, b in zip(results(one, *data(40, 64)), results(two, *data(40, 64)), strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-4)


@check
def tokens_are_split_where_blocks_allow_and_gathered_where_not(ranks):
    for length in (64, 40):  # 32 tokens a rank, and 20
        one = pair("mxfp4+h16")
        two = parallelize_module(copy.deepcopy(one), ranks.mesh, {"0": SequenceParallel(), "2": SequenceParallel()})
        x, grad = data(2, length, 64)
        expected = results(one, x, grad)
        given = distribute_tensor(x, ranks.mesh, [Shard(1)]).requires_grad_()
        y = two(given)
        y.backward(distribute_tensor(grad, ranks.mesh, [Shard(1)]))
        found = [whole(y), whole(given.grad), *(whole(p.grad) for p in two.parameters())]
        assert near(expected, found), length


@check
def outputs_may_stay_split_along_tokens(ranks):
    one = pair("mxfp4")
    two = split(copy.deepcopy(one), ranks.mesh, output_layouts=Shard(0), use_local_output=False)
    x, _ = data(64, 64)
    y = two(x)
    assert y.placements == (Shard(0),) and near([whole(y)], [one(x)])


@check
def shards_draw_their_own_numbers_and_replicas_the_same(ranks):
    for recipe in ("mxfp4+sr", "mxfp4+rht16", "ti2d", "quartet"):
        one = pair(recipe)
        with torch.no_grad():
            one[0].weight[64:] = one[0].weight[:64]
            one[0].bias.zero_()
        two = split(copy.deepcopy(one), ranks.mesh)
        two.append(MXFP4Linear(64, 64, recipe=recipe, fqn="replica"))
        with torch.no_grad():
            two[3].weight.copy_(one[2].weight[:, :64])
        set_step(two, 3)
        first = results(two, *data(40, 64))
        set_step(two, 3)
        assert same(first, results(two, *data(40, 64))[:2] + first[2:]), recipe  # gradients add up
        assert all(torch.equal(*ranks.gather(t)) for t in first), recipe
        hidden = two[0](data(40, 64)[0])
        equal = torch.equal(*ranks.gather(hidden))
        assert equal == (recipe in ("ti2d", "quartet")), recipe  # whose forwards draw nothing


@check
def layers_that_cannot_be_split_are_refused_by_name(ranks):
    for recipe, hidden, words in (
        ("fp8", 128, "takes a scale from a whole tensor, of which each of 2 ranks holds a part"),
        ("nvfp4", 128, "takes a scale from a whole tensor"),
        ("mxfp4", 96, "split among 2 ranks: out_features=48 is not a multiple of 32"),
    ):
        with pytest.raises(UserError, match=f"layer '0'.*{words}"):
            split(pair(recipe, hidden), ranks.mesh)(data(40, 64)[0])
    mixed = convert(nn.Sequential(nn.Linear(64, 64)), "mxfp4")
    with pytest.raises(UserError, match="layer '0': x is a DTensor and the weight is a plain tensor"):
        mixed(distribute_tensor(data(32, 64)[0], ranks.mesh, [Replicate()]))


@check
def a_loss_over_split_classes(ranks):
    x, target = data(40, 64)[0], torch.arange(40) % 64
    one = nn.Sequential(*pair("mxfp4"), nn.Linear(64, 64))
    two = parallelize_module(
        split(copy.deepcopy(one), ranks.mesh), ranks.mesh, {"3": ColwiseParallel(use_local_output=False)}
    )
    nn.functional.cross_entropy(one(x), target).backward()
    with loss_parallel():
        nn.functional.cross_entropy(two(x), target).backward()
    found = [whole(p.grad) for p in two.parameters()]
    for a, b in zip([p.grad for p in one.parameters()], found, strict=True):
        assert (a - b).norm() < 0.02 * a.norm()  # the softmax's sums are in another order, and gradients are rounded


@check
def fsdp_around_tensor_parallelism(ranks):
    one = pair("mxfp4+h16")
    expected = results(one, *data(40, 64))
    for shape in ((1, 2), (2, 1)):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        two = split(copy.deepcopy(one), mesh["tp"])
        fully_shard(two, mesh=mesh["dp"])
        assert near(expected, results(two, *data(40, 64))), shape
        random = fully_shard(split(pair("mxfp4+sr"), mesh["tp"]), mesh=mesh["dp"])
        set_step(random, 1)
        assert random[0].draws.rank == (0 if shape == (1, 2) else ranks.rank)


# Draws of data-parallel ranks

RANDOM = ("mxfp4+sr", "mxfp4+rht16")
STEPS = 40


def independent(ranks, noise: torch.Tensor) -> bool:
    """Whether the noise [steps, ...] of two ranks is uncorrelated: then the variance of their mean is half of one's.

    The products of both ranks' noise, one number a step, have mean 0: |t| < 5 fails once in 80,000 tries with 40 steps.
    Equal noise gives |t| beyond 20.
    """
    noise = noise - noise.mean(0)
    a, b = ranks.gather(noise)
    each = (a * b).flatten(1).sum(1)
    return bool((each.mean() / each.std() * STEPS**0.5).abs() < 5) and bool((a * a).sum() > 0)


def plain(recipe: str) -> nn.Sequential:
    torch.manual_seed(0)
    return convert(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)), recipe)


def offloaded(model, ranks):
    return fully_shard(model, mesh=ranks.mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))


def mixed(model, ranks):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return fully_shard(model, mesh=ranks.mesh, mp_policy=policy)


def prepared(model, ranks):
    from accelerate import Accelerator

    wrapped = Accelerator(cpu=True).prepare(model)
    assert isinstance(wrapped, nn.parallel.DistributedDataParallel)
    return wrapped


WRAPPERS = {
    "DDP": lambda model, ranks: nn.parallel.DistributedDataParallel(model),
    "DDP static graph": lambda model, ranks: nn.parallel.DistributedDataParallel(model, static_graph=True),
    "DDP unused": lambda model, ranks: nn.parallel.DistributedDataParallel(model, find_unused_parameters=True),
    "FSDP2": lambda model, ranks: fully_shard(model, mesh=ranks.mesh),
    "FSDP2 mixed": mixed,
    "FSDP2 offloaded": offloaded,
    "accelerate": prepared,
}


def trained(model, wrapped, first: int, last: int) -> list[torch.Tensor]:
    """Output of each micro-batch, two a step; gradients add up and are summed over the ranks."""
    found = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for step in range(first, last):
        set_step(wrapped, step)
        for _ in range(2):
            y = wrapped(data(32, 64)[0])
            y.float().square().mean().backward()
            found.append(y.detach().float())
        optimizer.step()
        optimizer.zero_grad()
    return found


@check
def ranks_draw_independently_and_again_under_each_framework(ranks):
    for name, wrap in WRAPPERS.items():
        for recipe in RANDOM:
            model = plain(recipe)
            wrapped = wrap(model, ranks)
            found = trained(model, wrapped, 0, STEPS // 2)
            assert not torch.equal(found[0], found[1]), name
            assert independent(ranks, torch.stack(found)), (name, recipe)
            again = plain(recipe)
            assert same(found[-4:], trained(again, wrap(again, ranks), STEPS // 2 - 2, STEPS // 2)), (name, recipe)


@check
def gradients_over_ranks_are_the_mean_of_each_ranks_own(ranks):
    alone = []
    for rank in range(2):
        model = plain("mxfp4+sr")
        set_step(model, 5, rank=rank)
        for _ in range(2):
            model(data(32, 64)[0]).square().mean().backward()
        alone.append([p.grad for p in model.parameters()])
    expected = [(a + b) / 2 for a, b in zip(*alone, strict=True)]
    for name in ("DDP", "DDP unused", "FSDP2", "FSDP2 offloaded", "accelerate"):
        model = plain("mxfp4+sr")
        wrapped = WRAPPERS[name](model, ranks)
        set_step(wrapped, 5)
        for _ in range(2):
            wrapped(data(32, 64)[0]).square().mean().backward()
        assert near(expected, [whole(p.grad) for p in model.parameters()]), name


@check
def the_trainer_of_transformers(ranks):
    from transformers import Trainer, TrainingArguments

    from mxfp4.adapters.huggingface import set_step_callback

    class Regression(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers, self.outputs = plain("mxfp4+sr"), []

        def forward(self, x, labels=None):
            y = self.layers(x)
            self.outputs.append(y.detach())
            return {"loss": (y - labels).square().mean()}

    def outputs() -> torch.Tensor:
        model = Regression()
        rows = [{"x": row, "labels": row} for row in data(32, 64)[0][:1].expand(16, 64)]
        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(
                folder, max_steps=STEPS, learning_rate=0.0, per_device_train_batch_size=2, use_cpu=True, report_to=[],
                save_strategy="no", logging_strategy="no", disable_tqdm=True,
            )  # fmt: skip
            assert arguments.world_size == 2
            Trainer(model, arguments, train_dataset=rows, callbacks=[set_step_callback()]).train()
        return torch.stack(model.outputs)

    found = outputs()
    assert independent(ranks, found) and torch.equal(found, outputs())


# One start


def _run(ranks, folder) -> None:
    found = {}
    os.environ |= {"RANK": str(ranks.rank), "LOCAL_RANK": str(ranks.rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}  # as torchrun sets: accelerate reads them
    for name, function in CHECKS.items():
        try:
            function(ranks)
            found[name] = None
        except Exception:
            found[name] = traceback.format_exc()
    everyone = ranks.gather(found)
    if ranks.rank == 0:
        merged = {name: [f"rank {i}: {r[name]}" for i, r in enumerate(everyone) if r[name]] for name in found}
        (folder / "results.json").write_text(json.dumps(merged))


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, list[str]]:
    folder = tmp_path_factory.mktemp("ranks")
    launch(_run, 2, folder)
    return json.loads((folder / "results.json").read_text())


@pytest.mark.parametrize("name", CHECKS)
def test_on_two_ranks(name, found):
    assert found[name] == [], "\n".join(found[name])
