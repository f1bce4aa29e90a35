"""Every chapter of the book on made-up records, through the real runner and builder, in a real browser.

One test for all pages: tests that share a fixture may be dealt to several workers, and each would make the book.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from mxfp4.directories import project_dir
from mxfp4.pages.charts import METADATA
from mxfp4.publish.notebook import chapter_sources, run_notebook
from mxfp4.publish.site import build_site
from tests.fakes.browser import BROWSER, open_page
from tests.fakes.page_layers import Layers
from tests.fakes.runs import make_runs, records_in


@dataclass(frozen=True)
class Book:
    notebooks: dict[str, Path]
    """{chapter: executed notebook}."""
    site: Path


@pytest.fixture(scope="session")
def book(tmp_path_factory):
    """The book of this checkout, run on made-up records and built, in a temporary folder."""
    checkout = Path(__file__).resolve().parents[2]
    root = tmp_path_factory.mktemp("book")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(checkout)
        patch.setenv("MXFP4_RUNS", str(root / "runs"))
        for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
            patch.setenv(name, "")  # the records are a CPU's
        made = make_runs(root / "runs")
        notebooks = {path.stem: run_notebook(path, scale="cpu").path for path in chapter_sources()}
        assert records_in(root / "runs") == made, "a chapter trained something"
        folder = next(iter(notebooks.values())).parent
        site = build_site(project_dir() / "book", folder, scale="cpu", out=root / "build")
        assert site.stale == ()
        return Book(notebooks, site.path)


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
def test_every_chart_draws_and_mathematics_is_set(book, tmp_path):
    wrong = []
    for name, notebook in book.notebooks.items():
        wrong += [f"{name}: {what}" for what in problems(book.site / f"{name}.html", notebook, tmp_path)]
    assert wrong == []


def problems(path: Path, notebook: Path, folder: Path) -> list[str]:
    """What is wrong with one page, as lines."""
    page = open_page(path, folder)
    cells = [c for c in json.loads(notebook.read_text())["cells"] if c["cell_type"] == "code"]
    outputs = sum("vegalite" in o.get("metadata", {}).get(METADATA, {}) for c in cells for o in c["outputs"])
    calls = sum(len(re.findall(r"(?<!\w)show\(", "".join(c["source"]))) for c in cells)
    formulas = path.read_text().count('class="math notranslate')
    found = [f"draws nothing: {chart.label}" for chart in page.charts if chart.marks == 0]
    found += [
        f"{layer} draws nothing in: {label}" for (label, layer), shapes in Layers(page.dom).drawn.items() if shapes == 0
    ]
    found += [f"still a picture: {chart.label}" for chart in page.charts if chart.still_shown]
    found += [f"asks for {address}" for address in page.requests]
    if len(page.charts) != outputs:
        found.append(f"{len(page.charts)} charts on the page, {outputs} in the notebook")
    if outputs < calls:
        found.append(f"{calls} calls of show() in the notebook, {outputs} charts")
    errors = len(re.findall(r'<g [^>]*data-mml-node="merror"', page.dom))
    if page.formulas != formulas or errors:
        found.append(f"{formulas} pieces of mathematics, {page.formulas} set, {errors} with errors")
    return found


def test_pages_of_plans_that_have_not_been_run_say_so(tmp_path, monkeypatch):
    """Without a record they run, draw what needs none, and name the command; they train nothing."""
    monkeypatch.chdir(Path(__file__).resolve().parents[2])
    monkeypatch.setenv("MXFP4_RUNS", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for name, plan in (("recipes", "others"), ("scaling", "sizes")):
        page = run_notebook(project_dir() / "book" / f"{name}.md", scale="cpu").path.read_text()
        assert "Not run yet at this scale" in page and f"mxfp4 train --plan {plan} --scale cpu" in page
        assert "image/png" not in page
    assert records_in(tmp_path) == {}
