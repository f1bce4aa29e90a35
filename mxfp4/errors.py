"""What is said to the person at the keyboard: one line that names the value and what is allowed or what to do."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterable


class UserError(ValueError):
    """Something the user can put right. The CLI prints `error: <message>` and exits 1, no traceback."""


class Notice(UserWarning):
    """Something that stops nothing and that the user should know: what, where, what to do. The CLI, its workers and
    the kernels of notebooks print `warning: <message>`, each once; elsewhere it is a warning like any other."""


said: set[str] = set()
"""The notices that this process has printed."""
_before = warnings.showwarning


def print_notices(already: Iterable[str] = ()) -> None:
    """Print each Notice of this process as one line on stderr, once, but for those in `already`, which a parent has
    printed; under torchrun rank 0 alone prints. Other warnings stay as they are."""
    global _before
    said.clear()
    said.update(already)
    if warnings.showwarning is not _show:
        _before, warnings.showwarning = warnings.showwarning, _show
    warnings.simplefilter("always", Notice)


def _show(message, category, filename, lineno, file=None, line=None) -> None:
    if not issubclass(category, Notice):
        _before(message, category, filename, lineno, file, line)
    elif str(message) not in said:
        said.add(str(message))
        if os.environ.get("RANK", "0") == "0":
            from tqdm import tqdm  # writes past a bar

            tqdm.write(f"warning: {message}", file=sys.stderr)
