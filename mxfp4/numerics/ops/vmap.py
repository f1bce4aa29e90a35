"""torch.vmap of the operators: each runs once an element of the batch, so its bytes are those of a loop."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mxfp4.numerics.ops import fp8_block, packed_operands, rotate  # noqa: F401  (define the operators)

NO_JVP = (
    "MXFP4Linear has no forward-mode derivative (jvp, jacfwd, hessian): its recipe says how a backward is quantized, not "
    "how tangents are. Use vjp, grad or jacrev, or leave the layer out of convert."
)
NAMES = (
    "quantize_operand", "fake_quantize_operand", "quantize_operands", "fp8_per_tensor", "bf16_values", "scale_product",
    "unpack", "turn", "gemm_packed", "fp8_codes", "fp8_codes_pair", "gemm_fp8", "rotate", "rotate_unclipped",
    "random_signs", "fp8_block", "fp8_block_values", "gemm_fp8_block",
)  # fmt: skip
"""Operators without side effects that layers call. `draw_seed` has one; `draws.py` says what vmap makes of it."""
_SAMPLE = 5871781006564002453  # an odd number of random bits, which spreads the seeds of a batch's elements


def register(name: str) -> None:
    """Give the operator `mxfp4::name` its rule (torch.library.register_vmap, torch 2.13)."""
    op = getattr(torch.ops.mxfp4, name).default

    def one_by_one(info: Any, in_dims: tuple, *args: Any) -> tuple[Any, Any]:
        sides = list(zip(args, in_dims, strict=True))
        found = [op(*(a if dim is None else a.select(dim, i) for a, dim in sides)) for i in range(info.batch_size)]
        if isinstance(found[0], Tensor):
            return torch.stack(found), 0
        kind = type(found[0])
        stacked = kind(torch.stack(each) for each in zip(*found, strict=True))
        return stacked, kind([0] * len(stacked))

    torch.library.register_vmap(op, one_by_one)


def transformed() -> bool:
    """Whether a torch.func transform is at work, or forward-mode differentiation."""
    if torch._C._are_functorch_transforms_active():
        return True
    return not torch.compiler.is_compiling() and torch.autograd.forward_ad._current_level >= 0


def refuse_twice() -> None:
    """Raise RuntimeError in the backward of a derivative inside another one."""
    levels = torch._C._functorch.get_interpreter_stack() or ()
    if sum(level.key() == torch._C._functorch.TransformType.Grad for level in levels) > 1:
        raise RuntimeError(
            "cannot differentiate twice: the backward of an MXFP4Linear reads quantized operands, whose own derivative "
            "is zero. Take first derivatives only, or leave the layer out of convert."
        )


def seed_of_sample(seed: Tensor) -> Tensor:
    """The seed inside vmap: one for all elements of a batch with randomness="same", one each with "different".

    Raises RuntimeError for randomness="error", vmap's default, as torch's own random operators do.
    """
    for level in torch._C._functorch.get_interpreter_stack() or ():
        if level.key() != torch._C._functorch.TransformType.Vmap:
            continue
        vmap = torch._C._functorch.CVmapInterpreterPtr(level)
        kind = vmap.randomness()
        if kind == torch._C._functorch.RandomnessType.Error:
            raise RuntimeError(
                'vmap: the recipe draws random numbers, and randomness="error" is set. Call vmap with '
                'randomness="different" or randomness="same", or model.eval() first.'
            )
        if kind == torch._C._functorch.RandomnessType.Different:
            places = torch.arange(vmap.batchSize(), dtype=torch.int64, device=seed.device)
            seed = seed + torch._C._functorch._add_batch_dim(places * _SAMPLE, 0, vmap.level())
    return seed


for _name in NAMES:
    register(_name)
