"""Quartet's forward: the projection by its formula, and the layer made with it against plain autograd."""

from dataclasses import replace

import pytest
import torch

from mxfp4 import MXFP4Linear, recipe
from mxfp4.layers.quest import CLIP, EPS, project
from mxfp4.layers.recipe import BASES
from mxfp4.numerics.hadamard import Hadamard, hadamard_transform

GRID = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)


def rotated(t: torch.Tensor) -> torch.Tensor:
    return hadamard_transform(t, Hadamard(32))


def by_formula(t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(values, kept) from the definition, in FP64, by looking for the nearest code."""
    blocks = rotated(t).double().view(-1, 32)
    scale = 2.0 ** torch.floor(torch.log2(CLIP * blocks.std(-1, keepdim=True, correction=0) + EPS))
    scaled = blocks / scale
    distance = (scaled.abs()[..., None] - GRID).abs()
    values = GRID[distance.argmin(-1)].copysign(scaled) * scale
    return values.view(t.shape), (scaled.abs() < 6).view(t.shape)


def test_projection_and_its_mask_are_those_of_the_formula():
    t = torch.randn(64, 96, generator=torch.Generator().manual_seed(0)) * torch.logspace(-4, 3, 64)[:, None]
    values, kept = by_formula(t)
    t.requires_grad_()
    out = project(t, torch.float32)
    assert torch.equal(out.double(), values)
    clipped = 1 - kept.float().mean()  # beyond 1.46 to 2.92 sigma, by where the scale lies in its binade
    assert 0.0035 < clipped < 0.144
    grad = torch.randn(64, 96, generator=torch.Generator().manual_seed(1))
    out.backward(grad)
    assert torch.equal(t.grad, rotated(grad * kept))


def test_projection_is_what_bf16_and_the_weights_dtype_can_hold():
    t = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    out = project(t, torch.bfloat16)
    assert out.dtype == torch.float32 and torch.equal(out.bfloat16().float(), out)
    assert torch.equal(out, project(t.bfloat16().float(), torch.float32))
    assert torch.equal(project(torch.zeros(2, 32), torch.float32), torch.zeros(2, 32))


def test_layer_without_quantized_backward_is_straight_through_around_the_projections():
    """With a backward in high precision the layer is Y = P(X) P(W)^T with straight-through masks, to FP32 rounding."""
    plain = replace(recipe("mxfp4+quest"), **{g: BASES["fp32"][g] for g in ("dgrad", "wgrad")})
    g = torch.Generator().manual_seed(0)
    x, weight, grad = (
        torch.randn(64, 96, generator=g),
        torch.randn(32, 96, generator=g),
        torch.randn(64, 32, generator=g),
    )
    layer = MXFP4Linear(96, 32, bias=False, recipe=plain)
    with torch.no_grad():
        layer.weight.copy_(weight)
    x.requires_grad_()
    y = layer(x)
    y.backward(grad)
    (px, kx), (pw, kw) = by_formula(x.detach()), by_formula(weight)
    assert torch.allclose(y.double(), px @ pw.t(), rtol=1e-6, atol=1e-5)
    dx, dw = (grad.double() @ pw).float() * kx, (grad.double().t() @ px).float() * kw
    assert torch.allclose(x.grad, rotated(dx), rtol=1e-5, atol=1e-5)
    assert torch.allclose(layer.weight.grad, rotated(dw), rtol=1e-5, atol=1e-5)


def test_quartet_is_unbiased_in_the_backward_and_draws_anew():
    """Over many draws of signs and rounding, dX is what the straight-through backward gives of the projected weight."""
    g = torch.Generator().manual_seed(0)
    x, weight, grad = (
        torch.randn(32, 32, generator=g),
        torch.randn(64, 32, generator=g),
        torch.randn(32, 64, generator=g),
    )
    layer = MXFP4Linear(32, 64, bias=False, recipe="quartet")
    with torch.no_grad():
        layer.weight.copy_(weight)
    draws = []
    for _ in range(400):
        leaf = x.clone().requires_grad_()
        layer(leaf).backward(grad)
        draws.append(leaf.grad)
    draws = torch.stack(draws)
    expected = rotated((grad.double() @ by_formula(weight)[0]).float() * by_formula(x)[1])
    z = (draws.mean(0) - expected) / (draws.std(0) / 20)
    assert not torch.equal(draws[0], draws[1])
    assert z.abs().max() < 5 and z.square().mean() < 1.3


def test_refusals():
    with pytest.raises(
        ValueError, match="in_features=48 is not a multiple of 32, which recipe 'quartet' needs in fprop"
    ):
        MXFP4Linear(48, 64, recipe="quartet")
    with pytest.raises(ValueError, match="quest"):
        recipe("mxfp4+quest+double")


def test_the_operator_is_what_a_compiler_is_told_of_any_strides():
    for t in (torch.randn(64, 96), torch.randn(96, 64).t(), torch.randn(64, 96)[:, :64]):
        torch.library.opcheck(
            torch.ops.mxfp4.quest.default, (t, torch.bfloat16), test_utils=("test_schema", "test_faketensor")
        )
