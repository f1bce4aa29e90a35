"""Block quantization on the CPU in C, where there is a compiler; the twin of the same signature is the other path.

`library.py` compiles `quantize.c` at first use (under a second) and keeps the result in the user's cache. Many lines
are split among torch's number of threads; a call on a small tensor costs some ten microseconds.
"""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from mxfp4.numerics.formats import BLOCK, ELEMS
from mxfp4.numerics.kernels.cpu.library import load
from mxfp4.numerics.operand_plan import OperandPlan, output_shapes
from mxfp4.numerics.reference import Outputs
from mxfp4.numerics.scale_rules import rule_addend

SOURCE = Path(__file__).with_suffix(".c")
ELEMENTS_A_THREAD = 1 << 17  # fewer are not worth waking one

_CODES, _FLOAT32, _BFLOAT16 = 0, 1, 2


class _Job(ctypes.Structure):
    """The struct `job` of the C file."""

    _fields_ = [
        ("x", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("bfloat16", "batches", "lines", "k")),
        *((name, ctypes.c_int64) for name in ("batch_stride", "line_stride", "k_stride")),
        ("out", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("out_kind", "mbits", "bias", "emax", "max_code", "addend")),
        *((name, ctypes.c_int64) for name in ("two_d", "hadamard", "stochastic", "prescaled", "sign_kind")),
        ("seed", ctypes.c_uint64),
        ("hadamard_scale", ctypes.c_float),
        ("stream", ctypes.c_uint32),
        ("sign_words", ctypes.c_uint32 * 4),
    ]


def kernel():
    """The C function, or None where it cannot be built: no compiler, or a machine that is not little-endian."""
    return None if library() is None else library().mxfp4_quantize


@lru_cache
def library() -> ctypes.CDLL | None:
    """The built C file, its functions typed, or None."""
    built = load(SOURCE)
    if built is None:
        return None
    built.mxfp4_quantize.argtypes = (ctypes.POINTER(_Job), ctypes.c_int64, ctypes.c_int64)
    pointer, real = ctypes.c_void_p, ctypes.c_float
    built.mxfp4_scaled_fp8.argtypes = (pointer, pointer, ctypes.c_int64, real, ctypes.c_int)
    built.mxfp4_quantize.restype = built.mxfp4_scaled_fp8.restype = None
    built.mxfp4_fp8_scale.argtypes, built.mxfp4_fp8_scale.restype = (
        (pointer, ctypes.c_int64, ctypes.c_int, pointer),
        real,
    )
    return built


def quantize_matrix(
    x: Tensor, row: OperandPlan | None, col: OperandPlan | None, seed: Tensor | None
) -> tuple[Outputs, Outputs]:
    """Quantize x [R, C] or [batch, R, C] along C as `row` says and along R as `col` says; see the twin.

    Needs `kernel()`.
    """
    if x.dtype not in (torch.float32, torch.bfloat16):
        x = x.float()
    key = seed.item() & (2**64 - 1) if seed is not None else 0
    none = (None, None)
    return (
        none if row is None else _quantize(x, row, key),
        none if col is None else _quantize(x.transpose(-2, -1), col, key),
    )


def _quantize(x: Tensor, plan: OperandPlan, seed: int) -> Outputs:
    call = _call(plan, x.shape, x.stride(), x.dtype)
    out = torch.empty(call.out_shape, dtype=call.out_dtype, device="cpu")
    scale = None if call.scale_shape is None else torch.empty(call.scale_shape, dtype=torch.uint8, device="cpu")
    if call.elements:
        job = _Job.from_buffer_copy(call.job)
        job.x, job.out, job.seed = x.data_ptr(), out.data_ptr(), seed
        if scale is not None:
            job.scale = scale.data_ptr()
        _run(job, call.lines, call.elements)
    return (out if plan.dtype in (None, call.out_dtype) else out.to(plan.dtype)), scale


class _Call(NamedTuple):
    """What a plan asks of tensors of one shape, strides and dtype: all of the job but addresses and seed."""

    job: _Job
    lines: int
    elements: int
    out_shape: tuple[int, ...]
    out_dtype: torch.dtype
    scale_shape: tuple[int, ...] | None


@lru_cache(maxsize=4096)
def _call(plan: OperandPlan, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> _Call:
    *before, lines, k = shape
    batch, fmt = before[0] if before else 1, plan.fmt
    out_shape, scale_shape = output_shapes(shape, plan)
    kind = _CODES if plan.dtype is None else _BFLOAT16 if plan.dtype == torch.bfloat16 else _FLOAT32
    out_dtype = {_CODES: torch.uint8, _BFLOAT16: torch.bfloat16, _FLOAT32: torch.float32}[kind]
    job = _Job(
        bfloat16=dtype == torch.bfloat16,
        batches=batch,
        lines=lines,
        k=k,
        batch_stride=stride[0] if before else 0,
        line_stride=stride[-2],
        k_stride=stride[-1],
        out_kind=kind,
        mbits=fmt.mbits,
        bias=fmt.bias,
        emax=fmt.emax,
        max_code=fmt.max_code,
        addend=rule_addend(fmt, plan.scale_rule),
        two_d=plan.block == "2d",
        hadamard=plan.hadamard,
        stochastic=plan.stochastic,
        prescaled=plan.prescaled,
        sign_kind=plan.sign_kind,
        hadamard_scale=plan.hadamard**-0.5 if plan.hadamard else 1.0,
        stream=plan.stream,
        sign_words=plan.sign_words,
    )
    return _Call(job, batch * lines, batch * lines * k, out_shape, out_dtype, scale_shape)


def scaled_fp8(x: Tensor, scale: Tensor, elem: str, dtype: torch.dtype) -> Tensor:
    """`x.float() * scale` rounded to E4M3 or E5M2 as torch's cast does, in `dtype`, laid out as `empty_like`.

    Needs `kernel()`. scale: FP32, one element, such that no finite product is beyond the format's largest value.
    """
    x, out = _dense(x)
    return _scaled(x, out, scale.item(), elem).to(dtype)


def fp8_per_tensor(x: Tensor, elem: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(values in `dtype`, laid out as `empty_like`; the FP32 factor, 0-d): see `fp8.fp8_scale`. Needs `kernel()`."""
    x, out = _dense(x)
    factor = torch.empty((), dtype=torch.float32, device="cpu")
    scale = library().mxfp4_fp8_scale(x.data_ptr(), x.numel(), ELEMS[elem].mbits, factor.data_ptr())
    return _scaled(x, out, scale, elem).to(dtype), factor


def _dense(x: Tensor) -> tuple[Tensor, Tensor]:
    """X in FP32 without gaps or overlaps, and an empty tensor laid out alike."""
    x = x.float()
    out = torch.empty_like(x)
    return (x if x.stride() == out.stride() else torch.empty_like(x).copy_(x)), out


def _scaled(x: Tensor, out: Tensor, scale: float, elem: str) -> Tensor:
    library().mxfp4_scaled_fp8(x.data_ptr(), out.data_ptr(), x.numel(), scale, ELEMS[elem].mbits)
    return out


def _run(job: _Job, lines: int, elements: int) -> None:
    function = kernel()
    threads = min(elements // ELEMENTS_A_THREAD, lines // BLOCK)
    threads = min(threads, torch.get_num_threads()) if threads > 1 else 1
    if threads < 2:
        function(job, 0, lines)
        return
    cuts = [lines * i // threads // BLOCK * BLOCK for i in range(threads)] + [lines]
    # ctypes lets go of the interpreter lock while the C function runs.
    list(_pool(threads).map(lambda i: function(job, cuts[i], cuts[i + 1]), range(threads)))


@lru_cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="mxfp4")
