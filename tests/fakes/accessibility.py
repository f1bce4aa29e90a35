"""What a screen reader trips over on a built page: headings, tables, pictures, names. No browser needed."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path


def barriers(page: Path) -> list[str]:
    """One line for each barrier in the article of a page, and in the names of the whole page."""
    found = _Article()
    found.feed(page.read_text(encoding="utf-8"))
    return found.problems + found.in_general()


class _Article(HTMLParser):
    def __init__(self):
        super().__init__()
        self.problems: list[str] = []
        self.headings: list[int] = []
        self.labels: list[str] = []
        self.ids: list[str] = []
        self.language = ""
        self._inside = False
        self._table: list[bool] = []  # of each open table, whether it has a header
        self._link: list[str] | None = None

    def handle_starttag(self, tag, attrs):
        values = {name: value or "" for name, value in attrs}
        if tag == "html":
            self.language = values.get("lang", "")
        if tag == "article":
            self._inside = True
        if "id" in values:
            self.ids.append(values["id"])
        if tag == "img":
            if not values.get("alt", "").strip():
                self.problems.append(f"a picture without alternative text: {values.get('src', '')[:60]}")
            if self._link is not None:
                self._link.append(values.get("alt", ""))
        if not self._inside:
            return
        if tag in ("h1", "h2", "h3", "h4", "h5", "h6"):
            self.headings.append(int(tag[1]))
        if tag == "table":
            self._table.append(False)
        if tag == "th" and self._table:
            self._table[-1] = True
        if values.get("role") == "region" or tag == "figure":
            self.labels.append(f"{tag}: {values['aria-label']}" if "aria-label" in values else "")
        if tag == "a" and "href" in values:
            self._link = [values.get("aria-label", "")]

    def handle_data(self, data):
        if self._link is not None:
            self._link.append(data)

    def handle_endtag(self, tag):
        if tag == "article":
            self._inside = False
        if tag == "table" and self._table and not self._table.pop():
            self.problems.append("a table without a header")
        if tag == "a" and self._link is not None:
            if not "".join(self._link).strip():
                self.problems.append("a link without a name")
            self._link = None

    def in_general(self) -> list[str]:
        found = []
        if self.language != "en":
            found.append(f"the language is {self.language!r}")
        if self.headings.count(1) != 1 or self.headings[0] != 1:
            found.append(f"not one title first, but headings of levels {self.headings}")
        jumps = [(a, b) for a, b in zip(self.headings, self.headings[1:], strict=False) if b > a + 1]
        found += [f"a heading of level {b} after one of level {a}" for a, b in jumps]
        labels = [label for label in self.labels if label]
        found += [f"a name used twice: {label[:80]}" for label in sorted({x for x in labels if labels.count(x) > 1})]
        found += [f"an anchor used twice: {name}" for name in sorted({x for x in self.ids if self.ids.count(x) > 1})]
        return found
