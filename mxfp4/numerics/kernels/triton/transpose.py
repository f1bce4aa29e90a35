"""Codes of a matrix packed along one axis, packed along the other: what square blocks need to serve both orientations.

Nothing is quantized again: a tile of codes is unpacked into registers, transposed and packed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _turn_kernel(source, target, R, C, PER_BYTE: tl.constexpr, TILE: tl.constexpr):
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


def turn(qdata: Tensor, per_byte: int) -> Tensor:
    """uint8 [R, C / per_byte] -> [C, R / per_byte]: the twin is `packed_operands`'s for the CPU."""
    rows, columns = qdata.shape[0], qdata.shape[1] * per_byte
    out = qdata.new_empty((columns, rows // per_byte))
    tile = 64
    if out.numel():
        with torch.cuda.device_of(out):
            grid = (triton.cdiv(rows, tile) * triton.cdiv(columns, tile),)  # one axis: others count to 65535
            _turn_kernel[grid](qdata.contiguous(), out, rows, columns, PER_BYTE=per_byte, TILE=tile)
    return out
