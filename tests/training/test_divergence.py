"""What counts as divergence and what does not."""

import math

import pytest

from mxfp4.training.divergence import WINDOW, DivergenceWatch

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
