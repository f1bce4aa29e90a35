"""The rotation kernel gives its twin's bytes, of any matrix: interpreted here, compiled on a GPU; so does QuEST's rounding.

What a compiler for a chip could change, the order of additions by contraction into FMAs, is looked for in its code.
"""

from __future__ import annotations

import re

import pytest
import torch

from mxfp4 import MXFP4Linear, set_step
from mxfp4.bench import isa
from mxfp4.layers import quest
from mxfp4.numerics.hadamard import SIZES, rotate_last, rotate_matrix
from mxfp4.numerics.kernels import BACKENDS, Backend
from mxfp4.numerics.ops.rotate import rotated
from tests.fakes.triton_kernels import DEVICE, load
from tests.numerics.kernels.test_triton_fp8 import laid_out
from tests.numerics.kernels.test_triton_quantize import DTYPES, any_bits, ordinary, same

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # NaN and infinities in NumPy
on_gpu = pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")
WAYS = ((False, False), (True, False), (False, True))  # (both, inverse)


def some_signs(size: int) -> torch.Tensor:
    return 1.0 - 2.0 * (torch.arange(size) * 7 // 3 % 2)


def check(x: torch.Tensor, size: int, *, signs=None, inverse=False, both=False, dtype=torch.float32) -> None:
    """The kernel's bytes are the twin's, computed on the CPU."""
    theirs = rotate_matrix(x.cpu(), size, signs, inverse, both, dtype)
    signs = None if signs is None else signs.to(DEVICE)
    ours = load("rotate").rotate_matrix(x.to(DEVICE), size, signs, inverse, both, dtype)
    assert ours.dtype == theirs.dtype == dtype and ours.shape == theirs.shape == x.shape
    assert ours.is_contiguous() and theirs.is_contiguous() and same(ours, theirs)


def by_transposing(x: torch.Tensor, size: int) -> torch.Tensor:
    """H x H as it reads: the last axis, then the other made the last one."""
    return rotate_last(rotate_last(x.float(), size).t().contiguous(), size).t()


@pytest.mark.parametrize("size", SIZES)
def test_the_twin_rotates_the_second_axis_without_turning_the_matrix(size):
    for x in (ordinary((2 * size, 3 * size), torch.float32, 1), any_bits((size, 256), torch.bfloat16, 2).t()):
        assert same(rotate_matrix(x, size, None, False, True, torch.float32), by_transposing(x, size))


@pytest.mark.parametrize("both, inverse", WAYS)
@pytest.mark.parametrize("size", SIZES)
def test_bytes_of_every_size(size, both, inverse):
    """Whole tiles and tails; of random values, where an FMA would show, and of every exponent, subnormals and NaN."""
    for rows, columns in ((size, size), (3 * size, 256), (size, 256 + size)):
        check(ordinary((rows, columns), torch.float32, rows), size, both=both, inverse=inverse)
        check(any_bits((rows, columns), torch.float32, rows), size, both=both, inverse=inverse)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("out", [*DTYPES, torch.float64])
def test_of_every_dtype_into_every_dtype(dtype, out):
    for both in (False, True):
        check(ordinary((64, 160), dtype, 3), 16, both=both, dtype=out)
        check(any_bits((32, 64), dtype, 3), 32, both=both, dtype=out)


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_signs_come_before_the_rotation_and_after_its_inverse(size, inverse):
    x = ordinary((5, 2 * size), torch.bfloat16, 4)
    for t in (x, ordinary((2 * size, 5), torch.float32, 4).t()):
        check(t, size, signs=some_signs(size), inverse=inverse)


@pytest.mark.parametrize("rows", [1, 7, 33])
def test_any_number_of_rows_along_the_last_axis(rows):
    for dtype in (torch.bfloat16, torch.float32):
        check(ordinary((rows, 48), dtype, rows), 16)
        check(ordinary((48, rows), dtype, rows).t(), 16)


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_strides(dtype, both):
    """Cut out, transposed, every second, a row for all, a column for all."""
    base = ordinary((130, 150), dtype, 5)
    for x in (*laid_out(base), base[3:51, 5:21].t(), base[:, 1:2].expand(-1, 96), base[4:100:2, :: -1 + 4]):
        rows, columns = (n - n % 16 for n in x.shape)
        for t in (x[:rows, :columns], x[:rows, :columns].t()):
            if t.numel():
                check(t, 16, both=both)


@pytest.mark.parametrize("shape", [(0, 64), (64, 0), (0, 0)])
def test_of_nothing_there_is_nothing(shape):
    for both in (False, True):
        check(torch.empty(shape, dtype=torch.bfloat16), 32, both=both)
        assert rotated(torch.empty(shape), 32, both=both, dtype=torch.float16).shape == shape


def test_what_is_not_finite_spoils_its_own_group_alone():
    x = torch.randn(64, 96)
    x[17, 33], x[40, 95], x[40, 94] = torch.nan, torch.inf, -torch.inf
    for both in (False, True):
        check(x, 16, both=both)
        y = load("rotate").rotate_matrix(x.to(DEVICE), 16, None, False, both, torch.float32).cpu()
        bad = torch.zeros(64, 96, dtype=torch.bool)
        for row, column in ((17, 32), (40, 80)):
            rows = slice(row // 16 * 16, row // 16 * 16 + 16) if both else row
            bad[rows, column : column + 16] = True
        assert torch.equal(~y.isfinite(), bad)


def test_both_axes_undo_themselves_and_the_operator_refuses_other_sizes():
    x = torch.randn(64, 96)
    assert (rotated(rotated(x, 16, both=True), 16, both=True) - x).abs().max() < 2e-6
    with pytest.raises(
        ValueError, match=r"the last axis in groups of 64 needs a matrix of such multiples, got \(64, 96\)"
    ):
        rotated(x, 64)
    with pytest.raises(ValueError, match=r"both axes in groups of 32 .* got \(16, 96\)"):
        rotated(x[:16], 32, both=True)
    with pytest.raises(ValueError, match=r"got \(96,\)"):
        rotated(x[0], 32)
    with pytest.raises(ValueError, match="Hadamard size"):
        rotated(torch.zeros(64, 96), 12)
    with pytest.raises(RuntimeError, match="rotated records no gradient"):
        rotated(torch.zeros(64, 96, requires_grad=True), 16)


def test_the_operator_is_what_a_compiler_is_told_of_any_strides():
    base = torch.randn(64, 96)
    for t in (base, base.t(), base[:, :64], base[::2, ::2][:, :32], base.double(), base[:1].expand(32, -1), base[:0]):
        for dtype in (torch.float32, torch.bfloat16):
            for signs in (None, some_signs(16)):
                arguments = (t, 16, signs, True, signs is None, dtype)
                torch.library.opcheck(
                    torch.ops.mxfp4.rotate.default, arguments, test_utils=("test_schema", "test_faketensor")
                )


def difficult_blocks() -> torch.Tensor:
    """[n, 32]: of every spread, of every exponent, zeros, and blocks that are not finite or whose spread is not."""
    g = torch.Generator().manual_seed(6)
    x = torch.cat([torch.randn(200, 32, generator=g) * torch.logspace(-38, 38, 200)[:, None], torch.zeros(1, 32)])
    outlier = torch.randn(32, 32, generator=g)
    outlier[:, 5] *= torch.logspace(0, 6, 32)
    rest = any_bits((65, 32), torch.float32, 7)
    huge = torch.full((2, 32), 3e38) * torch.tensor([1.0, -1.0]).repeat(16)
    return torch.cat([x, -x[:50], outlier, rest, huge, torch.full((1, 32), -0.0)])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("transposed", [False, True])
def test_clipped_elements_count_as_zero(dtype, transposed):
    x = ordinary((96, 160), dtype, 12)
    x[5, 7] = torch.nan
    x = x.t().contiguous().t() if transposed else x
    unclipped = torch.rand(96, 160, generator=torch.Generator().manual_seed(1)) < 0.9
    unclipped[5, 7] = False
    for size in (16, 32):
        theirs = rotate_matrix(x, size, None, False, False, dtype, unclipped)
        ours = load("rotate").rotate_matrix(x.to(DEVICE), size, None, False, False, dtype, unclipped.to(DEVICE))
        assert same(ours, theirs) and theirs.isfinite().all()


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_quests_rounding_is_the_twins(dtype):
    blocks = difficult_blocks()
    blocks[3, 4], blocks[5, 6] = torch.nan, -torch.inf
    std = blocks.std(dim=-1, keepdim=True, correction=0)
    assert {True, False} == set(std.isfinite().flatten().tolist())
    for n in (len(blocks), 64, 1, 0):
        theirs = quest.round_blocks(blocks[:n], std[:n], quest.CLIP, quest.EPS, dtype)
        ours = load("quest").round_blocks(blocks[:n].to(DEVICE), std[:n].to(DEVICE), quest.CLIP, quest.EPS, dtype)
        assert same(ours[0], theirs[0]) and ours[0].dtype == dtype
        assert torch.equal(ours[1].cpu(), theirs[1]) and ours[1].dtype == torch.bool


# What a chip executes.


def compiled_rotation(arch: str, size: int, both: bool, turned: bool, dtype, out, *, signs=False):
    target = isa.ARCHS[arch]
    k = pytest.importorskip("mxfp4.numerics.kernels.triton.rotate")
    x = torch.empty((4096, 1024), dtype=dtype, device="meta")
    x = torch.empty((1024, 4096), dtype=dtype, device="meta").t() if turned else x
    out = torch.empty((4096, 1024), dtype=out, device="meta")
    vector = torch.empty(size, device="meta") if signs else None
    _, arguments, options = k.launch(x, out, size, vector, False, both, target.warp)
    return isa.compile_for(target, k.rotate_kernel, arguments, options), target


FUSED = re.compile(r"\bfma\.\w+|\bmad\.\w*\.f32|\bv_\w*(?:fma|fmac|mac|mad)\w*_f(?:16|32)\w*|\.ftz\b")


def machine_code(compiled, target) -> str:
    """AMD's instructions, or PTX, in which `mul.rn` and `add.rn` bind what comes after it."""
    return compiled.asm["amdgcn" if target.backend == "hip" else "ptx"]


def assert_stays_in_registers(compiled, target) -> None:
    """No contraction, no flushed subnormals, and no memory that stands in for registers."""
    count = (isa._count_amd if target.backend == "hip" else isa._count_nvidia)(compiled)
    assert count["spills"] == count["scratch"] == 0
    assert FUSED.findall(machine_code(compiled, target)) == []


@pytest.mark.parametrize("arch", ["sm_90", "gfx950"])
@pytest.mark.parametrize("size, both, turned, dtype, out, signs", [
    (16, True, False, torch.bfloat16, torch.float32, False),  # an operand
    (16, True, False, torch.float32, torch.bfloat16, False),  # a product
    (32, False, False, torch.bfloat16, torch.float32, True),  # QuEST and random signs
    (64, False, True, torch.float32, torch.float32, False),
    (128, True, False, torch.float32, torch.float32, False),
])  # fmt: skip
def test_a_chip_adds_and_multiplies_apart(arch, size, both, turned, dtype, out, signs):
    pytest.importorskip("triton.backends.amd")
    compiled, target = compiled_rotation(arch, size, both, turned, dtype, out, signs=signs)
    assert_stays_in_registers(compiled, target)
    assert compiled.metadata.shared <= 64 * 1024
    if out == torch.bfloat16:  # to nearest even: the interpreter only does what the tests tell it to
        assert ("v_cvt_pk_bf16_f32" if arch == "gfx950" else "cvt.rn.bf16x2.f32") in machine_code(compiled, target)


@pytest.mark.parametrize("arch", ["sm_90", "gfx950"])
def test_quests_scale_is_not_contracted(arch):
    """FMAs that the rounding asks for are exact; the one product that could join a sum is that of the deviation."""
    pytest.importorskip("triton.backends.amd")
    k = pytest.importorskip("mxfp4.numerics.kernels.triton.quest")
    target, n = isa.ARCHS[arch], 4096
    blocks, std = torch.empty((n, 32), device="meta"), torch.empty((n, 1), device="meta")
    out, kept = torch.empty_like(blocks, dtype=torch.bfloat16), torch.empty((n, 8), dtype=torch.int32, device="meta")
    _, arguments, options = k.launch(blocks, std, out, kept, quest.CLIP, quest.EPS)
    apart, joined = (
        isa.compile_for(target, k.round_kernel, arguments, options | how) for how in ({}, {"enable_fp_fusion": True})
    )
    count = (isa._count_amd if target.backend == "hip" else isa._count_nvidia)(apart)
    assert count["spills"] == count["scratch"] == 0
    assert len(FUSED.findall(machine_code(apart, target))) < len(FUSED.findall(machine_code(joined, target)))


# The whole layer.


def gradients(name: str, device: str = "cpu"):
    """(Y, dX, dW) of a layer in BF16."""
    torch.manual_seed(8)
    layer = MXFP4Linear(64, 96, bias=False, recipe=name, fqn="layers.0.feed_forward.w1", n_layers=9).to(device)
    set_step(layer, 5)
    x = torch.randn(50, 64).bfloat16().to(device).requires_grad_()
    with torch.autocast(device, dtype=torch.bfloat16):
        y = layer(x)
    y.backward(torch.randn(50, 96).bfloat16().to(device))
    return y.detach(), x.grad, layer.weight.grad


LAYERS = ("mxfp4+hh16", "mxfp4+2d+hh16", "ti2d+hh16", "mxfp4+hh32", "quartet", "nvfp4")


BACKEND = BACKENDS[DEVICE.upper()]  # what the operators call on this device
KERNELS = {"rotate_matrix": "rotate", "round_blocks": "quest", "quantize_nvfp4": "nvfp4", "scale_product": "nvfp4"}
USED = {
    "quartet": {"rotate_matrix", "round_blocks", "scale_product"}, "nvfp4": {"quantize_nvfp4", "scale_product"},
}  # fmt: skip


def assert_kernels_give_a_layer_the_twins_bytes(name: str, monkeypatch) -> None:
    """Forward and backward, on one device."""
    used = set()
    for function in KERNELS:
        monkeypatch.setattr(BACKEND, function, getattr(Backend(), function))
    theirs = gradients(name, DEVICE)
    for function, module in KERNELS.items():
        kernel = getattr(load(module), function)
        monkeypatch.setattr(BACKEND, function, lambda *a, f=function, k=kernel: (used.add(f), k(*a))[1])
    ours = gradients(name, DEVICE)
    assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(ours, theirs, strict=True))
    assert used == USED.get(name, {"rotate_matrix"})


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_computes_the_same_through_the_kernels(name, monkeypatch):
    assert_kernels_give_a_layer_the_twins_bytes(name, monkeypatch)


@pytest.mark.parametrize("name, rotations", [("mxfp4+2d+hh16", 6), ("mxfp4+hh16", 6)])
def test_each_tensor_and_each_product_is_rotated_once(name, rotations, monkeypatch):
    """Also where the two GEMMs that read a tensor see two quantizations of it."""
    calls = []
    monkeypatch.setattr(BACKENDS["CPU"], "rotate_matrix", lambda *a: (calls.append(a[4]), rotate_matrix(*a))[1])
    gradients(name)
    assert calls == [True] * rotations


# On a GPU: the tests above, and what only it can hold.


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_large_matrices_on_a_gpu(size, both):
    for dtype, out in (
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.float16, torch.float16),
    ):
        for seed, data in enumerate((ordinary, any_bits)):
            x = data((512, 1024 + size), dtype, seed)
            check(x, size, both=both, dtype=out)
            check(data((1024, 512), dtype, seed).t(), size, both=both, dtype=out)


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_on_a_gpu(name, monkeypatch):
    assert_kernels_give_a_layer_the_twins_bytes(name, monkeypatch)


@on_gpu
@pytest.mark.gpu
def test_quests_rounding_on_a_gpu():
    """Of blocks by the thousand: the twin's values and mask, from the same deviations."""
    blocks = torch.randn(5000, 32, device=DEVICE) * torch.logspace(-30, 30, 5000, device=DEVICE)[:, None]
    std = blocks.std(dim=-1, keepdim=True, correction=0)
    for dtype in (torch.float32, torch.bfloat16):
        ours, theirs = (
            f(blocks, std, quest.CLIP, quest.EPS, dtype) for f in (load("quest").round_blocks, quest.round_blocks)
        )
        assert same(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("both", [False, True])
def test_beyond_two_to_the_31_elements(both):
    rows, columns = 2**31 // 8192 + 64, 8192
    x = torch.zeros(rows, columns, dtype=torch.bfloat16, device=DEVICE)
    x[-64:] = torch.randn(64, columns, device=DEVICE).bfloat16()
    y = rotated(x, 16, both=both, dtype=torch.bfloat16)
    assert torch.equal(y[-64:], rotated(x[-64:].clone(), 16, both=both, dtype=torch.bfloat16))
    assert not y[:-64].any()
    t = rotated(x.t(), 16, both=both, dtype=torch.bfloat16)
    assert torch.equal(t[:, -64:], rotated(x[-64:].t().clone(), 16, both=both, dtype=torch.bfloat16))


@on_gpu
@pytest.mark.gpu
def test_captured_in_a_graph():
    x = torch.randn(256, 512, device=DEVICE).bfloat16()
    want = rotated(x, 16, both=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = rotated(x, 16, both=True)
    graph.replay()
    assert torch.equal(got, want)
