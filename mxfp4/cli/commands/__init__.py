"""Sub-commands of `mxfp4`, one module each.

A module exposes `add_parser(subparsers)`, which registers its parser and sets `handler`, a function that takes the
parsed arguments and returns an exit code. Modules import what is heavy (torch, pandas) inside the handler, so that
`mxfp4 --help` is quick.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from types import ModuleType


def modules() -> Iterator[ModuleType]:
    """Every sub-command module, by name."""
    for info in sorted(pkgutil.iter_modules(__path__), key=lambda i: i.name):
        yield importlib.import_module(f"{__name__}.{info.name}")
