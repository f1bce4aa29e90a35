"""The house rules that a reader relies on: files stay short, modules say what they are, nothing names a machine."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MAX_LINES = 480
SOURCES = sorted((ROOT / "mxfp4").rglob("*.py"))


def _tracked() -> list[Path]:
    """Files under version control; outside a checkout, everything that would be."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    names = listed.stdout.splitlines() if listed.returncode == 0 else []
    return [ROOT / n for n in names if (ROOT / n).is_file()] or [*SOURCES, *sorted((ROOT / "book").glob("*.md"))]


TRACKED = _tracked()


def test_no_file_is_long():
    code = [p for p in TRACKED if p.suffix in (".py", ".js", ".css", ".md") or p.name == "Makefile"]
    long = {p.name: n for p in code if (n := len(p.read_text().splitlines())) > MAX_LINES}
    assert long == {}


MACHINE = re.compile(
    r"(?<![\w.])/(?:home|root|Users|work|scratch|mnt|opt)/(?!rocm\b)\w|\bpypi\.org|files\.pythonhosted|registry\.npmjs"
    r"|download\.pytorch\.org(?!/whl/rocm)"  # where PyTorch for ROCm is, nobody can guess
)


def test_no_path_of_a_machine_and_no_registry_host():
    text = [p for p in TRACKED if p.suffix not in (".parquet", ".png") and p != Path(__file__)]
    found = [f"{p.relative_to(ROOT)}: {m[0]}" for p in text for m in MACHINE.finditer(p.read_text(errors="ignore"))]
    assert found == []


def test_every_module_says_what_it_is():
    silent = [p.name for p in SOURCES if p.read_text().strip() and not ast.get_docstring(ast.parse(p.read_text()))]
    assert silent == []
