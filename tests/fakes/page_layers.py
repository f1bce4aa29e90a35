"""Which layers of a page's charts have drawn something: a reference line must not stand in for data that is missing."""

from __future__ import annotations

import re
from html.parser import HTMLParser

_LAYER = re.compile(r"(?:\S+_)?(?:marks|pathgroup)")
_SHAPES = ("path", "rect", "text", "line", "circle", "image")
_VOID = ("img", "input", "br", "meta", "link", "hr")


class Layers(HTMLParser):
    """The layers in a DOM after its scripts have run."""

    def __init__(self, dom: str):
        super().__init__()
        self.drawn: dict[tuple[str, str], int] = {}
        """{(caption of the chart, Vega's name of the layer): shapes with a geometry}, over all facets."""
        self._chart = ""
        self._stack: list[tuple[str, str]] = []
        self.feed(dom)

    def handle_starttag(self, tag, attrs):
        values = {name: value or "" for name, value in attrs}
        classes = values.get("class", "").split()
        layer = self._stack[-1][1] if self._stack else ""
        if tag == "figure" and "mx-figure" in classes:
            self._chart = values.get("aria-label", "")
        if {"role-mark", "role-scope"} & set(classes):
            named = next((c for c in classes if _LAYER.fullmatch(c)), "")
            layer = re.sub(r"_?(marks|pathgroup)$", "", named) if named else layer
            if named:
                self.drawn.setdefault((self._chart, layer), 0)
        inside_marks = any("role-mark" in name for name, _ in self._stack)
        if tag in _SHAPES and inside_marks and _has_geometry(tag, values):
            self.drawn[self._chart, layer] += 1
        if tag not in _VOID:
            self._stack.append((" ".join(classes) + f" <{tag}", layer))

    def handle_endtag(self, tag):
        while self._stack and not self._stack.pop()[0].endswith(f"<{tag}"):
            pass


def _has_geometry(tag: str, values: dict[str, str]) -> bool:
    numbers = [values.get(name, "") for name in ("d", "transform", "x", "y", "x2", "y2", "width", "height")]
    return not any("NaN" in number for number in numbers) and (tag != "path" or values.get("d", "") != "")
