"""`mxfp4 bench families`: each family of transformers models is converted, trained for two steps, saved and reloaded.

No times are taken. The models are tiny ones with random weights (`mxfp4/adapters/families.py`), so the shares of their
weights are those of the tiny models. Needs transformers; nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from functools import partial

from mxfp4.bench.results import attempt


def rows(chosen: str = "mxfp4+h16") -> Iterator[dict]:
    """A row a family: the fields of `adapters.families.Row`, the version of transformers, and `correct`, whether the
    model trained, came back with the same logits and gave them twice."""
    import transformers

    from mxfp4.adapters.families import FAMILIES, row

    transformers.utils.logging.disable_progress_bar()

    def measure(name: str) -> dict:
        found = row(name, chosen)
        return {**asdict(found), "transformers": transformers.__version__, "correct": found.works}

    return (attempt(name, f"mxfp4, {chosen}", partial(measure, name)) for name in FAMILIES)
