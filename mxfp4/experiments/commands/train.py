"""`mxfp4 train`: train the arms of a plan that are not in the store yet."""

from __future__ import annotations

import argparse


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Register the sub-command."""
    parser = subparsers.add_parser("train", help="train the missing arms of a plan", description=__doc__)
    add_plan_arguments(parser)
    parser.add_argument("--jobs", type=int, help="arms at a time on each device (default: the scale's)")
    parser.add_argument(
        "--max-minutes", type=float, metavar="M", help="stop after M minutes, with checkpoints"
    )
    parser.add_argument(
        "--last-start", type=float, metavar="M", help="begin no arm after M minutes; those in work are finished"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: every GPU, or the CPU where there is none")
    parser.add_argument("--quiet", action="store_true", help="print the summary alone")
    parser.set_defaults(handler=run)


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that pick a plan and some of its arms; `chosen_plan` reads them."""
    parser.add_argument("--scale", default="cpu", help="cpu, gpu or mi355x (default: cpu)")
    parser.add_argument(
        "--plan",
        default="all",
        help="table1, disagreement, p2, others, two-sided, sizes, moe, synthetic or all (default: all)",
    )
    parser.add_argument(
        "--arm", action="append", metavar="RECIPE", help="these recipes instead; may be given again"
    )
    parser.add_argument(
        "--seed", action="append", type=int, metavar="S", help="these seeds instead; may be given again"
    )


def chosen_plan(args: argparse.Namespace, name: str | None = None):
    """The Plan that the options ask for; name: instead of theirs."""
    from mxfp4.experiments.plan import plan  # imports torch

    return plan(name or args.plan, args.scale, recipes=args.arm, seeds=args.seed)


def run(args: argparse.Namespace) -> int:
    """0 when every arm has a record (diverged ones included), 130 when stopped before, 1 when an arm
    failed."""
    from mxfp4.experiments.workers import run_plan

    summary = run_plan(
        chosen_plan(args), _store(), jobs=args.jobs, device=args.device, max_minutes=args.max_minutes,
        last_start=args.last_start, progress=not args.quiet,
    )  # fmt: skip
    print(f"{args.plan} at scale {args.scale}: {summary}")
    if summary.failed:
        return 1
    return 130 if summary.paused or summary.left else 0


def _store():
    from mxfp4.experiments.store import Store

    return Store()
