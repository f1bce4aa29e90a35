"""`mxfp4 status`: what lies under runs/: records by scale, runs and packings that go on or were stopped.

Of each run its step of how many, loss, tokens/s and the time that is left, as its newest checkpoint says.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mxfp4.studies.progress import Progress
    from mxfp4.studies.store import Begun, Store


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Register the sub-command."""
    parser = subparsers.add_parser("status", help="records, and runs that go on or were stopped", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the same as JSON")
    parser.set_defaults(handler=run)


def run(args: argparse.Namespace) -> int:
    """Exit code 0."""
    from mxfp4.studies.store import Store

    state = _state(Store())
    print(json.dumps(_as_json(state), indent=1, allow_nan=False) if args.json else _as_text(state))
    return 0


def _state(store: Store) -> dict[str, Any]:
    """What lies under the store's folder: counts of records by scale, begun runs, unfinished packings."""
    from mxfp4.data.packing_state import unfinished
    from mxfp4.studies.progress import progress

    records = store.load()
    begun = store.begun()
    left_over = {(scale, run_id) for scale in {b.scale for b in begun} for run_id in store.left_over(scale)}

    def of(run_: Begun) -> tuple[Begun, Progress | None, bool]:
        left = run_.holder is None and (run_.scale, run_.run_id) in left_over
        return run_, None if left else progress(store.root / "checkpoints" / run_.scale / run_.run_id), left

    return {
        "root": store.root,
        "records": Counter((r.config.scale, r.outcome["status"]) for r in records),
        "begun": [of(b) for b in begun],
        "packings": unfinished(),
    }


def _as_json(state: dict[str, Any]) -> dict[str, Any]:
    scales = sorted({scale for scale, _ in state["records"]})
    return {
        "runs": str(state["root"]),
        "records": {
            scale: {status: n for (s, status), n in sorted(state["records"].items()) if s == scale} for scale in scales
        },
        "begun": [
            {**asdict(run_), "progress": asdict(at) if at else None, "left_over": left}
            for run_, at, left in state["begun"]
        ],
        "packings": [{"folder": name, "parts": parts, "last": last} for name, parts, last in state["packings"]],
    }


def _as_text(state: dict[str, Any]) -> str:
    from mxfp4.studies.progress import text

    lines, by_scale = [f"runs: {state['root']}"], state["records"]
    for scale in sorted({scale for scale, _ in by_scale}):
        total = sum(n for (name, _), n in by_scale.items() if name == scale)
        early = [f", {n} of them {how}" for how in ("diverged", "stalled") if (n := by_scale[scale, how])]
        lines.append(f"scale {scale}: {total} records" + "".join(early))
    for run_, at, left in state["begun"]:
        where, holder = f"at step {run_.step}", run_.holder or "stopped"
        if left:
            holder = "finished: left by a crash, the next `mxfp4 train` of this scale removes it"
        elif at:
            where = text(at)
        elif not run_.step:
            where = "no checkpoint yet"
        lines.append(f"scale {run_.scale}: {run_.run_id} {where}, {holder}")
    for name, parts, last in state["packings"]:
        lines.append(f"packing {name}: {parts} parts done, the last {last}; `mxfp4 prepare` goes on there")
    if not (by_scale or state["begun"] or state["packings"]):
        lines.append("no runs yet: start with `mxfp4 train --scale cpu`")
    return "\n".join(lines)
