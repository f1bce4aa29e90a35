"""GEMMs of quantized operands against the FP64 product of their dequantized values."""

import pytest
import torch

import mxfp4
from mxfp4 import Hadamard, MXTensor, matmul, quantize
from mxfp4.numerics.ops.matmul import gemm


def random_operand(rows: int, k: int, seed: int, elem: str = "e2m1", block: str = "1d") -> MXTensor:
    """Random codes with random scale bytes 120 to 134: a GEMM that loses or swaps scales cannot get it right."""
    g = torch.Generator().manual_seed(seed)
    if elem == "e2m1":
        qdata = torch.randint(0, 256, (rows, k // 2), dtype=torch.uint8, generator=g)
    else:
        qdata = quantize(torch.randn(rows, k, generator=g), elem=elem).qdata
    scale_rows = rows if block == "1d" else rows // 32
    scale = torch.randint(120, 135, (scale_rows, k // 32), dtype=torch.uint8, generator=g)
    return MXTensor(qdata, scale, elem, block, -1, (rows, k))


def assert_product(got: torch.Tensor, a: MXTensor, b: MXTensor) -> None:
    """Within FP32 accumulation error of the exact product: |error| <= K 2^-24 |a| |b|, elementwise."""
    a, b = a.dequantize(torch.float64), b.dequantize(torch.float64)
    bound = a.shape[1] * 2.0**-24 * (a.abs() @ b.abs().t())
    if got.dtype == torch.bfloat16:
        bound = bound + 2.0**-8 * (a @ b.t()).abs()
    assert got.shape == (a.shape[0], b.shape[0])
    assert ((got.double() - a @ b.t()).abs() <= bound).all()


@pytest.mark.parametrize("k", [32, 96, 160, 544, 1664])
@pytest.mark.parametrize("m", [1, 31, 33])
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
def test_random_scales(m, k, out_dtype):
    a, b = random_operand(m, k, 1), random_operand(68, k, 2)
    got = matmul(a, b, out_dtype)
    assert got.dtype == out_dtype
    assert_product(got, a, b)


@pytest.mark.parametrize("elem_a, elem_b", [("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e2m1", "e4m3"), ("e5m2", "e2m1")])
def test_mixed_elements(elem_a, elem_b):
    a, b = random_operand(33, 160, 1, elem_a), random_operand(68, 160, 2, elem_b)
    assert_product(matmul(a, b), a, b)


def test_2d_blocks_straight_and_transposed():
    a, b = random_operand(64, 96, 1), random_operand(96, 160, 2, block="2d")
    assert_product(matmul(a, b.t()), a, b.t())  # contracts the rows of b
    c = random_operand(32, 160, 3)
    assert_product(matmul(c, b), c, b)
    assert_product(matmul(b, c), b, c)


def test_axis_0_operands_transposed():
    x, w = torch.randn(64, 40), torch.randn(64, 24)  # contract the 64
    a, b = quantize(x, axis=0).t(), quantize(w, axis=0).t()
    assert_product(matmul(a, b), a, b)
    assert torch.equal(matmul(a, b), matmul(quantize(x.t()), quantize(w.t())))


@pytest.mark.parametrize("signs", [None, "seed"])
def test_rotations_cancel(signs):
    x, w = torch.randn(33, 128), torch.randn(40, 128)
    h = Hadamard(16, signs)
    got = matmul(quantize(x, hadamard=h, elem="e4m3", seed=1), quantize(w, hadamard=h, elem="e4m3", seed=1))
    assert (got - x @ w.t()).norm() < 0.06 * (x @ w.t()).norm()


def test_zero_blocks_give_exact_zeros():
    zero = quantize(torch.zeros(33, 64))
    assert (zero.scale == 0).all()
    got = matmul(zero, random_operand(68, 64, 1))
    assert (got == 0).all()
    half = torch.randn(8, 64)
    half[:, 32:] = 0
    a, b = quantize(half), random_operand(8, 64, 2)
    assert_product(matmul(a, b), a, b)


def test_byte_0_is_2_to_the_minus_127_inside_the_gemm():
    tiny = quantize(torch.full((3, 32), 2.0**-126))
    big = quantize(torch.full((5, 32), 2.0**100))
    assert (tiny.scale == 0).all()
    assert (matmul(tiny, big) == 32 * 2.0**-26).all() and (matmul(big, tiny) == 32 * 2.0**-26).all()


def test_nan_stays_in_its_rows():
    x = torch.randn(5, 64)
    x[2, 40] = torch.inf
    got = matmul(quantize(x), quantize(torch.randn(7, 64)))
    assert got[2].isnan().all() and got[[0, 1, 3, 4]].isfinite().all()


def test_dirty_memory_does_not_leak_in():
    a, b = random_operand(33, 96, 1), random_operand(68, 96, 2)
    want = matmul(a, b)
    for _ in range(3):
        blocks = [torch.full(shape, torch.nan) for shape in ((33, 68), (33, 96), (68, 96), (96, 68))]
        del blocks  # freed memory full of NaN is what the next results land in
        assert torch.equal(matmul(a, b), want)


def test_empty():
    b = random_operand(68, 64, 1)
    assert matmul(quantize(torch.ones(0, 64)), b).shape == (0, 68)
    assert matmul(b, quantize(torch.ones(0, 64))).shape == (68, 0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.float32])
def test_of_bf16_operands_a_result_that_holds_more_is_not_rounded_to_bf16(dtype, monkeypatch):
    """As on a GPU, whose GEMM writes BF16 unless it is told not to."""

    def mm(a, b, out_dtype=torch.bfloat16):
        return (a.double() @ b.double()).to(out_dtype)

    monkeypatch.setattr(torch, "mm", mm)
    a, b = torch.randn(16, 64).bfloat16(), torch.randn(16, 64).bfloat16()
    exact = a.double() @ b.double().t()
    assert gemm(a, b, dtype).dtype == dtype
    assert (gemm(a, b, dtype).double() - exact).norm() < 2.0**-11 * exact.norm()


def test_autocast_does_not_reach_in():
    a, b = random_operand(33, 96, 1), random_operand(68, 96, 2)
    want = matmul(a, b)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = matmul(a, b)
    assert got.dtype == torch.float32 and torch.equal(got, want)


def test_lower_matmul_precision_changes_nothing():
    """Operands are exact in BF16, so even a BF16 GEMM with FP32 accumulation is right."""
    a, b = random_operand(33, 544, 1), random_operand(68, 544, 2)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        assert_product(matmul(a, b), a, b)
    finally:
        torch.set_float32_matmul_precision(before)


Q = quantize(torch.ones(4, 64))


@pytest.mark.parametrize("call, error, message", [
    (lambda: matmul(Q, torch.ones(4, 64)), TypeError, "b must be an MXTensor .* got Tensor"),
    (lambda: matmul(None, Q), TypeError, "a must be an MXTensor .* got NoneType"),
    (lambda: matmul(Q, quantize(torch.ones(4, 32))), ValueError, r"a is \(4, 64\), b is \(4, 32\)"),
    (lambda: matmul(quantize(torch.ones(2, 4, 64)), Q), ValueError, r"a must be 2-D, got shape \(2, 4, 64\)"),
    (lambda: matmul(Q, Q, torch.float16), ValueError, "out_dtype=torch.float16 is not known; allowed: torch.float32"),
    (lambda: matmul(Q, quantize(torch.ones(64, 64)).t()), ValueError, "b of shape .* blocks along axis 0"),
    (lambda: matmul(quantize(torch.ones(64, 64), block="2d", hadamard=Hadamard(16)).t(), Q), ValueError, "without a rot"),
    (lambda: matmul(Q, quantize(torch.ones(4, 64), hadamard=Hadamard(16))), ValueError, "rotations differ"),
    (lambda: matmul(*(quantize(torch.ones(4, 64), hadamard=Hadamard(16, "seed"), seed=s) for s in (1, 2))),
     ValueError, "rotations differ"),
    (lambda: matmul(Q, Q.to("meta")), ValueError, "different devices: cpu and meta"),
])  # fmt: skip
def test_errors(call, error, message):
    with pytest.raises(error, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_public_path():
    from mxfp4.numerics.gemm_backends.choice import matmul_path

    assert matmul_path("cpu") == matmul_path(torch.device("cpu")) == "emulated"
    assert mxfp4.matmul is matmul


@pytest.mark.parametrize(
    "arch, expected",
    [("gfx950:sramecc+:xnack-", ("native", "native")), ("gfx942", ("emulated", "emulated")),
     ((8, 0), ("emulated", "emulated")), ((8, 9), ("emulated", "native")), ((9, 0), ("emulated", "native")),
     ((10, 0), ("native", "native")), ((10, 3), ("native", "native")), ((12, 0), ("emulated", "native"))],
)  # fmt: skip
def test_what_a_chip_multiplies_itself(arch, expected, monkeypatch):
    """gfx942 has FP8 units, of other encodings."""
    from mxfp4.numerics import native as path

    rocm = isinstance(arch, str)
    monkeypatch.setattr(torch.version, "hip", "7.0" if rocm else None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: arch)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: type("Card", (), {"gcnArchName": arch}))
    for function in (path._gpu_path, path._gpu_fp8_path):
        function.cache_clear()
    found = path.chip_path("cuda"), path.fp8_path(torch.device("cuda", 0))
    for function in (path._gpu_path, path._gpu_fp8_path):
        function.cache_clear()
    assert found == expected and found in path.PATHS
    assert path.fp8_path("cpu") == "emulated"


def test_the_native_road_gives_the_emulated_product(monkeypatch):
    """On a chip with FP4 units `matmul` hands packed operands to the kernel; here Triton interprets it."""
    from mxfp4.numerics.kernels import triton as package
    from mxfp4.numerics.ops import matmul as module
    from tests.fakes import triton_kernels as kernels
    from tests.numerics.kernels.test_triton_gemm import interpreted_dot_scaled

    if not interpreted_dot_scaled():
        pytest.skip("this Triton's interpreter does not know dot_scaled")

    monkeypatch.setattr(package, "gemm", kernels.load("gemm"), raising=False)
    torch.manual_seed(0)
    cases = [
        (mxfp4.quantize(torch.randn(33, 96)), mxfp4.quantize(torch.randn(68, 96))),
        (mxfp4.quantize(torch.randn(96, 64), block="2d").t(), mxfp4.quantize(torch.randn(32, 96), block="2d")),
    ]
    for pair in cases:
        a, b = (x.to(kernels.DEVICE) for x in pair)
        emulated = mxfp4.matmul(a, b)
        with monkeypatch.context() as patch:
            patch.setattr(module, "matmul_path", lambda device: "native")
            native = mxfp4.matmul(a, b)
        torch.testing.assert_close(native, emulated, rtol=1e-5, atol=1e-4)
