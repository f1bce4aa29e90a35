"""A layer becomes a quantized one in place: its class changes, the object stays.

So does all that hangs on it: hooks and their handles, attributes, parametrizations, pruning masks, accelerate's
offloading, and every place of the model, or of the user's code, that holds the layer.
"""

from __future__ import annotations

from functools import cache
from types import MethodType

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from mxfp4.layers.linear import MXFP4Linear
from mxfp4.layers.recipe import Recipe

WEIGHTS = ("Tensor", "Parameter", "Buffer", "DTensor", "FakeTensor", "UninitializedParameter", "FunctionalTensor")
"""Kinds of tensors whose values are the weights; others (of quantization libraries) hold codes."""


def is_linear(module: nn.Module) -> bool:
    """Whether a module is an nn.Linear itself, parametrized (`torch.nn.utils.parametrize`) or not."""
    return parametrize.type_before_parametrizations(module) is nn.Linear


def obstacle(module: nn.Module, forward=nn.Linear.forward) -> str | None:
    """Why a layer, an nn.Linear or another class's with this `forward`, cannot change its class; or None."""
    own = module.__dict__
    if "forward" in own:  # accelerate's hook keeps the forward that it wraps, and puts it back when it is removed
        wrapped = own.get("_old_forward") if "_hf_hook" in own else own["forward"]
        if not isinstance(wrapped, MethodType) or wrapped.__func__ is not forward or wrapped.__self__ is not module:
            return "its forward was replaced on the object"
    for name, p in module._parameters.items():
        if p is None:
            continue
        kinds = {type(p).__name__, type(p.data).__name__} if isinstance(p, nn.Parameter) else {type(p).__name__}
        if not kinds <= set(WEIGHTS):
            return f"its {name} is a {min(kinds - set(WEIGHTS))}, not a plain tensor"
        if not p.is_floating_point():
            return f"its {name} is {str(p.dtype).removeprefix('torch.')}; floating-point weights are quantized"
    if isinstance(module, nn.Linear):
        weight = getattr(module, "weight", None)
        if not isinstance(weight, Tensor):
            return "it has no weight"
        sizes = (module.out_features, module.in_features)
        if tuple(weight.shape) != sizes and weight.numel():  # numel 0: released between FSDP's uses
            return f"its weight is {tuple(weight.shape)}, not (out_features, in_features) = {sizes}"
    return None


@cache
def misfit(in_features: int, out_features: int, recipe: Recipe) -> str | None:
    """Why MXFP4Linear refuses these sizes, in words, or None."""
    try:
        MXFP4Linear(in_features, out_features, False, recipe=recipe, device="meta")
    except ValueError as error:
        return str(error).removeprefix("layer 'MXFP4Linear': ")
    return None


def quantized(linear: nn.Linear, recipe: Recipe, fqn: str, seed: int, save: str) -> MXFP4Linear:
    """An MXFP4Linear with the attributes that `linear` needs to become one; it shares the weight's memory."""
    plain = nn.Linear(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
    weight = linear.weight.detach()
    device = execution_device(linear)
    if weight.is_meta and device is not None:  # offloaded: the layer's own tensors belong where it computes
        weight = torch.empty_like(weight, device=device)
    plain.weight = nn.Parameter(weight, requires_grad=False)
    return MXFP4Linear.from_linear(plain, recipe, fqn=fqn, seed=seed, save=save)


def execution_device(module: nn.Module) -> torch.device | None:
    """Where accelerate's hook runs an offloaded module; None without one."""
    hook = module.__dict__.get("_hf_hook")
    hooks = getattr(hook, "hooks", [hook])
    found = next((d for d in (getattr(h, "execution_device", None) for h in hooks) if d is not None), None)
    return None if found is None else torch.device(found)


def clash(linear: nn.Linear, made: MXFP4Linear) -> str | None:
    """An attribute of the user's that MXFP4Linear has another use for, or None."""
    plain = nn.Linear(1, 1, device="meta").__dict__
    return next((name for name in made.__dict__ if name not in plain and name in linear.__dict__), None)


def become(linear: nn.Linear, made: MXFP4Linear) -> None:
    """`linear` is an MXFP4Linear from here on, configured as `made`."""
    for name, value in made.__dict__.items():
        if name == "_buffers":
            linear._buffers.update(value)
        elif name == "_non_persistent_buffers_set":
            linear._non_persistent_buffers_set.update(value)
        elif name not in linear.__dict__:
            linear.__dict__[name] = value
    cls = type(made)
    if parametrize.is_parametrized(linear):  # the properties that compute its tensors are its class's
        own = {k: v for k, v in vars(type(linear)).items() if k not in ("__dict__", "__weakref__", "__module__")}
        cls = type(f"Parametrized{cls.__name__}", (cls,), own)
    change_class(linear, cls)


def change_class(module: nn.Module, cls: type[nn.Module]) -> None:
    """Make `module` one of `cls`, under accelerate's hook too, which keeps the forward that it wraps."""
    module.__class__ = cls
    for name in ("_old_forward", "forward"):
        if isinstance(module.__dict__.get(name), MethodType):
            module.__dict__[name] = MethodType(cls.forward, module)
