"""A page is run again when code that it reaches changed, and not when a comment did or when other code did."""

import pytest

from mxfp4.publish import code_fingerprint as module
from mxfp4.publish.code_fingerprint import code_fingerprint, reached, sources

FILES = {
    "mxfp4": "from mxfp4.low import number\n",
    "mxfp4.low": '"""Low."""\nnumber = 1\n',
    "mxfp4.middle": 'def f():\n    """Lazy."""\n    from mxfp4.deep import thing\n    return thing\n',
    "mxfp4.deep": "class Thing:\n    field: int = 1\n    '''What it is.'''\nthing = Thing()\n",
    "mxfp4.other": "x = 1\n",
}


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A made-up package; returns what writes one of its files anew."""
    paths = {name: tmp_path / f"{name}.py" for name in FILES}
    for cached in (module._tree, module._imported_by, module._module_hash):
        monkeypatch.setattr(module, cached.__wrapped__.__name__, cached.__wrapped__)
    monkeypatch.setattr(module, "sources", lambda: paths)

    def write(name, text):
        paths[name].write_text(text)

    for name, text in FILES.items():
        write(name, text)
    return write


def test_what_is_reached(package):
    assert reached(["mxfp4.middle"]) == {"mxfp4.middle", "mxfp4.deep", "mxfp4", "mxfp4.low"}
    assert reached(["mxfp4.other"]) == {"mxfp4.other"}
    assert reached(["mxfp4.none", "numpy"]) == set()


@pytest.mark.parametrize(
    "code", ["from mxfp4.middle import f", "import mxfp4.middle", "def g():\n    from mxfp4 import middle"]
)
def test_reached_code_counts_and_its_comments_do_not(package, code):
    before = code_fingerprint(code)
    package("mxfp4.other", "x = 2\n")
    package(
        "mxfp4.deep",
        "# Another comment.\nclass Thing:\n    '''A docstring.'''\n\n    field: int = 1\nthing   =   Thing()\n",
    )
    package("mxfp4.middle", FILES["mxfp4.middle"].replace("Lazy.", "Said otherwise."))
    assert code_fingerprint(code) == before
    package("mxfp4.deep", FILES["mxfp4.deep"].replace("= 1", "= 2"))
    assert code_fingerprint(code) != before


def test_a_module_that_is_imported_now_counts(package):
    before = code_fingerprint("import mxfp4.middle")
    package("mxfp4.low", "number = 1\nimport mxfp4.other\n")
    assert code_fingerprint("import mxfp4.middle") != before


def test_code_without_imports_reaches_nothing_and_magics_reach_all(package):
    nothing, everything = code_fingerprint("x = 1"), code_fingerprint("%matplotlib inline\n")
    package("mxfp4.other", "x = 2\n")
    assert code_fingerprint("y = 3") == nothing
    assert code_fingerprint("%matplotlib inline\n") != everything


def test_of_the_real_package_a_page_reaches_what_it_uses():
    found = reached(["mxfp4.pages.chapters.format"])
    assert {"mxfp4.numerics.formats", "mxfp4.numerics.scale_rules"} <= found
    assert "mxfp4.cli" not in found and "mxfp4.adapters.torchtitan" not in found
    assert set(module.BESIDE) <= set(sources())
