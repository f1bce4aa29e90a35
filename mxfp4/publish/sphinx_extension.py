"""A Sphinx extension (book/_config.yml names it): keeps pages from pointing at other hosts for what they do not use.

Jupyter Book always loads sphinx-thebe, which writes the address of a script on a CDN into every page, for running
cells in the cloud. This book has no such button, so its listeners and its style sheet are taken out.
"""

from __future__ import annotations

from typing import Any

UNWANTED = ("sphinx_thebe",)
UNWANTED_FILES = ("_static/sphinx-thebe.css",)


def setup(app) -> dict[str, Any]:
    """Called by Sphinx, after every listed extension has been set up."""
    app.connect("config-inited", _silence, priority=1)
    app.connect("html-page-context", _drop_files, priority=900)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _silence(app, config) -> None:
    for listeners in app.events.listeners.values():
        listeners[:] = [one for one in listeners if one.handler.__module__ not in UNWANTED]


def _drop_files(app, pagename, templatename, context, doctree) -> None:
    context["css_files"] = [f for f in context["css_files"] if str(getattr(f, "filename", f)) not in UNWANTED_FILES]
