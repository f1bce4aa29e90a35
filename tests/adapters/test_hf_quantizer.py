"""The recipe travels with a saved transformers model; roles, depth and experts of real model classes."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from torch import nn

import mxfp4
from mxfp4 import MXFP4Linear, Names
from mxfp4.layers.recipe import recipe

pytest.importorskip("transformers", reason="transformers is not installed (pip install -e '.[hf]')")

import transformers

from mxfp4.adapters import hf_quantizer
from mxfp4.adapters.families import FAMILIES
from mxfp4.adapters.huggingface import forget, register
from mxfp4.layers.saved import METHOD

IDS = torch.randint(3, 128, (2, 16), generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def registered():
    register()
    transformers.utils.logging.disable_progress_bar()
    yield
    hf_quantizer.unregister()


def model_of(family: str, **changes):
    torch.manual_seed(0)
    f = FAMILIES[family]
    return getattr(transformers, f.model)(getattr(transformers, f.config)(**{**f.fields, **changes})).eval()


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


def layers(model) -> dict[str, MXFP4Linear]:
    return {name: m for name, m in model.named_modules() if isinstance(m, MXFP4Linear)}


def test_a_saved_model_comes_back_converted(tmp_path):
    model = mxfp4.convert(model_of("Mixtral"), "mxfp4+h16", seed=7)
    model.save_pretrained(tmp_path / "one")
    about = json.loads((tmp_path / "one" / "config.json").read_text())["quantization_config"]
    assert about["quant_method"] == METHOD and about["conversions"][0]["recipe"] == "mxfp4+h16"
    assert about["conversions"][0]["seed"] == 7
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "one")
    assert torch.equal(logits(again), logits(model)) and torch.equal(logits(again), logits(again))
    assert layers(again).keys() == layers(model).keys()
    assert str(mxfp4.report(again)).splitlines()[0] == str(mxfp4.report(model)).splitlines()[0]
    again.save_pretrained(tmp_path / "two")
    assert (tmp_path / "one" / "config.json").read_text() == (tmp_path / "two" / "config.json").read_text()
    again.to(torch.bfloat16)  # transformers forbids this of models whose weights are codes


def test_loading_without_the_adapter_warns(tmp_path, caplog, monkeypatch):
    mxfp4.convert(model_of("Llama"), "mxfp4").save_pretrained(tmp_path)
    hf_quantizer.unregister()
    monkeypatch.setattr(transformers.utils.logging.get_logger("transformers"), "propagate", True)
    with caplog.at_level(logging.WARNING):
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert f"Unknown quantization type, got {METHOD}" in caplog.text and not layers(model)


def test_a_plain_model_is_converted_as_it_is_loaded(tmp_path):
    from mxfp4.adapters.hf_quantizer import MXFP4TrainingConfig

    plain = model_of("Llama")
    plain.save_pretrained(tmp_path / "plain")
    config = MXFP4TrainingConfig("ti2d", seed=3)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=config)
    assert torch.equal(logits(model), logits(mxfp4.convert(plain, "ti2d", seed=3)))
    model.save_pretrained(tmp_path / "saved")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert torch.equal(logits(again), logits(model))
    for wrong, said in (
        (lambda: MXFP4TrainingConfig("mxfp5"), "recipe 'mxfp5' is not known"),
        (lambda: MXFP4TrainingConfig(), "takes a recipe"),
        (lambda: MXFP4TrainingConfig("mxfp4", sed=1), "field of mxfp4_training='sed' is not known; allowed: "),
    ):
        with pytest.raises(ValueError, match=said) as caught:
            wrong()
        assert "\n" not in str(caught.value)


def test_filters_own_recipes_names_and_several_conversions_travel(tmp_path):
    own = recipe("mxfp4+sr").to_nearest()  # the content of no recipe of that name
    model = model_of("Llama", num_hidden_layers=3)
    mxfp4.convert(model, own, lambda m, fqn: "layers.1." in fqn and fqn.endswith("proj"))
    mxfp4.convert(
        model, "fp8", lambda m, fqn: "layers.2.mlp" in fqn and fqn.endswith("proj"), names=Names(heads=("x",))
    )
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert {n: m.recipe.operands() for n, m in layers(again).items()} == {
        n: m.recipe.operands() for n, m in layers(model).items()
    }
    assert torch.equal(logits(again), logits(model)) and len(layers(again)) == 10


def test_the_base_model_and_other_heads_load_what_was_saved(tmp_path):
    mxfp4.convert(model_of("Llama"), "mxfp4").save_pretrained(tmp_path / "a")
    base = transformers.AutoModel.from_pretrained(tmp_path / "a")
    assert len(layers(base)) == 14 and "layers.0.mlp.up_proj" in layers(base)
    mxfp4.convert(base := transformers.AutoModel.from_config(model_of("Llama").config), "mxfp4")
    base.save_pretrained(tmp_path / "b")
    assert len(layers(transformers.LlamaForSequenceClassification.from_pretrained(tmp_path / "b"))) == 14


def test_a_recorded_layer_that_is_missing_is_an_error(tmp_path):
    mxfp4.convert(model_of("Llama"), "mxfp4").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["conversions"][0]["modules"].append("model.layers.*.mlp.side_proj")
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"^LlamaForCausalLM has no layer 'model.layers.\*.mlp.side_proj', which was"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_model_of_another_quantization_is_refused():
    model = model_of("Llama")
    model.config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    with pytest.raises(ValueError, match="^the model is quantized by 'bitsandbytes' already; load it without that"):
        mxfp4.convert(model, "mxfp4")


def test_a_forgotten_recipe_leaves_a_plain_model(tmp_path):
    model = mxfp4.convert(model_of("Llama"), "mxfp4")
    forget(model)
    model.save_pretrained(tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())


def test_offloaded_to_disk_and_loaded_at_once(tmp_path):
    pytest.importorskip("accelerate")
    model = mxfp4.convert(model_of("Llama"), "mxfp4+h16")
    model.save_pretrained(tmp_path / "saved")
    device_map = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk", "model.norm": "cpu",
                  "model.rotary_emb": "cpu", "lm_head": "cpu"}  # fmt: skip
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "saved", device_map=device_map, offload_folder=str(tmp_path / "disk")
    )
    assert again.model.layers[1].mlp.up_proj.weight.is_meta
    assert torch.equal(logits(again), logits(model))


# Roles and depth in real models.


def test_heads_of_real_models():
    for family, head in (("BERT", "cls.predictions.decoder"), ("Whisper", "proj_out"), ("RoBERTa", "lm_head.decoder")):
        model = mxfp4.convert(model_of(family), "mxfp4")
        assert type(model.get_submodule(head)) is nn.Linear
        assert [n for n, m in model.named_modules() if type(m) is nn.Linear] == [head]
    rwkv = transformers.RwkvForCausalLM(
        transformers.RwkvConfig(vocab_size=128, hidden_size=64, num_hidden_layers=2, attention_hidden_size=64)
    ) if hasattr(transformers, "RwkvForCausalLM") else None  # fmt: skip
    if rwkv is not None:
        mxfp4.convert(rwkv, "mxfp4")
        assert "rwkv.blocks.1.attention.output" in layers(rwkv) and type(rwkv.head) is nn.Linear


@pytest.mark.parametrize(("family", "tail"), [("BERT", "encoder.layer.7"), ("GPT-NeoX", "layers.7"), ("ViT", "7")])
def test_the_tail_lands_on_the_last_block(family, tail):
    model = mxfp4.convert(model_of(family, num_hidden_layers=8), "nvfp4")
    in_bf16 = {n for n, m in layers(model).items() if m.recipe.fprop.a.format == "bf16"}
    assert in_bf16 and all(f"{tail}." in n for n in in_bf16)


def test_gptj_and_bloom_have_a_depth():
    model = transformers.GPTJForCausalLM(
        transformers.GPTJConfig(vocab_size=128, n_embd=64, n_layer=8, n_head=2, rotary_dim=8)
    )
    mxfp4.convert(model, "nvfp4")
    tail = {n.split(".")[2] for n, m in layers(model).items() if m.recipe.fprop.a.format == "bf16"}
    assert tail == {"7"}


@pytest.mark.parametrize(("family", "names"), [("BERT", {"query", "key"}), ("GPT-NeoX", {"query_key_value"}),
                                               ("Phi-3", {"qkv_proj"}), ("T5", {"q", "k"})])  # fmt: skip
def test_query_and_key_of_real_models(family, names):
    model = mxfp4.convert(model_of(family), "ti2d")
    assert {n.rpartition(".")[2] for n, m in layers(model).items() if m.recipe.fprop.a.format == "mxfp8"} == names


def test_shared_expert_gate_of_qwen2_moe():
    config = transformers.Qwen2MoeConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
        shared_expert_intermediate_size=64, decoder_sparse_step=1,
    )  # fmt: skip
    model = mxfp4.convert(transformers.Qwen2MoeForCausalLM(config), "mxfp4")
    left = {line.name: line.reason for line in mxfp4.report(model).left_out}
    assert (
        left["model.layers.0.mlp.shared_expert_gate"] == left["model.layers.0.mlp.gate.weight"] == "gate beside experts"
    )
    assert mxfp4.report(model).quantized_weights > 0.9


def test_generation_keeps_experts_quantized(monkeypatch):
    """transformers switches the experts implementation of its configuration while it decodes."""
    model = mxfp4.convert(model_of("Mixtral"), "mxfp4+h16")
    y = logits(model)
    model.set_experts_implementation("batched_mm")
    assert torch.equal(logits(model), y)
    one, two = (model.generate(IDS[:, :4], max_new_tokens=4, do_sample=False) for _ in range(2))
    assert torch.equal(one, two)
