"""What a back end must multiply right on a device before it is used there.

The operands are hard ones: random codes under scales from the whole range, zero blocks, NaN blocks, sums that cancel,
sizes beside the tiles'. The result must lie within FP32 accumulation error of the exact product, NaN exactly where a
NaN block is, and be the same bits twice.

The bound, for out = sum over K of a b, with S = sum over K of |a| |b|: an FP4 product is exact in FP32. A unit aligns
the products of an instruction and the accumulator to the largest of them and keeps 24 bits or more, so each addend
loses at most 2^-23 of S, and so does each instruction's result, of which there is one for 16 products or more:
(K + 2 K / 16) 2^-23 S. Products below FP32's normal numbers may count as zero: K 2^-126. A BF16 result is rounded to
nearest once, 2^-8 of itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from mxfp4.numerics.formats import BLOCK, E8M0_NAN, pack_nibbles
from mxfp4.numerics.gemm_backends.backends import GemmBackend, scale_of_rows
from mxfp4.numerics.tensor import MXTensor

DTYPES = (torch.float32, torch.bfloat16)
SIGN, HALF_RANGE = 8, 3
"""Bits of an E2M1 code: its sign; magnitudes up to 1.5."""


@dataclass(frozen=True)
class Case:
    """One product, a [m, k] times b [n, k].

    scales: "matched" (of a around a centre of each block, of b around its inverse, so that all blocks count), "wide a"
    (those of a from 2^-127 to 2^127, of b as large as FP32 sums allow) or "wide b".
    """

    name: str
    m: int
    n: int
    k: int
    scales: str = "matched"
    block: str = "1d"
    special: bool = False
    """Blocks of zeros, and of NaN (scale byte 255)."""
    cancel: bool = False
    """The second half of K subtracts the first, but for one block."""


CASES = (
    Case("one block", 96, 64, 32),
    Case("odd sizes", 33, 70, 160),
    Case("one row", 1, 64, 256),
    Case("zero and NaN blocks", 64, 256, 256, special=True),
    Case("tails of tiles", 160, 96, 384),
    Case("square blocks", 64, 256, 256, block="2d"),
    Case("scales of a from smallest to largest", 256, 256, 256, scales="wide a"),
    Case("scales of b from smallest to largest", 256, 256, 256, scales="wide b"),
    Case("sums that cancel", 64, 256, 1024, cancel=True),
    Case("tails of large tiles", 288, 768, 1280),
    Case("large K", 96, 256, 4096),
)


def problem(backend: GemmBackend, device: torch.device, cases: tuple[Case, ...] = CASES) -> str | None:
    """Why `backend` must not be used on `device`: the case and by how much it is wrong; None where all is right."""
    tried = 0
    with torch.no_grad(), _disable_current_modes():  # a FakeTensorMode around would check nothing
        for case in cases:
            a, b, exact, magnitude = reference(case, device)
            for dtype in DTYPES:
                if not backend.takes(a, b, dtype):
                    continue
                tried += 1
                try:
                    first, second = (backend.multiply(a, b, dtype) for _ in range(2))
                    wrong = difference(first, second, exact, magnitude, case.k, dtype)
                except Exception as error:  # whatever a library raises
                    wrong = f"{type(error).__name__}: {error}".splitlines()[0]
                if wrong is not None:
                    return f"{case.name}, {case.m}x{case.n}x{case.k} to {str(dtype).removeprefix('torch.')}: {wrong}"
    return None if tried else "it takes none of the cases"


SAMPLED = 64
"""Rows, and columns, of a product that `sample_problem` looks at."""


def sample_problem(a: MXTensor, b: MXTensor, product: Tensor) -> str | None:
    """What is wrong with a product of a [M, K] and b [N, K], seen at evenly spaced rows and columns; None: nothing.

    Sums that FP32 cannot hold are left aside.
    """
    rows, columns = (torch.linspace(0, n - 1, min(n, SAMPLED), device=a.device).round().long() for n in product.shape)
    values = []
    for x, lines in ((a, rows), (b, columns)):
        part = MXTensor(x.qdata[lines], scale_of_rows(x)[lines], x.elem, "1d", -1, (len(lines), x.shape[1]))
        values.append(part.dequantize(torch.float64))
    exact, magnitude = values[0] @ values[1].t(), values[0].abs() @ values[1].abs().t()
    held = ~(magnitude >= 2.0**127)  # NaN is held
    got = product[rows][:, columns][held]
    return difference(got, got, exact[held], magnitude[held], a.shape[1], product.dtype)


def difference(got: Tensor, again: Tensor, exact: Tensor, magnitude: Tensor, k: int, dtype: torch.dtype) -> str | None:
    """What is wrong with a result, or None. magnitude: S, the product of the operands' absolute values."""
    if got.dtype != dtype or got.shape != exact.shape:
        return f"the result is {tuple(got.shape)} {got.dtype}, not {tuple(exact.shape)} {dtype}"
    value, is_nan = got.double(), exact.isnan()
    if not torch.equal(value.isnan(), is_nan):
        count = int((value.isnan() != is_nan).sum())
        return f"{count} of {got.numel()} results are NaN without a NaN block, or not NaN with one"
    # Of NaN results the bound is NaN, and what is not above it passes.
    bound = accumulation_bound(exact, magnitude, k, dtype)
    error = (value - exact).abs()
    over = error > bound
    if over.any():
        ratio = torch.where(over, error / bound, 0)
        at = int(ratio.argmax())
        return (
            f"{int(over.sum())} of {got.numel()} results are wrong; the worst deviates by {error.flatten()[at]:.3g}, "
            f"allowed are {bound.flatten()[at]:.3g}"
        )
    if not torch.equal(value.nan_to_num(), again.double().nan_to_num()):
        return "two calls gave different bits"
    return None


def accumulation_bound(exact: Tensor, magnitude: Tensor, k: int, dtype: torch.dtype) -> Tensor:
    """Largest |result - exact| that FP32 accumulation in any order explains: see the module's docstring."""
    bound = (k + 2 * k / 16) * 2.0**-23 * magnitude + k * 2.0**-126
    return bound if dtype == torch.float32 else bound + 2.0**-8 * (exact.abs() + bound)


@lru_cache(maxsize=len(CASES))
def reference(case: Case, device: torch.device) -> tuple[MXTensor, MXTensor, Tensor, Tensor]:
    """(a, b, exact product, product of absolute values) of a case on `device`, the products in FP64."""
    a, b = operands(case)
    values = [x.dequantize(torch.float64).to(device) for x in (a, b)]
    exact, magnitude = values[0] @ values[1].t(), values[0].abs() @ values[1].abs().t()
    return a.to(device), b.to(device), exact, magnitude


def operands(case: Case) -> tuple[MXTensor, MXTensor]:
    """The two operands of a case, on the CPU, the same at every call."""
    g = torch.Generator().manual_seed(0)

    def draw(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high + 1, shape, generator=g, device="cpu")

    blocks = case.k // BLOCK
    codes = [draw(0, 15, rows, case.k) for rows in (case.m, case.n)]
    scale_rows = [rows // BLOCK if case.block == "2d" else rows for rows in (case.m, case.n)]
    if case.scales == "matched":
        centre = draw(12, 242, 1, blocks)
        scales = [c + draw(-6, 6, rows, blocks) for c, rows in zip((centre, 254 - centre), scale_rows, strict=True)]
    else:
        # Of the product 6 2^(x - 127) 6 2^(y - 127), K of them stay below 2^127 where x + y is no more than this.
        largest = 254 + 126 - math.ceil(math.log2(36 * case.k))
        wide, other = (draw(0, top, rows, 1) for top, rows in zip((254, largest - 254), scale_rows, strict=True))
        scales = [
            (base + draw(-4, 4, base.shape[0], blocks)).clamp(0, top)
            for base, top in ((wide, 254), (other, largest - 254))
        ]
        codes[0] = torch.where(scales[0].repeat_interleave(BLOCK, 1) > 252, codes[0] & (SIGN | HALF_RANGE), codes[0])
        if case.scales == "wide b":
            codes, scales = codes[::-1], scales[::-1]
    if case.special:
        for side, (code, scale) in enumerate(zip(codes, scales, strict=True)):
            for row, block in ((0, 0), (17, 3), (40, blocks - 1)):
                code[row + side, block * BLOCK : (block + 1) * BLOCK] = 0
                scale[row + side, block] = (0, 252, 120)[row % 3]
            for row, block in ((5, 1), (33, blocks - 1), (63, 0)):
                scale[row - side, block] = E8M0_NAN
            code[33 - side, -BLOCK:] = 0  # zero times NaN is NaN
    if case.cancel:
        half = blocks // 2
        order = torch.randperm(half, generator=g)
        for side in range(2):
            code, scale = codes[side].view(-1, blocks, BLOCK), scales[side]
            code[:, :half] &= ~SIGN
            code[:, half:] = code[:, :half][:, order] | (SIGN if side else 0)
            scale[:, half:] = scale[:, :half][:, order]
            code[:, -1] = draw(0, 15, *code[:, -1].shape)
    a, b = (
        MXTensor(pack_nibbles(code.to(torch.uint8)), scale.to(torch.uint8), "e2m1", case.block, -1, (rows, case.k))
        for code, scale, rows in zip(codes, scales, (case.m, case.n), strict=True)
    )
    return a, b
