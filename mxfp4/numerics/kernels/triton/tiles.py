"""The tiles of the FP4 GEMM, and the choice of one for a shape: Triton's autotuner, which times them and keeps the result.

Every tile gives the same bits: the instruction is the same, and one program adds all of K in order. A tile that gives
others on the device is dropped when it is timed. So which tile is the fastest, there or on another rank, changes no
result. `tests/bench/test_tiles.py` compiles them all: each uses the FP4 units and spills no register. 256 x 256 of 256
with 8 warps spills on gfx950, and on sm_100 256 x 256 leaves no tensor memory for the scales.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

TUNED_FLOPS = 2**34
"""Fewest floating-point operations of a product for which tiles are tried: below, a GPU is not filled (assumed)."""


@dataclass(frozen=True)
class Tile:
    """BM x BN results a program, BK of K at a time, GROUP rows of tiles together; for all, see Triton's options.

    AMD's options are 0 where they are not given: `matrix_instr_nonkdim` 16 picks v_mfma_scale_f32_16x16x128,
    `waves_per_eu` is how many waves of a SIMD the registers are to leave room for.
    """

    BM: int = 128
    BN: int = 128
    BK: int = 256
    GROUP: int = 8
    num_warps: int = 4
    num_stages: int = 2
    waves_per_eu: int = 0
    matrix_instr_nonkdim: int = 0

    def options(self) -> dict[str, int]:
        """Constants of the kernel and options of its compilation."""
        return {name: value for name, value in vars(self).items() if value}


AMD = (
    Tile(matrix_instr_nonkdim=16),
    Tile(256, 128, 256, num_warps=8, matrix_instr_nonkdim=16),
    Tile(128, 256, 256, num_warps=8, matrix_instr_nonkdim=16),
    Tile(256, 256, 128, num_warps=8, matrix_instr_nonkdim=16),
    Tile(256, 256, 128, num_warps=8, num_stages=3, waves_per_eu=2, matrix_instr_nonkdim=16),
)
NVIDIA = (
    Tile(),
    Tile(num_stages=4),
    Tile(256, 128, 256, num_warps=8, num_stages=3),
    Tile(128, 256, 256, num_warps=8, num_stages=3),
)


def tiles(amd: bool, fp4: bool = True) -> tuple[Tile, ...]:
    """The tiles of a target, the default first; FP8 operands, of twice the size, have one of half the K."""
    found = AMD if amd else NVIDIA
    return found if fp4 else (Tile(BK=128, matrix_instr_nonkdim=found[0].matrix_instr_nonkdim),)


def fastest(amd: bool, kernel, arguments: dict, constants: dict, worth: bool) -> Tile:
    """The tile for this launch of the FP4 GEMM: the default where tuning is not `worth` its time or cannot be done.

    Args:
        amd: the target's family.
        kernel: `_gemm_kernel`.
        arguments: its arguments; `out` is not written.
        constants: its constants but the tile's.
        worth: whether the product is large enough, and is not added to an earlier one.

    """
    on_gpu = arguments["out"].device.type == "cuda"
    if not worth or not on_gpu or torch.cuda.is_current_stream_capturing():
        return tiles(amd)[0]
    return tuned(amd, kernel, arguments, constants)


def tuned(amd: bool, kernel, arguments: dict, constants: dict) -> Tile:
    """The fastest tile by Triton's autotuner, of an earlier process where that kept its result."""
    import triton

    tuner, bench = _tuner(amd, kernel)
    scratch = torch.empty_like(arguments["out"])
    bench.begin(scratch)
    m, n = arguments["M"], arguments["N"]
    grid = lambda meta: (triton.cdiv(m, meta["BM"]) * triton.cdiv(n, meta["BN"]),)
    try:
        tuner[grid](**{**arguments, "out": scratch}, **constants)
    finally:
        bench.begin(None)
    best = tuner.best_config.all_kwargs()
    return next(tile for tile in tiles(amd) if all(best[name] == value for name, value in tile.options().items()))


class SameBits:
    """Times a tile as Triton does, and gives infinity for one whose result has other bits than the first's.

    It is the `do_bench` of triton.autotune (Triton 3.6 to 3.8): called with a launch and quantiles, it returns seconds.
    """

    def __init__(self, timed: Callable[[Callable[[], None], tuple[float, ...]], list[float]]):
        self.timed = timed
        self.out: Tensor | None = None
        self.first: Tensor | None = None

    def begin(self, out: Tensor | None) -> None:
        """The next launches write to `out`."""
        self.out, self.first = out, None

    def __call__(self, launch: Callable[[], None], quantiles: tuple[float, ...]) -> list[float]:
        assert self.out is not None
        launch()
        bits = self.out.view(torch.int32 if self.out.dtype == torch.float32 else torch.int16)
        if self.first is None:
            self.first = bits.clone()
        elif not torch.equal(bits, self.first):
            return [float("inf")] * len(quantiles)
        return self.timed(launch, quantiles)


@lru_cache
def _tuner(amd: bool, kernel):
    """(triton.autotune of the kernel over the tiles, its timer). Results stay on disk, beside the compiled kernels."""
    import triton

    def timed(launch, quantiles):
        return triton.testing.do_bench(launch, quantiles=quantiles)

    bench = SameBits(timed)
    configs = []
    for tile in tiles(amd):
        constants = tile.options()
        warps, stages = constants.pop("num_warps"), constants.pop("num_stages")
        configs.append(triton.Config(constants, num_warps=warps, num_stages=stages))
    whole = triton.heuristics({"EVEN_K": lambda given: given["K"] % given["BK"] == 0})(kernel)
    key = ["M", "N", "K", "A_SCALE_ROWS", "B_SCALE_ROWS"]
    return triton.autotune(configs, key=key, do_bench=bench, cache_results=True)(whole), bench
