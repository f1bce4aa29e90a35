"""Cleans an executed notebook for git: the same run twice gives the same file, and no machine shows in it.

Removed: timings and other papermill metadata, kernel and Python versions, paths of this machine, memory addresses.
Cell ids become <name>-<number>, execution counts the number of the code cell.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from mxfp4.directories import project_dir, runs_dir

_IPYKERNEL_FILE = re.compile(r"\S*ipykernel_\d+\S*?\.py")
_ADDRESS = re.compile(r"\b0x[0-9a-f]{8,16}\b")
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_TEXT = ("text/plain", "text/html", "text/markdown", "text/latex")


def tidy(node, name: str, about: dict[str, Any]) -> None:
    """Clean notebook `node` in place; `about` becomes its metadata `mxfp4`."""
    node.metadata = type(node.metadata)(
        kernelspec={"display_name": "Python 3", "language": "python", "name": "python3"},
        language_info={"name": "python", "file_extension": ".py", "pygments_lexer": "ipython3"},
        mxfp4=about,
    )
    code_cells = 0
    for number, cell in enumerate(node.cells, start=1):
        cell.id = f"{name[:60]}-{number:02d}"
        tags = cell.metadata.get("tags", [])
        cell.metadata = type(cell.metadata)({"tags": list(tags)} if tags else {})
        if cell.cell_type != "code":
            continue
        code_cells += 1
        cell.execution_count = code_cells if cell.execution_count is not None else None
        cell.outputs = _merge_streams(cell.outputs)
        for output in cell.outputs:
            _tidy_output(output, cell.execution_count)


def _merge_streams(outputs: list) -> list:
    """Neighbouring pieces of one stream as one: how they were cut is a matter of timing."""
    merged: list = []
    for output in outputs:
        last = merged[-1] if merged else None
        if output.output_type == "stream" and last is not None and last.get("name") == output.name:
            last.text += output.text
        else:
            merged.append(output)
    return merged


def _tidy_output(output, count: int | None) -> None:
    if output.output_type == "stream":
        # A progress line overwrites itself with \r; only its last state is kept.
        lines = [line.rsplit("\r", 1)[-1] for line in output.text.replace("\r\n", "\n").split("\n")]
        output.text = without_paths("\n".join(lines))
    elif output.output_type == "error":
        output.evalue = without_paths(output.evalue)
        output.traceback = [without_paths(_ANSI.sub("", line)) for line in output.traceback]
    else:
        if output.output_type == "execute_result":
            output.execution_count = count
        for mime in _TEXT:
            if mime in output.data:
                output.data[mime] = without_paths(output.data[mime])
        if "text/plain" in output.data:
            output.data["text/plain"] = _ADDRESS.sub("0x...", output.data["text/plain"])


def without_paths(text: str) -> str:
    """`text` with this machine's folders replaced by what they are."""
    text = _IPYKERNEL_FILE.sub("<cell>", text)
    known = {
        str(runs_dir()): "runs",
        str(project_dir()): ".",
        str(Path(__file__).resolve().parents[2]): ".",
        sys.prefix: "<environment>",
        sys.base_prefix: "<python>",
        os.path.expanduser("~"): "~",  # stays "~" for a user without a home directory
        tempfile.gettempdir(): "<tmp>",
    }
    for folder in sorted(known, key=len, reverse=True):
        if len(folder) > 1:
            text = re.sub(re.escape(folder) + r"(?=[/\\\s'\"),:;]|$)", known[folder], text)
    return text
