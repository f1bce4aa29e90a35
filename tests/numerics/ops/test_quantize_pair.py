"""quantize_pair and fake_quantize_pair: both orientations of a matrix from one read."""

import pytest
import torch

import mxfp4


def _pair_options():
    h16 = mxfp4.Hadamard(16, "seed")
    return [
        ({}, {}),
        ({"hadamard": h16, "stream": 1}, {"hadamard": h16, "rounding": "stochastic", "stream": 4}),
        ({"block": "2d", "scale_rule": "rceil"}, {"elem": "e5m2", "scale_rule": "even"}),
    ]


@pytest.mark.parametrize("row, col", _pair_options())
def test_a_pair_is_two_calls(row, col):
    x = torch.randn(64, 96)
    ours = mxfp4.fake_quantize_pair(x, row, col, seed=7, dtype=torch.bfloat16)
    theirs = [mxfp4.fake_quantize(x, axis=a, seed=7, dtype=torch.bfloat16, **o) for a, o in ((-1, row), (0, col))]
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b) and a.stride() == b.stride()
    packed = mxfp4.quantize_pair(x, row, col, seed=7)
    for a, b in zip(packed, ours, strict=True):
        assert torch.equal(a.dequantize(torch.bfloat16), b)


def test_a_pair_refuses_other_shapes_and_keywords():
    with pytest.raises(ValueError, match="2-D"):
        mxfp4.fake_quantize_pair(torch.ones(2, 32, 32), {}, {})
    with pytest.raises(ValueError, match="'axis' is not known; allowed: 'block'"):
        mxfp4.quantize_pair(torch.ones(32, 32), {"axis": 0}, {})
