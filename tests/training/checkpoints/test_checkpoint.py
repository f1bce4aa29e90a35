"""Checkpoints on bad days: cut short, rotten, full disk, hostile."""

import errno
import os

import pytest
import torch

from mxfp4.errors import UserError
from mxfp4.training.checkpoints import checkpoint


def state(value: float) -> dict:
    return {"model": {"w": torch.full((100,), value)}, "curve": [{"step": 1, "loss": value}]}


def latest(folder, **options):
    return checkpoint.newest(checkpoint.entries(folder), checkpoint.read, **options)


def test_the_newest_two_are_kept_and_the_newest_is_loaded(tmp_path):
    for step in (1, 2, 3):
        checkpoint.save(tmp_path, step, state(step))
    assert sorted(p.name for p in tmp_path.glob("*.pt")) == ["step-00000002.pt", "step-00000003.pt"]
    step, loaded = latest(tmp_path)
    assert step == 3 and torch.equal(loaded["model"]["w"], torch.full((100,), 3.0)) and loaded["curve"][0]["loss"] == 3
    assert checkpoint.latest_step(tmp_path) == 3


def test_an_empty_or_missing_folder_holds_none(tmp_path):
    assert latest(tmp_path) is None and latest(tmp_path / "no") is None


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "no sum", "empty sum"])
def test_a_damaged_one_is_named_and_the_one_before_is_used(tmp_path, damage):
    checkpoint.save(tmp_path, 1, state(1.0))
    path = checkpoint.save(tmp_path, 2, state(2.0))
    data = bytearray(path.read_bytes())
    if damage == "truncated":
        path.write_bytes(data[:-7])
    elif damage == "flipped":
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "no sum":
        path.with_suffix(".sha256").unlink()
    else:
        path.with_suffix(".sha256").write_text("")
    with pytest.warns(UserWarning, match=r"step-00000002\.pt .*; going on from step 1$"):
        step, loaded = latest(tmp_path)
    assert step == 1 and loaded["model"]["w"][0] == 1


def test_where_all_are_damaged_that_is_said_and_later_ones_are_kept_before_them(tmp_path):
    for step in (100, 200):
        checkpoint.save(tmp_path, step, state(1.0)).write_bytes(b"rotten")
    with pytest.warns(UserWarning) as said:
        assert latest(tmp_path, resuming=True) is None
    each = ", ".join(f"step-00000{n}.pt is damaged, now step-00000{n}.pt.damaged" for n in (200, 100))
    assert [str(w.message) for w in said] == [
        f"no checkpoint in {tmp_path} is whole ({each}): starting from the beginning"
    ]
    checkpoint.save(tmp_path, 5, state(5.0))
    assert latest(tmp_path)[0] == 5 and len(list(tmp_path.glob("*.damaged"))) == 2
    checkpoint.remove(tmp_path)
    assert not tmp_path.exists()


def test_one_that_was_never_finished_goes_with_the_next_that_is(tmp_path):
    checkpoint.save(tmp_path, 100, state(1.0)).with_suffix(".sha256").unlink()
    with pytest.warns(UserWarning, match=r"step-00000100.pt was not finished\): starting from the beginning"):
        assert latest(tmp_path, resuming=True) is None
    checkpoint.save(tmp_path, 5, state(5.0))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000005.pt", "step-00000005.sha256"]


def test_who_only_looks_changes_nothing(tmp_path):
    checkpoint.save(tmp_path, 1, state(1.0)).write_bytes(b"rotten")
    before = sorted(tmp_path.iterdir())
    with pytest.warns(UserWarning, match=r"is whole \(step-00000001.pt is damaged\)$"):
        assert latest(tmp_path) is None
    assert sorted(tmp_path.iterdir()) == before


def test_a_full_disk_is_one_line_and_leaves_what_was_there(tmp_path, monkeypatch):
    checkpoint.save(tmp_path, 1, state(1.0))

    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=r"step-00000002\.pt: the disk is full; earlier checkpoints are intact"):
        checkpoint.save(tmp_path, 2, state(2.0))
    monkeypatch.undo()
    assert latest(tmp_path)[0] == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000001.pt", "step-00000001.sha256"]


class Hostile:
    """Runs code when unpickled."""

    def __reduce__(self):
        return (os.system, ("true",))


def test_a_checkpoint_cannot_run_code(tmp_path):
    path = checkpoint.save(tmp_path, 1, {"model": {}})
    torch.save({"model": Hostile()}, path)
    import hashlib

    path.with_suffix(".sha256").write_text(hashlib.sha256(path.read_bytes()).hexdigest())
    with pytest.warns(UserWarning, match="cannot be loaded"):
        assert latest(tmp_path) is None


def test_leftovers_of_a_killed_write_do_not_pile_up(tmp_path):
    (tmp_path / ".step-00000001.pt.123.tmp").write_bytes(b"half")
    checkpoint.save(tmp_path, 1, state(1.0))
    assert not list(tmp_path.glob(".*"))


def test_remove_leaves_nothing(tmp_path):
    checkpoint.save(tmp_path / "run", 1, state(1.0))
    checkpoint.remove(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_one_that_goes_away_while_it_is_looked_at_is_passed_over(tmp_path, monkeypatch):
    checkpoint.save(tmp_path, 1, state(1.0))
    second = checkpoint.save(tmp_path, 2, state(2.0))
    listed = checkpoint.entries(tmp_path)
    monkeypatch.setattr(checkpoint, "entries", lambda folder: listed)
    second.unlink()
    assert checkpoint.latest_step(tmp_path) == 1
    with pytest.warns(UserWarning, match=r"step-00000002\.pt cannot be read \(No such file or directory\)"):
        assert latest(tmp_path)[0] == 1
