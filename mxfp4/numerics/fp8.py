"""FP8 with one FP32 scale a tensor, from its current maximum ("current scaling"), to nearest even: in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from mxfp4.numerics.formats import ELEMS

FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def fp8_scale(x: Tensor, elem: str) -> Tensor:
    """The FP32 scale that takes the largest magnitude of x to the format's; 1 for zeros or nothing, NaN with one."""
    if not x.numel():
        return x.new_ones((), dtype=torch.float32)
    low, high = x.aminmax()
    amax = torch.maximum(-low, high).to(torch.float32)
    scale = (ELEMS[elem].max / amax).masked_fill_(amax == 0, 1.0)
    return scale.clamp_(max=torch.finfo(torch.float32).max)


def scaled_fp8(x: Tensor, scale: Tensor, elem: str, dtype: torch.dtype) -> Tensor:
    """(x * scale) in E4M3 or E5M2, as values in `dtype`; no finite product is out of range."""
    return (x.float() * scale).to(FP8[elem]).to(dtype)
