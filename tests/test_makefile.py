"""What `make` installs, where: on ROCm its own PyTorch and Triton, in a conda environment only if it is this checkout's.

A copy of the Makefile runs with a stand-in for Python that writes down what it is asked and answers as told.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="no make on this machine")

PYTHON = """#!/bin/sh
printf '%s\\n' "$*" | tr '\\n' ' ' >> "$LOG"; echo >> "$LOG"
case "$*" in
    '-m venv'*) for last; do :; done; mkdir -p "$last/bin"; cp "$0" "$last/bin/python" ;;
    *'torch.version.hip'*) exit "${NOT_ROCM:-0}" ;;
    *'import triton'*) exit "${NO_TRITON:-0}" ;;
    *'find_spec'*) exec REAL "$@" ;;
    *"$BROKEN"*) [ -z "$BROKEN" ] || exit 1 ;;
    '--version') echo 'Python 3.12.3' ;;
esac
"""


COMMANDS = [
    "awk",
    "cat",
    "cksum",
    "cp",
    "echo",
    "env",
    "expr",
    "grep",
    "head",
    "mkdir",
    "mv",
    "nproc",
    "printf",
    "rm",
    "sed",
    "sh",
    "tail",
    "tr",
]


class Project:
    """A folder with the Makefile and what it reads, and no ROCm unless told."""

    def __init__(self, folder: Path):
        self.folder, self.log, self.rocm, self.tools = folder, folder / "log", folder / "rocm", folder / "tools"
        for name in (
            "Makefile",
            "pyproject.toml",
            "constraints.txt",
            "requirements-data.txt",
            "requirements-interpreter.txt",
        ):
            shutil.copy(ROOT / name, folder)
        self.tools.mkdir()
        for name in COMMANDS:  # and no more: a machine may have ROCm's on its path
            if found := shutil.which(name):
                (self.tools / name).symlink_to(found)
        self.tool("fakepython", PYTHON.replace("REAL", sys.executable))
        (folder / ".data").mkdir()
        with open(folder / "requirements-data.txt") as wheels:
            sum_ = subprocess.run(["cksum"], stdin=wheels, capture_output=True, text=True)
        (folder / ".data" / ".made-from").write_text("-".join(sum_.stdout.split()) + "\n")

    def tool(self, name: str, text: str) -> Path:
        path = self.tools / name
        path.write_text(text)
        path.chmod(0o755)
        return path

    def rocm_version(self, text: str) -> None:
        (self.rocm / ".info").mkdir(parents=True)
        (self.rocm / ".info" / "version").write_text(text)

    def make(self, *targets: str, **environment: str) -> subprocess.CompletedProcess:
        self.log.write_text("")
        base = {k: v for k, v in os.environ.items() if not re.match(r"CONDA|TORCH_INDEX|MAKE|MFLAGS|VENV|PIP", k)}
        base |= {"PATH": str(self.tools), "LOG": str(self.log)}
        where = ["PYTHON=fakepython", f"ROCM_PATH={self.rocm}"]
        command = [shutil.which("make"), "--no-print-directory", *targets, *where]
        return subprocess.run(command, cwd=self.folder, env={**base, **environment}, capture_output=True, text=True)

    @property
    def installs(self) -> list[str]:
        """What pip was asked, in order."""
        return [line.strip().removeprefix("-m pip ") for line in self.log.read_text().splitlines() if "-m pip" in line]


@pytest.fixture
def project(tmp_path):
    return Project(tmp_path)


REST = "install -c constraints.txt -e .[train,book,hf,test,lint]"
PIN = re.search(r"^torch==(.*)$", (ROOT / "constraints.txt").read_text(), re.M)[1]


def index(version: str) -> str:
    return f"install --index-url https://download.pytorch.org/whl/rocm{version} torch=={PIN}"


def test_without_rocm_pip_finds_pytorch_by_itself(project):
    assert project.make("env").returncode == 0
    assert project.installs == [REST]
    again = project.make("env")
    assert "already there" in again.stdout and project.installs == []


def test_an_index_named_without_rocm_is_remembered(project):
    project.make("env", "TORCH_INDEX=small")
    assert project.installs == [f"install --index-url small torch=={PIN}", REST]
    assert "already there" in project.make("env").stdout


@pytest.mark.parametrize(("found", "version"), [("7.2.1-43\n", "7.2"), ("7.14.0", "7.14")])
def test_on_rocm_its_pytorch_comes_first_and_alone(project, found, version):
    project.rocm_version(found)
    done = project.make("env")
    assert done.returncode == 0, done.stderr
    assert project.installs == [index(version), REST]
    assert f"PyTorch {PIN} from https://download.pytorch.org/whl/rocm{version} (ROCm {version})" in done.stdout
    assert project.make("env").stdout.startswith("environment: already there")


def test_rocm_is_known_by_its_tools_as_well(project):
    project.tool(
        "amd-smi",
        "#!/bin/sh\necho 'AMDSMI Tool: 26.0.2 | AMDSMI Library version: 26.0.2 | ROCm version: 7.1.0 | amdgpu'\n",
    )
    project.make("env")
    assert project.installs[0] == index("7.1")
    (project.tools / "amd-smi").unlink()
    shutil.rmtree(project.folder / ".venv")
    project.tool("rocminfo", "#!/bin/sh\n")
    project.make("env")
    assert project.installs[0] == index("7.2")  # no version to be had


def test_the_index_can_be_named(project):
    project.rocm_version("7.0.2")
    project.make("env", "TORCH_INDEX=mirror")
    assert project.installs == [f"install --index-url mirror torch=={PIN}", REST]
    assert "already there" in project.make("env").stdout  # and is remembered
    project.make("env", "TORCH_INDEX=other")
    assert project.installs[0] == f"install --index-url other torch=={PIN}"  # another index, another environment


def test_an_index_without_that_pytorch_is_one_line_and_leaves_no_environment(project):
    project.rocm_version("6.0")
    failed = project.make("env", BROKEN="--index-url")
    assert failed.returncode != 0 and project.installs == [index("6.0")]
    (line,) = [x for x in failed.stdout.splitlines() if x.startswith("error")]
    assert f"no PyTorch {PIN} at https://download.pytorch.org/whl/rocm6.0" in line and "TORCH_INDEX=" in line
    assert not (project.folder / ".venv" / ".made-from").exists()


def test_a_pytorch_that_is_not_rocms_is_refused(project):
    project.rocm_version("7.2.0")
    failed = project.make("env", NOT_ROCM="1")
    assert failed.returncode != 0
    assert "error: .venv has not PyTorch for ROCm, or has the Triton for CUDA over it" in failed.stdout
    assert not (project.folder / ".venv" / ".made-from").exists()


@pytest.mark.parametrize("rocm", [False, True])
def test_the_interpreters_triton_is_never_installed_on_rocm(project, rocm):
    if rocm:
        project.rocm_version("7.2.0")
    done = project.make("test", NO_TRITON="1")
    assert done.returncode == 0, done.stderr
    wanted = "install -q --no-deps -r requirements-interpreter.txt"
    assert (wanted in project.installs) is not rocm
    assert not any("triton" in line for line in project.installs)
    assert ("no triton for this machine" in done.stdout) is rocm
    assert wanted not in (project.make("test"), project.installs)[1]  # nor where there is one


def conda(project, checkout: Path) -> Path:
    """A conda environment that has mxfp4 from `checkout`."""
    prefix = project.folder / "conda"
    (prefix / "bin").mkdir(parents=True)
    real = '#!/bin/sh\nprintf \'%s\\n\' "$*" >> "$LOG"\n'
    real += (
        'case "$*" in *find_spec*) shift 2; exec '
        + f'{sys.executable} -c "import sys; sys.path.insert(0, \'{checkout}\')\n$1" "$2" ;;\n'
    )
    real += " *torch.version.hip*) exit ${NOT_ROCM:-0} ;; esac\n"
    (prefix / "bin" / "python").write_text(real)
    (prefix / "bin" / "python").chmod(0o755)
    (prefix / "bin" / "mxfp4").write_text("")
    (checkout / "mxfp4").mkdir(parents=True)
    (checkout / "mxfp4" / "__init__.py").write_text("")
    return prefix


def test_the_active_conda_environment_serves_if_it_is_this_checkouts(project):
    prefix = conda(project, project.folder)
    done = project.make("env", CONDA_PREFIX=str(prefix))
    assert done.stdout == f"environment: already there (conda, {prefix})\n" and project.installs == []


def test_a_conda_environment_of_another_checkout_does_not(project):
    prefix = conda(project, project.folder / "other")
    (project.folder / "mxfp4").mkdir()
    (project.folder / "mxfp4" / "__init__.py").write_text("")
    done = project.make("env", CONDA_PREFIX=str(prefix))
    assert done.stdout.startswith(
        "environment: the active conda environment has no mxfp4 of this folder, so .venv it is"
    )
    assert project.installs == [REST]


def test_a_conda_environment_with_cudas_pytorch_is_refused_on_rocm(project):
    project.rocm_version("7.2.0")
    prefix = conda(project, project.folder)
    assert project.make("env", CONDA_PREFIX=str(prefix)).returncode == 0
    failed = project.make("env", CONDA_PREFIX=str(prefix), NOT_ROCM="1")
    assert failed.returncode != 0
    assert f"error: {prefix} has not PyTorch for ROCm" in failed.stdout
    assert "PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/rocm7.2 conda env create" in failed.stdout


def commands(project) -> list[str]:
    """What mxfp4 was asked, in order."""
    lines = [line.split() for line in project.log.read_text().splitlines() if "mxfp4.cli" in line]
    return [" ".join(words[2:]) for words in lines]


@pytest.mark.parametrize(("corpus", "on"), [((), ""), (("CORPUS=c4:768-799",), " --corpus c4:768-799")])
def test_a_corpus_is_handed_to_every_command_that_reads_one(project, corpus, on):
    scale = ("SCALE=mi355x", *corpus)
    assert project.make("reproduce", *scale).returncode == 0
    assert commands(project) == [
        f"prepare --scale mi355x{on}", f"train --scale mi355x{on}", "run --all --scale mi355x", "book --scale mi355x",
    ]  # fmt: skip
    for target in ("prepare", "train"):
        project.make(target, *scale)
        assert commands(project) == [f"{target} --scale mi355x{on}"]
    project.make("reproduce", "DRY_RUN=1", "PLAN=first", *scale)
    assert commands(project) == [f"train --scale mi355x --plan first{on} --dry-run"]
    project.make("train", "PLAN=first", *scale)
    assert commands(project) == [f"train --scale mi355x --plan first{on}"]
