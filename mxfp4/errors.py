"""What is said to the person at the keyboard: one line that names the value and what is allowed or what to do."""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Iterable
from typing import TextIO


class UserError(ValueError):
    """Something the user can put right. The CLI prints `error: <message>` and exits 1, no traceback."""


class Notice(UserWarning):
    """Something that stops nothing and that the user should know: what, where, what to do. The CLI, its workers and
    the kernels of notebooks print `warning: <message>`, each once; elsewhere it is a warning like any other."""


def missing_package(error: ModuleNotFoundError) -> str | None:
    """The pip command that installs a package that is missing.

    Returns:
        One line; None where the package is none of this project's requirements.

    """
    from importlib import metadata  # slow to import, and needed here alone

    module = (error.name or "").partition(".")[0]
    distribution = {"yaml": "pyyaml", "vl_convert": "vl-convert-python"}.get(module, module)
    try:
        requirements = metadata.requires("mxfp4") or []
    except metadata.PackageNotFoundError:  # run from its sources, not installed
        return None
    for requirement in requirements:
        name = re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]
        if re.sub(r"[-_.]+", "-", name).lower() != re.sub(r"[-_.]+", "-", distribution).lower():
            continue
        extra = re.search(r"""extra == ["']([^"']+)["']""", requirement)
        what = f"mxfp4[{extra[1]}]" if extra else name
        return f"the package {name} is not installed: pip install '{what}'"
    return None


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


def _show(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    if not issubclass(category, Notice):
        _before(message, category, filename, lineno, file, line)
    elif str(message) not in said:
        said.add(str(message))
        if os.environ.get("RANK", "0") == "0":
            text = f"warning: {message}"
            try:
                from tqdm import tqdm
            except ModuleNotFoundError:  # then there are no bars to write past either
                print(text, file=sys.stderr)
            else:
                tqdm.write(text, file=sys.stderr)
