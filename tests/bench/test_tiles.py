"""Every tile of the FP4 GEMM, compiled: it multiplies with the FP4 units, spills nothing, and fits."""

from __future__ import annotations

import pytest

pytest.importorskip("triton.backends.amd")

from mxfp4.bench import isa
from mxfp4.numerics.kernels.triton import tiles


@pytest.mark.parametrize("tile", range(len(tiles.AMD)))
def test_tiles_of_gfx950(tile):
    """One instruction for all, so that all give the same bits."""
    report = isa.tile_report(tile, "gfx950")
    assert set(report.matrix) == {"v_mfma_scale_f32_16x16x128_f8f6f4"}
    assert report.spills == report.scratch == 0 and report.shared <= 160 * 1024 and report.registers <= 512


@pytest.mark.parametrize("tile", range(len(tiles.NVIDIA)))
def test_tiles_of_sm_100(tile):
    report = isa.tile_report(tile, "sm_100")
    assert set(report.matrix) == {"tcgen05.mma.cta_group::1.kind::mxf4.block_scale.block32"}
    assert report.spills == report.scratch == 0 and report.shared <= 227 * 1024


def test_tiles_differ_and_the_first_is_the_default():
    for found in (tiles.AMD, tiles.NVIDIA):
        assert len(set(found)) == len(found) and (found[0].BM, found[0].BN, found[0].num_warps) == (128, 128, 4)
        assert len({tile.matrix_instr_nonkdim for tile in found}) == 1
    assert any((tile.BM, tile.BN, tile.num_warps) == (256, 256, 8) for tile in tiles.AMD)
