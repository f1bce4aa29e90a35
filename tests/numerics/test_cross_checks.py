"""Bytes against three public packages that were written by others: ml_dtypes, gfloat, torchao."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from mxfp4 import quantize
from mxfp4.numerics.formats import ELEMS, decode, e8m0_value, encode
from mxfp4.numerics.rounding import round_nearest

CASES = json.loads((Path(__file__).parent / "cases_blocks.json").read_text())
RULES = ("floor", "even", "ceil", "rceil")


def values() -> torch.Tensor:
    """FP32 in and around the range of every element format, with all midpoints of each grid."""
    g = torch.Generator().manual_seed(0)
    random = torch.randn(20_000, generator=g) * torch.exp2(torch.randint(-20, 16, (20_000,), generator=g).float())
    grids = [f.values()[: f.max_code + 1] for f in ELEMS.values()]
    middles = [(v[1:] + v[:-1]) / 2 for v in grids]
    every = torch.cat([random, *grids, *middles])
    return torch.cat([every, -every])


def blocks() -> torch.Tensor:
    """FP32 [n, 32]: the named blocks, and random ones from 2^-100 to 2^100."""
    named = torch.zeros(len(CASES), 32)
    for row, case in zip(named, CASES, strict=True):
        for i, bits in enumerate(case["values"]):
            row[i] = struct.unpack("<f", struct.pack("<I", int(bits, 16)))[0]
    g = torch.Generator().manual_seed(1)
    random = torch.randn(500, 32, generator=g) * torch.exp2(torch.randint(-100, 101, (500, 1), generator=g).float())
    return torch.cat([named, random])


ML_DTYPES = {"e2m1": "float4_e2m1fn", "e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}


@pytest.mark.parametrize("elem", ELEMS)
def test_codes_of_ml_dtypes(elem):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    theirs = getattr(ml_dtypes, ML_DTYPES[elem])
    fmt = ELEMS[elem]
    x = values()
    x = x[x.abs() <= fmt.max]  # its casts do not all saturate
    codes = encode(round_nearest(x, fmt), fmt).numpy()
    assert (codes == x.numpy().astype(theirs).view(np.uint8)).all()
    every = np.arange(1 << fmt.bits, dtype=np.uint8)
    np.testing.assert_array_equal(
        decode(torch.from_numpy(every), fmt).nan_to_num(nan=-1.0, posinf=-1.0).numpy(),
        np.nan_to_num(every.view(theirs).astype(np.float32), nan=-1.0, posinf=-1.0, neginf=-1.0),
    )


def test_scales_of_ml_dtypes():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    every = np.arange(256, dtype=np.uint8)
    theirs = every.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    np.testing.assert_array_equal(e8m0_value(torch.from_numpy(every)).numpy(), theirs)


@pytest.mark.parametrize("elem", ELEMS)
def test_codes_of_gfloat(elem):
    gfloat = pytest.importorskip("gfloat")
    formats = pytest.importorskip("gfloat.formats")
    info = getattr(formats, f"format_info_ocp_{elem}")
    fmt = ELEMS[elem]
    x = values()[::17]
    codes = encode(round_nearest(x, fmt), fmt).tolist()
    rounded = (gfloat.round_float(info, v, sat=True) for v in x.tolist())
    assert codes == [gfloat.encode_float(info, v) for v in rounded]


def test_scales_of_gfloat():
    gfloat = pytest.importorskip("gfloat")
    formats = pytest.importorskip("gfloat.formats")
    ours = e8m0_value(torch.arange(256, dtype=torch.uint8)).double().numpy()
    theirs = [gfloat.decode_float(formats.format_info_ocp_e8m0, b).fval for b in range(256)]
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("elem", ELEMS)
def test_packed_bytes_and_scales_of_torchao(elem, rule):
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    dtype = {"e2m1": torch.float4_e2m1fn_x2, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[elem]
    x = blocks()
    scale, data = mx.to_mx(x, dtype, 32, mx.ScaleCalculationMode(rule))
    q = quantize(x, elem=elem, scale_rule=rule)
    assert torch.equal(q.scale, scale.view(torch.uint8).reshape(q.scale.shape))
    # Where the scale is 2^-127 it divides by FP32's smallest normal number instead: there the oracle decides.
    rows = q.scale[:, 0] > 0
    assert rows.sum() > 500 and torch.equal(q.qdata[rows], data.view(torch.uint8).reshape(q.qdata.shape)[rows])
