"""A value that is not finite: which parts of a batch and which ranks it came from, and whether it comes again.

A recipe that diverges does so for every rank at about the same step. A NaN on one rank while the others are finite can
be that as well, or a chip at fault, which is no property of a recipe. So a run over ranks is taken up once from its
last checkpoint: what comes again is a divergence, and recorded as such; what does not is noted in the record, and the
run goes on. Either way the reason names the step, the parts and the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence


def in_parts(losses: Sequence[Sequence[float]]) -> str:
    """Where among the parts of a step; losses: of each rank its parts' losses, in order. Empty where that says nothing:
    a batch in one part."""
    flat = [(loss, rank) for rank, mine in enumerate(losses) for loss in mine]
    bad = [(part, rank) for part, (loss, rank) in enumerate(flat, start=1) if not math.isfinite(loss)]
    if len(flat) == 1:
        return ""
    if not bad:
        return "the loss of every part is finite"
    return f"in {_some('part', [part for part, _ in bad], len(flat))}{_on({r for _, r in bad}, len(losses))}"


def in_windows(losses: Sequence[float], batch_size: int, most: int, ranks: int) -> str:
    """Where among the windows of an evaluation, of which each rank takes `most` batches of `batch_size`."""
    bad = [window for window, loss in enumerate(losses) if not math.isfinite(loss)]
    found = _some("window", [window + 1 for window in bad], len(losses))
    return f"in {found}{_on({window // batch_size // most for window in bad}, ranks)}"


def _some(what: str, numbers: Sequence[int], of: int) -> str:
    """ "part 3 of 4", "parts 1, 3 of 4", "every part of 4"."""
    if len(numbers) == of:
        return f"every {what} of {of}"
    shown = ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
    return f"{what}{'s' if len(numbers) > 1 else ''} {shown} of {of}"


def _on(ranks: Iterable[int], size: int) -> str:
    """ ", on rank 1 of 2 alone", ", on every rank"; empty for one rank."""
    ranks = sorted(ranks)
    if size == 1:
        return ""
    if len(ranks) == size:
        return ", on every rank"
    one = len(ranks) == 1
    return f", on rank{'' if one else 's'} {', '.join(map(str, ranks))} of 0-{size - 1}{' alone' if one else ''}"
