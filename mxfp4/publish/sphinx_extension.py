"""A Sphinx extension (book/_config.yml names it): the reference of commands, and pages that load nothing from elsewhere.

Jupyter Book always loads sphinx-thebe, which writes the address of a script on a CDN into every page, for running
cells in the cloud. This book has no such button, so its listeners and its style sheet are taken out.
"""

from __future__ import annotations

import argparse
import importlib
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive

UNWANTED = ("sphinx_thebe",)
UNWANTED_FILES = ("_static/sphinx-thebe.css",)


def setup(app) -> dict[str, Any]:
    """Called by Sphinx, after every listed extension has been set up."""
    app.add_directive("command-reference", CommandReference)
    app.connect("config-inited", _silence, priority=1)
    app.connect("html-page-context", _drop_files, priority=900)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _silence(app, config) -> None:
    for listeners in app.events.listeners.values():
        listeners[:] = [one for one in listeners if one.handler.__module__ not in UNWANTED]


def _drop_files(app, pagename, templatename, context, doctree) -> None:
    context["css_files"] = [f for f in context["css_files"] if str(getattr(f, "filename", f)) not in UNWANTED_FILES]


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
