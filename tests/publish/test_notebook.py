"""The notebook runner: checked parameters, atomic results, failures in one line, the same run skipped."""

from __future__ import annotations

import json
import re
from pathlib import Path

import nbformat
import pytest

from mxfp4.errors import UserError
from mxfp4.publish import notebook
from mxfp4.publish.clean_notebook import tidy, without_paths
from mxfp4.publish.notebook import find_source, read_source, run_key, run_notebook
from mxfp4.publish.parameters import bind, join_words, read_parameters, split_pair

HEADER = "---\njupytext:\n  text_representation: {extension: .md, format_name: myst}\n---\n\n# Title\n\n"
PARAMETERS = """```{code-cell} ipython3
:tags: [parameters]

seed: int = 3  # seed
rate: float = 0.5  # a rate
word: str = "bf16"  # a word
fast: bool = False  # whether to hurry
seeds: tuple[int, ...] = (1, 2)  # some seeds
scale: str = "cpu"  # scale
```

"""


def cell(code: str) -> str:
    return f"```{{code-cell}} ipython3\n{code}\n```\n\n"


@pytest.fixture
def project(tmp_path, monkeypatch):
    """An empty checkout with its own runs/, as the working directory."""
    (tmp_path / "book").mkdir()
    (tmp_path / "book" / "_toc.yml").write_text("format: jb-book\nroot: a\n")
    monkeypatch.setenv("MXFP4_RUNS", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(project: Path, *cells: str, name: str = "a", parameters: str = PARAMETERS) -> Path:
    path = project / "book" / f"{name}.md"
    path.write_text(HEADER + parameters + "".join(map(cell, cells)))
    return path


SHOW = "print(seed, rate, word, fast, seeds, scale)\nimport sys, os; print(sys.executable); print(os.getcwd())"


def test_runs_skips_and_runs_again_when_something_changed(project, monkeypatch):
    path = write(project, SHOW)
    monkeypatch.chdir(project / "book")  # any folder below the checkout will do
    given = {"seed": "7", "fast": "yes", "seeds": "4, 5", "word": "it's"}
    first = run_notebook(path, given)
    assert first.path.parent == project / "runs" / "notebooks" / "cpu" and not first.skipped
    assert first.path.name.startswith("a-")  # other parameters leave the book's page alone
    text = first.path.read_text()
    (out,) = [o for c in json.loads(text)["cells"] for o in c.get("outputs", [])]
    lines = "".join(out["text"]).splitlines()
    assert lines[0] == "7 0.5 it's True (4, 5) cpu"
    assert lines[1].startswith("<environment>") or "python" in lines[1]  # this interpreter, its folder named
    assert lines[2] == "."
    assert run_notebook(path, given).skipped
    assert first.path.read_text() == text

    source, values = read_source(path), bind(read_source(path).parameters, given, "a")
    key = run_key(source, values, "cpu")
    assert key == json.loads(text)["metadata"]["mxfp4"]["key"]
    record = project / "runs" / "records" / "cpu" / "x-s0-1" / "record.json"
    record.parent.mkdir(parents=True)
    record.write_text("{}")
    assert run_key(source, values, "cpu") != key
    record.unlink()
    assert run_key(source, values, "cpu") == key
    monkeypatch.setattr(notebook, "code_fingerprint", lambda code: "another")
    assert run_key(source, values, "cpu") != key
    monkeypatch.undo()
    assert run_key(source, {**values, "seed": 8}, "cpu") != key


def test_executed_notebook_is_clean(project):
    path = write(
        project, "import warnings; warnings.warn('look')\nimport pathlib; print(pathlib.Path.cwd())", "object()"
    )
    done = run_notebook(path)
    text = done.path.read_text()
    node = json.loads(text)
    nbformat.validate(nbformat.reads(text, as_version=4))
    assert [c["id"] for c in node["cells"]] == [f"a-{i:02d}" for i in range(1, len(node["cells"]) + 1)]
    for trace in (str(project), str(Path.home()), "/tmp/", "ipykernel_", "start_time", "duration", "execution"):
        assert trace not in text.replace("execution_count", ""), trace
    assert not re.search(r"0x[0-9a-f]{6}", text)
    assert set(node["metadata"]) == {"kernelspec", "language_info", "mxfp4"}
    # Defaults are not injected, so that a page shows one parameters cell.
    assert sum("parameters" in str(c["metadata"].get("tags")) for c in node["cells"]) == 1
    again = run_notebook(path, force=True)
    assert again.path.read_text() == text


def test_what_the_package_refuses_in_a_cell_is_told_without_the_name_of_its_class(project):
    path = write(project, "from mxfp4.errors import UserError\nraise UserError('no such thing')")
    with pytest.raises(UserError, match=r"^a: code cell 2 was refused: no such thing \(half-run notebook: "):
        run_notebook(path)


def test_failing_cell_leaves_only_the_failed_notebook(project):
    good = run_notebook(write(project, "print(1)"))
    before = good.path.read_text()
    path = write(project, "print('reached')", "raise KeyError('a\\nb')", "print('never')")
    with pytest.raises(UserError) as caught:
        run_notebook(path)
    assert str(caught.value).startswith("a: code cell 3 raised KeyError: ") and "\n" not in str(caught.value)
    assert "runs/failed/cpu/a.ipynb" in str(caught.value)
    assert good.path.read_text() == before
    failed = (project / "runs" / "failed" / "cpu" / "a.ipynb").read_text()
    assert "reached" in failed and str(project) not in failed


def test_dying_kernel_is_one_line(project):
    path = write(project, "import os; os._exit(9)")
    with pytest.raises(UserError, match=r"^a: the kernel died \([^\n]*$"):
        run_notebook(path)
    assert not (project / "runs" / "notebooks").exists()


@pytest.mark.parametrize(
    "end",
    ["import sys; sys.exit(0)", "raise SystemExit", "sys = __import__('sys'); sys.exit()", "raise SystemExit('')"],
)
@pytest.mark.parametrize("rest", [["print('never')"], []])
def test_a_page_that_ends_early_is_failed_and_leaves_the_good_one(project, end, rest):
    good = run_notebook(write(project, "print(1)"))
    before = good.path.read_text()
    path = write(project, "print('reached')", end, *rest)
    with pytest.raises(
        UserError, match=rf"^a: code cell 3 of {3 + len(rest)} ended the page with SystemExit"
    ) as caught:
        run_notebook(path)
    assert "\n" not in str(caught.value) and "runs/failed/cpu/a.ipynb" in str(caught.value)
    assert good.path.read_text() == before


@pytest.mark.parametrize("end", ["import os; os._exit(0)", "import os; os.kill(os.getpid(), 9)"])
def test_a_page_whose_kernel_goes_early_is_failed(project, end):
    with pytest.raises(UserError) as caught:
        run_notebook(write(project, end, "print('never')"))
    assert "\n" not in str(caught.value) and not (project / "runs" / "notebooks").exists()


def test_an_empty_cell_is_no_early_end(project):
    assert not run_notebook(write(project, "# only a comment", "", "print(2)")).skipped


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"sede": 1}, "a has no parameter 'sede': did you mean seed? known: seed, rate, word, fast, seeds, scale"),
        ({"seed": "1.5"}, "parameter seed='1.5': allowed is an int, such as 3 (seed)"),
        ({"seed": True}, "parameter seed=True: allowed is an int"),
        ({"rate": "fast"}, "parameter rate='fast': allowed is a finite float"),
        ({"rate": "nan"}, "parameter rate='nan'"),
        ({"fast": "maybe"}, "parameter fast='maybe': allowed is true or false"),
        ({"word": 3}, "parameter word=3: allowed is a str"),
        ({"seeds": "1,x"}, "parameter seeds='1,x'"),
        ({"scale": "../../etc"}, "scale '../../etc' is not known; allowed: cpu, gpu, mi355x"),
    ],
)
def test_bad_parameters_are_refused_before_a_kernel_starts(project, given, message):
    if "seeds" in given:
        message = "parameter seeds='x': allowed is tuple[int, ...], as JSON such as [1, 2] or its items"
    path = write(project, "1")
    with pytest.raises(UserError) as caught:
        run_notebook(path, given)
    assert str(caught.value).startswith(message)
    assert not (project / "runs").exists()


def test_scale_and_parameter_scale_must_agree(project):
    with pytest.raises(UserError, match="scale 'gpu' and parameter scale='cpu' differ"):
        run_notebook(write(project, "1"), {"scale": "cpu"}, scale="gpu")


def test_result_cannot_leave_runs(project):
    path = write(project, "print(1)")
    (project / "runs" / "notebooks").mkdir(parents=True)
    (project / "elsewhere").mkdir()
    (project / "runs" / "notebooks" / "cpu").symlink_to(project / "elsewhere")
    with pytest.raises(UserError, match="leads outside"):
        run_notebook(path)
    assert list((project / "elsewhere").iterdir()) == []


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x = 1", "allowed is `name: type = default  # help`"),
        ("x: int", "allowed is"),
        ("x: dict = {}  # d", "has type dict; allowed: int, float, str, bool, list\\[int\\]"),
        ("x: int = 1", "parameter x has no help comment"),
        ('x: int = "1"  # i', "int has a str as its default"),
        ("x: int = 1.5  # i", "x=1.5: allowed is an int"),
        ("x: int = f()  # i", "the default of x is no plain value"),
        ("x: int = 1  # a\nx: int = 2  # b", "x is declared twice"),
        ("x: int = = 1", "is not Python"),
    ],
)
def test_parameters_cell_is_checked(source, message):
    with pytest.raises(UserError, match=message):
        read_parameters(source, "a.md")


def test_lists_and_pairs():
    known = read_parameters("names: list[str] = []  # n\nrates: list[float] = [0.5]  # r", "a")
    assert bind(known, {"names": "a, b", "rates": "1,2.5"}, "a") == {"names": ["a", "b"], "rates": [1.0, 2.5]}
    assert bind(known, {"names": "[a]", "rates": "(1, 2)"}, "a") == {"names": ["a"], "rates": [1.0, 2.0]}
    assert bind(known, {}, "a") == {"names": [], "rates": [0.5]}
    assert split_pair("a=b=c") == ("a", "b=c")
    for bad in ("a", "=1", "a-b=1"):
        with pytest.raises(UserError, match="allowed is name=value"):
            split_pair(bad)


LISTS = "names: list[str] = []  # n\nrates: tuple[float, ...] = (0.5,)  # r\nseeds: list[int] = [0]  # s"


@pytest.mark.parametrize(
    ("pair", "value"),
    [
        ('names=["a","b"]', ["a", "b"]),
        ('names = ["a", "b"]', ["a", "b"]),
        ("names=['a', 'b']", ["a", "b"]),
        ("names=('a',)", ["a"]),
        ('names="a","b"', ["a", "b"]),
        ('names=["a, b", "c=d", "it\'s", "\\"", "\\u00fc", "ü 深"]', ["a, b", "c=d", "it's", '"', "ü", "ü 深"]),
        ('names=["a"', ['["a"']),
        ("names=it's, b", ["it's", "b"]),
        ("names=8,16", ["8", "16"]),
        ("names=mxfp4+h16", ["mxfp4+h16"]),
        ("names='a b'", ["a b"]),
        ("names=[a, b]", ["a", "b"]),
        ("names=[]", []),
        ('names=""', [""]),
        ("rates=[1, 2.5, 1e-3]", (1.0, 2.5, 0.001)),
        ("rates = 1 , 2.5", (1.0, 2.5)),
        ("rates=(1, 2)", (1.0, 2.0)),
        ("rates=1", (1.0,)),
        ("seeds=[1,2]", [1, 2]),
        ("seeds=01, -2", [1, -2]),
        ('seeds=["1"]', [1]),
    ],
)
def test_lists_are_json_literals_or_words(pair, value):
    name, text = split_pair(pair)
    assert bind(read_parameters(LISTS, "a"), {name: text}, "a")[name] == value


@pytest.mark.parametrize(
    "pair",
    ['names=["a", 1]', 'names=["a", null]', "names=null", 'names={"a": 1}', "names=[1, 2]", 'names=[["a"], ["b"]]',
     "seeds=[1.0]", "seeds=[true]", "seeds=[[1]]", "seeds=null", "seeds={1, 2}", "seeds=[1, null]", "rates=[NaN]",
     "rates=[1e999]"],
)  # fmt: skip
def test_lists_of_other_things_are_refused(pair):
    name, text = split_pair(pair)
    with pytest.raises(UserError, match=rf"parameter {name}=.*: allowed is .*, as JSON such as"):
        bind(read_parameters(LISTS, "a"), {name: text}, "a")


SCALARS = "word: str = 'a'  # w\nseed: int = 0  # s\nrate: float = 0.5  # r\nfast: bool = False  # f"


@pytest.mark.parametrize(
    ("pair", "value"),
    [
        ("word = even", "even"),
        ("word= even ", "even"),
        ('word="even"', "even"),
        ("word='even'", "even"),
        ('word=" even "', " even "),
        ("word=it's", "it's"),
        ('word="a" or "b"', '"a" or "b"'),
        ('word="\\u00fc"', "ü"),
        ("word=a=b==c", "a=b==c"),
        ("word=", ""),
        ("word=1", "1"),
        ("word=[a]", "[a]"),
        ("word=深度", "深度"),
        ("seed = 7", 7),
        ('seed="7"', 7),
        ("rate= 1e-3", 0.001),
        ("fast = TRUE", True),
        ('fast="no"', False),
    ],
)
def test_scalars_may_have_spaces_and_quotes_around_them(pair, value):
    name, text = split_pair(pair)
    assert bind(read_parameters(SCALARS, "a"), {name: text}, "a")[name] == value


@pytest.mark.parametrize("pair", ["seed=null", "seed=true", "seed=7.0", "seed=[7]", "rate=null", "fast=null", "fast=2"])
def test_scalars_of_another_type_are_refused(pair):
    name, text = split_pair(pair)
    with pytest.raises(UserError, match=f"parameter {name}="):
        bind(read_parameters(SCALARS, "a"), {name: text}, "a")


@pytest.mark.parametrize(
    ("words", "pairs"),
    [
        ("a=1 b=2", ["a=1", "b=2"]),
        ("a = 1 b=2", ["a = 1", "b=2"]),
        ("a= 1 b =2", ["a= 1", "b =2"]),
        ("a=[1, 2] b=3,  4 c=5", ["a=[1, 2]", "b=3, 4", "c=5"]),
        ("a=1 fast", ["a=1", "fast"]),
        ("fast", ["fast"]),
        ("a= b=2", ["a=", "b=2"]),
    ],
)
def test_pairs_that_a_shell_took_apart(words, pairs):
    assert join_words(words.split()) == pairs


def test_sources_that_are_none(project):
    write(project, "1", name="b")
    with pytest.raises(UserError, match="one of the chapters: b$"):
        find_source("nothing")
    (project / "prose.md").write_text("# Only prose\n")
    with pytest.raises(UserError, match="no code cell"):
        read_source(project / "prose.md")
    assert find_source("b") == project / "book" / "b.md"


def test_tidy_merges_streams_and_keeps_the_last_state_of_a_line():
    pieces = [nbformat.v4.new_output("stream", name="stderr", text=t) for t in ("10%\r", "50%\r100%\n", "end")]
    node = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("x", outputs=pieces, execution_count=9)])
    tidy(node, "n", {})
    assert [o.text for o in node.cells[0].outputs] == ["100%\nend"]
    assert node.cells[0].execution_count == 1


def test_paths_are_named_not_shown():
    assert without_paths(f"{Path.home()}/x.py:3") == "~/x.py:3"
    assert without_paths("/tmp/ipykernel_12/34.py:5: UserWarning") == "<cell>:5: UserWarning"


def test_other_parameters_and_files_of_the_same_name_leave_the_books_page_alone(project):
    path = write(project, SHOW)
    page = run_notebook(path)
    assert page.path.name == "a.ipynb"
    text = page.path.read_text()
    other = run_notebook(path, {"seed": "7"})
    elsewhere = project / "elsewhere.d"
    elsewhere.mkdir()
    (elsewhere / "a.md").write_text(path.read_text())
    foreign = run_notebook(elsewhere / "a.md")
    assert len({page.path, other.path, foreign.path}) == 3
    assert page.path.read_text() == text
    assert run_notebook(path).skipped and run_notebook(path, {"seed": "7"}).skipped
