"""Packed operands in the layer: waiting for a backward, and multiplied as they are on a chip that can. Same results."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from mxfp4 import MXFP4Linear, convert, set_step
from mxfp4.layers import plan as plans
from mxfp4.layers.gemms import both_operands, multiply
from mxfp4.layers.operands import Quantized, quantize_tensor, values_of
from mxfp4.layers.recipe import GEMMS, RECIPES, recipe
from mxfp4.numerics.formats import ELEMS
from mxfp4.numerics.kernels import triton as package
from mxfp4.numerics.kernels.triton.launcher import Launcher
from mxfp4.numerics.operand_plan import OperandPlan
from mxfp4.numerics.ops import packed_operands
from tests.fakes import triton_kernels as kernels
from tests.numerics.kernels.test_triton_gemm import needs_dot_scaled, operand

NAMES = (
    "bf16", "fp8", "mxfp4-fprop", "mxfp4-dgrad+h16", "mxfp4-wgrad+sr", "mxfp4", "mxfp4+h16", "mxfp4+sr", "mxfp4+rht16",
    "mxfp4+2d", "mxfp4+2d+h16", "mxfp4+2d+hh16", "ti2d", "nvfp4", "tseng", "tetrajet", "quartet",
)  # fmt: skip
WO, WQ = "layers.0.attention.wo", "layers.0.attention.wq"  # ti2d: MXFP4, MXFP8


def layer(name: str, fqn: str = WO, **kw) -> MXFP4Linear:
    torch.manual_seed(1)
    return MXFP4Linear(64, 128, bias=False, recipe=name, fqn=fqn, n_layers=8, **kw)


def run(of, tokens: int = 64, call=None):
    """(Y, dX, dW) of a layer on fixed data, at a fixed step."""
    g = torch.Generator().manual_seed(2)
    x, grad = torch.randn(tokens, 64, generator=g).requires_grad_(), torch.randn(tokens, 128, generator=g)
    set_step(of, 3)
    y = (of if call is None else call)(x)
    y.backward(grad)
    return y.detach(), x.grad, of.weight.grad


def relative(a, b) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


@pytest.mark.parametrize("name, fqn", [*((name, WO) for name in NAMES), ("ti2d", WQ)])
def test_operands_that_wait_packed_give_the_same_bytes(name, fqn):
    for ours, theirs in zip(run(layer(name, fqn, save="packed")), run(layer(name, fqn)), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", ["mxfp4+h16", "ti2d"])
def test_compiled_too_and_then_codes_wait_and_not_values(name):
    """A compiler may move the unpacking to the forward, or share it, and save what comes out: seen without `late`."""
    ours, theirs = layer(name, save="packed"), layer(name, save="packed")
    with saved() as eager:
        expected = run(theirs)
    with saved() as compiled:
        got = run(ours, call=torch.compile(ours, fullgraph=True))
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)
    wanted = (64 * 64 + 64 * 128) * (0.5 + 1 / (1024 if name == "ti2d" else 32))
    assert wanted <= sum(eager) <= wanted + 8  # and a seed
    assert wanted <= sum(compiled) <= wanted + 8


class saved(torch.autograd.graph.saved_tensors_hooks):
    """Lists the bytes of what autograd keeps."""

    def __init__(self):
        self.sizes: list[int] = []
        super().__init__(lambda t: (self.sizes.append(t.numel() * t.element_size()), t)[1], lambda t: t)

    def __enter__(self):
        super().__enter__()
        return self.sizes


def test_values_wait_by_default():
    with saved() as sizes:
        run(layer("mxfp4"))
    assert sum(sizes) == (64 * 64 + 64 * 128) * 4  # FP32 carries them on the CPU


@pytest.fixture
def fp8_only(monkeypatch):
    """The road of a chip with FP8 units alone, their GEMM torch's; yields the list of the calls it gets."""
    calls, scaled_mm_of_torch = [], torch._scaled_mm

    def scaled_mm(a, b, **kw):
        assert kw["use_fast_accum"] is False
        calls.append("fp8")
        return scaled_mm_of_torch(a, b, **kw)

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    monkeypatch.setattr(plans, "fp8_path", torch.compiler.assume_constant_result(lambda device: "native"))
    return calls


@pytest.fixture
def native(monkeypatch, fp8_only):
    """The road of a chip with FP4 units as well, whose GEMM is interpreted; yields the list of the calls it gets."""
    calls, gemm = fp8_only, kernels.load("gemm").gemm

    def counted(a, b, out):
        calls.append((a.elem, b.elem))
        return gemm(a, b, out)

    monkeypatch.setattr(plans, "matmul_path", torch.compiler.assume_constant_result(lambda device: "native"))
    fake = type("gemm_triton", (), {"gemm": staticmethod(counted)})
    monkeypatch.setattr(package, "gemm", fake, raising=False)
    return calls


# How many of the three GEMMs the chip multiplies packed; the rest runs beside them as everywhere.
PACKED_GEMMS = {
    "bf16": 0, "fp8": 0, "mxfp4-fprop": 1, "mxfp4-dgrad+h16": 1, "mxfp4-wgrad+sr": 1, "mxfp4": 3, "mxfp4+h16": 3,
    "mxfp4+sr": 3, "mxfp4+rht16": 3, "mxfp4+2d": 3, "mxfp4+2d+h16": 3, "mxfp4+2d+hh16": 0, "ti2d": 3, "nvfp4": 0,
    "tseng": 0, "tetrajet": 3, "quartet": 0,
}  # fmt: skip
FP8_GEMMS = {"fp8": 3, "mxfp4-fprop": 2, "mxfp4-dgrad+h16": 2, "mxfp4-wgrad+sr": 2}


@needs_dot_scaled
@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
@pytest.mark.parametrize("name, fqn", [*((name, WO) for name in NAMES), ("ti2d", WQ)])
def test_a_native_chip_multiplies_packed_operands_to_the_emulated_result(name, fqn, native, monkeypatch):
    ours = run(layer(name, fqn))
    assert native.count("fp8") == FP8_GEMMS.get(name, 0)
    native = [call for call in native if call != "fp8"]
    assert len(native) == PACKED_GEMMS[name]
    assert set(native) <= ({("e4m3", "e4m3")} if fqn == WQ else {("e2m1", "e2m1")})
    monkeypatch.undo()
    for a, b in zip(ours, run(layer(name, fqn)), strict=True):
        assert relative(a, b) < 1e-6


@needs_dot_scaled
@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
def test_native_takes_odd_tokens_mixed_elements_and_a_compiler(native, monkeypatch):
    one = layer("mxfp4+h16")
    ours = run(one, tokens=33)
    compiled = copy.deepcopy(one)
    compiled.weight.grad = None
    for a, b in zip(run(compiled, 33, torch.compile(compiled, fullgraph=True)), ours, strict=True):
        assert torch.equal(a, b)
    a4, b8 = operand(33, 96, 1), operand(64, 96, 2, "e4m3")
    sides = [(Quantized(q.qdata, q.scale), OperandPlan(elem=q.elem)) for q in (a4.to("cpu"), b8.to("cpu"))]
    plan = plans.GemmPlan("fprop", *(side[1] for side in sides), "mx", 0)
    mixed = multiply(plan, *(side[0] for side in sides), torch.float32)
    assert native[-1] == ("e2m1", "e4m3")
    assert relative(mixed, a4.dequantize().double() @ b8.dequantize().double().t()) < 1e-6
    monkeypatch.undo()
    for a, b in zip(ours, run(layer("mxfp4+h16"), tokens=33), strict=True):
        assert relative(a, b) < 1e-6


HOLD_FP8 = [
    name for name in RECIPES if name != "fp8-block" and plans.takes_packed(recipe(name).wgrad, mx=False, fp8=True)
]


def test_the_recipes_that_hold_fp8():
    assert len(HOLD_FP8) == 12 and {"fp8", "fp8+delayed", "mxfp4-fprop", "mxfp4-fprop-dgrad+sr"} <= set(HOLD_FP8)


@pytest.mark.parametrize("save", plans.SAVES)
@pytest.mark.parametrize("name", [*HOLD_FP8, "mxfp4-dgrad+2d", "mxfp4-wgrad+sr"])
def test_a_chip_with_fp8_units_alone_multiplies_what_is_in_fp8(name, save, fp8_only, monkeypatch):
    """Two GEMMs may want a tensor in two forms: FP8 codes and MXFP4 values, in either order."""
    ours = run(layer(name, save=save))
    gemms = [getattr(recipe(name), which) for which in GEMMS]
    assert len(fp8_only) == sum(plans.takes_packed(pair, mx=False, fp8=True) for pair in gemms) > 0
    monkeypatch.undo()
    for a, b in zip(ours, run(layer(name)), strict=True):
        assert relative(a, b) < 1e-6


@pytest.mark.parametrize("name", ["mxfp4", "mxfp4+h16", "ti2d", "bf16", "nvfp4"])
def test_other_recipes_do_not_see_fp8_units(name, fp8_only, monkeypatch):
    ours = run(layer(name))
    assert fp8_only == []
    monkeypatch.undo()
    assert all(torch.equal(a, b) for a, b in zip(ours, run(layer(name)), strict=True))


@pytest.mark.parametrize("name", ["fp8", "mxfp4-fprop"])
def test_compiled_for_fp8_units_too(name, fp8_only):
    ours, theirs = layer(name), layer(name)
    results = run(ours, call=torch.compile(ours, fullgraph=True)), run(theirs)
    assert len(fp8_only) == 2 * FP8_GEMMS[name]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_fp8_codes_are_made_in_both_orientations_at_once_and_never_turned(fp8_only, monkeypatch):
    """One operator a tensor, as each is read by two GEMMs; codes wait for the backward at a byte an element."""
    made, pair = [], packed_operands.fp8_codes_pair
    monkeypatch.setattr(packed_operands, "fp8_codes_pair", lambda *a: (made.append(a[0].shape), pair(*a))[1])
    for name in ("fp8_codes", "turn", "unpack"):
        monkeypatch.setattr(packed_operands, name, None)
    with saved() as sizes:
        run(layer("fp8"))
    assert made == [(64, 64), (128, 64), (64, 128)]
    assert sum(sizes) == 64 * 64 + 64 * 128 + 2 * 4  # and the factors


def test_results_come_in_the_type_that_is_asked_for(fp8_only):
    """BF16 from the library itself; FP16, which it is not asked for, by way of FP32."""
    one = layer("fp8")
    for dtype in (torch.bfloat16, torch.float16):
        x = torch.randn(32, 64).to(dtype).requires_grad_()
        with torch.autocast("cpu", dtype=dtype):
            y = one(x)
        y.sum().backward()
        assert y.dtype == x.grad.dtype == dtype and one.weight.grad.dtype == torch.float32


def test_fp8_units_are_not_asked_for_sizes_that_they_refuse(fp8_only, monkeypatch):
    ours = run(layer("fp8"), tokens=33)
    assert fp8_only == ["fp8", "fp8"]  # Wgrad contracts 33
    monkeypatch.undo()
    for a, b in zip(ours, run(layer("fp8"), tokens=33), strict=True):
        assert relative(a, b) < 1e-6


def gemm_of(chosen, pair) -> str:
    """The GEMM of a recipe whose operands `pair` is."""
    return next(gemm for gemm in GEMMS if getattr(chosen, gemm) is pair)


@pytest.mark.parametrize("name", ["fp8", "mxfp4+h16", "mxfp4+sr", "mxfp4+2d+sr", "mxfp4-fprop", "tetrajet", "ti2d"])
@pytest.mark.parametrize("tensor", ["x", "w", "g"])
@pytest.mark.parametrize("packed", [(True, True), (False, True), (True, False)])
def test_every_way_to_quantize_a_tensor_gives_the_same_values(name, tensor, packed, monkeypatch):
    torch.manual_seed(5)
    t, seed, chosen = torch.randn(64, 96), torch.tensor(9), recipe(name)
    which = [g for g, tensors in zip(GEMMS, ("xw", "gw", "gx"), strict=True) if tensor in tensors]
    packed = tuple(p and plans.packable(chosen.operands()[g, tensor]) for p, g in zip(packed, which, strict=True))
    units = dict(zip(which, packed, strict=True))
    monkeypatch.setattr(plans, "_units", lambda pair, *_: "mx" if units.get(gemm_of(chosen, pair)) else "library")
    plans._layer_plan.cache_clear()
    plan = getattr(plans._layer_plan(chosen, torch.float32, (False, False), (True, True), "values"), tensor)
    monkeypatch.undo()
    plans._layer_plan.cache_clear()
    expected = both_operands(t, tensor, chosen, seed)
    for one, how, keep, (value, factor) in zip(
        quantize_tensor(t, plan, seed), (plan.first, plan.second), packed, expected, strict=True
    ):
        assert (how.dtype is None) == keep
        ours = values_of(one, how, torch.float32)
        assert torch.equal(ours.data, value) and ours.scale == factor
        assert ours.data.stride() == value.stride()  # or a library's GEMM may add in another order


@pytest.mark.parametrize("elem", sorted(ELEMS))
@pytest.mark.parametrize("shape", [(64, 64), (32, 160), (96, 32)])
@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
def test_turned_codes_are_the_codes_of_the_transpose(elem, shape):
    q = operand(*shape, 3, elem)
    turned = kernels.load("transpose").turn(q.qdata, 2 if elem == "e2m1" else 1)
    assert torch.equal(turned.cpu(), packed_operands.turn(q.qdata.cpu(), elem))
    assert torch.equal(packed_operands.turn(packed_operands.turn(q.qdata, elem), elem), q.qdata)


def test_turning_fits_the_grid_of_a_gpu_however_long_the_rows(monkeypatch):
    """Its axes but the first count to 65535."""
    grids, module = [], kernels.load("transpose")
    fake = type("kernel", (), {"__getitem__": lambda self, grid: grids.append(grid) or (lambda *a, **kw: None)})
    monkeypatch.setattr(module, "_transpose", Launcher(fake()))
    for shape in ((2, 2**23), (2**23, 2)):
        module.turn(torch.empty(shape, dtype=torch.uint8), 1)
    assert len(grids) == 2 and all(math.prod(grid) == 2**17 and max(grid[1:], default=1) <= 65535 for grid in grids)


def test_save_is_checked_and_reaches_every_layer():
    with pytest.raises(ValueError, match="save='fp4' is not known; allowed: 'values', 'packed'"):
        MXFP4Linear(32, 32, save="fp4")
    model = convert(torch.nn.Sequential(torch.nn.Linear(32, 32)), "mxfp4", save="packed")
    assert model[0].save == "packed"
