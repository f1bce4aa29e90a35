"""The C quantization kernel gives the bytes of its plain-torch twin, alone and in threads; without it the twin serves."""

from __future__ import annotations

import subprocess

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mxfp4
from mxfp4.numerics import fp8, kernels
from mxfp4.numerics import reference as twin
from mxfp4.numerics.formats import ELEMS
from mxfp4.numerics.kernels.cpu import quantize as quantize_cpu
from mxfp4.numerics.operand_plan import OperandPlan
from mxfp4.numerics.philox import FOR_SIGNS, philox, random_signs
from mxfp4.numerics.scale_rules import SCALE_RULES
from tests.numerics.kernels.test_triton_quantize import DTYPES, SIZES, any_bits, ordinary, orientation, same

built = pytest.mark.skipif(quantize_cpu.kernel() is None, reason="needs a C compiler")

one = st.builds(
    orientation,
    st.sampled_from(sorted(ELEMS)), st.sampled_from(["1d", "2d"]), st.sampled_from(SCALE_RULES), st.booleans(),
    st.sampled_from(SIZES), st.sampled_from([None, "fixed", "seed"]), st.sampled_from([None, *DTYPES]),
    st.integers(0, 2**32 - 1), st.booleans(),
)  # fmt: skip


def check(x, row, col, key=-(2**41) - 3):
    seed = torch.tensor(key)
    ours, theirs = quantize_cpu.quantize_matrix(x, row, col, seed), twin.quantize_matrix(x, row, col, seed)
    assert all(same(a, b) for a, b in zip(sum(ours, ()), sum(theirs, ()), strict=True)), f"{row} / {col}"


@built
@given(
    row=st.none() | one, col=st.none() | one, dtype=st.sampled_from(DTYPES), batch=st.integers(1, 3),
    data=st.sampled_from([any_bits, ordinary]), seed=st.integers(0, 2**31), layout=st.integers(0, 3), units=st.integers(0, 7),
)  # fmt: skip
def test_any_combination(row, col, dtype, batch, data, seed, layout, units):
    square = any(how and how.block == "2d" for how in (row, col))
    need_c = max(32, row.hadamard) if row else 32 if square else 5
    need_r = max(32, col.hadamard) if col else 32 if square else 3
    shape = (batch, need_r * (1 + units % 3), need_c * (1 + units // 3))
    if layout == 1:  # a transposed view
        x = data((shape[0], shape[2], shape[1]), dtype, seed).transpose(1, 2)
    elif layout == 2:  # rows apart, an odd offset
        x = data((shape[0], shape[1], shape[2] + 3), dtype, seed)[:, :, 1 : shape[2] + 1]
    elif layout == 3:  # one row for all
        x = data((shape[0], 1, shape[2]), dtype, seed).expand(shape)
    else:
        x = data(shape, dtype, seed)
    check(x, row, col)


@built
@pytest.mark.parametrize("block", ["1d", "2d"])
def test_threads_and_chunks_give_the_same_bytes(block):
    how = orientation("e2m1", block, "even", True, 16, False, None)
    x = any_bits((2, 1056, 320), torch.float32, 1)  # more than one chunk of the twin
    assert x.numel() > 2 * max(twin.CHUNK, quantize_cpu.ELEMENTS_A_THREAD)
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            check(x, how, how)
    finally:
        torch.set_num_threads(before)
    whole = twin.quantize_packed(x, how, torch.tensor(5))
    parts = twin.quantize_matrix(x, how, None, torch.tensor(5))[0]
    assert torch.equal(whole[0], parts[0]) and torch.equal(whole[1], parts[1])


@pytest.mark.parametrize("failure", ["no compiler", "a compiler that fails", "a compiler that hangs"])
def test_without_the_kernel_the_twin_serves(failure, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if failure == "no compiler":
        monkeypatch.setattr("shutil.which", lambda name: None)
    else:
        error = subprocess.CalledProcessError(1, "cc") if "fails" in failure else subprocess.TimeoutExpired("cc", 1)

        def run(*_, **__):
            raise error

        monkeypatch.setattr("subprocess.run", run)
    quantize_cpu.library.cache_clear()
    try:
        assert quantize_cpu.kernel() is None
        monkeypatch.setattr(kernels.quantize_cpu, "quantize_matrix", None)
        x = torch.randn(4, 64)
        assert torch.equal(mxfp4.quantize(x).dequantize(), mxfp4.fake_quantize(x))
    finally:
        quantize_cpu.library.cache_clear()
    assert list(tmp_path.rglob("*.so")) == []


@built
def test_the_cache_holds_one_library_and_survives_an_unwritable_home(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    quantize_cpu.library.cache_clear()
    assert quantize_cpu.kernel() is not None
    quantize_cpu.library.cache_clear()
    assert quantize_cpu.kernel() is not None
    assert len(list((tmp_path / "mxfp4").iterdir())) == 1
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "mxfp4" / next((tmp_path / "mxfp4").iterdir()).name))
    quantize_cpu.library.cache_clear()
    assert quantize_cpu.kernel() is not None
    quantize_cpu.library.cache_clear()


@built
@pytest.mark.parametrize("elem, cast", [("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)])
@pytest.mark.parametrize("scale", [1.0, 0.37, 3e20, 2.0**-100])
def test_scaled_fp8_is_torch_s_cast(elem, cast, scale):
    scale, largest = torch.tensor(scale), ELEMS[elem].max / scale
    x = any_bits((64, 96), torch.float32, 9)
    x = torch.where(x.abs() > largest, torch.nan, x)
    ties = torch.linspace(-256, 256, 64 * 96).view(64, 96).clamp(-largest, largest)
    for t in (x, ties, ties.bfloat16() * 0.5, ties.t(), ties[:, 1:40], ties[:1].expand(5, 96), ties[:0]):
        ours = mxfp4.numerics.ops.block_quantize.scaled_fp8(t, scale, elem, torch.float32)
        theirs = (t.float() * scale).to(cast).float()
        assert ours.shape == theirs.shape and same(ours, theirs)


def test_signs_without_tensors_are_those_of_the_tensor_code():
    for seed in (0, 1, -1, 2**62 + 12345, -(2**63)):
        words = torch.stack(philox(torch.tensor(seed), torch.arange(1), FOR_SIGNS, 3), dim=-1).flatten()
        bits = (words[:, None] >> torch.arange(32)) & 1
        assert torch.equal(random_signs(torch.tensor(seed), 128, 3), 1.0 - 2.0 * bits.flatten().float())


@pytest.mark.parametrize("shape", [(4096,), (3, 256), (2, 96), (0, 128), (5, 7, 64), (63, 1280)])
@pytest.mark.parametrize("stochastic", [False, True])
def test_few_long_rows_keep_their_blocks_and_random_numbers(shape, stochastic):
    x, seed = torch.randn(shape), torch.tensor(7)
    rounding = "stochastic" if stochastic else "nearest"
    codes, scales = twin.quantize_packed(x, OperandPlan(rounding=rounding, rotation=mxfp4.Hadamard(16)), seed)
    q = mxfp4.quantize(x, hadamard=mxfp4.Hadamard(16), rounding=rounding, seed=seed)
    assert torch.equal(q.qdata, codes) and torch.equal(q.scale, scales)


@built
@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_every_midpoint_and_its_neighbours(dtype):
    """Every FP32 value around the places where the code changes, signs and saturation included."""
    places = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 7.0, 0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0])
    bits = places.view(torch.int32)[:, None] + torch.arange(-2, 3, dtype=torch.int32)
    values = bits.clamp(min=0).view(torch.float32).flatten()
    x = torch.zeros(len(values) * 2, 32)
    x[:, 0], x[:, 1] = 4.0, torch.cat([values, -values])  # floor: scale 1
    check(x[None], orientation("e2m1", "1d", "floor", False, 0, False, dtype), None)


@built
@pytest.mark.parametrize("elem", ["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_fp8_per_tensor_is_the_twins(elem, dtype):
    """One pass of C for the scale and its inverse: the bits of the few torch operations, zeros and NaN included."""
    whole = any_bits((64, 96), torch.float32, 9)
    finite = torch.where(whole.isfinite(), whole, 1.0)
    for x in (finite, finite * 2.0**-100, finite * 0, whole, torch.full((3, 5), 1e-45), finite[:0], finite.t()[:, ::2]):
        t = x.to(dtype)
        scale = fp8.fp8_scale(t, elem)
        values, factor = quantize_cpu.fp8_per_tensor(t, elem, torch.float32)
        assert same(values, quantize_cpu.scaled_fp8(t, scale, elem, torch.float32))
        assert same(factor, scale.reciprocal()) and factor.dtype == torch.float32
