"""The block Hadamard rotation against an FP64 matrix product, and its cancellation in a GEMM."""

import pytest
import torch

import mxfp4
from mxfp4 import Hadamard, hadamard_transform
from mxfp4.numerics.hadamard import SIZES, rotate_last


def sylvester(n: int) -> torch.Tensor:
    """H of size n over sqrt(n), FP64, by the doubling that defines it."""
    h = torch.ones(1, 1, dtype=torch.float64)
    while h.shape[0] < n:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)], 0)
    return h / n**0.5


def some_signs(n: int) -> tuple[int, ...]:
    return tuple(1 - 2 * ((i * i + i // 3) % 2) for i in range(n))


@pytest.fixture(scope="module")
def x():
    return torch.randn(24, 256, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_equals_the_matrix_product(x, size, signed):
    signs = some_signs(size) if signed else None
    matrix = (
        sylvester(size) if signs is None else torch.diag(torch.tensor(signs, dtype=torch.float64)) @ sylvester(size)
    )
    want = (x.double().view(24, -1, size) @ matrix).view(24, 256)
    got = hadamard_transform(x, Hadamard(size, signs))
    assert got.dtype == torch.float32 and got.is_contiguous()
    assert (got.double() - want).abs().max() < 1e-6


@pytest.mark.parametrize("signs", [None, "fixed", "seed"])
@pytest.mark.parametrize("size", SIZES)
def test_inverse(x, size, signs):
    h = Hadamard(size, some_signs(size) if signs == "fixed" else signs)
    there = hadamard_transform(x, h, seed=3)
    back = hadamard_transform(there, h, seed=3, inverse=True)
    assert (back - x).abs().max() < 2e-6 and (there - x).abs().max() > 0.5
    q = mxfp4.quantize(x, elem="e4m3", hadamard=h, seed=3)
    assert (q.dequantize(rotated=False) - x).norm() / x.norm() < 0.04
    assert (q.dequantize() - there).norm() / x.norm() < 0.04


@pytest.mark.parametrize("axis", [0, 1, -1, -2])
def test_axis(x, axis):
    last = axis in (1, -1)
    square = x[:, :32].repeat(4, 1)  # [96, 32]
    want = rotate_last(square if last else square.t(), 32)
    got = hadamard_transform(square, Hadamard(32), axis=axis)
    assert torch.equal(got, want if last else want.t())


def test_bytes_do_not_depend_on_what_else_is_in_the_tensor(x):
    whole = hadamard_transform(x, Hadamard(64))
    for row in (0, 7, 23):
        assert torch.equal(hadamard_transform(x[row], Hadamard(64)), whole[row])
    assert torch.equal(hadamard_transform(x[:, 64:128], Hadamard(64)), whole[:, 64:128])
    strided = x.t().contiguous().t()
    assert torch.equal(hadamard_transform(strided, Hadamard(64)), whole)


def test_fp32_adds_in_the_documented_order():
    """Stages of distance 1, 2, 4, ..., then one product: another order would give other last bits."""
    import struct

    def f(v):  # to FP32 and back
        return struct.unpack("f", struct.pack("f", v))[0]

    values = torch.randn(16, generator=torch.Generator().manual_seed(4)) * 1000
    mine = values.tolist()
    for d in (1, 2, 4, 8):
        for i in range(16):
            if not i & d:
                mine[i], mine[i + d] = f(mine[i] + mine[i + d]), f(mine[i] - mine[i + d])
    assert hadamard_transform(values, Hadamard(16)).tolist() == [v * 0.25 for v in mine]


@pytest.mark.parametrize("size, signs", [(16, None), (32, None), (16, "fixed"), (64, "seed")])
def test_cancels_in_a_gemm(x, size, signs):
    h = Hadamard(size, some_signs(size) if signs == "fixed" else signs)
    w = torch.randn(40, 256, generator=torch.Generator().manual_seed(1))
    exact = x.double() @ w.double().t()
    rotated = hadamard_transform(x, h, seed=9).double() @ hadamard_transform(w, h, seed=9).double().t()
    assert (rotated - exact).abs().max() < 1e-4
    assert (
        signs != "seed"
        or (  # other signs on one side: nothing cancels
            (hadamard_transform(x, h, seed=8).double() @ hadamard_transform(w, h, seed=9).double().t()) - exact
        )
        .abs()
        .max()
        > 1
    )


def test_quantize_rotates_before_the_block_maximum(x):
    for size in SIZES:
        h = Hadamard(size, some_signs(size))
        rotated = mxfp4.quantize(hadamard_transform(x, h))
        q = mxfp4.quantize(x, hadamard=h)
        assert torch.equal(q.qdata, rotated.qdata) and torch.equal(q.scale, rotated.scale)


def test_signs_from_the_seed_are_those_of_the_transform(x):
    h = Hadamard(32, "seed")
    q = mxfp4.quantize(x, hadamard=h, seed=77)
    again = mxfp4.quantize(hadamard_transform(x, h, seed=77))
    assert torch.equal(q.qdata, again.qdata)
    assert set(q.signs.tolist()) == {1.0, -1.0}
    other = mxfp4.quantize(x, hadamard=h, seed=78)
    assert not torch.equal(q.signs, other.signs)


def test_spreads_an_outlier():
    """Beside an outlier everything is flushed to zero; after a rotation no element of the block is."""
    x = torch.ones(32)
    x[5] = 1000.0
    assert mxfp4.quantize(x).codes().count_nonzero() == 1
    assert mxfp4.quantize(x, hadamard=Hadamard(32)).codes().count_nonzero() == 32


def test_overflow_makes_the_block_nan_and_leaves_its_neighbours():
    x = torch.ones(2, 64)
    x[0, :16] = 3e38
    q = mxfp4.quantize(x, hadamard=Hadamard(16))
    assert q.scale[0, 0] == 255 and (q.scale != 255).sum() == 3
    assert q.codes()[0, :32].count_nonzero() == 0 and q.dequantize()[0, :32].isnan().all()
    x[0, :16] = 0
    x[0, 3] = 3e38  # alone it does not overflow
    assert (mxfp4.quantize(x, hadamard=Hadamard(16)).scale != 255).all()


def test_none_is_the_identity(x):
    assert torch.equal(hadamard_transform(x, None), x)


def test_gradient_is_the_inverse(x):
    leaf = x.clone().requires_grad_()
    g = torch.randn_like(x)
    hadamard_transform(leaf, Hadamard(16)).backward(g)
    assert (leaf.grad - hadamard_transform(g, Hadamard(16), inverse=True)).abs().max() < 1e-6


def test_numpy_numbers_and_vectors_are_normalised():
    numpy = pytest.importorskip("numpy")
    h = Hadamard(numpy.int64(16), numpy.array(some_signs(16), dtype=float))
    assert h == Hadamard(16, some_signs(16)) and type(h.size) is int and all(type(s) is int for s in h.signs)
    assert Hadamard(16, torch.tensor(some_signs(16))) == h and hash(h) == hash(Hadamard(16, list(some_signs(16))))


@pytest.mark.parametrize("size", [0, 8, 24, 256, -16])
def test_other_sizes(size):
    with pytest.raises(ValueError, match=f"Hadamard size={size} is not known; allowed: 16, 32, 64, 128"):
        Hadamard(size)


@pytest.mark.parametrize("size", [16.0, "16", None, True, [16]])
def test_sizes_of_other_types(size):
    with pytest.raises(TypeError, match="Hadamard size must be an integer, got"):
        Hadamard(size)


@pytest.mark.parametrize("signs", ["random", 5, 1.0, (1,) * 15, (0,) * 16, (1.5,) * 16, (2,) * 16, torch.ones(32), ()])
def test_other_signs(signs):
    with pytest.raises(ValueError, match="Hadamard signs must be None, 'seed' or 16 numbers [+]1 or -1, got"):
        Hadamard(16, signs)


@pytest.mark.parametrize("call, error, message", [
    (lambda: hadamard_transform(torch.ones(2, 24)), ValueError, "size 24, which is not a positive multiple of 16"),
    (lambda: hadamard_transform(torch.ones(2, 16), axis=2), ValueError, "axis=2 does not exist"),
    (lambda: hadamard_transform(torch.ones(2, 16), axis=1.0), TypeError, "axis must be an integer, got 1.0"),
    (lambda: hadamard_transform(torch.ones(2, 16), Hadamard(16, "seed")), ValueError, "needs seed="),
    (lambda: hadamard_transform(torch.ones(2, 16), 16), TypeError, "hadamard must be None or an mxfp4.Hadamard, got 16"),
    (lambda: hadamard_transform(torch.ones(2, 16, dtype=torch.int64)), TypeError, "got torch.int64"),
    (lambda: hadamard_transform(torch.ones(2, 16, dtype=torch.complex64)), TypeError, "got torch.complex64"),
])  # fmt: skip
def test_errors(call, error, message):
    with pytest.raises(error, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("size", [16, 32, 64, 128])
def test_given_signs_come_back_as_a_vector(size):
    signs = tuple(1 - 2 * (i * i % 7 < 3) for i in range(size))
    assert set(signs) == {1, -1}
    vector = Hadamard(size, signs).resolve(None, 0, torch.device("cpu"))
    assert vector.dtype == torch.float32 and vector.tolist() == list(signs)
