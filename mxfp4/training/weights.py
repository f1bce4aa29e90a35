"""The trained weights of a run, kept for use elsewhere: a folder that other programs read too.

    runs/weights/<scale>/<run id>/
        model.safetensors   FP32 master weights under the model's own names; metadata "config": the run's, as JSON
        tokenizer.json      of the corpus, where it has one

Written beside its place and renamed, so it is whole or not there. A run leaves it only when asked to
(`mxfp4 train --keep-weights`): weights of the book's runs are never committed.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from mxfp4.errors import UserError
from mxfp4.numerics.ops.fp8_delayed import BUFFERS
from mxfp4.training.checkpoints import checkpoint
from mxfp4.training.checkpoints.durable_files import why
from mxfp4.training.config import TrainConfig
from mxfp4.training.execution.distributed import ALONE
from mxfp4.training.model import Llama

FILE = "model.safetensors"
TOKENIZER = "tokenizer.json"


@dataclass(frozen=True)
class Weights:
    """A model off the trainer."""

    config: TrainConfig
    """The run's."""
    tensors: dict[str, Tensor]
    """The state_dict of `Llama`, on the CPU."""
    step: int | None
    """The step of a checkpoint; None for a finished run."""
    tokenizer: Path | None
    """Its tokenizer.json, where it was kept beside the weights."""


def save(folder: Path, model: nn.Module, config: TrainConfig, tokenizer: Path | None = None) -> None:
    """Keep the weights of `model`, gathered if it is sharded (then every rank calls this, and the first writes).

    Raises UserError, leaving nothing half-written, when they cannot be written.
    """
    if hasattr(model, "reshard"):
        model.reshard()  # after an evaluation FSDP leaves the root's parameters gathered, not those that are trained
    tensors = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if not tensors:  # another rank than the first
        return
    tensors = {name: t.contiguous() for name, t in _weights(tensors).items()}
    if config.model.tie_embeddings:
        tensors.pop("output.weight", None)  # one tensor; the format refuses a second name for it
    work = folder.parent / f".{uuid.uuid4().hex}.tmp"
    try:
        work.mkdir(parents=True)
        save_file(tensors, work / FILE, metadata={"format": "pt", "config": json.dumps(config.to_dict())})
        if tokenizer is not None:
            shutil.copyfile(tokenizer, work / TOKENIZER)
        for path in work.iterdir():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        shutil.rmtree(folder, ignore_errors=True)
        work.rename(folder)
    except (OSError, SafetensorError) as error:
        full = "No space left" in str(error)
        reason = why(error) if isinstance(error, OSError) else "the disk is full" if full else str(error)
        raise UserError(f"cannot write weights {folder}: {reason}") from None
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _weights(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state_dict without the histories of delayed scaling, which belong to training in that recipe alone."""
    return {name: t for name, t in tensors.items() if name.rpartition(".")[2] not in BUFFERS}


def tokenizer_of(corpus: object) -> Path | None:
    """The tokenizer.json of a packed corpus; None for one that has none."""
    folder = getattr(corpus, "folder", None)
    return folder / TOKENIZER if folder is not None and (folder / TOKENIZER).is_file() else None


def kept(folder: Path) -> bool:
    """Whether `folder` holds kept weights."""
    return (folder / FILE).is_file()


def load(folder: Path) -> Weights:
    """From a folder of kept weights, or of a run's checkpoints (the newest whole one). Raises UserError."""
    if kept(folder):
        try:
            with safe_open(folder / FILE, framework="pt") as file:
                config = TrainConfig.from_dict(json.loads((file.metadata() or {})["config"]))
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no dict)
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise UserError(f"{folder / FILE} is damaged or not of a run ({error})") from None
        tokenizer = folder / TOKENIZER
        return Weights(config, tensors, None, tokenizer if tokenizer.is_file() else None)
    found = checkpoint.newest(checkpoint.entries(folder), _from_checkpoint)
    if found is None:
        raise UserError(f"{folder} holds neither {FILE} nor a whole checkpoint")
    step, (config, tensors) = found
    return Weights(config, tensors, step, None)


def _from_checkpoint(path: Path) -> tuple[TrainConfig, dict[str, Tensor]]:
    from mxfp4.training.checkpoints import dcp_folder  # slow to import

    if problem := dcp_folder.problem(path, ALONE):
        raise checkpoint.Damaged(problem)
    config = TrainConfig.from_dict(checkpoint.plain(path)["config"])
    with torch.device("meta"):
        names = {name: p.shape for name, p in Llama(config.model).named_parameters()}
    tensors = {name: torch.empty(shape) for name, shape in names.items()}
    dcp_folder.read(path, {f"model.{name}": t for name, t in tensors.items()}, ALONE)
    return config, tensors
