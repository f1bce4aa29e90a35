"""`mxfp4 isa`: the instructions that a chip will execute, per kernel, compiled here without the chip."""

from __future__ import annotations

import argparse
import importlib.util
import json

from mxfp4.errors import UserError

ARCHS = ("gfx950", "gfx942", "sm_100", "sm_90")


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Register the sub-command."""
    parser = subparsers.add_parser("isa", help="instructions of every kernel on a chip", description=__doc__)
    parser.add_argument("--arch", action="append", choices=ARCHS, help="target; may be repeated (default: gfx950)")
    parser.add_argument("--json", action="store_true", help="print the reports as JSON")
    parser.set_defaults(handler=run)


def run(args: argparse.Namespace) -> int:
    """Compile every kernel of each target and print one line a kernel."""
    if importlib.util.find_spec("triton") is None:
        raise UserError(
            "mxfp4 isa compiles with Triton, which this CPU build of PyTorch comes without: pip install --no-deps -r "
            "requirements-interpreter.txt, as `make test` does"
        )
    from mxfp4.bench import isa

    reports = []
    for arch in args.arch or ["gfx950"]:
        if not args.json:
            print(
                f"{arch}\n{'':2}{'kernel':<26}{'regs':>5}{'spills':>7}{'scratch':>8}{'LDS':>7}{'code':>7}  instructions"
            )
        for kernel in isa.kernels_of(arch):
            report = isa.report(kernel, arch)
            reports.append(report)
            if not args.json:
                named = {**report.matrix, **report.conversions}
                text = ", ".join(f"{count} {name}" for name, count in named.items()) or "-"
                numbers = (report.registers, report.spills, report.scratch, report.shared, report.instructions)
                print(
                    f"{'':2}{kernel:<26}{numbers[0]:>5}{numbers[1]:>7}{numbers[2]:>8}{numbers[3]:>7}{numbers[4]:>7}  {text}"
                )
    if args.json:
        print(json.dumps([report.as_json() for report in reports], indent=1))
    return 0
