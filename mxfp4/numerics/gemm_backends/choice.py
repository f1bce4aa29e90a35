"""Which back end multiplies packed operands on a device: chosen once a process, after its check has passed there.

The environment variable MXFP4_GEMM_BACKEND, which `set_gemm_backend` sets, names one, or `auto` (the default): the
first of BACKENDS that is there and passes. What the chosen one does not take, `triton` multiplies, and where that is
refused as well, the library multiplies values. Records hold the name, and the key of a native run depends on it.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Hashable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from mxfp4.errors import Notice, UserError
from mxfp4.numerics.gemm_backends.backends import BACKENDS, GemmBackend
from mxfp4.numerics.gemm_backends.self_check import problem, sample_problem
from mxfp4.numerics.native import chip_path, compile_time_constant
from mxfp4.numerics.tensor import MXTensor

VARIABLE = "MXFP4_GEMM_BACKEND"
AUTO, EMULATED = "auto", "emulated"
CHOICES = (AUTO, *BACKENDS, EMULATED)


@dataclass(frozen=True)
class Status:
    """How a back end stands on a device."""

    name: str
    state: str
    """usable, not installed or refused."""
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.state}: {self.reason}" if self.reason else self.state


def requested() -> str:
    """The back end that is asked for, one of CHOICES. UserError for another one."""
    name = os.environ.get(VARIABLE) or AUTO
    if name not in CHOICES:
        raise UserError(f"{VARIABLE}={name!r} is not known; allowed: {', '.join(CHOICES)}")
    return name


def set_gemm_backend(name: str) -> None:
    """Choose what multiplies packed operands on chips with FP4 units, here and in processes that are started later.

    Args:
        name: auto, aiter, scaled_mm, triton, or emulated: values in BF16 and the library's GEMM.

    Raises:
        UserError: for another name. A back end that cannot be used raises at its first use.

    """
    if name not in CHOICES:
        raise UserError(f"gemm_backend={name!r} is not known; allowed: {', '.join(CHOICES)}")
    os.environ[VARIABLE] = name


@compile_time_constant
def gemm_backend(device: torch.device | str) -> str:
    """The name of the back end on `device`: aiter, scaled_mm, triton, or emulated.

    The first call on a device checks back ends there, which takes seconds. Raises UserError where one was asked for by
    name and cannot be used; warns (Notice) of one that `auto` refused.
    """
    chain = _chain(_indexed(device), requested())
    return chain[0].name if chain else EMULATED


@compile_time_constant
def matmul_path(device: torch.device | str) -> str:
    """ "native" where the chip's own units multiply MXFP4, else "emulated".

    Emulated: operands are dequantized to BF16 (exact for E2M1 x E8M0) and multiplied by the library's BF16 GEMM, on
    the CPU to FP32 and an FP32 one. The values are those of the native GEMM up to the order of FP32 accumulation.
    """
    return "emulated" if gemm_backend(device) == EMULATED else "native"


@compile_time_constant
def described(device: torch.device | str) -> str:
    """The back ends in the order in which they are asked, such as "aiter, else triton, else emulated"."""
    return ", else ".join([*(b.name for b in _chain(_indexed(device), requested())), EMULATED])


def statuses(device: torch.device | str) -> list[Status]:
    """How each back end stands on `device`, the fastest first."""
    return [_status(name, _indexed(device)) for name in BACKENDS]


def multiply(a: MXTensor, b: MXTensor, dtype: torch.dtype) -> Tensor | None:
    """A [M, K] times b [N, K] transposed -> [M, N] in `dtype` (FP32 or BF16), blocks of both along K.

    None where no back end takes them: the library is to multiply their values. A library chooses its kernel by shape, so
    the first product of each shape is compared with the exact one at up to 64 x 64 places. A back end that is wrong
    there is left out for that shape, with a Notice. Chips without units leave all to Triton, which emulates them, or is
    interpreted.
    """
    if chip_path(a.device) != "native":
        return BACKENDS["triton"].multiply(a, b, dtype)
    for backend in _chain(_indexed(a.device), requested()):
        if not backend.takes(a, b, dtype):
            continue
        key = (backend, a.device, a.shape, b.shape, a.elem, b.elem, a.block, b.block, dtype)
        right = _shapes.get(key)
        if right is False:
            continue
        product = backend.multiply(a, b, dtype)
        if right is None and not (a.device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            wrong = sample_problem(a, b, product)
            _shapes[key] = wrong is None
            if wrong is not None:
                shape = f"{a.shape[0]}x{b.shape[0]}x{a.shape[1]} to {str(dtype).removeprefix('torch.')}"
                warnings.warn(f"GEMM back end {backend.name} is left out for {shape}: {wrong}", Notice, stacklevel=2)
                continue
        return product
    return None


_shapes: dict[Hashable, bool] = {}
"""Whether the first product of a back end, shape and dtype was right."""


def _indexed(device: torch.device | str) -> torch.device:
    device = torch.device(device)
    return torch.device(device.type, device.index or 0) if device.type == "cuda" else device


@lru_cache
def _chain(device: torch.device, asked: str) -> tuple[GemmBackend, ...]:
    """The back ends that products on `device` are offered to, in this order."""
    if chip_path(device) != "native":
        if device.type == "cuda" and asked not in (AUTO, EMULATED):
            raise UserError(f"gemm_backend={asked}: {device} has no FP4 units; use {AUTO} or {EMULATED}")
        return ()
    if asked == EMULATED:
        return ()
    if asked != AUTO:
        status = _status(asked, device)
        if status.state != "usable":
            raise UserError(f"gemm_backend={asked} is {status} ({device}); use {AUTO}, or another of {CHOICES[1:]}")
        return _with_triton(asked, device)
    for name in BACKENDS:
        status = _status(name, device)
        if status.state == "usable":
            return _with_triton(name, device)
        if status.state == "refused":
            warnings.warn(f"FP4 back end {name} is refused on {device}: {status.reason}", Notice, stacklevel=4)
    return ()


def _with_triton(name: str, device: torch.device) -> tuple[GemmBackend, ...]:
    names = dict.fromkeys([name, "triton"])
    return tuple(BACKENDS[n] for n in names if _status(n, device).state == "usable")


@lru_cache
def _status(name: str, device: torch.device) -> Status:
    missing = BACKENDS[name].missing()
    if missing is not None:
        return Status(name, "not installed", missing)
    wrong = problem(BACKENDS[name], device)
    return Status(name, "usable") if wrong is None else Status(name, "refused", wrong)
