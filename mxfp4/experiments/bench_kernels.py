"""Quantizers and emulated GEMMs on a GPU, against the bandwidth of a copy, cuBLAS or hipBLAS, and their rivals.

16384 x 8192 BF16. A quantizer's ratio is (bytes it has to read and write / its time) over the same of a
device-to-device copy in the same run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

import mxfp4
from mxfp4.experiments.bench import gpu_seconds, torchao_to_mx
from mxfp4.numerics.isa import orientation
from mxfp4.numerics.kernels import quantize_matrix, quantize_torch
from mxfp4.numerics.kernels.quantize_torch import Orientation

DEVICE = "cuda"
ROWS, COLUMNS, GEMM = 16384, 8192, 8192
BF16 = torch.bfloat16

_H16, _H32, _SR = orientation(16), orientation(32), orientation(16, stochastic=True)
_SQUARE = orientation(block="2d", scale_rule="rceil")
_V, _VH, _VSR = (orientation(h, stochastic=s, dtype=BF16) for h, s in ((0, False), (16, False), (0, True)))
_VSQUARE = orientation(block="2d", scale_rule="rceil", dtype=BF16)
OURS: dict[str, tuple[Orientation | None, Orientation | None]] = {
    "packed": (orientation(), None),
    "packed, h16": (_H16, None),
    "packed, sr": (orientation(stochastic=True), None),
    "packed, columns, h16": (None, _H16),
    "packed, both": (orientation(), orientation()),
    "packed, both, h16": (_H16, _H16),
    "packed, both, h32": (_H32, _H32),
    "packed, both, h16 sr": (_SR, _SR),
    "packed, both, 2d": (_SQUARE, _SQUARE),
    "values": (_V, None),
    "values, h16": (_VH, None),
    "values, sr": (_VSR, None),
    "values, both": (_V, _V),
    "values, both, h16": (_VH, _VH),
    "values, both, 2d": (_VSQUARE, _VSQUARE),
}


def rows(rivals: bool = True) -> Iterator[dict]:
    """One dict a measurement: name, who, seconds, ratio (None where it has no meaning), correct."""
    torch.manual_seed(0)
    x = torch.randn(ROWS, COLUMNS, device=DEVICE).to(BF16)
    bandwidth = _bandwidth(x)
    yield {"name": "copy", "who": "torch", "bytes_per_second": bandwidth}
    seed = torch.tensor(5, device=DEVICE)

    def measured(name: str, who: str, call: Callable, outputs: list[Tensor], correct: bool | None) -> dict:
        seconds = gpu_seconds(call)
        moved = nbytes(x, *outputs)
        return {
            "name": name,
            "who": who,
            "seconds": seconds,
            "bytes": moved,
            "ratio": moved / seconds / bandwidth,
            "correct": correct,
        }

    for name, (row, col) in OURS.items():
        outputs = [t for pair in quantize_matrix(x[None], row, col, seed) for t in pair if t is not None]
        call = lambda row=row, col=col: quantize_matrix(x[None], row, col, seed)
        yield measured(name, "mxfp4", call, outputs, _is_twin(x, row, col, seed))
    if rivals:
        yield from _rivals(x, seed, measured)
    yield from _gemms(seed)


def _bandwidth(x: Tensor) -> float:
    """Bytes a second that a copy of x on the device reads and writes."""
    target = torch.empty_like(x)
    return 2 * nbytes(x) / gpu_seconds(lambda: target.copy_(x))


def nbytes(*tensors: Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _is_twin(x: Tensor, row: Orientation | None, col: Orientation | None, seed: Tensor) -> bool:
    """Whether a part of x comes out as the plain-torch twin has it."""
    part = x[None, :512, :1024]
    ours = [t for pair in quantize_matrix(part, row, col, seed) for t in pair if t is not None]
    twin = [t for pair in quantize_torch.quantize_matrix(part, row, col, seed) for t in pair if t is not None]
    return all(torch.equal(a, b) for a, b in zip(ours, twin, strict=True))


def _rivals(x: Tensor, seed: Tensor, measured: Callable) -> Iterator[dict]:
    """What a user would otherwise run: torchao compiled, and the twin compiled by torch."""
    to_mx = torchao_to_mx()
    if to_mx is not None:
        codes = to_mx(x[:256])[1]
        floor = mxfp4.quantize(x[:256])
        same = torch.equal(codes.view(torch.uint8).flatten(), floor.qdata.flatten())
        compiled = torch.compile(to_mx)
        outputs = list(compiled(x))
        yield measured("packed", "torchao, compiled", lambda: compiled(x), outputs, same)

        @torch.compile
        def both(x: Tensor):
            rotated = [quantize_torch.rotate_last(t.float(), 16).to(BF16) for t in (x, x.t().contiguous())]
            return [to_mx(t) for t in rotated]

        outputs = [t for pair in both(x) for t in pair]
        yield measured("packed, both, h16", "torchao with H16, compiled", lambda: both(x), outputs, None)
    for name, how in (("values", _V), ("values, h16", _VH), ("values, sr", _VSR)):
        naive = torch.compile(
            lambda x, seed, how=how: quantize_torch.quantize_dequantize(x.float(), how.spec, None, seed, BF16)
        )
        yield measured(name, "twin, compiled", lambda naive=naive: naive(x, seed), [naive(x, seed)], None)


def _gemms(seed: Tensor) -> Iterator[dict]:
    """[M, K] x [N, K] with both operands quantized from BF16, relative to the library's BF16 GEMM alone."""
    a, b = (torch.randn(GEMM, GEMM, device=DEVICE).to(BF16) for _ in range(2))
    plain = gpu_seconds(lambda: torch.mm(a, b.t()), 10)
    yield {"name": "gemm, bf16", "who": "library", "seconds": plain, "flops_per_second": 2 * GEMM**3 / plain}
    for name, how in {
        "gemm, emulated": {},
        "gemm, emulated, h16": {"hadamard": mxfp4.Hadamard(16)},
        "gemm, emulated, sr": {"rounding": "stochastic"},
    }.items():

        def call(how=how):
            q = [mxfp4.fake_quantize(t, scale_rule="even", dtype=BF16, seed=seed, **how) for t in (a, b)]
            return torch.mm(q[0], q[1].t())

        seconds = gpu_seconds(call, 10)
        yield {"name": name, "who": "mxfp4", "seconds": seconds, "ratio": plain / seconds}
