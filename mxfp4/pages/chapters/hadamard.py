"""What the chapter on the Hadamard transform shows, as frames computed with the package's own rotation and quantizer.

Shapes: X [tokens, C_in], W [C_out, C_in], G [tokens, C_out]; an outlier is one value in each block of 32 normal ones,
given in units of their standard deviation.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
import torch
from torch import Tensor

import mxfp4
from mxfp4 import Hadamard
from mxfp4.numerics.formats import BLOCK

ROTATIONS: dict[str, Hadamard | None] = {
    "none": None,
    "H16": Hadamard(16),
    "H32": Hadamard(32),
    "random H16": Hadamard(16, signs="seed"),
}


def cancellation(
    tokens: int = 64, c_in: int = 96, c_out: int = 160, *, size: int = 16, signs: str | None = None, seed: int = 0
) -> pd.DataFrame:
    """Largest difference that rotating both operands makes to each GEMM in FP64 products of FP32 rotations.

    Columns: gemm, product, contracted, plain and rotated (relative to the largest value of the product): `rotated`
    rotates both operands, `one side` only the first.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens, c_in, c_out = (size * -(-n // size) for n in (tokens, c_in, c_out))
    x, w, g = (torch.randn(s, generator=generator) for s in ((tokens, c_in), (c_out, c_in), (tokens, c_out)))
    h = Hadamard(size, signs=signs)
    operands = [
        ("Fprop", "Y = X Wᵀ", "C_in", x, w),
        ("Dgrad", "dX = G W", "C_out", g, w.T),
        ("Wgrad", "dW = Gᵀ X", "tokens", g.T, x.T),
    ]
    rows = []
    for gemm, product, axis, a, b in operands:  # [M, K] x [N, K]
        ra, rb = mxfp4.hadamard_transform(a, h, seed=seed), mxfp4.hadamard_transform(b, h, seed=seed)
        exact = a.double() @ b.double().T
        top = exact.abs().max()
        both = float((ra.double() @ rb.double().T - exact).abs().max() / top)
        one = float((ra.double() @ b.double().T - exact).abs().max() / top)
        rows.append({"gemm": gemm, "product": product, "contracted": axis, "both sides": both, "one side": one})
    return pd.DataFrame(rows)


def outlier_block(outlier: float, rotations: Sequence[str], *, rule: str = "even", seed: int = 0) -> pd.DataFrame:
    """One block with an outlier as its element 5, in each rotated basis and as quantized there.

    Columns: rotation, element, value (in the rotated basis), quantized, zero (rounded to 0).
    """
    x = _blocks(1, outlier, seed)
    frames = []
    for name in rotations:
        h = ROTATIONS[name]
        value = x[0] if h is None else mxfp4.hadamard_transform(x, h, seed=seed)[0]
        y = mxfp4.quantize(x, scale_rule=rule, hadamard=h, seed=seed).dequantize()[0]
        frame = {"rotation": name, "element": range(BLOCK), "value": value.tolist(), "quantized": y.tolist()}
        frames.append(pd.DataFrame({**frame, "zero": (y == 0).tolist()}))
    return pd.concat(frames, ignore_index=True)


def error_by_outlier(
    outliers: Sequence[float],
    rotations: Sequence[str],
    *,
    rule: str = "even",
    rounding: str = "nearest",
    blocks: int = 512,
    seed: int = 0,
) -> pd.DataFrame:
    """Relative L2 error after rotating back, of the whole block and of its other 31 values; and the share set to 0.

    Columns: rotation, outlier, part ("whole block", "all but the outlier"), error, zeros.
    """
    rows = []
    for outlier in outliers:
        x = _blocks(blocks, outlier, seed)
        rest = torch.ones(BLOCK, dtype=torch.bool)
        rest[_AT] = False
        for name in rotations:
            q = mxfp4.quantize(x, scale_rule=rule, rounding=rounding, hadamard=ROTATIONS[name], seed=seed)
            error, zeros = q.dequantize(rotated=False) - x, float((q.dequantize() == 0).float().mean())
            for part, e, reference in (
                ("whole block", error, x),
                ("all but the outlier", error[:, rest], x[:, rest]),
            ):
                value = float(e.norm() / reference.norm())
                rows.append({"rotation": name, "outlier": outlier, "part": part, "error": value, "zeros": zeros})
    return pd.DataFrame(rows)


def gemm_error_by_outlier(
    outliers: Sequence[float], rotations: Sequence[str], *, rule: str = "even", size: int = 128, seed: int = 0
) -> pd.DataFrame:
    """Relative L2 error of a product [size, K] x [size, K] whose first operand has the outliers; K = 8 blocks."""
    generator = torch.Generator().manual_seed(seed + 1)
    w = torch.randn(size, 8 * BLOCK, generator=generator)
    rows = []
    for outlier in outliers:
        x = _blocks(size * 8, outlier, seed).view(size, 8 * BLOCK)
        exact = x.double() @ w.double().T
        for name in rotations:
            how = {"scale_rule": rule, "hadamard": ROTATIONS[name], "seed": seed}
            y = mxfp4.matmul(mxfp4.quantize(x, **how), mxfp4.quantize(w, **how)).double()
            rows.append({"rotation": name, "outlier": outlier, "error": float((y - exact).norm() / exact.norm())})
    return pd.DataFrame(rows)


def averaged_error(
    variants: Sequence[str], *, steps: int = 64, outlier: float = 20.0, rule: str = "even", seed: int = 0
) -> pd.DataFrame:
    """The same tensor quantized at each of `steps` steps: how much error is left in the mean over the first n.

    variants: a rotation, with ", stochastic" behind it where that rounds stochastically. Columns: variant, steps, one
    (relative L2 error of the first step), left (of the mean over n steps, relative to `one`). What never changes
    repeats its error, 1 throughout; errors independent from step to step would leave 1 / sqrt(n).
    """
    x = _blocks(256, outlier, seed)
    rows = []
    for name in variants:
        rotation, _, rounding = name.partition(", ")
        how = {"scale_rule": rule, "hadamard": ROTATIONS[rotation], "rounding": rounding or "nearest"}
        total, first = torch.zeros_like(x), 0.0
        for step in range(steps):
            error = mxfp4.quantize(x, **how, seed=seed + step).dequantize(rotated=False) - x
            total += error
            first = first or float(error.norm())
            if (step & (step + 1)) == 0 or step + 1 == steps:
                left = float(total.norm()) / (step + 1) / first
                rows.append({"variant": name, "steps": step + 1, "one": first / float(x.norm()), "left": left})
    return pd.DataFrame(rows)


_AT = 5


def _blocks(n: int, outlier: float, seed: int) -> Tensor:
    """FP32 [n, 32] of normal values with `outlier` at one place in each row."""
    x = torch.randn(n, BLOCK, generator=torch.Generator().manual_seed(seed))
    x[:, _AT] = outlier
    return x
