"""`convert` refuses what it would leave as it was: a model that is converted already, one without a layer for it."""

import pytest
import torch
from torch import nn

from mxfp4 import convert


class Conv1D(nn.Module):
    """As GPT-2's."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(64, 192))


def test_a_converted_model_is_refused_rather_than_left_with_its_recipe():
    model = convert(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), "mxfp4+h16", lambda m, fqn: fqn == "0")
    for name in ("mxfp4", "mxfp4+h16"):
        with pytest.raises(
            ValueError, match=r"^1 layers are MXFP4Linear already, '0' with recipe 'mxfp4\+h16': [^\n]*$"
        ):
            convert(model, name)
        assert type(model[1]) is nn.Linear
    convert(model, "fp8", lambda m, fqn: fqn == "1")  # the others
    assert [layer.recipe.name for layer in model] == ["mxfp4+h16", "fp8"]
    with pytest.raises(ValueError, match="'the model' with recipe"):
        convert(model[0], "fp8")


@pytest.mark.parametrize(
    ("layers", "filter_fn", "what"),
    [
        ({"c_attn": Conv1D(), "c_proj": Conv1D(), "wte": nn.Embedding(9, 64)}, None,
         "convert does not know its 2 Conv1D"),
        ({"wte": nn.Embedding(9, 64), "norm": nn.LayerNorm(64)}, None, "it has no nn.Linear"),
        ({"lm_head": nn.Linear(64, 64)}, None,
         r"names that end in output, lm_head, head, router, gate stay out of its 1 nn.Linear \('lm_head'\)"),
        ({c: nn.Linear(64, 64) for c in "abcd"}, lambda m, fqn: fqn == "wq",
         r"filter_fn holds for none of its 4 nn.Linear \('a', 'b', 'c'\)"),
    ],
)  # fmt: skip
def test_a_model_with_nothing_to_convert_is_refused_with_what_it_has(layers, filter_fn, what):
    with pytest.raises(ValueError, match=f"^no layer to convert to 'mxfp4': {what}$"):
        convert(nn.ModuleDict(layers), "mxfp4", filter_fn)
