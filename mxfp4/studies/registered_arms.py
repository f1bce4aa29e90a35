"""The arms of the registered study (book/study.yml), as configurations of scale gpu.

book/study.yml says which arms run with how many seeds, on which source, at which size and budget. What it leaves open is
fixed here: the learning rate (chosen on BF16, `runs/pilot`), the schedule, what is evaluated and probed.
"""

from __future__ import annotations

from dataclasses import replace

from mxfp4.layers.post_training import LLM_FP4
from mxfp4.studies.registry import Runs, load_study
from mxfp4.studies.scales import GPU
from mxfp4.training.config import TrainConfig

CORPORA = {"A": "known-entropy", "B": "text"}
SMALL = replace(GPU.model, dim=384, n_layers=6, n_heads=6, n_kv_heads=3, ffn_dim=1024)
MODELS = {9_700_000: SMALL, 29_500_000: GPU.model}
"""By weights outside the embedding and the LM head."""
LEARNING_RATE = 3e-3
"""At width 384; other widths take it times 384 / width."""
SEQ_LEN = 512
WARMUP_TOKENS = 200 * 32_768
COOLDOWN = 0.15
"""Share of a budget in which the rate falls to 0."""
EVALUATIONS = 12
EXPERTS = "experts"
"""The part whose models are mixtures of eight experts."""
DECAYED = "bf16-decay"
"""A part that has no runs of its own: branches of main's."""
THIRDS = {"third": 1, "two_thirds": 2}
PROBED_SEEDS = (0, 1, 2)
MATRIX = ("fp8", "mxfp4", "mxfp4+h16", "ti2d", "ti2d-no-2d", "nvfp4")
"""Forwards that the trained weights of seeds 0 and 1 are judged in, beside their own and BF16; BF16's also in LLM_FP4."""
WHOLE = "study"
"""The plan that holds all parts, in the order of the information they give for a minute; experts only when asked for."""


def study_parts() -> tuple[str, ...]:
    """Names of the plans of the registered study: its parts, and WHOLE."""
    return (*(name for name in load_study().runs if name != DECAYED), WHOLE)


def study_arms(part: str, text: str = CORPORA["B"]) -> list[TrainConfig]:
    """The configurations of one part, all arms of a seed before the next seed; those of WHOLE part after part, the arms of
    the six primary claims first. text: the corpus of source B, such as c4:0-7."""
    if part == WHOLE:
        main, primary = study_arms("main"), {arm for claim in load_study().primaries for arm in claim.contrast.names}
        core = [config for config in main if config.recipe in primary]
        rest = [config for config in main if config.recipe not in primary]
        return [
            *core,
            *study_arms("short"),
            *rest,
            *(c for name in ("text", "batch", "ladder") for c in study_arms(name, text)),
        ]
    study = load_study()
    runs = study.runs[part]
    decayed = study.runs[DECAYED].arms if part == "main" else {}
    found = [_config(part, runs, arm, seed, decayed) for arm, seeds in runs.arms.items() for seed in range(seeds)]
    found = [replace(c, corpus=text) if runs.source == "B" else c for c in found]
    return sorted(found, key=lambda config: config.seed)


def _config(part: str, runs: Runs, arm: str, seed: int, decayed: dict[str, int]) -> TrainConfig:
    """decayed: {arm: seeds that also make the last decay in BF16}."""
    model = MODELS[runs.weights]
    if part == EXPERTS:  # of half the width, two a token: equal active weights
        model = replace(model, n_experts=8, ffn_dim=model.ffn_dim // 2)
    batch = runs.tokens_a_step // SEQ_LEN
    steps = _steps(runs)
    judged_in: tuple[str, ...] = MATRIX if "third" in runs.budgets and seed < 2 else ()
    if judged_in and arm == "bf16":
        judged_in = (*judged_in, LLM_FP4)  # what FP4 pretraining competes with
    probed = seed in PROBED_SEEDS
    end = steps - round(COOLDOWN * steps)
    return TrainConfig(
        recipe=arm, seed=seed, model=model, corpus=CORPORA[runs.source], scale="gpu", seq_len=SEQ_LEN,
        batch_size=batch, micro_batches=max(batch // 64, 1), steps=steps, cooldown_steps=steps - end,
        lr=LEARNING_RATE * (SMALL.dim / model.dim), lr_min=0.0, warmup=WARMUP_TOKENS // runs.tokens_a_step,
        eval_every=steps // EVALUATIONS, eval_sequences=256, final_eval_sequences=2048, eval_forwards=("bf16",),
        final_forwards=judged_in, decay_recipes=("bf16",) if seed < decayed.get(arm, 0) else (),
        short_budgets=_short_budgets(runs, arm, steps),
        probe_steps=(end - 20, end - 19) if probed else (),
        light_probe_steps=tuple(steps * k // 48 for k in (2, 8, 28, 44, 47)) if probed else (),
    )  # fmt: skip


def _steps(runs: Runs) -> int:
    """The budget, rounded so that a third of it and each evaluation fall on a step."""
    unit = 3 * EVALUATIONS if "third" in runs.budgets else EVALUATIONS
    return round(runs.tokens / runs.tokens_a_step / unit) * unit


def _short_budgets(runs: Runs, arm: str, steps: int) -> tuple[int, ...]:
    """Budgets that the run branches off for; two thirds for fp8 alone, whose loss there is a target."""
    names = [name for name in runs.budgets if name in THIRDS and (name == "third" or arm == "fp8")]
    return tuple(steps * THIRDS[name] // 3 for name in names)
