"""A matrix rotated by the block Hadamard transform, as a torch operator that is opaque to torch.compile.

For what layers do beside quantization, where no gradient is recorded: `hadamard.py` says what the rotation is, and has
`hadamard_transform`, which differentiates. An operator for the reason given in `block_quantize.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mxfp4.numerics.formats import one_of
from mxfp4.numerics.hadamard import SIZES
from mxfp4.numerics.kernels import BACKENDS, Backend

_library = torch.library.Library("mxfp4", "FRAGMENT")
_library.define("rotate(Tensor t, int size, Tensor? signs, bool inverse, bool both, ScalarType dtype) -> Tensor")
_library.define("rotate_unclipped(Tensor t, Tensor unclipped, int size, ScalarType dtype) -> Tensor")


def _implement(key: str, backend: Backend) -> None:
    def rotate(t, size, signs, inverse, both, dtype):
        return backend.rotate_matrix(t, size, signs, inverse, both, dtype)

    def rotate_unclipped(t, unclipped, size, dtype):
        return backend.rotate_matrix(t, size, None, False, False, dtype, unclipped)

    _library.impl("rotate", rotate, key)
    _library.impl("rotate_unclipped", rotate_unclipped, key)


for _key, _backend in BACKENDS.items():
    _implement(_key, _backend)


@torch.library.register_fake("mxfp4::rotate", lib=_library)
def _rotate_shape(t, size, signs, inverse, both, dtype):
    return t.new_empty(t.shape, dtype=dtype)


@torch.library.register_fake("mxfp4::rotate_unclipped", lib=_library)
def _rotate_unclipped_shape(t, unclipped, size, dtype):
    return t.new_empty(t.shape, dtype=dtype)


def rotated(
    t: Tensor,
    size: int,
    signs: Tensor | None = None,
    *,
    inverse: bool = False,
    both: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """`t` [R, C] of any float dtype and strides -> t H [R, C] in `dtype`, contiguous; with `both` H t H, its own inverse.

    H is in blocks of `size` (16, 32, 64 or 128), computed in FP32 and rounded to `dtype` once. `signs`, FP32 [size], come
    before H along the last axis, with `inverse` after it. Not differentiable: RuntimeError where a gradient would be
    recorded. Raises ValueError for another size, or where a rotated axis is no multiple of it.
    """
    if torch.is_grad_enabled() and t.requires_grad:
        raise RuntimeError(
            "rotated records no gradient: hadamard_transform does, and torch.no_grad() says that none is wanted"
        )
    one_of("Hadamard size", size, SIZES)
    if t.ndim != 2 or t.shape[1] % size or (both and t.shape[0] % size):
        along = "both axes" if both else "the last axis"
        raise ValueError(f"rotating {along} in groups of {size} needs a matrix of such multiples, got {tuple(t.shape)}")
    if signs is not None and (signs.dtype != torch.float32 or signs.shape != (size,) or not signs.is_contiguous()):
        raise ValueError(f"signs must be contiguous float32 [{size}], got {signs.dtype} {tuple(signs.shape)}")
    return torch.ops.mxfp4.rotate(t, size, signs, inverse, both, dtype)
