"""`mxfp4 claims`: what the papers claim and what the records say, one verdict a claim."""

from __future__ import annotations

import argparse
import json
import textwrap


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Register the sub-command."""
    parser = subparsers.add_parser("claims", help="the papers' claims, judged by the records", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the verdicts as JSON")
    parser.add_argument(
        "--scale", help="judge by the records of one scale (default: for each claim the largest that decides)"
    )
    parser.add_argument(
        "--study", action="store_true", help="the claims of the registered study (book/study.yml) instead"
    )
    parser.add_argument(
        "--corpus", help="with --study: the text that its runs on text read, such as c4:0-7 (default: text)"
    )
    parser.add_argument("--ledger", metavar="FILE", help="another ledger than book/claims.yml")
    parser.add_argument("--id", action="append", metavar="ID", help="only this claim; may be repeated")
    parser.set_defaults(handler=run)


def run(args: argparse.Namespace) -> int:
    """Exit code 0 whatever the verdicts: a negative result is a result."""
    from collections import Counter

    from mxfp4.analysis.claims import VERDICTS, effect_text, judge_all, load_ledger
    from mxfp4.directories import checkout
    from mxfp4.errors import UserError
    from mxfp4.studies.scales import get_scale
    from mxfp4.studies.store import Store

    if args.study:
        return _study(args)
    if args.corpus:
        raise UserError("--corpus goes with --study")
    if args.ledger is None:
        checkout("mxfp4 claims without --ledger FILE")
    claims = load_ledger(args.ledger)
    if args.id:
        known = [c.id for c in claims]
        unknown = [i for i in args.id if i not in known]
        if unknown:
            raise UserError(f"claim {unknown[0]!r} is not in the ledger; known: {', '.join(known)}")
        claims = [c for c in claims if c.id in args.id]
    if args.scale:
        get_scale(args.scale)
    verdicts = judge_all(claims, Store().load(args.scale))
    if args.json:
        print(json.dumps([v.to_dict() for v in verdicts], indent=1))
        return 0
    for v in verdicts:
        figure = v.claim.published
        print(f"{v.verdict.upper():<29} {v.claim.id}")
        print(textwrap.fill(v.claim.claim, 100, initial_indent="  ", subsequent_indent="  "))
        print(f"  published: {figure.text} ({figure.cite})")
        if v.effect is not None and v.study is not None:
            seeds = ", ".join(map(str, v.effect.seeds))
            print(f"  ours: {effect_text(v.effect)}, over {v.effect.over}; seeds {seeds}; scale {v.study.scale}")
            if v.effect.note:
                print(f"        {v.effect.note}")
        for note in v.claim.notes:
            print(textwrap.fill(note, 100, initial_indent="  note: ", subsequent_indent="        "))
        print(f"  {v.reason}\n")
    counts = Counter(v.verdict for v in verdicts)
    print(f"{len(verdicts)} claims: " + ", ".join(f"{counts[name]} {name}" for name in VERDICTS if counts[name]))
    return 0


def _study(args: argparse.Namespace) -> int:
    from mxfp4.analysis.registered_study.text import claims_json, claims_text, gates_text, verdicts
    from mxfp4.data.corpora import check_name
    from mxfp4.errors import UserError
    from mxfp4.studies.registered_arms import CORPORA
    from mxfp4.studies.store import Store

    if args.ledger or args.scale:
        raise UserError("--study goes with neither --ledger nor --scale: it is judged by scale gpu")
    if args.corpus:
        check_name(args.corpus)
    found = verdicts(Store(), text=args.corpus or CORPORA["B"])
    for wanted in args.id or ():
        if wanted not in (known := [v.claim.id for v in found]):
            raise UserError(f"claim {wanted!r} is not in the study; known: {', '.join(known)}")
    found = [v for v in found if not args.id or v.claim.id in args.id]
    print(json.dumps(claims_json(found), indent=1) if args.json else f"{claims_text(found)}\n{gates_text(Store())}")
    return 0
