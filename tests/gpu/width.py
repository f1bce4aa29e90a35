"""Llama 3.1-8B at full width and a few layers: trained, killed, and taken up by another number of GPUs.

    python tests/gpu/width.py --ranks 2 --then 1        on a machine with two GPUs
    python tests/gpu/width.py --ranks 1 --then 1        on one
    python tests/gpu/width.py --ranks 2 --then 1 --tiny on the CPU

For each recipe a run on `--ranks` GPUs is killed (kill -9 of every rank) at step `--kill`, and a second one on `--then`
GPUs goes on from its newest checkpoint to the end. Each prints tokens/s, over the steps after the first WARM_UP and
with whatever saving costs, and the peak of allocated memory of each rank beside the dry run's estimate. The text is synthetic: nothing to prepare.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from mxfp4.experiments.scales import MI355X  # noqa: E402
from mxfp4.training import checkpoint, parallel  # noqa: E402
from mxfp4.training.config import TrainConfig  # noqa: E402
from mxfp4.training.loop import FETCH_EVERY, train  # noqa: E402
from mxfp4.training.memory import estimate  # noqa: E402

WARM_UP = 20  # steps; a multiple of FETCH_EVERY, so that the device is waited for at both ends of what is timed


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1, help="GPUs before the kill")
    parser.add_argument("--then", type=int, default=1, help="GPUs after it")
    parser.add_argument("--recipes", nargs="+", default=["bf16", "fp8", "mxfp4+h16"])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--kill", type=int, default=80, help="a multiple of 20")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=4, help="sequences a step, in two parts")
    parser.add_argument("--recompute", type=int, default=0, metavar="N", help="recompute every N-th block")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="a small model on the CPU")
    parser.add_argument("--folder", type=Path, help="where checkpoints go (default: a temporary folder)")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


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


def work(args: argparse.Namespace) -> None:
    """One rank of one run: `--worker killed` ends at step `--kill`, `--worker whole` at the last one."""
    (recipe,) = args.recipes
    gpu = not args.tiny
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    arm, ticks = config(args, recipe), {}

    def report(ranks: parallel.Ranks) -> None:
        first, last = min(ticks), max(ticks)
        rate = (last - first) * arm.tokens_per_step / (ticks[last] - ticks[first])
        peaks = ranks.gather(torch.cuda.max_memory_allocated(device) if gpu else 0)
        if ranks.rank == 0:
            how = {"compiled": args.compile, "recompute_every": args.recompute}
            expected = estimate(arm, ranks=ranks.size, device=device.type, **how).peak
            memory = " ".join(f"{peak / 2**30:.2f}" for peak in peaks)
            print(
                f"{recipe:<12} {ranks.size} ranks  steps {first:>4}-{last:<4} {rate:>9.0f} tokens/s  peak {memory} GiB, "
                f"estimated {expected / 2**30:.2f}",
                flush=True,
            )

    with parallel.joined(device) as ranks:
        begun = checkpoint.latest_step(args.folder / recipe) or 0

        def on_step(step: int) -> None:
            if step >= begun + WARM_UP and step % FETCH_EVERY[device.type] == 0:
                ticks[step] = time.perf_counter()
            if args.worker == "killed" and step == args.kill:
                report(ranks)
                ranks.agree(None)
                os.kill(os.getpid(), signal.SIGKILL)

        result = train(
            arm, device=device, checkpoint_dir=args.folder / recipe, checkpoint_seconds=15.0 if gpu else 0.2,
            on_step=on_step, progress=False, compile=args.compile, recompute_every=args.recompute,
        )  # fmt: skip
        report(ranks)
        if ranks.rank == 0:
            losses = [row["train_loss"] for row in result.curve[1:]]
            print(
                f"{'':<12} from step {begun} to {result.outcome['step']}, {result.outcome['status']}: training loss "
                f"{losses[0]:.3f} -> {losses[-1]:.3f}, evaluation {result.outcome['final_loss']:.3f}",
                flush=True,
            )


def drive(args: argparse.Namespace) -> int:
    """Run after run; exit code 1 when one did not end as it should."""
    if args.kill % WARM_UP:
        raise SystemExit(f"--kill {args.kill} must be a multiple of {WARM_UP}")
    folder = args.folder or Path(tempfile.mkdtemp(prefix="width-"))
    for recipe in args.recipes:
        for role, ranks in (("killed", args.ranks), ("whole", args.then)):
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
            command += [__file__, *sys.argv[1:], "--recipes", recipe, "--folder", str(folder), "--worker", role]
            done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
            if (done.returncode == 0) != (role == "whole"):
                print(done.stderr[-4000:], file=sys.stderr)
                return 1
            if role == "killed" and not checkpoint.latest_step(folder / recipe):
                print(f"{recipe}: no checkpoint was whole at the kill", file=sys.stderr)
                return 1
        checkpoint.remove(folder / recipe)
    return 0


if __name__ == "__main__":
    arguments = parse()
    sys.exit(work(arguments) if arguments.worker else drive(arguments))
