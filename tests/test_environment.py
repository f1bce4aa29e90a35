"""One source for what is installed: ranges in pyproject.toml, pins in constraints.txt; environment.yml points there."""

from __future__ import annotations

import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import mxfp4

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
CONDA = yaml.safe_load((ROOT / "environment.yml").read_text())
PINS = {
    canonicalize_name(line.split("==")[0]): line.split("==")[1].strip()
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if line.strip() and not line.startswith("#")
}
DECLARED = [Requirement(r) for r in (*PROJECT["dependencies"], *(r for e in EXTRAS.values() for r in e))]
DECLARED = [r for r in DECLARED if r.name != "mxfp4"]  # an extra that includes another


def _pip_lines() -> list[str]:
    return next(d["pip"] for d in CONDA["dependencies"] if isinstance(d, dict))


def test_conda_installs_the_project_with_the_same_pins_and_extras_as_make():
    assert _pip_lines() == ["--constraint constraints.txt", "--editable .[train,book,hf,test,lint]"]
    makefile = (ROOT / "Makefile").read_text()
    assert "EXTRAS := train,book,hf,test,lint\n" in makefile and "-c constraints.txt -e '.[$(EXTRAS)]'" in makefile
    assert {"train", "book", "hf", "eval", "titan", "test", "lint", "completion"} == set(EXTRAS)
    assert CONDA["name"] == PROJECT["name"]


def test_conda_lists_no_python_package_of_its_own():
    names = {re.split(r"[<>=]", d)[0] for d in CONDA["dependencies"] if isinstance(d, str)}
    assert names == {"python", "pip", "make", "git"}


def test_conda_has_the_python_that_pyproject_asks_for():
    (python,) = [d for d in CONDA["dependencies"] if isinstance(d, str) and d.startswith("python")]
    conda, project = SpecifierSet(python.removeprefix("python")), SpecifierSet(PROJECT["requires-python"])
    assert str(project) in {str(s) for s in conda}
    for version in ("3.11", "3.12", "3.13"):
        assert version in conda and version in project


@pytest.mark.parametrize("requirement", DECLARED, ids=lambda r: r.name)
def test_every_requirement_is_pinned_inside_its_range(requirement):
    assert PINS[canonicalize_name(requirement.name)] in requirement.specifier
    assert requirement.specifier, f"{requirement.name} has no range"


def test_constraints_hold_exact_pins_only():
    lines = [x for x in (ROOT / "constraints.txt").read_text().splitlines() if x.strip() and not x.startswith("#")]
    assert [x for x in lines if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", x)] == []
    assert len(lines) == len(PINS)
    assert (PINS["torch"], PINS["datasets"]) == ("2.13.0", "4.7.0")


def test_everything_that_gets_installed_is_pinned():
    """Walks what is installed here, from this project's requirements down; a PyTorch for a GPU brings its own."""
    todo, seen = list(DECLARED), set()
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        if (name, frozenset(requirement.extras)) in seen or re.match(r"nvidia|cuda|triton|pytorch-triton", name):
            continue
        seen.add((name, frozenset(requirement.extras)))
        try:
            below = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue  # an optional package of another platform or Python
        for r in map(Requirement, below):
            if r.marker is None or any(r.marker.evaluate({"extra": e}) for e in (*requirement.extras, "")):
                todo.append(r)
        assert name in PINS, f"{name} is installed but not in constraints.txt"


def test_every_pin_takes_the_first_release_of_each_python():
    """Debian 12 has 3.11.2, and a package may ask for 3.11.5."""
    firsts = [f"{v}.0" for v in ("3.11", "3.12", "3.13")]
    for name, pin in PINS.items():
        try:
            found = metadata.metadata(name)
        except metadata.PackageNotFoundError:
            continue
        if found["Version"] == pin:
            asked = SpecifierSet(found["Requires-Python"] or "")
            assert all(first in asked for first in firsts), f"{name}=={pin} needs Python {asked}"


def test_triton_is_left_to_pytorch():
    """A second Triton beside a PyTorch for a GPU would break it."""
    assert "triton" not in {canonicalize_name(r.name) for r in DECLARED}


def test_data_wheels_are_pinned_with_hashes():
    lines = [x for x in (ROOT / "requirements-data.txt").read_text().splitlines() if not x.startswith("#")]
    pins = dict(re.fullmatch(r"([\w-]+)==([\d.]+) --hash=sha256:[0-9a-f]{64}", line).groups() for line in lines)
    from mxfp4.data import prose_wheels as wheels

    used = {w.package: w.version for w in vars(wheels).values() if isinstance(w, wheels.Wheel)}
    assert pins == used


def test_one_version():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["version"] == mxfp4.__version__
    assert cited["license"] == PROJECT["license"] == "Apache-2.0"
    assert "Apache License" in (ROOT / "LICENSE").read_text()
