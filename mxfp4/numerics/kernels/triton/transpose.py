"""Codes of a matrix packed along one axis, packed along the other: what square blocks need to serve both orientations.

Nothing is quantized again: a tile of codes is unpacked into registers, transposed and packed.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from mxfp4.numerics.kernels.triton.launcher import Launcher, on_device_of


@triton.jit
def _transpose_kernel(source, target, R, C, PER_BYTE: tl.constexpr, TILE: tl.constexpr):
    """Codes [R, C], C packed -> [C, R], R packed; PER_BYTE 2 (E2M1) or 1, R and C multiples of it."""
    W: tl.constexpr = TILE // PER_BYTE
    tiles = (C + TILE - 1) // TILE
    down, across = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    r = down * TILE + tl.arange(0, TILE)
    c = across * W + tl.arange(0, W)
    inside = (r[:, None] < R) & (c[None, :] < C // PER_BYTE)
    codes = tl.load(source + r.to(tl.int64)[:, None] * (C // PER_BYTE) + c[None, :], mask=inside, other=0)
    if PER_BYTE == 2:
        codes = tl.reshape(tl.join(codes & 0xF, codes >> 4), (TILE, TILE))
    codes = tl.trans(codes)
    if PER_BYTE == 2:
        low, high = tl.split(tl.reshape(codes, (TILE, W, 2)))
        codes = low | (high << 4)
    line = across * TILE + tl.arange(0, TILE)
    place = down * W + tl.arange(0, W)
    inside = (line[:, None] < C) & (place[None, :] < R // PER_BYTE)
    tl.store(target + line.to(tl.int64)[:, None] * (R // PER_BYTE) + place[None, :], codes, mask=inside)


TILE = 64
_transpose = Launcher(_transpose_kernel)


def turn(qdata: Tensor, per_byte: int) -> Tensor:
    """uint8 [R, C / per_byte] -> [C, R / per_byte]: the twin is `packed_operands`'s for the CPU."""
    rows, columns = qdata.shape[0], qdata.shape[1] * per_byte
    out = qdata.new_empty((columns, rows // per_byte))
    if out.numel():
        source = qdata.contiguous()
        grid = (triton.cdiv(rows, TILE) * triton.cdiv(columns, TILE),)  # one axis: others count to 65535
        arguments = {"source": source, "target": out, "R": rows, "C": columns}
        with on_device_of(out):
            describe = lambda: (grid, arguments, {"PER_BYTE": per_byte, "TILE": TILE})
            _transpose((rows, columns, per_byte, out.device), (source, out), describe)
    return out
