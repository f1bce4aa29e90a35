"""On a GPU: every pair of options of the quantization kernel gives the twin's bytes, GEMMs are exact, offsets 64-bit.

Compiling takes the time, so the kernels are a covering set: any two values of two options meet in at least one.
"""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mxfp4
from mxfp4.numerics import reference as twin
from mxfp4.numerics.formats import ELEMS
from mxfp4.numerics.gemm_backends import choice
from mxfp4.numerics.kernels.triton.tiles import tiles
from mxfp4.numerics.native import chip_path
from mxfp4.numerics.philox import random_signs
from mxfp4.numerics.scale_rules import SCALE_RULES
from tests.fakes.strategies import block
from tests.fakes.triton_kernels import DEVICE, load
from tests.numerics.kernels.test_triton_gemm import operand
from tests.numerics.kernels.test_triton_quantize import DTYPES, SIZES, any_bits, check, orientation, same
from tests.numerics.ops.test_matmul import assert_product, random_operand

on_gpu = pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")

# In the order of `orientation`'s arguments: element, block, rule, stochastic, rotation, its signs, output.
OPTIONS = (
    tuple(sorted(ELEMS)), ("1d", "2d"), SCALE_RULES, (False, True), SIZES, (False, "fixed", "seed"), (None, *DTYPES),
)  # fmt: skip


def pairs(choice: tuple) -> set[tuple]:
    """The pairs of option values that meet in a choice."""
    return set(itertools.combinations(enumerate(choice), 2))


def covering(options: tuple[tuple, ...]) -> list[tuple]:
    """Choices, one value of each option, in which every pair of values meets: greedy, always the same."""
    draw = random.Random(0)
    left = {pair for choice in itertools.product(*options) for pair in pairs(choice)}
    chosen = []
    while left:
        wanted = dict(min(left))  # this pair for certain
        tries = [tuple(wanted.get(i, draw.choice(values)) for i, values in enumerate(options)) for _ in range(50)]
        chosen.append(max(tries, key=lambda choice: len(pairs(choice) & left)))
        left -= pairs(chosen[-1])
    return chosen


CHOICES = covering([tuple(map(str, values)) for values in OPTIONS])


def variant(i: int) -> tuple:
    """(row orientation, column orientation) number i: two members of the covering set, or one alone."""
    made = []
    for shift in (0, 7):
        texts = CHOICES[(i + shift) % len(CHOICES)]
        made.append([next(v for v in values if str(v) == t) for values, t in zip(OPTIONS, texts, strict=True)])
    row, col = (orientation(*options, stream=5 + 2 * j) for j, options in enumerate(made))
    if i >= len(CHOICES):  # beyond the set: one orientation
        return (row, None) if i % 2 else (None, col)
    return row, col


VARIANTS = len(CHOICES) + 10


def test_the_variants_cover_every_pair_of_options():
    seen = {pair for choice in CHOICES for pair in pairs(choice)}
    counts = [len(values) for values in OPTIONS]
    assert len(seen) == sum(a * b for a, b in itertools.combinations(counts, 2))
    assert 20 <= len(CHOICES) <= 40


@on_gpu
@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
@pytest.mark.parametrize("i", range(VARIANTS))
@settings(max_examples=12)
@given(
    seed=st.integers(0, 2**31),
    hard=st.lists(block(special=True), min_size=1, max_size=4),
    key=st.integers(-(2**63), 2**63 - 1),
)
def test_a_variant_gives_the_twins_bytes(i, seed, hard, key):
    row, col = variant(i)
    dtype = DTYPES[i % 3]
    for rows, columns, batch in ((256, 512, 1), (384, 640, 2)):  # whole tiles, and tails where a group is below 128
        if columns == 640 and not any(how and how.hadamard == 128 for how in (row, col)):
            rows, columns = rows - 64, columns - 64
        x = any_bits((batch, rows, columns), torch.float32, seed)
        for j, values in enumerate(hard):
            x[0, j, :32] = torch.tensor(values)
            x[-1, -32:, 64 + j] = torch.tensor(values)
        x = x.to(dtype).to(DEVICE)
        if i % 4 == 1:
            x = x.transpose(1, 2).contiguous().transpose(1, 2)
        elif i % 4 == 2:
            x = torch.nn.functional.pad(x, (1, 2))[:, :, 1:-2]
        check(x, row, col, key)


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("packed", [True, False])
def test_beyond_two_to_the_31_elements(packed):
    rows, k = 2**31 // 8192 + 256, 8192
    x = torch.randn(256, k, device=DEVICE).bfloat16().repeat(rows // 256, 1)
    x[-64:] = torch.randn(64, k, device=DEVICE).bfloat16()
    how = orientation("e2m1", "1d", "even", True, 16, False, None if packed else torch.bfloat16)
    seed = torch.tensor(2**35 + 3, device=DEVICE)
    row, col = load("quantize").quantize_matrix(x[None], how, how, seed)
    part = twin.part(x[None, -64:], how, seed, (rows - 64) * k)
    assert all(same(a if a is None else a[:, -64:], b) for a, b in zip(row, part, strict=True))
    nearest = orientation("e2m1", "1d", "even", False, 16, False, how.dtype)
    _, col = load("quantize").quantize_matrix(x[None], None, nearest, None)
    _, last = twin.quantize_matrix(x[None, -64:], None, nearest, None)
    assert all(
        same(a if a is None else a[:, :, -b.shape[-1] :], b) for a, b in zip(col, last, strict=True) if b is not None
    )


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("columns", [32, 8192])
def test_unpacking_beyond_two_to_the_31_elements(columns):
    rows = 2**31 // columns + 64
    x = torch.zeros(rows, columns, dtype=torch.bfloat16, device=DEVICE)
    x[-64:] = torch.randn(64, columns, device=DEVICE).bfloat16()
    values = load("gemm").unpack(mxfp4.quantize(x), torch.bfloat16)
    assert torch.equal(values[-64:], mxfp4.fake_quantize(x[-64:], dtype=torch.bfloat16)) and not values[:-64].any()


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("k", [32, 96, 160, 544, 1664])
@pytest.mark.parametrize("m", [1, 31, 33])
def test_matmul_equals_fp64(m, k):
    a, b = random_operand(m, k, 1).to(DEVICE), random_operand(68, k, 2).to(DEVICE)
    dirty = torch.full((4, 68, 1664), torch.nan, device=DEVICE)
    del dirty  # freed memory full of NaN is what the results land in
    got = mxfp4.matmul(a, b)
    assert_product(got, a, b)
    half = mxfp4.matmul(a, b, torch.bfloat16)
    assert (half.double() - got.double()).norm() < 2.0**-8 * got.double().norm()


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("elem, rows", [("e2m1", 33), ("e4m3", 64)])
def test_the_packed_gemm_equals_fp64(elem, rows):
    """Where the chip has no FP4 units Triton emulates `tl.dot_scaled`: slow, and the same values."""
    a, b = operand(rows, 544, 1, elem), operand(68, 544, 2, elem)
    exact = a.dequantize().double() @ b.dequantize().double().t()
    memory = torch.full((rows + 2, 71), torch.nan, device=DEVICE)
    out = load("gemm").gemm(a, b, memory[:rows, :68])
    assert (out.double() - exact).norm() < 1e-6 * exact.norm()
    assert memory[rows:].isnan().all() and memory[:, 68:].isnan().all()


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("elem", sorted(ELEMS))
@pytest.mark.parametrize("square", ["1d", "2d"])
def test_unpacking_is_dequantizing(elem, square):
    x = any_bits((64, 96), torch.float32, 11)
    x = torch.where(x.isfinite(), x, 1.0)
    x[3, 40] = torch.nan
    x[40, 64:] = 0
    q = mxfp4.quantize(x, elem=elem, block=square)
    for dtype in (torch.float32, torch.bfloat16):
        assert same(load("gemm").unpack(q.to(DEVICE), dtype), q.dequantize(dtype))


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, 123456789012345])
def test_signs_are_the_twins(seed):
    for size, stream in itertools.product((16, 32, 64, 128), (0, 2**31 + 5)):
        ours = random_signs(torch.tensor(seed, device=DEVICE), size, stream)
        assert torch.equal(ours.cpu(), random_signs(torch.tensor(seed), size, stream))


def native_chip() -> None:
    """Skip the test where the chip has no FP4 units."""
    if chip_path("cuda") != "native":
        pytest.skip("the chip has no FP4 units")


@on_gpu
@pytest.mark.gpu
def test_our_gemm_passes_its_check_and_what_is_used_is_right():
    native_chip()
    found = {status.name: status for status in choice.statuses("cuda")}
    assert found["triton"].state == "usable", found["triton"]
    a, b = operand(256, 2048, 1), operand(512, 2048, 2)
    assert_product(mxfp4.matmul(a, b, torch.bfloat16), a, b)


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("k", [1024, 2080])
def test_all_tiles_of_the_fp4_gemm_give_the_same_bits(k):
    native_chip()
    kernel, outputs = load("gemm"), []
    a, b = operand(320, k, 1), operand(512, k, 2)
    for tile in tiles(kernel.ON_AMD):
        out = torch.full((320, 512), torch.nan, device=DEVICE)
        grid, arguments, options = kernel.launch(a, b, out, False, tile)
        kernel._gemm_kernel[grid](**arguments, **options)
        outputs.append(out)
    assert_product(outputs[0], a, b)
    assert all(torch.equal(out, outputs[0]) for out in outputs)
