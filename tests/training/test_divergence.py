"""What ends a run before its budget and what does not."""

import math

import pytest

from mxfp4.training.divergence import WINDOW, DivergenceWatch, StallRule

LN_V = math.log(64)


def watched(losses, norms=None):
    """(index, reason) of the first divergence, or None."""
    watch = DivergenceWatch(64)
    for i, loss in enumerate(losses):
        reason = watch.observe(loss, norms[i] if norms else 1.0)
        if reason:
            return i, reason
    return None


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_loss_or_gradient(bad):
    assert watched([3.0, bad]) == (1, f"training loss is {bad}")
    assert watched([3.0, 3.0], [1.0, bad]) == (1, f"gradient norm is {bad}")


def test_collapse_to_ln_v_after_learning():
    at, reason = watched([LN_V] * 30 + [2.0] * 40 + [LN_V + 0.01] * 40)
    assert at == 70 + WINDOW - 1 and "back at ln V = 4.16" in reason


@pytest.mark.parametrize(
    "losses",
    [
        [LN_V + 0.05] * 200,  # never learned: not a divergence but a run that does not converge
        [2.0] * 40 + [9.0, 8.0, 2.5] + [2.0] * 40,  # a spike
        [LN_V - 0.1] * 50 + [LN_V + 0.1] * 50,  # never well below
    ],
)
def test_not_divergence(losses):
    assert watched(losses) is None


RULE = StallRule(evaluations=3, improvement=0.02, above=3.8)


def test_a_run_that_levels_off_far_above_is_stalled():
    """Also one that gets worse, and one that gains less than it must."""
    assert RULE.reason([11.8, 5.0, 4.5, 4.5, 4.5, 4.5]) == (
        "evaluation loss is 4.500: over 3 evaluations it improved by less than 0.02 nats and stayed above 3.8"
    )
    assert RULE.reason([11.8, 5.0, 5.1, 5.6, 6.0]) and RULE.reason([11.8, 4.5, 4.495, 4.49, 4.485])


@pytest.mark.parametrize(
    "losses",
    [
        [11.8, 4.5, 4.48, 4.46, 4.44],  # slow, but it learns
        [11.8, 3.7, 3.7, 3.7, 3.7],  # near enough
        [11.8, 3.9, 3.9, 3.79, 3.9],  # it has been near enough
        [4.5, 4.5, 4.5],  # too short to say
    ],
)
def test_not_stalled(losses):
    assert RULE.reason(losses) is None
    assert StallRule(0, 0.02, 3.8).reason([4.5] * 9) is None  # as every scale but mi355x has it
