"""The experts of a mixture in one 3-D parameter, as transformers 5 keeps them, through MXFP4Linear expert by expert.

transformers marks such modules (`use_experts_implementation`): E experts, `gate_up_proj` or `up_proj` and `down_proj`
of [E, out, in], or [E, in, out] where `is_transposed` (GptOss). Their class changes to a subclass whose forward sends
the tokens of each expert through an MXFP4Linear of its own, which reads its matrix as a view of the parameter. So
parameters and state_dict stay as they are, and each expert has a name and random numbers of its own.

The experts implementation of transformers' configuration has no say in it: generation switches that at will.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from mxfp4.layers import swap
from mxfp4.layers.linear import MXFP4Linear
from mxfp4.layers.recipe import Recipe

MARKS = ("has_gate", "has_bias", "is_transposed", "num_experts", "_apply_gate")
"""What transformers' decorator sets on a class of experts."""
REFUSED = {"GroupedExperts": "TorchTitan's grouped experts"}
"""Classes of 3-D experts that are known and not supported: {class: what it is}."""


class ExpertLinear(MXFP4Linear):
    """MXFP4Linear without parameters: the matrix and the bias of its expert come with each call."""

    def __getstate__(self) -> dict:
        return {**super().__getstate__(), "weight": None, "bias": None}

    def reset_parameters(self) -> None:
        """It has none; the experts module initializes its own."""

    def forward(self, x: Tensor, weight: Any = None, bias: Any = None) -> Tensor:  # type: ignore[override]
        """Y = x `weight`^T + `bias`, quantized."""
        self._hold(weight, bias)
        try:
            return super().forward(x)
        finally:
            self._hold(None, None)

    def _hold(self, weight: Any, bias: Any) -> None:
        self.weight, self.bias = weight, bias


def is_experts(module: nn.Module) -> bool:
    """Whether a module keeps experts as transformers' decorator says."""
    if isinstance(module, QuantizedExperts) or not all(hasattr(module, mark) for mark in MARKS):
        return False
    return all(isinstance(p, Tensor) and p.ndim == 3 for p in (getattr(module, n, None) for n in projections(module)))


def projections(module: nn.Module) -> tuple[str, str]:
    """The names of the two 3-D parameters of an experts module."""
    return ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")


def sizes(module: nn.Module, projection: str) -> tuple[int, int, int]:
    """(experts, out_features, in_features) of a 3-D parameter."""
    n, a, b = getattr(module, projection).shape
    return (n, b, a) if module.is_transposed else (n, a, b)


def obstacle(module: nn.Module) -> str | None:
    """Why an experts module cannot be quantized, or None."""
    if getattr(module, "_is_expert_parallel", False):
        return "its experts are split among ranks (expert parallelism)"
    return swap.obstacle(module, type(module).forward)


class QuantizedExperts(nn.Module):
    """Forward of an experts module whose matrices are quantized; mixed into the module's own class."""

    recipes: dict[str, Recipe]
    """{projection: recipe}."""
    num_experts: int
    act_fn: Any
    _apply_gate: Any
    post_expert_norm: Any

    def forward(self, *args, **kwargs) -> Tensor:
        """hidden_states [tokens, dim], top_k_index and top_k_weights [tokens, k] -> [tokens, dim]."""
        x, index, weights = _arguments(self, args, kwargs)
        tokens, k = index.shape
        n = self.num_experts
        first, last = projections(self)
        ends = [self._experts_of(name) for name in (first, last)]
        order = index.reshape(-1).argsort(stable=True)
        counts = torch.bincount(index.reshape(-1).clamp(max=n), minlength=n + 1)[:n].tolist()
        rows = x.reshape(-1, x.shape[-1])[order // k]
        parts, start = [], 0
        for expert, count in enumerate(counts):
            if count:
                (up, up_weight, up_bias), (down, down_weight, down_bias) = (end[expert] for end in ends)
                inner = up(rows[start : start + count], up_weight, up_bias)
                inner = self._apply_gate(inner) if self.has_gate else self.act_fn(inner)
                parts.append(down(inner, down_weight, down_bias))
                start += count
        if start < len(order):  # slots that no expert of this rank serves
            parts.append(x.new_zeros(len(order) - start, x.shape[-1]))
        y = torch.cat(parts) if parts else x.new_zeros(0, x.shape[-1])
        if getattr(self, "has_post_expert_norm", False):
            y = self.post_expert_norm(y)
        y = y * weights.reshape(-1)[order].unsqueeze(-1)
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        return y[back].view(tokens, k, y.shape[-1]).sum(1).to(x.dtype)

    def _experts_of(self, projection: str) -> list[tuple[ExpertLinear, Tensor, Tensor | None]]:
        """(layer, matrix, bias) of each expert. `unbind`, as its backward writes one gradient for all of them."""
        layers, stacked = getattr(self, f"{projection}_linears"), getattr(self, projection)
        if len(stacked) != len(layers):
            raise ValueError(
                f"{type(self).__name__}: {projection} holds {len(stacked)} experts, {len(layers)} were converted"
            )
        matrices = (stacked.transpose(1, 2) if self.is_transposed else stacked).unbind(0)
        biases = getattr(self, f"{projection}_bias").unbind(0) if self.has_bias else [None] * len(layers)
        return list(zip(layers, matrices, biases, strict=True))

    def __reduce_ex__(self, protocol):
        """Copies and pickles: the class is made again from the one that it extends."""
        return _empty, (_original(type(self)),), dict(self.__dict__)


def _arguments(module: QuantizedExperts, args: tuple, kwargs: dict) -> tuple[Tensor, Tensor, Tensor]:
    if kwargs:
        names = list(inspect.signature(_original(type(module)).forward).parameters)[1:]
        args = (*args, *(kwargs[name] for name in names[len(args) :] if name in kwargs))
    x, index, weights = args
    return x, index, weights


def _original(cls: type) -> Any:
    return next(base for base in cls.__mro__[1:] if not issubclass(base, QuantizedExperts) and base is not nn.Module)


@cache
def _quantized_class(cls: Any) -> Any:
    return type(f"MXFP4{cls.__name__}", (QuantizedExperts, cls), {"__module__": cls.__module__})


def _empty(cls: type[nn.Module]) -> nn.Module:
    made = _quantized_class(cls)
    return made.__new__(made)


def quantized(
    module: nn.Module, recipes: dict[str, Recipe], fqn: str, seed: int, save: str
) -> dict[str, list[ExpertLinear]]:
    """{projection: the layer of each expert}, for `become`."""
    device = swap.execution_device(module)
    made = {}
    for projection in projections(module):
        stacked = getattr(module, projection)
        n, out_features, in_features = sizes(module, projection)
        where = device if stacked.is_meta and device is not None else stacked.device
        matrix = torch.empty((), device=where, dtype=stacked.dtype).expand(out_features, in_features)
        plain = nn.Linear(in_features, out_features, False, device="meta")
        plain.weight = nn.Parameter(matrix, requires_grad=False)
        names = (f"{fqn}.{e}.{projection}" for e in range(n))
        made[projection] = [_layer(plain, recipes[projection], name, seed, save) for name in names]
    return made


def _layer(
    plain: nn.Linear, recipe: str | Recipe, fqn: str, seed: int, save: str, n_layers: int = 0,
    cls: type[ExpertLinear] = ExpertLinear,
) -> ExpertLinear:  # fmt: skip
    layer = cls.from_linear(plain, recipe, fqn=fqn, seed=seed, n_layers=n_layers, save=save)
    assert isinstance(layer, ExpertLinear)
    for name in ("weight", "bias"):
        layer._parameters.pop(name, None)
        setattr(layer, name, None)
    return layer


def bare_layer(
    in_features: int, out_features: int, recipe: str | Recipe, fqn: str, seed: int = 0, *, n_layers: int = 0,
    cls: type[ExpertLinear] = ExpertLinear,
) -> ExpertLinear:  # fmt: skip
    """A layer whose matrix comes with each call, for modules of other libraries that keep theirs.

    Raises ValueError for sizes that do not fit the recipe.
    """
    plain = nn.Linear(in_features, out_features, False, device="meta")
    return _layer(plain, recipe, fqn, seed, "values", n_layers, cls)


def become(module: nn.Module, layers: dict[str, list[ExpertLinear]]) -> None:
    """`module` computes with `layers` from here on."""
    recipes = {name: each[0].recipe for name, each in layers.items()}
    swap.change_class(module, _quantized_class(type(module)))
    module.recipes = recipes
    for name, each in layers.items():
        setattr(module, f"{name}_linears", nn.ModuleList(each).train(module.training))
