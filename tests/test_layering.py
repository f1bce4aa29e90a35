"""The layout of the package: a folder imports only from those before it in FOLDERS, and no imports form a circle."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "mxfp4"
FOLDERS = (
    "numerics",
    "numerics.kernels.triton",
    "numerics.kernels.cpu",
    "numerics.kernels",
    "numerics.gemm_backends",
    "numerics.ops",
    "layers",
    "data.megatron",
    "data",
    "training.execution",
    "training.checkpoints",
    "training.monitoring",
    "training",
    "adapters",
    "diagnostics",
    "studies",
    "analysis",
    "analysis.registered_study",
    "bench",
    "pages",
    "pages.registered",
    "pages.chapters",
    "publish",
    "cli.checks",
    "cli.commands",
    "cli",
)
"""From the bottom up. All may import the modules beside the folders (errors, directories, text), which import none."""
PUBLIC = ("mxfp4", "mxfp4.training.adapters")
"""Public addresses, which point to modules further up: the package itself, and the adapters' former folder."""
LARGEST = 14
SOURCES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
MODULES = [name for name in SOURCES if not name.startswith(PUBLIC[1]) and name != PUBLIC[0]]


def _imports(name: str) -> set[str]:
    """The modules of the package that a module imports, inside its functions as well."""
    found = set()
    for node in ast.walk(ast.parse(SOURCES[name].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} has a relative import"
            named = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (named & SOURCES.keys()) | ({node.module} if named - SOURCES.keys() else set())
    return (found & SOURCES.keys()) - {name}


def _level(module: str) -> int:
    """Place in FOLDERS; -1 beside the folders. The package itself gives the numerics and the layers."""
    if module == "mxfp4":
        return FOLDERS.index("layers")
    path = SOURCES[module].relative_to(PACKAGE)
    return FOLDERS.index(".".join(path.parent.parts)) if path.parent.parts else -1


@pytest.mark.parametrize("module", MODULES)
def test_imports_only_go_down(module):
    assert [name for name in _imports(module) if _level(name) > _level(module)] == []


def test_no_imports_in_a_circle():
    try:
        TopologicalSorter({name: _imports(name) for name in MODULES}).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(reversed(error.args[1])))


def test_every_folder_has_its_place():
    folders = {".".join(path.parent.relative_to(PACKAGE).parts) for path in SOURCES.values()}
    assert folders - {"", "training.adapters"} == set(FOLDERS)


def test_no_folder_is_large():
    paths = [path for path in SOURCES.values() if path.name != "__init__.py"]
    sizes = {folder: sum(path.parent == folder for path in paths) for folder in {path.parent for path in paths}}
    assert {folder.name: size for folder, size in sizes.items() if size > LARGEST} == {}
