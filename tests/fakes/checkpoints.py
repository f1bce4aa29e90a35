"""Checkpoints as a run leaves them, without a run."""

from __future__ import annotations

from pathlib import Path

import torch

from mxfp4.training.checkpoints import checkpoint, dcp_folder
from mxfp4.training.execution.distributed import ALONE


def leave(folder: Path, step: int, tensors: dict[str, torch.Tensor], plain: dict | None = None) -> Path:
    """Write a checkpoint to its end, by a process by itself, and drop all but the newest; its path."""
    path, copier = checkpoint.path_of(folder, step), dcp_folder.copier(torch.device("cpu"))
    dcp_folder.write(path, tensors, plain or {}, ALONE, copier).result()
    checkpoint.prune(folder)
    return path


def tensor_bytes(path: Path) -> dict[str, bytes]:
    """The bytes of a checkpoint's tensors, as its files hold them."""
    return {file.name: file.read_bytes() for file in path.glob("*.distcp")}
