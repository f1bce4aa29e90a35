"""The FP8 layer's three GEMMs against float64, for shapes, sizes of values and layouts that nobody chose.

The oracle rounds to the nearest value of the format's table, ties to the even code, from the one product that the
layer too rounds to FP32 (value times scale); sums are in float64, and the layer's are bounded element by element.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mxfp4 import MXFP4Linear
from mxfp4.layers import plan as plans
from mxfp4.numerics.formats import ELEMS
from mxfp4.numerics.ops.block_quantize import fp8_scale

LAYOUTS = ("plain", "transposed", "cut", "cut transposed", "a row repeated", "one value")


def seen(t: torch.Tensor, elem: str) -> torch.Tensor:
    """What an FP8 GEMM sees of `t`, float64."""
    scale = fp8_scale(t, elem)
    u = (t.float() * scale).double()
    fmt = ELEMS[elem]
    grid = fmt.values()[: fmt.max_code + 1].double()
    above = torch.searchsorted(grid, u.abs().contiguous()).clamp(max=fmt.max_code)
    below = (above - 1).clamp(min=0)
    up, down = grid[above] - u.abs(), u.abs() - grid[below]
    code = torch.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    return grid[code].copysign(u) / scale.double()


def laid_out(rows: int, columns: int, layout: str, power: int) -> torch.Tensor:
    shape = rows + 5, columns + 3
    base = 2.0**power * (torch.randn(shape[::-1]).t() if "transposed" in layout else torch.randn(shape))
    if layout == "a row repeated":
        return base[:1, 3:].expand(rows, -1)
    if layout == "one value":  # the gradient of a sum
        return base[0, 0].expand(rows, columns)
    return base[5:, 3:] if "cut" in layout else base[5:, 3:].clone()


def assert_product(got: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """got is a [M, K] times b [K, N], each of whose K additions and three multiplications may round in FP32."""
    bound = (a.shape[1] + 4) * 2.0**-23 * (a.abs() @ b.abs())
    assert got.shape == bound.shape and ((got.double() - a @ b).abs() <= bound).all()


@pytest.mark.parametrize("native", [False, True])
@settings(max_examples=60)
@given(
    sizes=st.tuples(*[st.one_of(st.integers(1, 70), st.sampled_from([16, 32, 48]))] * 3),
    powers=st.tuples(*[st.integers(-30, 30)] * 3),
    layouts=st.tuples(*[st.sampled_from(LAYOUTS)] * 2),
    save=st.sampled_from(plans.SAVES),
    seed=st.integers(0, 2**20),
)
def test_the_three_gemms_are_the_products_of_what_fp8_holds(native, sizes, powers, layouts, save, seed):
    torch.manual_seed(seed)
    tokens, inside, outside = sizes
    layer = MXFP4Linear(inside, outside, bias=False, recipe="fp8", save=save)
    with torch.no_grad():
        layer.weight.mul_(2.0 ** powers[2])
    x = laid_out(tokens, inside, layouts[0], powers[0])
    grad = laid_out(tokens, outside, layouts[1], powers[1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plans, "fp8_path", lambda device: "native" if native else "emulated")
        y = layer(x.requires_grad_())
        dx, dw = torch.autograd.grad(y, (x, layer.weight), grad)
    x, w = x.detach(), layer.weight.detach()
    assert_product(y.detach(), seen(x, "e4m3"), seen(w, "e4m3").t())
    assert_product(dx, seen(grad, "e5m2"), seen(w, "e4m3"))
    assert_product(dw, seen(grad, "e5m2").t(), seen(x, "e4m3"))
