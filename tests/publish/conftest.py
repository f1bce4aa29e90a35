"""The mini book, run and built once for the tests of what a site holds."""

from __future__ import annotations

import pytest

from mxfp4.publish.addresses import Addresses
from mxfp4.publish.notebook import run_notebook
from mxfp4.publish.site import build_site
from tests.fakes.minibook import make

ADDRESSES = Addresses("https://example.org/book", "https://example.com/us/mxfp4")


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """The folder of the built site, which has an address and a repository."""
    root = tmp_path_factory.mktemp("mini")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        patch.setenv("MXFP4_RUNS", str(root / "runs"))
        patch.setenv("SOURCE_DATE_EPOCH", "1783555200")  # 9 July 2026
        book = make(root)
        (book / "_redirects.yml").write_text("old/squares: charts\nbefore: other\n")
        done = run_notebook(book / "charts.md")
        return build_site(book, done.path.parent, scale="cpu", addresses=ADDRESSES).path
