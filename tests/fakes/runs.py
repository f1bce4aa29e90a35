"""A complete runs folder of scale cpu without training: made-up curves, probes of untrained models.

The probes are real ones, taken from each arm's recipe at the model's first weights, so that chapters find every
column, metric and recipe that a trained record has.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Container
from dataclasses import replace
from pathlib import Path

import torch

from mxfp4.data.synthetic import SyntheticCorpus
from mxfp4.diagnostics.probe import Probe
from mxfp4.layers.convert import convert
from mxfp4.layers.linear import set_step
from mxfp4.studies.plans import plan
from mxfp4.studies.store import Store
from mxfp4.training.config import TrainConfig
from mxfp4.training.model import build_model
from tests.fakes import FakeCorpus
from tests.fakes import studies as fake_studies

ASKED = ("others", "two-sided", "sizes", "moe")


def make_runs(root: Path) -> dict[str, str]:
    """Fill the runs folder `root` with a record for every arm of scale cpu, of plans that run only when asked for as well; its files as
    `records_in` has them.

    Arms differ in their loss, and one diverges in its last seed. A file lies where checkpoints and packed corpora
    would go, so whatever trained all the same could only fail.
    """
    store = Store(root)
    arms = list(dict.fromkeys(config for name in ("all", *ASKED) for config in plan(name, "cpu").arms))
    put_arms(store, arms)
    for name in ("checkpoints", "corpus"):
        (root / name).write_text("No training here.\n")
    assert all(store.get(arm, "cpu") for arm in arms)
    return records_in(root)


def put_arms(store: Store, arms: list[TrainConfig], probed: Container[str] | None = None) -> None:
    """A record for each of `arms`, which differ in their loss; one diverges in its last seed. probed: recipes that have
    probes (None: all)."""
    names = list(dict.fromkeys(arm.recipe for arm in arms))
    for arm in arms:
        slower = 1 + 0.02 * names.index(arm.recipe)
        diverged = arm.steps // 2 if (arm.recipe, arm.seed) == ("mxfp4+sr", max(a.seed for a in arms)) else None
        source = SyntheticCorpus(arm.model.vocab_size).fingerprint if arm.corpus == "synthetic" else "fake"
        probes = probe_rows(arm) if probed is None or arm.recipe in probed else []
        windows = [0.1 * math.sin(i) for i in range(arm.eval_sequences)]
        fake_studies.put(
            store, arm, slowdown=slower, diverged_at=diverged, probes=probes, corpus=source, windows=windows
        )


def probe_rows(config: TrainConfig) -> list[dict]:
    """What a probe sees in a fresh model at the first pair of probe steps, repeated for the other pairs.

    The model has the configuration's layers and a small vocabulary; its weights shrink a little from step to step.
    """
    if not config.probe_steps:
        return []
    small = replace(config.model, vocab_size=64)
    model = convert(build_model(small, config.seed), config.recipe, seed=config.seed)
    corpus, probe, seen = FakeCorpus(small.vocab_size), Probe(max_tokens=config.seq_len), []
    for step in config.probe_steps[:2]:
        set_step(model, step)
        seen.append(probe(model, step, corpus.batch(step, 1, config.seq_len, config.seed)))
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(0.999)
    return [{**row, "step": step} for i, step in enumerate(config.probe_steps) for row in seen[i % 2]]


def records_in(root: Path) -> dict[str, str]:
    """{path: SHA-256} of every file below root/records."""
    files = sorted(p for p in (root / "records").rglob("*") if p.is_file())
    return {p.relative_to(root).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}
