"""Families of transformers models under a recipe: what of each is quantized, and that it trains, saves and reloads.

Tiny models with random weights: the modules are those of the large ones, so names, roles and layouts are. `rows` is
the table, `row` one line of it. Needs transformers; nothing is downloaded.
"""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import transformers
from torch import Tensor
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

from mxfp4.adapters import hf_quantizer
from mxfp4.layers import saved
from mxfp4.layers.convert import convert
from mxfp4.layers.recipe import Recipe
from mxfp4.layers.report import Report, report

_DECODER = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64}  # fmt: skip
_ENCODER = {k: v for k, v in _DECODER.items() if k != "num_key_value_heads"}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}


@dataclass(frozen=True)
class Family:
    """A family's class of models, a tiny configuration of it and a batch."""

    model: str
    config: str
    fields: dict
    batch: Callable[[torch.Generator], dict[str, Tensor]]

    def build(self, seed: int = 0):
        """The model, with random weights of the seed."""
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            config = getattr(transformers, self.config)(**self.fields)
            return getattr(transformers, self.model)._from_config(config)


def _tokens(generator: torch.Generator) -> dict[str, Tensor]:
    ids = torch.randint(3, 128, (2, 16), generator=generator)
    return {"input_ids": ids, "labels": ids}


def _encoder_decoder(generator: torch.Generator) -> dict[str, Tensor]:
    return {**_tokens(generator), "labels": torch.randint(3, 128, (2, 8), generator=generator)}


def _speech(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "input_features": torch.randn(2, 16, 32, generator=generator),
        "labels": torch.randint(3, 128, (2, 8), generator=generator),
    }


def _image(generator: torch.Generator) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(2, 3, 32, 32, generator=generator), "labels": torch.tensor([0, 1])}


def _causal(name: str, **fields) -> Family:
    return Family(f"{name}ForCausalLM", f"{name}Config", {**_DECODER, "pad_token_id": 0, **fields}, _tokens)


FAMILIES: dict[str, Family] = {
    "Llama": _causal("Llama"),
    "Qwen2": _causal("Qwen2"),
    "Qwen3": _causal("Qwen3", head_dim=32),
    "Mistral": _causal("Mistral"),
    "Gemma": _causal("Gemma", head_dim=32),
    "Phi-3": _causal("Phi3"),
    "GPT-NeoX": Family("GPTNeoXForCausalLM", "GPTNeoXConfig", _ENCODER, _tokens),
    "BERT": Family("BertForMaskedLM", "BertConfig", _ENCODER, _tokens),
    "RoBERTa": Family("RobertaForMaskedLM", "RobertaConfig", {**_ENCODER, "pad_token_id": 0}, _tokens),
    "Whisper": Family(
        "WhisperForConditionalGeneration", "WhisperConfig",
        {"vocab_size": 128, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
         "decoder_attention_heads": 2, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "num_mel_bins": 16,
         "max_source_positions": 16, "max_target_positions": 32, "pad_token_id": 0, "bos_token_id": 1,
         "eos_token_id": 2, "decoder_start_token_id": 1},
        _speech,
    ),
    "T5": Family(
        "T5ForConditionalGeneration", "T5Config",
        {"vocab_size": 128, "d_model": 64, "d_kv": 32, "d_ff": 128, "num_layers": 2, "num_heads": 2,
         "pad_token_id": 0, "decoder_start_token_id": 0},
        _encoder_decoder,
    ),
    "ViT": Family(
        "ViTForImageClassification", "ViTConfig",
        {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
         "image_size": 32, "patch_size": 8, "num_labels": 10},
        _image,
    ),
    "Mixtral": _causal("Mixtral", num_local_experts=4, num_experts_per_tok=2),
    "Qwen3-MoE": _causal("Qwen3Moe", head_dim=32, num_experts=4, **_EXPERTS),
    "GptOss": _causal("GptOss", head_dim=32, num_local_experts=4, num_experts_per_tok=2),
    "DeepSeek-V3": _causal(
        "DeepseekV3", n_routed_experts=4, n_group=1, topk_group=1, first_k_dense_replace=1, kv_lora_rank=32,
        q_lora_rank=32, qk_rope_head_dim=32, qk_nope_head_dim=32, v_head_dim=32, **_EXPERTS,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A family under a recipe."""

    family: str
    model: str
    recipe: str
    weights: float
    """Share of the matrix weights that is quantized, embeddings left out."""
    flops: float
    """Share of the matrices' FLOPs that is."""
    query_key: str
    """Names of the layers that hold query and key."""
    head: str
    """Name of the output head, "" for none."""
    left_out: dict[str, float]
    """{layers and why they stayed as they are: share of the matrix weights}, in the model's order."""
    losses: tuple[float, ...]
    moved: float
    """Share of the converted matrices that two steps changed."""
    reloaded: bool
    """Whether the saved model, loaded by `from_pretrained`, gives the same logits."""
    repeated: bool
    """Whether a second evaluation gives the same logits."""

    @property
    def works(self) -> bool:
        """Whether all of it holds."""
        return all(map(math.isfinite, self.losses)) and self.moved == 1 and self.reloaded and self.repeated


def row(name: str, chosen: str | Recipe = "mxfp4+h16", steps: int = 2) -> Row:
    """Convert, train, save, reload and evaluate the tiny model of a family."""
    family = FAMILIES[name]
    model = convert(family.build(), chosen)
    done = report(model)
    batch = family.batch(torch.Generator().manual_seed(1))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with torch.random.fork_rng():
        torch.manual_seed(2)  # of dropout
        losses = _train(model, batch, steps)
    quantized = {p for p in (_parameter_of(line.name, before) for line in done.converted) if p}
    moved = sum(not torch.equal(before[p], model.state_dict()[p]) for p in quantized) / len(quantized)
    logits = _logits(model, batch)
    repeated = torch.equal(logits, _logits(model, batch))
    with tempfile.TemporaryDirectory() as folder, _registered():
        model.save_pretrained(folder)
        again = type(model).from_pretrained(folder)
    same = report(again).weight_share == done.weight_share and torch.equal(logits, _logits(again, batch))
    parts = report(convert(family.build(), "ti2d")).converted
    held = {line.name.rpartition(".")[2] for line in parts if line.part not in ("all layers", "bf16 tail")}
    head = next((line.name for line in done.left_out if (line.reason or "").startswith("output head")), "")
    return Row(
        name, family.model, done.recipes[0], done.quantized_weights, done.quantized_flops, ", ".join(sorted(held)), head,
        _left_out(done), tuple(losses), moved, same, repeated,
    )  # fmt: skip


def _left_out(done: Report) -> dict[str, float]:
    total = sum(line.weights for line in (*done.converted, *done.left_out))
    shares: dict[str, float] = {}
    for line in done.left_out:
        if line.weights:
            what = f"{re.sub(r'(?<=[.])[0-9]+(?=[.])', '*', line.name)}: {line.reason}"
            shares[what] = shares.get(what, 0.0) + line.weights / total
    return shares


def rows(chosen: str | Recipe = "mxfp4+h16") -> Iterator[Row]:
    """The table of all families."""
    return (row(name, chosen) for name in FAMILIES)


@contextmanager
def _registered() -> Iterator[None]:
    """Inside, `from_pretrained` restores recipes; outside as before."""
    before = saved.METHOD in AUTO_QUANTIZER_MAPPING
    hf_quantizer.register()
    try:
        yield
    finally:
        if not before:
            hf_quantizer.unregister()


def _train(model, batch: dict[str, Tensor], steps: int) -> list[float]:
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _parameter_of(name: str, state: dict[str, Tensor]) -> str | None:
    return next((n for n in (f"{name}.weight", name) if n in state), None)


@torch.no_grad()
def _logits(model, batch: dict[str, Tensor]) -> Tensor:
    return model.eval()(**batch).logits
