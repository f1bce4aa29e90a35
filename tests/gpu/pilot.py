"""Pilot of source A: variants of its law, side by side on one GPU, with BF16 (or another recipe).

    python tests/gpu/pilot.py pilot.json --run '{"seed": 0}' --run '{"law": {"define": 0, "query": 0}, "seed": 1}'

A run is JSON: law (fields of mxfp4.data.known_entropy.Law that differ), recipe, seed, lr, steps, probe (true: a pair of
probes near the end). The file gets, for each, the evaluation curve, the floor, top-1 and answering accuracy and the mean
block kurtosis where it was probed. With it source and learning rate are chosen; it makes no record.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from dataclasses import replace

import pandas as pd
import torch


def train_one(run: dict, results) -> None:
    """Train one variant and put what it gave into the queue `results`."""
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "3"
    torch.set_num_threads(3)
    from mxfp4.data.known_entropy import KnownEntropy, Law
    from mxfp4.diagnostics.probe import Probe
    from mxfp4.studies.registered_arms import study_arms
    from mxfp4.training.loop import train

    started = time.monotonic()
    steps = run.get("steps", 1980)
    config = replace(
        study_arms("short")[0], recipe=run.get("recipe", "bf16"), seed=run.get("seed", 0), lr=run.get("lr", 3e-3), steps=steps,
        cooldown_steps=round(0.15 * steps), eval_every=max(steps // 12, 1), light_probe_steps=(), final_eval_sequences=1024,
        probe_steps=(steps - 20, steps - 19) if run.get("probe") else (), final_forwards=(), decay_recipes=(),
    )  # fmt: skip
    execution = {"compile": True, "capture": True, "deterministic": True}
    result = train(
        config, corpus=KnownEntropy(Law(**run.get("law", {}))), device="cuda", progress=False,
        probe=Probe() if run.get("probe") else None, **execution,
    )  # fmt: skip
    found = {**run, "floor": sum(result.windows["floor"]) / len(result.windows["floor"]), "timings": result.timings}
    keep = ("step", "tokens", "forward", "windows", "loss", "top1", "copy_top1")
    found["evaluations"] = [{k: e[k] for k in keep} for e in result.evaluations if e["forward"] == "own"]
    if result.probes:
        rows = pd.DataFrame(result.probes)
        rows = rows[(rows["metric"] == "kurtosis") & (rows["recipe"] == "mxfp4") & (rows["layer"] != "all")]
        means = rows.groupby(["gemm", "tensor"])["value"].mean()
        found["block_kurtosis"] = {f"{gemm} {tensor}": value for (gemm, tensor), value in means.items()}
    last = found["evaluations"][-1]
    print(json.dumps({**run, "excess": round(last["loss"] - found["floor"], 4), "answers": round(last["copy_top1"], 4),
                      "seconds": round(time.monotonic() - started)}), flush=True)  # fmt: skip
    results.put(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", help="JSON file to write")
    parser.add_argument("--run", action="append", type=json.loads, required=True, metavar="JSON", help="one variant")
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [context.Process(target=train_one, args=(run, results)) for run in args.run]
    for process in processes:
        process.start()
    found = []
    while len(found) < len(processes) and (not results.empty() or any(p.is_alive() for p in processes)):
        try:
            found.append(results.get(timeout=1))
        except Exception:  # the queue's own Empty, of another class in each context
            continue
    with open(args.out, "w") as file:
        json.dump({"machine": torch.cuda.get_device_name(), "torch": torch.__version__, "runs": found}, file, indent=1)


if __name__ == "__main__":
    main()
