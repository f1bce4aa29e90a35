"""The book as one document: every page in it, links inside it, and one line where there is no browser."""

from __future__ import annotations

import re

import pytest

from mxfp4.errors import UserError
from mxfp4.publish import pdf
from tests.fakes.browser import BROWSER


def test_one_document_holds_every_page_and_links_inside_itself(site):
    document = pdf.one_document(site, ["charts", "other"])
    assert re.findall(r'<li><a href="(.*?)">(.*?)</a></li>', document)[:2] == [
        ("#charts", "Charts"),
        ("#other", "Other"),
    ]
    assert "<title>Pretraining with MXFP4</title>" in document
    anchors = re.findall(r' id="([^"]+)"', document)
    assert len(anchors) == len(set(anchors)) and {"charts", "other", "charts--equation-eq-sum"} <= set(anchors)
    links = re.findall(r'<a [^>]*href="([^"]*)"', document)
    assert "#other" in links and any(link.startswith("#other--") for link in links)
    for link in links:
        assert link.startswith("http") or link[1:] in anchors, link


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
def test_prints(site, tmp_path):
    pdf.write_pdf(site, ["charts", "other"], tmp_path / "book.pdf")
    printed = (tmp_path / "book.pdf").read_bytes()
    assert printed.startswith(b"%PDF-") and printed.count(b"/Type /Page\n") >= 3
    assert not (site / "_book.html").exists()


def test_says_that_there_is_no_browser(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError, match="a PDF needs Chromium or Chrome, and none of .* is on the path: install one"):
        pdf.find_browser()
