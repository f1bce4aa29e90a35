"""`convert`: the linear layers of a model, and its experts, become quantized ones, in place.

What is converted follows from what a layer is in the model (`roles.py`), what was done is kept for `report`.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.utils import parametrize

from mxfp4.layers import experts, saved, swap
from mxfp4.layers.linear import MXFP4Linear
from mxfp4.layers.recipe import Override, Recipe, recipe
from mxfp4.layers.report import NOTES, READ_BY_ATTENTION, Notes, report, why_by_role
from mxfp4.layers.roles import Names, Roles, own_parameter

DEFAULT_SKIP = ("output", "lm_head", "head", "router", "gate")
"""Last parts of names that are left out where names are all there is (TorchTitan's configurations)."""
TINY = 32
"""A layer with a side shorter than one block is left out by default, where it does not fit the recipe."""
UNKNOWN_SHARE = 0.1
"""Share of the matrix weights in modules that `convert` does not know, from which on it warns."""

Filter = Callable[[nn.Module, str], bool]
_log = logging.getLogger("mxfp4")
_default: ContextVar[Filter | None] = ContextVar("what is chosen by default in the model being converted", default=None)


def default_filter(module: nn.Module, fqn: str) -> bool:
    """What `convert` chooses without a filter, for use in one: every linear layer and experts module but the output
    head, routers and gates, LoRA adapters, layers of one output and layers too small for the recipe. Outside of
    `convert` it goes by names alone."""
    default = _default.get()
    return fqn.rpartition(".")[2] not in DEFAULT_SKIP if default is None else default(module, fqn)


@dataclass(frozen=True)
class _Layer:
    """A module to convert: a linear layer, or a 3-D parameter (`projection`) of an experts module."""

    module: nn.Module
    names: list[str]
    recipe: Recipe
    part: str
    projection: str | None = None


def convert(
    model: nn.Module, name: str | Recipe, filter_fn: Filter | None = None, *, seed: int = 0, save: str = "values",
    names: Names | None = None, allow_unmatched: bool = False,
) -> nn.Module:  # fmt: skip
    """Quantize the nn.Linear layers of `model`, and experts that are 3-D parameters, by a recipe, in place.

    Modules stay the objects that they are, with their parameters, hooks and attributes, so optimizers, state_dicts and
    references stay valid. `mxfp4.report(model)` says what was converted and what was left out.

    Args:
        model: any module; an nn.Linear itself too.
        name: the recipe, or its name.
        filter_fn: (module, full name) -> whether to convert it, asked for each nn.Linear and each experts module. None
            is `default_filter`, which also leaves out layers that are too small for the recipe's blocks.
        seed: of the recipe's random numbers.
        save: as in MXFP4Linear.
        names: what the model calls its blocks, heads, routers and projections, beside the known names.
        allow_unmatched: whether parts of the recipe may find no layer.

    Returns:
        The model.

    Raises:
        ValueError: changing nothing. No layer is left to convert; a layer does not fit or cannot be converted, by its
            name; one is converted already; a part of the recipe finds no layer.

    """
    chosen, config = recipe(name), saved.config_of(model)
    method = saved.method_of(config)
    if method not in (None, saved.METHOD):
        raise ValueError(f"the model is quantized by {method!r} already; load it without that to convert it")
    roles = Roles(model, names)
    places: dict[int, list[str]] = defaultdict(list)
    for fqn, m in roles.modules.items():
        places[id(m)].append(fqn)
    modules = {fqns[0]: roles.modules[fqns[0]] for fqns in places.values()}
    pick = _Picker(roles, chosen, filter_fn)
    with _during(pick):
        _refuse_converted(modules, pick.keep)
        layers = [layer for fqn, m in modules.items() for layer in pick(m, places[id(m)])]
    pick.refuse_misfits()
    if not layers:
        raise ValueError(f"no layer to convert to {chosen.name!r}: {_instead(modules, pick, filter_fn is not None)}")
    unmatched = _unmatched(chosen, roles, [*layers, *pick.filtered])
    if unmatched and not allow_unmatched:
        raise ValueError(f"recipe {chosen.name!r}: {unmatched[0]}; or pass allow_unmatched=True")
    _become(layers, seed, save)
    _leave_fast_paths(roles)
    _take_notes(model, chosen, roles, layers, pick, unmatched, names)
    if config is not None:
        converted = [fqn for layer in layers for fqn in layer.names[:1]]
        others = [fqn for fqn in pick.asked if fqn not in set(converted)]
        saved.record(model, {
            "recipe": saved.text_of(chosen), "modules": saved.patterns(converted, others), "seed": seed, "save": save,
            **({"names": names.to_dict()} if names else {}), **({"allow_unmatched": True} if allow_unmatched else {}),
        })  # fmt: skip
    _say(model)
    return model


@contextmanager
def _during(pick: _Picker) -> Iterator[None]:
    token = _default.set(pick.default)
    try:
        yield
    finally:
        _default.reset(token)


class _Picker:
    """Which layers are converted; why others are not."""

    def __init__(self, roles: Roles, chosen: Recipe, filter_fn: Filter | None):
        self.roles, self.chosen, self.explicit = roles, chosen, filter_fn is not None
        self.keep = filter_fn or self.default
        self.left_out: dict[str, str] = {}
        self.filtered: list[_Layer] = []
        """Layers that the filter left out, which parts of the recipe may mean all the same."""
        self.asked: list[str] = []
        self.misfits: dict[str, str] = {}

    def default(self, m: nn.Module, fqn: str) -> bool:
        """Whether a layer is converted where no filter is given."""
        return self._why_not(m, [fqn]) is None

    def _why_not(self, m: nn.Module, names: list[str]) -> str | None:
        """Why the default leaves a layer out: its role, or a size that nobody would want to have fitted."""
        role = why_by_role(self.roles, names, m)
        if role or isinstance(m, MXFP4Linear | experts.QuantizedExperts) or not self._can(m):
            return role
        outside = self.roles.depth > 0 and self.roles.block(names[0]) is None
        for layer in self._layers(m, names):
            problem, smallest = self._misfit(layer)
            if problem and smallest < TINY:
                return f"too small: {problem}"
            if problem and outside:
                return problem
        return None

    def _reader(self, names: list[str]) -> str | None:
        """Why a layer's weight is read past its forward, or None."""
        parents = (self.roles.modules.get(name.rpartition(".")[0]) for name in names if name)
        return READ_BY_ATTENTION if any(isinstance(p, nn.MultiheadAttention) for p in parents) else None

    @staticmethod
    def _can(m: nn.Module) -> bool:
        return experts.is_experts(m) or swap.is_linear(m)

    def __call__(self, m: nn.Module, names: list[str]) -> list[_Layer]:
        """The layers to convert in a module: none, one, or the two projections of experts."""
        fqn = names[0]
        refused = experts.REFUSED.get(type(m).__name__)
        if isinstance(m, nn.modules.lazy.LazyModuleMixin) and isinstance(m, nn.Linear) and self.keep(m, fqn):
            raise ValueError(
                f"layer {fqn!r} is a {type(m).__name__} without a size; run a batch through the model first"
            )
        if not (self._can(m) or refused) or isinstance(m, MXFP4Linear):
            return []
        self.asked.append(fqn)
        answers = {self._asks(m, name) for name in names}
        if len(answers) > 1 and self.explicit:
            raise ValueError(
                f"{' and '.join(map(repr, names))} are one module; filter_fn must hold for all or for none"
            )
        layers = self._layers(m, names) if not refused else []
        if answers != {True}:
            reason = getattr(self.keep, "reason", "filter_fn")  # a recorded choice has another one
            role = None if self.explicit and reason == "filter_fn" else self._why_not(m, names)
            self.left_out[fqn] = role or reason
            self.filtered += layers if self.explicit else []
            return []
        if refused:
            raise ValueError(
                f"{fqn!r}: {refused} ({type(m).__name__}) cannot be converted; leave it out with filter_fn"
            )
        obstacle = experts.obstacle(m) if experts.is_experts(m) else swap.obstacle(m) or self._reader(names)
        if obstacle:
            if self.explicit:
                raise ValueError(f"layer {fqn!r} cannot be converted: {obstacle}; leave it out with filter_fn")
            self.left_out[fqn] = obstacle
            return []
        for layer in layers:
            problem, _ = self._misfit(layer)
            if problem:
                self.misfits[fqn + (f".{layer.projection}" if layer.projection else "")] = problem
        return layers

    def _asks(self, m: nn.Module, fqn: str) -> bool:
        """The filter's answer. Filters written for linear layers alone may not know what to say of experts."""
        try:
            return bool(self.keep(m, fqn))
        except AttributeError as error:
            if isinstance(m, nn.Linear):
                raise
            raise ValueError(
                f"filter_fn fails for {fqn!r}, which is no nn.Linear but {type(m).__name__}: {error}; answer for it too"
            ) from error

    def _layers(self, m: nn.Module, names: list[str]) -> list[_Layer]:
        index = self.roles.block(names[0])
        made = []
        for projection in experts.projections(m) if experts.is_experts(m) else [None]:
            full = names if projection is None else [f"{name}.{projection}" for name in names]
            where = {"index": -1 if index is None else index, "aliases": self.roles.aliases(full[0])}
            part = self.chosen.part_of(full[0], self.roles.depth, **where)
            shown = part.layers if isinstance(part, Override) else {"tail": "bf16 tail", "main": "all layers"}[part]
            resolved = self.chosen.for_layer(full[0], self.roles.depth, **where)
            made.append(_Layer(m, names, resolved, shown, projection))
        return made

    @staticmethod
    def _misfit(layer: _Layer) -> tuple[str | None, int]:
        """(why a layer does not fit the recipe or None, its smaller side)."""
        m = layer.module
        if layer.projection is None:
            inner, outer = m.in_features, m.out_features
        else:
            _, outer, inner = experts.sizes(m, layer.projection)
        return swap.misfit(inner, outer, layer.recipe), min(inner, outer)

    def refuse_misfits(self) -> None:
        """Raise for the layers that are to be converted and do not fit, with a filter that leaves all of them out."""
        if not self.misfits:
            return
        fqn, problem = next(iter(self.misfits.items()))
        modules = {name.rpartition(".")[0] if name not in self.asked else name for name in self.misfits}
        ends = sorted({re.sub(r"^.*\.\d+\.", ".", name) for name in modules})
        more = f" (and {len(self.misfits) - 1} more layers like it)" if len(self.misfits) > 1 else ""
        test = f"fqn != {ends[0]!r}" if ends == sorted(modules)[:1] else f"not fqn.endswith({tuple(ends)!r})"
        raise ValueError(
            f"layer {fqn!r}: {problem}{more}; leave it out with "
            f"filter_fn=lambda module, fqn: mxfp4.default_filter(module, fqn) and {test}"
        )


def _refuse_converted(modules: dict[str, nn.Module], keep: Filter) -> None:
    kinds = (MXFP4Linear, experts.QuantizedExperts)
    already = [
        (fqn, m)
        for fqn, m in modules.items()
        if isinstance(m, kinds) and not isinstance(m, experts.ExpertLinear) and keep(m, fqn)
    ]
    if already:
        fqn, layer = already[0]
        its = layer.recipe if isinstance(layer, MXFP4Linear) else next(iter(layer.recipes.values()))
        raise ValueError(
            f"{len(already)} layers are MXFP4Linear already, {fqn or 'the model'!r} with recipe {its.name!r}: "
            "convert an unconverted model, or select the other layers with a filter_fn"
        )


def _unmatched(chosen: Recipe, roles: Roles, layers: list[_Layer]) -> list[str]:
    """The parts of a recipe that no layer takes, each with how to name its layers."""
    found = []
    example = next((layer.names[0] for layer in layers), "")
    if chosen.bf16_tail and not any(roles.block(layer.names[0]) is not None for layer in layers):
        found.append(
            f"its BF16 tail of {chosen.bf16_tail:.0%} found no numbered blocks (as in {example!r}); say what the model "
            "calls its list of blocks: names=mxfp4.Names(blocks=('stages',))"
        )
    parts = {layer.part for layer in layers}
    tails = {layer.names[0] for layer in layers if layer.part == "bf16 tail"}
    for override in chosen.overrides:
        all_in_tail = any(
            override.matches(name) for fqn in tails for name in (fqn, *roles.aliases(fqn))
        )  # fmt: skip
        if override.layers not in parts and not all_in_tail:
            found.append(
                f"its part for {override.layers!r} found no layer (they are called as {example!r}); say which hold query "
                "and key: names=mxfp4.Names(projections={'mix': ('q_proj', 'k_proj')})"
            )
    return found


def _become(layers: list[_Layer], seed: int, save: str) -> None:
    """Make all new layers, then change the modules: an error before that changes nothing."""
    made: list[tuple[nn.Module, MXFP4Linear]] = []
    made_experts: dict[int, tuple[nn.Module, str, dict[str, Recipe]]] = {}
    for layer in layers:
        if layer.projection is not None:
            _, _, recipes = made_experts.setdefault(id(layer.module), (layer.module, layer.names[0], {}))
            recipes[layer.projection] = layer.recipe
            continue
        new = swap.quantized(layer.module, layer.recipe, layer.names[0], seed, save)
        attribute = swap.clash(layer.module, new)
        if attribute:
            raise ValueError(
                f"layer {layer.names[0]!r} has an attribute {attribute!r} of its own, which MXFP4Linear uses; rename it"
            )
        made.append((layer.module, new))
    stacks = [(m, experts.quantized(m, recipes, fqn, seed, save)) for m, fqn, recipes in made_experts.values()]
    for m, new in made:
        swap.become(m, new)
    for m, new in stacks:
        experts.become(m, new)


def _leave_fast_paths(roles: Roles) -> None:
    """PyTorch's transformer layers read the weights of their linear layers in evaluation, past their forward: these
    attributes are what torch itself sets where that path does not apply."""
    for m in roles.modules.values():
        if not any(isinstance(inner, MXFP4Linear) for inner in m.modules()):
            continue
        if isinstance(m, nn.TransformerEncoderLayer):
            m.activation_relu_or_gelu = 0
        elif isinstance(m, nn.TransformerEncoder):
            m.enable_nested_tensor = m.use_nested_tensor = False


def _take_notes(
    model: nn.Module, chosen: Recipe, roles: Roles, layers: list[_Layer], pick: _Picker, unmatched: list[str],
    names: Names | None,
) -> None:  # fmt: skip
    notes = model.__dict__.get(NOTES) or Notes()
    for layer in layers:
        fqn = layer.names[0] + (f".{layer.projection}" if layer.projection else "")
        notes.parts[fqn] = layer.part
        notes.left_out.pop(layer.names[0], None)
    notes.left_out |= {fqn: why for fqn, why in pick.left_out.items() if fqn not in notes.parts}
    notes.recipes += [chosen.name] if chosen.name not in notes.recipes else []
    notes.unmatched += unmatched
    notes.names = names or notes.names
    if chosen.bf16_tail and roles.depth:
        tail = chosen.tail_of(roles.depth)
        notes.remarks.append(f"BF16 tail of {chosen.name}: the last {tail} of {roles.depth} blocks")
    model.__dict__[NOTES] = notes


def _say(model: nn.Module) -> None:
    """Log what was done; warn where much of the model is in modules that `convert` cannot convert."""
    done = report(model)
    _log.info("%s", done.summary())
    total = sum(line.weights for line in (*done.converted, *done.left_out)) or 1
    unknown = [line for line in done.left_out if line.unknown]
    share = sum(line.weights for line in unknown) / total
    if share > UNKNOWN_SHARE:
        kinds = ", ".join(f"{n} {kind}" for kind, n in Counter(line.kind for line in unknown).most_common(3))
        warnings.warn(
            f"convert leaves {share:.0%} of the matrix weights as they are, in modules that it cannot convert ({kinds}); "
            "print(mxfp4.report(model)) lists them",
            stacklevel=3,
        )


def _instead(modules: dict[str, nn.Module], pick: _Picker, filtered: bool) -> str:
    """What a model without a layer to convert has."""
    linears = [fqn for fqn, m in modules.items() if swap.is_linear(m)]
    if filtered:
        text = f"filter_fn holds for none of its {len(linears)} nn.Linear ({', '.join(map(repr, linears[:3]))})"
    else:
        why = Counter(reason for fqn, reason in pick.left_out.items() if fqn in linears).most_common(2)
        text = f"{', '.join(reason for reason, _ in why)}: left out are its {len(linears)} nn.Linear "
        text += f"({', '.join(map(repr, linears[:3]))})"
    parts = [text] if linears else []
    others = [m for m in modules.values() if isinstance(w := own_parameter(m, "weight"), Tensor) and w.ndim == 2]
    others = [m for m in others if not isinstance(m, nn.Embedding) and not swap.is_linear(m)]
    kinds = Counter(parametrize.type_before_parametrizations(m).__name__ for m in others)
    if kinds:
        found = ", ".join(f"{n} {kind}" for kind, n in kinds.most_common(3))
        parts.append(f"convert does not know its {found}")
    return "; ".join(parts) or "it has no nn.Linear"
