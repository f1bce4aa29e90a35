"""The whole book as one PDF: the articles of a built site behind each other, printed by headless Chromium.

Links between pages become links inside the document; links to files of the site are dropped, as a PDF has none beside
it. Chromium draws charts and mathematics as in the site, and makes the outline from the headings.
"""

from __future__ import annotations

import html
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from mxfp4.errors import UserError

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-dev-shm-usage", "--host-resolver-rules=MAP * ~NOTFOUND",
    "--virtual-time-budget=120000", "--no-pdf-header-footer", "--generate-pdf-document-outline",
)  # fmt: skip
_MINUTES = 20


def find_browser() -> str:
    """The path of Chromium or Chrome. Raises UserError where there is none."""
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        raise UserError(
            f"a PDF needs Chromium or Chrome, and none of {', '.join(BROWSERS)} is on the path: install one"
        )
    return found


def write_pdf(site: Path, pages: Sequence[str], target: Path) -> None:
    """Print the pages of the built `site`, in this order, into the file `target`.

    Raises UserError without a browser, or where it writes nothing.
    """
    browser = find_browser()
    book = site / "_book.html"  # beside the pages, so that their addresses of styles and pictures hold
    with tempfile.TemporaryDirectory(prefix="mxfp4-") as temporary:
        printed = Path(temporary, "book.pdf")
        command = [browser, *_FLAGS, f"--user-data-dir={temporary}/profile", f"--print-to-pdf={printed}", book.as_uri()]
        try:
            book.write_text(one_document(site, pages), encoding="utf-8")
            done = subprocess.run(
                command, text=True, capture_output=True, stdin=subprocess.DEVNULL, timeout=60 * _MINUTES
            )
        except subprocess.TimeoutExpired:
            raise UserError(f"{browser} did not print the book within {_MINUTES} minutes") from None
        finally:
            book.unlink(missing_ok=True)
        if not printed.is_file():
            last = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "no message")
            raise UserError(f"{browser} printed no PDF: {last.strip()}")
        shutil.move(printed, target)


def one_document(site: Path, pages: Sequence[str]) -> str:
    """The HTML of a document with the articles of `pages`, the first one's title first, and a table of contents."""
    texts = {page: (site / f"{page}.html").read_text(encoding="utf-8") for page in pages}
    first = texts[pages[0]]
    articles, contents = [], []
    for page, text in texts.items():
        found = re.search(r'<article class="bd-article">(.*?)</article>', text, re.DOTALL)
        if found is None:
            raise UserError(f"{page}.html has no article: build the site again with `mxfp4 book --force`")
        heading = re.search(r"<h1>(.*?)<a class=\"headerlink\"", found[1], re.DOTALL)
        contents.append(f'<li><a href="#{page}">{heading[1] if heading else html.escape(page)}</a></li>')
        articles.append(f'<article class="bd-article" id="{page}">{_inside(page, found[1], texts)}</article>')
    title = re.search(r"<title>(.*?)</title>", first, re.DOTALL)
    # Sphinx writes "page — book".
    name = re.split(r" (?:&#8212;|—) ", title[1].strip())[-1] if title else html.escape(site.name)
    head = re.findall(r'<link [^>]*rel="stylesheet"[^>]*>|<script[^>]*(?:mathjax|mxfp4-charts)[^>]*></script>', first)
    config = re.search(r"<script>window\.MathJax = .*?</script>", "".join(texts.values()), re.DOTALL)
    scripts = {s for t in texts.values() for s in re.findall(r"<script[^>]*(?:mathjax|mxfp4-charts)[^>]*></script>", t)}
    return (
        f'<!DOCTYPE html>\n<html lang="en" data-theme="light"><head><meta charset="utf-8"><title>{name}</title>'
        f"{config[0] if config else ''}{''.join(dict.fromkeys(head))}{''.join(sorted(scripts - set(head)))}</head>\n"
        f'<body class="mx-book"><header><h1>{name}</h1><ol>{"".join(contents)}</ol></header>\n'
        + "\n".join(articles)
        + "\n</body></html>\n"
    )


def _inside(page: str, article: str, pages: dict[str, str]) -> str:
    """An article whose anchors carry the page's name, and whose links lead to anchors of the same document."""

    def link(match: re.Match[str]) -> str:
        path, _, anchor = match[1].partition("#")
        if re.match(r"[a-z]+:", path):
            return match[0]
        target = path.removesuffix(".html") if path else page
        if target not in pages:
            return ""
        return f' href="#{target}--{anchor}"' if anchor else f' href="#{target}"'

    article = re.sub(r' href="([^"]*)"', link, article)
    article = re.sub(r' id="([^"]+)"', rf' id="{page}--\1"', article)
    return re.sub(r"url\(#", f"url(#{page}--", article)
