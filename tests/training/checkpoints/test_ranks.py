"""Checkpoints of several ranks on bad days: killed while writing, damaged, disk full on one rank, another number of
ranks. What must hold: the run goes on from a whole checkpoint to the bytes of a run that nothing befell."""

import errno
import hashlib
import json
import os
import shutil
import signal
import threading
import time
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from mxfp4.errors import UserError
from mxfp4.training.checkpoints import checkpoint, dcp_folder
from mxfp4.training.execution.distributed import here
from mxfp4.training.loop import train
from tests.fakes import FakeCorpus, tiny_config
from tests.fakes.ranks import keep, launch

CORPUS = FakeCorpus()
CONFIG = tiny_config(recipe="mxfp4+sr", micro_batches=4, steps=8)


def run(folder, *, until=None, rank=0, **options):
    """Train to the end, or to a pause at step `until`, which rank `rank` alone asks for."""
    seen = []
    stop = None if until is None else lambda: seen[-1] == until and here().rank == rank
    return train(CONFIG, device="cpu", progress=False, checkpoint_dir=folder, on_step=seen.append, stop=stop,
                 **{"corpus": CORPUS, **options})  # fmt: skip


def killed_while_writing(ranks, folder):
    """kill -9 of both ranks between their shards of step 5 and its sums: everything else is there."""
    honest = dcp_folder.write_atomic

    def write_atomic(path, data):
        if path.parent.name == "step-00000005" and path.name == "SHA256SUMS":
            os.kill(os.getpid(), signal.SIGKILL)  # rank 0, which writes them; the other waits for it, and is killed
        honest(path, data)

    dcp_folder.write_atomic = write_atomic
    run(folder / "killed", checkpoint_minutes=0)


def bad_days(ranks, folder):
    keep(ranks, folder / "straight.pt", run(folder / "straight", checkpoint_minutes=0))
    paused = run(folder / "paused", until=5, rank=1)  # one rank is told to stop
    assert paused.outcome["status"] == "paused" and paused.outcome["step"] == 5
    ranks.agree(None)
    if ranks.rank == 0:
        assert [p.name for p in checkpoint.entries(folder / "straight")] == ["step-00000007", "step-00000006"]
        shutil.copytree(folder / "straight", folder / "to one")
        shutil.copytree(folder / "straight", folder / "damaged")
        victim = folder / "damaged" / "step-00000007" / "__1_0.distcp"
        data = bytearray(victim.read_bytes())
        data[len(data) // 2] ^= 1
        victim.write_bytes(data)
    ranks.agree(None)
    for name in ("killed", "damaged", "paused"):
        said = noted(ranks, folder, name)
        if ranks.rank == 0:
            (folder / f"{name}.json").write_text(json.dumps(said))
    keep(ranks, folder / "from one.pt", run(folder / "from one"))
    full_disk(ranks, folder)


def noted(ranks, folder, name, **options):
    """Train to the end; what each rank said of checkpoints."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = run(folder / name, **options)
    keep(ranks, folder / f"{name}.pt", result)
    return ranks.gather([str(w.message) for w in caught if "checkpoint" in str(w.message)])


def full_disk(ranks, folder):
    """The disk of rank 1 is full when step 4 is saved, and again when a pause is."""
    honest, batches = os.fsync, []

    class Watched(FakeCorpus):
        def batch(self, *args):
            batches.append(args)
            return super().batch(*args)

    def fsync(handle):
        if ranks.rank == 1 and len(batches) == 1 + 4:  # one to begin with
            raise OSError(errno.ENOSPC, "No space left on device")
        honest(handle)

    os.fsync = fsync
    said = noted(ranks, folder, "full", corpus=Watched(), checkpoint_minutes=0)
    batches[:] = range(1 + 4)
    try:
        run(folder / "pause", until=2)
        error = None
    except UserError as stopped:
        error = str(stopped)
    os.fsync = honest
    errors = ranks.gather(error)
    if ranks.rank == 0:
        left = [p.name for p in checkpoint.entries(folder / "full") + checkpoint.entries(folder / "pause")]
        (folder / "full.json").write_text(json.dumps({"said": said, "errors": errors, "left": left}))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    run(folder / "from one", until=5)
    launch(killed_while_writing, 2, folder, dying=True)
    launch(bad_days, 2, folder)
    return folder


def loaded(path):
    return torch.load(path, weights_only=False)


@pytest.mark.parametrize("name", ["killed", "damaged", "paused", "full"])
def test_the_run_goes_on_from_the_one_before_to_the_same_bytes(folder, name):
    ours, straight = loaded(folder / f"{name}.pt"), loaded(folder / "straight.pt")
    assert repr(ours["curve"]) == repr(straight["curve"]) and ours["windows"] == straight["windows"]
    assert all(torch.equal(ours["weights"][k], v) for k, v in straight["weights"].items())


@pytest.mark.parametrize(
    "name, problem",
    [
        ("killed", "step-00000005 was not finished"),
        ("damaged", "step-00000007 is damaged (__1_0.distcp), now step-00000007.damaged"),
    ],
)
def test_what_was_passed_over_is_named_once(folder, name, problem):
    first, second = json.loads((folder / f"{name}.json").read_text())
    start = 4 if name == "killed" else 6
    assert len(first) == 1 and first[0].endswith(f"{problem}; going on from step {start}") and second == []
    assert (folder / name / "step-00000007.damaged").is_dir() == (name != "killed")


@pytest.mark.parametrize("name", ["to one", "from one"])
def test_another_number_of_ranks_goes_on(folder, name):
    """The curve up to the change is the other's; from there on sums are taken in another order (test_parallel)."""
    straight = loaded(folder / "straight.pt")["curve"]
    curve = run(folder / name).curve if name == "to one" else loaded(folder / "from one.pt")["curve"]
    at = 7 if name == "to one" else 5
    if name == "to one":
        assert repr(curve[: at + 1]) == repr(straight[: at + 1])
    # One step on from equal bytes: equal batches, equal random numbers.
    one = run(folder.parent / "alone").curve if name == "from one" else straight
    assert curve[at + 1]["train_loss"] == pytest.approx(one[at + 1]["train_loss"], rel=4 * 2.0**-24)


def test_a_full_disk_on_one_rank_is_one_line_and_ends_a_pause_alone(folder):
    found = json.loads((folder / "full.json").read_text())
    full = f"cannot write checkpoint {folder}/%s: the disk is full; %s"
    line = full % ("full/step-00000004", "the last whole one is of step 3; training goes on")
    assert found["said"] == [[line], []]
    assert found["errors"] == [full % ("pause/step-00000002", "no checkpoint is whole yet")] * 2
    assert found["left"] == ["step-00000007", "step-00000006"]


def test_sums_are_those_that_sha256sum_reads(folder):
    path = checkpoint.entries(folder / "to one")[0]
    sums = dict(line.split("  ")[::-1] for line in (path / "SHA256SUMS").read_text().splitlines())
    assert set(sums) == {p.name for p in path.iterdir()} - {"SHA256SUMS"}
    assert all(hashlib.sha256((path / n).read_bytes()).hexdigest() == s for n, s in sums.items())


def test_each_rank_writes_several_files_and_each_is_summed(folder):
    path = checkpoint.entries(folder / "to one")[0]
    names = [f"__{rank}_{i}.distcp" for rank in range(2) for i in range(dcp_folder.FILES)]
    assert sorted(p.name for p in path.glob("*.distcp")) == names
    assert set(names) <= {line.split("  ")[1] for line in (path / "SHA256SUMS").read_text().splitlines()}


def test_a_gpus_copy_is_complete_before_the_tensors_change_and_its_memory_is_kept(monkeypatch):
    """Without a GPU: its pinned memory is plain, and its copies are late, done when that GPU is waited for."""
    host, copy = dcp_folder._host, torch.Tensor.copy_
    pins: list[bool] = []
    copies: list[tuple] = []

    def copy_(self, other, non_blocking=False):
        return copies.append((self, other)) if non_blocking else copy(self, other)

    def synchronize(device):
        assert device == torch.device("cuda", 1)
        while copies:
            copy(*copies.pop())

    def unpinned(tensor, pinned):
        pins.append(pinned)
        return host(tensor, pinned=False)

    monkeypatch.setattr(dcp_folder, "_host", unpinned)
    monkeypatch.setattr(torch.Tensor, "copy_", copy_)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    copier = dcp_folder.copier(torch.device("cuda", 1))
    tensors = {"a": torch.arange(6.0).view(2, 3), "step": torch.tensor(1.0)}
    first = copier.stage(tensors)
    for tensor in tensors.values():
        tensor.add_(1)
    assert first["a"].flatten().tolist() == list(range(6)) and first["step"].item() == 1
    second = copier.stage(tensors)
    assert second["a"].flatten().tolist() == list(range(1, 7)) and second["step"].item() == 2
    assert pins == [True, True] and all(first[name] is second[name] for name in tensors), "pinned once"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_the_copy_is_pinned_and_complete():
    copier, x = dcp_folder.copier(torch.device("cuda")), torch.randn(2**26, device="cuda")
    for _ in range(2):
        x.mul_(-1)
        wanted = x.cpu()
        copy = copier.stage({"x": x})["x"]
        x.zero_().sub_(wanted.cuda())
        assert copy.is_pinned() and torch.equal(copy, wanted)


def test_an_error_in_any_of_the_threads_that_write_is_not_lost(tmp_path, monkeypatch):
    """DCP's own threads end without a word, and the checkpoint would count as whole."""
    honest = os.fsync

    def fsync(handle):
        if threading.current_thread() is not threading.main_thread():
            raise OSError(errno.ENOSPC, "No space left on device")
        time.sleep(0.1)  # the other threads have their files by now
        honest(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    tensors = {str(i): torch.full((100,), float(i)) for i in range(2 * dcp_folder.FILES)}
    path = tmp_path / "step-00000001"
    with pytest.raises(CheckpointException) as caught:
        dcp.save(tensors, storage_writer=dcp_folder._Writer(path, {}), no_dist=True)
    assert dcp_folder._reason(caught.value) == "the disk is full"
    assert not (path / "SHA256SUMS").exists()
