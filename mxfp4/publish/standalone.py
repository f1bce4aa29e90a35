"""A notebook that was run with other parameters than the book's, as one HTML file that opens offline.

Sphinx sets it like a page of the book (mathematics, citations, cross-references). Its article, the book's style, Vega
and MathJax then go into one file, under a box that says which parameters differ. Links to other pages lead to the site
where that has an address, and are plain text otherwise.
"""

from __future__ import annotations

import base64
import html
import json
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mxfp4.errors import UserError
from mxfp4.publish.addresses import Addresses, find_addresses
from mxfp4.publish.parameters import read_parameters
from mxfp4.publish.site import as_word, mathjax_file, parameters_cell, present, run_sphinx, vega_script

_STYLE = """
body { margin: 2rem auto; padding: 0 1rem; max-width: 48rem; font-family: Charter, Cambria, Georgia, serif; color: #1f2328; }
h1, h2, h3 { font-family: system-ui, sans-serif; } a { color: #00558a; } .headerlink { display: none; }
pre { overflow-x: auto; padding: 0.6em; background: #f6f8fa; font-size: 0.85em; } img { max-width: 100%; }
details[open] > summary .collapsed, details:not([open]) > summary .expanded { display: none; }
summary { cursor: pointer; } summary p { display: inline; margin: 0; } .eqno { float: right; }
.admonition, .mx-differs { border: 1px solid #d8dee4; border-left: 4px solid #00558a; padding: 0.2em 1em; margin: 1em 0; }
details.hide { border: 0; padding: 0; } .admonition-title { font-weight: 600; } .mx-differs { font-family: system-ui, sans-serif; }
table { border-collapse: collapse; } th, td { text-align: left; padding: 0.2em 0.9em 0.2em 0; }
"""


def write_page(notebook: Path, target: Path, book: Path, addresses: Addresses | None = None) -> None:
    """Write the executed `notebook` as the page `target`, in the style of `book` (the folder with _config.yml).

    addresses: default those of the environment. Raises UserError where Sphinx cannot read the notebook.
    """
    node = json.loads(notebook.read_text(encoding="utf-8"))
    name = Path(node["metadata"]["mxfp4"]["source"]).stem
    changed = differing(node)
    addresses = addresses or find_addresses()
    present(node)
    if any("{cite" in "".join(c["source"]) for c in node["cells"] if c["cell_type"] == "markdown"):
        text = "## References\n\n```{bibliography}\n:filter: docname in docnames\n```\n"
        node["cells"].append({"cell_type": "markdown", "id": "references", "metadata": {}, "source": text})
    for cell in node["cells"]:
        if cell["cell_type"] == "markdown":
            cell["source"] = _relink("".join(cell["source"]), addresses)
    with tempfile.TemporaryDirectory(prefix="mxfp4-") as temporary:
        source, work = Path(temporary, "src"), Path(temporary, "work")
        source.mkdir()
        for path in (*book.glob("*.yml"), *book.glob("*.bib")):
            shutil.copy(path, source)
        shutil.copytree(book / "_static", source / "_static")
        (source / "_toc.yml").write_text(f"format: jb-book\nroot: {name}\n")
        (source / f"{name}.ipynb").write_text(json.dumps(node), encoding="utf-8")
        # Not strict: labels of other pages are not there.
        run_sphinx(source, work, Path(temporary, "log.txt"), strict=False)
        page = _one_file(work / "_build" / "html", name, _box(name, changed), book)
    target.write_text(page, encoding="utf-8")


def differing(node: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """{parameter: (value of this run, value on the book's page)} of an executed notebook, where they differ."""
    about = node["metadata"]["mxfp4"]
    known = read_parameters(parameters_cell(node), about["source"])
    values = {name: (about["parameters"].get(name, p.default), p.default) for name, p in known.items()}
    return {n: (v, d) for n, (v, d) in values.items() if n != "scale" and as_word(v) != as_word(d)}


def _relink(text: str, addresses: Addresses) -> str:
    def link(match: re.Match[str]) -> str:
        if addresses.site is None:
            return match["text"]
        return f"[{match['text']}]({addresses.page(match['page'])}{match['anchor']})"

    return re.sub(r"\[(?P<text>[^]]+)\]\((?P<page>[\w/-]+)\.md(?P<anchor>(?:#[\w-]*)?)\)", link, text)


def _box(name: str, changed: Mapping[str, tuple[Any, Any]]) -> str:
    rows = "".join(
        f"<tr><th scope='row'><code>{n}</code></th><td>{html.escape(as_word(here))}</td>"
        f"<td>{html.escape(as_word(there))}</td></tr>"
        for n, (here, there) in changed.items()
    )
    if not rows:
        return f'<div class="mx-differs"><p>Run of another file than the book\'s page {html.escape(name)}.</p></div>'
    head = "".join(f'<th scope="col">{title}</th>' for title in ("Parameter", "Here", "In the book"))
    return (
        f'<div class="mx-differs"><p>Run with other parameters than the book\'s page {html.escape(name)}. Its text was '
        f"written for the book's values.</p><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _one_file(site: Path, name: str, box: str, book: Path) -> str:
    """The article of a page that Sphinx wrote, with all that it needs inside."""
    page = (site / f"{name}.html").read_text(encoding="utf-8")
    found = re.search(r'<article class="bd-article">(.*?)</article>', page, re.DOTALL)
    title = re.search(r"<title>(.*?)</title>", page, re.DOTALL)
    if found is None or title is None:
        raise UserError(f"Sphinx wrote a page without an article for {name}")

    def embedded(match: re.Match[str]) -> str:
        path = site / match[1]
        kind = "svg+xml" if path.suffix == ".svg" else path.suffix[1:]
        return f'src="data:image/{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"'

    article = re.sub(r'src="(_images/[^"]+)"', embedded, found[1])
    article = re.sub(r' href="(?!#|https?:)[^"]*"', "", article)
    styles = [_STYLE, *((site / "_static" / n).read_text(encoding="utf-8") for n in ("pygments.css", "mxfp4.css"))]
    scripts = []
    if 'class="mx-figure"' in article:
        scripts += [vega_script(), (book / "_static" / "mxfp4-charts.js").read_text(encoding="utf-8")]
    if 'class="math' in article:
        config = re.search(r"<script>(window\.MathJax = .*?)</script>", page, re.DOTALL)
        scripts += [config[1] if config else "", mathjax_file().read_text(encoding="utf-8")]
    code = "".join("<script>" + script.replace("</script", "<\\/script") + "</script>\n" for script in scripts)
    return (
        '<!DOCTYPE html>\n<html lang="en" data-theme="light"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title[1].strip()}</title><style>{''.join(styles)}</style></head>\n"
        f'<body>{box}<main class="bd-article">{article}</main>\n{code}</body></html>\n'
    )
