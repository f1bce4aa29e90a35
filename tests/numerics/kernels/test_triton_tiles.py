"""The choice of a tile by Triton's autotuner: the fastest of those that give the same bits."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from mxfp4.numerics.kernels.triton import gemm
from mxfp4.numerics.kernels.triton import tiles as module
from mxfp4.numerics.kernels.triton.tiles import AMD, NVIDIA, fastest, tuned
from mxfp4.numerics.tensor import MXTensor


@pytest.fixture(params=[True, False], ids=["amd", "nvidia"])
def tuner(request, monkeypatch):
    """Triton's autotuner over a kernel that notes its launches, writes ones, and takes as long as `seconds` says."""
    module._tuner.cache_clear()
    tune, bench = module._tuner(request.param, gemm._gemm_kernel)
    test = SimpleNamespace(amd=request.param, launches=[], seconds=lambda meta: 1.0, spoil=lambda meta, out: None)

    def run(grid, warmup, out, **kw):
        test.launches.append({**kw, "grid": grid(kw)})
        out.fill_(1)
        test.spoil(kw, out)

    monkeypatch.setattr(tune, "cache_results", False)  # Triton asks the driver for its key
    monkeypatch.setattr(tune, "fn", SimpleNamespace(run=run))
    bench.timed = lambda launch, quantiles: [test.seconds(test.launches[-1])] * 3
    yield test
    module._tuner.cache_clear()


def arguments(m: int = 4096, n: int = 512, k: int = 1024) -> dict:
    return {"out": torch.zeros(m, n), "M": m, "N": n, "K": k}


def test_the_fastest_tile_is_taken_and_what_is_measured_is_thrown_away(tuner):
    found, given = (AMD if tuner.amd else NVIDIA), arguments()
    tuner.seconds = lambda meta: 0.5 if (meta["BM"], meta["BN"]) == (128, 256) else 1.0
    tile = tuned(tuner.amd, gemm._gemm_kernel, given, {})
    assert (tile.BM, tile.BN) == (128, 256) and given["out"].eq(0).all()
    assert {(x["BM"], x["BN"], x["BK"], x["num_warps"], x["num_stages"]) for x in tuner.launches} == {
        (t.BM, t.BN, t.BK, t.num_warps, t.num_stages) for t in found
    }
    assert all(x["grid"] == (4096 // x["BM"] * 512 // x["BN"],) for x in tuner.launches)
    assert all(("matrix_instr_nonkdim" in x) == tuner.amd for x in tuner.launches)
    count = len(tuner.launches)
    assert tuned(tuner.amd, gemm._gemm_kernel, given, {}) == tile and len(tuner.launches) == count + 1


def test_a_tile_of_other_bits_is_not_taken_however_fast(tuner):
    """The first is what the others are compared with."""
    odd = lambda meta: (meta["BM"], meta["BN"]) == (256, 128)
    tuner.seconds = lambda meta: 0.1 if odd(meta) else 1.0

    def spoil(meta, out):
        if odd(meta):
            out[7, 7] += 2.0**-23

    tuner.spoil = spoil
    tile = tuned(tuner.amd, gemm._gemm_kernel, arguments(), {})
    assert (tile.BM, tile.BN) != (256, 128)


def test_each_shape_is_tuned_apart(tuner):
    for k in (1024, 2048, 1024):
        tuner.seconds = lambda meta, k=k: 0.5 if (meta["BM"] == 256) == (k == 2048) else 1.0
        assert (tuned(tuner.amd, gemm._gemm_kernel, arguments(k=k), {}).BM == 256) == (k == 2048)


def test_nothing_is_tuned_where_it_is_not_worth_it_or_there_is_no_gpu(monkeypatch):
    monkeypatch.setattr(module, "tuned", lambda *a: pytest.fail("tuned"))
    assert fastest(True, None, arguments(), {}, True) == AMD[0]  # the CPU
    on_gpu = {"out": SimpleNamespace(device=torch.device("cuda"))}
    assert fastest(False, None, on_gpu, {}, False) == NVIDIA[0]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert fastest(False, None, on_gpu, {}, True) == NVIDIA[0]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(module, "tuned", lambda *a: NVIDIA[1])
    assert fastest(False, None, on_gpu, {}, True) == NVIDIA[1]


@pytest.mark.parametrize("rows, k, elem, accumulate, worth", [
    (2048, 2048, "e2m1", False, True), (1024, 2048, "e2m1", False, False), (2048, 2048, "e2m1", True, False),
])  # fmt: skip
def test_large_products_of_fp4_are_worth_it(monkeypatch, rows, k, elem, accumulate, worth):
    asked = []
    monkeypatch.setattr(gemm, "fastest", lambda *a: (asked.append(a[-1]), AMD[3])[1])
    a = MXTensor(
        torch.empty(rows, k // 2, device="meta"), torch.empty(rows, k // 32, device="meta"), elem, "1d", -1, (rows, k)
    )
    out = torch.empty(rows, rows, device="meta")
    grid, _, options = gemm.launch(a, a, out, accumulate, amd=True)
    assert asked == [worth] and grid == (rows // 256 * rows // 256,)
    assert options["EVEN_K"] and options["BK"] == 128 and options["num_warps"] == 8
