"""The pictures of a layer's three GEMMs say what the recipes are."""

from __future__ import annotations

import pytest

from mxfp4.layers.recipe import RECIPES
from mxfp4.pages.chapters import gemms


def test_a_diagram_says_blocks_rotation_and_rounding_of_each_operand():
    lines = repr(gemms.GemmDiagram("mxfp4+h16")).splitlines()
    assert lines[1] == (
        "Dgrad: dX = G W, contracted over C_out: G MXFP4, blocks 1x32 along C_out, H16; W MXFP4, blocks 1x32 along C_out, H16"
    )
    square = gemms.GemmDiagram("ti2d")
    assert "G MXFP4, blocks 32x32, stochastic rounding" in repr(square)
    assert square._repr_html_().count("<svg") == 6


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_every_named_recipe_has_a_diagram(name):
    assert gemms.GemmDiagram(name)._repr_html_().count("mx-operand") == 6


def test_blocks_are_drawn_along_the_contraction_axis():
    # W is contracted over its columns in Fprop and over its rows in Dgrad.
    fprop, dgrad, _ = gemms.GemmDiagram("mxfp4")._repr_html_().split('<div class="mx-gemm">')[1:]
    assert 'width="31" height="7"' in fprop and 'width="31" height="7"' in dgrad and 'width="7" height="31"' in dgrad


def test_square_blocks_read_the_same_after_a_transpose_and_rows_do_not():
    share = gemms.transpose_changes(size=64).groupby("blocks")["differ"].mean()
    assert share["32x32"] == 0 and 0.02 < share["1x32"] < 0.5
