"""`mxfp4 doctor`: what works on this machine, what does not, and what to do about it."""

from __future__ import annotations

import argparse
import json

SIGNS = {"ok": "ok     ", "note": "note   ", "missing": "MISSING"}


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Register the sub-command."""
    parser = subparsers.add_parser("doctor", help="what works here and what does not", description=__doc__)
    parser.add_argument("--scale", help="cpu, gpu or mi355x: what the machine is to run (default: what fits it)")
    parser.add_argument("--corpus", help="this corpus instead of the scale's, such as c4:768-799 for some shards of C4")
    parser.add_argument("--json", action="store_true", help="print the checks as JSON")
    parser.set_defaults(handler=run)


def run(args: argparse.Namespace) -> int:
    """Exit code 0 when the scale can run, else 1."""
    from mxfp4.cli.checks.machine_checks import as_json, diagnose, healthy
    from mxfp4.cli.commands.scale import fitting_scale

    scale = args.scale or fitting_scale()
    checks = diagnose(scale, args.corpus)
    if args.json:
        print(json.dumps(as_json(checks), indent=1))
    else:
        width = max(len(c.name) for c in checks)
        for check in checks:
            print(f"{SIGNS[check.status]}  {check.name:<{width}}  {check.value}")
            if check.advice:
                print(f"{'':7}  {'':<{width}}  -> {check.advice}")
        missing = [c.name for c in checks if c.status == "missing"]
        on = f" on {args.corpus}" if args.corpus else ""
        print(f"\nscale {scale}{on}: {'cannot run, missing ' + ', '.join(missing) if missing else 'ready'}")
    return 0 if healthy(checks) else 1
