"""The adapters against stand-ins that have the libraries' signatures and layouts; a wrong layout is refused."""

from __future__ import annotations

import inspect
import sys

import pytest
import torch

from mxfp4.numerics.gemm_backends.backends import BACKENDS, Aiter, in_blocks_of_128_by_4
from mxfp4.numerics.gemm_backends.self_check import CASES, operands, problem
from tests.fakes import gemm_libraries as libraries

CPU = torch.device("cpu")
LARGE = tuple(c for c in CASES if c.k % 256 == c.n % 256 == c.m % 32 == 0 and c.k <= 1280)


@pytest.fixture
def aiter(monkeypatch):
    """Puts a stand-in for aiter in place; the functions that are given replace the right ones."""
    monkeypatch.setattr(torch.version, "hip", "7.2")
    Aiter.functions.cache_clear()
    yield lambda **functions: libraries.install_aiter(monkeypatch, **functions)
    Aiter.functions.cache_clear()


def test_aiter_gets_the_layout_that_it_reads(aiter):
    aiter()
    assert BACKENDS["aiter"].missing() is None and problem(BACKENDS["aiter"], CPU, LARGE) is None
    assert len(LARGE) >= 6 and any(c.block == "2d" for c in LARGE) and any(c.special for c in LARGE)


@pytest.mark.parametrize("function", ["shuffle_weight", "e8m0_shuffle"])
def test_aiter_of_another_layout_is_refused(aiter, function):
    shuffle = getattr(libraries, function)
    aiter(**{function: lambda x, *a, **kw: shuffle(x, *a, **kw).view(16, -1).flip(0).view(-1, shuffle(x).shape[1])})
    assert "results are" in problem(BACKENDS["aiter"], CPU, LARGE)


def test_aiter_that_fails_is_refused_with_its_words(aiter):
    def gemm_a4w4_asm(*args, **kw):
        raise RuntimeError("no kernel support a4w4 for this gpu arch\nat asm_gemm_a4w4.cu")

    aiter(gemm_a4w4_asm=gemm_a4w4_asm)
    assert problem(BACKENDS["aiter"], CPU).endswith("RuntimeError: no kernel support a4w4 for this gpu arch")


def test_aiter_is_asked_for_bf16_and_whole_tiles_alone():
    a, b = operands(LARGE[0])
    assert BACKENDS["aiter"].takes(a, b, torch.bfloat16) and not BACKENDS["aiter"].takes(a, b, torch.float32)
    taken = [c.name for c in CASES if BACKENDS["aiter"].takes(*operands(c), torch.bfloat16)]
    assert not {"one block", "odd sizes", "one row", "tails of tiles"} & set(taken)


def test_another_package_of_that_name_is_told_from_amds(aiter, monkeypatch):
    aiter()
    monkeypatch.delitem(sys.modules, "aiter.ops.gemm_op_a4w4")
    assert "amd-aiter" in BACKENDS["aiter"].missing() and "without its FP4 GEMM" in BACKENDS["aiter"].missing()
    monkeypatch.setattr(torch.version, "hip", None)
    assert BACKENDS["aiter"].missing() == "for AMD GPUs"


def test_the_stand_in_has_the_signature_of_pytorch():
    real = inspect.signature(torch.nn.functional.scaled_mm).parameters
    fake = inspect.signature(libraries.scaled_mm).parameters
    assert list(real) == list(fake) and [p.default for p in real.values()] == [p.default for p in fake.values()]


@pytest.mark.parametrize("hip", ["7.2", None])
def test_scaled_mm_gets_the_layout_of_each_platform(monkeypatch, hip):
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", libraries.scaled_mm)
    assert BACKENDS["scaled_mm"].missing() is None and problem(BACKENDS["scaled_mm"], CPU) is None


def test_scaled_mm_that_reads_scales_of_another_layout_is_refused(monkeypatch):
    def ignoring(mat_a, mat_b, scale_a, recipe_a, scale_b, recipe_b, *args, **kw):
        sides = []
        for codes, scale in ((mat_a, scale_a), (mat_b.t(), scale_b)):
            shape = codes.shape[0], codes.shape[1] // 16
            sides.append(
                libraries.operand(codes.view(torch.uint8), scale.view(torch.uint8)[: shape[0] * shape[1]].view(shape))
            )
        return libraries.product(*sides, torch.bfloat16)

    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", ignoring)
    assert "results are" in problem(BACKENDS["scaled_mm"], CPU)


def test_pytorch_without_fp4_units_is_refused_in_its_own_words(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.2")
    assert "to bfloat16: " in problem(BACKENDS["scaled_mm"], CPU)  # the CPU's scaled_mm knows no FP4


@pytest.mark.parametrize("rows, columns", [(128, 4), (96, 8), (300, 5)])
def test_scales_lie_where_cublas_reads_them(rows, columns):
    """The formula of its manual: offsets within 128 x 4 blocks, which follow each other along K."""
    scale = torch.randint(1, 255, (rows, columns), dtype=torch.uint8)
    flat = in_blocks_of_128_by_4(scale)
    wide = -(-columns // 4)
    assert flat.numel() == -(-rows // 128) * wide * 512 and flat.ne(0).sum() == scale.numel()
    r, c = torch.arange(rows)[:, None], torch.arange(columns)[None]
    assert torch.equal(flat[(r // 128 * wide + c // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4], scale)
