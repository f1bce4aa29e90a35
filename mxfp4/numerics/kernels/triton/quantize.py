"""Block quantization in Triton: what the kernel (`block_kernel.py`) is launched with.

Tiles, constants and outputs follow from the two plans, the matrix and the chip, and are worked out once for each. The
bytes are those of `reference.py`, the twin of the same signature.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from mxfp4.numerics.formats import BLOCK
from mxfp4.numerics.kernels.triton import block_kernel
from mxfp4.numerics.kernels.triton.launcher import Launch, Launcher, chip, on_device_of
from mxfp4.numerics.operand_plan import OperandPlan, output_shapes
from mxfp4.numerics.reference import Outputs
from mxfp4.numerics.scale_rules import rule_addend

PACKED, VALUES = 1, 2  # what an orientation writes; 0: nothing
_quantize = Launcher(block_kernel.quantize_kernel)


def quantize_matrix(
    x: Tensor, row: OperandPlan | None, col: OperandPlan | None, seed: Tensor | None
) -> tuple[Outputs, Outputs]:
    """Quantize x [R, C] or [batch, R, C], any strides, along C as `row` says and along R as `col` says.

    Returns ((values, scales), (values, scales)), the second stored transposed; see the twin for shapes.
    """
    if x.dtype == torch.float64:
        x = x.float()
    transposed = x.stride(-2) == 1 and x.stride(-1) != 1
    if transposed:  # threads follow memory
        x, row, col = x.transpose(-2, -1), col, row
    row_out, col_out = outputs(x, x.shape, row), outputs(x, (*x.shape[:-2], x.shape[-1], x.shape[-2]), col)
    if x.numel():
        seed = seed if any(plan is not None and plan.is_random for plan in (row, col)) else None
        tensors = (x, _words(row_out[0], row), row_out[1], _words(col_out[0], col), col_out[1], seed)
        key = (row, col, x.shape, x.stride(), x.dtype, x.device)
        with on_device_of(x):
            _quantize(key, tensors, lambda: launch(x, row, col, seed, row_out, col_out, *chip(x.device)))
    return (col_out, row_out) if transposed else (row_out, col_out)


def launch(
    x: Tensor, row: OperandPlan | None, col: OperandPlan | None, seed: Tensor | None, row_out, col_out, level: int,
    warp: int,
) -> Launch:  # fmt: skip
    """(grid, arguments, constants and options) of the kernel: what `quantize_matrix` runs and `isa` compiles."""
    *before, rows, columns = x.shape
    batch = before[0] if before else 1
    tiling = _tiling(row, col)
    row_tiles, column_tiles = batch * triton.cdiv(rows, tiling["TM"]), triton.cdiv(columns, tiling["TN"])
    along_rows = row_tiles <= 65535  # what the grid's second axis can count; the first runs along memory
    row_stride, col_stride = x.stride(-2), x.stride(-1)
    reach = 256 * max(abs(row_stride) + abs(col_stride), rows, columns)
    arguments = {
        "x": x,
        "row_values": _words(row_out[0], row),
        "row_scales": row_out[1],
        "col_values": _words(col_out[0], col),
        "col_scales": col_out[1],
        "seed_ptr": seed,
        "row_stream": 0 if row is None else row.stream,
        "col_stream": 0 if col is None else col.stream,
        "R": rows,
        "C": columns,
        "row_blocks": columns // BLOCK,
        "col_blocks": rows // BLOCK,
        "batch_stride": x.stride(0) if before else 0,
        "row_stride": row_stride,
        "col_stride": col_stride,
    }
    options = {
        **tiling,
        "MASKED": rows % tiling["TM"] != 0 or columns % tiling["TN"] != 0,
        "BATCHED": batch > 1,
        "ROW_AXIS": int(along_rows),
        "WIDE": reach >= 2**31,
        "ROW_STRIDE": row_stride if col is not None and col_stride == 1 and level else 0,
        "NATIVE": level,
        **_constants("ROW", row, x.dtype, level),
        **_constants("COL", col, x.dtype, level),
        "num_warps": tiling["P"] // warp,
    }
    if any(plan is not None and plan.prescaled for plan in (row, col)):
        options["enable_fp_fusion"] = False
    grid = (column_tiles, row_tiles) if along_rows else (row_tiles, column_tiles)
    return grid, arguments, options


def _tiling(row: OperandPlan | None, col: OperandPlan | None) -> dict:
    """Tile, threads and columns at a time; measured on an H200 (runs/bench): what leads is how scales share sectors."""
    group = max(BLOCK if plan is None else max(BLOCK, plan.hadamard) for plan in (row, col))
    tiling = {"TM": max(64, group), "TN": 128, "P": 128, "V": max(64 // group, 1), "SYNC": False}
    if group == BLOCK and row is None and col and col.dtype is None and not col.stochastic:
        tiling |= {"TM": 128, "V": 4}
    plain = [plan for plan in (row, col) if plan and plan.dtype is None and plan.block == "1d" and not plan.hadamard]
    if len(plain) == 2 and not any(plan.stochastic for plan in plain):
        tiling |= {"TN": 256, "P": 256, "SYNC": True}
    return tiling


def _words(values: Tensor | None, plan: OperandPlan | None) -> Tensor | None:
    return values.view(torch.int32) if plan is not None and plan.dtype is None else values


def _constants(prefix: str, plan: OperandPlan | None, dtype: torch.dtype, level: int) -> dict:
    """The kernel's constants for one orientation."""
    if plan is None:
        names = ("MODE", "H", "2D", "MBITS", "BIAS", "EMAX", "MAX", "ADDEND", "CLIPS", "SR", "HALVES", "SHIFT")
        unused = dict.fromkeys((*names, "SIGNS", "SIGN_BITS", "PRESCALED"), 0) | {"G": BLOCK}
        return {f"{prefix}_{name}": value for name, value in unused.items()}
    fmt, size, packed = plan.fmt, plan.hadamard, plan.dtype is None
    # A power of two is left to the scale, unless x may be so small that it would lose bits.
    exact = dtype != torch.float32 and size in (16, 64)
    values = {
        "MODE": PACKED if packed else VALUES,
        "G": max(BLOCK, size),
        "H": size,
        "SHIFT": {16: 2, 64: 3}[size] if exact else 0,
        "2D": plan.block == "2d",
        "MBITS": fmt.mbits,
        "BIAS": fmt.bias,
        "EMAX": fmt.emax,
        "MAX": fmt.max_code,
        "ADDEND": rule_addend(fmt, plan.scale_rule),
        "CLIPS": plan.scale_rule == "floor" or (plan.scale_rule == "even" and plan.stochastic),
        "SR": plan.stochastic,
        "SIGNS": plan.sign_kind,
        "SIGN_BITS": sum(word << 32 * i for i, word in enumerate(plan.sign_words)),
        "PRESCALED": plan.prescaled,
        "HALVES": level == 90 and packed and fmt.mbits == 1 and not plan.stochastic and size <= BLOCK
        and not plan.prescaled,
    }  # fmt: skip
    return {f"{prefix}_{name}": value for name, value in values.items()}


def outputs(x: Tensor, shape: tuple[int, ...], plan: OperandPlan | None) -> Outputs:
    """Empty (values, scales) for blocks along the last axis of `shape`."""
    if plan is None:
        return None, None
    values, scales = output_shapes(tuple(shape), plan)
    if scales is None:
        return x.new_empty(values, dtype=plan.dtype), None
    return x.new_empty(values, dtype=torch.uint8), x.new_empty(scales, dtype=torch.uint8)
