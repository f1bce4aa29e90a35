"""`mxfp4 book`: build the site from the executed notebooks of a scale (runs nothing)."""

from __future__ import annotations

import argparse
import time


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Register the sub-command."""
    parser = subparsers.add_parser("book", help="build the site from executed notebooks", description=__doc__)
    parser.add_argument("--scale", default="cpu", help="cpu, gpu or mi355x: whose notebooks (default: cpu)")
    parser.add_argument("--force", action="store_true", help="build again even where nothing has changed")
    parser.add_argument(
        "--base-url", metavar="URL", help="address the site will have: adds canonical links, sitemap.xml, robots.txt and "
        "link previews (default: $MXFP4_SITE_URL, else none)",
    )  # fmt: skip
    parser.add_argument(
        "--repository-url", metavar="URL",
        help="address of the repository: each page links to its source (default: $MXFP4_REPOSITORY_URL, else none)",
    )  # fmt: skip
    parser.add_argument("--pdf", action="store_true", help="also print the site as one PDF, with Chromium")
    parser.set_defaults(handler=run)


def run(args: argparse.Namespace) -> int:
    """Exit code 0; whatever would leave a hole in the site is a UserError."""
    from mxfp4.directories import checkout, runs_dir
    from mxfp4.publish.addresses import find_addresses
    from mxfp4.publish.pdf import find_browser, write_pdf
    from mxfp4.publish.site import build_site, toc_pages
    from mxfp4.studies.scales import get_scale

    get_scale(args.scale)
    book = checkout("mxfp4 book") / "book"
    if args.pdf:
        find_browser()  # its lack is known before minutes of building
    started = time.monotonic()
    addresses = find_addresses(args.base_url, args.repository_url)
    notebooks = runs_dir() / "notebooks" / args.scale
    site = build_site(book, notebooks, scale=args.scale, force=args.force, addresses=addresses)
    how = "already there" if site.skipped else f"built in {time.monotonic() - started:.0f} s"
    print(f"site: {how} (scale {args.scale}): book/_build/html/index.html")
    if args.pdf:
        write_pdf(site.path, toc_pages(book), book / "_build" / "book.pdf")
        print("pdf: book/_build/book.pdf")
    if site.stale:
        print(
            f"note: text or records have changed since these were run, `mxfp4 run --all --scale {args.scale}` runs them "
            f"again: {', '.join(site.stale)}"
        )
    return 0
