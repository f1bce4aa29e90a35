"""The registered study's arms as configurations."""

import pytest

from mxfp4.studies.registered_arms import PROBED_SEEDS, WHOLE, study_arms, study_parts
from mxfp4.studies.registry import load_study
from mxfp4.training.branch import branches

STUDY = load_study()


def arm(part, recipe, seed=0):
    return next(c for c in study_arms(part) if c.recipe == recipe and c.seed == seed)


def test_each_part_has_the_arms_and_seeds_that_are_registered():
    for part in study_parts():
        if part != WHOLE:
            found = [(c.recipe, c.seed) for c in study_arms(part)]
            registered = [(name, seed) for name, seeds in STUDY.runs[part].arms.items() for seed in range(seeds)]
            assert sorted(found) == sorted(registered)
            tokens = STUDY.runs[part].tokens
            assert all(abs(c.tokens / tokens - 1) < 0.01 for c in study_arms(part)), part


def test_the_whole_study_begins_with_the_arms_of_the_primary_claims():
    whole = study_arms(WHOLE)
    primary = {name for claim in STUDY.primaries for name in claim.contrast.names}
    assert {c.recipe for c in whole[: 6 * len(primary)]} == primary
    assert (
        len(set(whole)) == len(whole) == sum(len(study_arms(p)) for p in ("main", "short", "text", "batch", "ladder"))
    )


def test_the_branch_at_a_third_is_an_arm_of_part_short():
    """What `borrows` in book/study.yml says: same steps, same decay, same batches, same warm-up and rate."""
    main, short = arm("main", "mxfp4+h16"), study_arms("short")[0]
    branch = branches(main)[0]
    assert branch.end == short.steps and branch.end - branch.start == short.cooldown_steps
    same = (
        "model",
        "corpus",
        "seq_len",
        "batch_size",
        "lr",
        "lr_min",
        "warmup",
        "final_eval_sequences",
        "eval_forwards",
    )
    assert all(getattr(main, name) == getattr(short, name) for name in same)


def test_fp8_also_decays_at_two_thirds_and_five_arms_in_bf16():
    fp8 = arm("main", "fp8")
    assert [b.end for b in branches(fp8)] == [fp8.steps // 3, 2 * fp8.steps // 3]
    decayed = {c.recipe for c in study_arms("main") if c.decay_recipes}
    assert decayed == set(STUDY.runs["bf16-decay"].arms) and {
        c.seed for c in study_arms("main") if c.decay_recipes
    } == {0, 1}


@pytest.mark.parametrize("part", [p for p in study_parts() if p != "experts"])
def test_each_arm_is_evaluated_in_two_forwards_and_judged_after_a_decay_to_zero(part):
    for c in study_arms(part):
        assert c.eval_forwards == ("bf16",) and c.final_eval_sequences == 2048 and c.lr_min == 0
        assert c.cooldown_steps == round(0.15 * c.steps) and c.steps % c.eval_every == 0
        assert bool(c.probe_steps) == (c.seed in PROBED_SEEDS)
        assert all(0 < step <= c.steps for step in (*c.probe_steps, *c.light_probe_steps))
        assert not set(c.light_probe_steps) & set(c.probe_steps)
        assert not c.probe_steps or c.probe_steps[1] < c.steps - c.cooldown_steps  # at the constant rate


def test_a_larger_batch_is_computed_in_parts_of_the_usual_size():
    large, small = arm("batch", "bf16"), arm("main", "bf16")
    assert large.tokens_per_step == 4 * small.tokens_per_step and large.micro_batches == 4
    assert large.warmup * large.tokens_per_step == small.warmup * small.tokens_per_step


def test_experts_have_as_many_active_weights_as_the_dense_model():
    experts, dense = arm("experts", "ti2d"), arm("main", "ti2d")
    assert (experts.model.n_experts, experts.model.n_experts_per_token) == (8, 2)
    assert experts.model.ffn_dim * 2 == dense.model.ffn_dim and abs(experts.tokens / dense.tokens - 1) < 0.01
    assert set(study_arms("experts")).isdisjoint(study_arms("main"))
