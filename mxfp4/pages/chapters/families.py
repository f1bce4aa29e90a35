"""The page of model families: its table, from what `mxfp4 bench families` wrote into runs/bench."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from mxfp4.errors import UserError
from mxfp4.pages.chapters.kernels import read

COMMAND = "mxfp4 bench families --json runs/bench/families.json"


def frame(record: str = "families") -> pd.DataFrame:
    """A row a family: family, model, weights and flops (shares), left_out (text), trained (the losses of both steps),
    reloaded and repeated ("yes" or "no").

    Raises UserError where there is no record, or one with a family that failed.
    """
    rows = _rows(record)
    failed = [row for row in rows if "problem" in row]
    if failed:
        raise UserError(
            f"runs/bench/{record}.json: {failed[0]['name']} failed ({failed[0]['problem']}); run `{COMMAND}` again"
        )
    return pd.DataFrame([
        {
            "family": row["family"], "model": row["model"], "weights": row["weights"], "flops": row["flops"],
            "left_out": "; ".join(_layers(what) + f" {share:.1%}" for what, share in row["left_out"].items()) or "nothing",
            "trained": " to ".join(f"{loss:.2f}" for loss in row["losses"]),
            "reloaded": _answer(row["reloaded"]), "repeated": _answer(row["repeated"]),
        }
        for row in rows
    ])  # fmt: skip


def answer(record: str = "families") -> str:
    """The table in a sentence."""
    rows = _rows(record)
    works = sum(row.get("correct") is True for row in rows)
    least = min((row for row in rows if "weights" in row), key=lambda row: row["weights"])
    first = rows[0]
    return (
        f"{works} of {len(rows)} families train with {first['recipe']}, come back from a saved folder with the same "
        f"outputs and give them twice (transformers {first['transformers']}). At least {least['weights']:.1%} of the "
        f"matrix weights are quantized in each; {least['family']} has the smallest share."
    )


def _rows(record: str) -> list[dict]:
    data = read(record)
    if not isinstance(data, dict) or not data.get("rows"):
        raise UserError(f"runs/bench/{Path(record).name}.json does not exist: `{COMMAND}` writes it")
    return data["rows"]


def _layers(what: str) -> str:
    """`a.b.lm_head: output head (how it was told)` as `lm_head (output head)`."""
    name, _, reason = what.partition(": ")
    last = name.removesuffix(".weight").rpartition(".")[2]
    short = "router" if reason == "gate beside experts" else reason.partition(" (")[0].partition(": ")[0]
    return last if last == short else f"{last} ({short})"


def _answer(holds: bool) -> str:
    return "yes" if holds else "no"
