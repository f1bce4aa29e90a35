"""What one linear layer costs the processor: forward and backward, each recipe beside nn.Linear, eager and compiled.

On a GPU the processor's time is measured over many iterations without waiting for the GPU in between, by a small enough
number of them that its queue does not fill; launches and the GPU's own time come from one profile. On the CPU the figure
is wall time, the median of many iterations. Weight and X are BF16 on a GPU, FP32 on the CPU.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from mxfp4.bench.results import attempt
from mxfp4.layers.linear import MXFP4Linear

RECIPES = ("bf16", "fp8", "mxfp4", "mxfp4+h16", "mxfp4+h16+sr", "ti2d", "nvfp4", "quartet")
LINEAR = "nn.Linear"
WARM_UP, IN_FLIGHT = 20, 20
"""Iterations before measuring, and on a GPU those that are queued between two waits for it."""


@dataclass(frozen=True)
class Sizes:
    """Of the layer and its input."""

    in_features: int = 1024
    out_features: int = 1024
    tokens: int = 2048


def rows(
    device: str, sizes: Sizes = Sizes(), recipes: tuple[str, ...] = RECIPES, compiled: tuple[bool, ...] = (False, True),
    iterations: int = 400,
) -> Iterator[dict]:  # fmt: skip
    """One dict a layer and mode: name, who, seconds of the processor a forward and backward, ratio to nn.Linear's in
    the same mode, on a GPU launches and gpu_seconds too; or a problem."""
    for compile_it in compiled:
        linear = None
        for name in (LINEAR, *recipes):
            torch.compiler.reset()
            who = "torch" if name == LINEAR else "mxfp4"
            shown = f"{name}, compiled" if compile_it else name
            row = attempt(shown, who, lambda: _measure(name, device, sizes, compile_it, iterations))  # noqa: B023
            linear = row.get("seconds") if name == LINEAR else linear
            if linear and "seconds" in row:
                row["linear_ratio"] = row["seconds"] / linear
            yield row | {"device": device, **vars(sizes), "compiled": compile_it}


def layer(name: str, device: str, sizes: Sizes) -> nn.Linear:
    """The layer that is measured: nn.Linear or one of recipe `name`, in the middle of a model of 24 blocks."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    options = {"bias": False, "device": device, "dtype": dtype}
    if name == LINEAR:
        return nn.Linear(sizes.in_features, sizes.out_features, **options)
    where = {"fqn": "layers.3.attention.wo", "n_layers": 24}
    return MXFP4Linear(sizes.in_features, sizes.out_features, recipe=name, **where, **options)


def _measure(name: str, device: str, sizes: Sizes, compile_it: bool, iterations: int) -> dict:
    torch.manual_seed(0)
    module = layer(name, device, sizes)
    call = torch.compile(module) if compile_it else module
    x = torch.randn(sizes.tokens, sizes.in_features, device=device, dtype=module.weight.dtype, requires_grad=True)
    grad = torch.randn(sizes.tokens, sizes.out_features, device=device, dtype=module.weight.dtype)

    def step() -> None:
        x.grad = module.weight.grad = None
        call(x).backward(grad)

    for _ in range(WARM_UP):
        step()
    if device == "cpu":
        return {"seconds": _median_seconds(step, iterations)}
    return {"seconds": _processor_seconds(step, iterations), **_profiled(step)}


def _median_seconds(step: Callable[[], None], iterations: int) -> float:
    times = []
    for _ in range(iterations):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _processor_seconds(step: Callable[[], None], iterations: int) -> float:
    """Median over groups of IN_FLIGHT iterations of the processor's time for one: the backward's thread included."""
    times = []
    for _ in range(max(iterations // IN_FLIGHT, 1)):
        torch.cuda.synchronize()
        start = time.process_time()
        for _ in range(IN_FLIGHT):
            step()
        times.append((time.process_time() - start) / IN_FLIGHT)
    torch.cuda.synchronize()
    return statistics.median(times)


def _profiled(step: Callable[[], None], times: int = 5) -> dict:
    """{launches, gpu_seconds} of one iteration: kernels, copies and fills on the GPU."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        for _ in range(times):
            step()
        torch.cuda.synchronize()
    on_gpu = [event for event in found.events() if event.device_type == DeviceType.CUDA]
    seconds = sum(event.time_range.elapsed_us() for event in on_gpu) / 1e6
    return {"launches": round(len(on_gpu) / times), "gpu_seconds": seconds / times}
