"""`mxfp4 status`: what lies under runs/: records by scale, runs and packings that go on or were stopped.

Of each run its step of how many, loss, tokens/s and the time that is left, as its newest checkpoint says.
"""

from __future__ import annotations

import argparse
from collections import Counter


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Register the sub-command."""
    parser = subparsers.add_parser("status", help="records, and runs that go on or were stopped", description=__doc__)
    parser.set_defaults(handler=run)


def run(args: argparse.Namespace) -> int:
    """Exit code 0."""
    from mxfp4.data.packing_state import unfinished
    from mxfp4.studies.progress import progress, text
    from mxfp4.studies.store import Store

    store = Store()
    print(f"runs: {store.root}")
    records = store.load()
    by_scale = Counter((r.config.scale, r.outcome["status"]) for r in records)
    for scale in sorted({r.config.scale for r in records}):
        finished, diverged = by_scale[scale, "finished"], by_scale[scale, "diverged"]
        print(f"scale {scale}: {finished + diverged} records" + (f", {diverged} of them diverged" if diverged else ""))
    begun = store.begun()
    left_over = {(scale, run_id) for scale in {b.scale for b in begun} for run_id in store.left_over(scale)}
    for run_ in begun:
        where, state = f"at step {run_.step}", run_.holder or "stopped"
        if run_.holder is None and (run_.scale, run_.run_id) in left_over:
            state = "finished: left by a crash, the next `mxfp4 train` of this scale removes it"
        elif at := progress(store.root / "checkpoints" / run_.scale / run_.run_id):
            where = text(at)
        elif not run_.step:
            where = "no checkpoint yet"
        print(f"scale {run_.scale}: {run_.run_id} {where}, {state}")
    packings = unfinished()
    for name, parts, last in packings:
        print(f"packing {name}: {parts} parts done, the last {last}; `mxfp4 prepare` goes on there")
    if not records and not begun and not packings:
        print("no runs yet: start with `mxfp4 train --scale cpu`")
    return 0
