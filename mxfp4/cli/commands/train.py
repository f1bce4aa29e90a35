"""`mxfp4 train`: train the arms of a plan that are not in the store yet."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import fields, replace

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
    add_execution_arguments(parser)
    parser.add_argument(
        "--checkpoint-minutes",
        type=float,
        metavar="M",
        help="at least M minutes between two checkpoints of an arm, and more where saving would take over 2%% of the time "
        "(default: the scale's: 1; 20 at mi355x, where one has 96 GB). The last two are kept",
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
    add_tolerance_arguments(parser.add_argument_group("failures", "they are listed in runs/logs/<scale>/failures.log"))
    parser.add_argument("--quiet", action="store_true", help="print the summary alone")
    watch = parser.add_argument_group(
        "watching",
        "each run has a log, runs/logs/<scale>/<run id>/train.log; without a terminal its lines also go to stderr",
    )
    watch.add_argument(
        "--log-every", type=int, default=0, metavar="N", help="steps between two lines (default: about 100 lines a run)"
    )
    watch.add_argument("--log-to", choices=("tensorboard", "wandb"), help="also send the curves there")
    watch.add_argument(
        "--profile", metavar="START:STEPS", help="write a Chrome trace of these steps of each run, as in 200:5"
    )
    parser.set_defaults(handler=run)


def add_tolerance_arguments(group: argparse._ArgumentGroup) -> None:
    """The options of `Tolerance`; None leaves its defaults, which the help repeats."""
    group.add_argument(
        "--retries", type=int, metavar="N",
        help="try a failed arm again N times, from its last checkpoint (default: 2); twice at one step ends it sooner",
    )  # fmt: skip
    group.add_argument(
        "--device-failures",
        type=int,
        metavar="N",
        help="stop once one GPU has failed N times, and name it (default: 3)",
    )
    group.add_argument(
        "--idle-minutes", type=float, metavar="M",
        help="end an arm that makes no step for M minutes while it trains, and say which of its processes are alive, "
        "stopped or dead (default: 15)",
    )  # fmt: skip
    group.add_argument(
        "--slow-minutes", type=float, metavar="M", help="the same while it starts, compiles or saves (default: 60)"
    )
    group.add_argument(
        "--collective-minutes", type=float, metavar="M",
        help="longest wait of a GPU for the others; then NCCL writes its flight recorder (default: 10)",
    )  # fmt: skip


def _tolerance(args: argparse.Namespace):

    from mxfp4.studies.failures import Tolerance

    given = {f.name: getattr(args, f.name) for f in fields(Tolerance)}
    return Tolerance(**{name: value for name, value in given.items() if value is not None})


def add_execution_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that say how steps are executed, named as the fields of `Execution`."""
    group = parser.add_argument_group("execution", "speed and memory of a step; in no run's key (default: the scale's)")
    group.add_argument(
        "--recompute-every", type=int, metavar="N",
        help="compute every N-th block's activations again in the backward, for less memory and more time (0: none)",
    )  # fmt: skip
    group.add_argument(
        "--attention", metavar="BACKEND",
        help="repeat (K and V copied for each query head), auto (not copied), flash, efficient, cudnn, math, aiter",
    )  # fmt: skip
    group.add_argument(
        "--cross-entropy", metavar="HOW",
        help="whole (all logits at once), chunked (2048 tokens at a time), liger (liger-kernel)",
    )  # fmt: skip
    group.add_argument(
        "--reshard-after-forward", action=argparse.BooleanOptionalAction,
        help="several GPUs: free a block's parameters after its forward; without, they are gathered once a step",
    )  # fmt: skip
    group.add_argument(
        "--weights-once", action=argparse.BooleanOptionalAction,
        help="quantize each weight once a step, not once a micro-batch; on several GPUs with --no-reshard-after-forward",
    )  # fmt: skip


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that pick a plan and some of its arms; `chosen_plan` reads them."""
    parser.add_argument("--scale", default="cpu", help="cpu, gpu or mi355x (default: cpu)")
    parser.add_argument(
        "--plan", default="all",
        help="at mi355x: first (bf16, fp8, mxfp4, mxfp4+h16, three seeds each); at gpu: study, the registered study, or one of its parts (main, short, text, batch, ladder, experts); of the "
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
    parser.add_argument(
        "--reduce-dtype", metavar="DTYPE",
        help="sum gradients over the GPUs in float32 (default) or bfloat16, as MLPerf's reference does; in a run's key",
    )  # fmt: skip


def chosen_plan(args: argparse.Namespace, name: str | None = None):
    """The Plan that the options ask for; name: instead of theirs. UserError for what is unknown."""
    from mxfp4.data.corpora import check_name
    from mxfp4.studies.plans import plan  # imports torch

    asked = {name: getattr(args, name, None) for name in ("corpus", "append_eod", "reduce_dtype")}
    overrides = {name: value for name, value in asked.items() if value is not None}
    if args.corpus is not None:
        check_name(args.corpus)
    chosen = plan(name or args.plan, args.scale, recipes=args.arm, seeds=args.seed, **overrides)
    if (factor := args.rope_scaling_factor) is not None:
        arms = tuple(replace(a, model=replace(a.model, rope_scaling_factor=factor)) for a in chosen.arms)
        chosen = replace(chosen, arms=arms)
    if args.corpus is not None and name is None and all(a.corpus != args.corpus for a in chosen.arms):
        own = chosen.arms[0].corpus
        raise UserError(f"plan {args.plan!r} is about corpus {own!r} and has no arm on {args.corpus!r}")
    return chosen


def run(args: argparse.Namespace) -> int:
    """0 when every arm has a record (diverged and stalled ones included), 130 when stopped before, 1 when an arm or a
    device failed or, for a dry run, something cannot fit."""
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
        again=args.again, tolerance=_tolerance(args), monitoring=_monitoring(args),
    )  # fmt: skip
    if reports():
        print(f"{args.plan} at scale {args.scale}: {summary}")
        if args.keep_weights and (kept := _kept(plan, store, args.device)):
            print(kept)
        for line in _logs(plan, store, args.device, summary):
            print(line)
    if summary.failed or summary.stopped:
        return 1
    return 130 if summary.paused or summary.left else 0


def _monitoring(args: argparse.Namespace):
    """How the runs are watched. UserError for a value that cannot be."""
    from mxfp4.training.monitoring.monitor import Monitoring
    from mxfp4.training.monitoring.profile_window import window

    if args.log_every < 0:
        raise UserError(f"--log-every {args.log_every} must be 0 (about 100 lines a run) or more")
    return Monitoring(
        stderr=not args.quiet, log_every=args.log_every, log_to=args.log_to,
        profile=window(args.profile) if args.profile is not None else None,
    )  # fmt: skip


def _logs(plan, store, device: str | None, summary) -> list[str]:
    """A line for each failed arm that has a log: where it lies."""
    from mxfp4.studies.train_arm import arm_name
    from mxfp4.training.monitoring.line_log import FILE

    logs = [(arm_name(c), store.log_dir(c, device) / FILE) for c in plan.arms if arm_name(c) in summary.failed]
    return [f"log of {name}: {path}" for name, path in logs if path.is_file()]


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
    from mxfp4.training.execution.choices import Execution

    asked = {f.name: value for f in fields(Execution) if (value := getattr(args, f.name, None)) is not None}
    Execution(**{**plan.scale.execution(), **asked})  # refuses what is none
    if args.checkpoint_minutes is not None:
        if not 0 < args.checkpoint_minutes < math.inf:
            raise UserError(f"--checkpoint-minutes {args.checkpoint_minutes:g} must be a positive number of minutes")
        asked["checkpoint_minutes"] = args.checkpoint_minutes
    return replace(plan, scale=replace(plan.scale, **asked))


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
