"""Llama 3.1-8B at full width and a few layers: trained, killed, and taken up by another number of GPUs.

    python tests/gpu/width.py --ranks 2 --then 1        on a machine with two GPUs
    python tests/gpu/width.py --ranks 1 --then 1        on one
    python tests/gpu/width.py --ranks 2 --then 1 --tiny on the CPU

For each recipe a run on `--ranks` GPUs saves a checkpoint after step `--save`, beside its training, and is killed
(kill -9 of every rank) at the first step from `--kill` on at which that is whole; a second run, on `--then` GPUs, goes
on from it to the end. Each prints tokens/s, over the steps after the first WARM_UP and with what saving costs; the peak
of allocated memory of each rank beside the dry run's estimate; and where the time of rank 0 went; --json keeps all of
it (runs/bench/width-h200.json is what the book shows). The text is synthetic: nothing to prepare. Ranks are forked
from a server that has torch loaded, as those of `mxfp4 train` are.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import wait
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from mxfp4.bench import results as bench  # noqa: E402
from mxfp4.data.synthetic import SyntheticCorpus  # noqa: E402
from mxfp4.numerics.gemm_backends.choice import matmul_path  # noqa: E402
from mxfp4.numerics.native import fp8_path  # noqa: E402
from mxfp4.studies.scales import MI355X  # noqa: E402
from mxfp4.training import run_state  # noqa: E402
from mxfp4.training.checkpoints import checkpoint, dcp_folder  # noqa: E402
from mxfp4.training.checkpoints.resume import Checkpoints  # noqa: E402
from mxfp4.training.config import TrainConfig  # noqa: E402
from mxfp4.training.execution import distributed  # noqa: E402
from mxfp4.training.loop import train  # noqa: E402
from mxfp4.training.memory import estimate  # noqa: E402
from mxfp4.training.run_state import FETCH_EVERY  # noqa: E402

WARM_UP = 20  # steps; a multiple of FETCH_EVERY, so that the device is waited for at both ends of what is timed
PATIENCE = 10  # seconds that the other ranks have to end in once one has failed
PRELOAD = [
    "mxfp4.studies.scales",
    "mxfp4.training.loop",
    "mxfp4.training.checkpoints.dcp_folder",
    "torch.distributed.fsdp",
]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1, help="GPUs before the kill")
    parser.add_argument("--then", type=int, default=1, help="GPUs after it")
    parser.add_argument("--recipes", nargs="+", default=["bf16", "fp8", "mxfp4+h16"])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save", type=int, default=100, help="step after which the first run begins a checkpoint")
    parser.add_argument("--kill", type=int, default=150, help="first step at which it may die")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=4, help="sequences a step, in two parts")
    parser.add_argument("--recompute", type=int, default=0, metavar="N", help="recompute every N-th block")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="a small model on the CPU")
    parser.add_argument("--folder", type=Path, help="where checkpoints go (default: a temporary folder)")
    parser.add_argument("--json", type=Path, help="file for the figures")
    return parser.parse_args(arguments)


def config(args: argparse.Namespace, recipe: str) -> TrainConfig:
    """MI355X's arm with fewer layers and a small budget."""
    sizes = {"n_layers": args.layers}
    if args.tiny:
        sizes |= {"vocab_size": 512, "dim": 64, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 128, "max_seq_len": args.seq}
    return MI355X.config(
        recipe, 0, corpus="synthetic", model=MI355X.model.to_dict() | sizes, seq_len=args.seq, batch_size=args.batch,
        micro_batches=2, steps=args.steps, eval_every=args.steps, eval_sequences=args.batch, warmup=20, lr=3e-4,
        lr_min=3e-5, decay_steps=0, target_loss=None, stop_at_target=False,
    )  # fmt: skip


class Clock:
    """Where the time of a process goes: seconds by name, in order, from `started` on."""

    def __init__(self, started: float):
        self.seconds: dict[str, float] = defaultdict(float)
        self.last = started

    def lap(self, name: str) -> None:
        """What has passed since the lap before belongs to `name`."""
        now = time.monotonic()
        self.seconds[name] += now - self.last
        self.last = now

    def around(self, owner, attribute: str, name: str) -> None:
        """From here on a call of `owner.attribute` is a lap, and so is what came before it."""
        honest = getattr(owner, attribute)

        def timed(*args, **kwargs):
            self.lap("other")
            result = honest(*args, **kwargs)
            self.lap(name)
            return result

        setattr(owner, attribute, timed)

    def __str__(self) -> str:
        return ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.seconds.items())


def time_writing(seconds: dict[str, float]) -> None:
    """From here on a checkpoint leaves in `seconds` how long a step waited for its copy, and when it was written."""
    honest = dcp_folder.write

    def write(*args):
        begun = time.monotonic()
        future = honest(*args)
        seconds["a step waited"] = time.monotonic() - begun
        future.add_done_callback(lambda _: seconds.update({"written after": time.monotonic() - begun}))
        return future

    dcp_folder.write = write


def work(
    args: argparse.Namespace, recipe: str, killed: bool, rank: int, size: int, meeting: Path, started: float
) -> None:
    """One rank of one run. killed: it dies when its checkpoint is whole, and leaves `meeting`/killed; else it ends."""
    gpu = not args.tiny
    device = torch.device("cuda", rank) if gpu else torch.device("cpu")
    torch.set_num_threads(4 if gpu else 1)
    arm, folder = config(args, recipe), args.folder / recipe
    corpus = SyntheticCorpus(arm.model.vocab_size)
    ticks: dict[int, float] = {}
    clock, writing, row, at = Clock(started), {}, {}, 0
    clock.lap("start")
    clock.around(run_state, "initial_model", "model")
    clock.around(Checkpoints, "load", "load")
    time_writing(writing)
    Checkpoints.due = lambda _: killed and at == args.save  # not by the clock: how fast the GPU is decides nothing

    def keep(figures: dict) -> None:
        (meeting / "figures.json").write_text(json.dumps(figures))

    def report(ranks: distributed.Ranks) -> None:
        peaks = ranks.gather(torch.cuda.max_memory_allocated(device) if gpu else 0)
        if ranks.rank:
            return
        first, last = min(ticks, default=at), max(ticks, default=at)
        how = {"compiled": args.compile, "recompute_every": args.recompute}
        how |= {"native": matmul_path(device) == "native", "fp8": fp8_path(device) == "native"}
        expected = estimate(arm, ranks=ranks.size, device=device.type, **how).peak
        tokens = (last - first) * arm.tokens_per_step
        rate = tokens / (ticks[last] - ticks[first]) if last > first else None
        row.update({
            "recipe": recipe, "ranks": ranks.size, "layers": args.layers, "seq_len": args.seq,
            "from": begun, "first": first, "last": last,
            "tokens_per_second": rate, "tokens_per_step": arm.tokens_per_step,
            "peak_bytes": peaks, "estimated_bytes": expected, "seconds": clock.seconds, "checkpoint": writing,
        })  # fmt: skip
        memory = " ".join(f"{peak / 2**30:.2f}" for peak in peaks)
        speed = "?" if rate is None else f"{rate:.0f}"
        saved = "".join(f", {name} {seconds:.1f}" for name, seconds in writing.items())
        print(
            f"{recipe:<12} {ranks.size} ranks  steps {first:>4}-{last:<4} {speed:>8} tokens/s  peak {memory} GiB, "
            f"estimated {expected / 2**30:.2f}\n{'':<12} seconds: {clock}{saved and '; checkpoint:' + saved[1:]}",
            flush=True,
        )

    def on_step(step: int) -> None:
        nonlocal at
        at = step
        if step == begun + 1:
            clock.lap("first step")
        if step == begun + WARM_UP:
            clock.lap("warm-up")
        if step >= begun + WARM_UP and step % FETCH_EVERY[device.type] == 0:
            ticks[step] = time.perf_counter()
        if not killed or step < args.kill:
            return
        saved = ranks.agree(checkpoint.latest_step(folder) if rank == 0 and "written after" in writing else None)
        if saved is None or saved <= begun:
            return
        clock.lap("steps")
        report(ranks)
        if rank == 0:
            print(f"{'':<12} killed at step {step}, where the checkpoint of step {saved} is whole", flush=True)
            keep(row | {"killed": step, "saved": saved})
            (meeting / "killed").touch()
        ranks.agree(None)
        time.sleep(0.2)  # rank 0's word must have reached the others before it is gone
        os.kill(os.getpid(), signal.SIGKILL)

    with ThreadPoolExecutor(1) as beside:
        tables = beside.submit(corpus.batch, 0, arm.batch_size, arm.seq_len, arm.seed)  # while the ranks meet
        with distributed.joined(device, (f"file://{meeting}/ranks", rank, size)) as ranks:
            tables.result()
            clock.lap("meeting")
            begun = ranks.agree(checkpoint.latest_step(folder) or 0)
            result = train(
                arm, corpus=corpus, device=device, checkpoint_dir=folder, on_step=on_step, progress=False,
                compile=args.compile, recompute_every=args.recompute,
            )  # fmt: skip
            clock.lap("steps")
            report(ranks)
            if rank == 0:
                losses, end = [r["train_loss"] for r in result.curve[1:]], result.outcome
                keep(row | {"losses": [losses[0], losses[-1]], "status": end["status"], "loss": end["final_loss"]})
                print(
                    f"{'':<12} from step {begun} to {end['step']}, {end['status']}: training "
                    f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, evaluation {end['final_loss']:.3f}",
                    flush=True,
                )


def launch(args: argparse.Namespace, recipe: str, killed: bool, size: int) -> dict | None:
    """The figures of one run, or None unless its ranks ended as they should. They live and die together."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with tempfile.TemporaryDirectory(prefix="width-") as folder:
        meeting, started = Path(folder), time.monotonic()
        ranks = [
            context.Process(target=work, args=(args, recipe, killed, r, size, meeting, started), daemon=True)
            for r in range(size)
        ]
        for rank in ranks:
            rank.start()
        while any(rank.is_alive() for rank in ranks):
            wait([rank.sentinel for rank in ranks if rank.is_alive()])
            if any(rank.exitcode for rank in ranks):
                for rank in ranks:
                    rank.join(PATIENCE)
                    rank.kill()
        if killed and all(rank.exitcode == 0 for rank in ranks):
            print(f"{recipe}: no checkpoint was whole before the last step, {args.steps}", file=sys.stderr)
        as_meant = all(rank.exitcode == (-signal.SIGKILL if killed else 0) for rank in ranks)
        if not as_meant or (killed and not (meeting / "killed").exists()):
            return None
        return json.loads((meeting / "figures.json").read_text())


def drive(args: argparse.Namespace) -> int:
    """Run after run; exit code 1 when one did not end as it should."""
    if not WARM_UP < args.save < args.kill < args.steps:
        raise SystemExit(f"{WARM_UP} < --save {args.save} < --kill {args.kill} < --steps {args.steps} must hold")
    args.folder = args.folder or Path(tempfile.mkdtemp(prefix="width-"))
    rows = []
    for recipe in args.recipes:
        for killed, size in ((True, args.ranks), (False, args.then)):
            figures = launch(args, recipe, killed, size)
            if figures is None:
                return 1
            rows.append(figures)
            if args.json:
                bench.write(args.json, "width", "cpu" if args.tiny else "cuda", rows)
        checkpoint.remove(args.folder / recipe)
    return 0


if __name__ == "__main__":
    sys.exit(drive(parse()))
