"""What a page offers for download: its executed notebook, and the data behind its charts as CSV.

The notebook is the file of runs/notebooks, byte for byte. The data is what the charts' Vega-Lite specifications carry:
`figure-03.csv` belongs to the page's third figure, and `figures.txt` in the archive says what each figure shows.
"""

from __future__ import annotations

import csv
import io
import json
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any

from mxfp4.pages.charts import METADATA

FOLDER = "_downloads"
_EPOCH = (1980, 1, 1, 0, 0, 0)
"""The earliest time that a ZIP file can hold, so that the same data gives the same bytes."""


def downloads(page: str, notebook: bytes) -> dict[str, bytes]:
    """{path in the site: content} of what the page `page` offers, given the bytes of its executed notebook."""
    name = PurePosixPath(page).name
    files = {f"{FOLDER}/{name}.ipynb": notebook}
    archive = data_archive(json.loads(notebook))
    if archive:
        files[f"{FOLDER}/{name}-data.zip"] = archive
    return files


def data_archive(node: Mapping[str, Any]) -> bytes | None:
    """A ZIP file with the data of every chart of a notebook (nbformat JSON); None where no chart carries data."""
    files: dict[str, str] = {}
    captions = []
    for number, (spec, caption) in enumerate(_charts(node), start=1):
        tables = chart_tables(spec)
        names = [f"figure-{number:02d}{f'-{i}' if len(tables) > 1 else ''}.csv" for i in range(1, len(tables) + 1)]
        files.update(zip(names, tables, strict=True))
        captions.append(f"{', '.join(names) or f'figure {number} (no data)'}: {caption}\n")
    if not files:
        return None
    files["figures.txt"] = "".join(captions)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name in sorted(files):
            info = zipfile.ZipInfo(name, _EPOCH)
            info.compress_type = zipfile.ZIP_DEFLATED
            info.external_attr = 0o644 << 16
            archive.writestr(info, files[name])
    return buffer.getvalue()


def chart_tables(spec: Mapping[str, Any]) -> list[str]:
    """The data sets that a Vega-Lite specification draws, as CSV, in the order in which it names them."""
    named = spec.get("datasets", {})
    sources: list[Any] = []
    for data in _data(spec):
        rows = named.get(data["name"]) if "name" in data else data.get("values")
        if isinstance(rows, list) and rows and rows not in sources:
            sources.append(rows)
    return [_csv(rows) for rows in sources]


def _charts(node: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, Any], str]]:
    for cell in node["cells"]:
        for output in cell.get("outputs", []):
            ours = output.get("metadata", {}).get(METADATA, {})
            if "vegalite" in ours:
                yield ours["vegalite"], ours["caption"]


def _data(node: Any) -> Iterator[Mapping[str, Any]]:
    """Every `data` of a specification, those of its layers, facets and lookups included."""
    if isinstance(node, list):
        for item in node:
            yield from _data(item)
    elif isinstance(node, Mapping):
        for key, value in node.items():
            if key == "data" and isinstance(value, Mapping):
                yield value
            elif key != "datasets":
                yield from _data(value)


def _csv(rows: list[Any]) -> str:
    """Rows, mappings or plain values, as CSV; the columns are all that occur, in the order of their first row."""
    tables = [row if isinstance(row, Mapping) else {"value": row} for row in rows]
    columns = list(dict.fromkeys(name for row in tables for name in row))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    for row in tables:
        writer.writerow([_value(row.get(name)) for name in columns])
    return text.getvalue()


def _value(value: Any) -> Any:
    """A CSV cell: empty for null, JSON for what is no plain value."""
    return json.dumps(value) if isinstance(value, (list, dict, bool)) else value
