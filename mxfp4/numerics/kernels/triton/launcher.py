"""Launches of Triton kernels that cost the processor little: what Triton works out at a call is worked out once.

`kernel[grid](...)` binds, types and specialises every argument anew, some fifty microseconds for a kernel with fifty of
them. A launch here is looked up by what determines all of that, and the compiled kernel is called directly.

Triton compiles for the alignment of pointers, so it is a part of the key: a kernel that was compiled for addresses that
are multiples of 16 must never be given another. On AMD it also compiles for memory that 32 bits can address.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import lru_cache

import torch
from torch import Tensor

Launch = tuple[tuple[int, ...], dict, dict]  # (grid, arguments, constants and options)
ON_AMD = bool(torch.version.hip)
_32_BITS = 2**31


class Launcher:
    """One Triton kernel, whose tensor arguments come first.

    launcher(key, tensors, describe): `key` must determine everything but addresses: sizes, strides, dtypes, device,
    constants. `tensors` are the kernel's tensor arguments, some None; `describe()` gives the whole launch where the key
    is new.
    """

    def __init__(self, kernel):
        self.kernel = kernel
        self.ready: dict[Hashable, tuple[Callable, tuple]] = {}

    def __call__(self, key: Hashable, tensors: tuple[Tensor | None, ...], describe: Callable[[], Launch]) -> None:
        key = (key, *map(address_class, tensors))
        ready = self.ready.get(key)
        if ready is not None:
            run, rest = ready
            run(*tensors, *rest)
            return
        grid, arguments, options = describe()
        compiled = self.kernel[grid](**arguments, **options)
        if callable(getattr(compiled, "launch_metadata", None)):  # nothing comes back where Triton interprets
            values = arguments | options
            rest = tuple(values[name] for name in self.kernel.arg_names[len(tensors) :])
            self.ready[key] = compiled[(*grid, 1, 1)[:3]], rest


def address_class(t: Tensor | None) -> int:
    """What Triton compiles for of a tensor's address: 1 where it is a multiple of 16, on AMD 2 more within 2 GiB."""
    if t is None:
        return -1
    aligned = t.data_ptr() % 16 == 0
    return aligned + 2 * (t.untyped_storage().nbytes() < _32_BITS) if ON_AMD else aligned


class on_device_of:
    """`torch.cuda.device_of(t)`, which costs nothing where that device is the current one."""

    def __init__(self, t: Tensor):
        index = t.get_device()
        self.guard = None if index < 0 or index == torch.cuda.current_device() else torch.cuda.device(index)

    def __enter__(self):
        if self.guard is not None:
            self.guard.__enter__()

    def __exit__(self, *error):
        if self.guard is not None:
            self.guard.__exit__(*error)


@lru_cache
def chip(device: torch.device) -> tuple[int, int]:
    """(which instructions `block_native.py` may use, threads a warp) of a device."""
    if device.type != "cuda":
        return 0, 32
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return 950 if properties.gcnArchName.startswith("gfx950") else 0, 64
    return {9: 90, 10: 100}.get(properties.major, 0), 32
