"""Element formats and bit layouts against the exact oracle."""

import pytest
import torch

from mxfp4.numerics.formats import (
    ELEMS,
    as_index,
    decode,
    e8m0_value,
    elem_format,
    encode,
    one_of,
    pack_nibbles,
    unpack_nibbles,
)
from tests.fakes.oracle import FORMATS, code_value, scale_value


@pytest.mark.parametrize("elem", ELEMS)
def test_constants(elem):
    ours, theirs = ELEMS[elem], FORMATS[elem]
    positive = theirs.magnitudes[1:]
    assert (ours.max, ours.emax, ours.mbits) == (float(theirs.vmax), theirs.emax, theirs.mantissa_bits)
    assert (ours.step, ours.max_code, ours.sign_code) == (float(positive[0]), len(positive), theirs.sign_code)
    assert ours.min_normal == float(theirs.magnitudes[1 << theirs.mantissa_bits])


@pytest.mark.parametrize("elem", ELEMS)
def test_every_code_decodes_to_its_value_and_back(elem):
    fmt = elem_format(elem)
    finite = [c for c in range(1 << fmt.bits) if (c & (fmt.sign_code - 1)) <= fmt.max_code]
    codes = torch.tensor(finite, dtype=torch.uint8)
    values = decode(codes, fmt)
    assert values.dtype == torch.float32
    assert values.tolist() == [float(code_value(c, elem)) for c in finite]
    assert torch.equal(torch.signbit(values), codes >= fmt.sign_code)  # -0 keeps its sign
    assert torch.equal(encode(values, fmt), codes)


def test_codes_beyond_the_largest_finite_one_read_as_nan():
    for elem, beyond in (("e4m3", [127, 255]), ("e5m2", [124, 125, 126, 127, 252, 255])):
        assert decode(torch.tensor(beyond, dtype=torch.uint8), ELEMS[elem]).isnan().all()


def test_e2m1_values_in_code_order():
    assert ELEMS["e2m1"].values().tolist() == [
        0,
        0.5,
        1,
        1.5,
        2,
        3,
        4,
        6,
        -0.0,
        -0.5,
        -1,
        -1.5,
        -2,
        -3,
        -4,
        -6,
    ]


def test_every_e8m0_byte():
    values = e8m0_value(torch.arange(256, dtype=torch.uint8))
    assert values[:255].tolist() == [float(scale_value(b)) for b in range(255)]
    assert values[255].isnan() and values[0] == 2.0**-127


def test_even_element_in_the_low_nibble():
    codes = torch.arange(16, dtype=torch.uint8).repeat(3, 2)
    assert pack_nibbles(codes)[0, 0] == 0x10
    assert pack_nibbles(torch.tensor([2, 4], dtype=torch.uint8)).tolist() == [0x42]
    assert torch.equal(unpack_nibbles(pack_nibbles(codes)), codes)
    every = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(pack_nibbles(unpack_nibbles(every)), every)


@pytest.mark.parametrize("default", [torch.float64, torch.float16, torch.bfloat16])
def test_the_default_dtype_does_not_leak_in(default):
    torch.set_default_dtype(default)
    try:
        assert all(f.values().dtype == torch.float32 for f in ELEMS.values())
        assert e8m0_value(torch.zeros(1, dtype=torch.uint8)).dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_the_default_device_does_not_leak_in():
    with torch.device("meta"):
        codes = torch.tensor([7], dtype=torch.uint8, device="cpu")
        assert decode(codes, ELEMS["e2m1"]).tolist() == [6.0]


@pytest.mark.parametrize("value", ["E2M1", None, ["e2m1"], 4, torch.float32, torch.ones(2)])
def test_unknown_names_list_the_known_ones(value):
    with pytest.raises(ValueError, match="elem=.*allowed: 'e2m1', 'e4m3', 'e5m2'"):
        elem_format(value)


def test_one_of_does_not_confuse_equal_values_of_other_types():
    with pytest.raises(ValueError, match="n=16.0"):
        one_of("n", 16.0, (16, 32))
    with pytest.raises(ValueError, match="n=True"):
        one_of("n", True, (1, 2))


def test_as_index():
    numpy = pytest.importorskip("numpy")
    assert type(as_index("axis", numpy.int64(-1))) is int
    for bad in (True, 1.0, None, "1", (1,), numpy.bool_(True), numpy.array([1, 2])):
        with pytest.raises(TypeError, match="axis must be an integer, got "):
            as_index("axis", bad)
