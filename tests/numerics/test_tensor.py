"""MXTensor: orientation, packing, transposes, devices, serialization."""

import copy
import io
import pickle

import pytest
import torch

import mxfp4
from mxfp4 import Hadamard, quantize
from mxfp4.numerics.formats import ELEMS, unpack_nibbles

X = torch.randn(64, 96, generator=torch.Generator().manual_seed(0))


def equal(a: mxfp4.MXTensor, b: mxfp4.MXTensor) -> bool:
    same_signs = (a.signs is None) == (b.signs is None) and (a.signs is None or torch.equal(a.signs, b.signs))
    meta = all(getattr(a, n) == getattr(b, n) for n in ("elem", "block", "axis", "shape", "hadamard"))
    return meta and same_signs and torch.equal(a.qdata, b.qdata) and torch.equal(a.scale, b.scale)


def test_first_byte_of_1_2_0():
    x = torch.zeros(32)
    x[0], x[1], x[2] = 1, 2, 4  # 4 makes the scale 1 under floor
    assert quantize(x).scale.tolist() == [127] and quantize(x).qdata[0] == 0x42


@pytest.mark.parametrize("block", ["1d", "2d"])
@pytest.mark.parametrize("elem", ELEMS)
@pytest.mark.parametrize("shape, axis", [((64, 96), -1), ((64, 96), 0), ((2, 3, 32, 64), 2), ((2, 3, 32, 64), -1)])
def test_layout(shape, axis, elem, block):
    x = torch.randn(shape)
    q = quantize(x, axis=axis, elem=elem, block=block)
    *rows, k = x.movedim(axis, -1).shape
    assert q.qdata.shape == (*rows, k // 2 if elem == "e2m1" else k) and q.qdata.dtype == torch.uint8
    assert q.scale.shape == ((*rows, k // 32) if block == "1d" else (*rows[:-1], rows[-1] // 32, k // 32))
    assert q.scale.dtype == torch.uint8 and q.codes().shape == (*rows, k)
    assert q.shape == shape and q.ndim == len(shape) and q.axis < 0 and q.block_size == 32 and q.device == x.device
    assert q.dequantize().shape == shape and q.dequantize().dtype == torch.float32
    assert (q.dequantize() - x).norm() < 0.2 * x.norm()


def test_codes_are_the_nibbles():
    q = quantize(X)
    assert torch.equal(q.codes(), unpack_nibbles(q.qdata))
    assert torch.equal(q.codes()[:, 0], q.qdata[:, 0] & 0xF) and torch.equal(q.codes()[:, 1], q.qdata[:, 0] >> 4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dequantize_dtype(dtype):
    q = quantize(X)
    assert torch.equal(q.dequantize(dtype), q.dequantize().to(dtype)) and q.dequantize(dtype).dtype == dtype
    assert dtype == torch.float16 or torch.equal(q.dequantize(dtype).float(), q.dequantize())  # BF16 holds them all


def test_byte_0_is_not_zero():
    q = quantize(torch.full((1, 32), 2.0**-126))
    assert q.scale.item() == 0 and (q.codes() == 4).all() and (q.dequantize() == 2.0**-126).all()
    assert (q.dequantize(torch.bfloat16).float() == 2.0**-126).all()


@pytest.mark.parametrize("rule", ["floor", "even", "ceil", "rceil"])
@pytest.mark.parametrize("elem", ELEMS)
def test_2d_blocks_are_transposition_invariant(elem, rule):
    """Same scales and values after a transpose, with the block axis on either side; packing alone differs."""
    x = X * torch.exp2(torch.randn(64, 96) * 4)
    t = quantize(x, block="2d", elem=elem, scale_rule=rule).t()
    same_axis = quantize(x.t(), axis=0, block="2d", elem=elem, scale_rule=rule)
    assert equal(t, same_axis)
    other_axis = quantize(x.t(), axis=1, block="2d", elem=elem, scale_rule=rule)
    assert torch.equal(t.scale.t(), other_axis.scale) and torch.equal(t.codes().t(), other_axis.codes())
    assert torch.equal(t.dequantize(), other_axis.dequantize())


def test_1d_blocks_are_not():
    x = X * torch.exp2(torch.randn(64, 96) * 4)
    assert not torch.equal(quantize(x).t().dequantize(), quantize(x.t().contiguous()[:, :64]).dequantize())


def test_transpose_twice_is_the_same_and_moves_no_data():
    q = quantize(X, hadamard=Hadamard(16, "seed"), seed=1)
    assert equal(q.t().t(), q) and q.t().qdata is q.qdata
    assert q.t().shape == (96, 64) and q.t().axis == -2
    assert torch.equal(q.t().dequantize(), q.dequantize().t())
    assert torch.equal(q.t().dequantize(rotated=False), q.dequantize(rotated=False).t())


@pytest.mark.parametrize("how", [
    {}, {"block": "2d", "elem": "e5m2"}, {"axis": 0, "rounding": "stochastic", "seed": 1},
    {"hadamard": Hadamard(16)}, {"hadamard": Hadamard(32, "seed"), "seed": 2}, {"hadamard": Hadamard(16, (1, -1) * 8)},
])  # fmt: skip
def test_save_copy_pickle_and_move(how):
    q = quantize(X, **how)
    buffer = io.BytesIO()
    torch.save({"w": q}, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)["w"]
    for other in (
        loaded,
        copy.deepcopy(q),
        copy.copy(q),
        pickle.loads(pickle.dumps(q)),
        q.to("cpu"),
        q.to(torch.device("cpu")),
    ):
        assert equal(other, q) and torch.equal(other.dequantize(rotated=False), q.dequantize(rotated=False))
    assert copy.deepcopy(q).qdata.data_ptr() != q.qdata.data_ptr()
    on_meta = q.to("meta")
    assert on_meta.device.type == "meta" and on_meta.scale.device.type == "meta" and on_meta.shape == q.shape
    assert on_meta.signs is None or on_meta.signs.device.type == "meta"


def test_numpy_axis_and_size_load_with_weights_only():
    numpy = pytest.importorskip("numpy")
    buffer = io.BytesIO()
    torch.save(quantize(X, axis=numpy.int64(1), hadamard=Hadamard(numpy.int64(16))), buffer)
    buffer.seek(0)
    assert torch.load(buffer, weights_only=True).axis == -1


def test_repr_says_what_it_is_in_one_line():
    q = quantize(X, block="2d", hadamard=Hadamard(16))
    assert repr(q) == (
        "MXTensor(shape=(64, 96), elem='e2m1', block='2d', axis=-1, hadamard=Hadamard(size=16, signs=None), device='cpu')"
    )


@pytest.mark.parametrize("call, error, message", [
    (lambda: quantize(torch.ones(2, 32, 32)).t(), ValueError, r"t\(\) needs a 2-D tensor, got shape \(2, 32, 32\)"),
    (lambda: quantize(X).to(torch.bfloat16), TypeError, "takes a device, got torch.bfloat16"),
    (lambda: quantize(X).dequantize(torch.int8), ValueError, "dtype=torch.int8 is not known; allowed: torch.float32"),
    (lambda: quantize(X).dequantize("float32"), ValueError, "dtype='float32' is not known; allowed: torch.float32"),
])  # fmt: skip
def test_errors(call, error, message):
    with pytest.raises(error, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
