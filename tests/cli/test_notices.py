"""What stops nothing is said in one line, once, wherever it comes up: what, where, what to do."""

import json
import re
import warnings

import pytest

from mxfp4 import cli, errors
from mxfp4.errors import Notice, print_notices
from mxfp4.publish.notebook import run_notebook
from mxfp4.studies.runner import run_plan
from mxfp4.studies.store import Store
from tests.fakes.studies import put
from tests.publish.test_notebook import project, write  # noqa: F401
from tests.studies.test_arm_queue import CORPUS, small


@pytest.fixture
def damaged(tmp_path, monkeypatch):
    """A store whose only record is damaged; the arms that it is of."""
    monkeypatch.setenv("MXFP4_RUNS", str(tmp_path / "runs"))
    arms = small(recipes=("bf16", "fp8"), seeds=(0,))
    store = Store()
    put(store, arms.arms[0])
    (store.folder(arms.arms[0], "cpu") / "curve.parquet").write_bytes(b"cut")
    return store, arms


def line(store, arms) -> str:
    folder = store.folder(arms.arms[0], "cpu")
    return (
        f"warning: record {folder} has a damaged curve.parquet: left out; restore the folder from a copy, or "
        "`mxfp4 train --scale cpu` makes it again"
    )


@pytest.mark.parametrize("argv", [["status"], ["claims"], ["export", "nothing", "out"]])
def test_a_damaged_record_is_one_line_of_each_command(damaged, argv, capsys):
    for _ in range(2):  # each command says it anew
        cli.main(argv)
        assert [x for x in capsys.readouterr().err.splitlines() if not x.startswith("error")] == [line(*damaged)]


@pytest.mark.parametrize("jobs", [1, 2])
def test_it_is_read_often_and_told_once_also_by_the_processes_that_train_it_again(damaged, jobs, capfd):
    store, arms = damaged
    with warnings.catch_warnings():
        print_notices()
        run_plan(arms, store, jobs=jobs, device="cpu", corpus=CORPUS)
    assert capfd.readouterr().err.splitlines() == [line(store, arms)]
    assert len(store.load()) == 2


def test_a_notebook_shows_it_as_one_line(project):  # noqa: F811
    arm = small(recipes=("bf16",), seeds=(0,)).arms[0]
    put(Store(), arm)
    (Store().folder(arm, "cpu") / "record.json").write_text("{")
    code = "from mxfp4.studies.store import Store"
    done = run_notebook(write(project, code, "Store().load()\nStore().load('cpu')", "Store().load()\nprint(1)"))
    outputs = [o for cell in json.loads(done.path.read_text())["cells"] for o in cell.get("outputs", [])]
    said = "".join("".join(o["text"]) for o in outputs if o.get("name") == "stderr")
    assert re.fullmatch(
        r"warning: record runs/records/cpu/\S+ has no readable record.json: .*; restore the folder .*\n", said
    )


def test_other_warnings_and_other_ranks(monkeypatch, capsys):
    with pytest.warns(UserWarning, match="any other") as seen:
        print_notices()
        print_notices(["told by the parent"])
        warnings.warn("any other", stacklevel=1)
        warnings.warn("told by the parent", Notice, stacklevel=1)
        monkeypatch.setenv("RANK", "1")
        warnings.warn("of all ranks", Notice, stacklevel=1)
    assert len(seen) == 1 and capsys.readouterr().err == "" and "of all ranks" in errors.said
