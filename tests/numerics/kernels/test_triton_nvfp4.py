"""The NVFP4 kernels give the twin's bytes for every input, in two launches a tensor: interpreted, compiled on a GPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mxfp4.bench import isa
from mxfp4.numerics.hadamard import Hadamard
from mxfp4.numerics.kernels import BACKENDS
from mxfp4.numerics.nvfp4 import quantize_nvfp4 as twin
from mxfp4.numerics.operand_plan import OperandPlan
from tests.fakes.triton_kernels import DEVICE, load
from tests.numerics.kernels.test_triton_quantize import DTYPES, any_bits, ordinary, same

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NaN and infinities in NumPy


def plan(block="1d", stochastic=False, hadamard=0, signs=None, dtype=torch.bfloat16, stream=3) -> OperandPlan:
    if hadamard:
        signs = (1, -1, -1, 1) * (hadamard // 4) if signs == "fixed" else signs
    rotation = Hadamard(hadamard, signs) if hadamard else None
    rounding = "stochastic" if stochastic else "nearest"
    return OperandPlan(format="nvfp4", block=block, rounding=rounding, rotation=rotation, stream=stream, dtype=dtype)


def check(x, row, col, key=2**40 + 17):
    """Values and factors are the CPU twin's."""
    ours = load("nvfp4").quantize_nvfp4(x.to(DEVICE), row, col, torch.tensor(key, device=DEVICE))
    theirs = twin(x, row, col, torch.tensor(key))
    for name, a, b in zip(("row", "row factor", "col", "col factor"), sum(ours, ()), sum(theirs, ()), strict=True):
        assert same(a, b), f"{name} differs for {row} / {col}"
        assert a is None or (a.shape == b.shape and a.dtype == b.dtype)


one = st.builds(
    plan, st.sampled_from(["1d", "2d"]), st.booleans(), st.sampled_from([0, 16, 32, 128]),
    st.sampled_from([None, "fixed", "seed"]), st.sampled_from(DTYPES), st.integers(0, 2**32 - 1),
)  # fmt: skip


@settings(max_examples=15)
@given(
    row=st.none() | one, col=st.none() | one, dtype=st.sampled_from([*DTYPES, torch.float64]),
    data=st.sampled_from([any_bits, ordinary]), seed=st.integers(0, 2**31), layout=st.integers(0, 2),
    units=st.tuples(st.integers(1, 6), st.integers(1, 6)),
)  # fmt: skip
def test_any_combination(row, col, dtype, data, seed, layout, units):
    if row is None and col is None:
        return
    square = any(p is not None and p.block == "2d" for p in (row, col))
    unit_c = max(16, row.hadamard) if row else 16 if square else 5
    unit_r = max(16, col.hadamard) if col else 16 if square else 3
    rows, columns = unit_r * units[0] % 256 or unit_r, unit_c * units[1] % 256 or unit_c
    x = data((rows, columns + 3), torch.float32, seed)
    x = torch.where(x.isfinite(), x, 1.0).to(dtype)  # what is not finite spoils all: below
    x = x[:, 2:-1] if layout else x[:, 3:].clone()
    if layout == 2:
        x = x.t().contiguous().t()
    check(x, row, col)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("row, col", [(plan(), plan(hadamard=16)), (plan("2d"), None), (plan(stochastic=True), None)])
def test_what_is_not_finite_makes_every_value_nan(bad, row, col):
    x = ordinary((48, 80), torch.float32, 5)
    x[7, 33] = bad
    check(x, row, col)
    values, factor = twin(x, row, None, torch.tensor(1))[0]
    assert values.isnan().all() and factor.isnan()


@pytest.mark.parametrize("block", ["1d", "2d"])
def test_zero_blocks_zero_tensors_nothing_and_tiny_values(block):
    x = ordinary((64, 96), torch.float32, 6)
    x[:16, :32], x[20] = 0.0, -0.0
    how = plan(block)
    for t in (x, x * 0, x * 1e-38, x * 2.0**-140, torch.full((16, 16), 1e-45), x[:0], x[:, :0]):
        check(t, how, how)


def test_every_scale_and_element_boundary():
    """Blocks whose largest values walk through E4M3's ties, under a maximum that makes the tensor scale 1."""
    x = torch.zeros(1024, 32)
    x[0, 0] = 2688.0
    x[:, 16] = torch.linspace(0, 48, 1024)
    x[:, 17] = x[:, 16] * torch.arange(1024) / 1024
    check(x, plan(dtype=torch.float32), None)
    check(x.t(), None, plan(dtype=torch.float32))


def test_two_launches_a_tensor_whatever_its_orientations(monkeypatch):
    module, launches = load("nvfp4"), []
    for name in ("_amax", "_values"):
        honest = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, n=name, f=honest: (launches.append(n), f(*a))[1])
    x = torch.randn(64, 64, device=DEVICE)
    module.quantize_nvfp4(x, plan(), plan(hadamard=16), None)
    assert launches == ["_amax", "_values"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("factors", [(0, 0, 2), (1, 1, 0), (0, 1, 0), (1, 0, 1), (0, 0, 0)])
def test_scaling_a_product_is_the_twins(dtype, factors):
    y = ordinary((33, 70), torch.float32, 8).to(DEVICE)
    a, b = (torch.tensor(v, device=DEVICE) if used else None for v, used in zip((0.37, 1.9), factors, strict=False))
    ours = load("nvfp4").scale_product(y, a, b, 4 / 3, factors[2], dtype)
    theirs = BACKENDS["CompositeExplicitAutograd"].scale_product(y, a, b, 4 / 3, factors[2], dtype)
    assert ours.dtype == dtype and same(ours, theirs) and ours.data_ptr() != y.data_ptr()


@pytest.mark.parametrize("arch", ["sm_90", "sm_100", "gfx950"])
@pytest.mark.parametrize("row, col", [(plan(), plan(hadamard=16, signs="fixed")), (plan("2d"), None),
                                      (plan(stochastic=True), plan(stochastic=True, hadamard=16, signs="seed"))])  # fmt: skip
def test_chips_compile_it_without_contraction(arch, row, col):
    """Of a multiply and an add that were contracted, a tie could round the other way."""
    pytest.importorskip("triton.backends.amd")
    from mxfp4.numerics.kernels.triton import nvfp4 as k

    new = lambda shape, dtype: torch.empty(shape, dtype=dtype, device="meta")
    tensors = {
        "x": new((4096, 1024), torch.bfloat16), "partial": new((2, 512), torch.int32),
        "row_out": new((4096, 1024), torch.bfloat16), "row_factor": new((), torch.float32),
        "col_out": new((1024, 4096), torch.bfloat16) if col else None,
        "col_factor": new((), torch.float32) if col else None, "seed_ptr": new((), torch.int64) if row.stochastic else None,
    }  # fmt: skip
    target = isa.ARCHS[arch]
    for kernel, (_, arguments, options) in zip(
        (k.amax_kernel, k.values_kernel), k.launches(tensors, row, col), strict=True
    ):
        compiled = isa.compile_for(target, kernel, arguments, options)
        count = (isa._count_amd if target.backend == "hip" else isa._count_nvidia)(compiled)
        assert count["spills"] == count["scratch"] == 0
        if target.backend == "cuda":
            fused = [line for line in compiled.asm["ptx"].splitlines() if "fma.rn.f32" in line]
            assert not fused, fused[:3]
