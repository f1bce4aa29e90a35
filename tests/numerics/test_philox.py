"""Random bits against an independent Philox4x32 in Python integers, the published vectors, and simple statistics."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mxfp4.numerics.philox import FOR_ROUNDING, FOR_SIGNS, ROUNDS, as_seed, philox, random16, random_signs
from tests.fakes.oracle import philox4x32

CPU = torch.device("cpu")
ONES = 0xFFFFFFFF
PI = ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0))


@pytest.mark.parametrize("counter, key, rounds, words", [
    ((0, 0, 0, 0), (0, 0), 7, "5f6fb709 0d893f64 4f121f81 4f730a48"),
    ((ONES,) * 4, (ONES,) * 2, 7, "5207ddc2 45165e59 4d8ee751 8c52f662"),
    (*PI, 7, "4dfccaba 190a87f0 c47362ba b6b5242a"),
    ((0, 0, 0, 0), (0, 0), 10, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ((ONES,) * 4, (ONES,) * 2, 10, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (*PI, 10, "d16cfe09 94fdcceb 5001e420 24126ea1"),
])  # fmt: skip
def test_the_oracle_gives_the_published_answers(counter, key, rounds, words):
    """Known-answer vectors of Random123, the authors' library."""
    assert " ".join(f"{w:08x}" for w in philox4x32(counter, key, rounds)) == words


word = st.one_of(st.integers(0, ONES), st.sampled_from([0, 1, 2**31 - 1, 2**31, ONES]))


@given(seed=st.integers(-(2**63), 2**64 - 1), index=st.integers(0, 2**63 - 1), purpose=word, stream=word)
def test_any_counter_and_key(seed, index, purpose, stream):
    ours = philox(as_seed(seed, CPU), torch.tensor([index]), purpose, stream)
    theirs = philox4x32((index & ONES, index >> 32, purpose, stream), (seed & ONES, (seed >> 32) & ONES), ROUNDS)
    assert tuple(w.item() for w in ours) == theirs


def test_which_element_gets_which_bits():
    seed, stream = 0x123456789ABCDEF0, 5
    got = random16(as_seed(seed, CPU), (3, 32), stream).flatten().tolist()
    for i, bits in enumerate(got):
        words = philox4x32((i // 8, 0, FOR_ROUNDING, stream), (seed & ONES, seed >> 32), ROUNDS)
        assert bits == (words[i % 8 // 2] >> (16 * (i % 2))) & 0xFFFF


@pytest.mark.parametrize("size", [16, 32, 64, 128])
def test_which_sign_gets_which_bit(size):
    seed, stream = -3, 2
    got = random_signs(as_seed(seed, CPU), size, stream).tolist()
    words = philox4x32((0, 0, FOR_SIGNS, stream), (seed & ONES, (seed >> 32) & ONES), ROUNDS)
    assert got == [-1.0 if (words[j // 32] >> (j % 32)) & 1 else 1.0 for j in range(size)]


def test_shape_does_not_move_the_bits():
    seed = as_seed(1, CPU)
    flat = random16(seed, (256,), 0)
    assert torch.equal(random16(seed, (2, 4, 32), 0).flatten(), flat)
    assert torch.equal(random16(seed, (512,), 0)[:256], flat)
    assert random16(seed, (0, 32), 0).shape == (0, 32)


def correlation(a, b) -> float:
    """Of two samples of n, in standard errors."""
    a, b = (t.double().flatten() - t.double().mean() for t in (a, b))
    return ((a * b).sum() / (a.norm() * b.norm())).item() * math.sqrt(a.numel())


def test_neighbours_rows_streams_and_seeds_are_uncorrelated():
    n = 2**17
    bits = random16(as_seed(7, CPU), (n,), 0)
    pairs = {f"lag {lag}": (bits[lag:], bits[:-lag]) for lag in (1, 2, 3, 4, 7, 8, 9, 16, 32, 64, 4096)}
    for stream in (1, 2, 3, 2**31, 2**32 - 1):
        pairs[f"stream {stream}"] = (bits, random16(as_seed(7, CPU), (n,), stream))
    for seed in (6, 8, -7, 7 + 2**32, 7 + 2**63):
        pairs[f"seed {seed}"] = (bits, random16(as_seed(seed, CPU), (n,), 0))
    far = {name: round(c, 1) for name, (a, b) in pairs.items() if abs(c := correlation(a, b)) > 4}
    assert not far


def test_bits_are_uniform():
    n = 2**18
    bits = random16(as_seed(11, CPU), (n,), 0)
    assert bits.min() >= 0 and bits.max() < 2**16
    for shift in (0, 8):
        counts = torch.bincount((bits >> shift) & 0xFF, minlength=256).double()
        chi2 = ((counts - n / 256) ** 2 / (n / 256)).sum().item()
        assert abs(chi2 - 255) < 4 * math.sqrt(2 * 255)


def test_signs_are_fair_and_differ_by_seed():
    signs = torch.stack([random_signs(as_seed(s, CPU), 128, 0) for s in range(400)])
    assert abs(signs.mean().item()) < 4 / math.sqrt(signs.numel())
    assert len({tuple(row.tolist()) for row in signs}) == 400
    gram = signs[:, :32].t() @ signs[:, :32] / 400
    assert (gram - torch.eye(32)).abs().max() < 4.5 / math.sqrt(400)


def test_seeds_that_are_taken():
    numpy = pytest.importorskip("numpy")
    for seed, low64 in ((2**63, -(2**63)), (2**64 - 1, -1), (-1, -1), (numpy.uint64(2**64 - 1), -1), (numpy.int32(5), 5),
                        (torch.tensor(5), 5), (torch.tensor([5]), 5)):  # fmt: skip
        got = as_seed(seed, CPU)
        assert got.shape == () and got.dtype == torch.int64 and got.item() == low64


@pytest.mark.parametrize("seed", [True, 1.0, "1", (1,), torch.tensor(1.0), torch.tensor([1, 2]), torch.tensor(True)])
def test_seeds_of_other_types(seed):
    with pytest.raises(TypeError, match="seed must be (an integer|one int64), got"):
        as_seed(seed, CPU)


@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1])
def test_seeds_beyond_64_bits(seed):
    with pytest.raises(ValueError, match=f"seed={seed} does not fit in 64 bits"):
        as_seed(seed, CPU)


def test_no_seed_draws_from_torchs_cpu_generator():
    torch.manual_seed(3)
    first, second = as_seed(None, CPU), as_seed(None, CPU)
    torch.manual_seed(3)
    with torch.device("meta"):  # a default device must not decide where the seed is drawn
        again = as_seed(None, CPU)
    assert first != second and torch.equal(first, again)


@pytest.mark.parametrize("shape", [(1, 1), (5, 7), (3, 20), (0, 5), ()])
def test_sizes_that_are_no_multiple_of_eight_take_the_first_bits(shape):
    """An FP8 tensor rounded stochastically may have any."""
    got = random16(as_seed(3, CPU), shape, 1)
    assert got.shape == shape and torch.equal(got.flatten(), random16(as_seed(3, CPU), (64,), 1)[: got.numel()])
