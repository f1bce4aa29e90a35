"""Recipes: what each name stands for, and what is refused."""

import dataclasses

import pytest

from mxfp4 import RECIPES, Gemm, Operand, Recipe, recipe
from mxfp4.layers.recipe import BASES, GEMMS, MODIFIERS, TI2D
from mxfp4.training.config import ModelConfig, TrainConfig

BASE_OF = {"delayed": "fp8", "delayed-max": "mxfp4-fprop", "pow2": "fp8-block"}
"""{modifier: a base that it changes} of those that change no FP4 operand."""


@pytest.mark.parametrize(
    "name", [*RECIPES, *BASES, *(f"{BASE_OF.get(m, 'mxfp4')}+{m}" for m in MODIFIERS), "mxfp4+2d+rceil+sr-grad"]
)
def test_every_name_parses_and_round_trips(name):
    made = recipe(name)
    assert made.name == name
    assert Recipe.from_json(made.to_json()) == made
    assert recipe(made) is made


def test_scopes_quantize_exactly_their_gemms_and_leave_fp8_elsewhere():
    for name in ("mxfp4-fprop", "mxfp4-dgrad", "mxfp4-wgrad", "mxfp4-fprop-dgrad", "mxfp4"):
        scope = name.split("-")[1:] or list(GEMMS)
        for (gemm, tensor), op in recipe(name).operands().items():
            assert op.format == ("mxfp4" if gemm in scope else "fp8"), (name, gemm, tensor)


def test_fp8_is_hybrid():
    elems = {tensor: op.elem for (_, tensor), op in recipe("fp8").operands().items()}
    assert elems == {"x": "e4m3", "w": "e4m3", "g": "e5m2"}


@pytest.mark.parametrize("stabiliser, field, value", [
    ("sr", "rounding", "stochastic"), ("h16", "hadamard", "h16"), ("h32", "hadamard", "h32"),
    ("rht16", "hadamard", "rht16"), ("rceil", "scale_rule", "rceil"), ("2d", "block", "2d"),
])  # fmt: skip
def test_a_stabiliser_changes_one_field_of_the_mxfp4_operands_only(stabiliser, field, value):
    for scope in ("mxfp4-fprop", "mxfp4-fprop-dgrad", "mxfp4"):
        plain, changed = recipe(scope).operands(), recipe(f"{scope}+{stabiliser}").operands()
        for key, before in plain.items():
            after = dataclasses.replace(before, **{field: value}) if before.format == "mxfp4" else before
            assert changed[key] == after


def test_delayed_scaling_changes_fp8_operands_alone():
    assert {op.delayed for op in recipe("fp8+delayed").operands().values()} == {"most_recent"}
    mixed = recipe("mxfp4-fprop+delayed-max")
    assert {key[0]: op.delayed for key, op in mixed.operands().items()} == {
        "fprop": None,
        "dgrad": "max",
        "wgrad": "max",
    }
    assert mixed.is_delayed and not recipe("fp8").is_delayed
    assert str(recipe("fp8+delayed").fprop.a) == "fp8 e4m3 delayed most_recent"


def test_fp8_block_is_deepseeks_blocks():
    blocks = {(t, op.format, op.elem, op.block, op.block_size) for (_, t), op in recipe("fp8-block").operands().items()}
    assert blocks == {(t, "fp8-block", "e4m3", "2d" if t == "w" else "1d", 128) for t in "xwg"}
    assert all(op.pow2_scales for op in recipe("fp8-block+pow2").operands().values())
    assert str(recipe("fp8-block+pow2").fprop.b) == "fp8-block e4m3 2d pow2"


def test_sr_grad_touches_gradients_and_h16_wgrad_one_gemm():
    random = {k for k, op in recipe("mxfp4+sr-grad").operands().items() if op.rounding == "stochastic"}
    assert random == {("dgrad", "g"), ("wgrad", "g")}
    rotated = {k for k, op in recipe("mxfp4+h16-wgrad").operands().items() if op.hadamard}
    assert rotated == {("wgrad", "g"), ("wgrad", "x")}


def test_ti2d_is_its_ingredients_and_each_can_be_removed():
    whole = recipe("ti2d")
    query, value = whole.for_layer("layers.3.attention.wq"), whole.for_layer("layers.3.attention.wv")
    assert {op.format for op in query.operands().values()} == {"mxfp8"}
    assert {(op.format, op.block, op.scale_rule) for op in value.operands().values()} == {("mxfp4", "2d", "rceil")}
    assert whole.for_layer("model.layers.0.self_attn.k_proj").fprop.a.format == "mxfp8"
    for ingredient in TI2D:
        less = recipe(f"ti2d-no-{ingredient}")
        assert dataclasses.replace(less, name="ti2d") != whole
    assert recipe("ti2d-no-qk8").overrides == ()
    assert not recipe("ti2d-no-sr").is_random
    assert recipe("ti2d-no-2d").fprop.a.block == "1d"
    assert recipe("ti2d-no-rceil").fprop.a.scale_rule == "even"


def test_a_recipe_is_immutable_and_prints_itself():
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe("mxfp4").name = "other"
    text = str(recipe("ti2d"))
    for part in ("ti2d", "fprop", "dgrad", "wgrad", "mxfp4", "2d", "rceil", "sr", "mxfp8", "*.wq"):
        assert part in text


def own(**changes):
    """A recipe that no name composes."""
    return dataclasses.replace(recipe("mxfp4+h16"), **{"name": "my-idea", "bf16_tail": 0.25, **changes})


@pytest.mark.parametrize("name", ["ti2d", "nvfp4", "quartet", "mxfp4+h16"])
def test_json_of_any_content_round_trips(name):
    made = dataclasses.replace(recipe(name), name="my.idea-2", bf16_tail=0.25)
    assert recipe(made.to_json()) == made == recipe(made.to_text())
    assert recipe(recipe(name).to_json()) == recipe(name)


def test_the_canonical_text_is_the_name_or_json_without_defaults():
    assert recipe("mxfp4+h16").to_text() == "mxfp4+h16" == recipe(recipe("mxfp4+h16").to_json()).to_text()
    text = own().to_text()
    assert text.startswith('{"bf16_tail":0.25,"dgrad":{"a":{"format":"mxfp4","hadamard":"h16"}') and "elem" not in text
    assert recipe(own().to_json()).to_text() == text == recipe(text).to_text()
    assert Recipe("plain").to_text() == '{"name":"plain"}'


def test_a_configuration_is_keyed_by_the_content_of_its_recipe():
    model = ModelConfig(vocab_size=48, dim=32, n_layers=1, n_heads=1, n_kv_heads=1, ffn_dim=32, max_seq_len=32)
    sizes = dict(seed=0, model=model, corpus="known-entropy", seq_len=32, batch_size=1, steps=1, lr=1e-3, lr_min=0.0,
                 warmup=0, eval_every=1, eval_sequences=1, scale="cpu")  # fmt: skip
    config = TrainConfig(recipe=own().to_text(), **sizes)
    assert TrainConfig.from_dict(config.to_dict()) == config
    assert config != TrainConfig(recipe=own(bf16_tail=0.5).to_text(), **sizes)


@pytest.mark.parametrize("make, words", [
    (lambda: recipe("mxfp5"), ("mxfp5", "mxfp4", "fp8", "ti2d", "+sr-grad", "+2d")),
    (lambda: recipe("mxpf4+2d+sr"), ("mxpf4+2d+sr", "did you mean mxfp4+2d+sr?")),
    (lambda: recipe("mxfp4+h17"), ("h17", "h16", "sr")),
    (lambda: recipe("ti2d-no-fun"), ("fun", "qk8")),
    (lambda: recipe("mxfp4-wgrad-fprop"), ("mxfp4-wgrad-fprop", "mxfp4-fprop-dgrad")),
    (lambda: Operand("fp4"), ("fp4", "mxfp4")),
    (lambda: Operand("mxfp8"), ("None", "e4m3", "e5m2")),
    (lambda: Operand("mxfp4", "e4m3"), ("e4m3", "None")),
    (lambda: Operand("mxfp4", block="3d"), ("3d", "1d", "2d")),
    (lambda: Operand("mxfp4", scale_rule="up"), ("up", "floor", "rceil")),
    (lambda: Operand("mxfp4", rounding="odd"), ("odd", "nearest", "stochastic")),
    (lambda: Operand("mxfp4", hadamard="h8"), ("h8", "h16", "rht16")),
    (lambda: Operand("mxfp4", prescaled=True), ("even", "floor")),
    (lambda: Operand("fp8-block", "e5m2"), ("e5m2", "e4m3")),
    (lambda: Operand("fp8", "e4m3", delayed="mean"), ("mean", "most_recent", "max")),
    (lambda: Operand("fp8", "e4m3", delayed="max", rounding="stochastic"), ("stochastic", "nearest")),
    (lambda: Operand("fp8", "e4m3", pow2_scales=True), ("fp8-block", "'fp8'")),
    (lambda: recipe("mxfp4+delayed"), ("delayed", "fp8")),
    (lambda: recipe("fp8+pow2"), ("pow2", "fp8-block")),
    (lambda: recipe("fp8-block+sr"), ("sr", "FP4")),
    (lambda: Recipe("x", fprop=recipe("fp8+delayed").fprop, wgrad=recipe("fp8+delayed-max").wgrad),
     ("'x'", "'max'", "'most_recent'", "allowed is one")),
    (lambda: Recipe("x", bf16_tail=1.5), ("1.5", "[0, 1)")),
    (lambda: recipe("mxfp4+double+h16"), ("double", "rotation")),
    (lambda: Gemm(Operand("mxfp4", hadamard="h16"), Operand("mxfp4")), ("h16", "None")),
    (lambda: Recipe.from_json('{"name": "x", "fprop": {"a": {"colour": 1}}}'), ("colour", "block", "scale_rule")),
    (lambda: recipe("bf16+h16"), ("bf16+h16", "h16", "FP4")),
    (lambda: recipe("mxfp4-fprop+h16-wgrad"), ("h16-wgrad", "FP4")),
    (lambda: recipe("mxfp4-fprop+sr-grad"), ("sr-grad", "FP4")),
    (lambda: recipe("mxfp4+h16+rht16"), ("rht16", "rotation")),
    (lambda: Recipe.from_json("{}"), ("name", "missing")),
    (lambda: Recipe.from_json('{"name": "x", "sprop": {}}'), ("sprop", "fprop")),
    (lambda: Recipe.from_json("[1]"), ("object", "[1]")),
    (lambda: Recipe.from_json('{"name": 5}'), ("name", "text", "5")),
    (lambda: recipe('{"name": "x", "quest": 1}'), ("quest", "true or false", "1")),
    (lambda: recipe('{"name": "x", "bf16_tail": true}'), ("bf16_tail", "a number", "true")),
    (lambda: recipe('{"name": "x", "overrides": {}}'), ("overrides", "a list")),
    (lambda: recipe('{"name": "x", "fprop": 3}'), ("Gemm", "object", "3")),
    (lambda: recipe('{"name": "x", "wgrad": {"a": {"format": "fp3"}}}'), ("fp3", "mxfp4")),
    (lambda: recipe('{"name": "x"'), ("not JSON", "line 1")),
    (lambda: recipe('{"name": "a b"}'), ("a b", "letters")),
    (lambda: recipe('{"name": "mxfp4"}'), ("mxfp4", "another name")),
    (lambda: recipe(own(name="ti2d").to_json()), ("ti2d", "another name")),
])  # fmt: skip
def test_unknown_names_and_fields_are_refused_with_the_known_ones(make, words):
    with pytest.raises(ValueError) as refused:
        make()
    text = str(refused.value)
    assert "\n" not in text
    for word in words:
        assert word in text
