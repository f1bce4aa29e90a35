"""`mxfp4 trial`: tests an idea for a recipe by a fixed quick protocol, beside the recorded reference arms.

On a GPU an arm takes minutes: the setting of part `short` of the registered study. On the CPU the same command trains a
toy, a minute or two an arm, whose figures say nothing about large models.

mxfp4 trial mxfp4+h32 --seeds 0 1 2
mxfp4 trial my-recipe.json        # what Recipe.to_json writes, with a name of its own
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mxfp4.analysis.registered_study.estimates import Estimate
    from mxfp4.analysis.registered_study.trial import Row, Trial

EPILOG = "exit code: 0, 1 when an arm could not be trained, 130 when stopped before the end (run it again to go on)"


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Register the sub-command."""
    parser = subparsers.add_parser(
        "trial", help="test a recipe by a fixed quick protocol", description=__doc__, epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("recipes", nargs="+", metavar="RECIPE", help="a recipe's name, or the path of a JSON file")
    parser.add_argument(
        "--seeds", nargs="+", type=int, default=[0], metavar="S", help="seeds of each recipe (default: 0)"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: the GPU, or the CPU where there is none")
    parser.add_argument("--jobs", type=int, metavar="N", help="arms at a time on each device (default: the scale's)")
    parser.add_argument("--max-minutes", type=float, metavar="M", help="stop after M minutes, with checkpoints")
    parser.add_argument("--json", action="store_true", help="print the table as JSON, and nothing else on stdout")
    parser.set_defaults(handler=run)


def run(args: argparse.Namespace) -> int:
    """Exit code: see EPILOG."""
    import torch

    from mxfp4.analysis.registered_study.trial import run_trial
    from mxfp4.directories import runs_dir
    from mxfp4.errors import UserError
    from mxfp4.studies.machine import default_device

    device = torch.device(args.device) if args.device else default_device()
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: there is no GPU here; --device cpu trains a toy")
    trial = run_trial(args.recipes, seeds=args.seeds, device=device, jobs=args.jobs, max_minutes=args.max_minutes)
    if trial.summary.paused or trial.summary.left:
        print(trial.summary, file=sys.stderr)
        return 130
    paths = _write_chart(trial, runs_dir() / "trials")
    if args.json:
        print(json.dumps({**as_json(trial), "charts": [str(path) for path in paths]}, indent=1, allow_nan=False))
    else:
        print(as_text(trial))
        print("".join(f"\nchart: {path}" for path in paths))
    for name, reason in trial.summary.failed.items():
        print(f"error: {name} could not be trained: {reason}", file=sys.stderr)
    return 1 if trial.summary.failed else 0


def _write_chart(trial: Trial, folder: Path) -> list[Path]:
    """The paths written; none without a recipe on trial, or, with a line on stderr, the packages for charts."""
    if not any(row.trial for row in trial.rows):
        return []
    try:
        from mxfp4.pages.trial_chart import write
    except ModuleNotFoundError as error:
        print(f"no chart: {error.name} is missing; `pip install 'mxfp4[book]'` brings it", file=sys.stderr)
        return []
    return write(trial, folder)


def as_text(trial: Trial) -> str:
    """The table: an asterisk marks the recipes on trial."""
    from mxfp4.analysis.registered_study.trial import BASE, FORWARDS, QUANTIZED

    head = ["", "recipe", "seeds", "own forward", "BF16 forward", f"less {BASE}", f"less {QUANTIZED}"]
    lines = [head]
    for row in trial.rows:
        failed = _failed(row)
        cells = [failed, failed] if failed else [_cell(row.excess[forward], "") for forward in FORWARDS]
        less = ["" if base == row.recipe else _cell(row.less.get(base), "+") for base in (BASE, QUANTIZED)]
        lines.append(["*" if row.trial else "", row.recipe, _seeds(row.seeds), *cells, *less])
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    rows = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    about = (
        "Excess is the loss above the entropy of the source, in nats a token, after the decay. ± is half the 95 %\n"
        "interval over seeds. Differences are of own forwards, by paired seeds."
    )
    notes = [textwrap.fill(note, 116) for note in (*trial.notes, trial.resolution_text)]
    return "\n".join(filter(None, [trial.setting, trial.warning, about, "\n" + "\n".join(rows) + "\n", *notes]))


def _seeds(seeds: tuple[int, ...]) -> str:
    """ "0-5", or "0, 2"."""
    if len(seeds) > 2 and seeds == tuple(range(seeds[0], seeds[-1] + 1)):
        return f"{seeds[0]}-{seeds[-1]}"
    return ", ".join(map(str, seeds))


def _failed(row: Row) -> str:
    """ "diverged in 1 of 3"; empty where every seed finished."""
    words = sorted(set(row.failed.values()))
    return f"{' or '.join(words)} in {len(row.failed)} of {len(row.runs)}" if words else ""


def _cell(estimate: Estimate | None, sign: str) -> str:
    """ "+0.0123 ± 0.0045", without the interval where there is none."""
    if estimate is None or not estimate.n:
        return "–"
    if not math.isfinite(estimate.value):
        return "–" if math.isnan(estimate.value) else "failed"
    half = "" if math.isnan(estimate.high) else f" ± {estimate.high - estimate.value:.4f}"
    return f"{estimate.value:{sign}.4f}{half}"


def as_json(trial: Trial) -> dict:
    """The trial as plain data; numbers that are not finite are null."""
    config, resolution = trial.protocol.base, trial.resolution
    return {
        "toy": trial.protocol.toy, "warning": trial.warning, "setting": trial.setting, "unit": "nats a token",
        "weights": config.model.n_params_non_embedding(), "tokens": config.tokens, "source": config.corpus,
        "seeds": list(trial.seeds), "notes": list(trial.notes),
        "rows": [
            {
                "recipe": row.recipe, "on_trial": row.trial, "seeds": list(row.seeds), "failed": row.failed,
                "excess": {forward: _plain(e) for forward, e in row.excess.items()},
                "less": {base: _plain(e) for base, e in row.less.items()},
                "run_ids": [one.run_id for one in row.runs],
            }
            for row in trial.rows
        ],
        "smallest_difference": {
            "nats": _finite(resolution.nats(len(trial.seeds))), "seeds": len(trial.seeds), "power": 0.8,
            "scatter": _finite(resolution.scatter), "from": resolution.whence,
        },
    }  # fmt: skip


def _plain(estimate: Estimate) -> dict:
    return {"value": _finite(estimate.value), "low": _finite(estimate.low), "high": _finite(estimate.high),
            "p": _finite(estimate.p), "seeds": estimate.n, "note": estimate.note}  # fmt: skip


def _finite(x: float) -> float | None:
    return x if math.isfinite(x) else None
