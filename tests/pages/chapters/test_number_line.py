"""The number line in the page, which the browser computes, against mxfp4.quantize."""

from __future__ import annotations

import json
import re

import pytest
import torch
import vl_convert

import mxfp4
from mxfp4.pages.chapters import format as fmt
from mxfp4.pages.charts import VL_VERSION


def drawn(**params) -> dict[float, float]:
    """{stored magnitude: its probability} of the circles that Vega draws."""
    spec = fmt.number_line(title="").to_dict()
    for param in spec["params"]:
        param.update({"value": params[param["name"]]} if param["name"] in params else {})
    svg = vl_convert.vegalite_to_svg(json.dumps(spec), vl_version=VL_VERSION)
    found = re.findall(r'aria-label="x: ([\d.]+); probability: ([\d.]+)"', svg)
    return {float(x): float(p) for x, p in found}


@pytest.mark.parametrize(
    ("rule", "maximum", "value"),
    [
        ("even", 4.0, 2.5),  # a tie
        ("even", 6.75, 6.75),  # clipped
        ("floor", 7.5, 7.25),  # clipped by this rule alone
        ("even", 7.5, 7.25),
        ("ceil", 4.0, 3.4),
        ("rceil", 7.5, 0.45),
    ],
)
def test_the_page_rounds_as_the_package(rule, maximum, value):
    x = torch.zeros(1, 32)
    x[0, :2] = torch.tensor([maximum, value])
    stored = float(mxfp4.quantize(x, scale_rule=rule).dequantize()[0, 1])
    assert drawn(rule=rule, block_maximum=maximum, value=value) == {stored: 1.0}


def test_stochastic_rounding_shows_both_neighbours_and_keeps_the_mean():
    found = drawn(rule="even", block_maximum=6.0, value=3.25, rounding="stochastic")
    assert found == {3.0: 0.75, 4.0: 0.25}
