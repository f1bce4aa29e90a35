"""Block quantization on the CPU in C, where there is a compiler; the twin of the same signature is the other path.

`quantize.c` is compiled for this processor at first use (under a second) and kept in the user's cache directory
under a name that holds its hash, the compiler's and the processor's. Many lines are split among torch's number of
threads; a call on a small tensor costs some ten microseconds.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from mxfp4.numerics.formats import BLOCK
from mxfp4.numerics.reference import Orientation, Outputs
from mxfp4.numerics.scale_rules import rule_addend

SOURCE = Path(__file__).with_suffix(".c")
# No contraction and no fast-math: the bytes are the twin's.
FLAGS = ("-std=c11", "-O3", "-ffp-contract=off", "-fno-trapping-math", "-shared", "-fPIC")
NATIVE_FLAG = "-mcpu=native" if platform.machine().startswith(("aarch64", "arm", "ppc")) else "-march=native"
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
        ("signs", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("out_kind", "mbits", "bias", "emax", "max_code", "addend")),
        *((name, ctypes.c_int64) for name in ("two_d", "hadamard", "stochastic")),
        ("hadamard_scale", ctypes.c_float),
        ("seed", ctypes.c_uint64),
        ("stream", ctypes.c_uint32),
    ]


def kernel():
    """The C function, or None where it cannot be built: no compiler, or a machine that is not little-endian."""
    return None if library() is None else library().mxfp4_quantize


@lru_cache
def library() -> ctypes.CDLL | None:
    """The built C file, its functions typed, or None."""
    if sys.byteorder != "little":
        return None
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC") or "cc", "gcc", "clang"))), None)
    if compiler is None:
        return None
    try:
        built = ctypes.CDLL(str(_build(compiler)))
    except (OSError, subprocess.SubprocessError):
        return None
    built.mxfp4_quantize.argtypes = (ctypes.POINTER(_Job), ctypes.c_int64, ctypes.c_int64)
    pointer, real = ctypes.c_void_p, ctypes.c_float
    built.mxfp4_scaled_fp8.argtypes = (pointer, pointer, ctypes.c_int64, real, ctypes.c_int)
    built.mxfp4_quantize.restype = built.mxfp4_scaled_fp8.restype = None
    return built


def _build(compiler: str) -> Path:
    """The shared library, built unless the cache has it; the name is put in place once it is whole."""
    command = [compiler, *FLAGS, NATIVE_FLAG]
    stat = os.stat(compiler)
    key = repr((SOURCE.read_bytes(), command, stat.st_size, stat.st_mtime_ns, _processor())).encode()
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mxfp4"
    try:
        root.mkdir(parents=True, exist_ok=True)
        folder = tempfile.mkdtemp(dir=root)
    except OSError:  # no home, or one that cannot be written
        root = Path(tempfile.gettempdir())
        folder = tempfile.mkdtemp(dir=root)
    path = root / f"quantize_{hashlib.sha256(key).hexdigest()[:20]}.so"
    try:
        if not path.exists():
            made = Path(folder) / path.name
            subprocess.run([*command, "-o", made, SOURCE], check=True, capture_output=True, timeout=120)
            os.replace(made, path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return path


def _processor() -> str:
    """What tells one instruction set from another: a cache may be shared by several machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.platform() + platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())


def quantize_matrix(
    x: Tensor, row: Orientation | None, col: Orientation | None, seed: Tensor | None
) -> tuple[Outputs, Outputs]:
    """Quantize x [batch, R, C] along C as `row` says and along R as `col` says; see the twin. Needs `kernel()`."""
    if x.dtype not in (torch.float32, torch.bfloat16):
        x = x.float()
    none = (None, None)
    return (
        none if row is None else _quantize(x, row, seed),
        none if col is None else _quantize(x.transpose(1, 2), col, seed),
    )


def _quantize(x: Tensor, how: Orientation, seed: Tensor | None) -> Outputs:
    spec, fmt = how.spec, how.spec.fmt
    batch, lines, k = x.shape
    direct = how.dtype in (None, torch.float32, torch.bfloat16)
    scale = None
    if how.dtype is None:
        out = torch.empty((batch, lines, k // 2 if fmt.bits == 4 else k), dtype=torch.uint8)
        scale = torch.empty((batch, lines // BLOCK if spec.block == "2d" else lines, k // BLOCK), dtype=torch.uint8)
    else:
        out = torch.empty((batch, lines, k), dtype=how.dtype if direct else torch.float32)
    signs = None if how.signs is None else how.signs.contiguous()
    job = _Job(
        x.data_ptr(),
        x.dtype == torch.bfloat16,
        batch,
        lines,
        k,
        *x.stride(),
        out.data_ptr(),
        0 if scale is None else scale.data_ptr(),
        0 if signs is None else signs.data_ptr(),
        _CODES if how.dtype is None else _BFLOAT16 if how.dtype == torch.bfloat16 else _FLOAT32,
        fmt.mbits,
        fmt.bias,
        fmt.emax,
        fmt.max_code,
        rule_addend(fmt, spec.scale_rule),
        spec.block == "2d",
        spec.hadamard,
        spec.stochastic,
        spec.hadamard**-0.5 if spec.hadamard else 1.0,
        seed.item() & (2**64 - 1) if spec.stochastic else 0,
        spec.stream,
    )
    if x.numel():
        _run(job, batch * lines, x.numel())
    return (out if direct else out.to(how.dtype)), scale


def scaled_fp8(x: Tensor, scale: Tensor, elem: str) -> Tensor:
    """`x.float() * scale` rounded to E4M3 or E5M2 as torch's cast does, in FP32, laid out as `empty_like`.

    Needs `kernel()`. scale: FP32, one element, such that no finite product is beyond the format's largest value.
    """
    x = x.float()
    out = torch.empty_like(x)
    if x.stride() != out.stride():  # gaps or overlaps
        x = torch.empty_like(x).copy_(x)
    mbits = {"e4m3": 3, "e5m2": 2}[elem]
    library().mxfp4_scaled_fp8(x.data_ptr(), out.data_ptr(), x.numel(), scale.item(), mbits)
    return out


def _run(job: _Job, lines: int, elements: int) -> None:
    function = kernel()
    threads = min(torch.get_num_threads(), elements // ELEMENTS_A_THREAD, lines // BLOCK)
    if threads < 2:
        function(job, 0, lines)
        return
    cuts = [lines * i // threads // BLOCK * BLOCK for i in range(threads)] + [lines]
    # ctypes lets go of the interpreter lock while the C function runs.
    list(_pool(threads).map(lambda i: function(job, cuts[i], cuts[i + 1]), range(threads)))


@lru_cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="mxfp4")
