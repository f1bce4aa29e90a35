"""`mxfp4 run`: execute notebooks with checked parameters.

mxfp4 run book/format.md -p scale_rule=rceil seed=3
mxfp4 run --all --scale cpu
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from mxfp4.errors import UserError

if TYPE_CHECKING:
    from mxfp4.publish.notebook import Run


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Register the sub-command."""
    parser = subparsers.add_parser(
        "run", help="execute notebooks with checked parameters", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("notebook", nargs="*", help="a MyST .md file, or the name of a chapter")
    parser.add_argument("--all", action="store_true", help="every chapter of the book")
    parser.add_argument(
        "-p", dest="pairs", nargs="+", action="extend", default=[], metavar="NAME=VALUE", help="parameters"
    )
    parser.add_argument("--scale", help="cpu, gpu or mi355x (default: the notebook's own)")
    parser.add_argument("--force", action="store_true", help="run again even where nothing has changed")
    parser.add_argument("--list", action="store_true", help="show the parameters instead of running")
    parser.set_defaults(handler=run)


def run(args: argparse.Namespace) -> int:
    """Exit code 0 when every notebook is there; a failing one ends as UserError, after the others have run."""
    from mxfp4.publish.notebook import chapter_sources, find_source, read_source, run_notebook, shown
    from mxfp4.publish.parameters import join_words, split_pair

    if args.all == bool(args.notebook):
        raise UserError("say which notebook, or --all")
    if args.all and args.pairs:
        raise UserError("-p belongs to one notebook, not to --all")
    sources = chapter_sources() if args.all else [find_source(n) for n in args.notebook]
    if args.list:
        for source in sources:
            print(f"{source.stem}")
            declared = {f"{p.name}: {p.type} = {p.default!r}": p.help for p in read_source(source).parameters.values()}
            width = min(max(map(len, declared), default=0), 40)
            for line, what in declared.items():
                print(f"  {line:<{width}}  {what}")
        return 0
    params = dict(split_pair(pair) for pair in join_words(args.pairs))
    failures = []
    for source in sources:
        try:
            done = run_notebook(source, params, scale=args.scale, force=args.force)
        except UserError as error:
            if len(sources) == 1:
                raise
            failures.append(str(error))
            print(f"{source.stem}: failed", flush=True)
            continue
        how = "already there" if done.skipped else f"run in {done.seconds:.0f} s"
        print(f"{source.stem}: {how} ({shown(done.path)})", flush=True)
        if done.path.stem != source.stem:
            _write_page(done)
    if failures:
        raise UserError("; ".join(failures))
    return 0


def _write_page(done: Run) -> None:
    """The page of a run that is not the book's; without it the notebook is there all the same."""
    from mxfp4.directories import in_checkout, project_dir
    from mxfp4.publish.notebook import shown
    from mxfp4.publish.standalone import write_page

    if not in_checkout():
        return
    try:
        page = done.path.with_suffix(".html")
        if not (done.skipped and page.is_file()):
            write_page(done.path, page, project_dir() / "book")
        print(f"  page: {shown(page)} (one file, opens offline)", flush=True)
    except UserError as error:
        print(f"  note: no page: {error}", flush=True)
