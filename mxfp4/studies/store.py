"""The run store: one record for each arm and seed, keyed by what determines the result.

    runs/records/<scale>/<run id>/   record.json, curve.parquet; where there is something to say: probes, branches,
                                     evaluations, windows.parquet
    runs/checkpoints/<scale>/<run id>/   of a run that goes on, with its lock
    runs/weights/<scale>/<run id>/   what was trained, where it was asked for
    runs/logs/<scale>/<run id>/   the log of a run, its traces, its event files
    runs/replaced/<scale>/<run id>-1/, ...   records of arms that were then run anew
    runs/logs/<scale>/   failures.log of the queue; stacks and flight recorders of attempts that failed

The key is the SHA-256 of configuration, device type, GEMM paths, on chips that multiply FP4 themselves the back end that
does, and SEMANTICS_VERSION, so a record is found
again by what it says and by nothing else, and merging two stores is copying directories. A record is
written into a hidden folder, record.json (with the hashes of its tables) last, synced, and renamed: one
that is half written or damaged is named in a warning and never read as whole. The tables are plain parquet
for pandas and `datasets`; in the files each row also carries the run id, the arm (its recipe's name) and the seed, so
that many can be read as one. No file is empty.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
import uuid
import warnings
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pandas as pd
import torch

import mxfp4
from mxfp4.diagnostics.probe import COLUMNS as PROBE_COLUMNS
from mxfp4.directories import runs_dir
from mxfp4.errors import Notice, UserError
from mxfp4.layers.recipe import recipe, shown_name
from mxfp4.locks import Lock
from mxfp4.numerics.gemm_backends.choice import CHOICES, gemm_backend, matmul_path
from mxfp4.numerics.native import PATHS, fp8_path
from mxfp4.studies.machine import default_device, git_state, machine
from mxfp4.training import weights
from mxfp4.training.checkpoints import checkpoint, durable_files
from mxfp4.training.config import TrainConfig
from mxfp4.training.protocols import TrainResult

EVALUATION_COLUMNS = ("branch", "step", "tokens", "forward", "windows", "loss", "top1", "copy_top1")
AGAIN = "again"
"""A file beside the checkpoints of a run that has a record and is trained again for its weights."""
ENDINGS = ("finished", "diverged", "stalled")
"""How a run that has a record ended (`training.divergence`)."""
FORMAT = 1
TABLES = ("curve", "probes", "branches", "evaluations", "windows")
"""Tables a record may have; it always has the first."""
ABOUT_RUN = ["run_id", "arm", "seed"]
FLOAT32 = ["train_loss", "grad_norm"]
"""Columns that the device computes in FP32: kept so."""
_SCALE = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")


@dataclass(frozen=True)
class Record:
    """A finished run on disk."""

    folder: Path
    data: dict
    """record.json."""

    @property
    def run_id(self) -> str:
        return self.folder.name

    @cached_property
    def config(self) -> TrainConfig:
        return TrainConfig.from_dict(self.data["config"])

    @property
    def key(self) -> str:
        return self.data["key"]

    @property
    def outcome(self) -> dict:
        """Status ("finished", "diverged" or "stalled"), step, tokens, reason, final_loss, final_bpb, target, `replayed` if any."""
        return self.data["outcome"]

    @property
    def window_losses(self) -> list[float]:
        """Mean loss of each window of the last evaluation, nats a token; the windows of a study are the same. Empty in
        records from before it was kept."""
        return self.windows["own"].tolist() if "own" in self.windows else self.data.get("window_losses", [])

    @property
    def machine(self) -> dict:
        return self.data["machine"]

    @property
    def paths(self) -> tuple[str, str]:
        """(matmul_path, fp8_path) of the device; records from before the second was decided have one for both."""
        return _paths_of(self.machine)

    @property
    def gemm_backend(self) -> str | None:
        """What multiplied packed FP4; None where nothing did."""
        return _backend_of(self.machine)

    @property
    def timings(self) -> dict:
        """Seconds and tokens/s; `tokens_per_second` may be None for a run too short to time."""
        return self.data["timings"]

    @cached_property
    def curve(self) -> pd.DataFrame:
        """step, tokens, train_loss, grad_norm, lr, eval_loss (nats a token, NaN where not evaluated),
        eval_bpb, ..."""
        return self._table("curve")

    @cached_property
    def probes(self) -> pd.DataFrame:
        """Tidy: step, recipe, layer, gemm, tensor, metric, value; no rows for an arm that was not probed."""
        return self._table("probes", PROBE_COLUMNS)

    @cached_property
    def evaluations(self) -> pd.DataFrame:
        """One row an evaluation and forward: see `TrainResult.evaluations`; no rows in records from before it was kept."""
        return self._table("evaluations", EVALUATION_COLUMNS)

    @cached_property
    def branches(self) -> pd.DataFrame:
        """Branch and the columns of `curve`; no rows for a run without branches."""
        return self._table("branches", ["branch", *self.curve.columns])

    @cached_property
    def windows(self) -> pd.DataFrame:
        """Mean loss of each window of the evaluations that end a decay, one column a forward: see `TrainResult.windows`."""
        return self._table("windows", [])

    def _table(self, name: str, columns: Sequence[str] = ()) -> pd.DataFrame:
        """A table of this record; without rows, and with `columns`, where the record has none of that name."""
        if name not in self.data["sha256"]:
            return pd.DataFrame(columns=list(columns))
        frame = pd.read_parquet(self.folder / f"{name}.parquet").drop(columns=ABOUT_RUN, errors="ignore")
        return frame.astype({c: "float64" for c in FLOAT32 if c in frame})


@dataclass(frozen=True)
class Begun:
    """A run that has a checkpoint or a holder."""

    scale: str
    run_id: str
    step: int
    holder: str | None
    """"pid 123 on name" while a process trains it."""


class Store:
    """The store under `root` (default: runs/)."""

    def __init__(self, root: Path | str | None = None):
        self.root = Path(root) if root is not None else runs_dir()

    def key(self, config: TrainConfig, device: torch.device | str | None = None) -> str:
        """64 hex digits. device: None is the GPU if there is one; its type, GEMM paths and back end count."""
        device = torch.device(device) if device is not None else default_device()
        paths = _paths(device)
        return _key(config, device.type, paths, mxfp4.SEMANTICS_VERSION, _backend(device, paths))

    def run_id(self, config: TrainConfig, device: torch.device | str | None = None) -> str:
        """<recipe>-s<seed>-<12 digits of the key>: a safe file name whatever the recipe is called."""
        return _run_id(config, self.key(config, device))

    def folder(self, config: TrainConfig, device: torch.device | str | None = None) -> Path:
        return self.root / "records" / safe_scale(config.scale) / self.run_id(config, device)

    def checkpoint_dir(self, config: TrainConfig, device: torch.device | str | None = None) -> Path:
        return self.root / "checkpoints" / safe_scale(config.scale) / self.run_id(config, device)

    def weights_dir(self, config: TrainConfig, device: torch.device | str | None = None) -> Path:
        """Where `mxfp4 train --keep-weights` leaves what was trained."""
        return self.root / "weights" / safe_scale(config.scale) / self.run_id(config, device)

    def log_file(self, scale: str) -> Path:
        """Where the queue writes what failed, was tried again or stalled."""
        return self.root / "logs" / safe_scale(scale) / "failures.log"

    def trace_dir(self, config: TrainConfig, device: torch.device | str | None = None) -> Path:
        """Where one attempt at an arm that begins now leaves stacks and flight recorders if it fails."""
        began = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
        return self.log_file(config.scale).parent / f"{self.run_id(config, device)}-{began}"

    def log_dir(self, config: TrainConfig, device: torch.device | str | None = None) -> Path:
        """Where a run is logged (`training.monitoring`)."""
        return self.root / "logs" / safe_scale(config.scale) / self.run_id(config, device)

    def get(self, config: TrainConfig, device: torch.device | str | None = None) -> Record | None:
        """The whole record of this arm, or None; of a GPU where there is none, whichever way its products went."""
        device = torch.device(device) if device is not None else default_device()
        here = device.type != "cuda" or torch.cuda.is_available()
        ways = [(paths, name) for paths in PATHS for name in (_BACKENDS if paths[0] == "native" else (None,))]
        if here:
            ways = [((paths := _paths(device)), _backend(device, paths))]
        for paths, name in ways:
            key = _key(config, device.type, paths, mxfp4.SEMANTICS_VERSION, name)
            record = _read(self.root / "records" / safe_scale(config.scale) / _run_id(config, key))
            if record is not None and record.key == key:
                return record
        return None

    def put(
        self,
        config: TrainConfig,
        result: TrainResult,
        device=None,
        *,
        corpus: str | None = None,
        origin: dict | None = None,
    ) -> Record:
        """Store what `train` gave, all or nothing; an existing whole record of the arm is kept and returned.

        corpus: fingerprint of the tokens. origin: where they come from, such as the hub's revisions. Raises UserError for a paused run and when the disk is full.
        """
        if result.outcome["status"] not in ENDINGS:
            raise UserError(
                f"a run with status {result.outcome['status']!r} has no record yet; allowed: {', '.join(ENDINGS)}"
            )
        device = torch.device(device) if device is not None else default_device()
        final = self.folder(config, device)
        work = final.parent / f".{uuid.uuid4().hex}.tmp"
        try:
            work.mkdir(parents=True)
            hashes = {}
            for name, rows in zip(TABLES, _tables(result), strict=True):
                if not len(rows):
                    continue
                frame = pd.DataFrame(rows)
                frame = frame.astype({c: "float32" for c in FLOAT32 if c in frame and name != "evaluations"})
                frame = frame.assign(
                    run_id=self.run_id(config, device), arm=shown_name(config.recipe), seed=config.seed
                )
                frame.to_parquet(work / f"{name}.parquet", index=False, compression="zstd")
                hashes[name] = _sha256(work / f"{name}.parquet")
            data = {
                "format": FORMAT,
                "key": self.key(config, device),
                "config": config.to_dict(),
                "recipe": json.loads(recipe(config.recipe).to_json()),
                "outcome": result.outcome,
                "window_losses": [] if result.windows else [round(loss, 6) for loss in result.window_losses],
                "corpus": corpus,
                **({"corpus_origin": origin} if origin else {}),
                "semantics_version": mxfp4.SEMANTICS_VERSION,
                "package_version": mxfp4.__version__,
                "git": git_state(),
                "machine": machine(device),
                "timings": result.timings,
                "sha256": hashes,
            }
            durable_files.write_atomic(work / "record.json", json.dumps(data, indent=1).encode() + b"\n")
            for name in hashes:
                _sync_file(work / f"{name}.parquet")
            self._place(work, final)
        except OSError as error:
            raise UserError(f"cannot write record {final}: {durable_files.why(error)}; nothing was changed") from None
        finally:
            shutil.rmtree(work, ignore_errors=True)
        record = _read(final)
        assert record is not None, f"{final} was just written"
        return record

    def set_aside(self, config: TrainConfig, device: torch.device | str | None = None) -> Path | None:
        """Move an arm's record to runs/replaced, so that it is missing and can be run anew; where it lies now, None
        without a record. Raises UserError while another process trains the arm."""
        lock = self.lock(config, device)
        if not lock.acquire():
            raise UserError(f"{self.run_id(config, device)} is in work ({lock.holder()}): its record stays")
        try:
            record = self.get(config, device)
            if record is None:
                return None
            folder = self.root / "replaced" / safe_scale(config.scale)
            folder.mkdir(parents=True, exist_ok=True)
            number = 1
            while (to := folder / f"{record.run_id}-{number}").exists():
                number += 1
            record.folder.rename(to)
            durable_files.sync_folder(folder)
            return to
        finally:
            lock.release()

    def _place(self, work: Path, final: Path) -> None:
        if final.exists() and _read(final) is None:  # damaged: make room
            final.rename(final.parent / f".{uuid.uuid4().hex}.damaged")
        try:
            work.rename(final)
        except OSError:
            if _read(final) is None:  # else another process stored the same arm first
                raise
        durable_files.sync_folder(final.parent)

    def load(self, scale: str | None = None) -> list[Record]:
        """Whole records of the current SEMANTICS_VERSION, of one scale or all, sorted by scale and run id; of equal keys
        the first. Damaged records, and how many are of another version, are warned about.
        """
        found: dict[str, Record] = {}
        other_version = 0
        for folder in self._folders(scale):
            record = _read(folder)
            if record is None:
                continue
            if record.data["semantics_version"] != mxfp4.SEMANTICS_VERSION:
                other_version += 1
                continue
            found.setdefault(record.key, record)
        if other_version:
            warnings.warn(
                f"{other_version} records in {self.root} are of another semantics version than "
                f"{mxfp4.SEMANTICS_VERSION} and are left out: `mxfp4 train` makes them again",
                Notice,
                stacklevel=2,
            )
        return list(found.values())

    def lock(self, config: TrainConfig, device: torch.device | str | None = None) -> Lock:
        """The lock under which an arm is trained."""
        folder = self.checkpoint_dir(config, device)
        return Lock(folder.parent / f"{folder.name}.lock")

    def begun(self) -> list[Begun]:
        """Runs in work or stopped, sorted."""
        root = self.root / "checkpoints"
        names = {(p.parent.name, p.name.removesuffix(".lock")) for p in root.glob("*/*")}
        found = []
        for scale, run_id in sorted(names):
            # The holder first: a run that stops in between has left its checkpoint by then.
            holder = Lock(root / scale / f"{run_id}.lock").holder()
            step = checkpoint.latest_step(root / scale / run_id)
            if step is not None or holder is not None:
                found.append(Begun(scale, run_id, step or 0, holder))
        return found

    def left_over(self, scale: str) -> list[str]:
        """Ids of finished runs that have checkpoints still, as a crash came before their removal."""
        found = []
        for folder in sorted((self.root / "checkpoints" / safe_scale(scale)).glob("*/")):
            again = (folder / AGAIN).exists() and not weights.kept(self.root / "weights" / scale / folder.name)
            if checkpoint.entries(folder) and not again and _read(self.root / "records" / scale / folder.name):
                found.append(folder.name)
        return found

    def remove_left_over(self, scale: str, *, but: Container[str] = ()) -> list[str]:
        """Remove what is `left_over`, of no run in `but` and of none that a process is at; the ids of those removed."""
        removed = []
        for run_id in self.left_over(scale):
            folder = self.root / "checkpoints" / scale / run_id
            lock = Lock(folder.parent / f"{run_id}.lock")
            if run_id in but or not lock.acquire():
                continue
            try:
                self.remove_checkpoints(folder)
            finally:
                lock.release()
            removed.append(run_id)
        return removed

    @staticmethod
    def remove_checkpoints(folder: Path) -> None:
        """Of a finished run, after its record is stored."""
        (folder / AGAIN).unlink(missing_ok=True)
        checkpoint.remove(folder)

    def _folders(self, scale: str | None) -> Iterator[Path]:
        root = self.root / "records"
        for folder in sorted(root.glob(f"{safe_scale(scale) if scale else '*'}/*")):
            if folder.is_dir() and not folder.name.startswith("."):
                yield folder


def _tables(result: TrainResult) -> tuple[Sequence | pd.DataFrame, ...]:
    """The rows of each of TABLES."""
    windows = pd.DataFrame({k: pd.Series(v, dtype="float32") for k, v in result.windows.items()})
    return result.curve, result.probes, result.branches, result.evaluations, windows


def safe_scale(name: str) -> str:
    """`name`, if it can be a folder's name. UserError otherwise."""
    if not _SCALE.fullmatch(name):
        raise UserError(f"scale {name!r} is not a name: allowed are 1 to 32 of a-z, 0-9, _ and -")
    return name


def _run_id(config: TrainConfig, key: str) -> str:
    slug = re.sub(r"[^a-z0-9]+", "-", shown_name(config.recipe).lower()).strip("-")[:64] or "run"
    return f"{slug}-s{config.seed}-{key[:12]}"


def _paths(device: torch.device) -> tuple[str, str]:
    return matmul_path(device), fp8_path(device)


def _paths_of(machine: dict) -> tuple[str, str]:
    return machine["path"], machine.get("fp8_path", machine["path"])


_BACKENDS = (None, *CHOICES[1:-1])
"""What a native record may say of its back end; the first ones said nothing."""


def _backend(device: torch.device, paths: tuple[str, str]) -> str | None:
    return gemm_backend(device) if paths[0] == "native" else None


def _backend_of(machine: dict) -> str | None:
    return machine.get("gemm_backend") if machine["path"] == "native" else None


def _key(
    config: TrainConfig, device_type: str, paths: tuple[str, str], semantics_version: int, backend: str | None = None
) -> str:
    """paths: (matmul_path, fp8_path); the second counts where it is not the first, as elsewhere it never did.
    backend: what multiplies packed FP4, which decides in what order products are added; None where nothing does."""
    path, fp8 = paths
    what = {"config": config.key_dict(), "device": device_type, "path": path, "semantics": semantics_version}
    what |= {"fp8_path": fp8} if fp8 != path else {}
    what |= {"gemm_backend": backend} if backend is not None else {}
    return hashlib.sha256(json.dumps(what, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _read(folder: Path) -> Record | None:
    """The record in `folder` if it is there and whole; a damaged one is named in a warning."""
    if not folder.is_dir():
        return None
    problem = "has no readable record.json"
    try:
        data = json.loads((folder / "record.json").read_bytes())
        problem = "is not in a format this version reads"
        record = Record(folder, data)
        about, version = data["machine"], data["semantics_version"]
        problem = "does not have the key of what it holds"
        key = _key(record.config, about["device_type"], _paths_of(about), version, _backend_of(about))
        whole = data["format"] == FORMAT and key == record.key
        for name in data["sha256"]:
            if whole:
                problem = f"has a damaged {name}.parquet"
                whole = _sha256(folder / f"{name}.parquet") == data["sha256"][name]
        if whole:
            return record
    except (OSError, ValueError, KeyError, TypeError):
        pass
    remedy = f"restore the folder from a copy, or `mxfp4 train --scale {folder.parent.name}` makes it again"
    warnings.warn(f"record {folder} {problem}: left out; {remedy}", Notice, stacklevel=3)
    return None


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _sync_file(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
