"""A run's curve in TensorBoard or Weights & Biases: loss, learning rate, norm of the gradient, evaluations, tokens/s.

Neither library is a requirement. Sources: torch.utils.tensorboard.SummaryWriter of PyTorch 2.13, whose `purge_step`
hides the steps that a killed run wrote after its checkpoint; wandb 0.31, `init` with an id and `resume="allow"`, which
goes on in the same run, and whose `log` drops steps that are there already.
"""

from __future__ import annotations

import importlib.util
import math
import os
from pathlib import Path
from typing import Any

from mxfp4.errors import UserError
from mxfp4.training.monitoring.sink import RunView, Sink, Speed, evaluations

WRITERS = ("tensorboard", "wandb")
NAMES = {"train_loss": "train/loss", "lr": "train/lr", "grad_norm": "train/grad_norm"}


def check(name: str) -> None:
    """UserError for an unknown writer, or one whose library is not installed."""
    if name not in WRITERS:
        raise UserError(f"log_to={name!r} is not known; allowed: {', '.join(WRITERS)}")
    if importlib.util.find_spec(name) is None:
        raise UserError(f"--log-to {name} needs the package {name}, which is not installed: pip install {name}")


def scalars(row: dict[str, Any]) -> dict[str, float]:
    """{name in the writer: value} of a row, without values that were not taken."""
    named = {NAMES[name]: float(row[name]) for name in NAMES if not math.isnan(row[name])}
    return named | {f"eval/loss_{name}": loss for name, loss in evaluations(row).items()}


class CurveWriter(Sink):
    """Sends each step once; the rate of tokens goes with the newest."""

    def begin(self, run: RunView) -> None:
        """Open the writer at the run's step."""
        self.speed = Speed(run)
        self.open(run.step)

    def rows(self, fresh: list[dict[str, Any]], run: RunView) -> None:
        """Send rows."""
        speed = self.speed.since(run)
        for row in fresh:
            values = scalars(row)
            if row is fresh[-1] and speed is not None:
                values["train/tokens_per_second"] = speed
            self.send(row["step"], values)
        self.flush()

    def end(self, run: RunView) -> None:
        """Close the writer."""
        self.close(failed=False)

    def failed(self, error: BaseException) -> None:
        """Close the writer."""
        self.close(failed=True)

    def open(self, step: int) -> None:
        raise NotImplementedError

    def send(self, step: int, values: dict[str, float]) -> None:
        raise NotImplementedError

    def flush(self) -> None:
        """Bring to disk what was sent."""

    def close(self, *, failed: bool) -> None:
        raise NotImplementedError


class TensorBoard(CurveWriter):
    """Event files in `folder`/tensorboard."""

    def __init__(self, folder: Path):
        self.folder = folder / "tensorboard"
        self.writer: Any = None

    def open(self, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(self.folder), purge_step=step + 1 if step else 0)

    def send(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def flush(self) -> None:
        self.writer.flush()

    def close(self, *, failed: bool) -> None:
        if self.writer is not None:
            self.writer.close()


class WandB(CurveWriter):
    """A run of project $WANDB_PROJECT (default: mxfp4) whose id is the record's."""

    def __init__(self, folder: Path, run_id: str, name: str, config: dict[str, Any]):
        self.folder, self.run_id, self.name, self.config = folder, run_id, name, config
        self.run: Any = None

    def open(self, step: int) -> None:
        import wandb

        self.folder.mkdir(parents=True, exist_ok=True)
        project = os.environ.get("WANDB_PROJECT", "mxfp4")
        self.run = wandb.init(
            project=project, id=self.run_id[-64:].lstrip("-"), name=self.name, dir=str(self.folder),
            config=self.config, resume="allow",
        )  # fmt: skip

    def send(self, step: int, values: dict[str, float]) -> None:
        self.run.log(values, step=step)

    def close(self, *, failed: bool) -> None:
        if self.run is not None:
            self.run.finish(exit_code=int(failed))
