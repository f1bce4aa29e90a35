"""Cross-entropy in chunks is cross-entropy: the same losses, the same gradients up to the order of sums."""

import sys
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mxfp4.errors import UserError
from mxfp4.training.execution import cross_entropy
from mxfp4.training.execution.choices import Execution
from mxfp4.training.execution.cross_entropy import check_choice, mean_loss, token_losses
from mxfp4.training.loop import train
from tests.fakes import TINY, FakeCorpus, tiny_config
from tests.fakes.step import Allocations


@pytest.fixture(autouse=True)
def checked_anew():
    check_choice.cache_clear()
    yield
    check_choice.cache_clear()


def made(dtype=torch.float32, tokens=26, words=50, dim=16):
    generator = torch.Generator().manual_seed(0)
    head = nn.Linear(dim, words, bias=False)
    head.weight.data = torch.randn(words, dim, generator=generator)
    x = torch.randn(2, tokens // 2, dim, generator=generator).to(dtype)
    return x.requires_grad_(), head, torch.randint(words, (2, tokens // 2), generator=generator)


def whole(x, head, targets):
    return F.cross_entropy((x @ head.weight.to(x.dtype).t()).float().flatten(0, 1), targets.flatten())


def gradients(loss_of, x, head, targets, weight=1.0):
    loss = loss_of(x, head, targets)
    return [loss.detach(), *torch.autograd.grad(loss * weight, (x, head.weight))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_differ_by_the_order_of_sums(dtype, monkeypatch):
    monkeypatch.setattr(cross_entropy, "CHUNK", 7)  # 26 tokens: the last chunk is shorter
    loss, dx, dw = gradients(mean_loss, *made(dtype), weight=0.25)
    exact_loss, exact_dx, exact_dw = gradients(whole, *made(dtype), weight=0.25)
    assert loss.item() == pytest.approx(exact_loss.item(), rel=2.0**-22)
    assert (dx - exact_dx).norm() <= 2.0**-20 * exact_dx.norm()
    rounding = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-20  # of the whole one's, rounded to BF16 on its way
    assert dw.dtype == torch.float32 and (dw - exact_dw).norm() <= rounding * exact_dw.norm()
    x, head, targets = made(dtype)
    logits = (x @ head.weight.to(dtype).t()).float().flatten(0, 1)
    each = F.cross_entropy(logits, targets.flatten(), reduction="none").view_as(targets)
    assert torch.equal(token_losses(x, head, targets), each)


def test_no_gradient_is_made_where_none_is_wanted():
    x, head, targets = made()
    with torch.no_grad():
        assert not mean_loss(x, head, targets).requires_grad
    head.weight.requires_grad_(False)
    (dx,) = torch.autograd.grad(mean_loss(x, head, targets), x)
    torch.testing.assert_close(dx, gradients(whole, *made())[1], rtol=1e-5, atol=1e-7)


def test_logits_are_never_whole(monkeypatch):
    monkeypatch.setattr(cross_entropy, "CHUNK", 16)
    tokens, words = 256, 1000
    peaks = {}
    for name, loss_of in (("whole", whole), ("chunked", mean_loss)):
        x, head, targets = made(tokens=tokens, words=words, dim=8)
        with Allocations() as seen:
            loss_of(x, head, targets).backward()
        peaks[name] = seen.peak
    assert peaks["whole"] > 2 * 4 * tokens * words
    assert peaks["chunked"] < 4 * 4 * 16 * words + 3 * 4 * words * 8 + 8 * tokens * 8


class Liger(ModuleType):
    """The signature of liger-kernel 0.8."""

    def __init__(self, factor=1.0):
        super().__init__("liger_kernel.transformers.functional")
        self.factor, self.calls = factor, 0

    def liger_fused_linear_cross_entropy(
        self, input, weight, target, bias=None, ce_weight=None, ignore_index=-100, lse_square_scale=0.0,
        label_smoothing=0.0, reduction="mean", softcap=None, return_z_loss=False, accum_dtype=None,
        use_token_scaling=False, return_token_accuracy=False, return_predicted_tokens=False,
    ):  # fmt: skip
        assert accum_dtype == torch.float32 and input.ndim == 2 and weight.dtype == input.dtype
        self.calls += 1
        return F.cross_entropy((input @ weight.t()).float(), target) * self.factor


def test_liger_is_checked_then_used(monkeypatch):
    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    stub = Liger()
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.functional", stub)
    result = run(cross_entropy="liger")
    assert stub.calls > 1 and result.timings["cross_entropy"] == "liger"
    check_choice.cache_clear()
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.functional", Liger(1.5))
    with pytest.raises(UserError, match="cross_entropy='liger' is wrong on cpu: relative errors 0.5, 0.5, 0.5"):
        run(cross_entropy="liger")
    check_choice.cache_clear()
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.functional", None)
    with pytest.raises(UserError, match="cross_entropy='liger' is not installed: pip install 'liger-kernel"):
        run(cross_entropy="liger")


def run(**options):
    return train(tiny_config(model=TINY, steps=2), corpus=FakeCorpus(), device="cpu", progress=False, **options)


def test_a_run_in_chunks_learns_what_the_whole_one_learns(monkeypatch):
    plain = run()
    monkeypatch.setattr(cross_entropy, "CHUNK", 10)
    chunked = run(cross_entropy="chunked")
    assert chunked.curve[0]["eval_loss"] == plain.curve[0]["eval_loss"]  # each token's has the same bits
    for ours, theirs in zip(chunked.curve[1:], plain.curve[1:], strict=True):
        assert ours["train_loss"] == pytest.approx(theirs["train_loss"], rel=1e-5)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)
    assert chunked.timings["cross_entropy"] == "chunked" and "cross_entropy" not in plain.timings


@pytest.mark.parametrize("choice, reason", [
    ({"attention": "flsh"}, "attention='flsh' must be one of repeat, auto, flash, .*aiter"),
    ({"cross_entropy": "fused"}, "cross_entropy='fused' must be one of whole, chunked, liger"),
    ({"capture": True, "cross_entropy": "liger"}, "cross_entropy='liger' waits for the GPU"),
])  # fmt: skip
def test_what_is_no_choice_is_refused(choice, reason):
    with pytest.raises(UserError, match=reason):
        Execution(**choice)
