"""MXTensor: a block-quantized tensor, elements and scales apart (OCP MX v1.0)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mxfp4.numerics.formats import BLOCK, FLOATS, decode, e8m0_value, elem_format, one_of, unpack_nibbles
from mxfp4.numerics.hadamard import Hadamard, rotate_last
from mxfp4.numerics.reference import spread


@dataclass(frozen=True, eq=False)
class MXTensor:
    """A quantized tensor of logical shape `shape`, with blocks along `axis`.

    - `qdata`: uint8, the contraction axis `axis` moved last; E2M1 packs two elements a byte (even element in the low
      nibble: [..., K/2]), E4M3 and E5M2 take one byte each ([..., K]).
    - `scale`: uint8 E8M0, [..., K/32], for 2D blocks [..., R/32, K/32]. 255: the block is NaN.
    - `hadamard`, `signs`: the rotation that was applied along `axis` before quantization, and its resolved signs.

    Works with torch.save (and weights_only loads), copy.deepcopy and `.to(device)`.
    """

    qdata: Tensor
    scale: Tensor
    elem: str
    block: str
    axis: int
    shape: tuple[int, ...]
    hadamard: Hadamard | None = None
    signs: Tensor | None = None

    @property
    def block_size(self) -> int:
        return BLOCK

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def device(self) -> torch.device:
        return self.qdata.device

    def codes(self) -> Tensor:
        """Element codes, uint8, one an element, `axis` last."""
        return unpack_nibbles(self.qdata) if elem_format(self.elem).bits == 4 else self.qdata

    def dequantize(self, dtype: torch.dtype | None = None, *, rotated: bool = True) -> Tensor:
        """The values, in the original orientation; `dtype` None is FP32, which holds every E2M1 value exactly.

        With a rotation they are in the rotated basis, which is what a GEMM contracts; `rotated=False` rotates back.
        """
        dtype = torch.float32 if dtype is None else one_of("dtype", dtype, FLOATS)
        value = decode(self.codes(), elem_format(self.elem)) * spread(e8m0_value(self.scale), self.block)
        if self.hadamard is not None and not rotated:
            value = rotate_last(value, self.hadamard.size, self.signs, inverse=True)
        return value.movedim(-1, self.axis).to(dtype)

    def t(self) -> MXTensor:
        """The transpose of a 2-D tensor, without touching data: the same blocks, now along the other axis.

        A 2D-blocked tensor without rotation is as good a GEMM operand transposed as it was before (P2's
        transposition invariance); a 1D-blocked one has its blocks along the wrong axis, and `matmul` says so.
        """
        if self.ndim != 2:
            raise ValueError(f"t() needs a 2-D tensor, got shape {self.shape}")
        return replace(self, axis=-3 - self.axis, shape=(self.shape[1], self.shape[0]))

    def to(self, device: torch.device | str | int) -> MXTensor:
        """The same tensor on another device. Raises TypeError for a dtype: `dequantize(dtype)` converts."""
        if isinstance(device, torch.dtype):
            raise TypeError(f"MXTensor.to takes a device, got {device}: use dequantize({device}) for values")
        signs = None if self.signs is None else self.signs.to(device)
        return replace(self, qdata=self.qdata.to(device), scale=self.scale.to(device), signs=signs)

    def __repr__(self) -> str:
        rotation = "" if self.hadamard is None else f", hadamard={self.hadamard}"
        return (
            f"MXTensor(shape={self.shape}, elem={self.elem!r}, block={self.block!r}, axis={self.axis}{rotation}, "
            f"device={str(self.device)!r})"
        )


torch.serialization.add_safe_globals([MXTensor, Hadamard])
