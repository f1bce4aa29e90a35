"""The GEMM of packed operands against FP64, and unpacking against the twin: interpreted here, compiled on a GPU."""

from __future__ import annotations

import pytest
import torch

import mxfp4
from mxfp4.numerics.formats import ELEMS
from mxfp4.numerics.ops import matmul as module
from mxfp4.numerics.tensor import MXTensor
from tests.fakes.triton_kernels import DEVICE, load

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")


def operand(rows: int, k: int, seed: int, elem: str = "e2m1", block: str = "1d") -> MXTensor:
    """Random codes under random scale bytes 120 to 134: uniform scales would hide lost ones."""
    g = torch.Generator().manual_seed(seed)
    fmt = ELEMS[elem]
    codes = torch.randint(0, fmt.max_code + 1, (rows, k), generator=g)
    codes = (codes | torch.randint(0, 2, (rows, k), generator=g) * fmt.sign_code).to(torch.uint8)
    qdata = codes[:, 0::2] | (codes[:, 1::2] << 4) if fmt.bits == 4 else codes
    scale = torch.randint(120, 135, (rows // 32 if block == "2d" else rows, k // 32), generator=g, dtype=torch.uint8)
    return MXTensor(qdata, scale, elem, block, -1, (rows, k)).to(DEVICE)


def interpreted_dot_scaled() -> bool:
    """Interpreters before Triton 3.8 do not know it; GPUs without FP4 matrix units emulate it."""
    if DEVICE == "cuda":
        return True
    from triton.runtime.interpreter import InterpreterBuilder

    return hasattr(InterpreterBuilder, "create_dot_scaled")


needs_dot_scaled = pytest.mark.skipif(
    "not __import__('tests.numerics.kernels.test_triton_gemm', fromlist=['']).interpreted_dot_scaled()"
)


@needs_dot_scaled
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("m, n, k", [(1, 68, 32), (31, 68, 96), (33, 68, 160), (33, 7, 544), (31, 130, 1664)])
def test_gemm_equals_fp64(m, n, k, out_dtype):
    a, b = operand(m, k, 1), operand(n, k, 2)
    exact = a.dequantize().double() @ b.dequantize().double().t()
    # Whatever lies in the output, and beyond it, must not come through.
    memory = torch.full((m + 2, n + 3), torch.nan, dtype=out_dtype, device=DEVICE)
    out = load("gemm").gemm(a, b, memory[:m, :n])
    bound = (a.dequantize().double().abs() @ b.dequantize().double().abs().t()) * k * 2.0**-23
    if out_dtype == torch.bfloat16:
        bound = bound + exact.abs() * 2.0**-7  # the interpreter truncates
    assert ((out.double() - exact).abs() <= bound).all()
    assert memory[m:].isnan().all() and memory[:, n:].isnan().all()


@needs_dot_scaled
@pytest.mark.parametrize("elem, block", [("e4m3", "1d"), ("e5m2", "1d"), ("e2m1", "2d"), ("e4m3", "2d")])
def test_other_formats_square_blocks_and_accumulation(elem, block):
    a, b = operand(64, 160, 3, elem, block), operand(96, 160, 4, elem, block)
    exact = a.dequantize().double() @ b.dequantize().double().t()
    before = torch.randn(64, 96).to(DEVICE)
    out = load("gemm").gemm(a, b, before.clone(), accumulate=True)
    error = (out.double() - exact - before.double()).norm() / exact.norm()
    assert error < 1e-6


@needs_dot_scaled
def test_zero_blocks_are_exact_zeros_and_no_rows_give_none():
    a, b = mxfp4.quantize(torch.zeros(32, 64)).to(DEVICE), operand(32, 64, 5)
    gemm = load("gemm").gemm
    assert gemm(a, b, torch.full((32, 32), torch.nan, device=DEVICE)).eq(0).all()
    assert gemm(mxfp4.quantize(torch.zeros(0, 64)).to(DEVICE), b, torch.empty(0, 32, device=DEVICE)).shape == (0, 32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("elem", sorted(ELEMS))
@pytest.mark.parametrize("block", ["1d", "2d"])
def test_unpack_is_dequantize(elem, block, dtype):
    x = torch.randn(64, 96)
    x[3, 40] = torch.nan
    x[40, 64:] = 0
    if dtype == torch.float32 or DEVICE == "cuda":  # the interpreter knows no BF16 subnormals
        x[:, :32] *= 2.0**-130  # byte 0
    q = mxfp4.quantize(x, elem=elem, block=block).to(DEVICE)
    ours, theirs = load("gemm").unpack(q, dtype), q.dequantize(dtype)
    assert torch.equal(ours.isnan(), theirs.isnan()) and torch.equal(ours.nan_to_num(), theirs.nan_to_num())
    assert torch.equal(ours.signbit() | ours.isnan(), theirs.signbit() | theirs.isnan())


@needs_dot_scaled
def test_on_a_native_chip_matmul_takes_packed_operands(monkeypatch):
    kernels = load("gemm")
    monkeypatch.setattr(module, "matmul_path", lambda device: "native")
    monkeypatch.setitem(__import__("sys").modules, "mxfp4.numerics.kernels.triton.gemm", kernels)
    monkeypatch.setattr("mxfp4.numerics.kernels.triton.gemm", kernels, raising=False)
    monkeypatch.setattr(module, "gemm", None)  # the emulated one
    a, w = operand(33, 64, 6), mxfp4.quantize(torch.randn(64, 96), block="2d").to(DEVICE)
    got = mxfp4.matmul(a, w.t())
    want = a.dequantize() @ w.dequantize()
    assert torch.equal(got, want) or (got - want).abs().max() < 1e-4
