"""A Sphinx extension (book/_config.yml names it): the reference of commands, what stands under a page's title, and
pages that load nothing from elsewhere.

Jupyter Book always loads sphinx-thebe, which writes the address of a script on a CDN into every page, for running
cells in the cloud. This book has no such button, so its listeners and its style sheet are taken out.
"""

from __future__ import annotations

import argparse
import html
import importlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from docutils import nodes
from docutils.parsers.rst import Directive

UNWANTED = ("sphinx_thebe",)
UNWANTED_FILES = ("_static/sphinx-thebe.css",)
WORDS_A_MINUTE = 220
_NOT_READ = (nodes.literal_block, nodes.raw, nodes.comment, nodes.math_block)


def setup(app) -> dict[str, Any]:
    """Called by Sphinx, after every listed extension has been set up."""
    app.add_directive("command-reference", CommandReference)
    app.connect("config-inited", _silence, priority=1)
    app.connect("config-inited", _read_pages)
    app.connect("html-page-context", _drop_files, priority=900)
    app.connect("html-page-context", _describe, priority=900)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _silence(app, config) -> None:
    for listeners in app.events.listeners.values():
        listeners[:] = [one for one in listeners if one.handler.__module__ not in UNWANTED]


def _drop_files(app, pagename, templatename, context, doctree) -> None:
    context["css_files"] = [f for f in context["css_files"] if str(getattr(f, "filename", f)) not in UNWANTED_FILES]


def _read_pages(app, config) -> None:
    """What site.py wrote down about the pages; nothing where Sphinx builds a folder that it did not make."""
    path = Path(app.srcdir) / "_pages.json"
    app.mxfp4_pages = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    if app.mxfp4_pages and app.mxfp4_pages["site"]:
        config.html_baseurl = app.mxfp4_pages["site"] + "/"


def _describe(app, pagename, templatename, context, doctree) -> None:
    """Put the line under the title of a page, and, on a site with an address, what link previews read."""
    book = app.mxfp4_pages
    if book is None or doctree is None or pagename not in book["pages"]:
        return
    line = page_line(book["pages"][pagename], minutes(doctree), book["version"], book["date"], context["pathto"])
    head, end, rest = context["body"].partition("</h1>")
    if end:
        context["body"] = f"{head}{end}\n{line}{rest}"
    if book["site"]:
        context["metatags"] = context.get("metatags", "") + open_graph(book, pagename, context["title"], doctree)


def minutes(doctree) -> int:
    """The time it takes to read a page's prose, its code left out; at least 1."""
    words = sum(
        len(text.astext().split())
        for text in doctree.findall(nodes.Text)
        if not any(isinstance(parent, _NOT_READ) for parent in _parents(text))
    )
    return max(1, round(words / WORDS_A_MINUTE))


def _parents(node):
    while node.parent is not None:
        node = node.parent
        yield node


def page_line(page: Mapping[str, Any], minutes: int, version: str, date: str | None, pathto) -> str:
    """HTML of one line: reading time, version and day (YYYY-MM-DD) of the book, downloads, source and code in the repository."""
    parts = [f"{minutes} min read", f"mxfp4 {html.escape(version)}" + (f", {date}" if date else "")]
    for path in page["downloads"]:
        text = "Notebook" if path.endswith(".ipynb") else "Data of the figures"
        parts.append(f'<a href="{html.escape(pathto(path, 1))}" download>{text}</a>')
    parts += [f'<a href="{html.escape(address)}">{html.escape(text)}</a>' for text, address in page["links"][:1]]
    code = "".join(
        f'<li><a href="{html.escape(address)}">{html.escape(text)}</a></li>' for text, address in page["links"][1:]
    )
    folded = f"<details><summary>Code of this page</summary><ul>{code}</ul></details>" if code else ""
    items = "".join(f"<span>{part}</span>" for part in parts)
    return f'<div class="mx-page-line">{items}{folded}</div>'


def open_graph(book: Mapping[str, Any], pagename: str, title: str, doctree) -> str:
    """The tags that a link's preview is made from (https://ogp.me)."""
    site = book["site"]
    paragraph = next(iter(doctree.findall(nodes.paragraph)), None)
    text = " ".join(paragraph.astext().split()) if paragraph is not None else book["title"]
    description = text if len(text) <= 200 else text[:199].rsplit(" ", 1)[0] + " ..."
    tags = {
        "og:type": "article",
        "og:site_name": book["title"],
        "og:title": html.unescape(re.sub(r"<[^>]*>", "", title)),
        "og:description": description,
        "og:url": f"{site}/" if pagename == "index" else f"{site}/{quote(pagename)}.html",
        "og:image": f"{site}/_static/social-card.png",
        "og:image:width": "1200",
        "og:image:height": "630",
        "og:image:alt": book["title"],
    }
    named = {"description": description, "twitter:card": "summary_large_image"}
    return "".join(
        f'\n<meta {kind}="{name}" content="{html.escape(content)}">'
        for kind, group in (("property", tags), ("name", named))
        for name, content in group.items()
    )


class CommandReference(Directive):
    """`command-reference` with the path of a function that makes an argparse parser: the help text of each command."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        module, function = self.arguments[0].rsplit(".", 1)
        parser = getattr(importlib.import_module(module), function)()
        commands = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction)).choices
        return [_command(name, sub) for name, sub in commands.items()]


def _command(name: str, parser: argparse.ArgumentParser) -> nodes.section:
    text = parser.format_help()
    section = nodes.section("", nodes.title(text=name), nodes.literal_block(text, text, language="none"))
    section["ids"] = [nodes.make_id(f"command-{name}")]
    section["names"] = [nodes.fully_normalize_name(name)]
    return section
