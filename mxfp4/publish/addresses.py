"""Where the site and its repository can be reached, and the files that only a site with an address has.

With MXFP4_SITE_URL or `mxfp4 book --base-url`: canonical links and Open Graph tags (sphinx_extension.py), sitemap.xml,
robots.txt and a social card. Without it, a build holds none of these. Every build has 404.html and the pages of
book/_redirects.yml, a map `old page: new page`, which lead from an old address to the new one.
"""

from __future__ import annotations

import html
import os
import re
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, urlsplit

import yaml

from mxfp4.errors import UserError

SITE_VARIABLE = "MXFP4_SITE_URL"
REPOSITORY_VARIABLE = "MXFP4_REPOSITORY_URL"
CARD = "_static/social-card.png"
REDIRECTS = "_redirects.yml"


@dataclass(frozen=True)
class Addresses:
    """Addresses without a slash at the end; None where there is none."""

    site: str | None = None
    """Of the folder that holds the site's index.html."""
    repository: str | None = None
    """Of the repository's front page, on a host that serves files at <repository>/blob/HEAD/<path>."""

    def page(self, page: str) -> str:
        """The address of a page on the site; the front page's is that of the folder."""
        return f"{self.site}/" if page == "index" else f"{self.site}/{quote(page)}.html"

    def source(self, path: str) -> str:
        """The address of a file of the repository, in the newest commit of its main branch."""
        return f"{self.repository}/blob/HEAD/{quote(path)}"


def find_addresses(site: str | None = None, repository: str | None = None) -> Addresses:
    """The addresses given, else those of the environment. Raises UserError for what is no web address."""
    return Addresses(
        _checked(site or os.environ.get(SITE_VARIABLE), "site"),
        _checked(repository or os.environ.get(REPOSITORY_VARIABLE), "repository"),
    )


def _checked(address: str | None, what: str) -> str | None:
    if not address:
        return None
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.netloc or parts.query or parts.fragment:
        raise UserError(f"the {what}'s address {address!r}: allowed is one such as https://example.org/book")
    return address.rstrip("/")


def read_redirects(book: Path, pages: Iterable[str]) -> dict[str, str]:
    """{old page: new page} of book/_redirects.yml. Raises UserError for an entry that leads nowhere or hides a page."""
    path = book / REDIRECTS
    if not path.is_file():
        return {}
    try:
        moved = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except yaml.YAMLError as error:
        raise UserError(f"{REDIRECTS} cannot be read: {str(error).splitlines()[0]}") from None
    if not isinstance(moved, dict):
        raise UserError(f"{REDIRECTS}: allowed is a map `old page: new page`, found {moved!r}")
    there = set(pages)
    for old, new in moved.items():
        if not re.fullmatch(r"[\w-]+(/[\w-]+)*", str(old)):
            raise UserError(f"{REDIRECTS}: {old!r} is no page's name: write it without .html")
        if old in there:
            raise UserError(f"{REDIRECTS}: {old} is a page of the book, so it cannot lead to {new}: remove the entry")
        if new not in there:
            raise UserError(f"{REDIRECTS}: {old} leads to {new!r}, which is no page of the book")
    return {str(old): str(new) for old, new in moved.items()}


def add_files(site: Path, pages: Iterable[str], redirects: Mapping[str, str], addresses: Addresses, book: Path) -> None:
    """Write 404.html and the redirects into the built site; with an address also sitemap, robots.txt and card.

    pages: those of the table of contents, front page first. book: the folder with _config.yml.
    """
    listed = list(pages)
    for old, new in redirects.items():
        target = site / f"{old}.html"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(_redirect("../" * old.count("/") + f"{new}.html", addresses, new), encoding="utf-8")
    title = yaml.safe_load((book / "_config.yml").read_text(encoding="utf-8"))["title"]
    (site / "404.html").write_text(_not_found(site, listed, title, addresses), encoding="utf-8")
    if addresses.site is None:
        return
    places = "".join(f"<url><loc>{html.escape(addresses.page(page))}</loc></url>\n" for page in listed)
    (site / "sitemap.xml").write_text(
        '<?xml version="1.0" encoding="utf-8"?>\n'
        f'<urlset xmlns="http://www.sitemaps.org/schemas/sitemap/0.9">\n{places}</urlset>\n',
        encoding="utf-8",
    )
    (site / "robots.txt").write_text(f"User-agent: *\nAllow: /\nSitemap: {addresses.site}/sitemap.xml\n")
    (site / CARD).write_bytes(_card(title))


def _redirect(target: str, addresses: Addresses, page: str) -> str:
    """A page that leads to `target` and keeps the anchor that it was asked for."""
    canonical = f'<link rel="canonical" href="{html.escape(addresses.page(page))}">' if addresses.site else ""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>This page has moved</title>'
        f'<meta name="robots" content="noindex">{canonical}<meta http-equiv="refresh" content="1; url={target}">'
        f'<script>location.replace("{target}" + location.search + location.hash)</script></head>\n'
        f'<body><h1>This page has moved</h1><p><a href="{target}">Its new address</a></p></body></html>\n'
    )


def _not_found(site: Path, pages: list[str], title: str, addresses: Addresses) -> str:
    """The page for an address that does not exist. A host shows it at any depth, so its links start at the root of the
    site, and it loads nothing. Without an address the site is taken to lie at the root of its host."""
    root = addresses.site or ""
    items = []
    for page in pages:
        found = re.search(r"<title>(.*?)</title>", (site / f"{page}.html").read_text(encoding="utf-8"), re.DOTALL)
        # Sphinx writes "page — book"; what is read from HTML is escaped already.
        name = re.split(r" (?:&#8212;|—) ", found[1])[0].strip() if found else page
        items.append(f'<li><a href="{html.escape(f"{root}/{page}.html")}">{name}</a></li>')
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>Page not found</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="robots" content="noindex">'
        "<style>:root{color-scheme:light dark}"
        "body{font:1rem/1.6 system-ui,sans-serif;max-width:40rem;margin:3rem auto;padding:0 1rem}</style></head>\n"
        f"<body><h1>Page not found</h1><p>{html.escape(title)} has no page at this address. Its pages:</p>\n<ul>\n"
        + "\n".join(items)
        + "\n</ul></body></html>\n"
    )


def _card(title: str) -> bytes:
    """The picture that shows up where someone links to the book: PNG, 1200 x 630 pixels, its title over the values
    of E2M1 on a line, those below 1 in another colour."""
    import vl_convert

    from mxfp4.pages.charts import PALETTE, recompressed

    lines = textwrap.wrap(title, 26)[:3]
    words = "".join(
        f'<text x="90" y="{190 + 92 * i}" font-size="76" font-weight="bold" fill="#1f2328">{html.escape(line)}</text>'
        for i, line in enumerate(lines)
    )
    values = (0, 0.5, 1, 1.5, 2, 3, 4, 6)
    dots = "".join(
        f'<circle cx="{600 + sign * 85 * value:g}" cy="520" r="11" fill="{PALETTE[0 if value >= 1 else 1]}"/>'
        for value in values
        for sign in (-1, 1)
    )
    svg = (
        '<svg xmlns="http://www.w3.org/2000/svg" width="1200" height="630" font-family="Liberation Sans, sans-serif">'
        f'<rect width="1200" height="630" fill="#ffffff"/><rect width="1200" height="18" fill="{PALETTE[0]}"/>'
        f'{words}<line x1="60" x2="1140" y1="520" y2="520" stroke="#57606a" stroke-width="2"/>{dots}</svg>'
    )
    return recompressed(vl_convert.svg_to_png(svg))
