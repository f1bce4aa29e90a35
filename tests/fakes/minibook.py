"""A book of two pages, one of them a notebook with charts, a table and mathematics, in a folder of its own."""

from __future__ import annotations

import shutil
from pathlib import Path

BOOK = Path(__file__).resolve().parents[2] / "book"
HEADER = "---\njupytext:\n  text_representation: {extension: .md, format_name: myst}\n"
HEADER += "kernelspec: {display_name: Python 3, language: python, name: python3}\n---\n\n"
NOTEBOOK = (
    HEADER
    + r"""# Charts

Mathematics, $y = x W^\top$, and

$$
\sum_{i=1}^{n} i = \frac{n(n+1)}{2} .
$$ (eq-sum)

By {eq}`eq-sum`, and see [the other page](other.md) {cite}`cim2026mxfp4`.

```{code-cell} ipython3
:tags: [parameters]

points: int = 12  # marks in the first chart
scale: str = "cpu"  # scale
```

```{code-cell} ipython3
import altair as alt
import pandas as pd

from mxfp4.pages.charts import show, table

frame = pd.DataFrame({"x": range(points), "y": [i * i for i in range(points)], "kind": ["a", "b"] * (points // 2)})
dots = alt.Chart(frame, title="Squares").mark_point().encode(x="x:Q", y="y:Q", color="kind:N", tooltip=["x", "y"])
show(dots, caption="Squares, </script> & all.")
```

```{code-cell} ipython3
bars = alt.Chart(frame).mark_bar().encode(x="x:O", y="y:Q").properties(width=200).facet("kind:N", columns=2)
show(bars, caption="Two small multiples.")
table(frame.head(3), caption="The first rows.", formats={"y": ".1f"})
```
"""
)


def make(root: Path, **pages: str) -> Path:
    """A checkout in `root` with book/: the project's own configuration and style, these pages. Returns book/."""
    book = root / "book"
    book.mkdir(parents=True)
    shutil.copytree(BOOK / "_static", book / "_static")
    for name in ("_config.yml", "references.bib"):
        shutil.copy(BOOK / name, book / name)
    (book / "_toc.yml").write_text("format: jb-book\nroot: charts\nchapters:\n  - file: other\n")
    pages = {"charts": NOTEBOOK, "other": "# Other\n\n```{bibliography}\n```\n", **pages}
    for name, text in pages.items():
        (book / f"{name}.md").write_text(text)
    (root / "pyproject.toml").write_text("")
    return book
