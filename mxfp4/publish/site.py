"""Builds the site from the executed notebooks of one scale. Executes nothing, fetches nothing.

    book/*.md, _config.yml, _static  +  runs/notebooks/<scale>/*.ipynb  ->  book/_build/src  ->  book/_build/html

Everything that would leave a hole in the site stops the build with one line, and the site that was there stays: a toc
entry without a file, a chapter outside the toc, a chapter that has not been run, a Sphinx warning (duplicate label,
unknown reference, broken markup), a dead link or anchor, or anything that a page would load from another host. The same
inputs give the same bytes.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import html
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

import mxfp4
from mxfp4.errors import UserError
from mxfp4.publish.addresses import Addresses, add_files, read_redirects
from mxfp4.publish.code_fingerprint import imported, sources
from mxfp4.publish.downloads import downloads
from mxfp4.publish.link_check import check_site
from mxfp4.publish.notebook import records_of
from mxfp4.publish.parameters import Parameter, read_parameters

_CODE_CELL = re.compile(r"^```\{code-cell\}", re.MULTILINE)
_WARNING = re.compile(r"^(?:(?P<where>\S[^:]*(?::\d+)?): )?(?P<level>WARNING|ERROR|CRITICAL|SEVERE): (?P<what>.*)$")
_KEY_FILE = ".made-from"
PAGES_FILE = "_pages.json"
"""In the folder that Sphinx reads: what sphinx_extension.py says about each page."""
# A cell that says itself how its code is shown is left alone; any other is folded.
_SHOWN_TAGS = {"show-input", "hide-input", "remove-input", "hide-cell", "remove-cell"}


@dataclass(frozen=True)
class Site:
    """A built site."""

    path: Path
    skipped: bool
    stale: tuple[str, ...]
    """Chapters whose source, or whose scale's records, have changed since they were run."""


@dataclass(frozen=True)
class _Pages:
    """The pages of a site before Sphinx reads them."""

    staged: dict[str, str]
    """{file name: text as Sphinx will read it}."""
    files: dict[str, bytes]
    """{path in the site: content} of what the pages offer for download."""
    stale: tuple[str, ...]


def build_site(
    book: Path,
    notebooks: Path,
    *,
    scale: str,
    out: Path | None = None,
    force: bool = False,
    addresses: Addresses | None = None,
) -> Site:
    """Build `book` (a folder with _toc.yml) with the executed notebooks in the folder `notebooks`.

    out: folder for the build (default: book/_build); the site is out/html. addresses: of the site and the repository,
    neither by default. Raises UserError, see above.
    """
    out = out or book / "_build"
    addresses = addresses or Addresses()
    pages = toc_pages(book)
    redirects = read_redirects(book, pages)
    built, source = out / "html", out / "src"
    collected = _collect(book, pages, notebooks, scale)
    staged, stale = collected.staged, collected.stale
    about = json.dumps(_about_pages(book, pages, collected, content_date(book, notebooks), addresses), sort_keys=True)
    key = _key(book, {**staged, PAGES_FILE: about}, collected.files)
    if not force and (built / _KEY_FILE).is_file() and (built / _KEY_FILE).read_text() == key:
        return Site(built, skipped=True, stale=stale)

    shutil.rmtree(source, ignore_errors=True)
    shutil.copytree(book, source, ignore=lambda folder, names: [n for n in names if n == "_build" or n.endswith(".md")])
    for name, text in staged.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(text, encoding="utf-8")
    (source / PAGES_FILE).write_text(about, encoding="utf-8")
    work = out / "work"
    shutil.rmtree(work, ignore_errors=True)
    run_sphinx(source, work, out / "log.txt")
    fresh = work / "_build" / "html"
    _add_libraries(fresh, out / "cache")
    for name, content in collected.files.items():
        (fresh / name).parent.mkdir(exist_ok=True)
        (fresh / name).write_bytes(content)
    add_files(fresh, pages, redirects, addresses, book)
    check_site(fresh)
    (fresh / _KEY_FILE).write_text(key)
    old = out / "html.old"
    shutil.rmtree(old, ignore_errors=True)
    if built.exists():
        built.rename(old)
    fresh.rename(built)
    for leftover in (old, work):
        shutil.rmtree(leftover, ignore_errors=True)
    return Site(built, skipped=False, stale=stale)


def toc_pages(book: Path) -> list[str]:
    """The pages that book/_toc.yml names, front page first. Raises UserError where toc and folder differ."""
    try:
        toc = yaml.safe_load((book / "_toc.yml").read_text(encoding="utf-8"))
        pages = [toc["root"], *_files(toc)]
    except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
        raise UserError(f"_toc.yml cannot be read: {str(error).splitlines()[0]}") from None
    for page in pages:
        if not (book / f"{page}.md").is_file():
            raise UserError(f"_toc.yml names {page!r}, but there is no {page}.md in {book.name}/")
        if pages.count(page) > 1:
            raise UserError(f"_toc.yml names {page!r} {pages.count(page)} times")
    there = {p.relative_to(book).with_suffix("").as_posix() for p in book.rglob("*.md") if "_build" not in p.parts}
    outside = sorted(there - set(pages))
    if outside:
        raise UserError(f"{outside[0]}.md is not in _toc.yml, so no page would lead to it")
    return pages


def _files(node) -> list[str]:
    """Every `file:` below a toc node, in order."""
    if isinstance(node, list):
        return [name for item in node for name in _files(item)]
    if isinstance(node, dict):
        own = [str(node["file"])] if "file" in node else []
        return own + [name for value in node.values() if isinstance(value, (list, dict)) for name in _files(value)]
    return []


def content_date(book: Path, notebooks: Path) -> str | None:
    """The day (YYYY-MM-DD) of the last commit that changed the book or its notebooks; None outside git.

    SOURCE_DATE_EPOCH, the seconds that reproducible builds agree on, comes first where it is set.
    """
    given = os.environ.get("SOURCE_DATE_EPOCH", "")
    if given.isdigit():
        return datetime.datetime.fromtimestamp(int(given), datetime.UTC).date().isoformat()
    inside = [str(p.resolve()) for p in (book, notebooks) if p.resolve().is_relative_to(book.resolve().parent)]
    command = ["git", "-C", str(book), "log", "-1", "--format=%cs", "--", *inside]
    try:
        done = subprocess.run(command, text=True, capture_output=True, stdin=subprocess.DEVNULL)
    except OSError:  # no git here
        return None
    return done.stdout.strip() or None


def _about_pages(
    book: Path, pages: list[str], collected: _Pages, date: str | None, addresses: Addresses
) -> dict[str, Any]:
    """What sphinx_extension.py writes on the pages: see `PageLine` there."""
    about = {}
    for page in pages:
        name, code = Path(page).name, _code(f"{page}.md", (book / f"{page}.md").read_text(encoding="utf-8"))
        offered = [path for path in collected.files if Path(path).name in (f"{name}.ipynb", f"{name}-data.zip")]
        links = []
        if addresses.repository:
            links.append(("Source", addresses.source(f"book/{page}.md")))
            links += [(path, addresses.source(path)) for path in code]
        about[page] = {"downloads": offered, "links": links}
    return {
        "site": addresses.site,
        "title": yaml.safe_load((book / "_config.yml").read_text(encoding="utf-8"))["title"],
        "version": mxfp4.__version__,
        "date": date,
        "pages": about,
    }


def _code(name: str, text: str) -> list[str]:
    """The modules of this package that a page imports itself, as paths in the repository, chapter modules first."""
    cells = re.findall(r"^```\{code-cell\}[^\n]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    code = "\n".join(re.sub(r"^:.*$", "", cell, flags=re.MULTILINE) for cell in cells)
    root = Path(mxfp4.__file__).parents[1]
    paths = [sources()[m].relative_to(root).as_posix() for m in imported(code) if m in sources()]
    return sorted((p for p in paths if not p.endswith("__init__.py")), key=lambda p: ("/chapters/" not in p, p))


def _collect(book: Path, pages: list[str], notebooks: Path, scale: str) -> _Pages:
    """Every page as Sphinx will read it, what it offers, and the names of stale chapters."""
    staged: dict[str, str] = {}
    files: dict[str, bytes] = {}
    stale, missing = [], []
    records = records_of(scale)
    for page in pages:
        text = (book / f"{page}.md").read_text(encoding="utf-8")
        if not _CODE_CELL.search(text):
            staged[f"{page}.md"] = text
            continue
        executed = notebooks / f"{Path(page).name}.ipynb"
        if not executed.is_file():
            missing.append(page)
            continue
        content = executed.read_bytes()
        node = json.loads(content)
        files.update(downloads(page, content))
        about = node["metadata"].get("mxfp4", {})
        if (
            about.get("source_sha256") != hashlib.sha256(text.encode()).hexdigest()
            or about.get("records_sha256", records) != records  # older runs do not say
        ):
            stale.append(page)
        staged[f"{page}.ipynb"] = json.dumps(present(node, page, files), indent=1, ensure_ascii=False, sort_keys=True)
    if missing:
        raise UserError(
            f"not run yet at scale {scale}: {', '.join(missing)}; run `mxfp4 run {missing[0]} --scale {scale}`"
        )
    return _Pages({name: _relink(text, staged) for name, text in staged.items()}, files, tuple(stale))


def _relink(text: str, staged: dict[str, str]) -> str:
    """Links between chapters name sources (`stability.md`), which also work where the sources are read; Sphinx gets
    the executed notebook of that name."""

    def target(match: re.Match) -> str:
        executed = f"{match['page']}.ipynb"
        return f"]({executed}{match['anchor']})" if executed in staged else match[0]

    return re.sub(r"\]\((?P<page>[\w/-]+)\.md(?P<anchor>(?:#[\w-]*)?)\)", target, text)


def present(node: dict, page: str = "", files: dict[str, bytes] | None = None) -> dict:
    """An executed notebook (nbformat JSON) as its page shows it: charts for Vega, code folded, the run named.

    files: takes the charts' still pictures, {path in the site: PNG}; without it they stay inside the page.
    """
    from mxfp4.pages.charts import METADATA, figure_html

    charts = 0
    for cell in node["cells"]:
        if cell["cell_type"] != "code":
            continue
        tags = cell["metadata"].setdefault("tags", [])
        if not _SHOWN_TAGS & set(tags):
            tags.append("hide-input")
        outputs = []
        for output in cell["outputs"]:
            ours = output.get("metadata", {}).get(METADATA, {})
            if ours.get("caption") is True:
                continue  # the figure carries its caption
            if "vegalite" in ours:
                still = f"data:image/png;base64,{''.join(output['data']['image/png']).strip()}"
                if files is not None:
                    charts += 1
                    path = f"_figures/{page.replace('/', '-')}-{charts:02d}.png"
                    files[path] = base64.b64decode(still.partition(",")[2])
                    still = "../" * page.count("/") + path
                output = {
                    "output_type": "display_data",
                    "metadata": {},
                    "data": {"text/html": figure_html(ours["vegalite"], ours["caption"], still)},
                }
            outputs.append(output)
        cell["outputs"] = outputs
    about = node["metadata"].get("mxfp4")
    if about:
        source = _about(about, parameters_cell(node))
        node["cells"].append({"cell_type": "markdown", "id": "about-this-run", "metadata": {}, "source": source})
    return node


def parameters_cell(node: Mapping[str, Any]) -> str:
    """The source of a notebook's parameters cell, with the defaults; empty without one."""
    cells = [c for c in node["cells"] if "parameters" in c["metadata"].get("tags", [])]
    return "".join(cells[0]["source"]) if cells else ""


def _about(about: dict, declared: str) -> str:
    """The page's last paragraph: from which run it was rendered, how to have another, and the page's parameters."""
    given = "".join(
        f" {name}={as_word(value)}" for name, value in about.get("parameters", {}).items() if name != "scale"
    )
    command = f"mxfp4 run book/{about['source']} --scale {about['scale']}" + (f" -p{given}" if given else "")
    name = Path(about["source"]).stem
    known = read_parameters(declared, about["source"])
    rows = "".join(
        f"<tr><td><code>{p.name}</code></td><td>{html.escape(p.type)}</td>"
        f"<td><code>{html.escape(as_word(about['parameters'].get(p.name, p.default)))}</code></td>"
        f"<td>{html.escape(p.help)}</td></tr>"
        for p in known.values()
    )
    head = "".join(f'<th scope="col">{title}</th>' for title in ("Parameter", "Type", "On this page", "Meaning"))
    listed = f'\n<table class="mx-parameters"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>\n'
    return (
        ":::{admonition} Run this page with other parameters\n:class: tip dropdown\n"
        f"Rendered from `runs/notebooks/{about['scale']}/{name}.ipynb`. In a checkout, "
        f"to run it again, with these or other parameters:\n\n```sh\n{command}\n```\n\n"
        f"Elsewhere, with the notebook downloaded and `pip install 'mxfp4[book]'`; a page that reads records needs "
        f"`MXFP4_RUNS`, the path of a checkout's `runs`:\n\n"
        f"```sh\npapermill {name}.ipynb again.ipynb{_papermill(about, known)}\n```\n{listed if rows else ''}:::\n"
    )


def _papermill(about: dict, known: dict[str, Parameter]) -> str:
    """Papermill's options for the parameters of a page: -p for numbers, -r for texts, -y (YAML) for lists."""
    words = ""
    for name in known:
        value = about["parameters"].get(name, known[name].default)
        if isinstance(value, (list, tuple)):
            words += f" -y '{name}: {json.dumps(list(value))}'"
        else:
            words += f" -{'r' if isinstance(value, str) else 'p'} {name} {as_word(value)}"
    return words


def as_word(value: Any) -> str:
    """A parameter's value as a shell word."""
    text = ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
    return text if re.fullmatch(r"[\w.,+:/-]+", text) else "'" + text.replace("'", "'\\''") + "'"


def _key(book: Path, staged: dict[str, str], files: dict[str, bytes]) -> str:
    """SHA-256 over all that goes into the site: pages, everything else in book/, this code."""
    digest = hashlib.sha256()
    parts = {name: text.encode() for name, text in staged.items()} | files
    for path in sorted(book.rglob("*")):
        inside = path.relative_to(book)
        if path.is_file() and inside.parts[0] != "_build" and path.suffix != ".md":
            parts[inside.as_posix()] = path.read_bytes()
    modules = ("site", "link_check", "addresses", "downloads", "sphinx_extension")
    for name in (*(f"publish/{module}.py" for module in modules), "pages/charts.py"):
        parts[f"code/{name}"] = (Path(__file__).parents[1] / name).read_bytes()
    for name in sorted(parts):
        digest.update(f"{name}\0{hashlib.sha256(parts[name]).hexdigest()}\n".encode())
    return digest.hexdigest()


def run_sphinx(source: Path, work: Path, log: Path, *, strict: bool = True) -> None:
    """Run jupyter-book on `source`; the site is work/_build/html, what it printed is kept in `log`.

    strict: warnings are errors. Raises UserError with the first problem.
    """
    program = "import sys; from jupyter_book.cli.main import main; sys.exit(main())"
    options = [
        "build",
        str(source),
        "--path-output",
        str(work),
        "--keep-going",
        "-q",
        *(("-W", "-n") if strict else ()),
    ]
    environment = {**os.environ, "PYTHONWARNINGS": "ignore", "NO_COLOR": "1", "TERM": "dumb"}
    done = subprocess.run(
        [sys.executable, "-c", program, *options],
        env=environment,
        text=True,
        capture_output=True,
        stdin=subprocess.DEVNULL,
    )
    printed = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout + done.stderr)
    log.write_text(printed, encoding="utf-8")
    if done.returncode == 0:
        return
    problems = [m for line in printed.splitlines() if (m := _WARNING.match(line.strip()))]
    if not problems:
        last = next((line for line in reversed(printed.splitlines()) if line.strip()), "no message")
        raise UserError(f"the book does not build: {last.strip()} (all of it: {log})")
    first = problems[0]
    where = (first["where"] or "").replace(f"{source}{os.sep}", "") or "book"
    more = f" (and {len(problems) - 1} more: {log})" if len(problems) > 1 else ""
    raise UserError(f"the book does not build: {where}: {first['what']}{more}")


def _add_libraries(site: Path, cache: Path) -> None:
    """Put Vega and MathJax beside the pages, out of the installed wheels."""
    from mxfp4.pages.charts import VL_VERSION

    bundle = cache / f"vega-{VL_VERSION}-{importlib.metadata.version('vl-convert-python')}.js"
    if not bundle.is_file():
        cache.mkdir(parents=True, exist_ok=True)
        bundle.write_text(vega_script(), encoding="utf-8")
    (site / "_static" / "vega").mkdir(parents=True, exist_ok=True)
    shutil.copyfile(bundle, site / "_static" / "vega" / "vega.js")
    (site / "_static" / "mathjax").mkdir(exist_ok=True)
    shutil.copyfile(mathjax_file(), site / "_static" / "mathjax" / mathjax_file().name)


def vega_script() -> str:
    """JavaScript that makes Vega's `embed` a member of window.mxfp4Vega."""
    import vl_convert

    from mxfp4.pages.charts import VL_VERSION

    code = vl_convert.javascript_bundle(snippet="window.mxfp4Vega = {embed: vegaEmbed};", vl_version=VL_VERSION)
    # A bundle declares hundreds of short global names; in a function they cannot meet those of Sphinx's scripts.
    return f"(function () {{\n{code}\n}})();\n"


def mathjax_file() -> Path:
    """MathJax as one file, out of its wheel. Raises UserError where that is not installed."""
    found = importlib.util.find_spec("sphinx-mathjax-offline")
    if found is None or not found.origin:
        raise UserError("sphinx-mathjax-offline is not installed: run `make env` or `pip install 'mxfp4[book]'`")
    return Path(found.origin).parent / "static" / "mathjax" / "tex-svg-full.js"
