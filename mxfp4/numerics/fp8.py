"""FP8 with one FP32 scale a tensor, to nearest even: in plain torch.

The scale comes from the tensor's own maximum ("current scaling") or from those of earlier steps ("delayed scaling").
"""

from __future__ import annotations

import torch
from torch import Tensor

from mxfp4.numerics.formats import ELEMS

FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def fp8_scale(x: Tensor, elem: str) -> Tensor:
    """The FP32 scale that takes the largest magnitude of x to the format's; 1 for zeros or nothing, NaN with one."""
    return scale_of_amax(largest_magnitude(x), elem)


def largest_magnitude(x: Tensor) -> Tensor:
    """FP32 0-d; 0 for nothing, NaN with one."""
    if not x.numel():
        return x.new_zeros((), dtype=torch.float32)
    low, high = x.aminmax()
    return torch.maximum(-low, high).to(torch.float32)


def scale_of_amax(amax: Tensor, elem: str) -> Tensor:
    """The FP32 scale that takes `amax` (FP32, 0-d) to the format's largest magnitude, at most FP32's; 1 for 0."""
    scale = (ELEMS[elem].max / amax).masked_fill_(amax == 0, 1.0)
    return scale.clamp_(max=torch.finfo(torch.float32).max)


def scaled_fp8(x: Tensor, scale: Tensor, elem: str, dtype: torch.dtype) -> Tensor:
    """(x * scale) in E4M3 or E5M2, as values in `dtype`; no finite product is out of range."""
    return (x.float() * scale).to(FP8[elem]).to(dtype)


def saturated_fp8(x: Tensor, scale: Tensor, elem: str) -> Tensor:
    """(x * scale) in E4M3 or E5M2, saturating, as a float8 tensor; what is not finite becomes NaN."""
    largest = ELEMS[elem].max
    scaled = (x.float() * scale).clamp(-largest, largest)
    return torch.where(x.isfinite(), scaled, torch.nan).to(FP8[elem])
