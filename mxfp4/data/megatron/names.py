"""Names of corpora of Megatron datasets, `megatron:PREFIX[,VALIDATION_PREFIX][,samples=N]`, apart from what reads them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from mxfp4.errors import UserError

NAME = "megatron"
SAMPLES = 1_200_000 * 32
"""Samples of the MLPerf reference's schedule: its max_steps times its batch."""
EXAMPLE = "megatron:/data/train_text_document,/data/validation_text_document"


@dataclass(frozen=True)
class Files:
    """What a name of a corpus says."""

    name: str
    train: Path
    validation: Path | None
    samples: int


def is_megatron(name: object) -> bool:
    """Whether `name` is one of a corpus of Megatron datasets."""
    return isinstance(name, str) and name.partition(":")[0] == NAME


def parse(name: str) -> Files:
    """What `name` says. UserError where it is malformed."""
    prefixes, samples = [], SAMPLES
    for part in name.partition(":")[2].split(","):
        if match := re.fullmatch(r"samples=([1-9][0-9]*)", part):
            samples = int(match[1])
        else:
            prefixes.append(Path(part))
    if not 1 <= len(prefixes) <= 2:
        raise UserError(f"corpus {name!r}: one or two prefixes are allowed, as in {EXAMPLE}")
    for prefix in prefixes:
        if not prefix.is_absolute():
            raise UserError(f"corpus {name!r}: {str(prefix)!r} is no absolute path; name prefixes as in {EXAMPLE}")
        if prefix.suffix in (".bin", ".idx"):
            raise UserError(
                f"corpus {name!r}: name the prefix {str(prefix.with_suffix(''))!r}, without {prefix.suffix}"
            )
    return Files(name, prefixes[0], prefixes[1] if len(prefixes) == 2 else None, samples)
