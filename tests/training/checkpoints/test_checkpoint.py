"""Checkpoints on bad days: cut short, rotten, full disk, stalled disk, hostile."""

import errno
import hashlib
import os
import pickle
import shutil
import threading
import warnings
from contextlib import contextmanager

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from mxfp4.errors import Notice, UserError
from mxfp4.training.checkpoints import checkpoint, dcp_folder, durable_files, resume
from mxfp4.training.checkpoints.resume import SHARE, STALLED_MINUTES, Checkpoints
from mxfp4.training.execution.distributed import ALONE
from tests.fakes.checkpoints import leave


def state(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((100,), value), "step": torch.tensor(value)}


def load(path):
    if problem := dcp_folder.problem(path, ALONE):
        raise checkpoint.Damaged(problem)
    tensors = state(-1.0)
    dcp_folder.read(path, tensors, ALONE)
    assert tensors["w"].unique().tolist() == [tensors["step"].item()]
    return tensors["step"].item()


def latest(folder, **options):
    return checkpoint.newest(checkpoint.entries(folder), load, **options)


def names(folder):
    return sorted(p.name for p in folder.iterdir())


def test_the_newest_two_are_kept_and_the_newest_is_loaded(tmp_path):
    for step in (1, 2, 3):
        path = leave(tmp_path, step, state(step), {"loss": float("nan"), "curve": [step]})
    assert names(tmp_path) == ["step-00000002", "step-00000003"]
    assert latest(tmp_path) == (3, 3.0) and checkpoint.latest_step(tmp_path) == 3
    assert repr(checkpoint.plain(path)) == "{'loss': nan, 'curve': [3]}"


def test_an_empty_or_missing_folder_holds_none(tmp_path):
    assert latest(tmp_path) is None and latest(tmp_path / "no") is None


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "no sums", "empty sums"])
def test_a_damaged_one_is_named_and_the_one_before_is_used(tmp_path, damage):
    leave(tmp_path, 1, state(1.0))
    path = leave(tmp_path, 2, state(2.0))
    file = max(path.glob("*.distcp"), key=lambda file: file.stat().st_size)
    data = bytearray(file.read_bytes())
    if damage == "truncated":
        file.write_bytes(data[:-7])
    elif damage == "flipped":
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    elif damage == "empty":
        file.write_bytes(b"")
    elif damage == "no sums":
        (path / "SHA256SUMS").unlink()
    else:
        (path / "SHA256SUMS").write_text("")
    with pytest.warns(UserWarning, match=r"step-00000002 .*; going on from step 1$"):
        assert latest(tmp_path) == (1, 1.0)


@pytest.mark.parametrize(
    ("kept", "says"),
    [
        (lambda name: False, "SHA256SUMS lacks lines"),
        (lambda name: name != "run.json", "SHA256SUMS lacks lines"),
        (lambda name: name != ".metadata", "SHA256SUMS lacks lines"),
        (lambda name: name != "__0_0.distcp", "SHA256SUMS has no line for __0_0.distcp"),
    ],
)
def test_sums_that_lost_lines_are_no_proof(tmp_path, kept, says):
    path = leave(tmp_path, 1, state(1.0))
    assert dcp_folder.problem(path, ALONE) is None
    lines = (path / "SHA256SUMS").read_text().splitlines(keepends=True)
    (path / "SHA256SUMS").write_text("".join(line for line in lines if kept(line.split()[1])))
    assert dcp_folder.problem(path, ALONE) == f"is damaged ({says})"


def test_a_kill_at_any_instant_leaves_the_former_or_the_new_one(tmp_path, monkeypatch):
    """Of a run that goes from steps 1 and 2 to 3: what is on the disk whenever it is changed."""
    run, states = tmp_path / "run", tmp_path / "states"
    leave(run, 1, state(1.0))
    leave(run, 2, state(2.0))
    states.mkdir()

    def watched(change):
        def wrapper(*args, **options):
            shutil.copytree(run, states / str(len(list(states.iterdir()))))
            return change(*args, **options)

        return wrapper

    for name in ("fsync", "replace", "rename", "unlink"):
        monkeypatch.setattr(os, name, watched(getattr(os, name)))
    leave(run, 3, state(3.0))
    monkeypatch.undo()
    with notices():
        found = [latest(states / str(n)) for n in range(len(list(states.iterdir())))]
    assert len(found) > 8 and found == sorted(found) and {*found} == {(2, 2.0), (3, 3.0)}


def test_where_all_are_damaged_that_is_said_and_later_ones_are_kept_before_them(tmp_path):
    for step in (100, 200):
        (leave(tmp_path, step, state(1.0)) / "run.json").write_bytes(b"rotten")
    with pytest.warns(UserWarning) as said:
        assert latest(tmp_path, resuming=True) is None
    each = ", ".join(f"step-00000{n} is damaged (run.json), now step-00000{n}.damaged" for n in (200, 100))
    assert [str(w.message) for w in said] == [
        f"no checkpoint in {tmp_path} is whole ({each}): starting from the beginning"
    ]
    leave(tmp_path, 5, state(5.0))
    assert latest(tmp_path) == (5, 5.0) and len(list(tmp_path.glob("*.damaged"))) == 2
    checkpoint.remove(tmp_path)
    assert not tmp_path.exists()


def test_one_that_was_never_finished_goes_with_the_next_that_is(tmp_path):
    (leave(tmp_path, 100, state(1.0)) / "SHA256SUMS").unlink()
    with pytest.warns(UserWarning, match=r"step-00000100 was not finished\): starting from the beginning"):
        assert latest(tmp_path, resuming=True) is None
    leave(tmp_path, 5, state(5.0))
    assert names(tmp_path) == ["step-00000005"]


def test_who_only_looks_changes_nothing(tmp_path):
    (leave(tmp_path, 1, state(1.0)) / ".metadata").write_bytes(b"rotten")
    before = sorted(tmp_path.rglob("*"))
    with pytest.warns(UserWarning, match=r"is whole \(step-00000001 is damaged \(.metadata\)\)$"):
        assert latest(tmp_path) is None
    assert sorted(tmp_path.rglob("*")) == before


def test_one_that_goes_away_while_it_is_looked_at_is_passed_over(tmp_path, monkeypatch):
    leave(tmp_path, 1, state(1.0))
    second = leave(tmp_path, 2, state(2.0))
    listed = checkpoint.entries(tmp_path)
    monkeypatch.setattr(checkpoint, "entries", lambda folder: listed)
    shutil.rmtree(second)
    assert checkpoint.latest_step(tmp_path) == 1
    with pytest.warns(UserWarning, match=r"step-00000002 was not finished; going on from step 1"):
        assert latest(tmp_path) == (1, 1.0)


def forge(path, file: str, data: bytes) -> None:
    """Change a file and its sum, as somebody would who wants it to be read."""
    (path / file).write_bytes(data)
    sums = path / "SHA256SUMS"
    lines = [line for line in sums.read_text().splitlines() if not line.endswith(f"  {file}")]
    sums.write_text("\n".join([*lines, f"{hashlib.sha256(data).hexdigest()}  {file}"]) + "\n")


class Hostile:
    """Runs code when unpickled."""

    def __reduce__(self):
        return (os.mkdir, ("pwned",))


def hostile_tensor(path):
    """In the place of a tensor, padded to its length."""
    (file, *_) = (f for f in path.glob("*.distcp") if f.stat().st_size)
    torch.save(Hostile(), path / "hostile")
    data = (path / "hostile").read_bytes()
    (path / "hostile").unlink()
    forge(path, file.name, data.ljust(file.stat().st_size, b"\0"))


def hostile_bytes(path):
    """An index that says that a tensor's file holds other data, which DCP would unpickle whatever they are."""
    index = dcp_folder._index(path)
    index.state_dict_metadata["w"] = BytesStorageMetadata()
    forge(path, ".metadata", pickle.dumps(index))


@pytest.mark.parametrize(
    ("attack", "says"),
    [
        (
            lambda path: forge(path, ".metadata", pickle.dumps(Hostile())),
            "(posix|nt).mkdir is not allowed in .metadata",
        ),
        (hostile_bytes, r"metadata\.BytesStorageMetadata is not allowed in .metadata"),
        (hostile_tensor, "UnpicklingError: Weights only load failed"),
    ],
    ids=["index", "bytes", "tensor"],
)
def test_a_checkpoint_cannot_run_code(tmp_path, monkeypatch, attack, says):
    monkeypatch.chdir(tmp_path)
    path = leave(tmp_path, 1, state(1.0))
    attack(path)
    assert dcp_folder.problem(path, ALONE) is None, "the sums are right"
    with pytest.raises(UserError, match=f"step-00000001 is whole, and cannot be read .*{says}"):
        latest(tmp_path)
    assert not (tmp_path / "pwned").exists()


# A run's own checkpoints, on a disk that is full or stalls


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands, and is set forward by hand. The wall clock, which may jump, is not asked."""
    now = [1000.0]
    monkeypatch.setattr(resume.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(resume.time, "time", lambda: -1e9)
    return now


def checkpoints(folder, minutes):
    model = torch.nn.Linear(2, 2)
    return Checkpoints(folder, model, torch.optim.AdamW(model.parameters()), ALONE, minutes)


@contextmanager
def notices():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", Notice)
        said = []
        yield said
        said += [str(w.message) for w in caught if w.category is Notice]


def full(handle):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_is_said_and_training_goes_on_with_what_was_there(tmp_path, monkeypatch):
    ours = checkpoints(tmp_path, 0)
    ours.save(1, {})
    with monkeypatch.context() as patch, notices() as said:
        patch.setattr(os, "fsync", full)
        ours.save(2, {})
        assert ours.due() and ours.due()
    line = f"cannot write checkpoint {tmp_path}/step-00000002: the disk is full; the last whole one is of step 1"
    assert said == [f"{line}; training goes on"]
    assert names(tmp_path) == ["step-00000001"]
    ours.save(3, {})
    with notices() as said:
        assert ours.due()
        ours.close(needed=True)
    assert said == [] and names(tmp_path) == ["step-00000001", "step-00000003"]


def test_a_pause_without_its_checkpoint_fails(tmp_path, monkeypatch):
    ours = checkpoints(tmp_path, 60)
    monkeypatch.setattr(os, "fsync", full)
    ours.save(2, {})
    with pytest.raises(UserError, match=r"step-00000002: the disk is full; no checkpoint is whole yet$"):
        ours.close(needed=True)


def test_none_is_begun_where_it_has_no_room(tmp_path, monkeypatch):
    ours = checkpoints(tmp_path / "run", 0)
    size = sum(t.numel() * 4 for t in resume.named_tensors(ours.model, ours.optimizer).values())
    free = shutil.disk_usage(tmp_path)._replace(free=size - 1)
    monkeypatch.setattr(durable_files.shutil, "disk_usage", lambda path: free)
    with notices() as said:
        ours.save(2, {})
        ours.due()
    assert size == 80 and said == [
        f"cannot write checkpoint {tmp_path}/run/step-00000002: it takes 8e-08 GB and 7.9e-08 GB are free; no checkpoint "
        "is whole yet; training goes on"
    ]
    assert not (tmp_path / "run").exists()
    monkeypatch.setattr(durable_files.shutil, "disk_usage", lambda path: free._replace(free=size))
    ours.save(3, {})
    assert checkpoint.latest_step(tmp_path / "run") == 3


@pytest.mark.parametrize("minutes", [1.0, 20.0])
def test_a_stalled_write_is_said_and_none_is_begun_beside_it(tmp_path, monkeypatch, clock, minutes):
    ours, disk = checkpoints(tmp_path, minutes), threading.Event()
    clock[0] += 60 * minutes
    assert ours.due()
    ours.save(4, {})
    ours.close(needed=True)
    allowed = 60 * max(minutes, STALLED_MINUTES)
    monkeypatch.setattr(dcp_folder, "sync_folder", lambda folder: disk.wait())
    ours.save(5, {})
    with notices() as said:
        for passed in (allowed - 1, 1, allowed - 1, 1, allowed):  # said after 1 and 2 times of what is allowed
            clock[0] += passed
            assert not ours.due()
    assert said == [
        f"checkpoint {tmp_path}/step-00000005 has been in writing for {n * allowed / 60:.0f} min: its disk may have "
        "stalled; no other is written meanwhile; the last whole one is of step 4"
        for n in (1, 2)
    ]
    disk.set()
    ours.close(needed=True)
    assert ours.whole == 5 and ours.due()


def test_saving_takes_a_small_share_of_the_time(tmp_path, monkeypatch, clock):
    """A save for which the step waited 3 s is followed by 150 s of training."""
    ours, honest = checkpoints(tmp_path, 1.0), dcp_folder.write

    def slow(*args):
        clock[0] += 3.0
        return honest(*args)

    monkeypatch.setattr(dcp_folder, "write", slow)
    assert not ours.due()
    clock[0] += 60
    assert ours.due()
    ours.save(1, {})
    ours.writing.result()
    clock[0] += 3 / SHARE - 1
    assert not ours.due()
    clock[0] += 1
    assert ours.due()
