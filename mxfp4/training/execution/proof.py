"""Another package's or kernel's results, compared with PyTorch's on the device before they train anything."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mxfp4.errors import UserError

ROUNDINGS = 8
"""Error allowed, in roundings (`torch.finfo.eps`) of the dtype, relative to the norm of the result."""


def with_gradients(call: Callable[..., Tensor], inputs: tuple[Tensor, ...], grad: Tensor | None = None) -> list[Tensor]:
    """[call(*inputs), its gradient of each input]. grad: of the result; None where that is a scalar."""
    leaves = [t.detach().requires_grad_() for t in inputs]
    with torch.enable_grad():
        out = call(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def prove(
    choice: str, instead: str, package: str, ours: Callable[[], list[Tensor]], expected: list[Tensor], dtype: torch.dtype
) -> None:  # fmt: skip
    """Compare the tensors that `ours` makes with `expected`, in FP32.

    choice, instead: what is tried and what a user can take in its place, as in "attention='flash'". package: what pip
    installs. Raises UserError where it is not installed, does not run, or is wrong by more than ROUNDINGS of `dtype`.
    """
    device = expected[0].device
    try:
        found = ours()
    except ImportError:
        raise UserError(f"{choice} is not installed: pip install {package}, or use {instead}") from None
    except (RuntimeError, TypeError) as error:  # TypeError: another version's signature
        reason = str(error).splitlines()[0]
        raise UserError(f"{choice} does not run on {device} ({reason}): use {instead}") from None
    allowed = ROUNDINGS * torch.finfo(dtype).eps
    errors = [((a.float() - b).norm() / b.norm()).item() for a, b in zip(found, expected, strict=True)]
    if not max(errors) <= allowed or any(error != error for error in errors):
        shown = ", ".join(f"{error:.2g}" for error in errors)
        raise UserError(
            f"{choice} is wrong on {device}: relative errors {shown} of its result and gradients, at most {allowed:.2g} "
            f"is allowed; use {instead}"
        )
