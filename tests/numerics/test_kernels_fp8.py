"""The FP8 kernel rounds as torch's cast does, and per-tensor scaling puts the largest magnitude at the format's."""

import kernels
import pytest
import torch
from test_kernels_quantize import any_bits, same

from mxfp4.numerics import ops
from mxfp4.numerics.formats import ELEMS

CAST = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@pytest.mark.parametrize("elem", CAST)
@pytest.mark.parametrize("scale", [1.0, 0.37, 3e20, 2.0**-100])
def test_the_kernel_rounds_as_torchs_cast(elem, scale):
    module = kernels.load("fp8_triton")
    factor, largest = torch.tensor(scale, device=kernels.DEVICE), ELEMS[elem].max / scale
    x = any_bits((61, 97), torch.float32, 9)
    x = torch.where(x.abs() > largest, torch.nan, x)
    ties = torch.linspace(-256, 256, 64 * 96).view(64, 96).clamp(-largest, largest)
    for t in (x, ties, ties.bfloat16() * 0.5, ties.t(), ties[:, 1:40], ties[:1].expand(5, 96), ties[:0]):
        t = t.to(kernels.DEVICE)
        for dtype in (torch.float32, torch.bfloat16):
            ours = module.scaled_fp8(t, factor, elem, dtype)
            theirs = (t.float() * factor).to(CAST[elem]).to(dtype)
            assert ours.shape == theirs.shape and ours.dtype == dtype and same(ours, theirs)


@pytest.mark.parametrize("elem", CAST)
@pytest.mark.parametrize("x", [[0.0, 0.0], [-3.0, 1.0], [1e-38, 0.0], [3e38, -1.0], [float("nan"), 1.0], [float("inf"), 1.0]])
def test_per_tensor_scaling(elem, x):
    """1e-38 needs a scale beyond FP32: its largest serves."""
    x = torch.tensor(x)
    values, factor = ops.fp8_per_tensor(x, elem, torch.float32)
    if x.isfinite().all():
        largest = x.abs().max()
        assert (values * factor - x).abs().max() <= largest * 2.0 ** -(ELEMS[elem].mbits + 1)
        assert values.abs().max() <= ELEMS[elem].max and (largest < 1e-30 or values.abs().max() == ELEMS[elem].max)
        assert largest > 0 or factor == 1
    else:
        assert values.isnan().any()


@pytest.mark.parametrize("elem", CAST)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_of_a_tensor_with_a_value_that_is_not_finite_nothing_passes_for_a_number(elem, bad):
    """Whatever its other values, which no scale fits to the format: a backend that saturates would tell them."""
    values, factor = ops.fp8_per_tensor(torch.tensor([bad, 1.0, -1000.0, 1e30]), elem, torch.float32)
    assert (values * factor).isnan().all()
