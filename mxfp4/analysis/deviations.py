"""Where scale mi355x differs from the MLPerf reference, or may: one row a point, what it has "here" read from the code.

Sources: mlcommons/training, small_llm_pretraining/nemo (README, pretrain_llama31.py, utils/), and AMD's submissions to
MLPerf Training v5.1 (FP8) and v6.0 (MXFP4). Points where both agree and cannot differ are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from mxfp4.analysis import published
from mxfp4.data.c4 import DEFAULT_SHARDS
from mxfp4.data.megatron.names import EXAMPLE, SAMPLES
from mxfp4.layers.recipe import recipe
from mxfp4.studies.scales import MI355X
from mxfp4.training.config import TrainConfig

FILES = EXAMPLE.replace("train_text_document", "PREFIX").replace("/data/validation_text_document", "/data/VALIDATION")


@dataclass(frozen=True)
class Deviation:
    """One point."""

    point: str
    reference: str
    """What the reference and AMD's submissions do."""
    here: str
    """What scale mi355x does by default."""
    parameter: str
    """What changes it; "none" where nothing does."""
    consequence: str


def deviations() -> list[Deviation]:
    """All of them, data first."""
    factor = MI355X.model.rope_scaling_factor
    fp8 = recipe("fp8")
    operands = ", ".join(dict.fromkeys(str(o) for o in (fp8.fprop.a, fp8.dgrad.a)))
    return [
        Deviation(
            "end of document",
            "no token between documents (no --append-eod)",
            "a token after each document" if MI355X.append_eod else "no token between documents",
            "--append-eod, --no-append-eod",
            "With the token a model learns where documents end; losses of the two settings cannot be compared.",
        ),
        Deviation(
            "RoPE",
            "reference and AMD v5.1 (FP8): Llama 3.1's scaling, factor 8; AMD v6.0 (MXFP4): none",
            "none" if factor == 1 else f"factor {factor:g}",
            "--rope-scaling-factor 8",
            "AMD's two logs differ in it, so their difference is not the format's alone.",
        ),
        Deviation(
            "tokens",
            "tokenized by MLCommons, Megatron .bin and .idx, about 80 GB",
            f"{MI355X.corpus}, tokenized here from the texts",
            f"--corpus {FILES}",
            "With the files no gated tokenizer and no packing is needed, and the tokens are the reference's own.",
        ),
        Deviation(
            "shards of C4",
            "768-1023 by the reference's README; 768-895 by its code's default, its tokenized files and AMD",
            "{}-{}".format(*DEFAULT_SHARDS),
            "--corpus c4:768-895",
            "Both sets hold more than a run reads; runs on one are compared with runs on the same.",
        ),
        Deviation(
            "order of training data",
            f"documents of all epochs of {SAMPLES:,} sequences shuffled, joined, their sequences shuffled",
            "documents joined as stored, the windows of each epoch shuffled by the seed",
            f"--corpus {FILES} (the reference's order)",
            "The reference may repeat a document early; here none comes twice in an epoch.",
        ),
        Deviation(
            "training documents equal to a validation document",
            "kept",
            "dropped and counted",
            f"--corpus {FILES} (kept)",
            "A loss here cannot fall by recalling a document that was seen in training.",
        ),
        Deviation(
            "sum of gradients over GPUs",
            "BF16 (grad_reduce_in_fp32=False)",
            {"float32": "FP32", "bfloat16": "BF16"}[TrainConfig.reduce_dtype],
            "--reduce-dtype bfloat16",
            "FP32 rounds less and sends twice the bytes: steps are slower, gradients a little more exact.",
        ),
        Deviation(
            "FP8 baseline",
            "delayed scaling: maximum of 4 steps, most recent",
            f"{operands}, one scale a tensor from its current values",
            "--arm fp8+delayed",
            "Delayed scales can clip values that grow from one step to the next; the FP8 arm here cannot.",
        ),
        Deviation(
            "warm-up",
            "128 steps (AMD v5.1), 64 steps (AMD v6.0)",
            f"{MI355X.warmup} steps",
            "TrainConfig.warmup",
            "All arms here have the same; AMD's two logs have not.",
        ),
        Deviation(
            "mean over runs",
            "MLPerf's score drops the best and the worst of ten runs (99.31 min for FP8)",
            f"all runs count (plain mean of AMD's FP8 runs: {published.FP8_PLAIN_MINUTES:g} min)",
            "none",
            "Minutes of the two kinds are not compared; sequences to target are plain means.",
        ),
    ]
