"""transformers' quantizer for our recipes: `from_pretrained` gives a converted model.

    mxfp4.adapters.huggingface.register()                                  # once a process
    AutoModelForCausalLM.from_pretrained(FOLDER)                           # saved by a converted model
    AutoModelForCausalLM.from_pretrained(NAME, quantization_config=MXFP4TrainingConfig("mxfp4+h16"))

The weights are loaded in high precision as transformers loads them; the model is converted then, so device maps and
offloading are in place.
"""

from __future__ import annotations

import logging
from typing import Any

from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
from transformers.utils.quantization_config import QuantizationConfigMixin

from mxfp4.layers import saved
from mxfp4.layers.convert import convert
from mxfp4.layers.recipe import recipe
from mxfp4.layers.report import report
from mxfp4.layers.roles import Names
from mxfp4.numerics.formats import one_of

_log = logging.getLogger("mxfp4")
_KEYS = ("recipe", "modules", "seed", "save", "names", "allow_unmatched")


class MXFP4TrainingConfig(QuantizationConfigMixin):
    """The recipes of a model: those that `mxfp4.convert` recorded, or one for a model that has none yet.

    recipe: a recipe's name, JSON or Recipe. seed, save, names, allow_unmatched: as `mxfp4.convert` takes them.
    conversions: what was recorded, in place of the others. Raises ValueError for unknown recipes and fields.
    """

    def __init__(self, recipe: Any = None, *, conversions: list[dict] | None = None, quant_method: str = saved.METHOD,
                 **fields: Any):  # fmt: skip
        one_of("quant_method", quant_method, (saved.METHOD,))
        if (recipe is None) == (conversions is None):
            raise ValueError("MXFP4TrainingConfig takes a recipe, such as 'mxfp4+h16', or conversions")
        if conversions is None:
            names = fields.get("names")
            conversions = [{**fields, "recipe": recipe, **({"names": names.to_dict()} if names else {})}]
        self.quant_method = quant_method
        self.conversions = [_checked(dict(c)) for c in conversions]

    def to_dict(self) -> dict[str, Any]:
        return {"quant_method": self.quant_method, "conversions": [dict(c) for c in self.conversions]}


def _checked(conversion: dict) -> dict:
    for key in conversion:
        one_of(f"field of {saved.METHOD}", key, _KEYS)
    if "recipe" not in conversion:
        raise ValueError(f"a conversion of {saved.METHOD} has no recipe; it has {', '.join(sorted(conversion))}")
    return {**conversion, "recipe": saved.text_of(recipe(conversion["recipe"]))}


class MXFP4TrainingQuantizer(HfQuantizer):
    """Converts a model when its weights are loaded."""

    @property
    def is_trainable(self) -> bool:
        return True

    @property
    def is_qat_trainable(self) -> bool:
        return True

    @property
    def is_compileable(self) -> bool:
        return True

    def is_serializable(self) -> bool:
        return True

    def _process_model_after_weight_loading(self, model, **kwargs):
        wanted = self.quantization_config.conversions
        model.is_quantized = False  # its weights are whole: .to(dtype), .half() and training are allowed
        del model.config.quantization_config  # `convert` records anew what it does
        for conversion in wanted:
            apply(model, conversion)
        self.quantization_config = type(self.quantization_config)(
            conversions=model.config.quantization_config["conversions"]
        )
        model.config.quantization_config = self.quantization_config
        _log.info("%s", report(model))
        return model


def apply(model, conversion: dict) -> None:
    """Convert `model` as recorded. Raises ValueError where it lacks a recorded layer."""
    names = conversion.get("names")
    chosen = None
    if "modules" in conversion:
        chosen = saved.Chosen(conversion["modules"], getattr(model, "base_model_prefix", ""))
    convert(
        model, conversion["recipe"], chosen, seed=conversion.get("seed", 0), save=conversion.get("save", "values"),
        names=Names(**names) if names else None,
        allow_unmatched=conversion.get("allow_unmatched", False),
    )  # fmt: skip
    if chosen and chosen.missing:
        raise ValueError(
            f"{type(model).__name__} has no layer {chosen.missing[0]!r}, which was saved converted to "
            f"{recipe(conversion['recipe']).name!r}; load it with the class that was saved"
        )


def register() -> None:
    """Make both classes known to transformers."""
    if saved.METHOD not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        register_quantization_config(saved.METHOD)(MXFP4TrainingConfig)
        register_quantizer(saved.METHOD)(MXFP4TrainingQuantizer)


def unregister() -> None:
    """Take both classes back."""
    AUTO_QUANTIZATION_CONFIG_MAPPING.pop(saved.METHOD, None)
    AUTO_QUANTIZER_MAPPING.pop(saved.METHOD, None)
