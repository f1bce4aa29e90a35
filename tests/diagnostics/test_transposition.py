"""Transposition consistency: hand-made tensors, invariance of square blocks, effects on the gradients."""

import pytest
import torch

import mxfp4
from mxfp4.diagnostics.operand_error import Captured
from mxfp4.diagnostics.transposition import gemms_of, tile_rows, transposition_rows
from mxfp4.layers.recipe import recipe

SEED = torch.tensor(3)


def layer(seed=0) -> Captured:
    torch.manual_seed(seed)
    return Captured("layer", torch.randn(64, 96), torch.randn(128, 96), torch.randn(64, 128))


def measured(name: str, c: Captured | None = None) -> dict:
    return {k: v.item() for k, v in transposition_rows(c or layer(), recipe(name), SEED).items()}


@pytest.mark.parametrize("name", ["mxfp4+2d", "mxfp4+2d+rceil", "mxfp4+2d+sr", "mxfp4+2d+hh16", "ti2d-no-qk8"])
def test_square_blocks_are_invariant(name):
    rows = measured(name)
    assert rows
    differences = {k: v for k, v in rows.items() if k[2] != "reading_error"}
    # rotating both axes back rounds in FP32
    assert all(abs(v) < (1e-6 if "hh" in name else 1e-30) for v in differences.values()), differences
    assert rows["wgrad", "dw", "reading_error"] > 0.01


def test_one_dimensional_blocks_are_not_and_the_quantizer_says_the_same():
    c = layer()
    rows = measured("mxfp4", c)
    r = mxfp4.quantize(c.w, axis=-1, scale_rule="even").dequantize()
    q = mxfp4.quantize(c.w, axis=0, scale_rule="even").dequantize()
    assert rows["", "w", "mismatch"] == pytest.approx(((r - q).norm() / c.w.norm()).item(), rel=1e-5)
    assert rows["", "w", "mismatch_to_error"] == pytest.approx(((r - q).norm() / (r - c.w).norm()).item(), rel=1e-5)
    assert rows["dgrad", "dx", "mismatch"] == pytest.approx(
        ((c.g @ r - c.g @ q).norm() / (c.g @ c.w).norm()).item(), rel=1e-4
    )
    for tensor in ("x", "w", "g"):
        changes, scale, code = (rows["", tensor, m] for m in ("changes", "scale_changes", "code_changes"))
        assert 0 < max(scale, code) <= changes <= 1


def test_shares_of_a_hand_made_weight():
    w = torch.ones(32, 32)
    w[0, 0] = 1.0 * 2**10  # row 0 and column 0 share its scale; every other block has scale of 1
    c = Captured("layer", torch.ones(32, 32), w, torch.ones(32, 32))
    rows = measured("mxfp4+floor", c)
    # along rows, row 0 is coarse; along columns, column 0: they differ in both but for the corner
    assert rows["", "w", "scale_changes"] == pytest.approx(62 / 1024)
    assert rows["", "w", "code_changes"] == pytest.approx(62 / 1024)
    assert rows["", "x", "changes"] == 0


def test_minus_zero_is_zero():
    x = torch.full((32, 32), -1e-6)
    x[:, 0] = 1.0
    x[0, :] = 1.0
    rows = measured("mxfp4", Captured("layer", x, torch.ones(32, 32), torch.ones(32, 32)))
    assert rows["", "x", "code_changes"] == rows["", "x", "scale_changes"]


def test_only_tensors_in_fp4_both_ways_are_measured():
    names = {k[1] for k in measured("mxfp4-fprop-dgrad")}
    assert names == {"w", "g", "dx"} - {"g"}  # X meets FP8 in wgrad, G too
    assert not measured("bf16")
    rotated = measured("mxfp4+h16")
    assert ("", "w", "mismatch") in rotated and ("", "w", "changes") not in rotated
    assert gemms_of("x") == ("fprop", "wgrad")


def test_a_tile_holds_the_scales_of_the_quantizer():
    c = Captured("layer", torch.randn(32, 96), torch.randn(64, 96), torch.randn(32, 64))
    rows = {k[2]: v.item() for k, v in tile_rows(c).items()}
    by_row = mxfp4.quantize(c.w[:, :64], axis=-1, scale_rule="even").scale.int() - 127
    by_col = mxfp4.quantize(c.w[:, :64], axis=0, scale_rule="even").scale.int() - 127  # axis last: [64, 2]
    for i in range(64):
        for j in range(2):
            assert rows[f"tile_row:{i}:{j}"] == by_row[i, j]
            assert rows[f"tile_col:{j}:{i}"] == by_col[i, j]
    assert tile_rows(Captured("layer", c.x, torch.randn(32, 96), c.g)) == {}
