"""`mxfp4 export`: a trained model as a Hugging Face folder, for lm_eval, for serving, for further training. With
--format mllog: a recorded run as an MLPerf log, a file of `:::MLLOG` lines.

The weights of a finished run are there if it was trained with `mxfp4 train --keep-weights`; those of one that goes on
or was stopped are in its checkpoint.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from mxfp4.errors import UserError


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Register the sub-command."""
    parser = subparsers.add_parser(
        "export",
        help="a trained model in Hugging Face's format, or a run as an MLPerf log",
        description=__doc__,
        epilog="afterwards: lm_eval --model hf --model_args pretrained=FOLDER --tasks ...",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", help="a run id (the name of its record), or a folder of weights or checkpoints")
    parser.add_argument("folder", type=Path, help="where to write; must not be there, or be empty (mllog: a file)")
    parser.add_argument(
        "--format", choices=("huggingface", "mllog"), default="huggingface", help="default: huggingface"
    )
    parser.add_argument("--dtype", default="float32", help="float32 or bfloat16 (default: float32)")
    parser.add_argument("--tokenizer", metavar="FILE", help="tokenizer.json (default: that of the run's corpus)")
    parser.set_defaults(handler=run)


def run(args: argparse.Namespace) -> int:
    """Exit code 0; errors are UserError."""
    if args.format == "mllog":
        return _mllog(args.run, args.folder)
    from mxfp4.adapters.huggingface import export
    from mxfp4.training import weights

    found = weights.load(find(args.run))
    tokenizer = _tokenizer(args.tokenizer, found)
    where = export(found.tensors, found.config.model, args.folder, tokenizer=tokenizer, dtype=args.dtype)
    size = sum(f.stat().st_size for f in where.iterdir()) / 1e6
    step = "finished" if found.step is None else f"step {found.step}"
    print(f"{where}: {found.config.recipe}, seed {found.config.seed}, {step}, {size:,.1f} MB, {args.dtype}")
    if tokenizer is None:
        print("  without a tokenizer: the corpus has none, or is not packed here; --tokenizer FILE adds one")
    return 0


def _mllog(run: str, file: Path) -> int:
    """Write the MLPerf log of a recorded run. UserError without its record, or where the file is there already."""
    from mxfp4.adapters import mllog
    from mxfp4.studies.store import Store

    records = {record.run_id: record for record in Store().load()}
    record = records.get(Path(run).name)
    if record is None:
        raise UserError(f"{run} has no record, or a damaged one: `mxfp4 plan` lists what is recorded")
    if file.exists():
        raise UserError(f"{file} is there already: name another file")
    about = (record.config, record.curve.to_dict("records"), record.outcome, record.timings, record.machine)
    written = list(mllog.lines(*about, (record.folder / "record.json").stat().st_mtime))
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(written) + "\n")
    print(f"{file}: {len(written)} lines of {record.run_id}, no MLPerf submission; times of steps are interpolated")
    return 0


def find(name: str) -> Path:
    """The folder of kept weights or checkpoints that `name` means. Raises UserError that says how to get one."""
    from mxfp4.studies.store import Store
    from mxfp4.training.checkpoints.checkpoint import latest_step
    from mxfp4.training.weights import kept

    if Path(name).is_dir() and (kept(Path(name)) or latest_step(name) is not None):
        return Path(name)
    store, run_id = Store(), Path(name).name
    for kind in ("weights", "checkpoints"):
        for folder in sorted((store.root / kind).glob(f"*/{run_id}")):
            if kept(folder) or latest_step(folder) is not None:
                return folder
    for record in store.load():
        if record.run_id == run_id:
            raise UserError(
                f"the weights of {run_id} were not kept: `{_again(record.config)} --keep-weights` trains it again, the "
                "record stays"
            )
    there = sorted(p.name for kind in ("weights", "checkpoints") for p in (store.root / kind).glob("*/*") if p.is_dir())
    raise UserError(f"{name} is no run with weights; known: {', '.join(there) or 'none'}")


def _again(config) -> str:
    """The command that trains an arm: by the plan with fewest others, as a plan may have several settings."""
    from mxfp4.studies.plans import plan, plans_of
    from mxfp4.studies.scales import get_scale

    plans = {
        name: plan(name, config.scale, recipes=[config.recipe], seeds=[config.seed]).arms
        for name in plans_of(get_scale(config.scale))
    }
    having = [name for name, arms in plans.items() if config in arms]
    which = f" --plan {min(having, key=lambda name: len(plans[name]))}" if having else ""
    return f"mxfp4 train --scale {config.scale}{which} --arm {config.recipe} --seed {config.seed}"


def _tokenizer(given: str | None, found):
    """The TextTokenizer of a run: the file given, that beside the weights, or that of its packed corpus."""
    from mxfp4.data import tokenizer
    from mxfp4.data.packing import folder_for

    if given is not None:
        return tokenizer.load(given)
    if found.tokenizer is not None:
        return tokenizer.load(found.tokenizer)
    try:
        folder = folder_for(found.config.corpus, found.config.model.vocab_size, append_eod=found.config.append_eod)
    except UserError:  # no such corpus here
        return None
    return tokenizer.load(folder) if (folder / "tokenizer.json").is_file() else None
