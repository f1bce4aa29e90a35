"""Activation checkpointing changes no bit: not of a loss, a gradient or a recipe's count of random draws."""

from dataclasses import replace

import pytest
import torch

from mxfp4 import MXFP4Linear, convert, set_step
from mxfp4.errors import UserError
from mxfp4.training.evaluation import token_loss
from mxfp4.training.execution.recompute import recompute_every
from mxfp4.training.model import build_model
from tests.fakes import TINY


def two_parts(every, *, compiled=False, layers=3, recipe="mxfp4+sr", **changes):
    """Losses, gradients, counters and histories after the forward and backward of two parts."""
    model = convert(build_model(replace(TINY, n_layers=layers, **changes), 0), recipe)
    recompute_every(model, every)
    if compiled:
        torch._dynamo.reset()
        for layer in model.layers:
            layer.compile(backend="aot_eager_decomp_partition")  # the compiler but for its code generation
    set_step(model, 1)
    losses = []
    for seed in range(2):
        loss = token_loss(model, torch.randint(64, (2, 17), generator=torch.Generator().manual_seed(seed)))
        balance = model.balance_loss()
        (loss if balance is None else loss + balance).backward()
        losses.append(loss.detach())
    counters = [m.draws.state for m in model.modules() if isinstance(m, MXFP4Linear)]
    return [*losses, *(p.grad for p in model.parameters()), *counters, *model.buffers()]


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("experts", [0, 4])
def test_eager(every, experts):
    plain = two_parts(0, n_experts=experts)
    assert same(plain, two_parts(every, n_experts=experts))
    assert not same(plain[:2], [plain[1], plain[0]])  # the two parts differ, so a stuck counter would show


def test_compiled():
    assert same(two_parts(0, compiled=True, layers=1), two_parts(1, compiled=True, layers=1))


def test_histories_of_delayed_scaling():
    assert same(two_parts(0, recipe="fp8+delayed"), two_parts(1, recipe="fp8+delayed"))


def test_fewer_activations_are_kept():
    def saved(every):
        model = convert(build_model(replace(TINY, n_layers=4), 0), "mxfp4+sr")
        recompute_every(model, every)
        sizes = {}
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: sizes.__setitem__(t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()) or t, lambda t: t
        ):
            loss = token_loss(model, torch.randint(64, (4, 33)))
        del loss
        return sum(sizes.values())

    none, half, all_ = (saved(n) for n in (0, 2, 1))
    assert all_ < half < none and all_ < 0.5 * none


def test_a_negative_number_is_refused():
    with pytest.raises(UserError, match="recompute_every=-1 must be 0"):
        recompute_every(build_model(TINY, 0), -1)
