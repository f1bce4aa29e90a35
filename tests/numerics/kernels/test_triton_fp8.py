"""The FP8 kernels round as torch's cast does, and per-tensor scaling puts the largest magnitude at the format's."""

import pytest
import torch

from mxfp4.numerics.formats import ELEMS
from mxfp4.numerics.kernels.cpu import quantize as quantize_cpu
from mxfp4.numerics.ops import block_quantize as ops
from mxfp4.numerics.ops import packed_operands
from tests.fakes import triton_kernels as kernels
from tests.numerics.kernels.test_triton_quantize import any_bits, same

CAST = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@pytest.mark.parametrize("elem", CAST)
@pytest.mark.parametrize("scale", [1.0, 0.37, 3e20, 2.0**-100])
def test_the_kernel_rounds_as_torchs_cast(elem, scale):
    module = kernels.load("fp8")
    factor, largest = torch.tensor(scale, device=kernels.DEVICE), ELEMS[elem].max / scale
    x = any_bits((61, 97), torch.float32, 9)
    x = torch.where(x.abs() > largest, torch.nan, x)
    ties = torch.linspace(-256, 256, 64 * 96).view(64, 96).clamp(-largest, largest)
    for t in (x, ties, ties.bfloat16() * 0.5, ties.t(), ties[:, 1:40], ties[:1].expand(5, 96), ties[:0]):
        t = t.to(kernels.DEVICE)
        for dtype in (torch.float32, torch.bfloat16):
            ours = module.scaled_fp8(t, factor, elem, dtype)
            theirs = (t.float() * factor).to(CAST[elem]).to(dtype)
            assert ours.shape == theirs.shape and ours.dtype == dtype and same(ours, theirs)


@pytest.mark.parametrize("elem", CAST)
@pytest.mark.parametrize(
    "x", [[0.0, 0.0], [-3.0, 1.0], [1e-38, 0.0], [3e38, -1.0], [float("nan"), 1.0], [float("inf"), 1.0]]
)
def test_per_tensor_scaling(elem, x):
    """1e-38 needs a scale beyond FP32: its largest serves."""
    x = torch.tensor(x)
    values, factor = ops.fp8_per_tensor(x, elem, torch.float32)
    if x.isfinite().all():
        largest = x.abs().max()
        assert (values * factor - x).abs().max() <= largest * 2.0 ** -(ELEMS[elem].mbits + 1)
        assert values.abs().max() <= ELEMS[elem].max and (largest < 1e-30 or values.abs().max() == ELEMS[elem].max)
        assert largest > 0 or factor == 1
    else:
        assert values.isnan().any()


@pytest.mark.parametrize("elem", CAST)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_of_a_tensor_with_a_value_that_is_not_finite_nothing_passes_for_a_number(elem, bad):
    """Whatever its other values, which no scale fits to the format: a backend that saturates would tell them."""
    values, factor = ops.fp8_per_tensor(torch.tensor([bad, 1.0, -1000.0, 1e30]), elem, torch.float32)
    assert (values * factor).isnan().all()


def assert_codes(x: torch.Tensor, elem: str) -> None:
    """Codes of a tensor, along its rows, its columns and both, are torch's cast's; NaN is NaN, of either sign."""
    module = kernels.load("fp8")
    host = x.cpu()
    scale = ops.fp8_scale(host, elem)
    wanted = (host.float() * scale).to(CAST[elem])
    for along, turned in ((True, False), (False, True), (True, True)):
        codes, across, factor = module.codes(x, elem, along, turned)
        assert (codes is not None, across is not None) == (along, turned)
        assert torch.equal(factor.cpu(), 1.0 / scale) or (factor.isnan() and scale.isnan())
        for ours, theirs in ((codes, wanted), (across, wanted.t())):
            if ours is not None:
                assert ours.is_contiguous() and ours.dtype == torch.uint8 and ours.shape == theirs.shape
                value = ours.cpu().view(CAST[elem])
                bad = theirs.float().isnan()
                assert torch.equal(value.float().isnan(), bad)
                right = value.view(torch.uint8) == theirs.contiguous().view(torch.uint8)
                assert (right | bad).all()


def laid_out(x: torch.Tensor):
    """`x`, and others made of it: transposed, cut out of a larger one, a column, a row repeated, every second."""
    return x, x.t(), x[3:, 5:-7], x[:, :1], x[:1].expand(5, -1), x[:1, :1].expand(40, 33), x[::2, ::3]


def difficult(elem: str, shape: tuple[int, int]):
    """Values over the whole range of the format, ties among them, zeros and what is not finite."""
    finite = any_bits(shape, torch.float32, 21)
    finite = torch.where(finite.isfinite(), finite, 1.0)
    grid = torch.linspace(-ELEMS[elem].max, ELEMS[elem].max, 512).repeat(8)[: shape[1]] * torch.ones(shape[0], 1)
    yield from (finite, finite * 2.0**-100, torch.randn(shape).exp2(), torch.zeros(shape), torch.full(shape, -0.0))
    yield from (grid, grid * 2.0 ** -torch.arange(0.0, 24.0)[torch.arange(shape[0]) % 24, None])
    yield torch.where(torch.arange(shape[1]) == 0, 1e-38, torch.zeros(shape))
    for bad in (torch.nan, torch.inf, -torch.inf):
        x = torch.randn(shape)
        x[-1, -1] = bad
        yield x


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("elem", CAST)
def test_codes_are_those_of_torchs_cast(elem):
    for x in difficult(elem, (37, 150)):
        assert_codes(x.to(kernels.DEVICE), elem)


@pytest.mark.parametrize("elem", CAST)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_codes_of_any_strides_and_dtype(elem, dtype):
    for x in laid_out(torch.randn(140, 150).to(dtype)):
        assert_codes(x.to(kernels.DEVICE), elem)


@pytest.mark.parametrize("elem", CAST)
def test_the_operators_of_codes_agree(elem):
    x = torch.randn(33, 70)
    codes, turned, factor = packed_operands.fp8_codes_pair(x, elem)
    values, same_factor = ops.fp8_per_tensor(x, elem, torch.float32)
    assert torch.equal(codes.view(CAST[elem]).float(), values)
    assert torch.equal(turned, codes.t()) and turned.is_contiguous()
    for flag, one in ((False, codes), (True, turned)):
        found, its_factor = packed_operands.fp8_codes(x, elem, flag)
        assert torch.equal(found, one) and its_factor == factor == same_factor
    for op, flag in ((packed_operands.fp8_codes, (elem, True)), (packed_operands.fp8_codes_pair, (elem,))):
        torch.library.opcheck(op, (x, *flag))


@pytest.mark.parametrize("shape", [(0, 0), (0, 64), (64, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_of_nothing_there_are_no_codes_and_the_factor_is_one(shape, dtype):
    x = torch.empty(shape, dtype=dtype, device=kernels.DEVICE)
    for made in (packed_operands.fp8_codes_pair(x, "e4m3"), kernels.load("fp8").codes(x, "e4m3", True, True)):
        assert [t.shape for t in made] == [shape, shape[::-1], ()] and made[2] == 1
    values, factor = ops.fp8_per_tensor(x, "e5m2", torch.float32)
    assert values.shape == shape and factor == 1


@pytest.mark.parametrize("compiler", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_lie_where_a_compiler_expects_them_and_share_no_memory(dtype, compiler, monkeypatch):
    """Of every layout, so that compiled code reads the strides it was built for; of one row its transpose is a copy."""
    if not compiler:
        monkeypatch.setattr(quantize_cpu, "kernel", lambda: None)
    base = torch.randn(60, 70).to(dtype)
    for x in (
        *laid_out(base),
        base[3:40, 5:60].t(),
        base[::2, ::3].t(),
        base[:1].expand(5, -1).t(),
        base[:1],
        base[:0],
    ):
        utils = ("test_schema", "test_faketensor")
        torch.library.opcheck(ops.fp8_per_tensor, (x, "e4m3", torch.float32), test_utils=utils)
        torch.library.opcheck(packed_operands.fp8_codes, (x, "e4m3", True), test_utils=utils)
        torch.library.opcheck(ops.bf16_values, (x, dtype), test_utils=utils)
        made = torch.library.opcheck(packed_operands.fp8_codes_pair, (x, "e5m2"), test_utils=utils)
        assert set(made.values()) == {"SUCCESS"}
    for shape in ((1, 64), (64, 1), (3, 5)):
        codes = torch.zeros(shape, dtype=torch.uint8)
        torch.library.opcheck(packed_operands.turn, (codes, "e4m3"), test_utils=utils)
        assert kernels.load("transpose").turn(codes, 1).data_ptr() != codes.data_ptr()


on_gpu = pytest.mark.skipif(kernels.DEVICE != "cuda", reason="needs a GPU")


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("elem", CAST)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_on_a_gpu_by_its_own_conversion_or_without(elem, dtype, monkeypatch):
    module, own = kernels.load("fp8"), None
    for native in {module.converts(torch.device(kernels.DEVICE)), False}:
        monkeypatch.setattr(module, "converts", lambda device, native=native: native)
        for x in difficult(elem, (300, 1000)):
            assert_codes(x.to(dtype).to(kernels.DEVICE), elem)
        for x in laid_out(torch.randn(1024, 1536)):
            assert_codes(x.to(dtype).to(kernels.DEVICE), elem)
        found = packed_operands.fp8_codes_pair(
            torch.linspace(-3, 5, 2**20, device=kernels.DEVICE).view(1024, 1024), elem
        )
        assert own is None or all(torch.equal(a, b) for a, b in zip(found, own, strict=True))
        own = found


@on_gpu
@pytest.mark.gpu
def test_codes_beyond_two_to_the_31_elements():
    rows, columns = 2**31 // 8192 + 64, 8192
    x = torch.zeros(rows, columns, dtype=torch.bfloat16, device=kernels.DEVICE)
    x[-64:] = torch.randn(64, columns, device=kernels.DEVICE).bfloat16()
    codes, turned, _ = packed_operands.fp8_codes_pair(x, "e4m3")
    last, last_turned, _ = packed_operands.fp8_codes_pair(x[-64:].clone(), "e4m3")
    assert torch.equal(codes[-64:], last) and torch.equal(turned[:, -64:], last_turned)
    assert not codes[:-64].any() and not turned[:, :-64].any()
