"""What a crash between a record and the removal of its checkpoints leaves, and what is not left over."""

import pytest

from mxfp4 import cli
from mxfp4.studies import train_arm as arm
from mxfp4.studies.plans import plan
from mxfp4.studies.runner import run_plan
from mxfp4.studies.store import Store
from mxfp4.training.checkpoints import checkpoint
from tests.fakes import FakeCorpus
from tests.studies.test_plans import SCALE

CORPUS = FakeCorpus()
ONE = plan("table1", SCALE, recipes=("bf16",), seeds=(0,))
(CONFIG,) = ONE.arms


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setenv("MXFP4_RUNS", str(tmp_path / "runs"))
    return Store()


def train(store, **options):
    return run_plan(ONE, store, jobs=1, device="cpu", corpus=CORPUS, **options)


def pause(store, keep_weights=False):
    """The arm with a checkpoint of its second step."""
    steps = []
    status = arm.train_arm(
        CONFIG, store, corpus=CORPUS, device="cpu", on_step=steps.append, stop=lambda: len(steps) == 2,
        keep_weights=keep_weights,
    )  # fmt: skip
    assert status == "paused"
    return store.checkpoint_dir(CONFIG, "cpu")


@pytest.fixture
def crashed(store, monkeypatch):
    """A run that died after it had stored its record."""
    folder = pause(store)

    def crash(folder):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Store, "remove_checkpoints", staticmethod(crash))
        with pytest.raises(KeyboardInterrupt):
            train(store)
    assert store.get(CONFIG, "cpu") and checkpoint.latest_step(folder) == 2
    return folder


def test_the_next_call_removes_it_and_says_so_once(store, crashed, capsys):
    assert cli.main(["status"]) == 0
    assert f"{crashed.name} at step 2, finished: left by a crash" in capsys.readouterr().out
    train(store)
    line = f"removed checkpoints of finished runs, left by a crash (1): {crashed.name}"
    assert capsys.readouterr().err.splitlines().count(line) == 1
    assert list(crashed.parent.iterdir()) == []
    train(store)
    assert "removed" not in capsys.readouterr().err


def test_not_while_a_process_is_at_it(store, crashed):
    lock = store.lock(CONFIG, "cpu")
    assert lock.acquire()
    train(store)
    assert checkpoint.latest_step(crashed) == 2
    lock.release()


def test_not_where_the_record_is_damaged(store, crashed):
    (store.folder(CONFIG, "cpu") / "record.json").write_text("{")
    with pytest.warns(UserWarning, match=crashed.name):
        assert store.remove_left_over("cpu") == []
    assert checkpoint.latest_step(crashed) == 2


def test_a_run_again_for_its_weights_is_not_left_over(store, monkeypatch, capsys):
    train(store)
    folder = pause(store, keep_weights=True)
    train(store)
    assert checkpoint.latest_step(folder) == 2
    begun_at = []
    monkeypatch.setattr(arm, "train", watched(arm.train, begun_at))
    assert train(store, keep_weights=True).trained == ["bf16-s0"]
    assert begun_at[0] == 3 and not folder.exists()
    assert "removed" not in capsys.readouterr().err


def test_what_is_left_over_serves_a_run_for_weights(store, crashed, monkeypatch):
    begun_at = []
    monkeypatch.setattr(arm, "train", watched(arm.train, begun_at))
    train(store, keep_weights=True)
    assert begun_at[0] == 3 and not crashed.exists()


def watched(train, steps):
    def watch(config, *, on_step, **options):
        return train(config, on_step=lambda step: (steps.append(step), on_step(step)), **options)

    return watch
