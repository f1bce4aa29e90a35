"""FP4 after training: E2M1 values whose scales are searched for, in the manner of LLM-FP4 (arXiv 2310.16836).

A model trained in high precision has each of its linear layers replaced by

    Y = s_x s_w[n] (E2M1(X 2^-c[k] / s_x)) (E2M1(W 2^c[k] / s_w[n]))^T

with one real scale s_x a tensor for X [T, K], one s_w[n] an output feature for W [N, K], and a power of two 2^c[k] an
input feature, which moves what differs between the features of X into W ("pre-shifted exponent bias"). c comes from the
features' largest magnitudes; s_w and s_x are searched in turn, three rounds of a hundred candidates that clip at 0.01 to
1.2 times the largest magnitude, for the least squared error of Y on calibration tokens. Both formats stay E2M1, which
chips multiply; the paper also searches the split into exponent and mantissa bits.

This is what FP4 pretraining competes with: no training in FP4, and values of four bits all the same. It is a reading of
the paper in its own words and not its code.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from mxfp4.layers.linear import MXFP4Linear
from mxfp4.numerics.formats import E2M1
from mxfp4.numerics.rounding import round_nearest

LLM_FP4 = "llm-fp4"
NAMES = (LLM_FP4,)
"""What tables call forwards that quantize after training."""
ROUNDS = 3
CANDIDATES = 100
CLIP_AT = (0.01, 1.2)
"""Shares of the largest magnitude at which the first and the last candidate clip."""
MOST_SHIFT = 3
"""Steps of a factor two by which input features differ at most: the range of two exponent bits."""


def on_grid(x: Tensor) -> Tensor:
    """FP32 `x`, any shape, to the nearest E2M1 value, saturating."""
    return round_nearest(x, E2M1)


class SearchedLinear(nn.Module):
    """A linear layer on E2M1 operands with the scales that `search` found. For evaluation: no gradients."""

    def __init__(self, weight: Tensor, bias: Tensor | None, w_scale: Tensor, x_scale: Tensor, shift: Tensor) -> None:
        """weight: FP32 [N, K]; w_scale: FP32 [N, 1]; x_scale: FP32 []; shift: FP32 [K], powers of two."""
        super().__init__()
        self.values, self.bias = on_grid(weight * shift / w_scale), bias
        self.scale, self.x_factor = (w_scale * x_scale).flatten(), 1.0 / (shift * x_scale)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            y = nn.functional.linear(on_grid(x.float() * self.x_factor), self.values) * self.scale
            y = y if self.bias is None else y + self.bias.float()
        device = x.device.type
        return y.to(torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype)


def search(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(w_scale [N, 1], x_scale [], shift [K]), FP32, for inputs `x` [T, K] and a weight [N, K].

    An input feature, or a row of the weight, that is all zeros gets the scale 1.
    """
    x, weight = x.float(), weight.float()
    per_feature = x.abs().amax(0)
    largest = per_feature.max()
    steps = torch.log2(per_feature / largest).round().nan_to_num(0.0).clamp(-MOST_SHIFT, 0)
    shift = torch.exp2(steps)
    x_shifted, w_shifted = x / shift, weight * shift
    target = x @ weight.T
    shares = torch.linspace(*CLIP_AT, CANDIDATES, device=x.device, dtype=torch.float32) / E2M1.max
    x_top, w_top = _or_one(x_shifted.abs().max()), _or_one(w_shifted.abs().amax(1, keepdim=True))
    w_scale, x_scale = w_top / E2M1.max, x_top / E2M1.max
    for _ in range(ROUNDS):
        x_values = on_grid(x_shifted / x_scale) * x_scale
        among, with_target = x_values.T @ x_values, target.T @ x_values  # [K, K], [N, K]

        def error_of_rows(scale: Tensor, among: Tensor = among, with_target: Tensor = with_target) -> Tensor:
            """Squared error of each output feature, less what no scale changes, [N, 1]."""
            values = on_grid(w_shifted / scale) * scale
            return ((values @ among - 2 * with_target) * values).sum(1, keepdim=True)

        w_scale = _best(w_top * shares.view(-1, 1, 1), error_of_rows)
        w_values = on_grid(w_shifted / w_scale) * w_scale

        def error(scale: Tensor, w_values: Tensor = w_values) -> Tensor:
            return ((on_grid(x_shifted / scale) * scale) @ w_values.T - target).square().sum()

        x_scale = _best(x_top * shares, error)
    return w_scale, x_scale, shift


def _or_one(largest: Tensor) -> Tensor:
    return torch.where(largest == 0, 1.0, largest)


def _best(candidates: Tensor, error: Callable[[Tensor], Tensor]) -> Tensor:
    """Of `candidates` [n, ...] the one with the least error, place by place."""
    errors = torch.stack([error(scale) for scale in candidates])
    return candidates.gather(0, errors.argmin(0, keepdim=True)).squeeze(0)


@torch.no_grad()
def quantize_after_training(model: nn.Module, run: Callable[[nn.Module], object]) -> nn.Module:
    """`model` with each MXFP4Linear replaced by a SearchedLinear, in place.

    run: computes the model's outputs on calibration data; the layers' inputs are taken from it before any is replaced.
    Raises ValueError when a layer gets none.
    """
    layers = {name: m for name, m in model.named_modules() if isinstance(m, MXFP4Linear)}
    inputs: dict[str, list[Tensor]] = {name: [] for name in layers}
    hooks = [
        layer.register_forward_pre_hook(lambda _, args, name=name: inputs[name].append(args[0].flatten(0, -2)))
        for name, layer in layers.items()
    ]
    try:
        run(model)
    finally:
        for hook in hooks:
            hook.remove()
    unused = [name for name in layers if not inputs[name]]
    if unused:
        raise ValueError(f"layer {unused[0]!r} got no input from the calibration data ({len(unused)} of {len(layers)})")
    for name, layer in layers.items():
        weight = layer.weight.float()
        with torch.autocast(weight.device.type, enabled=False):
            searched = SearchedLinear(weight, layer.bias, *search(torch.cat(inputs.pop(name)), weight))
        model.set_submodule(name, searched)
    return model
