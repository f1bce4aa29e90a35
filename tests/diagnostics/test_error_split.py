"""The split of an operand's error: exact for every rule and shape, and hand-made blocks whose parts are known."""

import math

import pytest
import torch

from mxfp4.diagnostics import error_split, operand_error
from mxfp4.diagnostics.error_split import METRICS, PARTS, split
from mxfp4.diagnostics.operand_error import Captured, in_basis
from mxfp4.layers.gemms import AXES, STREAMS, quantized_operand
from mxfp4.layers.recipe import Gemm, Operand, Recipe, recipe
from mxfp4.numerics.scale_rules import SCALE_RULES

SEED = torch.tensor(5)


def made(kind: str, rows: int = 64, cols: int = 96) -> torch.Tensor:
    torch.manual_seed(1)
    t = torch.randn(rows, cols)
    if kind == "outlier":
        t[3, 5], t[40, 70] = 300.0, -5000.0
    if kind == "zero blocks":
        t[:32, :32] = 0.0
        t[50] = 0.0
    if kind == "constant":
        t = torch.full_like(t, -0.7)
    if kind == "gradient":
        t *= 1e-22  # the square is below FP32
    if kind == "subnormal":
        t *= 2.0**-136
    if kind == "bf16":
        t = t.bfloat16().float()
    return t


KINDS = ("random", "outlier", "zero blocks", "constant", "gradient", "subnormal", "bf16")


def quantized(t, op, seed=SEED):
    return operand_error.values(quantized_operand(t, op, -1, seed, 0))


def rounded(u: torch.Tensor) -> torch.Tensor:
    """FP64 to the nearest E2M1 value by looking at all of them, ties to the even code."""
    grid = torch.tensor([0, 1, 2, 4, 0.5, 1.5, 3, 6], dtype=torch.float64)  # even codes first: argmin takes the first
    return grid[(u.abs()[..., None] - grid).abs().argmin(-1)].copysign(u)


def by_hand(t: torch.Tensor, q: torch.Tensor, size: int, block: str) -> dict[str, float]:
    """The parts for rounding to nearest, block by block in FP64."""
    height = size if block == "2d" else 1
    dead = grid = gone = 0.0
    for i in range(0, len(t), height):
        for j in range(0, t.shape[1], size):
            b = t[i : i + height, j : j + size].double()
            if b.abs().max() > 0:
                scale = b.abs().max() / 6
                value = rounded((b * 6 / b.abs().max()).float().double())
                square = (value * scale - b).square()
                dead += square[value == 0].sum().item()
                grid += square[value != 0].sum().item()
                gone += ((value == 0) & (b != 0)).sum().item()
    norm = t.double().square().sum().item()
    total = (q.double() - t.double()).square().sum().item()
    parts = {"split_scale": total - dead - grid, "split_dead": dead, "split_grid": grid}
    return {name: value / norm for name, value in parts.items()} | {"dead_share": gone / (t != 0).sum().item()}


@pytest.mark.parametrize("block", ["1d", "2d"])
@pytest.mark.parametrize("rule", SCALE_RULES)
@pytest.mark.parametrize("kind", KINDS)
def test_parts_are_those_of_each_block_by_hand_and_add_up_to_the_squared_error(kind, rule, block):
    t = made(kind)
    op = Operand("mxfp4", block=block, scale_rule=rule)
    q = quantized(t, op)
    found = {name: value.item() for name, value in split(q, t, op).items()}
    squared_error = ((q - t).double().square().sum() / t.double().square().sum()).item()
    assert tuple(found) == METRICS
    assert sum(found[part] for part in PARTS) == pytest.approx(squared_error, rel=1e-5, abs=1e-12)
    wanted = by_hand(t, q, 32, block)
    for name, value in found.items():
        assert value == pytest.approx(wanted[name], rel=1e-4, abs=1e-7), name


@pytest.mark.parametrize("block", ["1d", "2d"])
@pytest.mark.parametrize("kind", ["random", "outlier", "zero blocks", "bf16"])
def test_nvfp4_has_blocks_of_16_and_its_scale_part_is_what_e4m3_costs(kind, block):
    t = made(kind)
    op = Operand("nvfp4", block=block)
    q = quantized(t, op)
    found = {name: value.item() for name, value in split(q, t, op).items()}
    wanted = by_hand(t, q, 16, block)
    for name, value in found.items():
        assert value == pytest.approx(wanted[name], rel=1e-4, abs=1e-7), name
    if kind == "random":  # a finer scale costs less than a power of two
        mx = Operand("mxfp4", block=block)
        assert abs(found["split_scale"]) < 0.2 * abs(split(quantized(t, mx), t, mx)["split_scale"].item())


def one_block(*values: float) -> torch.Tensor:
    t = torch.zeros(1, 32)
    t[0, : len(values)] = torch.tensor(values)
    return t


def parts_of(t: torch.Tensor, rule: str) -> dict[str, float]:
    op = Operand("mxfp4", scale_rule=rule)
    return {name: value.item() for name, value in split(quantized(t, op), t, op).items()}


def test_hand_made_blocks():
    # 12, 5, 0.4 under the ideal scale 2: 6, 2.5 -> 2 (ties to even), 0.2 -> 0: error 0, 1, 0.4. Rules floor to rceil
    # have the scale 2, which is the ideal one; ceil has 4: 3, 1.25 -> 1, 0.1 -> 0: error 0, 1, 0.4 as well.
    norm = 144 + 25 + 0.16
    for rule in SCALE_RULES:
        found = parts_of(one_block(12.0, 5.0, 0.4), rule)
        assert found["split_dead"] == pytest.approx(0.16 / norm, rel=1e-5)
        assert found["split_grid"] == pytest.approx(1 / norm, rel=1e-5)
        assert found["split_scale"] == pytest.approx(0, abs=1e-8)
        assert found["dead_share"] == pytest.approx(1 / 3)
    # 7 alone: exact under 7/6. floor has the scale 1, where it saturates at 6; the others 2, where 3.5 -> 4
    assert parts_of(one_block(7.0), "floor") == pytest.approx(
        {"split_scale": 1 / 49, "split_dead": 0, "split_grid": 0, "dead_share": 0}, abs=1e-9
    )
    assert parts_of(one_block(7.0), "rceil")["split_scale"] == pytest.approx(1 / 49)
    # 4 and 3: exact under the scale 1; under 4/6 they are 6 and 4.5 -> 4, an error of 0.5 * 4/6
    found = parts_of(one_block(4.0, 3.0), "even")
    assert found["split_grid"] == pytest.approx((1 / 3) ** 2 / 25, rel=1e-5)
    assert found["split_scale"] == pytest.approx(-((1 / 3) ** 2) / 25, rel=1e-5)
    # below 2^-127 * 0.25 every value becomes zero, whatever the rule
    assert parts_of(one_block(2.0**-140), "even")["split_scale"] == pytest.approx(1)


def test_rules_differ_in_the_scale_part_alone_and_square_blocks_have_more_dead_values():
    t = made("random") * torch.logspace(-2, 0, 64)[:, None]
    found = {rule: parts_of(t, rule) for rule in SCALE_RULES}
    for name in ("split_dead", "split_grid", "dead_share"):
        assert len({f[name] for f in found.values()}) == 1
    assert len({f["split_scale"] for f in found.values()}) == 4
    square = Operand("mxfp4", block="2d")
    wide = split(quantized(t, square), t, square)
    for name in ("split_dead", "dead_share"):
        assert wide[name] > 2 * found["even"][name]


def test_a_zero_tensor_has_no_split():
    assert all(math.isnan(value) for value in parts_of(one_block(0.0), "even").values())


def test_stochastic_rounding_is_split_by_its_expectation():
    t = made("random", 32, 64)
    op = Operand("mxfp4", scale_rule="rceil", rounding="stochastic")
    # a scale that is the ideal one: the largest magnitude of every block is 6
    t = t.view(32, 2, 32) / t.view(32, 2, 32).abs().amax(-1, keepdim=True) * 6
    t = t.reshape(32, 64)
    draws = [quantized(t, op, torch.tensor(i)) for i in range(400)]
    norm = t.square().sum()
    total = torch.stack([(q - t).square().sum() / norm for q in draws])
    dead = torch.stack([(t.square() * (q == 0)).sum() / norm for q in draws])
    gone = torch.stack([(q == 0).float().mean() for q in draws])
    found = split(draws[0], t, op)
    assert found["split_dead"].item() == pytest.approx(dead.mean().item(), rel=0.03)
    assert found["split_grid"].item() == pytest.approx((total - dead).mean().item(), rel=0.03)
    assert found["dead_share"].item() == pytest.approx(gone.mean().item(), rel=0.03)
    assert sum(found[part].item() for part in PARTS) == pytest.approx(total[0].item(), rel=1e-5)
    assert abs(found["split_scale"].item()) < 4 * total.std().item()


def layer(seed=0) -> Captured:
    torch.manual_seed(seed)
    return Captured("layer", torch.randn(64, 128), torch.randn(64, 128), torch.randn(64, 64))


@pytest.mark.parametrize(
    "name",
    [
        "mxfp4",
        "mxfp4+sr",
        "mxfp4+h16",
        "mxfp4+rht16+sr",
        "mxfp4+2d",
        "mxfp4+2d+hh16",
        "mxfp4+sr+prescale",
        "nvfp4",
        "ti2d",
    ],
)
def test_parts_of_every_fp4_operand_add_up_to_its_squared_error(name):
    c, r = layer(), recipe(name)
    rows = operand_error.operand_rows(c, r, SEED)
    assert all(torch.equal(rows[key], value) for key, value in operand_error.split_rows(c, r, SEED).items())
    split_of = {key[:2] for key in rows if key[2] == "split_grid"}
    assert split_of == {key for key, op in r.operands().items() if op.format in ("mxfp4", "nvfp4")} != set()
    for gemm, tensor in split_of:
        total = sum(rows[gemm, tensor, part].item() for part in PARTS)
        assert total == pytest.approx(rows[gemm, tensor, "error"].item() ** 2, rel=1e-4), (gemm, tensor)


def test_a_rotation_is_applied_before_the_split():
    c = layer()
    c.x[:, 5] = 40.0
    r = recipe("mxfp4+h16")
    plain, turned = operand_error.split_rows(c, recipe("mxfp4"), SEED), operand_error.split_rows(c, r, SEED)
    key = "fprop", "x"
    basis = in_basis(c.x, r.fprop.a, AXES[key], SEED, STREAMS[key])
    q = operand_error.values(operand_error.prepared(c, r, SEED)[key])
    wanted = by_hand(basis, q, 32, "1d")
    for metric, value in wanted.items():
        assert turned[(*key, metric)].item() == pytest.approx(value, rel=1e-3, abs=1e-6), metric
    assert turned[(*key, "dead_share")] < 0.5 * plain[(*key, "dead_share")]  # the outlier is spread


def test_operands_without_a_split_are_left_out():
    assert operand_error.split_rows(layer(), recipe("fp8"), None) == {}
    assert operand_error.split_rows(layer(), recipe("bf16"), None) == {}
    twice = operand_error.split_rows(layer(), recipe("tetrajet"), SEED)  # the backward quantizes the quantized X and W
    assert {key[:2] for key in twice} == {("fprop", "x"), ("fprop", "w"), ("dgrad", "g"), ("wgrad", "g")}
    mixed = Recipe("mixed", Gemm(Operand("mxfp4"), Operand("bf16")), Gemm(), Gemm())
    assert {key[:2] for key in operand_error.split_rows(layer(), mixed, None)} == {("fprop", "x")}
    assert not error_split.has_split(Operand("mxfp8", "e4m3"))


@pytest.mark.parametrize("rule", SCALE_RULES)
def test_rule_rows_hold_the_split_of_every_rule(rule):
    c, op = layer(), Operand("mxfp4", scale_rule=rule)
    rows = operand_error.rule_rows(c, op)
    same = operand_error.split_rows(c, Recipe("same", *[Gemm(op, op)] * 3), None)
    assert {key: value.item() for key, value in same.items()} == pytest.approx(
        {key: rows[key].item() for key in same}, rel=1e-5, abs=1e-7
    )
