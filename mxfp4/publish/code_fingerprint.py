"""A hash of the code that a page runs: the modules that it imports, directly or through others, and nothing else.

Comments, docstrings and layout do not count, so an edit of one runs no page again. Imports inside functions do: what a
page may reach is taken as what it uses.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

import mxfp4
from mxfp4.directories import project_dir

PACKAGE = "mxfp4"
BESIDE = {
    "mxfp4.numerics.kernels.cpu.quantize": Path("mxfp4/numerics/kernels/cpu/quantize.c"),
    "mxfp4.analysis.claims": Path("book/claims.yml"),
    "mxfp4.studies.registry": Path("book/study.yml"),
}
"""{module: file that it reads and that decides what it does}, from the project's folder."""


def code_fingerprint(code: str) -> str:
    """SHA-256 over the modules of this package that `code` reaches.

    Args:
        code: Python source, such as a page's cells one after the other. What is not plain Python, such as cells with
            IPython's magics, counts as reaching every module.

    """
    digest = hashlib.sha256()
    for name in sorted(reached(imported(code))):
        digest.update(f"{name}\0{_module_hash(name)}\n".encode())
        if name in BESIDE and (path := project_dir() / BESIDE[name]).is_file():
            digest.update(path.read_bytes())
    return digest.hexdigest()


def imported(code: str) -> set[str]:
    """Full names that `code` imports out of this package; all of its modules where `code` is not plain Python."""
    try:
        return _imports(ast.parse(code), PACKAGE + ".")
    except SyntaxError:
        return set(sources())


def reached(names: Iterable[str]) -> set[str]:
    """The modules `names`, and all that they import."""
    found: set[str] = set()
    left = list(names)
    while left:
        name = left.pop()
        if name not in found and name in sources():
            found.add(name)
            left += _imported_by(name)
    return found


@lru_cache
def sources() -> dict[str, Path]:
    """{full name: file} of the package's modules."""
    root = Path(mxfp4.__file__).parent
    paths = {path: path.relative_to(root.parent).with_suffix("") for path in sorted(root.rglob("*.py"))}
    return {".".join(relative.parts).removesuffix(".__init__"): path for path, relative in paths.items()}


@lru_cache
def _tree(name: str) -> ast.Module:
    return ast.parse(sources()[name].read_text(encoding="utf-8"))


@lru_cache
def _imported_by(name: str) -> frozenset[str]:
    return frozenset(_imports(_tree(name), PACKAGE + "."))


def _imports(tree: ast.AST, prefix: str) -> set[str]:
    """Modules that a tree imports, and the packages that they lie in, which Python runs first."""
    named: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            named |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            named |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    named = {name for name in named if f"{name}.".startswith(prefix)}
    return {".".join(parts[: i + 1]) for parts in (name.split(".") for name in named) for i in range(len(parts))}


@lru_cache
def _module_hash(name: str) -> str:
    tree = _tree(name)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            # A string that stands alone is a docstring, or documents the field above it.
            node.body = [
                s for s in node.body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))
            ] or [ast.Pass()]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()
