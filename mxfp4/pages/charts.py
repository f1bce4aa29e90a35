"""Charts and tables for the book: one Altair theme, one way to display.

`show(chart, caption=...)` displays a static PNG, which is what Jupyter, GitHub and a printer show, and puts the
Vega-Lite specification into the output's metadata (`mxfp4`). The book build turns that output into HTML that a locally
served Vega draws, with the PNG for when scripts are off (`figure_html`). Nothing loads from anywhere else.

Colours are Okabe and Ito's (2008), then two of Tol's (2021), told apart with any colour vision and on light and dark
ground.
"""

from __future__ import annotations

import base64
import html
import json
import math
import re
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import altair as alt

VL_VERSION = "6.4"
"""The Vega-Lite that draws the PNG and the page, the one this Altair major writes for."""
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F", "#999933", "#AA4499")
SEQUENTIAL = "viridis"
DIVERGING = "blueorange"
WIDTH = 640
"""Pixels, of the static picture; on a page a chart takes the width there is."""
HEIGHT = 300
CUT = "what lies far beyond the rest is cut short, and its size written beside it"
METADATA = "mxfp4"
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
_INK = {"light": ("#1f2328", "#57606a", "#d8dee4"), "dark": ("#e6edf3", "#9da7b1", "#3d444d")}


def theme_config(ground: str = "light") -> dict[str, Any]:
    """The Vega-Lite `config` for a light or dark ground: ink, muted ink and grid differ, the data's colours do not."""
    ink, muted, grid = _INK[ground]
    return {
        "background": "white" if ground == "light" else "transparent",
        "font": _FONT,
        "view": {"continuousWidth": WIDTH, "continuousHeight": HEIGHT, "stroke": None},
        "title": {
            "anchor": "start", "fontSize": 15, "fontWeight": 600, "color": ink, "subtitleColor": muted,
            "subtitleFontSize": 12, "offset": 12, "frame": "group",
        },
        "axis": {
            "labelColor": muted, "titleColor": ink, "labelFontSize": 11, "titleFontSize": 12, "titleFontWeight": 500,
            "gridColor": grid, "gridOpacity": 0.7, "domainColor": muted, "tickColor": muted, "titlePadding": 8,
            "labelOverlap": True,
        },
        "axisBand": {"grid": False},
        "legend": {
            "orient": "top", "direction": "horizontal", "labelColor": ink, "titleColor": muted, "labelFontSize": 12,
            "titleFontSize": 12, "titleFontWeight": 500, "symbolType": "circle", "labelLimit": 260, "columns": 4,
        },
        "header": {"labelColor": ink, "titleColor": muted, "labelFontSize": 12, "titleFontSize": 12},
        "range": {"category": list(PALETTE), "ramp": {"scheme": SEQUENTIAL}, "heatmap": {"scheme": SEQUENTIAL}},
        "line": {"strokeWidth": 2, "color": PALETTE[0]},
        "point": {"size": 45, "filled": True, "color": PALETTE[0]},
        "bar": {"color": PALETTE[0]},
        "area": {"color": PALETTE[0], "opacity": 0.7},
        "rule": {"color": muted},
        "text": {"color": ink, "fontSize": 11},
        "tick": {"color": PALETTE[0], "thickness": 2},
    }  # fmt: skip


def cut(values: Sequence[float], times: float = 6.0) -> float:
    """Where an axis may end so that what lies close together can be told apart: the largest of the |values| within
    `times` the size that three in four stay below; infinity where none lies beyond. Who cuts says what lies there."""
    sizes = sorted(abs(v) for v in values if math.isfinite(v))
    usual = times * sizes[int(0.75 * (len(sizes) - 1))] if sizes else 0.0
    within = [size for size in sizes if size <= usual]
    return within[-1] if within and within[-1] > 0 and len(within) < len(sizes) else math.inf


@alt.theme.register("mxfp4", enable=True)
def _theme() -> alt.theme.ThemeConfig:
    return {"config": theme_config()}


def show(chart: alt.TopLevelMixin, *, caption: str) -> None:
    """Display `chart`. `caption` is one sentence that says what to see; it is also the picture's alternative text.

    A single or layered chart without a width of its own takes the width of the page; facets and concatenations keep
    their sizes. Data travels inside the output: no more than 5000 rows.
    """
    from IPython.display import Markdown, display

    bundle, metadata = render(chart, caption)
    display(bundle, metadata=metadata, raw=True)
    display(Markdown(f"*{caption}*"), metadata={METADATA: {"caption": True}})


def say(text: str) -> None:
    """Display a paragraph that was computed: Markdown, for numbers that prose must not hold. An empty one shows nothing."""
    from IPython.display import Markdown, display

    if text:
        display(Markdown(text))


def render(chart: alt.TopLevelMixin, caption: str) -> tuple[dict[str, str], dict[str, Any]]:
    """The mime bundle and the metadata of one displayed chart. Raises ValueError without a caption."""
    import vl_convert

    if not caption.strip():
        raise ValueError("a chart needs a caption: one sentence that says what to see")
    spec = chart.to_dict()
    spec.pop("$schema", None)
    spec["description"] = caption
    single = not any(key in spec for key in ("facet", "hconcat", "vconcat", "concat", "repeat", "spec"))
    fluid = single and "width" not in spec and not _faceted(spec)
    still = {**spec, "width": WIDTH} if fluid else spec
    if fluid:
        spec = {**spec, "width": "container", "autosize": {"type": "fit-x", "contains": "padding"}}
    png = vl_convert.vegalite_to_png(json.dumps(still), vl_version=VL_VERSION, scale=1.5)
    bundle = {"image/png": base64.b64encode(recompressed(png)).decode("ascii"), "text/plain": caption}
    return bundle, {METADATA: {"vegalite": spec, "caption": caption}}


def recompressed(png: bytes) -> bytes:
    """The same picture with its pixels compressed hard: a quarter of the size, and committed notebooks are pictures."""
    head, pixels, tail, at = [png[:8]], [], [], 8
    while at < len(png):
        (length,) = struct.unpack(">I", png[at : at + 4])
        chunk, kind = png[at : at + 12 + length], png[at + 4 : at + 8]
        if kind == b"IDAT":
            pixels.append(chunk[8:-4])
        else:
            (tail if pixels else head).append(chunk)
        at += 12 + length
    data = b"IDAT" + zlib.compress(zlib.decompress(b"".join(pixels)), 9)
    packed = struct.pack(">I", len(data) - 4) + data + struct.pack(">I", zlib.crc32(data))
    return b"".join([*head, packed, *tail])


def _faceted(spec: Mapping[str, Any]) -> bool:
    """Whether the encoding makes small multiples (row, column, facet), which have no one width."""
    encodings = [spec.get("encoding", {}), *(layer.get("encoding", {}) for layer in spec.get("layer", []))]
    return any(channel in encoding for encoding in encodings for channel in ("row", "column", "facet"))


def figure_html(spec: Mapping[str, Any], caption: str, still: str) -> str:
    """HTML of one chart for a page with mxfp4-charts.js: the specification, and the picture at the address `still` until
    it is drawn."""
    # "</script>" inside the data would end the element; "<" as an escape is the same JSON.
    data = json.dumps(spec, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    text = html.escape(caption)
    return (
        f'<figure class="mx-figure" aria-label="{text}">'
        f'<script type="application/json" class="mx-spec">{data}</script>'
        f'<div class="mx-vega"><img class="mx-still" alt="{text}" src="{still}"></div>'
        f"<figcaption>{text}</figcaption></figure>"
    )


def table(
    frame,
    *,
    caption: str,
    formats: Mapping[str, str | Callable[[Any], str]] | None = None,
    columns: Mapping[str, str] | Sequence[str] | None = None,
    missing: str = "–",
) -> None:
    """Display a pandas frame as a table, without its index.

    formats: for a column either a format specification (".2f", ",d") or a function to text. columns: which, in what
    order, and as a mapping with what headings. missing: what stands for None and NaN.
    """
    from IPython.display import display

    markup = table_html(frame, caption=caption, formats=formats, columns=columns, missing=missing)
    display({"text/html": markup, "text/plain": f"{caption}\n{frame.to_string(index=False)}"}, raw=True)


def table_html(frame, *, caption: str, formats=None, columns=None, missing: str = "–") -> str:
    """The HTML of `table`: numbers to the right, text to the left, escaped. Raises ValueError for unknown columns."""
    formats = dict(formats or {})
    headings = dict(columns) if isinstance(columns, Mapping) else {c: str(c) for c in (columns or frame.columns)}
    unknown = [c for c in (*headings, *formats) if c not in frame.columns]
    if unknown:
        raise ValueError(f"table has no column {unknown[0]!r}; known: {', '.join(map(str, frame.columns))}")
    numeric = {c: frame[c].dtype.kind in "iuf" for c in headings}
    head = "".join(
        f'<th scope="col"{_align(numeric[c])}>{html.escape(str(title))}</th>' for c, title in headings.items()
    )
    rows = [
        "".join(f"<td{_align(numeric[c])}>{_cell(row[c], formats.get(c), missing)}</td>" for c in headings)
        for row in frame.to_dict("records")
    ]
    body = "".join(f"<tr>{cells}</tr>" for cells in rows)
    text = html.escape(caption)
    return (
        f'<figure class="mx-table"><figcaption>{text}</figcaption><div role="region" tabindex="0" aria-label="{text}">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div></figure>"
    )


def _align(numeric: bool) -> str:
    return ' class="mx-number"' if numeric else ""


def _cell(value: Any, how: str | Callable[[Any], str] | None, missing: str) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return html.escape(missing)
    if callable(how):
        text = how(value)
    elif how is not None:
        text = format(value, how)
    else:
        text = f"{value:.4g}" if isinstance(value, float) else str(value)
    text = html.escape(re.sub(r"(^|\[| )-(?=[\d∞])", "\\1\u2212", text))  # a minus, not the dash of 8-9 or of a name
    # A name of an instruction is one word, wider than a column: it may break where its parts meet.
    return re.sub(r"\S{20,}", lambda word: re.sub(r"(::|[._])(?=\w)", r"\1<wbr>", word[0]), text)
