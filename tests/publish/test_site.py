"""What would leave a hole in the site stops the build with one line, and the site that was there stays."""

from __future__ import annotations

import json

import pytest

from mxfp4.errors import UserError
from mxfp4.publish.link_check import check_site
from mxfp4.publish.notebook import run_notebook
from mxfp4.publish.site import build_site, present, toc_pages
from tests.fakes.minibook import make


@pytest.fixture
def book(tmp_path):
    """Two pages of prose, so that a build takes seconds."""
    return make(tmp_path, charts="# Charts\n\nSee [the other page](other.md).\n")


def build(book):
    return build_site(book, book.parent / "notebooks", scale="cpu")


def contents(site) -> dict[str, bytes]:
    return {path.relative_to(site).as_posix(): path.read_bytes() for path in site.rglob("*") if path.is_file()}


def refused(book) -> str:
    with pytest.raises(UserError) as caught:
        build(book)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_builds_then_skips_then_builds_again_on_a_change(book):
    first = build(book)
    before = contents(first.path)
    assert "charts.html" in before and not first.skipped
    # What only a site with an address has.
    assert not {"sitemap.xml", "robots.txt", "_static/social-card.png"} & set(before)
    assert b'rel="canonical"' not in before["charts.html"] and b"og:" not in before["charts.html"]
    assert build(book).skipped
    (book / "other.md").write_text("# Other\n\nAnother text.\n\n```{bibliography}\n```\n")
    again = build(book)
    assert not again.skipped and "Another text." in (again.path / "other.html").read_text()
    # Whatever does not show the change has the same bytes.
    after = contents(again.path)
    differing = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    assert differing == {"other.html", "searchindex.js", ".made-from"}


def test_chapters_run_before_a_record_came_are_named(tmp_path, monkeypatch):
    monkeypatch.setenv("MXFP4_RUNS", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)
    book = make(tmp_path)
    notebooks = run_notebook(book / "charts.md").path.parent
    assert build_site(book, notebooks, scale="cpu").stale == ()
    for scale, stale in (("gpu", ()), ("cpu", ("charts",))):
        record = tmp_path / "runs" / "records" / scale / "one" / "record.json"
        record.parent.mkdir(parents=True)
        record.write_text("{}")
        assert build_site(book, notebooks, scale="cpu").stale == stale


def test_toc_entry_without_a_file(book):
    (book / "_toc.yml").write_text("format: jb-book\nroot: charts\nchapters:\n  - file: other\n  - file: nowhere\n")
    assert refused(book) == "_toc.yml names 'nowhere', but there is no nowhere.md in book/"


def test_page_outside_the_toc(book):
    (book / "stray.md").write_text("# Stray\n")
    assert refused(book) == "stray.md is not in _toc.yml, so no page would lead to it"


def test_page_twice_in_the_toc(book):
    (book / "_toc.yml").write_text("format: jb-book\nroot: charts\nchapters:\n  - file: other\n  - file: other\n")
    assert refused(book) == "_toc.yml names 'other' 2 times"


def test_chapter_that_was_not_run(book):
    (book / "other.md").write_text("# Other\n\n```{code-cell} ipython3\n1\n```\n")
    assert refused(book) == "not run yet at scale cpu: other; run `mxfp4 run other --scale cpu`"


DEAD = """# A

[dead](nowhere.md) and [dead](#no-such-anchor) and {ref}`no-such-label` and {cite}`nobody2020`

(twice)=
## B

(twice)=
## C
"""


def test_dead_references(book):
    kept = build(book).path / "charts.html"
    before = kept.read_text()
    (book / "charts.md").write_text(DEAD)
    said = refused(book)
    log = (book / "_build" / "log.txt").read_text()
    problems = [line for line in log.splitlines() if "WARNING" in line or "ERROR" in line]
    for reason in ("nowhere.md", "no-such-anchor", "no-such-label", "nobody2020", "twice"):
        assert any(reason in line for line in problems), reason
    assert said.startswith("the book does not build: charts.md:") and "more: " in said
    # Raw HTML is nothing that Sphinx looks into.
    (book / "charts.md").write_text('# A\n\n<a href="gone.html">raw</a>\n')
    assert refused(book) == "charts.html has a dead link: gone.html"
    assert kept.read_text() == before


def test_site_checks(tmp_path):
    (tmp_path / "index.html").write_text('<h1 id="here">x</h1><a href="#here">a</a><a href="https://example.org">b</a>')
    check_site(tmp_path)
    for markup, reason in [
        ('<a href="#gone">x</a>', "missing anchor: #gone"),
        ('<a href="gone.html">x</a>', "dead link: gone.html"),
        ('<script src="gone.js"></script>', "loads gone.js"),
        ('<link rel="stylesheet" href="//fonts.example.org/a.css">', "from another host"),
    ]:
        (tmp_path / "index.html").write_text(markup)
        with pytest.raises(UserError, match=reason):
            check_site(tmp_path)


def test_toc_pages_in_parts(tmp_path):
    book = make(tmp_path)
    toc = "format: jb-book\nroot: charts\nparts:\n  - caption: A\n    chapters:\n      - file: other\n"
    (book / "_toc.yml").write_text(toc)
    assert toc_pages(book) == ["charts", "other"]


def test_presented_notebook_has_figures_folded_code_and_its_run():
    spec, caption = {"mark": "bar", "text": "</script>"}, "What to see."
    chart = {
        "output_type": "display_data",
        "metadata": {"mxfp4": {"vegalite": spec, "caption": caption}},
        "data": {"image/png": "AAAA", "text/plain": caption},
    }
    note = {"output_type": "display_data", "metadata": {"mxfp4": {"caption": True}}, "data": {"text/markdown": caption}}
    cell = {"cell_type": "code", "metadata": {}, "source": "x", "outputs": [chart, note]}
    about = {"source": "a.md", "scale": "cpu", "parameters": {"seeds": [1, 2], "words": "it's two"}}
    shown = present({"cells": [cell], "metadata": {"mxfp4": about}})
    code, run = shown["cells"]
    assert code["metadata"]["tags"] == ["hide-input"]
    (figure,) = code["outputs"]
    markup = figure["data"]["text/html"]
    assert markup.count("</script>") == 1 and caption in markup and "data:image/png;base64,AAAA" in markup
    inside = markup.split('class="mx-spec">')[1].split("</script>")[0]
    assert json.loads(inside) == spec
    assert "mxfp4 run book/a.md --scale cpu -p seeds=1,2 words='it'\\''s two'" in run["source"]
