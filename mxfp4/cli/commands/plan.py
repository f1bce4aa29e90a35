"""`mxfp4 plan`: what of a plan is done, what is left, and what that will cost."""

from __future__ import annotations

import argparse
import json
import shlex
from collections import Counter

from mxfp4.cli.commands.train import add_plan_arguments, chosen_plan


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Register the sub-command."""
    parser = subparsers.add_parser("plan", help="what is done, what is left, what it will cost", description=__doc__)
    add_plan_arguments(parser)
    parser.add_argument("--device", choices=("cpu", "cuda"), help="whose records (default: a GPU's, but at scale cpu)")
    parser.add_argument(
        "--slice-minutes",
        type=float,
        metavar="M",
        help="cut what is missing into slices of M minutes of one device; `mxfp4 train --fit-minutes M` trains the first",
    )
    parser.add_argument("--json", action="store_true", help="print the arms and what is left as JSON")
    parser.set_defaults(handler=run)


def run(args: argparse.Namespace) -> int:
    """Exit code 0."""
    from mxfp4.analysis.study import studies
    from mxfp4.studies.plans import parts_of
    from mxfp4.studies.registered_arms import WHOLE, study_parts
    from mxfp4.studies.store import Store

    plan, store = chosen_plan(args), Store()
    status = plan.status(store, args.device or (None if plan.scale.name == "cpu" else "cuda"))
    records = store.load(plan.scale.name)
    study_of = {record.key: study for study in studies(records) for record in study.records}
    if args.json:
        print(json.dumps(_as_json(args, plan, status, study_of), indent=1, allow_nan=False))
        return 0
    devices = {r.machine["device"] for r in records}
    device = devices.pop() if len(devices) == 1 else "device"
    width = max(len(a.config.recipe) for a in status)
    own = plan.scale.config("bf16", 0)
    for arm in status:
        where, study = setting_text(arm.config, own), study_of.get(arm.record.key) if arm.done else None
        print(f"{arm.config.recipe:<{width}}  seed {arm.config.seed}  {_describe(arm, study)}{where and '  ' + where}")
    if args.slice_minutes:
        _print_slices([a for a in status if not a.done], args.slice_minutes)
    parts = parts_of(args.plan, plan.scale)
    if plan.name == WHOLE:
        parts = tuple(part for part in study_parts() if part != WHOLE)
    if len(parts) > 1:
        print()
        by_config = {a.config: a for a in status}
        for name in parts:
            arms = [by_config[a] for a in chosen_plan(args, name).arms if a in by_config]
            if arms:  # the whole study leaves out what is run only when asked for
                print(f"{name:<12}  {_summary(arms, device)}")
    tiers = _tiers(plan, status)
    if tiers:
        from mxfp4.cli.checks.dry_run_text import tiers_text
        from mxfp4.studies.memory_check import P1_GPUS

        print("", *tiers_text(tiers, P1_GPUS), sep="\n")
    counts = Counter("done" if a.done else "begun" if a.step else "missing" for a in status)
    tokens = sum((a.config.steps - a.step) * a.config.tokens_per_step for a in status if not a.done)
    done = f"{counts['done']} of {len(status)} arms done, {counts['begun']} begun"
    print(f"\n{args.plan} at scale {args.scale}: {done}")
    if tokens:
        print(f"left: {tokens:,} training tokens, {_cost([a for a in status if not a.done], device)}")
        print(f"`{_train_command(args)}` trains them")
    return 0


def _tiers(plan, status: list) -> list:
    """`dry_run.tiers` on a node like P1's."""
    from mxfp4.cli.checks.dry_run import costs_of, tiers
    from mxfp4.studies.memory_check import P1_GPUS

    return tiers(plan, costs_of(status, plan.scale.ranks_on(P1_GPUS)))


def _as_json(args: argparse.Namespace, plan, status: list, study_of: dict) -> dict:
    """The arms, what is left of them and the command that trains it; times in seconds of one device."""
    from dataclasses import asdict

    from mxfp4.studies.plans import slices

    def ending(arm) -> str:
        if not arm.done:
            return "begun" if arm.step else "missing"
        study = study_of.get(arm.record.key)
        return study.ending(arm.record) if study else arm.record.outcome["status"]

    left = [a for a in status if not a.done]
    return {
        "plan": args.plan,
        "scale": args.scale,
        "arms": [
            {
                "recipe": a.config.recipe,
                "seed": a.config.seed,
                "corpus": a.config.corpus,
                "weights": a.config.model.n_params_non_embedding(),
                "status": ending(a),
                "run_id": a.record.run_id if a.done else None,
                "step": a.record.outcome["step"] if a.done else a.step,
                "steps": a.config.steps,
                "loss": a.record.outcome["final_loss"] if a.done else None,
                "seconds_left": a.seconds,
                "estimated_by": a.basis or None,
            }
            for a in status
        ],
        "tokens_left": sum((a.config.steps - a.step) * a.config.tokens_per_step for a in left),
        "slices": [
            [{"recipe": a.config.recipe, "seed": a.config.seed, "seconds": a.seconds} for a in arms]
            for arms in (slices(left, args.slice_minutes) if args.slice_minutes else ())
        ],
        "tiers": [asdict(tier) for tier in _tiers(plan, status)],
        "command": _train_command(args) if left else None,
    }


def _print_slices(missing: list, minutes: float) -> None:
    from mxfp4.studies.plans import slices
    from mxfp4.text import duration

    for number, arms in enumerate(slices(missing, minutes), start=1):
        known = [a.seconds for a in arms if a.seconds is not None]
        names = " ".join(f"{a.config.recipe}-s{a.config.seed}" for a in arms)
        print(f"slice {number}, {duration(sum(known)) if len(known) == len(arms) else 'not measured'}: {names}")


def _train_command(args: argparse.Namespace) -> str:
    """What trains the arms that these options show."""
    words = ["mxfp4", "train", "--scale", args.scale, *(("--plan", args.plan) if args.plan != "all" else ())]
    words += [w for arm in args.arm or () for w in ("--arm", arm)]
    words += [w for seed in args.seed or () for w in ("--seed", str(seed))]
    words += ["--corpus", args.corpus] if args.corpus else []
    words += [] if args.append_eod is None else [f"--{'' if args.append_eod else 'no-'}append-eod"]
    factor = args.rope_scaling_factor
    return shlex.join(words + ([] if factor is None else ["--rope-scaling-factor", f"{factor:g}"]))


def _describe(arm, study=None) -> str:
    """One line on an arm; study: that of its record, which says whether a finished run stalled."""
    from mxfp4.studies.plans import BASES  # imports torch
    from mxfp4.text import duration

    if arm.done:
        outcome = arm.record.outcome
        loss = outcome["final_loss"]
        text = f"{study.ending(arm.record) if study else outcome['status']} at step {outcome['step']}" + (
            f", loss {loss:.4f}" if loss is not None else ""
        )
        noted = [f"step {r['step']} replayed ({r['reason']})" for r in outcome.get("replayed", [])]
        return ", ".join([text, *filter(None, [outcome["reason"]]), *noted])
    text = f"begun, step {arm.step} of {arm.config.steps}" if arm.step else "missing"
    if arm.seconds is None:
        return f"{text}, not measured yet"
    return f"{text}, {duration(arm.seconds)}" + ("" if arm.basis == BASES[0] else f" (by {arm.basis})")


def setting_text(config, own) -> str:
    """How an arm's setting differs from the scale's `own`, in brackets; empty where it does not."""
    model, parts = config.model, []
    if model != own.model:
        parts.append(f"{model.n_params_non_embedding() / 1e6:.3g} M weights")
    if model.n_experts:
        parts.append(f"{model.n_experts} experts")
    if config.corpus != own.corpus:
        parts = [config.corpus]
    return f"[{', '.join(parts)}]" if parts else ""


def _summary(arms: list, device: str) -> str:
    left = [a for a in arms if not a.done]
    done = f"{len(arms) - len(left):>3} of {len(arms):>3} arms done"
    return f"{done}, {_cost(left, device)}" if left else done


def _cost(left: list, device: str) -> str:
    """device: what speeds were measured on."""
    from mxfp4.studies.plans import BASES
    from mxfp4.text import duration

    known = [a for a in left if a.seconds is not None]
    parts = []
    if known:
        by = Counter(a.basis for a in known)
        rests = ", ".join(f"{by[basis]} by {basis}" for basis in BASES if by[basis])
        parts.append(f"about {duration(sum(a.seconds for a in known))} of one {device} from measured speeds ({rests})")
    if len(known) < len(left):
        parts.append(f"{len(left) - len(known)} arms not measured yet: no record of such a model at this scale")
    return ", and ".join(parts)
