"""The layer's three GEMMs on each device there is: against an exact oracle, across devices, eager against compiled."""

from __future__ import annotations

import copy
import sys
from fractions import Fraction
from pathlib import Path

import pytest
import torch

import mxfp4
from mxfp4 import MXFP4Linear, recipe, set_step
from mxfp4.training import prepared

sys.path.append(str(Path(__file__).parents[1] / "numerics"))
import oracle

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
    """Random numbers included. Operands are the same values, so only the order of FP32 sums may differ."""
    torch.manual_seed(4)
    x, grad = torch.randn(96, 128), torch.randn(96, 192)
    here = MXFP4Linear(128, 192, bias=False, recipe=name, fqn="layers.0.attention.wo", n_layers=1 + 7 * ("nv" in name))
    there = copy.deepcopy(here).to(device)
    for layer in (here, there):
        set_step(layer, 11)
    for ours, theirs in zip(run(there, x, grad), run(here, x, grad), strict=True):
        assert relative(ours, theirs) < 2e-6


@pytest.mark.parametrize("device", [gpu])
@pytest.mark.parametrize("name", ["bf16", "fp8", "mxfp4+h16", "mxfp4+sr", "ti2d"])
def test_compiled_on_a_gpu_equals_eager(name, device):
    """The same bytes where a GEMM gives its result in BF16. FP8's comes in FP32 to be scaled, and there the compiler may
    choose another kernel of the library, with another order of sums: a few results round to the other BF16 neighbour."""
    eager = MXFP4Linear(256, 512, bias=False, recipe=name, fqn="layers.0.attention.wq", device=device)
    compiled = copy.deepcopy(eager)
    function = torch.compile(compiled, fullgraph=True)
    x = torch.randn(160, 256, device=device)
    for step in range(2):
        results = []
        for layer, call in ((eager, eager), (compiled, function)):
            set_step(layer, step)
            layer.weight.grad = None
            own = x.clone().requires_grad_()
            with torch.autocast(device, dtype=torch.bfloat16):
                y = call(own)
            y.backward(torch.ones_like(y) * y.detach())
            results.append((y.detach(), own.grad, layer.weight.grad))
        for ours, theirs in zip(*results, strict=True):
            assert relative(theirs, ours) < 2.0**-10 if name == "fp8" else torch.equal(ours, theirs)


@pytest.mark.parametrize("device", [gpu])
def test_the_librarys_fp8_gemm_gives_the_emulated_result(device, monkeypatch):
    """Hopper's FP8 units add with fewer bits than FP32's, so the two may differ by more than the order of sums."""
    x, grad = torch.randn(256, 128), torch.randn(256, 192)
    layer = MXFP4Linear(128, 192, bias=False, recipe="fp8", device=device)
    emulated = run(layer, x, grad)
    layer.weight.grad = None
    monkeypatch.setattr(prepared, "matmul_path", lambda device: "native")
    for ours, theirs in zip(run(layer, x, grad), emulated, strict=True):
        assert relative(ours, theirs) < 2.0**-10


@pytest.mark.parametrize("name", NAMES)
def test_results_lie_in_memory_as_those_of_a_plain_linear(name):
    """Attention chooses its kernel by the strides of what it is given, and another kernel rounds otherwise."""
    layer = MXFP4Linear(128, 192, bias=False, recipe=name)
    x = torch.randn(96, 128, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert y.is_contiguous() and x.grad.is_contiguous() and layer.weight.grad.is_contiguous()
