"""quantize and fake_quantize: the named cases, the exact oracle on any input, layouts, and misuse."""

import json
import math
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mxfp4 import Hadamard, MXTensor, fake_quantize, quantize
from tests.fakes.oracle import FORMATS, RULES, code_value, quantize_block, scale_value, to_fp32
from tests.fakes.strategies import block

CASES = json.loads((Path(__file__).parents[1] / "cases_blocks.json").read_text())
CODES = torch.arange(16, dtype=torch.uint8)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    """Normal values times 2^normal: every row of blocks has other scales."""
    g = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=g) * torch.exp2(3 * torch.randn(shape, generator=g))


def same(a: MXTensor, b: MXTensor) -> bool:
    return torch.equal(a.qdata, b.qdata) and torch.equal(a.scale, b.scale)


# --- the named cases ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("case", CASES, ids=[c["name"] for c in CASES])
def test_named_block(case, rule):
    values = [struct.unpack("<f", struct.pack("<I", int(bits, 16)))[0] for bits in case["values"]]
    want = case["expect"][rule]
    x = torch.zeros(3, 32)
    x[1, : len(values)] = torch.tensor(values)
    q = quantize(x, scale_rule=rule)
    assert q.scale[:, 0].tolist() == [0, want["scale"], 0]
    assert q.codes()[1].tolist() == want["codes"] + [0] * (32 - len(values))
    assert quantize_block(x[1].tolist(), "e2m1", rule) == (
        want["scale"],
        q.codes()[1].tolist(),
    )  # the oracle too


def test_there_are_twenty_named_blocks_with_all_rules():
    assert len(CASES) == 20 and all(set(c["expect"]) == set(RULES) for c in CASES)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("elem", FORMATS)
@pytest.mark.parametrize("bad", [[(0, math.nan)], [(31, math.nan)], [(13, math.inf)], [(0, -math.inf)], [(31, -math.nan)],
                                 [(4, math.nan), (5, math.inf)], [(5, math.nan), (4, -math.inf)]])  # fmt: skip
def test_nan_and_infinity_take_their_block_and_nothing_else(bad, elem, rule):
    x = normal(3, 96)
    clean = quantize(x, elem=elem, scale_rule=rule)
    for at, v in bad:
        x[1, 32 + at] = v
    q = quantize(x, elem=elem, scale_rule=rule)
    assert q.scale[1, 1] == 255 and q.codes()[1, 32:64].count_nonzero() == 0
    value = q.dequantize()
    assert value[1, 32:64].isnan().all()
    value[1, 32:64] = clean.dequantize()[1, 32:64]
    assert torch.equal(value, clean.dequantize())  # neighbours untouched


def test_nan_in_any_place_of_blocks_of_either_kind():
    for place in range(64):
        x = torch.ones(64, 64)
        x[place, 63 - place] = -math.nan if place % 2 else math.inf
        for axis in (0, 1):
            q = quantize(x, axis=axis)
            row, column = (place, 63 - place) if axis else (63 - place, place)
            assert (q.scale == 255).nonzero().tolist() == [[row, column // 32]]
        assert (quantize(x, block="2d").scale == 255).nonzero().tolist() == [[place // 32, (63 - place) // 32]]


@pytest.mark.parametrize("block_kind", ["1d", "2d"])
@pytest.mark.parametrize("axis", [0, 1])
def test_nan_in_tensors_wide_enough_for_vector_units(axis, block_kind):
    """Their maxima return NaN with its sign set: read as an integer, less than zero. It once became a block of zeros."""
    for place in range(0, 2048, 31):
        x = torch.ones((32, 2048) if axis else (2048, 32))
        x[(5, place) if axis else (place, 5)] = math.nan
        q = quantize(x, axis=axis, block=block_kind)
        row = 0 if block_kind == "2d" else 5
        assert (q.scale == 255).nonzero().tolist() == [[row, place // 32]]


def operand(codes: torch.Tensor, byte: int, elem: str) -> MXTensor:
    """One block that holds all of `codes` (32 of them) at scale 2^(byte - 127)."""
    qdata = codes[None] if elem != "e2m1" else (codes[0::2] | codes[1::2] << 4)[None]
    return MXTensor(qdata, torch.tensor([[byte]], dtype=torch.uint8), elem, "1d", -1, (1, 32))


@pytest.mark.parametrize("byte", [0, 1, 2, 100, 127, 200, 251])
@pytest.mark.parametrize("rule", ["floor", "even", "rceil"])
def test_all_sixteen_codes_come_back(rule, byte):
    """(ceil puts amax 6 at twice the scale, where 0.5 does not exist: see the next test.)"""
    q = operand(CODES.repeat(2), byte, "e2m1")
    assert same(quantize(q.dequantize(), scale_rule=rule), q)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("elem", FORMATS)
@pytest.mark.parametrize("block_kind", ["1d", "2d"])
def test_quantizing_twice_is_quantizing_once(elem, rule, block_kind):
    """All values that a rule produces are kept; floor and even keep the bytes too (ceil and rceil may halve the scale)."""
    x = normal(64, 128)
    x[:, :32] = operand(CODES.repeat(2), 127, "e2m1").dequantize()
    q = quantize(x, elem=elem, scale_rule=rule, block=block_kind)
    again = quantize(q.dequantize(), elem=elem, scale_rule=rule, block=block_kind)
    assert torch.equal(again.dequantize(), q.dequantize())
    assert rule not in ("floor", "even") or same(again, q)
    sr = quantize(q.dequantize(), elem=elem, scale_rule=rule, block=block_kind, rounding="stochastic", seed=1)
    assert same(sr, again)  # values that the format holds are never moved


def test_negative_underflow_keeps_its_sign():
    x = torch.zeros(32)
    x[0], x[1], x[2] = 6, -0.2, -0.0
    q = quantize(x)
    assert q.codes()[:3].tolist() == [7, 8, 8] and torch.signbit(q.dequantize()[1:3]).all()
    assert not q.dequantize().isnan().any()


def test_zero_rows():
    for how in (
        {},
        {"block": "2d"},
        {"hadamard": Hadamard(16)},
        {"rounding": "stochastic"},
        {"elem": "e5m2"},
    ):
        q = quantize(torch.ones(0, 64), **how)
        assert q.shape == (0, 64) and q.scale.shape == (0, 2) and q.dequantize().shape == (0, 64)
        assert fake_quantize(torch.ones(3, 0, 64), **how).shape == (3, 0, 64)


# --- the oracle on anything --------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("elem", FORMATS)
@given(blocks=st.lists(block(special=True), min_size=1, max_size=3))
def test_any_block_equals_the_oracle(elem, rule, blocks):
    q = quantize(torch.tensor(blocks), elem=elem, scale_rule=rule)
    fake = fake_quantize(torch.tensor(blocks), elem=elem, scale_rule=rule)
    for i, values in enumerate(blocks):
        byte, codes = quantize_block(values, elem, rule)
        assert (q.scale[i].item(), q.codes()[i].tolist()) == (byte, codes)
        value = q.dequantize()[i]
        if byte == 255:
            assert value.isnan().all() and fake[i].isnan().all()
            continue
        assert value.tolist() == [to_fp32(code_value(c, elem) * scale_value(byte)) for c in codes]
        assert torch.equal(fake[i], value)


@pytest.mark.parametrize("elem", FORMATS)
@settings(max_examples=10)
@given(data=st.data(), rule=st.sampled_from(RULES))
def test_any_2d_tile_equals_the_oracle_with_one_scale(elem, data, rule):
    rows = [data.draw(block()) for _ in range(3)] + [[0.0] * 32] * 29
    q = quantize(torch.tensor(rows), block="2d", elem=elem, scale_rule=rule)
    byte, codes = quantize_block([v for row in rows for v in row], elem, rule)
    assert q.scale.tolist() == [[byte]] and q.codes().flatten().tolist() == codes


@pytest.mark.parametrize("elem", FORMATS)
@settings(max_examples=25)
@given(values=block(), rule=st.sampled_from(RULES), seed=st.integers(-(2**63), 2**64 - 1))
def test_stochastic_rounding_lands_on_a_neighbour(elem, values, rule, seed):
    from tests.fakes.oracle import Fraction, neighbours

    q = quantize(torch.tensor(values), elem=elem, scale_rule=rule, rounding="stochastic", seed=seed)
    byte, _ = quantize_block(values, elem, rule)
    assert q.scale.item() == byte
    fmt = FORMATS[elem]
    for v, code in zip(values, q.codes().tolist(), strict=True):
        magnitude = code & (fmt.sign_code - 1)
        assert magnitude in neighbours(abs(Fraction(v)) / scale_value(byte), fmt)
        assert bool(code & fmt.sign_code) == (math.copysign(1, v) < 0)


@pytest.mark.parametrize("hadamard", [None, Hadamard(16), Hadamard(64, "seed")])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("block_kind", ["1d", "2d"])
@pytest.mark.parametrize("elem", FORMATS)
def test_fake_quantize_equals_quantize_then_dequantize(elem, block_kind, rounding, hadamard):
    x = normal(64, 128)
    x[3, 7] = math.nan
    how = {
        "elem": elem,
        "block": block_kind,
        "rounding": rounding,
        "hadamard": hadamard,
        "scale_rule": "even",
        "seed": 5,
    }
    for axis in (0, -1):
        want = quantize(x, axis=axis, **how)
        for dtype in (None, torch.bfloat16, torch.float64):
            got = fake_quantize(x, axis=axis, dtype=dtype, **how)
            assert got.dtype == (dtype or torch.float32) and got.shape == x.shape
            torch.testing.assert_close(got, want.dequantize(dtype), rtol=0, atol=0, equal_nan=True)


def test_the_top_of_fp32_rounds_up_to_2_to_the_128():
    """By the rules' own arithmetic; FP32 has no such value."""
    q = quantize(torch.full((32,), torch.finfo(torch.float32).max), scale_rule="even")
    assert q.scale.item() == 253 and (q.codes() == 6).all() and q.dequantize().isinf().all()


# --- layouts and dtypes ------------------------------------------------------------------------------------------

LAYOUTS = {
    "contiguous": lambda x: x.clone(),
    "transposed": lambda x: x.t().contiguous().t(),
    "sliced": lambda x: torch.cat([x, x], 1)[:, : x.shape[1]],
    "every other column": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "every other row": lambda x: x.repeat_interleave(2, 0)[1::2],
    "offset": lambda x: torch.cat([torch.zeros(3), x.flatten()])[3:].view_as(x),
    "flipped twice": lambda x: x.flip(0, 1).flip(0, 1),
    "negative bit": lambda x: torch._neg_view(-x),
    "imaginary part": lambda x: torch.complex(x, -x).conj().imag,
    "leaf with gradient": lambda x: x.clone().requires_grad_(),
    "parameter": lambda x: torch.nn.Parameter(x.clone()),
    "float64": lambda x: x.double(),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("how", [{}, {"axis": 0}, {"block": "2d", "elem": "e4m3"}, {"hadamard": Hadamard(32)},
                                 {"rounding": "stochastic", "seed": 1, "axis": 0}], ids=str)  # fmt: skip
def test_memory_layout_does_not_matter(layout, how):
    x = normal(64, 96)
    view = LAYOUTS[layout](x)
    assert torch.equal(view.float(), x)
    before = view.detach().clone()
    got = quantize(view, **how)
    assert same(got, quantize(x, **how))
    assert torch.equal(view.detach(), before)  # the input stays as it was
    assert torch.equal(fake_quantize(view, **how), got.dequantize())
    assert not got.qdata.requires_grad and not fake_quantize(view, **how).requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes_give_the_bytes_of_their_fp32_copy(dtype):
    x = normal(64, 96).to(dtype)
    x[5, :32] = torch.tensor(2.0**-24).to(dtype)  # an FP16 subnormal
    for how in ({}, {"axis": 0, "scale_rule": "rceil"}, {"hadamard": Hadamard(16)}, {"elem": "e5m2"}):
        assert same(quantize(x, **how), quantize(x.float(), **how))


def test_expanded_and_broadcast_inputs():
    row = normal(1, 96)
    assert same(quantize(row.expand(64, 96)), quantize(row.repeat(64, 1)))
    assert same(quantize(row.expand(64, 96), axis=0), quantize(row.repeat(64, 1), axis=0))
    one = torch.tensor(2.7).expand(64, 96)
    assert same(quantize(one, block="2d"), quantize(one.contiguous(), block="2d"))


@pytest.mark.parametrize("shape, axis", [((32,), 0), ((1, 1, 1, 32), -1), ((2, 64, 3), 1), ((2, 32, 3, 5), -3),
                                         ((32, 5, 2), 0), ((4096, 1, 32), 2)])  # fmt: skip
def test_any_axis_of_any_rank(shape, axis):
    x = normal(*shape)
    moved = x.movedim(axis, -1).contiguous()
    got, want = quantize(x, axis=axis), quantize(moved)
    assert same(got, want) and torch.equal(got.dequantize(), want.dequantize().movedim(-1, axis))
    assert same(quantize(x, axis=axis - len(shape) if axis >= 0 else axis + len(shape)), want)
    flat = quantize(moved.reshape(-1, shape[axis]))  # batch axes are rows
    assert torch.equal(flat.qdata, got.qdata.reshape(flat.qdata.shape))


def test_channels_last():
    x = normal(2, 32, 4, 64)
    assert same(quantize(x.contiguous(memory_format=torch.channels_last), axis=1), quantize(x, axis=1))
    assert same(quantize(x.contiguous(memory_format=torch.channels_last)), quantize(x))


def test_a_batch_of_2d_blocks_is_its_matrices():
    x = normal(2, 3, 64, 32)
    for axis in (-1, -2):
        whole = quantize(x, block="2d", axis=axis)
        for i in range(2):
            for j in range(3):
                one = quantize(x[i, j], block="2d", axis=axis)
                assert torch.equal(whole.qdata[i, j], one.qdata) and torch.equal(whole.scale[i, j], one.scale)


# --- seeds -------------------------------------------------------------------------------------------------------


def test_seeds():
    x = torch.full((8, 64), 2.5)
    x[:, ::32] = 4

    def draw(seed=None, **how):
        return quantize(x, rounding="stochastic", seed=seed, **how)

    assert same(draw(1), draw(1)) and same(draw(1), draw(torch.tensor(1))) and same(draw(1), draw(np.int64(1)))
    assert same(draw(-1), draw(2**64 - 1)) and same(draw(-(2**63)), draw(2**63))
    assert not same(draw(1), draw(2)) and not same(draw(1), draw(1 + 2**32))
    assert not same(draw(), draw())  # the next call differs
    torch.manual_seed(0)
    first = draw()
    torch.manual_seed(0)
    assert same(first, draw())
    a, b = (fake_quantize(x, rounding="stochastic", seed=1, stream=s) for s in (0, 1))
    assert torch.equal(a, draw(1).dequantize()) and not torch.equal(a, b)


def test_nearest_draws_nothing():
    state = torch.get_rng_state()
    quantize(normal(2, 32), hadamard=Hadamard(16), seed=None)
    assert torch.equal(torch.get_rng_state(), state)


def test_operands_of_a_gemm_share_their_signs():
    x = torch.eye(32)
    h = Hadamard(16, "seed")
    signs = [tuple(fake_quantize(x, hadamard=h, seed=4, stream=s)[0, :16].sign().tolist()) for s in (0, 1, 2, 3)]
    assert signs[0] == signs[1] and signs[2] == signs[3]
    rows = [fake_quantize(x, hadamard=h, seed=4, stream=s) for s in (0, 2)]
    assert not torch.equal(*rows)


# --- misuse ------------------------------------------------------------------------------------------------------

X = torch.ones(64, 64)


@pytest.mark.parametrize("x, how, error, message", [
    (torch.ones(4, 40), {}, ValueError, r"axis -1 of shape \(4, 40\) has size 40, .* multiple of 32"),
    (torch.ones(4, 33), {}, ValueError, r"axis -1 .* size 33"),
    (torch.ones(40, 32), {"axis": 0}, ValueError, r"axis 0 of shape \(40, 32\) has size 40"),
    (torch.ones(4, 0), {}, ValueError, "size 0, which is not a positive multiple of 32"),
    (torch.tensor(1.0), {}, ValueError, r"axis=-1 does not exist in a tensor of shape \(\)"),
    (X, {"axis": 2}, ValueError, "axis=2 does not exist"),
    (X, {"axis": -3}, ValueError, "axis=-3 does not exist"),
    (X, {"axis": True}, TypeError, "axis must be an integer, got True"),
    (X, {"axis": 1.0}, TypeError, "axis must be an integer, got 1.0"),
    (X, {"axis": None}, TypeError, "axis must be an integer, got None"),
    (X, {"axis": (0, 1)}, TypeError, r"axis must be an integer, got \(0, 1\)"),
    (X, {"block": "3d"}, ValueError, "block='3d' is not known; allowed: '1d', '2d'"),
    (X, {"block": 32}, ValueError, "block=32 is not known; allowed: '1d', '2d'"),
    (X, {"elem": "e3m2"}, ValueError, "elem='e3m2' is not known; allowed: 'e2m1', 'e4m3', 'e5m2'"),
    (X, {"elem": ["e2m1"]}, ValueError, "is not known; allowed: 'e2m1', 'e4m3', 'e5m2'"),
    (X, {"scale_rule": "FLOOR"}, ValueError, "scale_rule='FLOOR' is not known; allowed: 'floor', 'even', 'ceil', 'rceil'"),
    (X, {"scale_rule": np.array([1, 2])}, ValueError, r"scale_rule=array\(\[1, 2\]\) is not known"),
    (X, {"rounding": "sr"}, ValueError, "rounding='sr' is not known; allowed: 'nearest', 'stochastic'"),
    (X, {"hadamard": 16}, TypeError, "hadamard must be None or an mxfp4.Hadamard, got 16"),
    (X, {"hadamard": Hadamard(128)}, ValueError, "size 64, which is not a positive multiple of 128 .the Hadamard size"),
    (X, {"rounding": "stochastic", "seed": 1.5}, TypeError, "seed must be an integer, got 1.5"),
    (X, {"rounding": "stochastic", "seed": True}, TypeError, "seed must be an integer, got True"),
    (X, {"rounding": "stochastic", "seed": 2**64}, ValueError, "does not fit in 64 bits"),
    (X, {"rounding": "stochastic", "seed": torch.tensor([1, 2])}, TypeError, "seed must be one int64"),
    (torch.ones(32), {"block": "2d"}, ValueError, r"at least 2 axes, got axis=-1, shape \(32,\)"),
    (torch.ones(32, 32, 32), {"block": "2d", "axis": 0}, ValueError, "need axis -1 or -2"),
    (torch.ones(33, 32), {"block": "2d"}, ValueError, "axis -2 .* size 33, which is not a multiple of 32"),
    (torch.ones(32, 33), {"block": "2d", "axis": 0}, ValueError, "axis -1 .* size 33, which is not a multiple of 32"),
    ([1.0] * 32, {}, TypeError, "x must be a float32, bfloat16, float16 or float64 tensor, got list"),
    (np.ones(32), {}, TypeError, "got ndarray"),
    *[(torch.ones(32).to(d), {}, TypeError, f"got {d}") for d in (
        torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.float8_e8m0fnu)],
])  # fmt: skip
def test_one_line_errors_that_name_the_value_and_what_is_allowed(x, how, error, message):
    for call in (quantize, fake_quantize):
        with pytest.raises(error, match=message) as caught:
            call(x, **how)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("how, error, message", [
    ({"dtype": torch.int8}, ValueError, "dtype=torch.int8 is not known; allowed: torch.float32"),
    ({"dtype": "float32"}, ValueError, "dtype='float32' is not known; allowed: torch.float32"),
    ({"stream": -1}, ValueError, r"stream=-1 is out of range; allowed: 0 to 2\^32 - 1"),
    ({"stream": 2**32}, ValueError, "stream=4294967296 is out of range"),
    ({"stream": 0.5}, TypeError, "stream must be an integer, got 0.5"),
])  # fmt: skip
def test_errors_of_fake_quantize(how, error, message):
    with pytest.raises(error, match=message):
        fake_quantize(X, **how)
