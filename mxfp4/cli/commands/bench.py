"""`mxfp4 bench kernels|step|model|node|cpu|host`: speed here, after a check of the results, with whatever rivals are installed.

`mxfp4 bench families` converts, trains, saves and reloads a tiny model of each family of transformers, and times nothing.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mxfp4.errors import UserError

if TYPE_CHECKING:
    from mxfp4.bench.node import Setting


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Register the sub-command."""
    parser = subparsers.add_parser(
        "bench", help="speed of kernels, steps, attention and loss, a node, the CPU path, a layer", description=__doc__
    )
    parser.add_argument(
        "what",
        choices=("kernels", "step", "model", "node", "cpu", "host", "families"),
        help="kernels, step, model and node (but for --tiny) need a GPU. node: layers of the 8B on all GPUs, then seconds "
        "and hours of the whole, and go or no-go (exit code 0 or 1)",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE",
        help="write machine and results to FILE (step, model, node: default runs/bench/<what>-<device>.json, which pages show)",
    )  # fmt: skip
    parser.add_argument("--no-rivals", action="store_true", help="leave out other packages and compiled twins")
    parser.add_argument(
        "--recipe", action="append", help="step, node, host: only these recipes; may be repeated; families: the one"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="host: where; default: a GPU where there is one")
    parser.add_argument("--eager", action="store_true", help="host: not the compiled layers")
    for name, default, what in (("in-features", 1024, "in"), ("out-features", 1024, "out"), ("tokens", 2048, "tokens")):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"host: size of the layer ({what})")
    parser.add_argument("--iterations", type=int, default=400, help="host: forwards and backwards of each layer")
    parser.add_argument("--gpus", type=int, metavar="N", help="node: on so many GPUs (default: all; 0: the CPU)")
    parser.add_argument("--minutes", type=float, default=15.0, help="node: most that it may take (default: 15)")
    parser.add_argument("--tiny", action="store_true", help="node: a tiny model, to try the benchmark itself")
    parser.set_defaults(handler=run)


def run(args: argparse.Namespace) -> int:
    """Exit code 0 unless a result of ours was wrong or failed."""
    import torch

    from mxfp4.bench import cpu as bench_cpu
    from mxfp4.bench import families as bench_families
    from mxfp4.bench import host as bench_host
    from mxfp4.bench import kernels as bench_kernels
    from mxfp4.bench import model as bench_model
    from mxfp4.bench import results as bench
    from mxfp4.bench import step as bench_step

    if args.what == "node":
        return _node(args)
    kept, device = None, "cpu" if args.what in ("cpu", "families") else "cuda"
    if args.what == "host":
        device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError(f"mxfp4 bench {args.what} needs a GPU, and torch sees none; `mxfp4 bench cpu` runs anywhere")
    if args.what == "step":
        measurements = bench_step.rows(tuple(args.recipe) if args.recipe else bench_step.RECIPES)
        if args.json is None and not args.recipe:  # some recipes alone would take the place of all
            kept = bench.kept_at("step", torch.cuda.get_device_name())
    elif args.what == "model":
        measurements = bench_model.rows()
        if args.json is None:
            kept = bench.kept_at("model", torch.cuda.get_device_name())
    elif args.what == "host":
        sizes = bench_host.Sizes(args.in_features, args.out_features, args.tokens)
        recipes, compiled = tuple(args.recipe or bench_host.RECIPES), (False,) if args.eager else (False, True)
        measurements = bench_host.rows(device, sizes, recipes, compiled, args.iterations)
    elif args.what == "families":
        if len(args.recipe or ()) > 1:
            raise UserError(f"mxfp4 bench families takes one recipe; {len(args.recipe)} are given")
        measurements = bench_families.rows(*(args.recipe or ()))
    else:
        measurements = {"cpu": bench_cpu, "kernels": bench_kernels}[args.what].rows(not args.no_rivals)
    rows = []
    for row in measurements:
        rows.append(row)
        print(_line(row), flush=True)
        if args.json:  # whole after each, so that an interrupted run leaves what it had
            bench.write(args.json, args.what, device, rows)
    if kept is not None:  # only now, so that an interrupted run leaves what there was
        bench.write(kept, args.what, device, rows)
        print(f"written to {kept}")
    elif args.what == "step" and args.json is None:
        print("not written: --json FILE keeps the results of some recipes")
    ours = [row for row in rows if row["who"].startswith("mxfp4")]
    return 1 if any(row.get("correct") is False or "problem" in row for row in ours) else 0


def _node(args: argparse.Namespace) -> int:
    """0: go, 1: no-go."""
    import os
    from contextlib import nullcontext
    from datetime import timedelta

    import torch

    from mxfp4.bench import node
    from mxfp4.studies.devices import chosen_gpus
    from mxfp4.studies.machine import default_device
    from mxfp4.studies.scales import MI355X
    from mxfp4.training.execution import distributed

    if args.minutes <= 0:
        raise UserError(f"--minutes {args.minutes:g} must be positive")
    device = torch.device("cpu") if args.gpus == 0 or args.device == "cpu" else default_device()
    if device.type == "cpu" and not args.tiny:
        raise UserError("mxfp4 bench node needs a GPU; `mxfp4 bench node --tiny --gpus 0` tries it on the CPU")
    gpus, scale = chosen_gpus(args.gpus, device), node.TINY if args.tiny else MI355X
    ranks = scale.ranks_on(gpus)
    joined: Any = nullcontext()
    if distributed.launched():
        ranks = int(os.environ["WORLD_SIZE"])
        here = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpus else device
        joined = distributed.joined(here, timeout=timedelta(seconds=node.CASE_SECONDS))
    setting = node.Setting(scale, ranks, min(gpus, ranks), tuple(args.recipe or node.RECIPES))
    with joined:
        return _measure_node(args, setting)


def _measure_node(args: argparse.Namespace, setting: Setting) -> int:
    from dataclasses import asdict

    import torch

    from mxfp4.bench import node, node_prediction
    from mxfp4.bench import results as bench
    from mxfp4.studies.machine import machine
    from mxfp4.training.execution import distributed

    reports, whole = distributed.reports(), not (args.tiny or args.recipe)
    rows: list[dict] = []
    path: Path | None = args.json or (
        bench.kept_at("node", torch.cuda.get_device_name()) if whole and reports else None
    )
    for row in node.rows(setting, args.minutes):
        rows.append(row)
        if reports:
            print(_node_line(row), flush=True)
        if reports and args.json:
            bench.write(args.json, "node", setting.device, rows)
    found = node_prediction.predictions(rows, setting)
    verdict = node_prediction.verdict(rows, found, setting)
    if not reports:
        return 0 if verdict.go else 1
    print(node_prediction.text(rows, setting, machine(setting.device)["device"]))
    if path is None:
        print("not written: --json FILE keeps the results of some recipes or of --tiny")
        return 0 if verdict.go else 1
    bench.write(
        path, "node", setting.device, rows,
        ranks=setting.ranks, layers=setting.scale.model.n_layers, dim=setting.scale.model.dim, tiny=args.tiny,
        predictions=[asdict(p) for p in found], hours=[asdict(h) for h in node_prediction.hours(found, setting)],
        published=node_prediction.published(found), advice=node_prediction.advice(rows),
        go=verdict.go, reasons=[list(reason) for reason in verdict.reasons],
    )  # fmt: skip
    print(f"written to {path}")
    return 0 if verdict.go else 1


def _node_line(row: dict) -> str:
    if "problem" in row:
        return f"{row['name']:<40}{row['problem']}"
    parts = ", ".join(f"{part} {row[f'{part}_seconds']:.3f}" for part in ("forward", "backward", "optimizer"))
    text = f"{row['name']:<40}{row['seconds']:>9.3f} s a step ({parts})  {row['path']}"
    text += f" ({row['gemm_backend']})" if row["gemm_backend"] and row["path"] == "native" else ""
    text += f"  {row['peak_bytes'] / 1e9:.1f} GB" if row["peak_bytes"] is not None else ""
    return text + (f"  {row['communication_share']:.1%} waits for RCCL" if row["communication_share"] else "")


def _line(row: dict) -> str:
    name = f"{row['name']:<24}{row['who']:<28}"
    time = f"{row['seconds'] * 1e6:>11.1f} us" if "seconds" in row else f"{'':>14}"
    shown = {
        "ratio": "{:.3f}",
        "linear_ratio": "{:.2f} x nn.Linear",
        "launches": "{} launches",
        "bytes_per_second": "{:.3e} B/s",
        "flops_per_second": "{:.3e} FLOP/s",
        "elements_per_second": "{:.3e} /s",
        "processor_seconds": "{:.4f} s of processor",
        "peak_bytes": "{:.3e} B at the peak",
        "time_ratio": "{:.3f} of the BF16 time",
        "memory_ratio": "{:.3f} of its memory",
        "weights": "{:.1%} of the weights quantized",
        "flops": "{:.1%} of the FLOPs",
    }
    text = "  ".join(form.format(row[key]) for key, form in shown.items() if row.get(key) is not None)
    if "gpu_seconds" in row:
        text += f"  {row['gpu_seconds'] * 1e6:.1f} us of GPU"
    text += "  WRONG" if row.get("correct") is False else ""
    return f"{name}{time}  {text}{row.get('problem', '')}"
