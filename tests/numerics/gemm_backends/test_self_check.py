"""The check of a back end: right ones pass, and each way to be wrong is found and named."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mxfp4.numerics.gemm_backends.backends import BACKENDS
from mxfp4.numerics.gemm_backends.self_check import CASES, E8M0_NAN, accumulation_bound, operands, problem, reference
from tests.fakes.gemm_libraries import StandIn, product
from tests.fakes.triton_kernels import load
from tests.numerics.kernels.test_triton_gemm import needs_dot_scaled

CPU = torch.device("cpu")
BF16, FP32 = torch.bfloat16, torch.float32


def case(name: str):
    return next(c for c in CASES if c.name == name)


def test_the_exact_product_passes_also_where_everything_is_fake():
    one = StandIn()
    with FakeTensorMode():
        assert problem(one, CPU) is None
    assert one.calls == 2 * 2 * len(CASES)


def test_fp32_sums_in_any_order_pass():
    class Library(StandIn):
        def multiply(self, a, b, dtype):
            return (a.dequantize() @ b.dequantize().t()).to(dtype)

    assert problem(Library(), CPU) is None


@needs_dot_scaled
@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
def test_our_kernel_passes(monkeypatch):
    monkeypatch.setattr("mxfp4.numerics.kernels.triton.gemm", load("gemm"), raising=False)
    assert problem(BACKENDS["triton"], CPU, CASES[:4]) is None


def test_the_operands_are_hard_ones():
    lowest, highest = 255, 0
    for one in CASES:
        a, b = operands(one)
        scales = torch.cat([x.scale[x.scale != E8M0_NAN] for x in (a, b)])
        lowest, highest = min(lowest, int(scales.min())), max(highest, int(scales.max()))
        exact, magnitude = reference(one, CPU)[2:]
        assert exact.nan_to_num().isfinite().all() and magnitude.nan_to_num().max() < 2.0**127
        assert exact.isnan().any() == one.special
        assert product(a, b, FP32).nan_to_num(0, 0, 0).ne(0).float().mean() > 0.4  # underflow hides little
    assert (lowest, highest) == (0, 254)
    zero = reference(case("zero and NaN blocks"), CPU)[0]
    assert (zero.codes().view(64, 8, 32) == 0).all(-1).sum() >= 3
    cancelled, magnitude = reference(case("sums that cancel"), CPU)[2:]
    assert (cancelled.abs() / magnitude).median() < 2.0**-4


def nan_as_zero(x):
    nan = (x.scale == E8M0_NAN).repeat_interleave(16, 1)
    nan = nan.repeat_interleave(32, 0) if x.block == "2d" else nan
    return replace(x, qdata=torch.where(nan, 0, x.qdata), scale=torch.where(x.scale == E8M0_NAN, 0, x.scale))


def in_bf16_halves(a, b, dtype):
    """Sums of each half of K in BF16, as split K with atomic additions makes them."""
    x, y = a.dequantize(torch.float64), b.dequantize(torch.float64)
    half = x.shape[1] // 2
    parts = [(x[:, part] @ y[:, part].t()).to(BF16).double() for part in (slice(0, half), slice(half, None))]
    return (parts[0] + parts[1]).to(dtype)


WRONG = {
    "scales in another order": (StandIn(on_operands=lambda x: replace(x, scale=x.scale.flip(1))), "tails|NaN|odd sizes"),
    "scales of the wrong rows": (StandIn(on_operands=lambda x: replace(x, scale=x.scale.roll(1, 0))), "one block"),
    "scales ignored": (StandIn(on_operands=lambda x: replace(x, scale=x.scale * 0 + 127)), "one block"),
    "BF16 for FP32": (StandIn(on_result=lambda y: y.bfloat16().to(y.dtype)), "one block, 96x64x32 to float32: .*wrong"),
    "truncated BF16": (
        StandIn(
            on_result=lambda y: (y.view(torch.int16) - 1).view(BF16) if y.dtype == BF16 else y
        ), "one block, 96x64x32 to bfloat16"
    ),
    "FP16 sums": (StandIn(on_result=lambda y: y.half().to(y.dtype)), "one block.*float32"),
    "NaN as zero": (StandIn(on_operands=nan_as_zero), "zero and NaN blocks.* results are NaN without a NaN block, or not"),
    "NaN as infinity": (StandIn(on_result=lambda y: y.nan_to_num(torch.inf)), "zero and NaN blocks.*NaN"),
    "subnormal scales lost": (
        StandIn(on_operands=lambda x: x if x.block == "2d" else replace(
            x, qdata=x.qdata * ((x.scale > 0) | (x.scale == E8M0_NAN)).repeat_interleave(16, 1)
        )),
        "scales of [ab] from smallest",
    ),
    "transposed": (StandIn(on_result=lambda y: y.t()), r"one block.*the result is \(64, 96\).*not \(96, 64\)"),
    "transposed where square": (
        StandIn(on_result=lambda y: y.t() if y.shape[0] == y.shape[1] else y), "scales of a from smallest to largest"
    ),
    "another dtype": (StandIn(on_result=lambda y: y.double()), "one block.*float64"),
    "noise": (StandIn(on_result=lambda y: y * (1 + torch.rand(y.shape) * 2.0**-22)), "two calls gave different bits"),
    "last tile left out": (StandIn(on_result=lambda y: torch.cat([y[:64], y[64:] * 0])), "one block"),
    "raises": (StandIn(on_result=lambda y: 1 / 0), "one block, 96x64x32 to float32: ZeroDivisionError: division by zero"),
    "takes nothing": (StandIn(takes=lambda a, b, dtype: False), "it takes none of the cases"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_found_and_named(name):
    one, said = WRONG[name]
    found = problem(one, CPU)
    assert found is not None and "\n" not in found
    assert re.search(said, found), found


def test_bf16_partial_sums_are_found_where_sums_cancel():
    class SplitK(StandIn):
        def multiply(self, a, b, dtype):
            return in_bf16_halves(a, b, dtype)

    bf16_alone = SplitK(takes=lambda a, b, dtype: dtype == BF16)
    assert "sums that cancel, 64x256x1024 to bfloat16" in problem(bf16_alone, CPU, (case("sums that cancel"),))


def test_the_bound_holds_for_a_unit_that_truncates_to_24_bits_and_not_for_14():
    """Addends aligned to the largest one and cut there, 16 at a time: what the bound is derived from."""

    def summed(terms: torch.Tensor, bits: int) -> torch.Tensor:
        total = torch.zeros(terms.shape[1], dtype=torch.float64)
        for part in terms.split(16):
            addends = torch.cat([part, total[None]])
            step = torch.exp2(addends.abs().amax(0).log2().floor() + 1 - bits)
            total = ((addends / step).trunc() * step).sum(0).float().double()
        return total

    one = case("odd sizes")
    a, b, exact, magnitude = reference(one, CPU)
    terms = (a.dequantize(torch.float64)[:, None] * b.dequantize(torch.float64)[None]).flatten(0, 1).t()
    bound = accumulation_bound(exact, magnitude, one.k, FP32).flatten()
    assert ((summed(terms, 24) - exact.flatten()).abs() <= bound).all()
    assert not ((summed(terms, 14) - exact.flatten()).abs() <= bound).all()
