"""A built site in a real browser, from file:// and with every host blocked: charts draw, mathematics is set."""

from __future__ import annotations

import pytest

from mxfp4.directories import project_dir
from tests.fakes.accessibility import barriers
from tests.fakes.browser import BROWSER, open_page

needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")


@needs_browser
@pytest.mark.parametrize("dark", [False, True])
def test_charts_draw_and_mathematics_is_set(site, tmp_path, dark):
    page = open_page(site / "charts.html", tmp_path, dark=dark)
    dots, bars = page.charts
    assert (dots.label, dots.marks) == ("Squares, </script> & all.", 12)
    assert bars.marks == 12
    assert not dots.still_shown and not bars.still_shown
    assert page.formulas == 2
    assert page.requests == []


@needs_browser
def test_charts_draw_on_a_phone(site, tmp_path):
    page = open_page(site / "charts.html", tmp_path, width=500)
    assert [chart.marks for chart in page.charts] == [12, 12]


@needs_browser
def test_search_finds_pages_from_a_file(site, tmp_path):
    page = open_page(site / "search.html", tmp_path, query="?q=charts")
    assert '<li><a href="charts.html"' in page.dom


@needs_browser
def test_still_picture_stays_without_the_bundle(site, tmp_path):
    bundle = site / "_static" / "vega" / "vega.js"
    kept = bundle.with_suffix(".kept")
    bundle.rename(kept)
    try:
        page = open_page(site / "charts.html", tmp_path)
    finally:
        kept.rename(bundle)
    assert [chart.marks for chart in page.charts] == [0, 0]
    assert all(chart.still_shown for chart in page.charts)


@needs_browser
def test_the_browser_would_have_seen_a_request(tmp_path):
    outside = '<img src="https://cdn.example.org/a.png"><script src="http://example.org/b.js"></script>'
    (tmp_path / "page.html").write_text(outside)
    page = open_page(tmp_path / "page.html", tmp_path)
    assert sorted(set(page.requests)) == ["http://example.org/b.js", "https://cdn.example.org/a.png"]


def test_pages_have_no_barriers(site):
    assert {page.stem: barriers(page) for page in site.glob("[co]*.html")} == {"charts": [], "other": []}


def test_barriers_are_found(tmp_path):
    (tmp_path / "page.html").write_text(
        "<html><body><article><h1 id='a'>A</h1><h3 id='a'>B</h3><table><tr><td>1</td></tr></table><img src='x.png'>"
        "<a href='#a'></a><figure aria-label='same'></figure><figure aria-label='same'></figure></article></body></html>"
    )
    assert barriers(tmp_path / "page.html") == [
        "a table without a header",
        "a picture without alternative text: x.png",
        "a link without a name",
        "the language is ''",
        "a heading of level 3 after one of level 1",
        "a name used twice: figure: same",
        "an anchor used twice: a",
    ]


def _built_pages():
    built = project_dir() / "book" / "_build" / "html"
    return sorted(p for p in built.glob("*.html") if p.stem not in ("index", "genindex", "search", "404"))


@needs_browser
@pytest.mark.parametrize("path", _built_pages(), ids=lambda p: p.stem)
def test_every_chart_of_the_built_book_has_marks(path, tmp_path):
    page = open_page(path, tmp_path)
    assert [chart.label for chart in page.charts if chart.marks == 0 or chart.still_shown] == []
    assert page.requests == []


@pytest.mark.parametrize("path", _built_pages(), ids=lambda p: p.stem)
def test_every_page_of_the_built_book_has_no_barriers(path):
    # A page that moved is no page any more.
    assert "<article" not in path.read_text() or barriers(path) == []
