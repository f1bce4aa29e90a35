"""One chart, two faces: a PNG wherever there are no scripts, and the specification for the page."""

from __future__ import annotations

import base64
import json
import math
import struct
import zlib

import altair as alt
import pandas as pd
import pytest

from mxfp4.pages import charts
from mxfp4.pages.charts import METADATA, PALETTE, figure_html, recompressed, render, table_html, theme_config

FRAME = pd.DataFrame({"x": [1, 2, 3], "y": [2.0, 1.0, 4.0], "kind": ["a", "b", "a"]})
POINTS = alt.Chart(FRAME, title="T").mark_point().encode(x="x:Q", y="y:Q", color="kind:N")


def test_a_chart_has_a_picture_and_takes_the_width_of_its_page():
    bundle, metadata = render(POINTS, "What to see.")
    png = base64.b64decode(bundle["image/png"])
    assert png.startswith(b"\x89PNG") and struct.unpack(">I", png[16:20])[0] > charts.WIDTH
    assert bundle["text/plain"] == "What to see." and set(bundle) == {"image/png", "text/plain"}
    spec = metadata[METADATA]["vegalite"]
    assert spec["width"] == "container" and spec["description"] == "What to see."
    assert spec["config"]["range"]["category"] == list(PALETTE)
    assert "http" not in json.dumps(spec)


@pytest.mark.parametrize(
    "chart",
    [
        POINTS.properties(width=100),
        POINTS.facet("kind:N"),
        POINTS.encode(column="kind:N"),
        POINTS | POINTS,
    ],
)
def test_small_multiples_and_given_widths_stay(chart):
    _, metadata = render(chart, "c")
    assert metadata[METADATA]["vegalite"].get("width") != "container"


def test_a_caption_is_needed():
    with pytest.raises(ValueError, match="needs a caption"):
        render(POINTS, " ")


def test_recompressed_picture_has_the_same_pixels():
    import vl_convert

    png = vl_convert.vegalite_to_png(POINTS.to_json(), vl_version=charts.VL_VERSION)
    small = recompressed(png)
    assert len(small) < len(png)
    assert _pixels(small) == _pixels(png) and small[:33] == png[:33] and small[-12:] == png[-12:]


def _pixels(png: bytes) -> bytes:
    at, data = 8, b""
    while at < len(png):
        (length,) = struct.unpack(">I", png[at : at + 4])
        kind, body = png[at + 4 : at + 8], png[at + 8 : at + 8 + length]
        assert struct.unpack(">I", png[at + 8 + length : at + 12 + length])[0] == zlib.crc32(kind + body)
        data += body if kind == b"IDAT" else b""
        at += 12 + length
    return zlib.decompress(data)


def test_figure_survives_hostile_text():
    markup = figure_html({"t": "</script><b>"}, '<i> & "q"', "AA")
    assert markup.count("</script>") == 1 and "<b>" not in markup and "<i>" not in markup
    assert 'alt="&lt;i&gt; &amp; &quot;q&quot;"' in markup


def test_both_grounds_use_the_same_colours_for_data():
    light, dark = theme_config("light"), theme_config("dark")
    assert light["range"] == dark["range"] and light["axis"]["labelColor"] != dark["axis"]["labelColor"]


@pytest.mark.parametrize("ground", ["light", "dark"])
def test_text_and_data_stand_out_from_both_grounds(ground):
    """WCAG: 4.5 : 1 for text, and about 2 : 1 at least for the lightest data colour."""
    back = {"light": "#ffffff", "dark": "#121212"}[ground]
    axis = theme_config(ground)["axis"]
    assert min(_contrast(axis[c], back) for c in ("labelColor", "titleColor")) > 4.5
    assert min(_contrast(c, back) for c in PALETTE) > 2


def _contrast(a: str, b: str) -> float:
    def luminance(colour):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_page_script_uses_the_theme_of_the_package():
    from mxfp4.directories import project_dir

    script = (project_dir() / "book" / "_static" / "mxfp4-charts.js").read_text()
    for ground in ("light", "dark"):
        ink, muted, grid = charts._INK[ground]
        assert f'{ground}: {{ ink: "{ink}", muted: "{muted}", grid: "{grid}" }}' in script


@pytest.mark.parametrize(
    ("text", "shown"),
    [("-0.2 [-4.2, +4.0]", "\u22120.2 [\u22124.2, +4.0]"), ("-0.1 [-\u221e, -0.1]", "\u22120.1 [\u2212\u221e, \u22120.1]"),
     ("8-9 %", "8-9 %"), ("mxfp4-fprop", "mxfp4-fprop"), ("E4M3 - 2", "E4M3 - 2")],
)  # fmt: skip
def test_a_minus_is_a_minus_at_both_ends_of_an_interval(text, shown):
    assert f"<td>{shown}</td>" in table_html(pd.DataFrame({"a": [text]}), caption="c")


def test_table():
    frame = pd.DataFrame({"arm": ["<a>", None], "loss": [-1.25, float("nan")], "n": [1000, 2]})
    markup = table_html(
        frame, caption="C", formats={"loss": ".1f", "n": ",d"}, columns={"arm": "Arm", "n": "N", "loss": "L"}
    )
    assert '<th scope="col">Arm</th><th scope="col" class="mx-number">N</th>' in markup
    assert '<td>&lt;a&gt;</td><td class="mx-number">1,000</td><td class="mx-number">\u22121.2</td>' in markup
    assert '<td>–</td><td class="mx-number">2</td><td class="mx-number">–</td>' in markup
    code = pd.DataFrame({"code": ["4 tcgen05.mma.kind::mxf4.block_scale", "mxfp4-fprop_dgrad <b>"]})
    markup = table_html(code, caption="C")
    assert "<td>4 tcgen05.<wbr>mma.<wbr>kind::<wbr>mxf4.<wbr>block_<wbr>scale</td>" in markup
    assert "<td>mxfp4-fprop_dgrad &lt;b&gt;</td>" in markup
    with pytest.raises(ValueError, match="no column 'los'; known: arm, loss, n"):
        table_html(frame, caption="C", formats={"los": ".1f"})


def test_an_axis_is_cut_only_where_something_lies_far_beyond_the_rest():
    assert charts.cut([0.01, 0.02, 0.03, 0.04]) == math.inf
    assert charts.cut([0.01, -0.05, 0.03, 0.04, 1.7]) == 0.05
    assert charts.cut([0.0, 0.0, 0.0, 1.0]) == math.inf and charts.cut([]) == math.inf
    assert charts.cut([0.01, 0.02, math.inf, 0.03, 0.02, 1.0]) == 0.03
