"""The CPU's few passes of torch give the twin's bytes, for every combination, whole or in parts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mxfp4.numerics import reference as twin
from mxfp4.numerics.kernels.cpu import quantize_eager
from mxfp4.numerics.scale_rules import SCALE_RULES
from tests.numerics.kernels.test_cpu_quantize import one
from tests.numerics.kernels.test_triton_quantize import DTYPES, any_bits, ordinary, orientation, same

nearest = st.builds(
    orientation,
    st.just("e2m1"), st.sampled_from(["1d", "2d"]), st.sampled_from(SCALE_RULES), st.just(False),
    st.sampled_from([0, 16, 128]), st.booleans(), st.sampled_from([None, *DTYPES]),
)  # fmt: skip


def check(x, row, col):
    seed = torch.tensor(3)
    before = x.clone()
    ours, theirs = quantize_eager.quantize_matrix(x, row, col, seed), twin.quantize_matrix(x, row, col, seed)
    for a, b in zip(sum(ours, ()), sum(theirs, ()), strict=True):
        assert same(a, b), f"{row} / {col}"
        assert a is None or (a.shape == b.shape and a.dtype == b.dtype)
    assert torch.equal(x.view(torch.uint8), before.view(torch.uint8)), "the input was written to"


@given(
    row=st.none() | nearest, col=st.none() | nearest | one, dtype=st.sampled_from(DTYPES), batch=st.integers(1, 2),
    data=st.sampled_from([any_bits, ordinary]), seed=st.integers(0, 2**31), units=st.integers(0, 3),
)  # fmt: skip
def test_any_combination(row, col, dtype, batch, data, seed, units):
    check(data((batch, 128, 128 * (1 + units)), dtype, seed), row, col)


@pytest.mark.parametrize("block", ["1d", "2d"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_parts_and_spoiled_blocks(block, dtype):
    x = any_bits((2, 1056, 160), torch.float32, 1)
    x[0, 3, 40], x[1, 1050, 0] = torch.nan, -torch.inf
    assert x.numel() > 2 * twin.CHUNK
    how = orientation("e2m1", block, "floor", False, 0, False, dtype)
    check(x, how, how)


def test_every_midpoint_and_its_neighbours():
    """Every FP32 value around the places where the code changes, signs and saturation included."""
    places = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 7.0, 0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0])
    bits = places.view(torch.int32)[:, None] + torch.arange(-2, 3, dtype=torch.int32)
    values = bits.clamp(min=0).view(torch.float32).flatten()
    x = torch.zeros(len(values) * 2, 32)
    x[:, 0], x[:, 1] = 4.0, torch.cat([values, -values])  # floor: scale 1
    check(x[None], orientation("e2m1", "1d", "floor", False, 0, False, None), None)
    check(x[None], orientation("e2m1", "1d", "floor", False, 0, False, torch.float32), None)
