"""The command line: `mxfp4 <command>`, also `python -m mxfp4.cli`.

The sub-commands are the modules of `mxfp4.cli.commands`. What the user can put right is raised as UserError
and ends as one line, `error: ...`, with exit code 1; what it should know is a Notice, `warning: ...`; anything else is
a defect and keeps its traceback.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from mxfp4.cli import commands
from mxfp4.errors import UserError, print_notices


def build_parser() -> argparse.ArgumentParser:
    """The parser with every sub-command registered."""
    parser = argparse.ArgumentParser(prog="mxfp4", description="MXFP4 pretraining made reproducible.")
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    subparsers = parser.add_subparsers(metavar="<command>", dest="command")
    for module in commands.modules():
        module.add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0, what the command says, 1 for an error, 130 when interrupted."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.version:
        from mxfp4 import __version__

        print(f"mxfp4 {__version__}")
        return 0
    if args.command is None:
        parser.print_help()
        return 2
    print_notices()
    try:
        return args.handler(args)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output, head or less, has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
