"""Recipes that nobody named: how operands wait and which units multiply them changes no result.

Any format in any operand, each tensor the same in both its GEMMs or not. Sizes are odd where no operand has blocks.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mxfp4 import Gemm, MXFP4Linear, Operand, Recipe, set_step
from mxfp4.layers import plan as plans
from mxfp4.layers.recipe import ELEMS_OF, GEMMS, TENSORS

PLAIN, BLOCKS = ("fp32", "bf16", "fp8", "fp8", "fp8"), ("mxfp4", "mxfp8", "nvfp4", "fp8", "fp8")


LARGE_BLOCKS = ("fp8-block", "fp8-block", "fp8-block", "mxfp4", "fp8")


@st.composite
def operands(draw, formats, delayed: str | None) -> Operand:
    chosen = draw(st.sampled_from(formats))
    elem, block = draw(st.sampled_from(ELEMS_OF[chosen])), draw(st.sampled_from(("1d", "2d")))
    rule = draw(st.sampled_from(("floor", "even", "ceil", "rceil")))
    rounding = draw(st.sampled_from(("nearest", "nearest", "stochastic")))
    waits = draw(st.booleans()) and chosen == "fp8" and rounding == "nearest"
    pow2 = draw(st.booleans()) and chosen == "fp8-block"
    return Operand(chosen, elem, block, rule, rounding, delayed=delayed if waits else None, pow2_scales=pow2)


@st.composite
def recipes(draw, formats) -> Recipe:
    delayed = draw(st.sampled_from((None, "most_recent", "max")))
    tied = {t: draw(st.one_of(st.none(), operands(formats, delayed))) for t in "xwg"}
    gemms = {g: Gemm(*(tied[t] or draw(operands(formats, delayed)) for t in TENSORS[g])) for g in GEMMS}
    return Recipe("any", **gemms, requantize=draw(st.booleans()))


def run(chosen: Recipe, sizes: tuple[int, int, int], save: str, path: str) -> tuple[torch.Tensor, ...]:
    """(Y, dX, dW), each over its operands' norms; `path` "native": on a chip that multiplies FP8 tensors itself."""
    tokens, inside, outside = sizes
    torch.manual_seed(0)
    layer = MXFP4Linear(inside, outside, bias=False, recipe=chosen, save=save, fqn="a")
    x, grad = torch.randn(tokens, inside, requires_grad=True), torch.randn(tokens, outside)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plans, "fp8_path", lambda device: path)
        if chosen.is_delayed:  # a step before, with smaller values: those of this step saturate
            set_step(layer, 2)
            layer((x / 4).detach().requires_grad_()).backward(grad / 4)
            layer.weight.grad = None
        set_step(layer, 3)
        y = layer(x)
        y.backward(grad)
    w, g, x_norm = (t.detach().norm() for t in (layer.weight, grad, x))  # sums may cancel: it is their parts that round
    return y.detach() / (x_norm * w), x.grad / (g * w), layer.weight.grad / (g * x_norm)


@pytest.mark.parametrize("formats, sizes", [(PLAIN, st.integers(1, 40)), (BLOCKS, st.sampled_from((32, 64, 96)))])
@settings(max_examples=60)
@given(data=st.data())
def test_neither_the_wait_nor_the_units_change_a_result(formats, sizes, data):
    check(formats, sizes, data)


@settings(max_examples=20)
@given(data=st.data())
def test_nor_with_blocks_of_128(data):
    check(LARGE_BLOCKS, st.sampled_from((128, 256)), data)


def check(formats, sizes, data) -> None:
    chosen = data.draw(recipes(formats))
    shape = data.draw(st.integers(1, 70)), data.draw(sizes), data.draw(sizes)
    ways = {(save, path): run(chosen, shape, save, path) for save in plans.SAVES for path in ("emulated", "native")}
    for path in ("emulated", "native"):
        for ours, theirs in zip(ways["packed", path], ways["values", path], strict=True):
            assert torch.equal(ours, theirs)
    for ours, theirs in zip(ways["values", "native"], ways["values", "emulated"], strict=True):
        assert (ours - theirs).norm() < 1e-6
