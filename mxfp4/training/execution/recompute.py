"""Activation checkpointing: a block's activations computed again in the backward, not kept from the forward.

Costs one more forward of the block and saves all of its memory but its input. It changes no value: a recipe's
random numbers are drawn by one operator (`block_quantize.draw_seed`), whose results are kept, so the second forward
rounds as the first one did and leaves the counts of draws as they are.

Source: Chen et al., "Training deep nets with sublinear memory cost", 2016; PyTorch, "selective activation
checkpointing".
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from mxfp4.errors import UserError
from mxfp4.numerics.ops import block_quantize as ops


def _policy(context, operator, *args, **kwargs) -> CheckpointPolicy:
    drawn = operator is ops.draw_seed
    return CheckpointPolicy.MUST_SAVE if drawn else CheckpointPolicy.PREFER_RECOMPUTE


def recomputed(forward: Callable[..., Tensor], *args: Tensor) -> Tensor:
    """`forward(*args)`, of whose values autograd keeps `args` and the drawn seeds alone."""
    contexts = partial(create_selective_checkpoint_contexts, _policy)
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)


def check_every(n: int) -> None:
    """UserError for n < 0."""
    if n < 0:
        raise UserError(f"recompute_every={n} must be 0 (no block) or more")


def recompute_every(model: nn.Module, n: int) -> None:
    """Recompute every n-th block of `model.layers`, the first one included; 0: none. Raises UserError for n < 0."""
    check_every(n)
    for i, block in enumerate(model.layers):
        block.recompute = n > 0 and i % n == 0
