"""Quantization on the CPU: our C kernel and the plain twin, against torchao.

4096 x 4096 FP32 to packed E2M1, one orientation, no rotation; and what a training step of the toy scale asks for.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

import mxfp4
from mxfp4.bench.isa import orientation
from mxfp4.bench.results import attempt, cpu_seconds, torchao_to_mx
from mxfp4.numerics import reference
from mxfp4.numerics.kernels.cpu import quantize as quantize_cpu

SIZE, TOY = 4096, (1024, 256)


def rows(rivals: bool = True) -> Iterator[dict]:
    """One dict a measurement: name, who, then seconds, elements a second, correct; or a problem."""
    torch.manual_seed(0)
    x = torch.randn(SIZE, SIZE)
    how = orientation(scale_rule="floor")
    expected = reference.quantize_packed(x[:256], how, None)

    def measured(call, data: Tensor, correct: bool | None) -> dict:
        seconds, processor = cpu_seconds(call)
        return {
            "seconds": seconds,
            "processor_seconds": processor,
            "elements_per_second": data.numel() / seconds,
            "correct": correct,
        }

    def same(values: Tensor, scales: Tensor) -> bool:
        return torch.equal(values.view(torch.uint8).flatten(), expected[0].flatten()) and torch.equal(
            scales.view(torch.uint8).flatten(), expected[1].flatten()
        )

    def ours(quantize) -> dict:
        values, scales = quantize(x[None, :256], how, None, None)[0]
        return measured(lambda: quantize(x[None], how, None, None), x, same(values, scales))

    def torchao() -> dict:
        to_mx = torchao_to_mx()
        scales, values = to_mx(x[:256])
        return measured(lambda: to_mx(x), x, same(values, scales))

    if quantize_cpu.kernel() is not None:
        yield attempt("packed", "mxfp4, C", lambda: ours(quantize_cpu.quantize_matrix))
    yield attempt("packed", "mxfp4, twin", lambda: ours(reference.quantize_matrix))
    if rivals:
        yield attempt("packed", "torchao", torchao)
    toy = torch.randn(TOY)
    for name, options in {
        "values": {},
        "values, h16": {"hadamard": mxfp4.Hadamard(16)},
        "values, sr": {"rounding": "stochastic", "seed": torch.tensor(3)},
    }.items():
        call = lambda options=options: mxfp4.fake_quantize(toy, **options)
        yield attempt(f"{name}, {TOY[0]}x{TOY[1]}", "mxfp4", lambda call=call: measured(call, toy, None))
