"""A run between two steps: its model, optimizer and curve, and what is done at a step."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from mxfp4.data.known_entropy import KnownEntropy
from mxfp4.errors import UserError
from mxfp4.layers.linear import end_step, set_step, weights_kept, weights_made
from mxfp4.numerics.version import SEMANTICS_VERSION
from mxfp4.training import nonfinite
from mxfp4.training.arm_model import in_recipe, initial_model
from mxfp4.training.branch import Branch, kept
from mxfp4.training.checkpoints.resume import Checkpoints
from mxfp4.training.config import TrainConfig
from mxfp4.training.divergence import DivergenceWatch, StallRule
from mxfp4.training.evaluation import (
    bits_per_byte,
    chunked_token_loss,
    chunked_token_losses,
    fused_token_loss,
    token_loss,
    token_losses,
    window_losses,
)
from mxfp4.training.execution.attention import check_backend, set_attention
from mxfp4.training.execution.choices import PLAIN, Execution
from mxfp4.training.execution.cross_entropy import check_choice
from mxfp4.training.execution.cuda_graph import CapturedStep
from mxfp4.training.execution.distributed import Ranks, whole
from mxfp4.training.execution.recompute import recompute_every
from mxfp4.training.forwards import OWN, Forwards
from mxfp4.training.optimizer import learning_rate, make_optimizer, set_learning_rate
from mxfp4.training.protocols import Probe, TokenSource, TrainResult

CALIBRATION_WINDOWS = 16
"""Of the training data, for forwards that quantize after training."""
FETCH_EVERY = {"cpu": 1, "cuda": 20}  # steps between two looks at the losses


class Run:
    """A run between two steps. `status` is None while it goes on."""

    def __init__(
        self, config: TrainConfig, corpus: TokenSource, device: torch.device, ranks: Ranks, arms: Callable[[], int],
        execution: Execution = PLAIN,
    ):  # fmt: skip
        if corpus.vocab_size != config.model.vocab_size:
            raise UserError(
                f"the corpus has a vocabulary of {corpus.vocab_size}, the model one of {config.model.vocab_size}"
            )
        ranks.check(config.micro_batches)
        if ranks.size == 1 and config.reduce_dtype != "float32":
            raise UserError(f"reduce_dtype={config.reduce_dtype!r} is of a sum over several GPUs, and this run has one")
        execution.check_ranks(ranks.size)
        if isinstance(corpus, KnownEntropy):
            corpus = corpus.on(device)  # made where it is used
        self.config, self.corpus, self.device, self.ranks, self.arms = config, corpus, device, ranks, arms
        self.execution = execution
        self.model = initial_model(config, device, ranks, execution)
        self.optimizer = make_optimizer(self.model, config)
        windows = corpus.eval_windows(max(config.eval_sequences, config.final_eval_sequences), config.seq_len)
        self.bytes_per_token = corpus.bytes_per_token(windows=windows)
        self.eval_windows = windows.to(device)
        self.exact = (
            corpus.judge(self.eval_windows) if isinstance(corpus, KnownEntropy) and config.eval_forwards else None
        )
        calibration = corpus.batch(0, config.batch_size, config.seq_len, config.seed)[:CALIBRATION_WINDOWS].to(device)
        self.forwards = Forwards(config, self.model, self.eval_windows, self.exact and self.exact.copied, calibration)
        self.branch: Branch | None = None
        self.update, self.losses_of = self._update, partial(token_losses, self.model)
        self.replayed: list[dict] = []
        self.begin()

    def begin(self) -> None:
        """As before the first step, but for the weights and the optimizer."""
        self.step = 0
        self.watch = DivergenceWatch(self.config.model.vocab_size)
        self.rows: list[dict] = []
        self.window_losses: list[float] = []
        self.pending: list[tuple[int, float, Tensor]] = []
        self.probes: list[dict] = []
        self.evaluations: list[dict] = []
        self.windows: dict[str, list[float]] = {}
        self.branch_rows: list[dict] = []
        self.branched: list[str] = []
        self.status: str | None = None
        self.reason: str | None = None
        self.suspect = False  # whether a value that is not finite is the reason
        self.target: dict | None = None
        self.seconds = {"train": 0.0, "evaluate": 0.0, "timed": 0.0, "part": 0.0}  # part: of the device
        self.timed_tokens = 0
        self.timed_from: tuple[float, int] | None = None  # time and step; None: what follows is not timed

    def prepare(self) -> None:
        """Execute steps as `execution` says: it changes speed and memory alone. UserError where the device cannot."""
        chosen, model = self.execution, self.config.model
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        check_backend(chosen.attention, self.device, dtype, model.n_heads, model.n_kv_heads, model.head_dim)
        check_choice(chosen.cross_entropy, self.device, dtype)
        set_attention(self.model, chosen.attention)
        recompute_every(self.model, chosen.recompute_every)
        dense = not model.n_experts  # how many tokens an expert gets changes from step to step
        self.compiled = chosen.compile and dense
        if self.compiled:
            for layer in self.model.layers:
                layer.compile()
        self.fused_loss = self.compiled and bool(self.config.eval_forwards)  # not in studies from before it
        self.keeps_weights = self.ranks.size == 1 and not self.compiled
        self.captured = chosen.capture and dense and self.ranks.size == 1
        if chosen.cross_entropy != "whole":
            self.losses_of = partial(chunked_token_losses, self.model)
        if self.captured:
            self.update, self.losses_of = CapturedStep(self._update), CapturedStep(self.losses_of)

    def advance(self, probe: Probe | None) -> None:
        """One optimizer step, and whatever is due after it."""
        config, started = self.config, time.perf_counter()
        self.step += 1
        batch = self.corpus.batch(self.step - 1, config.batch_size, config.seq_len, config.seed)
        if batch.device.type != self.device.type:  # a packed corpus lies on the host
            batch = batch.pin_memory().to(self.device, non_blocking=True)
        if probe is not None and self.step in (*config.probe_steps, *config.light_probe_steps):
            look = probe if self.step in config.probe_steps else probe.light
            with torch.compiler.set_stance("force_eager"):  # it tries other recipes: nothing to compile for one look
                self.probes += look(self.model, self.step, batch)
            self.optimizer.zero_grad(set_to_none=True)
            self.timed_from = None
        set_step(self.model, self.step, self._parts()[0], rank=0)  # the same on any number of ranks
        lr = learning_rate(config, self.step)
        set_learning_rate(self.optimizer, lr)
        self.pending.append((self.step, lr, self.update(batch)))
        last = self.step == config.steps
        evaluating = last or self.step % config.eval_every == 0
        if evaluating or len(self.pending) >= FETCH_EVERY.get(self.device.type, 1):
            self.fetch()
        self.took("train", started)
        if self.status is None and evaluating:
            self.evaluate()
        if self.status is None and last:
            self.status = "finished"

    def took(self, what: str, started: float) -> None:
        """Account for the seconds since `started`."""
        seconds = time.perf_counter() - started
        self.seconds[what] += seconds
        self.seconds["part"] += seconds / self.arms()

    def _update(self, batch: Tensor) -> Tensor:
        """One step of the optimizer on a batch; [loss, norm of the gradient, load-balance loss, losses of this rank's
        parts], on the device."""
        loss, balance, parts = self._gradients(batch)
        loss, balance = self.ranks.mean(torch.stack([loss, balance]))
        norm = whole(nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return torch.stack([loss, norm.detach(), balance, *parts])

    def _parts(self) -> range:
        """Which parts of a batch are this rank's."""
        return self.ranks.share(self.config.micro_batches)[0]

    def _gradients(self, batch: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Accumulate the gradient of this rank's parts of a batch; return their mean loss and load-balance loss, and
        each one's loss, on the device."""
        mine = self._parts()
        parts = batch.chunk(self.config.micro_batches)[mine.start : mine.stop]
        total, losses = torch.zeros((), device=self.device), []
        balance = torch.full((), math.nan if not self.config.model.n_experts else 0.0, device=self.device)
        with self._weights_of_a_step(len(parts)):
            for i, part in enumerate(parts):
                self.ranks.last_part(self.model, i == len(parts) - 1, not self.execution.reshard_after_forward)
                loss = objective = self._loss(part)
                aux = self.model.balance_loss()
                if aux is not None:
                    objective = loss + self.config.model.aux_loss_weight * aux
                    balance += aux.detach() / len(parts)
                (objective / len(parts)).backward()
                total += loss.detach() / len(parts)
                losses.append(loss.detach())
        return total, balance, losses

    def _loss(self, part: Tensor) -> Tensor:
        how = self.execution.cross_entropy
        if how != "whole":
            return chunked_token_loss(self.model, part, how, self.compiled)
        return (fused_token_loss if self.fused_loss else token_loss)(self.model, part)

    def _weights_of_a_step(self, parts: int) -> AbstractContextManager[None]:
        """Inside, weights are quantized once, where this run does so and there is more than one part to share them."""
        if parts > 1 and self.keeps_weights:
            return weights_kept(self.model)
        if parts > 1 and self.execution.weights_once:
            return weights_made(self.model, torch.bfloat16 if self.device.type == "cuda" else None)
        return nullcontext()

    def fetch(self) -> None:
        """Bring the pending losses to the host, in order, up to a step at which the run has diverged."""
        if not self.pending:
            return
        values = torch.stack([row for _, _, row in self.pending]).tolist()  # waits for the device
        now = time.perf_counter()
        if self.timed_from is not None:
            self.seconds["timed"] += now - self.timed_from[0]
            self.timed_tokens += (self.step - self.timed_from[1]) * self.config.tokens_per_step
        self.timed_from = now, self.step
        for (step, lr, _), (loss, norm, balance, *parts) in zip(self.pending, values, strict=True):
            self.rows.append(self._row(step, train_loss=loss, grad_norm=norm, lr=lr, balance_loss=balance))
            self.reason = self.watch.observe(loss, norm)
            if self.reason is not None:
                self.status, self.suspect = "diverged", not math.isfinite(loss + norm)
                where = nonfinite.in_parts(self.ranks.gather(parts)) if self.suspect else ""
                self.reason += f" at step {step}, {where}" if where else ""
                break
        self.pending.clear()

    def detour(self, branch: Branch, on_step: Callable[[int], None] | None, stop: Callable[[], bool] | None) -> None:
        """Run a branch from here to its end and come back. Where `stop` says so, nothing of it is kept, and it is still due."""
        run = copy.copy(self)
        cooldown = branch.end - branch.start
        run.config = replace(
            self.config, steps=branch.end, cooldown_steps=cooldown, short_budgets=(), decay_recipes=(),
            final_forwards=(), target_loss=None, stop_at_target=False, probe_steps=(), light_probe_steps=(),
            stall_evaluations=0,
        )  # fmt: skip
        run.forwards = replace(self.forwards, config=run.config)
        run.branch, run.rows, run.pending, run.watch = branch, [], [], copy.deepcopy(self.watch)
        evaluated = len(self.evaluations)
        with kept(self.model, self.optimizer):
            if branch.recipe != self.config.recipe:
                run.model = in_recipe(self.model, self.config, branch.recipe)
                run.update, run.losses_of = run._update, partial(token_losses, run.model)
                run.prepare()
            run.timed_from = None
            while run.status is None:
                run.advance(None)
                if on_step:
                    on_step(self.step)
                if run.status is None and stop is not None and stop():
                    del self.evaluations[evaluated:]
                    return
            run.fetch()
        self.branch_rows += [{"branch": branch.name, **row} for row in run.rows]
        self.branched.append(branch.name)
        self.timed_from = None

    def _evaluate_forwards(self) -> None:
        """Evaluate in several forwards; one row each in the table of evaluations."""
        ends, branch = self.step == self.config.steps, self.branch.name if self.branch else ""
        found = self.forwards.judge(self.step, ends)
        about = {"branch": branch, "step": self.step, "tokens": self.step * self.config.tokens_per_step}
        for name, judged in found.items():
            row = {"forward": name, "windows": len(judged.losses), "loss": judged.loss}
            self.evaluations.append({**about, **row, "top1": judged.top1, "copy_top1": judged.copy_top1})
        if ends:
            for name in (OWN, *self.config.eval_forwards):
                self.windows[f"{branch}:{name}" if branch else name] = found[name].losses
        self.window_losses = found[OWN].losses
        self.forward_losses = {name: found[name].loss for name in self.config.eval_forwards}

    def evaluate(self) -> None:
        """Evaluate and write the result into the row of the current step."""
        started = time.perf_counter()
        batch_size = self.config.batch_size // self.config.micro_batches
        mine, most = self.ranks.share(-(-len(self.eval_windows) // batch_size))
        set_step(self.model, self.step, mine.start + (self.config.micro_batches if self.step else 0), rank=0)
        if self.config.eval_forwards:
            self._evaluate_forwards()
        else:
            # A captured batch would keep what an earlier evaluation made of the weights.
            with weights_kept(self.model) if self.keeps_weights and not self.captured else nullcontext():
                self.window_losses = window_losses(
                    self.model, self.eval_windows, batch_size, self.ranks, self.losses_of
                )
        self.ranks.free_gathered(self.model)
        loss = sum(self.window_losses) / len(self.window_losses)
        if self.step == 0:
            self.rows.append(self._row(0))
        row = self.rows[-1]
        row["eval_loss"], row["eval_bpb"] = loss, bits_per_byte(loss, self.bytes_per_token)
        row |= {f"eval_loss_{name}": self.forward_losses[name] for name in self.config.eval_forwards}
        self.timed_from = time.perf_counter(), self.step
        self.took("evaluate", started)
        if self.step == 0:
            self.timed_from = None  # the first steps warm up
        if not math.isfinite(loss):
            self.status, self.suspect = "diverged", True
            where = nonfinite.in_windows(self.window_losses, batch_size, most, self.ranks.size)
            self.reason = f"evaluation loss is {loss} at step {self.step}, {where}"
        wanted = self.config.target_loss
        if wanted is not None and self.target is None and loss <= wanted:
            self.target = {"loss": wanted, "step": self.step, "tokens": row["tokens"]}
            if self.config.stop_at_target:
                self.status = "finished"
        if self.status is None:
            self._end_if_stalled()

    def _end_if_stalled(self) -> None:
        config = self.config
        rule = StallRule(config.stall_evaluations, config.stall_improvement, config.stall_above)
        reason = rule.reason([row["eval_loss"] for row in self.rows if math.isfinite(row["eval_loss"])])
        if reason is not None:
            self.status, self.reason = "stalled", f"{reason}, at step {self.step}"

    def _row(self, step: int, **known: float) -> dict:
        names = ("train_loss", "grad_norm", "lr", "eval_loss", "eval_bpb", "balance_loss")
        blank = dict.fromkeys((*names, *(f"eval_loss_{name}" for name in self.config.eval_forwards)), math.nan)
        return {"step": step, "tokens": step * self.config.tokens_per_step, **blank, **known}

    def save(self, checkpoints: Checkpoints) -> None:
        """Leave a checkpoint, unless the losses it would hold show that the run has diverged."""
        self.fetch()
        if self.status is not None:
            return
        end_step(self.model)  # ranks share what they have seen before one of them writes it
        plain = {
            "config": self.config.to_dict(),
            "semantics_version": SEMANTICS_VERSION,
            "corpus": self.corpus.fingerprint,
            "curve": self.rows,
            "window_losses": self.window_losses,
            "probes": self.probes,
            "evaluations": self.evaluations,
            "windows": self.windows,
            "branch_rows": self.branch_rows,
            "branched": self.branched,
            "target": self.target,
            "seconds": self.seconds,
            "timed_tokens": self.timed_tokens,
            "replayed": self.replayed,
        }
        checkpoints.save(self.step, plain)
        self.timed_from = time.perf_counter(), self.step

    def resume(self, checkpoints: Checkpoints) -> None:
        """Go on from the newest whole checkpoint, if there is one. Raises UserError when it is another run's."""

        def check(state: dict) -> None:
            ours, theirs = self.config.to_dict(), state["config"]
            for name in ours:
                if ours[name] != theirs.get(name, ours[name]):
                    raise UserError(
                        f"{checkpoints.folder} is of a run with {name}={theirs[name]!r}, this one has {ours[name]!r}"
                    )
            version = state.get("semantics_version", SEMANTICS_VERSION)
            if version != SEMANTICS_VERSION:
                raise UserError(
                    f"{checkpoints.folder} is of a run by semantics version {version}, this is {SEMANTICS_VERSION}: its "
                    "numbers would change midway; train it in another folder"
                )
            if state["corpus"] != self.corpus.fingerprint:
                raise UserError(
                    f"{checkpoints.folder} was trained on corpus {state['corpus']}, this one is "
                    f"{self.corpus.fingerprint}"
                )

        found = checkpoints.load(check)
        if found is None:
            return
        self.step, state = found
        self.rows, self.probes, self.target = state["curve"], state["probes"], state["target"]
        self.window_losses = state["window_losses"]
        for name in ("evaluations", "windows", "branch_rows", "branched"):
            setattr(self, name, state.get(name, getattr(self, name)))
        self.replayed = self.replayed or state.get("replayed", [])  # what this process knows is never less
        seconds = state["seconds"]  # of a checkpoint from before parts were counted: as if it had been alone
        self.seconds = {"part": seconds["train"] + seconds["evaluate"], **seconds}
        self.timed_tokens = state["timed_tokens"]
        for row in self.rows[1:]:
            self.watch.observe(row["train_loss"], row["grad_norm"])

    def result(self) -> TrainResult:
        evaluated = [row for row in self.rows if math.isfinite(row["eval_loss"])]
        step = self.rows[-1]["step"]
        outcome = {
            "status": self.status,
            "step": step,
            "tokens": step * self.config.tokens_per_step,
            "reason": self.reason,
            "final_loss": evaluated[-1]["eval_loss"] if evaluated else None,
            "final_bpb": evaluated[-1]["eval_bpb"] if evaluated else None,
            "target": self.target,
        }
        if self.replayed:
            outcome["replayed"] = self.replayed
        timings = {
            "train_seconds": self.seconds["train"],
            "evaluate_seconds": self.seconds["evaluate"],
            "arms_on_device": round((self.seconds["train"] + self.seconds["evaluate"]) / self.seconds["part"], 2),
            "tokens_per_second": self.timed_tokens / self.seconds["timed"] if self.seconds["timed"] else None,
        }
        if self.device.type == "cuda":
            timings["peak_memory_bytes"] = max(self.ranks.gather(torch.cuda.max_memory_allocated(self.device)))
        timings |= self.execution.recorded()
        if self.ranks.control is not None:
            timings["ranks"] = self.ranks.size
        windows = dict(self.windows)
        if self.exact is not None and windows:
            windows["floor"] = (-self.exact.log_prob.mean(dim=1)).tolist()
        return TrainResult(
            self.rows, self.probes, self.window_losses, outcome, timings, self.model, self.evaluations, self.branch_rows,
            windows,
        )  # fmt: skip
