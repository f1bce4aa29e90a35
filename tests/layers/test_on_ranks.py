"""Two ranks over gloo, one start for all checks: tensor parallelism, and the draws of ranks under each framework."""

from __future__ import annotations

import copy
import json
import traceback

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
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


# One start


def _run(ranks, folder) -> None:
    found = {}
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
