"""Block quantization in Triton: what the kernel (`block_kernel.py`) is launched with.

Tiles, constants and outputs follow from the two orientations, the matrix and the chip. The bytes are those of
`reference.py`, the twin of the same signature.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
from torch import Tensor

from mxfp4.numerics.formats import BLOCK
from mxfp4.numerics.kernels.triton import block_kernel
from mxfp4.numerics.reference import Orientation, Outputs
from mxfp4.numerics.scale_rules import rule_addend

PACKED, VALUES = 1, 2  # what an orientation writes; 0: nothing


def quantize_matrix(
    x: Tensor, row: Orientation | None, col: Orientation | None, seed: Tensor | None
) -> tuple[Outputs, Outputs]:
    """Quantize x [batch, R, C] (FP32, BF16 or FP16, any strides) along C as `row` says and along R as `col` says.

    Returns ((values, scales), (values, scales)), the second stored transposed; see the twin for shapes.
    """
    transposed = x.stride(1) == 1 and x.stride(2) != 1
    if transposed:  # threads follow memory
        x, row, col = x.transpose(1, 2), col, row
    batch, rows, columns = x.shape
    row_out, col_out = outputs(x, (batch, rows, columns), row), outputs(x, (batch, columns, rows), col)
    if x.numel():
        grid, arguments, options = launch(x, row, col, seed, row_out, col_out, *chip(x.device))
        with torch.cuda.device_of(x):
            block_kernel.quantize_kernel[grid](**arguments, **options)
    return (col_out, row_out) if transposed else (row_out, col_out)


@lru_cache
def chip(device: torch.device) -> tuple[int, int]:
    """(which instructions `block_native.py` may use, threads a warp) of a device."""
    if device.type != "cuda":
        return 0, 32
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return 950 if properties.gcnArchName.startswith("gfx950") else 0, 64
    return {9: 90, 10: 100}.get(properties.major, 0), 32


def launch(
    x: Tensor,
    row: Orientation | None,
    col: Orientation | None,
    seed: Tensor | None,
    row_out,
    col_out,
    level: int,
    warp: int,
) -> tuple[tuple[int, int], dict, dict]:
    """(grid, arguments, constants and options) of the kernel: what `quantize_matrix` runs and `isa` compiles."""
    batch, rows, columns = x.shape
    tiling = _tiling(row, col)
    row_tiles, column_tiles = batch * triton.cdiv(rows, tiling["TM"]), triton.cdiv(columns, tiling["TN"])
    along_rows = row_tiles <= 65535  # what the grid's second axis can count; the first runs along memory
    reach = 256 * max(abs(x.stride(1)) + abs(x.stride(2)), rows, columns)
    arguments = {
        "x": x,
        "row_values": _words(row_out[0], row),
        "row_scales": row_out[1],
        "col_values": _words(col_out[0], col),
        "col_scales": col_out[1],
        "row_signs": None if row is None else row.signs,
        "col_signs": None if col is None else col.signs,
        "seed_ptr": seed,
        "row_stream": 0 if row is None else row.spec.stream,
        "col_stream": 0 if col is None else col.spec.stream,
        "R": rows,
        "C": columns,
        "row_blocks": columns // BLOCK,
        "col_blocks": rows // BLOCK,
        "batch_stride": x.stride(0),
        "row_stride": x.stride(1),
        "col_stride": x.stride(2),
    }
    options = {
        **tiling,
        "MASKED": rows % tiling["TM"] != 0 or columns % tiling["TN"] != 0,
        "BATCHED": batch > 1,
        "ROW_AXIS": int(along_rows),
        "WIDE": reach >= 2**31,
        "ROW_STRIDE": x.stride(1) if col is not None and x.stride(2) == 1 and level else 0,
        "NATIVE": level,
        **_orientation("ROW", row, x.dtype, level),
        **_orientation("COL", col, x.dtype, level),
        "num_warps": tiling["P"] // warp,
    }
    grid = (column_tiles, row_tiles) if along_rows else (row_tiles, column_tiles)
    return grid, arguments, options


def _tiling(row: Orientation | None, col: Orientation | None) -> dict:
    """Tile, threads and columns at a time; measured on an H200 (runs/bench): what leads is how scales share sectors."""
    group = max(BLOCK if how is None else max(BLOCK, how.spec.hadamard) for how in (row, col))
    tiling = {"TM": max(64, group), "TN": 128, "P": 128, "V": max(64 // group, 1), "SYNC": False}
    if group == BLOCK and row is None and col and col.dtype is None and not col.spec.stochastic:
        tiling |= {"TM": 128, "V": 4}
    plain = [
        how for how in (row, col) if how and how.dtype is None and how.spec.block == "1d" and not how.spec.hadamard
    ]
    if len(plain) == 2 and not any(how.spec.stochastic for how in plain):
        tiling |= {"TN": 256, "P": 256, "SYNC": True}
    return tiling


def _words(values: Tensor | None, how: Orientation | None) -> Tensor | None:
    return values.view(torch.int32) if how is not None and how.dtype is None else values


def _orientation(prefix: str, how: Orientation | None, dtype: torch.dtype, level: int) -> dict:
    """The kernel's constants for one orientation."""
    if how is None:
        names = ("MODE", "H", "2D", "MBITS", "BIAS", "EMAX", "MAX", "ADDEND", "CLIPS", "SR", "HALVES")
        return {f"{prefix}_{name}": 0 for name in names} | {f"{prefix}_SHIFT": 0, f"{prefix}_G": BLOCK}
    spec = how.spec
    fmt, size = spec.fmt, spec.hadamard
    # A power of two is left to the scale, unless x may be so small that it would lose bits.
    exact = dtype != torch.float32 and size in (16, 64)
    packed = how.dtype is None
    values = {
        "MODE": PACKED if packed else VALUES,
        "G": max(BLOCK, size),
        "H": size,
        "SHIFT": {16: 2, 64: 3}[size] if exact else 0,
        "2D": spec.block == "2d",
        "MBITS": fmt.mbits,
        "BIAS": fmt.bias,
        "EMAX": fmt.emax,
        "MAX": fmt.max_code,
        "ADDEND": rule_addend(fmt, spec.scale_rule),
        "CLIPS": spec.scale_rule == "floor" or (spec.scale_rule == "even" and spec.stochastic),
        "SR": spec.stochastic,
        "HALVES": level == 90 and packed and fmt.mbits == 1 and not spec.stochastic and size <= BLOCK,
    }
    return {f"{prefix}_{name}": value for name, value in values.items()}


def outputs(x: Tensor, shape: tuple[int, int, int], how: Orientation | None) -> Outputs:
    """Empty (values, scales) for blocks along the last axis of `shape`."""
    if how is None:
        return None, None
    batch, rows, k = shape
    if how.dtype is not None:
        return x.new_empty(shape, dtype=how.dtype), None
    packed = k // 2 if how.spec.fmt.bits == 4 else k
    scale_rows = rows // BLOCK if how.spec.block == "2d" else rows
    scales = x.new_empty((batch, scale_rows, k // BLOCK), dtype=torch.uint8)
    return x.new_empty((batch, rows, packed), dtype=torch.uint8), scales
