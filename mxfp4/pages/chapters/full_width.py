"""The demonstration at the paper's width, from a file that `tests/gpu/width.py --json` writes into runs/bench: a few layers
of Llama 3.1-8B, trained, killed, and taken up by another number of GPUs."""

from __future__ import annotations

import pandas as pd

from mxfp4.pages.chapters import kernels as kernel_tables

COLUMNS = ("recipe", "gpus", "steps", "tokens_per_second", "peak", "estimated", "off", "end")


def frame(name: str) -> pd.DataFrame:
    """A row a run: recipe, gpus, steps ("110 to 200"), tokens_per_second, peak of allocated memory and the dry run's
    estimate (GiB a GPU), off (peak over estimate, less 1), end (how it ended). Empty where `name` was not run."""
    data = kernel_tables.read(name)
    rows = []
    for r in data["rows"] if data else []:
        peak, expected = max(r["peak_bytes"]) / 2**30, r["estimated_bytes"] / 2**30
        killed = "killed" in r
        rows.append({
            "recipe": r["recipe"], "gpus": r["ranks"], "steps": f"{r['from']} to {r['killed'] if killed else r['last']}",
            "tokens_per_second": r["tokens_per_second"], "peak": peak, "estimated": expected, "off": peak / expected - 1,
            "end": f"killed; checkpoint of step {r['saved']} whole" if killed else f"{r['status']}, loss {r['loss']:.3f}",
        })  # fmt: skip
    return pd.DataFrame(rows, columns=COLUMNS)


def sentence(name: str) -> str:
    """What was run on what, and what saving a checkpoint took."""
    data, table = kernel_tables.read(name), frame(name)
    if table.empty:
        return f"Not run here: `python tests/gpu/width.py --json runs/bench/{name}.json` does it on one GPU or two."
    first, machine = data["rows"][0], data["machine"]
    saved = [r["checkpoint"] for r in data["rows"] if r["checkpoint"]]
    worst = max(table["off"].abs().max(), 0.001)  # finer than that is chance
    said = (
        f"{first['layers']} layers, sequences of {first['seq_len']:,} tokens, {first['tokens_per_step']:,} tokens a step, on "
        f"{machine['device']} (FP8 {machine['fp8_path']}, FP4 {machine['path']}; PyTorch {machine['torch']}). The peaks lie "
        f"within {100 * worst:.1f} % of the dry run's estimates."
    )
    if saved:
        waits, wholes = ([c[name] for c in saved] for name in ("a step waited", "written after"))
        said += (
            f" For a checkpoint a step waited {min(waits):.1f} to {max(waits):.1f} s; it was whole {min(wholes):.1f} to "
            f"{max(wholes):.1f} s after it was begun, training going on."
        )
    return said + (f" The figures are {data['note']}." if "note" in data else "")
