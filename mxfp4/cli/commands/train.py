"""`mxfp4 train`: train the arms of a plan that are not in the store yet."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace

from mxfp4.errors import UserError


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Register the sub-command."""
    parser = subparsers.add_parser("train", help="train the missing arms of a plan", description=__doc__)
    add_plan_arguments(parser)
    parser.add_argument("--jobs", type=int, help="arms at a time on each device (default: the scale's)")
    parser.add_argument("--max-minutes", type=float, metavar="M", help="stop after M minutes, with checkpoints")
    parser.add_argument(
        "--last-start", type=float, metavar="M", help="begin no arm after M minutes; those in work are finished"
    )
    parser.add_argument(
        "--fit-minutes",
        type=float,
        metavar="M",
        help="only the first missing arms, in the plan's order, that are estimated to fit into M minutes of one device",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: every GPU, or the CPU where there is none")
    parser.add_argument(
        "--gpus",
        type=int,
        metavar="N",
        help="on so many GPUs (default: all; 0: the CPU). In a dry run those meant (8 for mi355x on a machine without)",
    )
    parser.add_argument(
        "--recompute-every",
        type=int,
        metavar="N",
        help="compute every N-th block's activations again in the backward, for less memory, more time and the same "
        "results (default: the scale's; 0: none)",
    )
    dry = parser.add_argument_group("dry run", "what it would take, with nothing run; exit code 1 if it cannot fit")
    dry.add_argument("--dry-run", action="store_true", help="arms, GPU-hours, memory, disk, what is there already")
    dry.add_argument("--gpu-memory", type=float, metavar="GB", help="memory of a GPU meant (default: this machine's)")
    dry.add_argument("--json", action="store_true", help="print the answer as JSON")
    parser.add_argument(
        "--keep-weights", action="store_true",
        help="also leave the trained weights, in runs/weights/<scale>/<run id>/, for `mxfp4 export`; an arm that has a "
        "record and no weights is trained again (its record stays)",
    )  # fmt: skip
    parser.add_argument(
        "--again",
        action="store_true",
        help="run the arms named by --arm anew: records that they have go to runs/replaced. Interrupted, it goes on "
        "without --again",
    )
    parser.add_argument("--quiet", action="store_true", help="print the summary alone")
    parser.set_defaults(handler=run)


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that pick a plan and some of its arms; `chosen_plan` reads them."""
    parser.add_argument("--scale", default="cpu", help="cpu, gpu or mi355x (default: cpu)")
    parser.add_argument(
        "--plan", default="all",
        help="at gpu: study, the registered study, or one of its parts (main, short, text, batch, ladder, experts); of the "
        "older study table1, disagreement, p2, others, two-sided, sizes, moe, synthetic or all (default: all, which "
        "`make reproduce` runs: every plan of the scale, but at cpu table1, disagreement, p2, synthetic alone)",
    )  # fmt: skip
    parser.add_argument(
        "--arm", action="append", metavar="RECIPE",
        help="these recipes instead, in each setting of the plan; may be given again",
    )  # fmt: skip
    parser.add_argument("--seed", action="append", type=int, metavar="S", help="these seeds instead, as with --arm")
    parser.add_argument(
        "--corpus",
        help="this corpus instead, such as c4:768-895 for some shards of C4, c4:toy for a trial, or "
        "megatron:PREFIX,VALIDATION_PREFIX for Megatron's .bin and .idx",
    )
    parser.add_argument(
        "--append-eod", action=argparse.BooleanOptionalAction, default=None,
        help="put the end-of-document token after each document (default: the scale's; mi355x: no, as MLPerf's reference)",
    )  # fmt: skip
    parser.add_argument(
        "--rope-scaling-factor", type=float, metavar="F",
        help="Llama 3.1's scaling of RoPE: 8 as in MLPerf's reference, 1 for none (default: the scale's)",
    )  # fmt: skip


def chosen_plan(args: argparse.Namespace, name: str | None = None):
    """The Plan that the options ask for; name: instead of theirs. UserError for what is unknown."""
    from mxfp4.data.corpora import check_name
    from mxfp4.studies.plans import plan  # imports torch

    overrides = {} if args.corpus is None else {"corpus": args.corpus}
    if args.corpus is not None:
        check_name(args.corpus)
    if args.append_eod is not None:
        overrides["append_eod"] = args.append_eod
    chosen = plan(name or args.plan, args.scale, recipes=args.arm, seeds=args.seed, **overrides)
    if (factor := args.rope_scaling_factor) is not None:
        arms = tuple(replace(a, model=replace(a.model, rope_scaling_factor=factor)) for a in chosen.arms)
        chosen = replace(chosen, arms=arms)
    if args.corpus is not None and name is None and all(a.corpus != args.corpus for a in chosen.arms):
        own = chosen.arms[0].corpus
        raise UserError(f"plan {args.plan!r} is about corpus {own!r} and has no arm on {args.corpus!r}")
    return chosen


def run(args: argparse.Namespace) -> int:
    """0 when every arm has a record (diverged ones included), 130 when stopped before, 1 when an arm
    failed or, for a dry run, cannot fit."""
    if args.device == "cpu":
        if args.gpus:
            raise UserError(f"--gpus {args.gpus} with --device cpu: leave one of them out")
        args.gpus = 0
    if args.again and (args.dry_run or not args.arm):
        raise UserError("--again sets records aside: it goes with --arm RECIPE (and --seed S), and not with --dry-run")
    if args.dry_run:
        return _dry_run(args)
    if args.json:
        raise UserError("--json goes with --dry-run; `mxfp4 status --json` and `mxfp4 plan --json` show runs")
    if args.gpu_memory is not None:
        raise UserError(
            f"--gpu-memory {args.gpu_memory:g} goes with --dry-run: training takes the memory that there is"
        )
    from mxfp4.studies.runner import run_plan
    from mxfp4.training.execution.distributed import reports

    plan, store = _as_asked(chosen_plan(args), args), _store()
    if args.fit_minutes is not None:
        plan = plan.first(store, args.fit_minutes, args.device)
    summary = run_plan(
        plan, store, jobs=args.jobs, device=args.device, max_minutes=args.max_minutes,
        last_start=args.last_start, progress=not args.quiet, keep_weights=args.keep_weights, gpus=args.gpus,
        again=args.again,
    )  # fmt: skip
    if reports():
        print(f"{args.plan} at scale {args.scale}: {summary}")
        if args.keep_weights and (kept := _kept(plan, store, args.device)):
            print(kept)
    if summary.failed:
        return 1
    return 130 if summary.paused or summary.left else 0


def _kept(plan, store, device: str | None) -> str | None:
    """One line: where the weights of the plan's runs lie, and what reads them; None without any."""
    from mxfp4.training import weights

    found = [f for config in plan.arms if weights.kept(f := store.weights_dir(config, device))]
    if not found:
        return None
    names = " ".join(f.name for f in found)
    return f"weights ({len(found)}) in {found[0].parent}, for `mxfp4 export RUN FOLDER`: {names}"


def _as_asked(plan, args: argparse.Namespace):
    """The plan, executed as the options say: which changes no result and no key."""
    from mxfp4.training.execution.recompute import check_every

    if args.recompute_every is None:
        return plan
    check_every(args.recompute_every)
    return replace(plan, scale=replace(plan.scale, recompute_every=args.recompute_every))


def _dry_run(args: argparse.Namespace) -> int:
    from mxfp4.cli.checks.dry_run import dry_run
    from mxfp4.cli.checks.dry_run_text import as_json, text

    plan = _as_asked(chosen_plan(args), args)
    if args.jobs is not None:
        plan = replace(plan, scale=replace(plan.scale, jobs=args.jobs))
    result = dry_run(plan, _store(), gpus=args.gpus, memory_gb=args.gpu_memory, keep_weights=args.keep_weights)
    print(json.dumps(as_json(result), indent=1, allow_nan=False) if args.json else text(result))
    return 1 if result.problems else 0


def _store():
    from mxfp4.studies.store import Store

    return Store()
