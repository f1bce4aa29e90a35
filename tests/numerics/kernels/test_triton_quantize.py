"""The Triton quantization kernel gives the bytes of its plain-torch twin: interpreted here, compiled on a GPU."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mxfp4.numerics import reference as twin
from mxfp4.numerics.formats import ELEMS
from mxfp4.numerics.hadamard import Hadamard
from mxfp4.numerics.operand_plan import OperandPlan
from mxfp4.numerics.scale_rules import SCALE_RULES
from tests.fakes.triton_kernels import DEVICE, load

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # NaN and infinities in NumPy

DTYPES = (torch.bfloat16, torch.float32, torch.float16)
SIZES = (0, 16, 32, 64, 128)


def any_bits(shape, dtype, seed: int):
    """Every exponent, subnormals, infinities and NaN, each block within a few binades of its own largest."""
    g = torch.Generator().manual_seed(seed)
    top = torch.randint(0, 256, (*shape[:-1], 1), generator=g)
    exponent = (top - torch.randint(0, 12, shape, generator=g)).clamp(min=0)
    bits = (
        (exponent << 23) | torch.randint(0, 2**23, shape, generator=g) | (torch.randint(0, 2, shape, generator=g) << 31)
    )
    x = (bits - ((bits >> 31) << 32)).to(torch.int32).view(torch.float32)
    x = torch.where(
        torch.rand(shape, generator=g) < 0.2, (x.view(torch.int32) & -(1 << 18)).view(torch.float32), x
    )  # ties
    return torch.where(torch.rand(shape, generator=g) < 0.1, -0.0, x).to(dtype)


def ordinary(shape, dtype, seed: int):
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=g) * torch.exp2(torch.randint(-8, 8, shape, generator=g).float())).to(dtype)


def orientation(elem, block, rule, stochastic, hadamard, signs, dtype, stream=5, prescaled=False):
    """A plan; `signs` of the rotation: none, fixed ones ("fixed" or True) or drawn from the seed ("seed")."""
    rotation = Hadamard(hadamard, "seed" if signs == "seed" else None) if hadamard else None
    if signs in (True, "fixed") and hadamard:
        bits = torch.randint(0, 2, (hadamard,), generator=torch.Generator().manual_seed(hadamard))
        rotation = Hadamard(hadamard, tuple((1 - 2 * bits).tolist()))
    return OperandPlan(
        elem=elem, block=block, scale_rule=rule, rounding="stochastic" if stochastic else "nearest", rotation=rotation,
        prescaled=prescaled and dtype is not None, stream=stream, dtype=dtype,
    )  # fmt: skip


def same(ours, theirs) -> bool:
    """Equal bytes; of two NaN values only that both are."""
    if ours is None or theirs is None:
        return ours is theirs
    ours, theirs = ours.cpu(), theirs.cpu()
    if ours.dtype == torch.uint8:
        return torch.equal(ours, theirs)
    sign = torch.signbit(ours) == torch.signbit(theirs)
    return bool((((ours == theirs) & sign) | (ours.isnan() & theirs.isnan())).all())


def check(x, row, col, key: int = 2**40 + 17):
    seed = torch.tensor(key, device=DEVICE)
    x = x.to(DEVICE) if x.device.type != DEVICE else x
    ours = load("quantize").quantize_matrix(x, row, col, seed)
    theirs = twin.quantize_matrix(x, row, col, seed)
    for name, a, b in zip(
        ("row values", "row scales", "col values", "col scales"), sum(ours, ()), sum(theirs, ()), strict=True
    ):
        assert same(a, b), f"{name} differ for {row} / {col}"


one = st.builds(
    orientation,
    st.sampled_from(sorted(ELEMS)), st.just("1d"), st.sampled_from(SCALE_RULES), st.booleans(), st.sampled_from(SIZES),
    st.sampled_from([None, "fixed", "seed"]), st.sampled_from([None, *DTYPES]), st.integers(0, 2**32 - 1), st.booleans(),
)  # fmt: skip


@given(
    row=st.none() | one, col=st.none() | one, dtype=st.sampled_from(DTYPES), batch=st.integers(1, 2),
    data=st.sampled_from([any_bits, ordinary]), seed=st.integers(0, 2**31), layout=st.integers(0, 3), units=st.integers(1, 9),
)  # fmt: skip
def test_any_combination_of_1d_blocks(row, col, dtype, batch, data, seed, layout, units):
    need_c = max(32, row.hadamard) if row else 8
    need_r = max(32, col.hadamard) if col else 7
    shape = (batch, need_r * (1 + units % 2), need_c * (1 + units // 4))
    if layout == 1:  # a transposed view
        x = data((shape[0], shape[2], shape[1]), dtype, seed).transpose(1, 2)
    elif layout == 2:  # rows apart, an odd offset
        x = data((shape[0], shape[1], shape[2] + 3), dtype, seed)[:, :, 1 : shape[2] + 1]
    elif layout == 3:  # one row for all
        x = data((shape[0], 1, shape[2]), dtype, seed).expand(shape)
    else:
        x = data(shape, dtype, seed)
    check(x, row, col)


TWO_D = [
    (elem, sr, h, signs, out)
    for (elem, sr), (h, signs), out in itertools.product(
        [("e2m1", False), ("e2m1", True), ("e5m2", False)],
        [(0, False), (16, True), (64, False)],
        [None, torch.bfloat16],
    )
]


@pytest.mark.parametrize("elem, sr, h, signs, out", TWO_D)
def test_2d_blocks(elem, sr, h, signs, out):
    data = ordinary if h else any_bits
    how = orientation(elem, "2d", "rceil", sr, h, signs, out)
    check(data((1, 64, 192), torch.bfloat16, 3), how, how)


@pytest.mark.parametrize("rule", SCALE_RULES)
@pytest.mark.parametrize("sr", [False, True])
def test_more_than_one_tile_with_tails(rule, sr):
    how = orientation("e2m1", "1d", rule, sr, 16, False, None)
    check(ordinary((1, 160, 288), torch.bfloat16, 4), how, how)


def test_nan_and_infinity_spoil_their_block_alone():
    x = ordinary((1, 32, 128), torch.float32, 5)
    x[0, 0, 0], x[0, 3, 33], x[0, 4, 127], x[0, 4, 126] = torch.nan, torch.inf, -torch.inf, torch.nan
    how = orientation("e2m1", "1d", "even", False, 0, False, None)
    check(x, how, how)
    (codes, scales), _ = load("quantize").quantize_matrix(x.to(DEVICE), how, None, None)
    bad = (scales == 255).nonzero().cpu()
    assert bad.tolist() == [[0, 0, 0], [0, 3, 1], [0, 4, 3]]
    for _, row, block in bad.tolist():
        assert codes[0, row, block * 16 : block * 16 + 16].eq(0).all()


def test_no_rows_and_no_columns_give_empty_results():
    how = orientation("e2m1", "1d", "even", False, 0, False, None)
    check(torch.zeros(1, 0, 64), how, None)
    check(torch.zeros(1, 64, 0), None, how)
