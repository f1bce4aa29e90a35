"""The block Hadamard rotation: groups of `size` neighbours along an axis, times a Sylvester matrix over sqrt(size).

H is symmetric and orthogonal, so rotating both operands of a GEMM along its contraction axis changes nothing in exact
arithmetic: (X H)(W H)^T = X W^T. A sign vector d in front, x -> (x * d) H, cancels in the same way (the randomized
Hadamard transform). P1 uses size 16 without signs.

The transform is a butterfly of FP32 additions in a fixed order, stages of distance 1, 2, 4, ..., then one
multiplication: every backend gives the same bits. A matrix product would not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from mxfp4.numerics.formats import as_index, check_float, one_of
from mxfp4.numerics.philox import as_seed, random_signs

SIZES = (16, 32, 64, 128)


@dataclass(frozen=True)
class Hadamard:
    """Which rotation: block `size`, and `signs`.

    `signs` is None (deterministic Sylvester), a tuple of `size` numbers +1 or -1, or "seed": drawn from the seed that
    the call is given. Raises ValueError for any other size or signs.
    """

    size: int = 16
    signs: tuple[int, ...] | str | None = None

    def __post_init__(self):
        object.__setattr__(self, "size", one_of("Hadamard size", as_index("Hadamard size", self.size), SIZES))
        if self.signs is None or (isinstance(self.signs, str) and self.signs == "seed"):
            return
        signs = tuple(self.signs) if isinstance(self.signs, Iterable) else (self.signs,)
        if len(signs) != self.size or any(s not in (1, -1) for s in signs):
            given = self.signs if isinstance(self.signs, str) else signs
            raise ValueError(f"Hadamard signs must be None, 'seed' or {self.size} numbers +1 or -1, got {given!r}")
        object.__setattr__(self, "signs", tuple(int(s) for s in signs))

    def resolve(self, seed: Tensor | None, stream: int, device: torch.device) -> Tensor | None:
        """The sign vector as FP32 [size] on `device`, or None where there is none."""
        if self.signs is None:
            return None
        if self.signs == "seed":
            return random_signs(as_seed(seed, device), self.size, stream)
        return _sign_vector(self.signs, device)


def _sign_vector(signs: tuple[int, ...], device: torch.device) -> Tensor:
    """FP32 [size], made of bits on the device: a copy from the host cannot be captured in a CUDA graph."""
    place, parts = torch.arange(min(len(signs), 32), dtype=torch.int64, device=device), []
    for start in range(0, len(signs), 32):
        word = sum((s < 0) << i for i, s in enumerate(signs[start : start + 32]))
        parts.append((torch.full((), word, dtype=torch.int64, device=device) >> place) & 1)
    return 1.0 - 2.0 * torch.cat(parts).to(torch.float32)


def rotate_last(x: Tensor, size: int, signs: Tensor | None = None, inverse: bool = False) -> Tensor:
    """FP32 `x` [..., K] rotated in groups of `size` along its last axis; K must be a multiple of `size`."""
    shape = x.shape
    x = x.reshape(-1, size)
    if signs is not None and not inverse:
        x = x * signs
    x = _butterfly(x, size, 1)
    if signs is not None and inverse:
        x = x * signs
    return x.view(shape)


def _butterfly(x: Tensor, size: int, step: int) -> Tensor:
    """FP32 `x` rotated in groups of `size` elements that lie `step` apart as they are counted, the last axis fastest."""
    shape, distance = x.shape, step
    while distance < size * step:
        pairs = x.reshape(-1, 2, distance)
        a, b = pairs[:, 0], pairs[:, 1]
        x = torch.stack([a + b, a - b], dim=1)
        distance *= 2
    return x.view(shape) * (1.0 / math.sqrt(size))


def rotate_matrix(
    x: Tensor, size: int, signs: Tensor | None, inverse: bool, both: bool, dtype: torch.dtype,
    unclipped: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`x` [R, C] of any float dtype, rotated in FP32 along C (with `signs`, as in `rotate_last`), with `both` then along R.

    Returns [R, C] in `dtype`, contiguous: the twin of the Triton kernel of this name. The sizes of the rotated axes must
    be multiples of `size`. `unclipped`, bool [R, C]: elements that are not count as 0.
    """
    if unclipped is not None:
        x = x.masked_fill(~unclipped, 0)
    x = rotate_last(x.float(), size, signs, inverse)
    if both and x.numel():
        x = _butterfly(x, size, x.shape[1])
    return x.to(dtype)


def hadamard_transform(
    x: Tensor, hadamard: Hadamard | None = Hadamard(), *, axis: int = -1, seed=None, inverse: bool = False
) -> Tensor:
    """`x` rotated along `axis`, in FP32. `inverse=True` undoes it; `seed` is needed for signs drawn from a seed.

    Raises ValueError when the size of the axis is not a multiple of the rotation's, or when signs="seed" comes
    without a seed; TypeError for input that is not float.
    """
    check_float(x)
    check_rotation(hadamard)
    axis = as_index("axis", axis)
    if hadamard is None:
        return x.float()
    if hadamard.signs == "seed" and seed is None:
        raise ValueError('hadamard_transform with signs="seed" needs seed=...: another seed would not undo it')
    check_multiple(x, axis, hadamard.size, "the Hadamard size")
    signs = hadamard.resolve(None if seed is None else as_seed(seed, x.device), 0, x.device)
    return rotate_last(x.float().movedim(axis, -1), hadamard.size, signs, inverse).movedim(-1, axis)


def check_rotation(hadamard) -> None:
    """Raise TypeError unless `hadamard` is None or a Hadamard."""
    if hadamard is not None and not isinstance(hadamard, Hadamard):
        raise TypeError(f"hadamard must be None or an mxfp4.Hadamard, got {hadamard!r}")


def check_multiple(x: Tensor, axis: int, of: int, what: str) -> None:
    """Raise ValueError unless `axis` exists and its size is a positive multiple of `of`."""
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"axis={axis} does not exist in a tensor of shape {tuple(x.shape)}")
    size = x.shape[axis]
    if size == 0 or size % of:
        raise ValueError(
            f"axis {axis} of shape {tuple(x.shape)} has size {size}, which is not a positive multiple of {of} ({what})"
        )
