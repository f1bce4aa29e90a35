"""The layer's three GEMMs on each device there is: against an exact oracle, across devices, eager against compiled."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from mxfp4 import MXFP4Linear, recipe, set_step
from mxfp4.layers import plan as plans
from mxfp4.layers.gemms import operand
from mxfp4.numerics.native import fp8_path
from tests.fakes import oracle
from tests.fakes.draws import twin

gpu = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
)
EXACT = ("mxfp4", "mxfp4+rceil", "mxfp4+floor", "mxfp4-wgrad+ceil", "mxfp8")
NAMES = (
    "bf16", "fp8", "mxfp4-fprop", "mxfp4-wgrad+h16", "mxfp4", "mxfp4+sr", "mxfp4+rht16", "mxfp4+h16", "mxfp4+h32",
    "mxfp4+2d+hh16", "ti2d", "nvfp4", "tseng", "tetrajet",
)  # fmt: skip


def run(layer: MXFP4Linear, x: torch.Tensor, grad: torch.Tensor):
    """(Y, dX, dW) of a layer, on the CPU."""
    x = x.clone().to(layer.weight.device).requires_grad_()
    y = layer(x)
    y.backward(grad.to(y.device))
    return y.detach().cpu(), x.grad.cpu(), layer.weight.grad.cpu()


def relative(a, b) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


GEMMS = {"fprop": ("x", "w"), "dgrad": ("g", "w"), "wgrad": ("g", "x")}


def assert_close_to_exact(results, layer: MXFP4Linear, x: torch.Tensor, grad: torch.Tensor, which: str) -> None:
    """A GEMM in FP8 equals the exact product of its operands up to what Hopper's FP8 units lose, at the worst.

    Of the 32 products that an instruction adds to a sum, and of the sum, they keep 14 bits, counted from the largest of
    the 33, and 14 of the result: each of the 34 loses less than 2^-13 of the largest. Whatever way they cut, and
    however often the sum moves to FP32, the largest is the largest product or sum on the way. Cuts of either sign
    cancel: as a norm the error is far smaller. Other units lose less.
    """
    tensors = {"x": x, "w": layer.weight.detach().cpu(), "g": grad}
    operands = (operand(tensors[name], which, name, layer.recipe, None) for name in GEMMS[which])
    a, b = (value.double() * factor.double() for value, factor in operands)
    products = a[:, None] * b[None]
    exact, largest = products.sum(-1), torch.maximum(products.abs().amax(-1), products.cumsum(-1).abs().amax(-1))
    instructions = -(-a.shape[1] // 32)
    error = (results[list(GEMMS).index(which)].double() - exact).abs()
    assert (error <= instructions * 34 * 2.0**-13 * largest).all()
    assert error.norm() < 2.0**-10 * exact.norm()


def oracle_values(t: torch.Tensor, op) -> torch.Tensor:
    """FP64 `t` [rows, K] as the exact-rational oracle quantizes it along K."""
    elem = op.elem or "e2m1"
    rows = []
    for block in t.reshape(-1, 32).tolist():
        byte, codes = oracle.quantize_block(block, elem, op.scale_rule)
        rows.append([float(oracle.code_value(c, elem) * Fraction(2) ** (byte - 127)) for c in codes])
    return torch.tensor(rows, dtype=torch.float64).view(t.shape)


@pytest.mark.parametrize("device", ["cpu", gpu])
@pytest.mark.parametrize("name", EXACT)
def test_each_gemm_is_the_exact_product_of_what_the_oracle_quantizes(name, device):
    torch.manual_seed(3)
    x, grad = torch.randn(64, 32), torch.randn(64, 96) * 2.0 ** torch.randint(-6, 6, (64, 1))
    layer = MXFP4Linear(32, 96, bias=False, recipe=name).to(device)
    w = layer.weight.detach().cpu()
    y, dx, dw = run(layer, x, grad)
    for which, got, a, b in (("fprop", y, x, w), ("dgrad", dx, grad, w.t()), ("wgrad", dw, grad.t(), x.t())):
        gemm = getattr(recipe(name), which)
        if gemm.a.is_mx:
            want = oracle_values(a, gemm.a) @ oracle_values(b, gemm.b).t()
            assert relative(got, want) < 1e-6, which


@pytest.mark.parametrize("device", [gpu])
@pytest.mark.parametrize("name", NAMES)
def test_a_gpu_computes_what_the_cpu_does(name, device):
    """Random numbers included. Operands are the same values, so only the order of FP32 sums may differ, or in FP8 GEMMs
    what the chip's units add with."""
    torch.manual_seed(4)
    x, grad = torch.randn(96, 128), torch.randn(96, 192)
    here = MXFP4Linear(128, 192, bias=False, recipe=name, fqn="layers.0.attention.wo", n_layers=1 + 7 * ("nv" in name))
    there = twin(here).to(device)
    for layer in (here, there):
        set_step(layer, 11)
    results = run(there, x, grad)
    for which, ours, theirs in zip(GEMMS, results, run(here, x, grad), strict=True):
        if plans.takes_packed(getattr(here.recipe, which), mx=False, fp8=True):
            assert_close_to_exact(results, here, x, grad, which)
        else:
            assert relative(ours, theirs) < 2e-6


@pytest.mark.parametrize("device", [gpu])
@pytest.mark.parametrize("name", ["bf16", "fp8", "mxfp4-fprop", "mxfp4+h16", "mxfp4+sr", "ti2d"])
def test_compiled_on_a_gpu_equals_eager(name, device):
    """The same bytes: compiled or not, the same operators and the same GEMMs, each in the dtype of its result.

    Where FP8 is emulated its GEMM gives FP32, to be scaled, and there the compiler may choose another kernel of the
    library, with another order of sums: results round to BF16 neighbours, half of 2^-8 to either side of one sum.
    """
    exact = fp8_path(device) == "native" or not any(
        plans.takes_packed(getattr(recipe(name), which), mx=False, fp8=True) for which in GEMMS
    )
    eager = MXFP4Linear(256, 512, bias=False, recipe=name, fqn="layers.0.attention.wq", device=device)
    compiled = twin(eager)
    function = torch.compile(compiled, fullgraph=True)
    x, grad = torch.randn(160, 256, device=device), torch.randn(160, 512, device=device).bfloat16()
    for step in range(2):
        results = []
        for layer, call in ((eager, eager), (compiled, function)):
            set_step(layer, step)
            layer.weight.grad = None
            own = x.clone().requires_grad_()
            with torch.autocast(device, dtype=torch.bfloat16):
                y = call(own)
            y.backward(grad)  # the same for both: of two results that differ in a bit other codes would be made
            results.append((y.detach(), own.grad, layer.weight.grad))
        for ours, theirs in zip(*results, strict=True):
            assert torch.equal(ours, theirs) if exact else relative(theirs, ours) < 2.0**-8


@pytest.mark.parametrize("device", [gpu])
@pytest.mark.parametrize("path", ["native", "emulated"])
@pytest.mark.parametrize("tokens", [256, 248])
def test_fp8_on_either_path_is_the_exact_product(path, tokens, device, monkeypatch):
    """Of 248 tokens, no multiple of 16, the native path's Wgrad reads values."""
    if fp8_path(device) == "emulated":
        path = "emulated"
    x, grad = torch.randn(tokens, 128), torch.randn(tokens, 192)
    layer = MXFP4Linear(128, 192, bias=False, recipe="fp8", device=device)
    monkeypatch.setattr(plans, "fp8_path", lambda device: path)
    results = run(layer, x, grad)
    for which in GEMMS:
        assert_close_to_exact(results, layer, x, grad, which)


@pytest.mark.parametrize("name", NAMES)
def test_results_lie_in_memory_as_those_of_a_plain_linear(name):
    """Attention chooses its kernel by the strides of what it is given, and another kernel rounds otherwise."""
    layer = MXFP4Linear(128, 192, bias=False, recipe=name)
    x = torch.randn(96, 128, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert y.is_contiguous() and x.grad.is_contiguous() and layer.weight.grad.is_contiguous()
