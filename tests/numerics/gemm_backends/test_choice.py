"""The choice of a back end: the first that passes, checked once, named in plans and records; a refused one is said."""

from __future__ import annotations

import warnings
from functools import lru_cache

import pytest
import torch

import mxfp4
from mxfp4 import MXFP4Linear
from mxfp4.errors import Notice, UserError
from mxfp4.numerics.gemm_backends import choice
from mxfp4.numerics.gemm_backends.choice import Status
from mxfp4.numerics.ops import packed_operands
from mxfp4.studies.machine import machine
from tests.fakes.gemm_libraries import StandIn


def bf16(a, b, dtype):
    return dtype == torch.bfloat16


@pytest.fixture
def chip(monkeypatch):
    """A chip with FP4 units, which is the CPU; gives the function that installs its back ends, and says how often each
    was checked."""
    monkeypatch.setenv(choice.VARIABLE, "auto")
    checked, wrong = [], {}
    monkeypatch.setattr(choice, "chip_path", lambda device: "native")
    monkeypatch.setattr(
        choice, "problem", lambda backend, device: (checked.append(backend.name), wrong.get(backend.name))[1]
    )
    monkeypatch.setattr(choice, "_shapes", {})
    for cached in ("_chain", "_status"):
        monkeypatch.setattr(choice, cached, lru_cache(getattr(choice, cached).__wrapped__))

    def install(missing=(), **given):
        """given: a back end by its name, or why it is refused."""
        for name in list(choice.BACKENDS):
            one = given.get(name)
            backend = one if isinstance(one, StandIn) else StandIn(name)
            backend.missing = lambda name=name: f"pip install {name}" if name in missing else None
            monkeypatch.setitem(choice.BACKENDS, name, backend)
            wrong[name] = one if isinstance(one, str) else None
        return checked

    return install


def test_the_first_that_passes_is_chosen_and_each_is_checked_once(chip):
    checked = chip(missing=["aiter"])
    for _ in range(3):
        assert choice.gemm_backend("cpu") == "scaled_mm" and choice.matmul_path("cpu") == "native"
    assert choice.described("cpu") == "scaled_mm, else triton, else emulated"
    assert checked == ["scaled_mm", "triton"]


def test_one_that_is_refused_is_said_once_and_the_next_is_taken(chip):
    chip(missing=["aiter"], scaled_mm="odd sizes: 3 of 9 results are wrong")
    with pytest.warns(Notice, match="FP4 back end scaled_mm is refused on cpu: odd sizes: 3 of 9 results are wrong"):
        assert choice.gemm_backend("cpu") == "triton"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choice.gemm_backend("cpu") == "triton"
    assert choice.statuses("cpu") == [
        Status("aiter", "not installed", "pip install aiter"),
        Status("scaled_mm", "refused", "odd sizes: 3 of 9 results are wrong"),
        Status("triton", "usable"),
    ]


@pytest.mark.filterwarnings("ignore:FP4 back end:mxfp4.errors.Notice")
def test_where_none_passes_the_library_multiplies_values(chip):
    chip(aiter="wrong", scaled_mm="wrong", triton="wrong")
    assert choice.gemm_backend("cpu") == "emulated" and choice.matmul_path("cpu") == "emulated"


def test_one_that_is_asked_for_is_taken_or_an_error(chip):
    chip(missing=["aiter"], scaled_mm="wrong by 2")
    mxfp4.set_gemm_backend("triton")
    assert choice.gemm_backend("cpu") == "triton"
    mxfp4.set_gemm_backend("emulated")
    assert choice.matmul_path("cpu") == "emulated"
    for name, said in (("aiter", "not installed: pip install aiter"), ("scaled_mm", "refused: wrong by 2")):
        mxfp4.set_gemm_backend(name)
        with pytest.raises(UserError, match=f"gemm_backend={name} is {said}.*use auto"):
            choice.gemm_backend("cpu")
    with pytest.raises(
        UserError, match="gemm_backend='cublas' is not known; allowed: auto, aiter, scaled_mm, triton, emul"
    ):
        mxfp4.set_gemm_backend("cublas")


def test_the_environment_names_one(chip, monkeypatch):
    chip()
    monkeypatch.setenv(choice.VARIABLE, "triton")
    assert choice.gemm_backend("cpu") == "triton"
    monkeypatch.setenv(choice.VARIABLE, "best")
    with pytest.raises(UserError, match="MXFP4_GEMM_BACKEND='best' is not known"):
        choice.gemm_backend("cpu")


def test_a_chip_without_units_has_none_to_choose(monkeypatch):
    for asked in ("auto", "emulated", "triton"):
        monkeypatch.setenv(choice.VARIABLE, asked)
        assert choice.gemm_backend("cpu") == "emulated"
    monkeypatch.setattr(choice, "chip_path", lambda device: "emulated")
    monkeypatch.setattr(choice, "_chain", choice._chain.__wrapped__)
    with pytest.raises(UserError, match="gemm_backend=triton: cuda:0 has no FP4 units; use auto or emulated"):
        choice.gemm_backend("cuda")


def test_products_that_the_chosen_one_does_not_take_go_to_triton_then_to_the_library(chip):
    fast, ours = StandIn("aiter", takes=bf16), StandIn("triton", takes=lambda a, b, d: a.elem == "e2m1")
    chip(aiter=fast, triton=ours)
    x = torch.randn(32, 64)

    def product(elem, dtype):
        q = mxfp4.quantize(x, elem=elem)
        sides = (q.qdata, q.scale, q.elem, q.block)
        exact = q.dequantize(torch.float64) @ q.dequantize(torch.float64).t()
        got = packed_operands.gemm_packed(*sides, *sides, dtype)
        assert got.dtype == dtype and (got.double() - exact).norm() <= exact.norm() * (
            2.0**-8 if dtype != torch.float32 else 1e-6
        )
        return fast.calls, ours.calls

    assert product("e2m1", torch.bfloat16) == (1, 0)
    assert product("e2m1", torch.float32) == (1, 1)
    assert product("e4m3", torch.float32) == (1, 1)  # neither


def test_a_shape_that_a_back_end_gets_wrong_goes_to_the_next_and_is_said_once(chip):
    """A library's kernel for one shape may be wrong where those that were checked are right."""
    fast = StandIn("aiter", takes=bf16, on_result=lambda y: y * 2 if y.shape == (96, 160) else y)
    ours = StandIn("triton")
    chip(aiter=fast, triton=ours)
    a, b = mxfp4.quantize(torch.randn(96, 64)), mxfp4.quantize(torch.randn(160, 64), block="2d")
    exact = a.dequantize(torch.float64) @ b.dequantize(torch.float64).t()
    with pytest.warns(
        Notice, match="aiter is left out for 96x160x64 to bfloat16: .* of 4096 results are wrong"
    ) as said:
        products = [mxfp4.matmul(a, b, torch.bfloat16) for _ in range(3)]
    assert len(said) == 1 and all(torch.equal(y, exact.bfloat16()) for y in products)
    assert (fast.calls, ours.calls) == (1, 3)
    assert torch.equal(mxfp4.matmul(b, a, torch.bfloat16), exact.t().bfloat16()) and fast.calls == 2


def test_sums_beyond_fp32_and_nan_are_no_fault_of_a_back_end(chip):
    chip(missing=["aiter", "scaled_mm"], triton=StandIn("triton"))
    x = torch.full((32, 64), 2.0**100)
    x[3, 5] = torch.nan
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y = mxfp4.matmul(mxfp4.quantize(x), mxfp4.quantize(x))
    assert y[0, 0].isinf() and y[3].isnan().all() and y[:, 3].isnan().all()


def test_a_layer_says_and_uses_what_was_chosen_at_any_time(chip):
    ours = StandIn("triton")
    chip(missing=["aiter", "scaled_mm"], triton=ours)
    layer, x = MXFP4Linear(64, 32, bias=False, recipe="mxfp4"), torch.randn(32, 64, requires_grad=True)
    native = layer(x)
    native.sum().backward()
    assert ours.calls == 3 and "MX GEMMs by triton, else emulated\n" in str(layer.plan())
    mxfp4.set_gemm_backend("emulated")
    emulated = layer(x)
    assert ours.calls == 3 and "MX GEMMs" not in str(layer.plan())
    torch.testing.assert_close(native, emulated, rtol=1e-5, atol=1e-5)


def test_records_name_it(chip, monkeypatch):
    chip(missing=["aiter", "scaled_mm"])
    assert machine("cpu")["gemm_backend"] == "triton" and machine("cpu")["path"] == "native"
    monkeypatch.setattr(choice, "chip_path", lambda device: "emulated")
    monkeypatch.setattr(choice, "_chain", choice._chain.__wrapped__)
    assert machine("cpu")["gemm_backend"] == machine("cpu")["path"] == "emulated"
