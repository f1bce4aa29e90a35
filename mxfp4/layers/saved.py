"""The recipe of a converted model in its saved configuration, for models with one that transformers saves.

The entry is `quantization_config`, whose `quant_method` is METHOD. transformers reads it in `from_pretrained`: with
`mxfp4.adapters.huggingface.register()` called before, it converts the model; without, it warns that it does not know
the method and loads plain linear layers. The weights are saved as they are, in high precision.
"""

from __future__ import annotations

import re
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from mxfp4.layers.recipe import Recipe, recipe

METHOD = "mxfp4_training"


def config_of(model: nn.Module) -> Any | None:
    """The configuration that `save_pretrained` of a model would write, if it is of that kind."""
    config = getattr(model, "config", None)
    return config if hasattr(config, "to_diff_dict") and hasattr(config, "model_type") else None


def method_of(config: Any) -> str | None:
    """The quantization that a configuration records."""
    found = getattr(config, "quantization_config", None)
    return found.get("quant_method") if isinstance(found, dict) else getattr(found, "quant_method", None)


def record(model: nn.Module, conversion: dict) -> None:
    """Write a conversion into the model's configuration, behind those that it has."""
    config = config_of(model)
    if config is None:
        return
    found = getattr(config, "quantization_config", None)
    if found is None:
        config.quantization_config = {"quant_method": METHOD, "conversions": [conversion]}
    elif isinstance(found, dict):
        config.quantization_config = {**found, "conversions": [*found["conversions"], conversion]}
    else:
        found.conversions = [*found.conversions, conversion]


def text_of(chosen: Recipe) -> str:
    """A text that `recipe` reads as the recipe, under another name where a built-in recipe has its name."""
    text = chosen.to_text()
    try:
        recipe(text)
    except ValueError:
        return replace(chosen, name=f"{chosen.name}-own").to_text()
    return text


def patterns(converted: list[str], others: list[str]) -> list[str]:
    """The names of the converted layers, block numbers as `*` where that says the same."""
    short = sorted({re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)", "*", fqn) for fqn in converted})
    wrong = any(fnmatchcase(fqn, pattern) for fqn in others for pattern in short)
    return sorted(converted) if wrong else short


class Chosen:
    """A filter_fn that holds for recorded layers: by name, with or without the prefix of the base model."""

    reason = "not converted when the model was saved"

    def __init__(self, recorded: list[str], prefix: str = ""):
        self.recorded, self.prefix = recorded, prefix and prefix + "."
        self.found: set[str] = set()

    def __call__(self, module: nn.Module, fqn: str) -> bool:
        names = {fqn, fqn.removeprefix(self.prefix), self.prefix + fqn}
        matched = {p for p in self.recorded if any(fnmatchcase(name, p) for name in names)}
        self.found |= matched
        return bool(matched)

    @property
    def missing(self) -> list[str]:
        """Recorded names that no layer of the model has."""
        return [p for p in self.recorded if p not in self.found]
