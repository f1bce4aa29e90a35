"""`mxfp4 prepare`: fetch, tokenize and pack a corpus once, or verify the packed one."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING

from mxfp4.errors import UserError

if TYPE_CHECKING:
    from mxfp4.data.megatron.corpus import MegatronCorpus
    from mxfp4.studies.scales import Scale


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Register the sub-command."""
    parser = subparsers.add_parser("prepare", help="tokenize and pack a corpus once", description=__doc__)
    parser.add_argument(
        "--corpus",
        help="prose, technical, text, c4, c4:768-895, c4:toy, synthetic or megatron:PREFIX,VALIDATION_PREFIX (default: the "
        "scale's)",
    )
    parser.add_argument(
        "--append-eod", action=argparse.BooleanOptionalAction, default=None,
        help="put the end-of-document token after each document (default: the scale's)",
    )  # fmt: skip
    parser.add_argument("--vocab-size", type=int, help="ids of the tokenizer; 128256 takes Llama 3.1's")
    parser.add_argument("--scale", default="cpu", help="sets the two above (default: cpu)")
    parser.add_argument("--shards", type=shard_range, metavar="FIRST-LAST", help="c4: training shards, e.g. 768-1023")
    parser.add_argument("--root", help="c4: folder of a local mirror (default: MXFP4_C4, else the hub)")
    parser.add_argument(
        "--tokenizer", metavar="FILE",
        help="use this tokenizer.json: of Llama 3.1, as MXFP4_LLAMA_TOKENIZER does; else instead of training one",
    )  # fmt: skip
    parser.add_argument("--verify", action="store_true", help="read every byte and check its hash")
    parser.add_argument("--rebuild", action="store_true", help="pack again even if it is there")
    parser.set_defaults(handler=run)


def shard_range(text: str) -> tuple[int, int]:
    """ "768-1023" or "768" -> (first, last)."""
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not a range of shards such as 768-1023")
    return int(match[1]), int(match[2] or match[1])


def run(args: argparse.Namespace) -> int:
    """Exit code 0; errors are UserError."""
    from mxfp4.data.megatron.names import is_megatron
    from mxfp4.data.packing import prepare  # imports torch
    from mxfp4.studies.scales import get_scale

    scale = get_scale(args.scale).on_corpus(args.corpus)
    corpus, vocab_size = args.corpus or scale.corpus, args.vocab_size or scale.model.vocab_size
    append_eod = scale.append_eod if args.append_eod is None else args.append_eod
    options = {k: v for k, v in (("shards", args.shards), ("c4_root", args.root)) if v is not None}
    if options and corpus.partition(":")[0] != "c4":
        raise UserError(f"--shards and --root belong to corpus c4, not {corpus!r}")
    packed = prepare(
        corpus, vocab_size, tokenizer=args.tokenizer, rebuild=args.rebuild, append_eod=append_eod, **options
    )
    if corpus == "synthetic":
        print(f"synthetic: generated as it is used, nothing to prepare ({packed.fingerprint})")
        return 0
    if is_megatron(corpus):
        return _megatron(packed, args.verify)
    print(f"{packed.folder.name}: {'packed' if packed.built else 'already there'} in {packed.folder}")
    for split, counts in packed.meta["splits"].items():
        print(
            f"  {split:<11}{counts['documents']:>12,} documents {counts['bytes']:>16,} bytes "
            f"{counts['tokens']:>15,} tokens   {packed.bytes_per_token(split):.2f} bytes/token"
        )
        for source, part in sorted(counts["sources"].items()):
            if len(counts["sources"]) > 1:
                print(f"    {source:<9}{part['documents']:>12,} documents {part['bytes']:>16,} bytes")
    if len(held := _held(packed.meta["parts"])) > 1:
        print(
            f"  {len(held)} training parts of {min(held)[0]:,} to {max(held)[0]:,} documents, "
            f"{min(b for _, b in held):,} to {max(b for _, b in held):,} bytes"
        )
    print(f"  {packed.meta['removed_duplicates']} training documents left out: they equal a validation document")
    print(f"  {'an' if append_eod else 'no'} end-of-document token after each document")
    print(f"  {_reader(args, scale, vocab_size, packed.folder)}")
    if args.verify:
        packed.verify()
        print("  verified: every part has the hash it was packed with")
    return 0


def _megatron(corpus: MegatronCorpus, verify: bool) -> int:
    print(f"{corpus.folder.name}: files {'hashed' if corpus.built else 'as they were'}, noted in {corpus.folder}")
    for split, counts in corpus.meta["splits"].items():
        print(f"  {split:<11}{counts['documents']:>12,} documents {counts['tokens']:>15,} tokens")
    for split, files in corpus.origin["files"].items():
        print(f"  {split:<11}{files['prefix']}.bin SHA-256 {files['bin']}")
    if verify:
        corpus.verify()
        print("  verified: every file has the hash that was noted")
    return 0


def _reader(args: argparse.Namespace, scale: Scale, vocab_size: int, folder: Path) -> str:
    """Which command trains on it."""
    from mxfp4.data.tokenizer import LLAMA_VOCAB

    if vocab_size != scale.model.vocab_size or (args.tokenizer and vocab_size != LLAMA_VOCAB):
        why = "this tokenizer" if vocab_size == scale.model.vocab_size else f"{vocab_size} ids"
        call = f"train(config, corpus=PackedCorpus({str(folder)!r}))"
        return f"no scale trains with {why}: from Python, mxfp4.training.loop.{call}"
    corpus = args.corpus or (f"c4:{args.shards[0]}-{args.shards[1]}" if args.shards else scale.corpus)
    options = "" if corpus == scale.corpus else f" --corpus {corpus}"
    if args.append_eod not in (None, scale.append_eod):
        options += f" --{'' if args.append_eod else 'no-'}append-eod"
    return f"read by `mxfp4 train --scale {scale.name}{options}`"


def _held(parts: list[dict]) -> list[tuple[int, int]]:
    """(documents, bytes) that each training part held, those left out not counted."""
    sources = [p["sources"].values() for p in parts if p["split"] == "train"]
    return [(sum(c["documents"] for c in s), sum(c["bytes"] for c in s)) for s in sources]
