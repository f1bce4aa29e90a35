"""What a site with an address holds, what its pages offer, and what each page says about itself."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import re
import struct
import zipfile
from pathlib import Path

import pytest
import yaml

from mxfp4 import cli
from mxfp4.errors import UserError
from mxfp4.publish.addresses import (
    REPOSITORY_VARIABLE,
    SITE_VARIABLE,
    Addresses,
    find_addresses,
    read_redirects,
)
from mxfp4.publish.downloads import chart_tables, data_archive, downloads
from mxfp4.publish.link_check import check_site
from mxfp4.publish.notebook import Run
from tests.fakes.browser import BROWSER, open_page


def test_line_under_the_title(site):
    page = (site / "charts.html").read_text()
    line = re.search(r'</h1>\s*<div class="mx-page-line">(.*?)</div>', page, re.DOTALL)[1]
    assert "1 min read" in line and "mxfp4 0.1.0, 2026-07-09" in line
    assert '<a href="_downloads/charts.ipynb" download>Notebook</a>' in line
    assert '<a href="_downloads/charts-data.zip" download>Data of the figures</a>' in line
    assert '<a href="https://example.com/us/mxfp4/blob/HEAD/book/charts.md">Source</a>' in line
    assert "https://example.com/us/mxfp4/blob/HEAD/mxfp4/pages/charts.py" in line
    prose = (site / "other.html").read_text()
    assert "1 min read" in prose and "_downloads/" not in prose and "blob/HEAD/book/other.md" in prose


def test_page_offers_its_notebook_and_its_data(site):
    notebook = (site / "_downloads" / "charts.ipynb").read_bytes()
    assert notebook == (site.parents[2] / "runs" / "notebooks" / "cpu" / "charts.ipynb").read_bytes()
    archive = zipfile.ZipFile(site / "_downloads" / "charts-data.zip")
    assert archive.namelist() == ["figure-01.csv", "figure-02.csv", "figures.txt"]
    rows = list(csv.DictReader(io.StringIO(archive.read("figure-01.csv").decode())))
    assert [int(row["y"]) for row in rows] == [i * i for i in range(12)] and rows[1]["kind"] == "b"
    assert "figure-01.csv: Squares, </script> & all." in archive.read("figures.txt").decode()


def test_pictures_lie_beside_the_page(site):
    page = (site / "charts.html").read_text()
    pictures = re.findall(r'class="mx-still" alt="[^"]*" src="(.*?)"', page)
    assert pictures == ["_figures/charts-01.png", "_figures/charts-02.png"]
    assert all((site / path).read_bytes().startswith(b"\x89PNG") for path in pictures)


def test_downloaded_notebook_runs_outside_the_checkout(site, tmp_path, monkeypatch):
    import papermill

    monkeypatch.chdir(tmp_path)
    given = json.loads((site / "_downloads" / "charts.ipynb").read_text())
    given["cells"] = given["cells"][:3]  # papermill's time goes into charts; up to the imports it is the same run
    given["cells"][2]["source"] = ["assert points == 4\nimport mxfp4.pages.charts"]
    (tmp_path / "charts.ipynb").write_text(json.dumps(given))
    done = papermill.execute_notebook("charts.ipynb", "again.ipynb", {"points": 4}, progress_bar=False)
    assert done.cells[-1].execution_count and done.metadata.kernelspec.name == "python3"


def test_page_says_how_to_run_it_again(site):
    page = (site / "charts.html").read_text()
    folded = page[page.index("Run this page with other parameters") :]
    code = re.sub(r"<[^>]*>", "", folded)
    assert "mxfp4 run book/charts.md --scale cpu -p points=12" in code
    assert "papermill charts.ipynb again.ipynb -p points 12 -r scale cpu" in code
    assert "<td><code>points</code></td><td>int</td><td><code>12</code></td><td>marks in the first chart</td>" in folded


def test_data_of_layers_and_inline_values():
    spec = {
        "datasets": {"a": [{"x": 1}, {"x": 2, "y": [3]}], "b": [{"x": None}], "unused": [{"z": 0}]},
        "data": {"name": "a"},
        "layer": [{"mark": "bar"}, {"data": {"name": "b"}}, {"data": {"values": [5, 6]}}, {"data": {"name": "a"}}],
    }
    assert chart_tables(spec) == ["x,y\n1,\n2,[3]\n", 'x\n""\n', "value\n5\n6\n"]
    chart = {"metadata": {"mxfp4": {"vegalite": spec, "caption": "Three."}}}
    node = {"cells": [{"outputs": [chart]}]}
    names = ["figure-01-1.csv", "figure-01-2.csv", "figure-01-3.csv", "figures.txt"]
    assert zipfile.ZipFile(io.BytesIO(data_archive(node))).namelist() == names
    assert data_archive(node) == data_archive(node)
    assert list(downloads("part/a", json.dumps({"cells": []}).encode())) == ["_downloads/a.ipynb"]


def test_what_an_address_adds(site):
    page = (site / "charts.html").read_text()
    assert '<link rel="canonical" href="https://example.org/book/charts.html"' in page
    for tag in (
        '<meta property="og:title" content="Charts">',
        '<meta property="og:url" content="https://example.org/book/charts.html">',
        '<meta property="og:image" content="https://example.org/book/_static/social-card.png">',
    ):
        assert tag in page
    sitemap = (site / "sitemap.xml").read_text()
    assert re.findall(r"<loc>(.*?)</loc>", sitemap) == [
        f"https://example.org/book/{n}.html" for n in ("charts", "other")
    ]
    assert "Sitemap: https://example.org/book/sitemap.xml" in (site / "robots.txt").read_text()
    card = (site / "_static" / "social-card.png").read_bytes()
    assert struct.unpack(">II", card[16:24]) == (1200, 630)
    assert Addresses("https://example.org").page("index") == "https://example.org/"


def test_missing_page_loads_nothing_and_links_from_the_root(site):
    page = (site / "404.html").read_text()
    assert re.findall(r'<a href="(.*?)">(.*?)</a>', page) == [
        ("https://example.org/book/charts.html", "Charts"),
        ("https://example.org/book/other.html", "Other"),
    ]
    assert "<link" not in page and "<script" not in page and "<img" not in page


def test_pages_that_moved_keep_their_address(site):
    assert 'url=../charts.html"' in (site / "old" / "squares.html").read_text()
    assert '<a href="other.html">' in (site / "before.html").read_text()
    check_site(site)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: gone", "a leads to 'gone', which is no page of the book"),
        ("here: there", "here is a page of the book, so it cannot lead to there: remove the entry"),
        ("a.html: here", "'a.html' is no page's name: write it without .html"),
        ("- a", "allowed is a map `old page: new page`, found ['a']"),
    ],
)
def test_redirects_that_lead_nowhere(tmp_path, text, reason):
    (tmp_path / "_redirects.yml").write_text(text)
    with pytest.raises(UserError) as caught:
        read_redirects(tmp_path, ["here", "there"])
    assert str(caught.value) == f"_redirects.yml: {reason}"


def test_addresses_come_from_options_then_the_environment(monkeypatch):
    monkeypatch.setenv("MXFP4_SITE_URL", "https://example.org/a/")
    monkeypatch.delenv("MXFP4_REPOSITORY_URL", raising=False)
    assert find_addresses() == Addresses("https://example.org/a", None)
    assert find_addresses("https://example.net", "https://example.com/r") == Addresses(
        "https://example.net", "https://example.com/r"
    )
    for wrong in ("example.org", "file:///a", "https://example.org/?a=1"):
        with pytest.raises(UserError, match="the site's address '.*': allowed is one such as https://example.org/book"):
            find_addresses(wrong)


@pytest.fixture(scope="module")
def other_run(site, tmp_path_factory):
    """What `mxfp4 run charts -p points=6` leaves and prints; the run itself is the book's, under other parameters."""
    root = site.parents[2]
    node = json.loads((site / "_downloads" / "charts.ipynb").read_text())
    node["metadata"]["mxfp4"]["parameters"]["points"] = 6
    notebook = tmp_path_factory.mktemp("other") / "charts-0123abcd.ipynb"
    notebook.write_text(json.dumps(node))
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.chdir(root)
        patch.delenv("MXFP4_SITE_URL", raising=False)
        patch.setattr("mxfp4.publish.notebook.run_notebook", lambda *a, **k: Run(notebook, skipped=False, seconds=1))
        assert cli.main(["run", "charts", "-p", "points=6"]) == 0
    return notebook.with_suffix(".html"), printed.getvalue()


def test_run_with_other_parameters_leaves_a_page(other_run):
    path, printed = other_run
    assert f"page: {path} (one file, opens offline)" in printed
    page = path.read_text()
    box = re.search(r'<div class="mx-differs">(.*?)</div>', page, re.DOTALL)[1]
    assert "<code>points</code></th><td>6</td><td>12</td>" in box and "scale" not in box
    # The other page's link is text, the citation leads to the reference below.
    assert "see the other page" in page and "other.html" not in page
    assert "Cim" in page and 'href="#references"' in page


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
def test_that_page_opens_offline(other_run, tmp_path):
    page = open_page(other_run[0], tmp_path)
    assert [chart.marks for chart in page.charts] == [12, 12]
    assert not any(chart.still_shown for chart in page.charts)
    assert page.formulas == 2 and page.requests == []


def test_workflow_builds_what_it_publishes():
    root = Path(__file__).parents[2]
    jobs = yaml.safe_load((root / ".github" / "workflows" / "site.yml").read_text())["jobs"]
    (build,) = [step for step in jobs["build"]["steps"] if step.get("name") == "Build"]
    assert set(build["env"]) == {SITE_VARIABLE, REPOSITORY_VARIABLE}
    (target,) = re.findall(r"make (\w+)", build["run"])
    assert re.search(rf"^{target}: ", (root / "Makefile").read_text(), re.MULTILINE)
    assert jobs["build"]["steps"][-1]["with"]["path"] == "book/_build/html"
    assert jobs["publish"]["needs"] == "build" and jobs["publish"]["permissions"]["id-token"] == "write"
