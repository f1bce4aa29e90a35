"""Numbers in words and figures, for print."""

from __future__ import annotations


def count(n: float) -> str:
    """A count for print: 29.5 M."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if n >= size:
            return f"{n / size:.3g} {unit}"
    return f"{n:.3g}"


def duration(seconds: float) -> str:
    """ "12 s", "3.5 min", "7.2 h"."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
