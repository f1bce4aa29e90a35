"""The command line: `mxfp4 <command>`, also `python -m mxfp4.cli`.

The sub-commands are the modules of `mxfp4.cli.commands`. A mistake that the user can mend is raised as UserError and
printed as one line, `error: ...`, with exit code 1. A Notice is printed as `warning: ...`. A missing optional package
is one line with the pip command that installs it. Any other exception is a defect and keeps its traceback.
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import mxfp4
from mxfp4.cli import commands
from mxfp4.errors import UserError, missing_package, print_notices


def build_parser() -> argparse.ArgumentParser:
    """The parser with every sub-command registered; shells complete from it (README.md)."""
    parser = argparse.ArgumentParser(prog="mxfp4", description="MXFP4 pretraining made reproducible.")
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    subparsers = parser.add_subparsers(metavar="<command>", dest="command")
    for module in commands.modules():
        module.add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        The exit code: what the command returns, 1 for an error, 2 for a wrong command line, 130 when interrupted.

    """
    parser = build_parser()
    args = _parse(parser, sys.argv[1:] if argv is None else argv)
    if args.version:
        print(f"mxfp4 {mxfp4.__version__}")
        return 0
    if args.command is None:
        parser.print_help()
        return 2
    print_notices()
    try:
        code: int = args.handler(args)
        return code
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        line = missing_package(error)
        if line is None:
            raise
        print(f"error: mxfp4 {args.command}: {line}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output, head or less, has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _parse(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """The parsed arguments; a misspelt command or option ends the process with code 2 and a hint."""
    choices = _commands(parser)
    command = next((word for word in argv if not word.startswith("-")), None)
    if command is not None and command not in choices:
        parser.error(f"{command!r} is no command{_hint(command, choices) or ': known: ' + ', '.join(choices)}")
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        sub = choices.get(args.command, parser)
        option = unknown[0].partition("=")[0]
        sub.error(f"unrecognized arguments: {' '.join(unknown)}{_hint(option, sub._option_string_actions)}")
    return args


def _commands(parser: argparse.ArgumentParser) -> dict[str, Any]:
    """{name of a sub-command: its parser}."""
    actions = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return dict(next(actions).choices)


def _hint(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=2)
    return f": did you mean {' or '.join(close)}?" if close else ""
