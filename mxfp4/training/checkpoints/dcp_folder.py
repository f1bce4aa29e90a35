"""One checkpoint: a folder of PyTorch's distributed checkpoint (DCP), of one process or many, whole or not there.

    step-00000123/__0_0.distcp, ...   tensors, each rank's shards in FILES files of its own
                  .metadata           DCP's index
                  run.json            everything else: plain data
                  SHA256SUMS          all of these, in sha256sum's format: written last, renamed into place

A folder without SHA256SUMS does not count, so a write cut short at any moment is noticed; bytes that rot later
disagree with their sums. Any number of ranks reads it, whatever number wrote it. Reading allows tensors, plain data and
the classes of DCP's index, never code: the index is a pickle, which is read here by an unpickler that knows these
alone, and DCP unpickles without a limit what an index calls bytes, which such an index cannot.

Source: PyTorch 2.13, torch.distributed.checkpoint (`async_save`, `load`, `FileSystemWriter`, `FileSystemReader`).
"""

from __future__ import annotations

import hashlib
import json
import pickle
import shutil
import warnings
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.staging import AsyncStager, BlockingAsyncStager
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from mxfp4.errors import UserError
from mxfp4.training.checkpoints.checkpoint import PLAIN, SUMS
from mxfp4.training.checkpoints.durable_files import sync_folder, why, write_atomic
from mxfp4.training.execution.distributed import Ranks

FILES = 4
"""Files that a rank writes, and threads that write, sum or read them: SHA-256 takes longer than a fast disk."""
INDEX = ".metadata"
INDEX_CLASSES = {
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},
    "torch": {"Size"},  # and its dtypes
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },  # not BytesStorageMetadata: DCP unpickles anything from such an entry
    "torch.serialization": {"_get_layout"},
}  # fmt: skip
"""What an index of tensors is made of: names by module."""

# Said of every save and load by a process by itself. Not silenced there: filters are the process's, writing a thread's.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


def problem(path: Path, ranks: Ranks) -> str | None:
    """What is wrong with the folder, the same on every rank; each reads its share of the files. None: nothing."""
    try:
        lines = [line.split("  ", 1) for line in (path / SUMS).read_text().splitlines()]
        sums = {name: value for value, name in lines}
    except (OSError, ValueError):
        sums = {}
    if not all(ranks.gather({INDEX, PLAIN} <= sums.keys())):  # a rank may not see yet what another one does
        there = all(ranks.gather((path / SUMS).is_file()))
        return f"is damaged ({SUMS} lacks lines)" if there else "was not finished"
    mine = sorted(sums)[ranks.rank :: ranks.size]
    with ThreadPoolExecutor(FILES) as pool:
        found = list(pool.map(_sum, [path / name for name in mine]))
    wrong = [name for name, value in zip(mine, found, strict=True) if value != sums[name]]
    wrong = sorted(name for names in ranks.gather(wrong) for name in names)
    if wrong:
        return f"is damaged ({wrong[0]})"
    unnamed = ranks.agree(sorted(_files(path) - sums.keys()) if ranks.rank == 0 else None)
    return f"is damaged ({SUMS} has no line for {unnamed[0]})" if unnamed else None


def _files(path: Path) -> set[str]:
    """The files that the index, whose sum is right, names; none where it cannot be read: `read` says so."""
    try:
        return {place.relative_path for place in _index(path).storage_data.values()}
    except Exception:
        return set()


def read(path: Path, tensors: dict[str, Tensor], ranks: Ranks) -> None:
    """Overwrite `tensors`, as they are spread over `ranks`, by those of a whole folder. Raises UserError."""
    try:
        reader = _Reader(path, _index(path))
        dcp.load(tensors, storage_reader=reader, process_group=ranks.control, no_dist=ranks.control is None)
    except (Exception, CheckpointException) as error:  # its bytes are right: another PyTorch, another model, or code
        raise UserError(
            f"checkpoint {path} is whole, and cannot be read ({_reason(error)}): move it away to go on from the one "
            "before it"
        ) from None


def _index(path: Path) -> Metadata:
    """DCP's index of a folder. Raises UnpicklingError where it holds more than one of tensors does."""
    with open(path / INDEX, "rb") as file:
        return cast(Metadata, _Unpickler(file).load())


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        known = name in INDEX_CLASSES.get(module, ())
        if not known and not (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed in {INDEX}")
        return super().find_class(module, name)


def copier(device: torch.device) -> AsyncStager:
    """What copies a run's tensors before they are written; on a GPU into pinned memory, made at the first copy."""
    return _Copier(device)


class _Copier(BlockingAsyncStager):
    """PyTorch's, whose pinned memory for a DTensor costs a copy through pageable memory of the same size, twice."""

    def __init__(self, device: torch.device):
        super().__init__(cache_staged_state_dict=device.type == "cuda")
        self.device = device

    def stage(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        kept = self.cache_staged_state_dict
        copies = self.state_dict_cache or {name: _host(t, pinned=kept) for name, t in state_dict.items()}
        for name, tensor in state_dict.items():
            _local(copies[name]).copy_(_local(tensor), non_blocking=kept)
        if kept:
            self.state_dict_cache = copies
            torch.cuda.synchronize(self.device)  # the optimizer may change the tensors once this returns
        return copies


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _host(tensor: Tensor, pinned: bool) -> Tensor:
    """Room on the host for this rank's part of `tensor`, which stays the same part of the same whole."""
    part = _local(tensor)
    room = torch.empty_like(part, device="cpu", pin_memory=pinned and part.numel() > 0)
    return DTensor(room, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else room


def write(path: Path, tensors: dict[str, Tensor], plain: dict[str, Any], ranks: Ranks, copier: AsyncStager) -> Future:
    """Begin to write `path`, and return when `tensors` may change again. All ranks call it, with the same `plain`,
    after the write before has ended.

    `result()` of what it returns waits for the end and raises UserError, on every rank, where one could not write.
    """
    writer = _Writer(path, plain)
    begun = dcp.async_save(
        tensors, storage_writer=writer, async_stager=copier, process_group=ranks.writers, no_dist=ranks.writers is None
    )
    done: Future = Future()

    def finish(future: Future) -> None:
        error = future.exception()
        if error is None:
            done.set_result(path)
            return
        if ranks.rank == 0:
            shutil.rmtree(path, ignore_errors=True)  # a full disk needs the room
        done.set_exception(UserError(f"cannot write checkpoint {path}: {_reason(error)}"))

    cast(Future, begun).add_done_callback(finish)
    return done


class _Writer(dcp.FileSystemWriter):
    """DCP's writer of files, which also sums them; the last thing it writes is SUMS."""

    def __init__(self, path: Path, plain: dict[str, Any]):
        super().__init__(path, thread_count=FILES)
        self.folder, self.plain = Path(path), plain

    def prepare_local_plan(self, plan):
        return plan  # the folder is made below, by one rank

    def prepare_global_plan(self, plans):
        shutil.rmtree(self.folder, ignore_errors=True)  # left by a killed run
        self.folder.mkdir(parents=True)
        return super().prepare_global_plan(plans)

    def write_data(self, plan, planner):
        files = self.fs = _Summed()
        try:
            written = super().write_data(plan, planner)
        except Exception as error:
            raise (files.errors or [error])[0] from None
        finally:
            self.fs = FileSystem()
        if files.errors:
            raise files.errors[0]
        # The sums travel to rank 0 with what DCP tells it of the tensors.
        return written.then(lambda future: [*future.value(), WriteResult(MetadataIndex(SUMS), 0, files.sums)])

    def finish(self, metadata, results):
        sums: dict[str, str] = {}
        for of_rank in results:
            sums |= of_rank.pop().storage_data
        super().finish(metadata, results)
        write_atomic(self.folder / PLAIN, json.dumps(self.plain).encode())
        sums |= {name: _sum(self.folder / name) for name in (INDEX, PLAIN)}
        write_atomic(self.folder / SUMS, "".join(f"{sums[name]}  {name}\n" for name in sorted(sums)).encode())
        sync_folder(self.folder.parent)


class _Summed(FileSystem):
    """Files whose SHA-256 is taken as they are written. DCP's threads forget what goes wrong in them: it is kept."""

    def __init__(self) -> None:
        self.sums: dict[str, str] = {}
        self.errors: list[Exception] = []

    @contextmanager
    def create_stream(self, path, mode: str) -> Iterator[Any]:
        try:
            with super().create_stream(path, mode) as file:
                stream = _Stream(file)
                yield stream
            self.sums[Path(path).name] = stream.sum.hexdigest()
        except Exception as error:
            self.errors.append(error)


class _Stream:
    """A file open for writing, from the first byte to the last, and the sum of what went into it."""

    def __init__(self, file: Any):
        self.file, self.sum = file, hashlib.sha256()

    def write(self, data: Any) -> int:
        self.sum.update(data)
        return self.file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


class _Reader(dcp.FileSystemReader):
    """DCP's reader of the tensors of `index`, several files at a time."""

    def __init__(self, path: Path, index: Metadata):
        super().__init__(path)
        self.index = index

    def read_metadata(self) -> Metadata:  # without keywords, for which DCP tries a second way, by plain pickle
        return self.index

    def read_data(self, plan, planner):
        files = defaultdict(list)
        for item in plan.items:
            files[self.storage_data[item.storage_index].relative_path].append(item)
        read = super().read_data
        with ThreadPoolExecutor(FILES) as pool:
            list(pool.map(lambda items: read(replace(plan, items=items), planner), files.values()))
        return read(replace(plan, items=[]), planner)


def _sum(path: Path) -> str | None:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None


def _reason(error: BaseException) -> str:
    """One line for what went wrong on the first rank that failed."""
    if isinstance(error, CheckpointException) and error.failures:
        error = error.failures[min(error.failures)][0]
    return why(error) if isinstance(error, OSError) else " ".join(f"{type(error).__name__}: {error}".split())[:200]
