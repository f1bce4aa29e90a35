"""One training step, or one batch of an evaluation, as one CUDA graph.

A step of a small model is hundreds of kernels of a few microseconds: launching them one by one from Python takes
longer than running them. A graph records the launches once and replays them with one call. What a step reads that
changes from one to the next (its batch, the learning rate, the counters of random numbers) must therefore lie in
tensors that stay where they are, and its work must not depend on what they hold: no mixture of experts, whose
shapes do.

Source: PyTorch, "CUDA semantics: whole-network capture".
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

WARM_UP = 3


class CapturedStep:
    """`step(batch) -> result`, both on the same GPU, run as a graph from the fourth call on.

    The first WARM_UP calls run as they are (they compile, choose algorithms and make the optimizer's state), and so
    does a batch of another shape than the first one's. The result is the caller's to keep.
    """

    def __init__(self, step: Callable[[Tensor], Tensor]):
        self.step = step
        self.calls = 0
        self.shape: torch.Size | None = None
        self.stream: torch.cuda.Stream | None = None
        self.graph: torch.cuda.CUDAGraph | None = None
        self.batch: Tensor | None = None
        self.result: Tensor | None = None

    def __call__(self, batch: Tensor) -> Tensor:
        self.shape = self.shape or batch.shape
        if batch.shape != self.shape:
            return self.step(batch)
        if self.calls < WARM_UP:
            result = self._aside(batch)
            self.calls += 1
            return result
        if self.graph is None:
            self.batch, graph = batch.clone(), torch.cuda.CUDAGraph()
            with _nothing_collected(), torch.cuda.graph(graph, stream=self.stream):
                self.result = self.step(self.batch)
            self.graph = graph  # whole: a step that raised left none to replay
        self.batch.copy_(batch)
        self.graph.replay()
        return self.result.clone()

    def _aside(self, batch: Tensor) -> Tensor:
        """A call on the stream that the capture will use, so that autograd's buffers are made there."""
        self.stream = self.stream or torch.cuda.Stream(batch.device)
        main = torch.cuda.current_stream(batch.device)
        self.stream.wait_stream(main)
        with torch.cuda.stream(self.stream):
            result = self.step(batch)
        main.wait_stream(self.stream)
        return result


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """A capture fails when Python's collector frees an earlier run's graph or memory in the middle of it."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
