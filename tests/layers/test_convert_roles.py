"""Which layers `convert` chooses: by role before name, by size, over the whole depth; and what the report says."""

import pytest
import torch
from torch import nn

import mxfp4
from mxfp4 import MXFP4Linear, Names, convert
from mxfp4.layers.roles import Roles


def stack(make, n: int = 2) -> nn.ModuleList:
    return nn.ModuleList([nn.ModuleDict(make()) for _ in range(n)])


def linear(n_in: int = 64, n_out: int = 64) -> nn.Linear:
    return nn.Linear(n_in, n_out, bias=False)


def module(**children) -> nn.Module:
    made = nn.Module()
    for name, child in children.items():
        setattr(made, name, child)
    return made


def converted(model: nn.Module) -> set[str]:
    return {fqn for fqn, m in model.named_modules() if isinstance(m, MXFP4Linear)}


def reasons(model: nn.Module) -> dict[str, str]:
    return {line.name: line.reason for line in mxfp4.report(model).left_out}


def test_the_head_is_what_shares_the_embedding_or_is_the_output_embedding():
    model = module(emb=nn.Embedding(96, 64), body=linear(), decoder=linear(64, 96), generator=linear(64, 96))
    model.decoder.weight = model.emb.weight
    model.get_output_embeddings = lambda: model.generator
    convert(model, "mxfp4")
    assert converted(model) == {"body"}
    assert reasons(model) == {
        "emb.weight": "embedding; its matrix is counted at the output head",
        "decoder": "output head (shares the embedding's matrix)",
        "generator": "output head (get_output_embeddings)",
    }


def test_an_inner_layer_is_no_head_by_its_name():
    """RWKV's and BERT's `attention.output`, a `head` of a block, a `score` inside."""
    inner = {"attention": nn.ModuleDict({"output": linear(), "score": linear()}), "head": linear(), "output": linear()}
    model = module(layers=stack(lambda: {k: v for k, v in inner.items()}, 1), output=linear(64, 96), head=linear())
    convert(model, "mxfp4")
    assert converted(model) == {f"layers.0.{n}" for n in ("attention.output", "attention.score", "head", "output")}
    flat = convert(module(attention=nn.ModuleDict({"query": linear(), "output": linear()}), output=linear()), "mxfp4")
    assert converted(flat) == {"attention.query", "attention.output"}


@pytest.mark.parametrize("wrapper", ["module", "_orig_mod", "model"])
def test_a_wrapped_model_has_the_same_roles(wrapper):
    model = module(**{wrapper: module(layers=stack(lambda: {"wq": linear(), "wk": linear()}, 8), output=linear())})
    convert(model, "ti2d+tail15")
    assert len(converted(model)) == 16 and reasons(model) == {f"{wrapper}.output": "output head (by its name)"}
    layers = getattr(model, wrapper).layers
    assert [b["wq"].recipe.fprop.a.format for b in layers] == ["mxfp8"] * 7 + ["bf16"]


def test_routers_are_told_by_role_and_shape():
    def mixture():
        experts = nn.ModuleList([nn.ModuleDict({"gate": linear(), "up": linear()}) for _ in range(64)])
        return {
            "moe": nn.ModuleDict({"gate": linear(64, 64), "experts": experts, "shared_expert": linear(),
                                  "shared_expert_gate": linear(64, 1), "wg": linear(64, 64), "mix": linear(64, 64)}),
            "mlp": nn.ModuleDict({"gate": linear(), "up": linear()}),
            "router": nn.ModuleDict({"classifier": linear(64, 64)}),
            "score": linear(64, 1),
        }  # fmt: skip

    model = convert(module(layers=stack(mixture, 1)), "mxfp4")
    assert reasons(model) == {
        "layers.0.moe.gate": "gate beside experts",
        "layers.0.moe.shared_expert_gate": "gate beside experts",
        "layers.0.moe.wg": "gate beside experts",
        "layers.0.moe.mix": "router (one output for each of 64 experts)",
        "layers.0.router.classifier": "router (ModuleDict)",
        "layers.0.score": "one output",
    }
    assert {"layers.0.mlp.gate", "layers.0.moe.experts.5.gate", "layers.0.moe.shared_expert"} <= converted(model)


def test_small_layers_and_heads_that_do_not_fit_are_left_out_and_reported():
    block = {"q_proj": linear(), "lora_A": linear(64, 32), "down": linear(64, 8), "up": linear(8, 64)}
    model = module(layers=stack(lambda: dict(block), 1), pooler=linear(), extra=linear(64, 1000))
    convert(model, "mxfp4")
    assert converted(model) == {"layers.0.q_proj", "pooler"}
    assert reasons(model) == {
        "layers.0.lora_A": "LoRA adapter",
        "layers.0.down": "too small: out_features=8 is not a multiple of 32, which recipe 'mxfp4' needs in dgrad",
        "layers.0.up": "too small: in_features=8 is not a multiple of 32, which recipe 'mxfp4' needs in fprop",
        "extra": "out_features=1000 is not a multiple of 32, which recipe 'mxfp4' needs in dgrad",
    }


def test_a_layer_that_is_chosen_or_large_and_does_not_fit_is_an_error_that_offers_filter_fn():
    model = module(layers=stack(lambda: {"a": linear(), "b": linear(64, 40), "c": linear(64, 8)}, 1))
    says = (
        r"out_features={} is not a multiple of 32, which recipe 'mxfp4' needs in dgrad; leave it out with filter_fn=.*"
    )
    with pytest.raises(ValueError, match=rf"^layer 'layers\.0\.b': {says.format(40)}not fqn\.endswith\(\('\.b',\)\)$"):
        convert(model, "mxfp4")
    with pytest.raises(ValueError, match=rf"^layer 'layers\.0\.c': {says.format(8)}$"):
        convert(model, "mxfp4", lambda m, fqn: fqn.endswith(("a", "c")))
    assert not converted(model)
    convert(model, "mxfp4", lambda module, fqn: mxfp4.default_filter(module, fqn) and fqn.endswith("a"))
    assert converted(model) == {"layers.0.a"} and reasons(model) == {
        "layers.0.b": "filter_fn",
        "layers.0.c": "filter_fn",
    }


def test_the_filter_that_the_error_offers_works():
    """Mamba's x_proj: one in each block."""
    model = module(layers=stack(lambda: {"mixer": nn.ModuleDict({"x_proj": linear(64, 80), "dt": linear(8, 64),
                                                                 "up": linear()})}), lm_head=linear())  # fmt: skip
    with pytest.raises(
        ValueError, match=r"'layers\.0\.mixer\.x_proj': .*dgrad \(and 1 more layers like it\); "
    ) as caught:
        convert(model, "mxfp4")
    offered = str(caught.value).partition("filter_fn=")[2]
    convert(model, "mxfp4", eval(offered, {"mxfp4": mxfp4}))
    assert converted(model) == {f"layers.{i}.mixer.up" for i in range(2)}


def test_the_default_filter_inside_a_filter_knows_the_roles():
    model = module(emb=nn.Embedding(96, 64), a=linear(), b=linear(), decoder=linear(64, 96))
    model.decoder.weight = model.emb.weight
    convert(model, "mxfp4", lambda m, fqn: mxfp4.default_filter(m, fqn) and fqn != "b")
    assert converted(model) == {"a"}


def test_one_module_in_two_places_needs_one_answer():
    layer = linear()
    with pytest.raises(ValueError, match="^'0' and '1' are one module; filter_fn must hold for all or for none$"):
        convert(nn.Sequential(layer, layer), "mxfp4", lambda m, fqn: fqn == "0")


# Depth.

LISTS = ["layers", "layer", "h", "blocks", "block", "encoder.layer", "transformer.h", "stages"]


@pytest.mark.parametrize("name", LISTS)
def test_the_tail_is_found_in_any_list_of_blocks(name):
    blocks = nn.ModuleList([nn.Sequential(linear()) for _ in range(8)])
    for part in reversed(name.split(".")):
        blocks = module(**{part: blocks})
    convert(blocks, "nvfp4")
    assert [m.recipe.fprop.a.format for m in blocks.modules() if isinstance(m, MXFP4Linear)] == ["nvfp4"] * 7 + ["bf16"]
    assert mxfp4.report(blocks).remarks == ("BF16 tail of nvfp4: the last 1 of 8 blocks",)


def test_encoder_and_decoder_are_one_depth_and_parts_of_blocks_are_none():
    def t5():
        return module(block=nn.ModuleList([module(layer=nn.ModuleList([nn.Sequential(linear()), module(f=linear())]))
                                           for _ in range(4)]))  # fmt: skip

    model = module(encoder=t5(), decoder=t5())
    roles = Roles(model)
    assert roles.depth == 8 and roles.block("decoder.block.1.layer.0.0") == 5
    convert(model, "nvfp4")
    assert model.encoder.block[3].layer[1].f.recipe.fprop.a.format == "nvfp4"
    assert model.decoder.block[3].layer[0][0].recipe.fprop.a.format == "bf16"


def test_blocks_inside_stages_count_and_a_list_of_plain_layers_does_not():
    model = module(
        layers=nn.ModuleList(
            [module(blocks=nn.ModuleList([nn.Sequential(linear()) for _ in range(n)])) for n in (2, 6)]
        ),
        box=module(layers=nn.ModuleList([linear(), linear()])),
    )
    roles = Roles(model)
    assert roles.depth == 8 and roles.block("layers.1.blocks.5.0") == 7 and roles.block("box.layers.1") is None


def test_lists_side_by_side_are_parts_of_one_block():
    """XLM keeps its attentions and its feed-forwards in two lists."""
    model = module(
        attentions=stack(lambda: {"q_lin": linear(), "k_lin": linear()}, 8), ffns=stack(lambda: {"a": linear()}, 8)
    )
    convert(model, "ti2d+tail15")
    assert Roles(model).depth == 8
    assert model.attentions[7]["q_lin"].recipe.fprop.a.format == model.ffns[7]["a"].recipe.fprop.a.format == "bf16"
    assert model.attentions[6]["q_lin"].recipe.fprop.a.format == "mxfp8"


def test_depth_counts_blocks_that_a_filter_leaves_out():
    model = module(layers=stack(lambda: {"a": linear()}, 8))
    convert(model, "mxfp4+tail15", lambda m, fqn: int(fqn.split(".")[1]) < 4)
    assert all(model.layers[i]["a"].recipe.fprop.a.format == "mxfp4" for i in range(4))


def test_a_part_that_finds_nothing_is_an_error_that_says_how_to_name_layers():
    flat = module(fc1=linear(), fc2=linear())
    with pytest.raises(ValueError, match=r"^recipe 'nvfp4': its BF16 tail of 15% found no numbered blocks \(as in 'fc1'\); "
                       r"say what .*mxfp4.Names\(blocks=\('stages',\)\); or pass allow_unmatched=True$"):  # fmt: skip
        convert(flat, "nvfp4")
    with pytest.raises(ValueError, match=r"^recipe 'ti2d': its part for '\*\.wq.*k_proj' found no layer .* 'fc1'\); .*"
                       r"Names\(projections={'mix': \('q_proj', 'k_proj'\)}\); or pass allow_unmatched=True$"):  # fmt: skip
        convert(flat, "ti2d")
    assert not converted(flat)
    convert(flat, "ti2d", allow_unmatched=True)
    assert len(converted(flat)) == 2 and "its part for '*.wq" in mxfp4.report(flat).unmatched[0]
    assert "matched no layer: its part" in str(mxfp4.report(flat))


FUSED = ["qkv_proj", "query_key_value", "c_attn", "Wqkv", "qkv"]


@pytest.mark.parametrize("name", [*FUSED, "wq", "q_proj", "query", "q", "q_lin", "k_proj", "kv_proj"])
def test_query_and_key_are_known_by_other_names_and_in_fused_matrices(name):
    partner = {"query": "key", "q": "k"}.get(name, "other")
    model = module(layers=stack(lambda: {name: linear(), partner: linear(), "value": linear(), "dense": linear()}))
    convert(model, "ti2d")
    assert model.layers[1][name].recipe.fprop.a.format == "mxfp8"
    assert model.layers[1]["value"].recipe.fprop.a.format == model.layers[1]["dense"].recipe.fprop.a.format == "mxfp4"


def test_projections_inside_of_wrappers_and_of_attention():
    """Moshi's `q_proj.linear`, PEFT's `q_proj.base_layer`, DeBERTa's `in_proj`; not Mamba's."""
    model = module(layers=stack(lambda: {
        "self_attn": nn.ModuleDict({"q_proj": nn.ModuleDict({"linear": linear()}), "in_proj": linear(),
                                    "k_proj": nn.ModuleDict({"base_layer": linear()})}),
        "mixer": nn.ModuleDict({"in_proj": linear()}),
    }))  # fmt: skip
    convert(model, "ti2d")
    formats = {fqn: m.recipe.fprop.a.format for fqn, m in model.layers[0].named_modules() if isinstance(m, MXFP4Linear)}
    assert formats == {
        "self_attn.q_proj.linear": "mxfp8", "self_attn.in_proj": "mxfp8", "self_attn.k_proj.base_layer": "mxfp8",
        "mixer.in_proj": "mxfp4",
    }  # fmt: skip


def test_a_key_without_a_query_is_no_projection_of_attention():
    """RWKV's feed-forward has a `key` and a `value`."""
    model = module(blocks=stack(lambda: {"key": linear(), "value": linear()}))
    with pytest.raises(ValueError, match="found no layer"):
        convert(model, "ti2d")


def test_a_user_names_projections_blocks_heads_and_routers():
    blocks = stack(lambda: {"mix_qk": linear(), "v": linear(), "dispatch": linear()}, 8)
    model = module(deep=module(parts_a=blocks), out=linear(), end=linear())
    names = Names(
        blocks=("parts_a",), heads=("out",), routers=("dispatch",), projections={"mix_qk": ("q_proj", "k_proj")}
    )
    convert(model, "ti2d+tail15", names=names)
    assert model.deep.parts_a[0]["mix_qk"].recipe.fprop.a.format == "mxfp8"
    assert reasons(model)["out"] == "output head (by its name)" and "end" in converted(model)
    assert reasons(model)["deep.parts_a.3.dispatch"] == "router (Linear)"
    for wrong in ({"projections": {"a": ("query",)}}, {"blocks": "layers"}, {"heads": (1,)}):
        with pytest.raises(ValueError, match="is not allowed"):
            Names(**wrong)


# The report.


def test_the_report_counts_weights_and_flops():
    def block():
        return {"q_proj": linear(), "moe": nn.ModuleDict({"gate": linear(64, 4), "experts": experts()})}

    def experts():
        return nn.ModuleList([nn.ModuleDict({"up": linear(64, 128)}) for _ in range(4)])

    model = module(emb=nn.Embedding(96, 64), layers=stack(block, 2), lm_head=linear(64, 96))
    for b in model.layers:
        b["moe"].top_k = 2
    convert(model, "ti2d")
    report = mxfp4.report(model)
    q, up, gate, head = 2 * 64 * 64, 2 * 4 * 64 * 128, 2 * 4 * 64, 64 * 96
    total, work = q + up + gate + head, q + up / 2 + gate + head
    assert report.weight_share == pytest.approx(
        {"mxfp8": q / total, "mxfp4": up / total, "not quantized": (gate + head) / total}
    )
    assert report.flop_share == pytest.approx(
        {"mxfp8": q / work, "mxfp4": up / 2 / work, "not quantized": (gate + head) / work}
    )
    assert report.quantized_weights == pytest.approx((q + up) / total)
    text = str(report)
    assert "layers.*.moe.experts.*.up" in text and "output head (by its name)" in text and text.count("\n") < 25


def test_the_report_names_gemms_of_unlike_operands_and_a_tail_as_they_are():
    model = convert(module(layers=stack(lambda: {"a": linear()}, 8)), "mxfp4-bwd+tail15")
    report = mxfp4.report(model)
    assert report.weight_share == {"bf16 and mxfp4": 7 / 8, "bf16": 1 / 8}
    assert report.quantized_weights == 7 / 8 and report.quantized_flops == pytest.approx(7 / 8 * 2 / 3)
    assert mxfp4.report(convert(nn.Sequential(linear()), "quartet")).quantized_weights == 1  # by QuEST


def test_two_recipes_in_one_model_are_one_report():
    model = nn.Sequential(linear(), linear(), linear())
    convert(model, "mxfp4", lambda m, fqn: fqn == "0")
    convert(model, "fp8", lambda m, fqn: fqn == "1")
    report = mxfp4.report(nn.Sequential(model))  # under another name
    assert report.recipes == ("mxfp4", "fp8")
    assert {line.name: line.weight_format for line in report.converted} == {"0.0": "mxfp4", "0.1": "fp8"}
    assert [(line.name, line.reason) for line in report.left_out] == [("0.2", "filter_fn")]


def test_nothing_is_left_out_silently():
    """Every parameter of two dimensions is in the report, and what `convert` does not know is warned of."""

    class WithLoRA(nn.Linear):
        def __init__(self):
            super().__init__(64, 64)
            self.lora_down = nn.Parameter(torch.randn(8, 64))

    class Packed(nn.Module):
        """As the layers of quantization libraries, which keep codes in buffers."""

        in_features = out_features = 64

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.cube = nn.Parameter(torch.randn(4, 64, 64))

    model = module(a=linear(), conv=nn.Conv1d(64, 64, 3), rnn=nn.GRU(64, 64), odd=Odd(), emb=nn.Embedding(9, 64))
    model.more = nn.ModuleList([WithLoRA(), Packed(), torch.jit.trace(nn.Linear(64, 64), torch.zeros(1, 64))])
    with pytest.warns(
        UserWarning, match=r"convert leaves 77% of the matrix weights as they are, .*2 GRU, 2 WithLoRA, 1 Odd"
    ):
        convert(model, "mxfp4")
    report = mxfp4.report(model)
    listed = {line.name for line in (*report.converted, *report.left_out)}
    linears = ("a.weight", "more.0.weight")
    names = {n.removesuffix(".weight") if n in linears else n for n, p in model.named_parameters() if p.ndim > 1}
    assert listed == {*names, "more.1"} and {"more.0.lora_down", "more.2.weight"} <= names
    assert reasons(model)["odd.cube"] == "convert does not know Odd (a 3-D parameter)"
