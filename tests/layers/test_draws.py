"""A draw is a function of (seed, layer, rank, step, forward): alone, copied, on meta, checkpointed, among ranks."""

import copy
import pickle
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mxfp4 import MXFP4Linear, convert, set_step
from mxfp4.numerics.ops.draws import LayerDraws

RANDOM = "mxfp4+sr"
DEVICE = torch.device("cpu")


def layer(recipe=RANDOM, **options) -> MXFP4Linear:
    torch.manual_seed(0)
    return MXFP4Linear(64, 64, bias=False, recipe=recipe, **options)


def inputs(seed=1, tokens=32):
    return torch.randn(tokens, 64, generator=torch.Generator().manual_seed(seed))


# Who draws what


def test_layers_made_by_hand_differ_and_a_named_one_repeats():
    assert not torch.equal(layer()(inputs()), layer()(inputs()))
    assert torch.equal(layer(fqn="a")(inputs()), layer(fqn="a")(inputs()))
    assert not torch.equal(layer(fqn="a")(inputs()), layer(fqn="b")(inputs()))
    assert not torch.equal(layer(fqn="a")(inputs()), layer(fqn="a", seed=1)(inputs()))


def test_clones_differ_from_their_original_and_from_each_other():
    original = layer(fqn="a")
    clones = [copy.deepcopy(original) for _ in range(3)]
    again = [copy.deepcopy(clones[0]), copy.deepcopy(layer(fqn="a"))]
    found = [each(inputs()) for each in (original, *clones, again[0])]
    assert all(not torch.equal(a, b) for i, a in enumerate(found) for b in found[:i])
    assert torch.equal(again[1](inputs()), found[1])  # the first copy of the same layer, in another run


def test_a_pickled_layer_goes_on_where_it_was():
    here = layer(fqn="a")
    here(inputs())
    there = pickle.loads(pickle.dumps(here))
    assert torch.equal(here(inputs()), there(inputs()))


def test_a_layer_from_the_meta_device_draws_as_any_other():
    with torch.device("meta"):
        late = convert(nn.Sequential(nn.Linear(64, 64)), RANDOM)
    late = late.to_empty(device="cpu")
    early = convert(nn.Sequential(nn.Linear(64, 64)), RANDOM)
    late.load_state_dict(early.state_dict())
    assert torch.equal(late(inputs()), early(inputs()))
    for model in (late, early):
        set_step(model, 5)
    assert torch.equal(late(inputs()), early(inputs()))
    with torch.device("meta"):
        later = convert(nn.Sequential(nn.Linear(64, 64)), RANDOM)
    set_step(later, 5)  # before there is anything to set
    later = later.to_empty(device="cpu")
    later.load_state_dict(early.state_dict())
    set_step(early, 5)
    assert torch.equal(later(inputs()), early(inputs()))


def test_nothing_of_it_is_where_frameworks_broadcast_save_or_average():
    model = convert(nn.Sequential(nn.Linear(64, 64)), RANDOM)
    assert list(model.buffers()) == [] and set(model.state_dict()) == {"0.weight", "0.bias"}
    averaged = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
    averaged.update_parameters(model)
    model.half().float().double()
    assert model[0].draws.state.dtype == torch.int64


def test_no_two_draws_of_a_run_coincide():
    """Over layers, ranks, steps, and thousands of forwards in a step."""
    seeds = []
    for name in ("layers.0.wq", "layers.0.wk", "layers.1.wq"):
        for rank in (0, 1, 7):
            draws = LayerDraws(0, name)
            for step, forwards in ((0, 40), (1, 5000), (2, 40), (3, 40), (1000, 40), (1001, 40)):
                count = draws.set(step, 0, rank)
                if count is not None:
                    count.fill_(draws.position)
                seeds += [int(draws.next(DEVICE)) for _ in range(forwards)]
    assert len(seeds) == 9 * 5200 and len(set(seeds)) == len(seeds)


def test_a_step_repeats_and_forwards_within_it_differ():
    model = layer(fqn="a")
    set_step(model, 3)
    first = [model(inputs()) for _ in range(3)]
    assert all(not torch.equal(a, b) for a, b in pairwise(first))
    set_step(model, 3, forwards=1)
    assert torch.equal(model(inputs()), first[1])


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_noise_of_ranks_averages_as_independent_noise_does(ranks):
    """The variance of the mean over ranks is that of one rank over the number of ranks."""
    x, model = inputs(), layer(fqn="a")
    exact = model.to(torch.float32)
    noise = []
    for step in range(200):
        found = []
        for rank in range(ranks):
            set_step(model, step, rank=rank)
            found.append(exact(x).detach())
        noise.append(torch.stack(found))
    noise = torch.stack(noise)  # [steps, ranks, ...]
    noise = noise - noise.mean(dim=(0, 1))
    ratio = float(noise.mean(1).var(0).mean() / noise.var(dim=(0, 1)).mean())
    assert ratio == pytest.approx(1 / ranks, rel=0.1)


# Evaluation


@pytest.mark.parametrize("name", [RANDOM, "mxfp4+rht16", "ti2d", "nvfp4"])
def test_an_evaluation_repeats_and_leaves_the_training_alone(name):
    model = layer(name, fqn="a", n_layers=9)
    set_step(model, 1)
    trained = [model(inputs()), model(inputs())]
    set_step(model, 1)
    first = model(inputs())
    model.eval()
    evaluated = [model(inputs()) for _ in range(3)]
    set_step(model, 2, rank=3)
    assert all(torch.equal(evaluated[0], y) for y in (*evaluated, model(inputs())))
    set_step(model, 1, forwards=1)
    model.train()
    assert torch.equal(first, trained[0]) and torch.equal(model(inputs()), trained[1])


def test_an_evaluation_rounds_to_nearest_unless_asked():
    noisy, nearest = layer(fqn="a").eval(), layer("mxfp4", fqn="a").eval()
    assert torch.equal(noisy(inputs()), nearest(inputs()))
    noisy.draws_in_eval = True
    assert not torch.equal(noisy(inputs()), noisy(inputs()))


# Activation checkpointing


def gradients(model, reentrant: bool | None, forwards: int, order, nested=False):
    """Of `forwards` forwards, each with an input of its own, run backward in `order`; reentrant None: no checkpoint."""
    set_step(model, 1)
    found = []
    losses = []
    for i in range(forwards):
        x = inputs(i).requires_grad_()
        if reentrant is None:
            y = model(x)
        elif nested:
            inner = lambda x: checkpoint(model, x, use_reentrant=reentrant)
            y = checkpoint(inner, x, use_reentrant=reentrant)
        else:
            y = checkpoint(model, x, use_reentrant=reentrant)
        losses.append(y.square().mean())
        found.append(x)
    for i in order:
        losses[i].backward()
    return [x.grad for x in found] + [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_a_checkpointed_forward_repeats_its_own_draws(reentrant, order):
    model = nn.Sequential(layer(fqn="a"), nn.ReLU(), layer(fqn="b"))
    plain = gradients(model, None, 3, order)
    model.zero_grad()
    again = gradients(model, reentrant, 3, order)
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))
    counts = [m.draws.state[1].item() for m in model if isinstance(m, MXFP4Linear)]
    assert counts == [(1 << 20) + 3] * 2  # the repetitions are not counted


def test_a_layer_that_is_called_twice_in_one_checkpoint():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.own = layer(fqn="a")

        def forward(self, x):
            return self.own(self.own(x).relu())

    model = Twice()
    plain = gradients(model, None, 2, (0, 1))
    model.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(plain, gradients(model, False, 2, (0, 1)), strict=True))


def test_a_checkpoint_inside_a_checkpoint():
    model = nn.Sequential(layer(fqn="a"), nn.ReLU(), layer(fqn="b"))
    plain = gradients(model, None, 2, (0, 1))
    model.zero_grad()
    nested = gradients(model, False, 2, (0, 1), nested=True)
    assert all(torch.equal(a, b) for a, b in zip(plain, nested, strict=True))


def test_a_graph_that_is_kept_can_be_run_backward_twice():
    model, x = layer(fqn="a"), inputs().requires_grad_()
    y = checkpoint(model, x, use_reentrant=False).square().mean()
    y.backward(retain_graph=True)
    first = x.grad.clone()
    x.grad = None
    y.backward()
    assert torch.equal(first, x.grad)


def test_a_repetition_that_cannot_be_told_is_refused():
    model = layer(fqn="a")
    with pytest.raises(RuntimeError, match="layer 'a' is inside a checkpoint inside a checkpoint"):
        gradients(model, True, 1, (0,), nested=True)

    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return model(x)

        @staticmethod
        def backward(ctx, grad):
            with torch.enable_grad():
                x = ctx.saved_tensors[0].detach().requires_grad_()
                model(x).backward(grad)
            return x.grad

    set_step(model, 1)
    Again.apply(inputs(0).requires_grad_()).sum().backward()  # one forward: it is that one
    set_step(model, 1)
    two = [Again.apply(inputs(i).requires_grad_()).sum() for i in range(2)]
    with pytest.raises(RuntimeError, match="inside a backward after 2 forwards"):
        two[0].backward()


# Ranks of a process group


def _noise_of_a_rank(rank: int, file: str, steps: int, folder: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(layer(fqn="a")))
    found = []
    for step in range(steps):
        set_step(model, step)
        found.append(model(inputs()).detach().numpy())
    np.save(f"{folder}/{rank}.npy", np.stack(found))
    torch.distributed.destroy_process_group()


def test_ranks_of_ddp_draw_independently_by_default(tmp_path):
    torch.multiprocessing.spawn(_noise_of_a_rank, (str(tmp_path / "group"), 100, str(tmp_path)), nprocs=2)
    noise = np.stack([np.load(tmp_path / f"{rank}.npy") for rank in range(2)])  # [ranks, steps, ...]
    noise = noise - noise.mean(axis=(0, 1))
    assert not np.array_equal(noise[0], noise[1])
    assert noise.mean(0).var(0).mean() / noise.var(axis=(0, 1)).mean() == pytest.approx(0.5, rel=0.1)
