"""How a step is executed: what changes its speed and memory, and of its values no more than the order of sums.

None of it is part of a run's key. What changes the precision of a value (such as `TrainConfig.reduce_dtype`) is a
field of TrainConfig and is.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from mxfp4.errors import UserError
from mxfp4.training.execution import attention, cross_entropy
from mxfp4.training.execution.recompute import check_every


@dataclass(frozen=True)
class Execution:
    """The choices. UserError for a value that is none."""

    compile: bool = False
    """torch.compile on each block of a model without experts."""
    capture: bool = False
    """A step as one CUDA graph, on a single rank and without experts."""
    deterministic: bool = False
    """Sums in a fixed order (`determinism`; on the CPU with one number of threads they have it anyway)."""
    recompute_every: int = 0
    """Every n-th block computes its activations again in the backward; 0: none does."""
    attention: str = "repeat"
    """Back end, one of `attention.BACKENDS`."""
    cross_entropy: str = "whole"
    """One of `cross_entropy.CHOICES`."""
    reshard_after_forward: bool = True
    """On several ranks: whether a block's gathered parameters are freed after its forward and gathered again in its
    backward. False keeps them, 4 bytes a parameter, through all parts of a step: one gather a step."""
    weights_once: bool = False
    """Whether each weight is quantized once a step also where blocks are compiled or parameters are sharded. Eager
    blocks of a single rank do so anyway."""

    def __post_init__(self):
        check_every(self.recompute_every)
        for name, allowed in (("attention", attention.BACKENDS), ("cross_entropy", cross_entropy.CHOICES)):
            if getattr(self, name) not in allowed:
                raise UserError(f"{name}={getattr(self, name)!r} must be one of {', '.join(allowed)}")
        if self.capture and self.cross_entropy == "liger":
            raise UserError(
                "cross_entropy='liger' waits for the GPU, which a captured step cannot: use cross_entropy='chunked'"
            )

    def check_ranks(self, ranks: int) -> None:
        """UserError where `weights_once` cannot work on so many ranks."""
        if self.weights_once and self.reshard_after_forward and ranks > 1:
            raise UserError(
                f"weights_once=True on {ranks} ranks needs reshard_after_forward=False: a weight that is gathered again "
                "for each part is quantized again"
            )

    def recorded(self) -> dict:
        """The choices that a run's timings name: those beside the default."""
        names = ("recompute_every", "attention", "cross_entropy", "reshard_after_forward", "weights_once")
        return {name: value for name, value in asdict(self).items() if name in names and value != getattr(PLAIN, name)}


PLAIN = Execution()
