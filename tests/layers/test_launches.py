"""How many kernels a layer launches on a GPU, forward and backward: counted on fake tensors, operator by operator.

Operators of ours count for what their CUDA implementation launches (LAUNCHES); torch's for one each, but those that only
make views or memory.
"""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from mxfp4 import MXFP4Linear
from mxfp4.layers import gemms, operands
from mxfp4.layers import plan as plans
from mxfp4.numerics.operand_plan import OperandPlan

LAUNCHES = {
    "draw_seed": 2,
    "quest": 3,  # rotation, standard deviation, rounding
    "fp8_codes": 3,  # a fill, the largest magnitude, codes
    "fp8_codes_pair": 3,
    "gemm_fp8": 1,
    "rotate": 1,
    "rotate_unclipped": 1,
    "scale_product": 1,
}
ALLOCATIONS = ("empty", "empty_like", "new_empty", "empty_strided", "detach", "alias")


class Counting(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.launches: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.split("::")[1]
        is_view = any(a.alias_info and not a.alias_info.is_write for a in func._schema.arguments)
        if name == "quantize_operands":
            plan = OperandPlan.parse(args[1] or args[2])
            self.launches += [name] * (2 if plan.format == "nvfp4" else 1)  # test_triton_nvfp4 holds the two
        elif func.namespace == "mxfp4":
            self.launches += [name] * LAUNCHES[name]
        elif func.namespace == "aten" and not is_view and name not in ALLOCATIONS:
            self.launches.append(name)
        return func(*args, **(kwargs or {}))


def launches(name: str, monkeypatch) -> list[str]:
    """Of a BF16 layer on 2048 tokens, on a GPU with FP8 units alone."""
    for module in (plans, gemms, operands):
        monkeypatch.setattr(module, "gemm_dtype", lambda device: torch.bfloat16)
    monkeypatch.setattr(plans, "fp8_path", torch.compiler.assume_constant_result(lambda device: "native"))
    with FakeTensorMode():
        layer = MXFP4Linear(
            1024, 1024, bias=False, recipe=name, fqn="layers.3.attention.wo", n_layers=24, dtype=torch.bfloat16
        )
        x = torch.empty(2048, 1024, dtype=torch.bfloat16, requires_grad=True)
        grad = torch.empty(2048, 1024, dtype=torch.bfloat16)
        with Counting() as counting:
            layer(x).backward(grad)
    return counting.launches


@pytest.mark.parametrize("name, most", [
    ("bf16", 3), ("fp8", 12), ("mxfp4", 6), ("mxfp4+h16", 6), ("mxfp4+h16+sr", 8), ("mxfp4+rht16", 8), ("ti2d", 8),
    ("nvfp4", 14), ("tseng", 12), ("quartet", 20),
])  # fmt: skip
def test_a_layer_launches_few_kernels(name, most, monkeypatch):
    found = launches(name, monkeypatch)
    assert len(found) <= most, found
    assert found.count("mm") + found.count("gemm_fp8") == 3
