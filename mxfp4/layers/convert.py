"""`convert`: the linear layers of a model replaced by MXFP4Linear, in place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from torch import Tensor, nn

from mxfp4.layers.linear import MXFP4Linear
from mxfp4.layers.recipe import Recipe, layer_index, recipe

DEFAULT_SKIP = ("output", "lm_head", "head", "router", "gate")


def default_filter(module: nn.Module, fqn: str) -> bool:
    """Every linear layer but the LM head and routers (DEFAULT_SKIP). Embeddings and norms are no linears."""
    return fqn.rpartition(".")[2] not in DEFAULT_SKIP


def convert(
    model: nn.Module, name: str | Recipe, filter_fn: Callable[[nn.Module, str], bool] | None = None, *, seed: int = 0,
    save: str = "values",
) -> nn.Module:  # fmt: skip
    """Replace the nn.Linear layers of `model` for which `filter_fn(module, fqn)` holds by MXFP4Linear, in place.

    Parameters are shared, so optimizers and state_dicts stay valid. `filter_fn` None is `default_filter`; `save` as
    in MXFP4Linear. Raises ValueError, changing nothing: naming the layer, when a feature size does not fit the recipe;
    saying what is there instead, when no layer is replaced, or one for which `filter_fn` holds is an MXFP4Linear
    already, which would keep its recipe.
    """
    chosen = recipe(name)
    keep = filter_fn or default_filter
    already = [(fqn, m) for fqn, m in model.named_modules() if isinstance(m, MXFP4Linear) and keep(m, fqn)]
    if already:
        fqn, layer = already[0]
        raise ValueError(
            f"{len(already)} layers are MXFP4Linear already, {fqn or 'the model'!r} with recipe {layer.recipe.name!r}: "
            "convert a model before it is converted, or the others with a filter_fn"
        )
    found = [(fqn, m) for fqn, m in model.named_modules() if type(m) is nn.Linear and keep(m, fqn)]
    if not found:
        raise ValueError(f"no layer to convert to {chosen.name!r}: {_instead(model, filter_fn is not None)}")
    depth = 1 + max((i for i in (layer_index(fqn) for fqn, _ in found) if i is not None), default=-1)
    made = {fqn: MXFP4Linear.from_linear(m, chosen, fqn=fqn, seed=seed, n_layers=depth, save=save) for fqn, m in found}
    for fqn, layer in made.items():
        if not fqn:
            return layer
        parent, _, child = fqn.rpartition(".")
        setattr(model.get_submodule(parent), child, layer)
    return model


def _instead(model: nn.Module, filtered: bool) -> str:
    """What a model without a layer to convert has."""
    linears = [fqn for fqn, m in model.named_modules() if type(m) is nn.Linear]
    why = "filter_fn holds for none of" if filtered else f"names that end in {', '.join(DEFAULT_SKIP)} stay out of"
    parts = [f"{why} its {len(linears)} nn.Linear ({', '.join(map(repr, linears[:3]))})"] if linears else []
    others = [m for m in model.modules() if isinstance(w := getattr(m, "weight", None), Tensor) and w.ndim == 2]
    kinds = Counter(type(m).__name__ for m in others if type(m) is not nn.Linear and not isinstance(m, nn.Embedding))
    if kinds:
        found = ", ".join(f"{n} {kind}" for kind, n in kinds.most_common(3))
        parts.append(f"convert does not know its {found}")
    return "; ".join(parts) or "it has no nn.Linear"
