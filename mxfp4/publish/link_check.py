"""Looks over a built site: every link inside it leads somewhere, and no page loads anything from another host."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlsplit

from mxfp4.errors import UserError

# Elements whose address a browser fetches by itself, with the attributes that hold it.
_LOADS = {
    "script": ("src",), "img": ("src", "srcset"), "iframe": ("src",), "source": ("src", "srcset"),
    "video": ("src", "poster"), "audio": ("src",), "object": ("data",), "embed": ("src",),
}  # fmt: skip
_LOADING_RELS = {
    "stylesheet",
    "icon",
    "preload",
    "prefetch",
    "preconnect",
    "dns-prefetch",
    "modulepreload",
    "manifest",
}


class _Page(HTMLParser):
    """Collects what a page loads, what it links to and which anchors it has."""

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.loads: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()

    def handle_starttag(self, tag, attrs):
        values = {name: value or "" for name, value in attrs}
        if "id" in values:
            self.anchors.add(values["id"])
        if tag == "a":
            if "name" in values:
                self.anchors.add(values["name"])
            if "href" in values:
                self.links.append(values["href"])
        elif tag == "link":
            if _LOADING_RELS & set(values.get("rel", "").split()):
                self.loads.append(values.get("href", ""))
        else:
            for name in _LOADS.get(tag, ()):
                if values.get(name):
                    self.loads.append(values[name].split()[0] if name == "srcset" else values[name])


def check_site(site: Path) -> None:
    """Raise UserError for the first dead link, dead anchor, missing file or outside load in the pages of `site`."""
    pages = {path: _read(path) for path in sorted(site.rglob("*.html")) if "_static" not in path.parts}
    if not (site / "index.html").is_file():
        raise UserError("the built site has no index.html")
    for path, page in pages.items():
        name = path.relative_to(site).as_posix()
        for address in page.loads:
            if _outside(address):
                raise UserError(f"{name} would load {address[:80]} from another host")
            if not _is_data(address) and not _target(site, path, address)[0].is_file():
                raise UserError(f"{name} loads {address}, which the site does not have")
        for address in page.links:
            if _outside(address) or urlsplit(address).scheme:
                continue
            target, anchor = _target(site, path, address)
            if not target.is_file():
                raise UserError(f"{name} has a dead link: {address}")
            if anchor and target in pages and anchor not in pages[target].anchors:
                raise UserError(f"{name} has a link to a missing anchor: {address}")


def _read(path: Path) -> _Page:
    page = _Page()
    page.feed(path.read_text(encoding="utf-8"))
    page.close()
    return page


def _outside(address: str) -> bool:
    return urlsplit(address).scheme in ("http", "https", "ftp", "ws", "wss") or address.startswith("//")


def _is_data(address: str) -> bool:
    return urlsplit(address).scheme in ("data", "blob")


def _target(site: Path, page: Path, address: str) -> tuple[Path, str]:
    """The file and the anchor that a relative address means on `page`."""
    bare, anchor = urldefrag(address)
    relative = unquote(urlsplit(bare).path)
    if not relative:
        return page, unquote(anchor)
    base = site if relative.startswith("/") else page.parent
    target = (base / relative.lstrip("/")).resolve()
    return (target / "index.html" if target.is_dir() else target), unquote(anchor)
