"""Quantizers and emulated GEMMs on a GPU, against the bandwidth of a copy, cuBLAS or hipBLAS, and their rivals.

16384 x 8192 BF16. A quantizer's ratio is (bytes it has to read and write / its time) over the same of a
device-to-device copy in the same run; a GEMM's, the time of the library's BF16 GEMM over its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

import mxfp4
from mxfp4.bench.isa import orientation
from mxfp4.bench.results import attempt, gpu_seconds, torchao_to_mx
from mxfp4.numerics import hadamard, reference
from mxfp4.numerics.gemm_backends.backends import BACKENDS
from mxfp4.numerics.gemm_backends.choice import Status, statuses
from mxfp4.numerics.gemm_backends.self_check import sample_problem
from mxfp4.numerics.kernels import quantize_matrix
from mxfp4.numerics.native import chip_path
from mxfp4.numerics.operand_plan import OperandPlan
from mxfp4.numerics.ops import packed_operands
from mxfp4.numerics.ops.rotate import rotated

DEVICE = "cuda"
ROWS, COLUMNS, GEMM = 16384, 8192, 8192
BF16 = torch.bfloat16

_H16, _H32, _SR = orientation(16), orientation(32), orientation(16, stochastic=True)
_SQUARE = orientation(block="2d", scale_rule="rceil")
_V, _VH, _VSR = (orientation(h, stochastic=s, dtype=BF16) for h, s in ((0, False), (16, False), (0, True)))
_VSQUARE = orientation(block="2d", scale_rule="rceil", dtype=BF16)
OURS: dict[str, tuple[OperandPlan | None, OperandPlan | None]] = {
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
ROUNDINGS = {"": {}, ", h16": {"hadamard": mxfp4.Hadamard(16)}, ", sr": {"rounding": "stochastic"}}


def rows(rivals: bool = True) -> Iterator[dict]:
    """One dict a measurement: name, who, then seconds, ratio (None where it has no meaning), correct; or a problem."""
    torch.manual_seed(0)
    x = torch.randn(ROWS, COLUMNS, device=DEVICE).to(BF16)
    target = torch.empty_like(x)
    bandwidth = 2 * nbytes(x) / gpu_seconds(lambda: target.copy_(x))
    del target
    yield {"name": "copy", "who": "torch", "bytes_per_second": bandwidth}
    seed = torch.tensor(5, device=DEVICE)

    def measured(
        call: Callable[[], list[Tensor]],
        correct: Callable[[list[Tensor]], bool | None],
        inputs: tuple[Tensor, ...] = (x,),
    ) -> dict:
        outputs = call()
        right, moved = correct(outputs), nbytes(*inputs, *outputs)
        del outputs
        seconds = gpu_seconds(call)
        return {"seconds": seconds, "bytes": moved, "ratio": moved / seconds / bandwidth, "correct": right}

    for name, (row, col) in OURS.items():
        call = lambda row=row, col=col: tensors(quantize_matrix(x[None], row, col, seed))
        is_twin = lambda outputs, row=row, col=col: _is_twin(x, row, col, seed)
        yield attempt(name, "mxfp4", lambda call=call, right=is_twin: measured(call, right))
    q, (values, _) = mxfp4.quantize(x), quantize_matrix(x[None], _V, None, None)[0]
    call = lambda: [packed_operands.unpack(q.qdata, q.scale, q.elem, q.block, BF16)]
    right = lambda outputs: _equal(outputs, [values])
    yield attempt("unpacked", "mxfp4", lambda: measured(call, right, (q.qdata, q.scale)))
    del q, values, call, right
    for name, both in (("rotated, h16", False), ("rotated, both axes, h16", True)):
        call = lambda both=both: [rotated(x, 16, both=both)]
        right = lambda outputs, both=both: _equal(
            [outputs[0][:512, :1024]], [hadamard.rotate_matrix(x[:512, :1024], 16, None, False, both, torch.float32)]
        )
        yield attempt(name, "mxfp4", lambda call=call, right=right: measured(call, right))
    if rivals:
        for name, who, make in _rivals(x, seed):
            yield attempt(name, who, lambda make=make: measured(*make()))
    del x
    yield from _gemms(seed, rivals)


def nbytes(*outputs: Tensor) -> int:
    """Bytes that these tensors hold."""
    return sum(t.numel() * t.element_size() for t in outputs)


def tensors(outputs) -> list[Tensor]:
    """What `quantize_matrix` returned, without what it was not asked for."""
    return [t for pair in outputs for t in pair if t is not None]


def _equal(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    """Whether two lists hold the same bytes, whatever their shapes and dtypes."""
    ours, theirs = ([t.reshape(-1).view(torch.uint8) for t in side] for side in (ours, theirs))
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def _is_twin(x: Tensor, row: OperandPlan | None, col: OperandPlan | None, seed: Tensor) -> bool:
    """Whether a part of x comes out as the plain-torch twin has it."""
    part = x[None, :512, :1024]
    ours, twin = (q(part, row, col, seed) for q in (quantize_matrix, reference.quantize_matrix))
    return _equal(tensors(ours), tensors(twin))


def _rivals(x: Tensor, seed: Tensor) -> Iterator[tuple[str, str, Callable]]:
    """What a user would otherwise run, torchao compiled and the twin compiled by torch: name, who, and what makes
    (the call, the check of its result against ours)."""
    floor = (orientation(scale_rule="floor"), None)

    def torchao():
        compiled = torch.compile(torchao_to_mx())

        def right(outputs):
            return _equal(outputs[::-1], tensors(quantize_matrix(x[None], *floor, None)))

        return lambda: list(compiled(x)), right

    def torchao_h16():
        to_mx = torchao_to_mx()

        @torch.compile
        def both(x: Tensor):
            rotated = [reference.rotate_last(t.float(), 16).to(BF16) for t in (x, x.t().contiguous())]
            return [to_mx(t) for t in rotated]

        return lambda: [t for pair in both(x) for t in pair], lambda outputs: None  # rounds to BF16 in between

    def twin(how: OperandPlan):
        naive = torch.compile(lambda x, seed: reference.quantize_dequantize(x.float(), how, seed, BF16))
        right = lambda outputs: _equal(outputs, tensors(quantize_matrix(x[None], how, None, seed)))
        return lambda: [naive(x, seed)], right

    yield "packed", "torchao, compiled", torchao
    yield "packed, both, h16", "torchao with H16, compiled", torchao_h16
    for name, how in (("values", _V), ("values, h16", _VH), ("values, sr", _VSR)):
        yield name, "twin, compiled", lambda how=how: twin(how)


def _gemms(seed: Tensor, rivals: bool) -> Iterator[dict]:
    """[M, K] x [N, K] with both operands quantized from BF16, relative to the library's BF16 GEMM alone."""
    a, b = (torch.randn(GEMM, GEMM, device=DEVICE).to(BF16) for _ in range(2))
    plain = gpu_seconds(lambda: torch.mm(a, b.t()), 10)
    yield {"name": "gemm, bf16", "who": "library", "seconds": plain, "flops_per_second": 2 * GEMM**3 / plain}

    def measured(quantize: Callable[[Tensor], Tensor], how: dict) -> dict:
        call = lambda: torch.mm(quantize(a), quantize(b).t())
        lines = slice(0, min(256, GEMM))
        ours = [mxfp4.fake_quantize(t, seed=seed, **how).double() for t in (a, b)]
        exact = ours[0][lines] @ ours[1].t()
        correct = bool((call()[lines].double() - exact).norm() < 2.0**-8 * exact.norm())  # one rounding to BF16
        del ours, exact
        seconds = gpu_seconds(call, 10)
        return {"seconds": seconds, "ratio": plain / seconds, "correct": correct}

    for name, how in ROUNDINGS.items():
        quantize = lambda t, how=how: mxfp4.fake_quantize(t, dtype=BF16, seed=seed, **how)
        yield attempt(f"gemm, emulated{name}", "mxfp4", lambda q=quantize, how=how: measured(q, how))
    if not rivals:
        return
    for (name, how), plan in zip(ROUNDINGS.items(), (_V, _VH, _VSR), strict=True):

        def naive(how=how, plan=plan):
            twin = torch.compile(lambda t, s: reference.quantize_dequantize(t.float(), plan, s, BF16))
            return measured(lambda t: twin(t, seed), how)

        yield attempt(f"gemm, emulated{name}", "twin, compiled", naive)

    def dot_scaled():
        from mxfp4.numerics.kernels.triton import gemm as gemm_triton

        a4, b4 = (mxfp4.quantize(t) for t in (a, b))
        out = torch.empty(GEMM, GEMM, dtype=BF16, device=DEVICE)
        seconds = gpu_seconds(lambda: gemm_triton.gemm(a4, b4, out), 10)
        return {"seconds": seconds, "ratio": plain / seconds}

    yield attempt("gemm, packed", "tl.dot_scaled alone", dot_scaled)
    if chip_path(torch.device(DEVICE)) == "native":
        yield from _back_ends(a, b, plain)


def _back_ends(a: Tensor, b: Tensor, plain: float) -> Iterator[dict]:
    """Each back end of the packed GEMM, scales laid out as it reads them included, relative to BF16's `plain` seconds;
    one that is not used here with the reason."""
    sides = [mxfp4.quantize(t) for t in (a, b)]
    for status in statuses(DEVICE):

        def measured(status: Status = status) -> dict:
            if status.state != "usable":
                raise RuntimeError(str(status))
            call = lambda: BACKENDS[status.name].multiply(*sides, BF16)
            correct = sample_problem(*sides, call()) is None
            seconds = gpu_seconds(call, 10)
            flops = 2 * a.shape[0] * b.shape[0] * a.shape[1]
            return {
                "seconds": seconds,
                "ratio": plain / seconds,
                "flops_per_second": flops / seconds,
                "correct": correct,
            }

        yield attempt("gemm, packed", f"back end {status.name}", measured)
