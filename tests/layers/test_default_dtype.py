"""Every byte is the same under every default dtype of torch: nothing inside takes its type from it."""

from __future__ import annotations

import pytest
import torch

import mxfp4
from mxfp4 import Hadamard, MXFP4Linear, Operand, set_step
from mxfp4.numerics.kernels.cpu import quantize as quantize_cpu
from mxfp4.numerics.ops import block_quantize as ops
from mxfp4.numerics.scale_rules import DEFAULT_SCALE_RULE

DEFAULTS = (torch.bfloat16, torch.float16, torch.float64)
NAMES = (
    "bf16", "fp8", "mxfp8", "mxfp4+h16", "mxfp4+frht16", "mxfp4+rht128", "mxfp4+sr", "mxfp4+2d+hh16", "ti2d", "nvfp4",
    "nvfp4-plain+2d+sr", "tseng", "tetrajet", "quartet",
)  # fmt: skip


@pytest.fixture(params=DEFAULTS, ids=str)
def under(request):
    """Calls a function with another default dtype."""

    def call(function, *args):
        torch.set_default_dtype(request.param)
        try:
            return function(*args)
        finally:
            torch.set_default_dtype(torch.float32)

    return call


def same(ours, theirs) -> bool:
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("save", ["values", "packed"])
@pytest.mark.parametrize("name", NAMES)
def test_a_layer_computes_the_same(name, save, under):
    generator = torch.Generator().manual_seed(2)
    weight, x = (torch.randn(n, 128, generator=generator) for n in (256, 70))
    grad = torch.randn(70, 256, generator=generator)

    def run():
        layer = MXFP4Linear(128, 256, bias=False, recipe=name, fqn="layers.0.wo", save=save, dtype=torch.float32)
        with torch.no_grad():
            layer.weight.copy_(weight)
        set_step(layer, 3)
        leaf = x.clone().requires_grad_()
        y = layer(leaf)
        y.backward(grad)
        return y.detach(), leaf.grad, layer.weight.grad

    assert same(under(run), run())


@pytest.mark.parametrize("compiler", [True, False])
def test_public_functions_do(under, compiler, monkeypatch):
    if not compiler:
        monkeypatch.setattr(quantize_cpu, "kernel", lambda: None)
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(1))

    def run():
        found = []
        for rotation in (None, Hadamard(16, (1, -1) * 8), Hadamard(64, "seed"), Hadamard(128)):
            for options in ({}, {"rounding": "stochastic"}, {"block": "2d", "elem": "e4m3"}, {"axis": 0}):
                if rotation is not None and options.get("axis") == 0 and x.shape[0] % rotation.size:
                    continue
                q = mxfp4.quantize(x, hadamard=rotation, seed=5, **options)
                found += [q.qdata, q.scale, q.dequantize(rotated=False)]
                found.append(mxfp4.fake_quantize(x, hadamard=rotation, seed=5, **options))
            if rotation is not None:
                found.append(mxfp4.hadamard_transform(x, rotation, seed=5))
        found += ops.fp8_per_tensor(x, "e4m3", torch.float32)
        found.append(mxfp4.matmul(mxfp4.quantize(x), mxfp4.quantize(x)))
        return found

    assert same(under(run), run())


def test_one_scale_rule_is_the_default_of_functions_and_recipes():
    x = torch.randn(64, 128)
    assert Operand().scale_rule == DEFAULT_SCALE_RULE == "even"
    assert torch.equal(mxfp4.quantize(x).qdata, mxfp4.quantize(x, scale_rule=DEFAULT_SCALE_RULE).qdata)
    assert torch.equal(mxfp4.fake_quantize_pair(x, {}, {})[0], mxfp4.fake_quantize(x, scale_rule="even"))
    layer = MXFP4Linear(128, 64, bias=False, recipe="mxfp4")
    expected = mxfp4.matmul(mxfp4.quantize(x), mxfp4.quantize(layer.weight))
    assert torch.equal(layer(x), expected)
