"""The hash by which a record's code is found again."""

import subprocess

import pytest

from mxfp4.studies.machine import tree_hash


def git(folder, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    return subprocess.run(
        ["git", *identity, *arguments], cwd=folder, capture_output=True, text=True, check=True
    ).stdout.strip()


@pytest.fixture
def package(tmp_path):
    git(tmp_path, "init", "-q")
    (tmp_path / ".gitignore").write_text("*.pyc\n")
    package = tmp_path / "mxfp4"
    (package / "inner").mkdir(parents=True)
    (package / "a.py").write_text("a = 1\n")
    (package / "inner" / "b.py").write_text("b = 2\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "one")
    return package


def test_the_hash_is_that_of_the_commit_which_holds_the_same_files(package):
    root = package.parent
    first = git(root, "rev-parse", "HEAD:mxfp4")
    assert tree_hash(package) == first
    (package / "a.pyc").write_text("ignored")
    (root / "elsewhere.py").write_text("not the package's")
    assert tree_hash(package) == first
    (package / "a.py").write_text("a = 3\n")
    (package / "new.py").write_text("c = 4\n")
    changed = tree_hash(package)
    assert changed not in (None, first)
    assert git(root, "status", "--porcelain").count("??") == 2  # nothing was added to the checkout's own index
    git(root, "add", ".")
    git(root, "commit", "-qm", "two")
    assert git(root, "rev-parse", "HEAD:mxfp4") == changed


def test_without_git_there_is_none(tmp_path):
    assert tree_hash(tmp_path) is None
