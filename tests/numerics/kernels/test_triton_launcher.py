"""Launches that are looked up: never a kernel that was compiled for other addresses, sizes or dtypes than it is given."""

from __future__ import annotations

import pytest
import torch

from mxfp4.numerics.kernels.triton import launcher
from mxfp4.numerics.kernels.triton.launcher import Launcher, address_class


class FakeKernel:
    """A JIT function that counts what it compiles, and whose compiled kernels note what they are launched with."""

    arg_names = ("x", "out", "seed", "n", "STRIDE")

    def __init__(self):
        self.compiled, self.launched = [], []

    def __getitem__(self, grid):
        def call(**arguments):
            self.compiled.append(arguments)
            return FakeCompiled(self, len(self.compiled) - 1)

        return call


class FakeCompiled:
    def __init__(self, kernel, index):
        self.kernel, self.index = kernel, index

    def launch_metadata(self):
        """As a CompiledKernel has."""

    def __getitem__(self, grid):
        return lambda *values: self.kernel.launched.append((self.index, grid, values))


def launch(run: Launcher, x, out, seed=None, stride=1):
    describe = lambda: ((4, 2), {"x": x, "out": out, "seed": seed, "n": x.numel()}, {"STRIDE": stride, "num_warps": 4})
    run((x.shape, x.dtype, stride), (x, out, seed), describe)


def test_the_second_launch_calls_the_compiled_kernel_with_its_own_tensors_and_the_same_sizes():
    kernel = FakeKernel()
    run = Launcher(kernel)
    tensors = [torch.zeros(64) for _ in range(4)]
    launch(run, *tensors[:2])
    launch(run, *tensors[2:])
    assert len(kernel.compiled) == 1
    ((index, grid, values),) = kernel.launched
    assert index == 0 and grid == (4, 2, 1)  # three axes, as a compiled kernel wants
    assert values[0] is tensors[2] and values[1] is tensors[3] and values[2:] == (None, 64, 1)  # options are left out


def at_offset(elements: int, size: int = 64) -> torch.Tensor:
    """A view that begins `elements` FP32 values after an address that is a multiple of 16."""
    base = torch.zeros(size + 8)
    start = -base.data_ptr() % 16 // 4
    return base[start + elements : start + elements + size]


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_tensor_at_another_alignment_is_another_kernel(which):
    kernel = FakeKernel()
    run = Launcher(kernel)
    aligned = [at_offset(0) for _ in range(3)]
    shifted = [at_offset(1) if i == which else t for i, t in enumerate(aligned)]
    for tensors in (aligned, shifted, aligned, shifted):
        launch(run, *tensors)
    assert len(kernel.compiled) == 2 and [index for index, _, _ in kernel.launched] == [0, 1]


def test_a_tensor_that_is_there_or_not_another_dtype_or_constant_is_another_kernel():
    kernel = FakeKernel()
    run = Launcher(kernel)
    x, out, seed = torch.zeros(64), torch.zeros(64), torch.tensor(3)
    for arguments in ((x, out), (x, out, seed), (x.bfloat16(), out), (x, out, None, 2), (torch.zeros(32), out)):
        launch(run, *arguments)
    assert len(kernel.compiled) == 5 and kernel.launched == []


def test_interpreted_kernels_are_never_looked_up():
    class Interpreted(FakeKernel):
        def __getitem__(self, grid):
            return lambda **arguments: self.compiled.append(arguments)

    kernel = Interpreted()
    run = Launcher(kernel)
    for _ in range(2):
        launch(run, torch.zeros(64), torch.zeros(64))
    assert len(kernel.compiled) == 2 and run.ready == {}


def test_on_amd_memory_beyond_32_bits_is_another_kernel(monkeypatch):
    """Triton uses buffer instructions there for tensors whose storage is below 2 GiB."""
    monkeypatch.setattr(launcher, "ON_AMD", True)
    small = torch.empty(64, device="meta")
    large = torch.empty(2**30, device="meta")[:64]
    assert address_class(small) != address_class(large)
    assert address_class(None) not in (address_class(small), address_class(large))


def test_the_key_of_the_quantizer_holds_all_that_its_launch_depends_on(monkeypatch):
    """Of plans, shapes, strides and dtypes that differ in anything, no two launches share a key; equal ones do."""
    pytest.importorskip("triton")
    from mxfp4.numerics.kernels.triton import quantize as k
    from mxfp4.numerics.operand_plan import OperandPlan

    keys, described = [], []
    monkeypatch.setattr(k, "_quantize", lambda key, tensors, describe: (keys.append(key), described.append(describe())))
    x = torch.randn(64, 128)
    plans = [
        OperandPlan(), OperandPlan(dtype=torch.bfloat16), OperandPlan(dtype=torch.float32), OperandPlan(stream=1),
        OperandPlan(rounding="stochastic"), OperandPlan(block="2d"), OperandPlan(elem="e4m3"),
        OperandPlan(scale_rule="floor"), OperandPlan(prescaled=True, dtype=torch.bfloat16),
    ]  # fmt: skip
    inputs = (x, x.bfloat16(), torch.randn(128, 64).t(), torch.randn(64, 160)[:, :128], torch.randn(128, 128))
    for plan in plans:
        for t in inputs:
            k.quantize_matrix(t, plan, None, torch.tensor(0))
            k.quantize_matrix(t, None, plan, torch.tensor(0))
    assert len(set(keys)) == len(keys) == 2 * len(plans) * len(inputs)
    k.quantize_matrix(torch.randn(64, 128), OperandPlan.parse(OperandPlan().text), None, None)
    assert keys[-1] in keys[:-1]
    for grid, arguments, options in described:
        names = k.block_kernel.quantize_kernel.arg_names
        assert set(names) <= {*arguments, *options} and len(grid) == 2
        assert list(arguments)[:6] == names[:6]  # the tensors, in the order in which they are given
