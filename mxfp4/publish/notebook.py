"""Runs one notebook: MyST source -> checked parameters -> papermill -> runs/notebooks/<scale>/NAME.ipynb.

Sources are MyST Markdown (jupytext reads it, papermill does not: it gets a temporary .ipynb). The executed notebook
appears, atomically, only when every cell passed; a half-run one goes to runs/failed/, from which nothing is read.
What a run depends on is written into its metadata as a key: source text, parameters, the modules it imports and the
records. The same key asked again is skipped. The kernel is started with this interpreter, from a kernel specification
made for the run, so that no registered kernel, IPython profile or working directory of the user's has a say.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mxfp4
from mxfp4.directories import bench_dir, checkout, in_checkout, pilot_dir, project_dir, runs_dir
from mxfp4.errors import UserError
from mxfp4.publish.clean_notebook import tidy
from mxfp4.publish.code_fingerprint import code_fingerprint
from mxfp4.publish.parameter_rules import check
from mxfp4.publish.parameters import Parameter, bind, read_parameters
from mxfp4.studies.scales import get_scale

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_KERNEL = "mxfp4"


@dataclass(frozen=True)
class Source:
    """A notebook source as read: `node` is its nbformat notebook, `parameters` what its parameters cell declares."""

    path: Path
    text: str
    node: Any
    parameters: dict[str, Parameter]

    @property
    def name(self) -> str:
        return self.path.stem


@dataclass(frozen=True)
class Run:
    """What came of a request: where the executed notebook lies, and whether it was there already."""

    path: Path
    skipped: bool
    seconds: float


def find_source(given: str | Path) -> Path:
    """A path, or the name of a chapter in book/. Raises UserError that lists the chapters."""
    path = Path(given)
    if path.suffix == "" and _NAME.fullmatch(str(given)):
        path = checkout(f"chapter {given}") / "book" / f"{given}.md"
    if path.suffix != ".md" or not path.is_file():
        chapters = ", ".join(p.stem for p in chapter_sources()) if in_checkout() else "none, as this is no checkout"
        raise UserError(f"{given} is no notebook: allowed is a MyST .md file or one of the chapters: {chapters}")
    if not _NAME.fullmatch(path.stem):
        raise UserError(f"{path.name}: a notebook's name is made of letters, digits, - and _")
    return path


def chapter_sources() -> list[Path]:
    """The notebooks among book/*.md: those with a code cell."""
    found = sorted((checkout("mxfp4 run --all") / "book").glob("*.md"))
    return [p for p in found if re.search(r"^```\{code-cell\}", p.read_text(encoding="utf-8"), re.MULTILINE)]


def read_source(path: Path) -> Source:
    """Parse a MyST notebook. Raises UserError where it is not one, or its parameters cell is not as it must be."""
    import jupytext

    text = path.read_text(encoding="utf-8")
    try:
        node = jupytext.reads(text, fmt="md:myst")
    except Exception as error:  # jupytext has no base class for what it raises on bad input
        raise UserError(f"{path.name} is not a MyST notebook: {_one_line(error)}") from None
    if not any(c.cell_type == "code" for c in node.cells):
        raise UserError(f"{path.name} has no code cell, so there is nothing to run")
    cells = [c for c in node.cells if "parameters" in c.metadata.get("tags", [])]
    if len(cells) > 1:
        raise UserError(f"{path.name} has {len(cells)} cells tagged parameters; allowed is one")
    known = read_parameters(cells[0].source, path.name) if cells else {}
    return Source(path, text, node, known)


def run_notebook(
    source: str | Path,
    params: Mapping[str, Any] | None = None,
    *,
    scale: str | None = None,
    force: bool = False,
    progress: bool | None = None,
) -> Run:
    """Execute `source` with `params` (strings are parsed as the declared types) unless that run is there already.

    scale: names the folder of the result, and is the value of the notebook's parameter `scale` where it has one
    (default: that parameter's). progress: a bar on stderr (default: only on a terminal). Raises UserError for a bad
    parameter, a failing cell or a kernel that dies.
    """
    path = find_source(source)
    read = read_source(path)
    given = dict(params or {})
    if scale is not None and "scale" in read.parameters and str(given.setdefault("scale", scale)) != scale:
        raise UserError(f"scale {scale!r} and parameter scale={given['scale']!r} differ: give one")
    values = bind(read.parameters, given, read.name)
    scale = scale or values.get("scale", "cpu")
    get_scale(scale)
    check(read.parameters, values)
    target = _inside(runs_dir() / "notebooks" / scale / f"{_result_name(read, values)}.ipynb")
    if not force and _key_of(target) == run_key(read, values, scale):
        return Run(target, skipped=True, seconds=0.0)

    started = time.monotonic()
    defaults = {n: p.default for n, p in read.parameters.items()}
    changed = {n: v for n, v in values.items() if v != defaults[n]}
    show = sys.stderr.isatty() if progress is None else progress
    with tempfile.TemporaryDirectory(prefix="mxfp4-") as temporary:
        executed = _execute(read, changed, Path(temporary), show, scale)
    about = {
        "source": path.name,
        "source_sha256": hashlib.sha256(read.text.encode()).hexdigest(),
        "scale": scale,
        "parameters": _plain(values),
        # Taken after the run: records that this very run added are no reason to run it twice.
        "key": run_key(read, values, scale),
        "records_sha256": records_of(scale),
    }
    tidy(executed, read.name, about)
    _write(executed, target)
    return Run(target, skipped=False, seconds=time.monotonic() - started)


def _result_name(source: Source, values: Mapping[str, Any]) -> str:
    """The name of a result: the chapter's own for the book's page, with a digest for anything else.

    So a chapter run with other parameters, or another file that is called like one, leaves the book's page alone.
    """
    other = {n: v for n, v in values.items() if n != "scale" and v != source.parameters[n].default}
    if source.path.resolve().parent == (project_dir() / "book").resolve():
        if not other:
            return source.name
        return f"{source.name}-{hashlib.sha256(json.dumps(_plain(other), sort_keys=True).encode()).hexdigest()[:8]}"
    where = f"{source.path.resolve()}\0{json.dumps(_plain(other), sort_keys=True)}"
    return f"{source.name}-{hashlib.sha256(where.encode()).hexdigest()[:8]}"


def run_key(source: Source, values: Mapping[str, Any], scale: str) -> str:
    """SHA-256 over everything that the result depends on."""
    parts = [
        source.text,
        json.dumps(_plain(values), sort_keys=True),
        scale,
        code_fingerprint("\n".join(c.source for c in source.node.cells if c.cell_type == "code")),
        records_fingerprint(),
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def records_fingerprint() -> str:
    """SHA-256s of the records of every scale, which a chapter may set side by side, of benchmarks and of pilots."""
    hashes = [records_of("*")]
    hashes += [_hash_files(folder, sorted(folder.glob("*.json"))) for folder in (bench_dir(), pilot_dir())]
    return "".join(hashes)


def records_of(scale: str) -> str:
    """SHA-256 of the records of one scale, or of all ("*"): whether some came or went since."""
    root = runs_dir() / "records"
    return _hash_files(root, sorted(root.glob(f"{scale}/*/record.json")))


def _hash_files(root: Path, files: list[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(
            f"{file.relative_to(root).as_posix()}\0{hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode()
        )
    return digest.hexdigest()


def _execute(read: Source, changed: dict[str, Any], temporary: Path, show: bool, scale: str):
    """The executed nbformat notebook; on failure UserError, with the half-run one moved to runs/failed/."""
    import nbformat
    import papermill
    from nbclient.exceptions import DeadKernelError
    from papermill.exceptions import PapermillExecutionError
    from traitlets.config import Config

    _teach_papermill_tuples()
    before, after = temporary / "in.ipynb", temporary / "out.ipynb"
    read.node.metadata["kernelspec"] = {"name": _KERNEL, "display_name": "Python 3", "language": "python"}
    nbformat.write(read.node, before)
    try:
        with _kernel(temporary):
            papermill.execute_notebook(
                str(before), str(after), changed, kernel_name=_KERNEL, language="python", progress_bar=show,
                cwd=str(project_dir()), start_timeout=120, config=Config(KernelManager=_transport(temporary)),
                # Written at the end, also after an error; else every cell writes the whole file, its pictures included.
                request_save_on_cell_execute=False, autosave_cell_every=0,
            )  # fmt: skip
    except PapermillExecutionError as error:
        how = "was refused" if error.ename == UserError.__name__ else f"raised {error.ename}"
        cell = f"code cell {error.exec_count}" if error.exec_count else "a cell"
        raise UserError(
            f"{read.name}: {cell} {how}: {_one_line(error.evalue)}{_keep_failed(after, read.name, scale)}"
        ) from None
    except DeadKernelError as error:
        raise UserError(
            f"{read.name}: the kernel died ({_one_line(error)}){_keep_failed(after, read.name, scale)}"
        ) from None
    executed = nbformat.read(after, as_version=4)
    if end := _early_end(executed):
        raise UserError(f"{read.name}: {end}{_keep_failed(after, read.name, scale)}")
    return executed


def _early_end(node) -> str | None:
    """Why an executed notebook is not whole: a cell that exits counts for papermill as the end of a good run."""
    cells = [c for c in node.cells if c.cell_type == "code" and c.source.strip()]
    for number, cell in enumerate(cells, start=1):
        left = sum(c.execution_count is None for c in cells[number:])
        errors = [o for o in cell.outputs if o.output_type == "error"]
        if errors:
            return f"code cell {number} of {len(cells)} ended the page with {errors[0].ename}, {left} cells after it"
        if cell.execution_count is None:
            return f"code cell {number} of {len(cells)} was not run, so the page is not whole"
    return None


def _keep_failed(half_run: Path, name: str, scale: str) -> str:
    """Move the half-run notebook to runs/failed/; the end of the error message that says so."""
    import nbformat

    if not half_run.is_file():
        return ""
    kept = _inside(runs_dir() / "failed" / scale / f"{name}.ipynb")
    node = nbformat.read(half_run, as_version=4)
    tidy(node, name, {"source": f"{name}.md", "scale": scale, "failed": True})
    _write(node, kept)
    return f" (half-run notebook: {shown(kept)})"


def _transport(temporary: Path) -> dict[str, str]:
    """How to talk to the kernel: sockets in the run's own folder, which no other run or user shares.

    Their addresses have to be short; where the folder's is not, what is left is TCP on this machine.
    """
    address = str(temporary / "k")
    return {"transport": "ipc", "ip": address} if len(address) < 90 else {}


@contextlib.contextmanager
def _kernel(temporary: Path) -> Iterator[None]:
    """A kernel specification for this interpreter, found before any other while the context lasts."""
    folder = temporary / "kernels" / _KERNEL
    folder.mkdir(parents=True)
    search = [str(Path(mxfp4.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    specification = {
        "argv": [
            *(sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"),
            "--IPKernelApp.log_level=50",  # a kernel that is ended while it starts up says so as an error
            "--IPKernelApp.exec_lines=from mxfp4.errors import print_notices; print_notices(); del print_notices",
        ],
        "display_name": "Python 3",
        "language": "python",
        "env": {
            "PYTHONPATH": os.pathsep.join(search),
            "MXFP4_RUNS": str(runs_dir()),
            "PYDEVD_DISABLE_FILE_VALIDATION": "1",
        },
    }
    (folder / "kernel.json").write_text(json.dumps(specification), encoding="utf-8")
    ours = {
        "JUPYTER_PATH": str(temporary),
        "JUPYTER_RUNTIME_DIR": str(temporary / "runtime"),
        "JUPYTER_CONFIG_DIR": str(temporary / "config"),
        "IPYTHONDIR": str(temporary / "ipython"),
    }
    saved = {name: os.environ.get(name) for name in ours}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name, value in saved.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _teach_papermill_tuples() -> None:
    """Papermill writes a tuple as the string of it; write it as a tuple."""
    from papermill.translators import PythonTranslator, papermill_translators

    class Translator(PythonTranslator):
        @classmethod
        def translate(cls, value):
            if isinstance(value, tuple):
                return f"({', '.join(map(cls.translate, value))}{',' if len(value) == 1 else ''})"
            return super().translate(value)

    papermill_translators.register("python", Translator)


def _key_of(notebook: Path) -> str | None:
    """The key in an executed notebook's metadata; None where there is none to read."""
    try:
        return json.loads(notebook.read_text(encoding="utf-8"))["metadata"]["mxfp4"]["key"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(node, target: Path) -> None:
    """Write a notebook atomically."""
    import nbformat

    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(
        "w", dir=target.parent, prefix=".", suffix=".tmp", delete=False, encoding="utf-8"
    ) as f:
        f.write(nbformat.writes(node) + "\n")
    os.chmod(f.name, 0o644)
    os.replace(f.name, target)


def _inside(path: Path) -> Path:
    """`path`, which must lie in runs/ once links are followed."""
    if not path.resolve().is_relative_to(runs_dir().resolve()):
        raise UserError(f"{path} leads outside {runs_dir()}")
    return path


def shown(path: Path) -> str:
    """A path as the user would type it."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: list(v) if isinstance(v, tuple) else v for name, v in values.items()}


def _one_line(error: object) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
