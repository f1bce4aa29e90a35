"""Operand and product metrics: hand-made blocks, and the public quantizer as the oracle."""

import math

import pytest
import torch

import mxfp4
from mxfp4.diagnostics import operand_error
from mxfp4.diagnostics.operand_error import Captured, fresh_seed, from_basis, in_basis
from mxfp4.layers.gemms import AXES, STREAMS
from mxfp4.layers.recipe import Gemm, Operand, Recipe, recipe

SEED = torch.tensor(5)


def layer(t=64, k=96, n=64, scale=1.0, seed=0) -> Captured:
    torch.manual_seed(seed)
    return Captured("layer", torch.randn(t, k) * scale, torch.randn(n, k), torch.randn(t, n))


def same(op: Operand) -> Recipe:
    return Recipe("same", *[Gemm(op, op)] * 3)


@pytest.mark.parametrize(
    "name",
    ["mxfp4", "mxfp4+h16", "mxfp4+rht16", "mxfp4+frht32", "mxfp4+2d", "mxfp4+2d+hh16", "mxfp4+sr+prescale", "fp8"],
)
def test_prepared_operands_lie_near_the_unquantized_ones_in_the_same_basis_and_return(name):
    c, r = layer(), recipe(name)
    for key, pair in operand_error.prepared(c, r, SEED).items():
        op, t = r.operands()[key], getattr(c, key[1])
        how = (op, AXES[key], SEED, STREAMS[key])
        basis = in_basis(t, *how)
        torch.testing.assert_close(from_basis(basis, *how), t, rtol=0, atol=1e-5)
        error = (operand_error.values(pair) - basis).norm() / basis.norm()
        assert 0 < error < 0.25, key  # another basis would give 1.4


@pytest.mark.parametrize("rule", ["floor", "even", "ceil", "rceil"])
def test_error_and_bias_are_those_of_the_public_quantizer(rule):
    c = layer()
    rows = operand_error.rule_rows(c, Operand("mxfp4", scale_rule=rule))
    for (gemm, name), axis in AXES.items():
        t = getattr(c, name)
        q = mxfp4.quantize(t, axis=axis, scale_rule=rule).dequantize()
        assert rows[gemm, name, "error"].item() == pytest.approx(((q - t).norm() / t.norm()).item(), rel=1e-5)
        assert rows[gemm, name, "bias"].item() == pytest.approx(((q * t).sum() / (t * t).sum() - 1).item(), abs=1e-6)


def test_clipped_and_flushed_count_hand_made_values():
    x = torch.zeros(32, 32)
    x[:, 0], x[:, 1], x[:, 2] = 7.0, 6.5, 0.2  # floor: scale 1, so 7 and 6.5 saturate and 0.2 vanishes
    c = Captured("layer", x, torch.ones(32, 32), torch.ones(32, 32))
    found = {rule: operand_error.rule_rows(c, Operand("mxfp4", scale_rule=rule)) for rule in ("floor", "even", "rceil")}
    assert found["floor"]["fprop", "x", "clipped"].item() == pytest.approx(2 / 32)
    assert found["floor"]["fprop", "x", "flushed"].item() == pytest.approx(1 / 3)
    # even rounds 7 up: scale 2, nothing saturates
    assert found["even"]["fprop", "x", "clipped"].item() == 0
    assert found["rceil"]["fprop", "x", "clipped"].item() == 0
    assert found["floor"]["fprop", "w", "flushed"].item() == 0


def test_a_prescale_moves_the_clipping_limit_with_the_scale():
    x = torch.zeros(32, 32)
    x[:, 0] = 7.0
    c = Captured("layer", x, torch.ones(32, 32), torch.ones(32, 32))
    op = Operand("mxfp4", scale_rule="floor")
    assert operand_error.operand_rows(c, same(op), SEED)["fprop", "x", "clipped"] > 0
    scaled = Operand("mxfp4", scale_rule="floor", prescaled=True)  # 5.25: below 6
    assert operand_error.operand_rows(c, same(scaled), SEED)["fprop", "x", "clipped"] == 0


@pytest.mark.parametrize("size", [1.0, 2.0**-60])
def test_block_statistics_of_hand_made_blocks(size):
    x = torch.full((32, 32), size)
    x[:, 0] = 8.0 * size
    x[-1] = 0.0  # zero blocks are left out
    c = Captured("layer", x, torch.ones(32, 32), torch.ones(32, 32))
    rows = operand_error.operand_rows(c, recipe("mxfp4"), SEED)
    m2, m4 = (31 + 64) / 32, (31 + 4096) / 32
    assert rows["fprop", "x", "kurtosis"].item() == pytest.approx(m4 / m2**2, rel=1e-5)
    assert rows["fprop", "x", "peak"].item() == pytest.approx(8 / m2**0.5, rel=1e-5)
    assert rows["fprop", "x", "log2_amax_q50"].item() == 3.0 + math.log2(size)


def test_a_rotation_spreads_an_outlier_and_both_sides_are_reported():
    c = layer()
    c.x[:, 5] = 40.0
    rows = operand_error.operand_rows(c, recipe("mxfp4+h16"), SEED)
    assert rows["fprop", "x", "peak"] < rows["fprop", "x", "peak_before"]
    assert rows["fprop", "x", "kurtosis"] < rows["fprop", "x", "kurtosis_before"]


def test_products_of_a_deterministic_recipe_have_one_error_and_one_pattern():
    c, r = layer(), recipe("mxfp4+h16")
    rows, dw = operand_error.product_rows(c, r, [fresh_seed(SEED, 1, i) for i in range(3)])
    for gemm, name in operand_error.PRODUCTS.items():
        assert rows[gemm, name, "systematic"].item() == pytest.approx(rows[gemm, name, "error"].item())
        assert rows[gemm, name, "pattern_redraw"].item() == pytest.approx(1)
        assert 0.9 < rows[gemm, name, "cosine"] < 1
    exact = c.g.T @ c.x
    assert rows["wgrad", "dw", "error"].item() == pytest.approx((dw.norm() / exact.norm()).item(), rel=1e-4)
    torch.testing.assert_close(dw, operand_error.dw_error(c, r, operand_error.prepared(c, r, None)))


def test_stochastic_rounding_is_noise_without_clipping_and_partly_bias_with_it():
    c = layer(128, 128, 128)
    seeds = [fresh_seed(SEED, 1, i) for i in range(8)]
    free, _ = operand_error.product_rows(c, recipe("mxfp4+rceil+sr"), seeds)
    clipping, _ = operand_error.product_rows(c, recipe("mxfp4+floor+sr"), seeds)
    assert free["wgrad", "dw", "systematic"] < 0.15 * free["wgrad", "dw", "error"]
    assert abs(free["wgrad", "dw", "bias"]) < 0.003
    assert clipping["wgrad", "dw", "bias"] < -0.01  # values at the block maximum are cut


def test_weight_errors_are_in_the_basis_of_the_weight():
    c = layer()
    for name in ("mxfp4", "mxfp4+rht16"):
        errors = operand_error.weight_errors(c, recipe(name), SEED)
        for gemm in ("fprop", "dgrad"):
            assert errors[gemm].shape == c.w.shape
            assert 0.05 < errors[gemm].norm() / c.w.norm() < 0.25
    q = mxfp4.quantize(c.w, axis=0, scale_rule="even").dequantize() - c.w
    torch.testing.assert_close(operand_error.weight_errors(c, recipe("mxfp4"), SEED)["dgrad"], q)


def test_padding_reaches_whole_blocks_and_changes_no_product():
    x, g = torch.randn(33, 64), torch.randn(33, 32)
    r = recipe("mxfp4")
    c = Captured("layer", operand_error.pad_tokens(x, r), torch.randn(32, 64), operand_error.pad_tokens(g, r))
    assert len(c.x) == len(c.g) == 64
    torch.testing.assert_close(c.exact("wgrad"), g.T @ x)
    assert len(operand_error.pad_tokens(x, recipe("mxfp4-bwd+rht128"))) == 128


def test_fresh_seeds_differ_by_layer_step_and_draw():
    seeds = {fresh_seed(torch.tensor(k), s, d).item() for k in (1, 2) for s in (1, 2) for d in (0, 1)}
    assert len(seeds) == 8
