"""FP8 in blocks of 128 against an oracle in float64: codes, scales, the product of the hardware, and the layer's GEMMs.

The oracle takes the scale as amax / 448 in FP32, rounds x / scale (FP32) to the nearest value of the format's table,
ties to the even code, and sums in float64.
"""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mxfp4 import MXFP4Linear
from mxfp4.layers import plan as plans
from mxfp4.layers.gemms import both_operands
from mxfp4.layers.recipe import recipe
from mxfp4.numerics.formats import E4M3
from mxfp4.numerics.ops import fp8_block

SIDE = 128
GRID = E4M3.values()[: E4M3.max_code + 1].double()


def spread(t: torch.Tensor, block: str) -> torch.Tensor:
    """Scales for each element."""
    t = t.repeat_interleave(SIDE, dim=1)
    return t.repeat_interleave(SIDE, dim=0) if block == "2d" else t


def oracle(x: torch.Tensor, block: str, pow2: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """(values without scale, float64 [R, K]; scales, float64, one an element) of finite x."""
    rows, k = x.shape
    height = SIDE if block == "2d" else 1
    amax = x.float().abs().reshape(rows // height, height, k // SIDE, SIDE).amax((1, 3))
    scale = torch.where(amax == 0, 1.0, torch.maximum(amax / 448, torch.tensor(2.0**-126)))
    if pow2:
        scale = torch.exp2(torch.ceil(torch.log2(scale.double()))).float()
    u = (x.float() / spread(scale, block)).double()
    above = torch.searchsorted(GRID, u.abs().contiguous()).clamp(max=E4M3.max_code)
    below = (above - 1).clamp(min=0)
    up, down = GRID[above] - u.abs(), u.abs() - GRID[below]
    code = torch.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    return GRID[code].copysign(u), spread(scale, block).double()


def made(x: torch.Tensor, block: str, scales: str = "fp32") -> tuple[torch.Tensor, torch.Tensor]:
    codes, scale = fp8_block.fp8_block(x, block, scales, None, 0)
    return codes.view(torch.float8_e4m3fn).double(), spread(scale, block).double()


def inputs(rows: int, k: int, seed: int = 0) -> torch.Tensor:
    """Blocks of very different sizes: ordinary ones, zeros, FP32's smallest and nearly its largest."""
    torch.manual_seed(seed)
    sizes = torch.tensor([1.0, 0.0, 2.0**-140, 3e38, 2.0**-120, 1e-3])
    chosen = sizes[torch.randint(len(sizes), (rows // SIDE, k // SIDE))]
    return (torch.rand(rows, k) * 2 - 1) * chosen.repeat_interleave(SIDE, 0).repeat_interleave(SIDE, 1)


@pytest.mark.parametrize("block", ["1d", "2d"])
@pytest.mark.parametrize("pow2", [False, True])
@pytest.mark.parametrize("layout", ["plain", "transposed", "cut", "bf16"])
def test_codes_and_scales_are_the_oracles(block, pow2, layout):
    x = inputs(256, 384)
    if layout == "transposed":
        x = inputs(384, 256).t()
    elif layout == "cut":
        x = torch.nn.functional.pad(x, (3, 5, 1, 2))[1:-2, 3:-5]
    elif layout == "bf16":
        x = x.clamp(-3e38, 3e38).to(torch.bfloat16)
    for ours, theirs in zip(made(x, block, "pow2" if pow2 else "fp32"), oracle(x, block, pow2), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("block, rows", [("1d", 1), ("2d", SIDE)])
def test_what_is_not_finite_makes_its_block_nan_and_no_other(bad, block, rows):
    x = torch.randn(256, 256)
    x[3, 130] = bad
    codes, scale = fp8_block.fp8_block(x, block, "fp32", None, 0)
    nan = fp8_block.fp8_block_values(codes, scale, block).isnan()
    first = 3 if block == "1d" else 0
    assert nan[first : first + rows, SIDE:].all() and nan.sum() == rows * SIDE


def test_stochastic_rounding_is_unbiased_and_stays_between_the_neighbours():
    x = torch.full((128, 1280), 0.3)
    x[:, ::SIDE] = 448.0
    codes, scale = fp8_block.fp8_block(x, "1d", "fp32", torch.tensor(5), 2)
    values = fp8_block.fp8_block_values(codes, scale, "1d")[x < 1]
    assert set(values.tolist()) == {0.28125, 0.3125} and abs(values.mean() - 0.3) < 3e-4


@pytest.mark.parametrize("pow2", ["", "+pow2"])
@pytest.mark.parametrize("save", plans.SAVES)
def test_the_three_gemms_are_the_products_of_their_blocks(pow2, save):
    """Wgrad contracts tokens, so X and G are quantized anew along them; 100 tokens are padded to 128."""
    torch.manual_seed(1)
    layer = MXFP4Linear(256, 384, bias=False, recipe="fp8-block" + pow2, save=save)
    x, grad = torch.randn(100, 256) * 10.0 ** torch.randint(-4, 4, (100, 1)), torch.randn(100, 384).mul_(1e-5)
    y = layer(x.requires_grad_())
    dx, dw = torch.autograd.grad(y, (x, layer.weight), grad)

    def values(t: torch.Tensor, block: str = "1d") -> torch.Tensor:
        q, s = oracle(t, block, bool(pow2))
        return q * s

    def padded(t: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(t.detach(), (0, 0, 0, 28))

    w = values(layer.weight.detach(), "2d")
    x, g = padded(x), padded(grad)
    for got, a, b in (
        (y, values(x)[:100], w.t()),
        (dx, values(g)[:100], w),
        (dw, values(g.t()), values(x.t()).t()),
    ):
        bound = (a.shape[1] + 4) * 2.0**-23 * (a.abs() @ b.abs())
        assert got.shape == bound.shape and ((got.detach().double() - a @ b).abs() <= bound).all()


def test_scales_are_applied_to_sums_over_a_block():
    """Bytes of the formula: a product of FP32 values would round each value first."""
    torch.manual_seed(2)
    a, b = torch.randn(16, 384) * 3, torch.randn(32, 384)
    (qa, sa), (qb, sb) = (fp8_block.fp8_block(t, "1d", "fp32", None, 0) for t in (a, b))
    got = fp8_block.gemm_fp8_block(qa, sa, "1d", qb, sb, "1d", torch.float32, False)
    expected = torch.zeros(16, 32)
    va, vb = (q.view(torch.float8_e4m3fn).float() for q in (qa, qb))
    for k in range(3):
        part = slice(k * SIDE, (k + 1) * SIDE)
        expected += (va[:, part] @ vb[:, part].t()) * (sa[:, k, None] * sb[None, :, k])
    assert torch.equal(got, expected)
    unscaled = fp8_block.fp8_block_values(qa, sa, "1d") @ fp8_block.fp8_block_values(qb, sb, "1d").t()
    assert torch.allclose(got, unscaled, rtol=1e-4, atol=1e-4) and not torch.equal(got, unscaled)


def test_diagnostics_see_the_values_of_both_orientations():
    t = torch.randn(128, 256)
    for tensor, block in (("x", "1d"), ("w", "2d")):
        for (value, factor), expected in zip(
            both_operands(t, tensor, recipe("fp8-block"), None), (oracle(t, block), oracle(t.t(), block)), strict=True
        ):
            assert factor is None and torch.equal(value, (expected[0] * expected[1]).float())


@pytest.mark.parametrize("features", [(192, 128), (128, 200)])
def test_other_sizes_are_refused_by_the_layers_name_and_the_rule(features):
    with pytest.raises(ValueError, match=r"layer 'up': (in|out)_features=\d+ is not a multiple of 128.*'fp8-block'"):
        MXFP4Linear(*features, recipe="fp8-block", fqn="up")


def test_compiled_exported_and_fake():
    torch._dynamo.reset()
    results = []
    base = torch.randn(160, 70)
    x = base[3:131, 5:60].t()  # gaps, a transpose, 55 tokens
    for how in ("eager", "compiled"):
        torch.manual_seed(0)
        layer = MXFP4Linear(128, 256, bias=False, recipe="fp8-block", fqn="a")
        call = (
            torch.compile(layer, fullgraph=True, backend="aot_eager_decomp_partition") if how == "compiled" else layer
        )
        y = call(x)
        y.square().sum().backward()
        results.append((y.detach(), layer.weight.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    program = torch.export.export(layer.eval(), (x,))
    assert torch.equal(program.module()(x), results[0][0])
    with FakeTensorMode():
        assert MXFP4Linear(128, 256, recipe="fp8-block")(torch.empty(55, 128)).shape == (55, 256)


# The library's kernel, which no CPU has: what it is given, and when it is not trusted


def as_cublas_reads(shapes: list, wrong: bool = False):
    """A stand-in for `torch.nn.functional.scaled_mm` that reads scales from where cuBLASLt does, or as if unpadded."""

    def scaled_mm(a, b, scale_a, kind_a, scale_b, kind_b, swizzle_a, swizzle_b, output_dtype):
        assert a.dtype == b.dtype == torch.float8_e4m3fn and a.is_contiguous() and b.t().is_contiguous()
        sides = []
        for t, scale, kind in ((a, scale_a, kind_a), (b.t(), scale_b, kind_b)):
            rows, blocks = t.shape[0], t.shape[1] // SIDE
            if "128x128" in str(kind):
                padded = -(-blocks // 4) * 4
                assert scale.shape == (padded, rows // SIDE) and scale.stride() == (1, padded)
                memory = scale.as_strided((rows // SIDE * padded,), (1,))
                step = blocks if wrong else padded
                found = torch.stack([memory[i * step : i * step + blocks] for i in range(rows // SIDE)])
                sides.append(t.double() * spread(found, "2d").double())
            else:
                assert scale.shape == (rows, blocks) and scale.stride() == (1, rows)
                sides.append(t.double() * spread(scale, "1d").double())
        shapes.append((a.shape[0], b.shape[1], a.shape[1]))
        return (sides[0] @ sides[1].t()).to(output_dtype)

    return scaled_mm


@pytest.fixture
def library(monkeypatch):
    shapes: list = []
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", as_cublas_reads(shapes))
    return shapes


def test_the_library_gets_scales_where_it_reads_them(library, monkeypatch):
    monkeypatch.setattr(plans, "fp8_block_available", lambda device: True)
    torch.manual_seed(3)
    layer = MXFP4Linear(640, 256, bias=False, recipe="fp8-block")
    x, grad = torch.randn(128, 640, requires_grad=True), torch.randn(128, 256)
    assert "fp8-block  fp8-block e4m3" in str(layer.plan())
    y = layer(x)
    native = (y.detach(), *torch.autograd.grad(y, (x, layer.weight), grad))
    assert library == [(128, 256, 640), (128, 640, 256), (256, 640, 128)]
    monkeypatch.undo()
    layer._plans = None
    y = layer(x)
    for a, b in zip(native, (y, *torch.autograd.grad(y, (x, layer.weight), grad)), strict=True):
        assert (a - b).norm() < 1e-6 * b.norm()


def test_shapes_that_the_library_refuses_are_emulated(library):
    a, b = torch.randn(24, 128), torch.randn(32, 128)
    sides = [(*fp8_block.fp8_block(t, "1d", "fp32", None, 0), "1d") for t in (a, b)]
    y = fp8_block.gemm_fp8_block(*sides[0], *sides[1], torch.bfloat16, True)
    assert library == [] and y.dtype == torch.bfloat16
    assert not fp8_block.multiplies(torch.Size((128, 128)), "2d", torch.Size((128, 128)), "2d")


def test_the_self_check_finds_a_library_that_is_right_wrong_or_absent(library, monkeypatch):
    assert fp8_block.self_check(torch.device("cpu")) == "" and len(library) == 4
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", as_cublas_reads([], wrong=True))
    assert "1x128 and 128x128 is wrong" in fp8_block.self_check(torch.device("cpu"))

    def refuses(*args, **kwargs):
        raise NotImplementedError("only supported in CUDA for SM90\nmore")

    monkeypatch.setattr(torch.nn.functional, "scaled_mm", refuses)
    assert fp8_block.self_check(torch.device("cpu")) == "the library refuses them (only supported in CUDA for SM90)"
    assert not fp8_block.is_available("cpu")


@pytest.mark.gpu
def test_the_chip_gives_the_emulations_results():
    device = torch.device("cuda")
    if not fp8_block.is_available(device):
        pytest.skip("this chip does not multiply FP8 in blocks of 128")
    assert fp8_block.self_check(device) == ""
