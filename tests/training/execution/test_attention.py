"""Attention back ends: one computation, checked on the device before it is used."""

import sys
from types import ModuleType

import pytest
import torch
from torch.nn import functional as F

from mxfp4.errors import UserError
from mxfp4.training.execution import attention as module
from mxfp4.training.execution.attention import attention, check_backend
from mxfp4.training.execution.proof import with_gradients
from mxfp4.training.loop import train
from tests.fakes import FakeCorpus, tiny_config

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def checked_anew():
    check_backend.cache_clear()
    yield
    check_backend.cache_clear()


def inputs(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, n, 40, 16, generator=generator, dtype=dtype) for n in (4, 2, 2, 4)]


class Aiter(ModuleType):
    """Aiter's signature, in terms of SDPA. wrong: what its gradient of V is multiplied by."""

    def __init__(self, wrong=1.0):
        super().__init__("aiter")
        self.wrong, self.calls = wrong, []

    def flash_attn_func(
        self, q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1, 0), bias=None,
        alibi_slopes=None, deterministic=True, return_lse=False, return_attn_probs=False,
    ):  # fmt: skip
        assert q.shape[1] == k.shape[1] and causal and return_lse
        self.calls.append(deterministic)
        v = v.detach() + (v - v.detach()) * self.wrong
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2), None


def test_every_back_end_is_attention_in_float64(monkeypatch):
    monkeypatch.setitem(sys.modules, "aiter", Aiter())
    *qkv, grad = inputs()
    groups = [t.double() if t.shape[1] == 4 else t.double().repeat_interleave(2, dim=1) for t in qkv]
    scores = (groups[0] @ groups[1].mT / 4).masked_fill(torch.ones(40, 40).triu(1).bool(), -torch.inf)
    exact = scores.softmax(-1) @ groups[2]
    for backend in ("repeat", "auto", "flash", "math", "aiter"):
        out, *gradients = with_gradients(lambda *a, b=backend: attention(*a, b), qkv, grad)
        torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)
        assert [g.shape for g in gradients] == [t.shape for t in qkv]
        check_backend(backend, CPU, torch.float32, 4, 2, 16)


def test_the_default_has_the_bytes_of_copied_keys_and_values_and_the_others_not():
    *qkv, grad = inputs()

    def as_ever(q, k, v):
        k, v = k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    before, now, shared = (with_gradients(f, qkv, grad) for f in (as_ever, attention, lambda *a: attention(*a, "auto")))
    assert all(torch.equal(a, b) for a, b in zip(before, now, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(before, shared, strict=True))  # why it is the default


@pytest.mark.parametrize("backend, reason", [
    ("aiter", "attention='aiter' is not installed: pip install amd-aiter, or use attention='auto'"),
    ("cudnn", r"attention='cudnn' does not run on cpu \(No viable backend.*\): use attention='auto'"),
])  # fmt: skip
def test_what_is_not_there_is_refused_before_a_run(backend, reason, monkeypatch):
    monkeypatch.setitem(sys.modules, "aiter", None)
    with pytest.raises(UserError, match=reason):
        train(tiny_config(), corpus=FakeCorpus(), device="cpu", progress=False, attention=backend)


def test_a_back_end_with_a_wrong_gradient_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "aiter", Aiter(wrong=1.1))
    with pytest.raises(UserError, match=r"attention='aiter' is wrong on cpu: relative errors .*, 0.1 of its result"):
        check_backend("aiter", CPU, torch.bfloat16, 4, 2, 16)


def test_keys_and_values_are_copied_where_a_kernel_takes_no_shared_ones(monkeypatch):
    seen = []
    monkeypatch.setattr(module.F, "scaled_dot_product_attention", lambda q, k, v, **how: seen.append((k.shape[1], how)))
    for backend in ("efficient", "flash"):
        attention(*inputs()[:3], backend)
    assert seen == [(4, {"is_causal": True, "enable_gqa": False}), (2, {"is_causal": True, "enable_gqa": True})]


def test_a_run_uses_it_and_records_it(monkeypatch):
    stub = Aiter()
    monkeypatch.setitem(sys.modules, "aiter", stub)
    options = {"corpus": FakeCorpus(), "device": "cpu", "progress": False}
    plain, ours = (train(tiny_config(steps=1), **options, attention=name) for name in ("repeat", "aiter"))
    assert stub.calls and plain.outcome["final_loss"] == pytest.approx(ours.outcome["final_loss"], rel=1e-4)
    assert "attention" not in plain.timings and ours.timings["attention"] == "aiter"


def test_compiled_code_calls_it_as_it_is(monkeypatch):
    stub = Aiter()
    monkeypatch.setitem(sys.modules, "aiter", stub)
    *qkv, _ = inputs()
    compiled = torch.compile(attention, backend="eager")
    assert torch.equal(compiled(*qkv, "aiter"), attention(*qkv, "aiter")) and len(stub.calls) == 2
