"""Hugging Face: our recipes under its Trainer, and our models in its format.

Training: `mxfp4.convert` takes a transformers model as it is, mixtures of experts too. Names and shapes of its
state_dict do not change, and gradient checkpointing works, reentrant or not.

    model = mxfp4.convert(LlamaForCausalLM.from_pretrained(...), "mxfp4+h16")
    Trainer(model=model, callbacks=[set_step_callback()], ...).train()
    model.save_pretrained(FOLDER)

The recipe is saved in `config.json`. `register()` lets `from_pretrained` read it and convert what it loads, now and
for models that take `quantization_config=MXFP4TrainingConfig(...)` (hf_quantizer.py). Without it transformers warns of
an unknown quantization type and gives plain linear layers. To serve such a model in high precision, `forget` it.

Export: `export` writes a folder that `from_pretrained`, `lm_eval --model hf --model_args pretrained=FOLDER` and serving
programs read. It needs no transformers. The model is ours in FP32 (or BF16), not quantized: what the recipe trained,
not how it multiplied. To evaluate with the recipe's forward, convert what was loaded and hand it over:
`lm_eval.models.huggingface.HFLM(pretrained=mxfp4.convert(model, recipe), tokenizer=...)`.

Both turn RoPE's halves in the same way, so no rows are permuted. Dense models become Llama, mixtures of experts Mixtral.
A model without any nn.Linear, such as GPT-2, whose projections are Conv1D, is refused.
"""

from __future__ import annotations

import json
import logging
import shutil
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from mxfp4.data.tokenizer import TextTokenizer
from mxfp4.errors import UserError
from mxfp4.layers import saved
from mxfp4.layers.linear import MXFP4Linear, end_step, set_step
from mxfp4.layers.report import report
from mxfp4.training.config import ModelConfig
from mxfp4.training.model import HIGH_FREQUENCY, LOW_FREQUENCY, ORIGINAL_CONTEXT

if TYPE_CHECKING:
    from transformers import TrainerCallback

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

_OUTER = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_INNER = {
    "attention_norm": "input_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "feed_forward.router": "block_sparse_moe.gate",
}


def register() -> None:
    """Let transformers' `from_pretrained` convert models as their saved configuration says. Needs transformers."""
    from mxfp4.adapters import hf_quantizer

    hf_quantizer.register()


def forget(model) -> None:
    """Take the recipe out of a model's configuration, so that a save of it is a plain model's."""
    config = saved.config_of(model)
    if saved.method_of(config) == saved.METHOD:
        del config.quantization_config
        model.hf_quantizer = None


def set_step_callback() -> TrainerCallback:
    """A callback that makes the recipe's random numbers a function of the Trainer's step and rank, so that a resumed run draws
    those of one that was not interrupted, and ends the steps of delayed scaling. Needs transformers. Training then raises ValueError for a model without a
    converted layer."""
    from transformers import TrainerCallback

    class SetStep(TrainerCallback):
        def on_train_begin(self, args, state, control, model=None, **kwargs):
            if not any(isinstance(m, MXFP4Linear) for m in model.modules()):
                raise ValueError(f"{type(model).__name__} has no MXFP4Linear: mxfp4.convert it before it is trained")
            logging.getLogger("mxfp4").info("%s", report(model))

        def on_step_begin(self, args, state, control, model=None, **kwargs):
            rank = None if torch.distributed.is_initialized() else args.process_index
            set_step(model, state.global_step + 1, rank=rank)

        def on_step_end(self, args, state, control, model=None, **kwargs):
            end_step(model)  # before a checkpoint

    return SetStep()


def hf_name(name: str) -> str:
    """Hugging Face's name of a parameter of `Llama`."""
    if name in _OUTER:
        return _OUTER[name]
    _, index, rest = name.split(".", 2)
    part, _, kind = rest.rpartition(".")
    if part.startswith("feed_forward.experts."):
        theirs = part.replace("feed_forward", "block_sparse_moe")
    else:
        theirs = _INNER[part]
    return f"model.layers.{index}.{theirs}.{kind}"


def _rope(config: ModelConfig) -> dict:
    if config.rope_scaling_factor == 1:
        return {"rope_type": "default", "rope_theta": config.rope_theta}
    return {
        "rope_type": "llama3",
        "rope_theta": config.rope_theta,
        "factor": config.rope_scaling_factor,
        "low_freq_factor": LOW_FREQUENCY,
        "high_freq_factor": HIGH_FREQUENCY,
        "original_max_position_embeddings": ORIGINAL_CONTEXT,
    }


def hf_config(config: ModelConfig, dtype: str = "float32", eos: int | None = None) -> dict:
    """The config.json of a model: LlamaForCausalLM's, or MixtralForCausalLM's for a mixture of experts."""
    experts = {
        "num_local_experts": config.n_experts,
        "num_experts_per_tok": config.n_experts_per_token,
        "router_aux_loss_coef": config.aux_loss_weight,
        "sliding_window": None,
    }
    kind = "mixtral" if config.n_experts else "llama"
    return {
        "architectures": [f"{kind.capitalize()}ForCausalLM"],
        "model_type": kind,
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "intermediate_size": config.ffn_dim,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_seq_len,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_parameters": _rope(config),
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": False,
        "bos_token_id": None,
        "eos_token_id": eos,
        "dtype": dtype,
        **(experts if config.n_experts else {}),
    }


def export(
    tensors: dict[str, Tensor],
    config: ModelConfig,
    folder: Path | str,
    *,
    tokenizer: TextTokenizer | None = None,
    dtype: str = "float32",
) -> Path:
    """Write `tensors`, the state_dict of a `Llama` of `config`, as a Hugging Face model. Returns the folder.

    tokenizer: the one of its corpus; without it the model takes token ids only. Raises UserError for a folder that
    has something in it, an unknown dtype, or a vocabulary that the model does not have.
    """
    folder = Path(folder)
    if dtype not in DTYPES:
        raise UserError(f"dtype {dtype!r} is not known; allowed: {', '.join(DTYPES)}")
    if tokenizer is not None and tokenizer.size > config.vocab_size:
        raise UserError(f"the tokenizer has {tokenizer.size} ids, the model {config.vocab_size}: it is of another run")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} is there already and not empty; name another folder")
    work = folder.parent / f".{uuid.uuid4().hex}.tmp"
    theirs = {hf_name(name): t.to("cpu", DTYPES[dtype]).contiguous() for name, t in tensors.items()}
    if config.tie_embeddings:
        theirs.pop("lm_head.weight", None)
    try:
        work.mkdir(parents=True)
        save_file(theirs, work / "model.safetensors", metadata={"format": "pt"})
        about = hf_config(config, dtype, tokenizer.eos if tokenizer else None)
        (work / "config.json").write_text(json.dumps(about, indent=1) + "\n")
        if tokenizer is not None:
            _write_tokenizer(tokenizer, work, config.max_seq_len)
        if folder.is_dir():
            folder.rmdir()
        work.rename(folder)
    except (OSError, SafetensorError) as error:  # the second is what a full disk looks like in its library
        raise UserError(f"cannot write {folder}: {getattr(error, 'strerror', None) or error}") from None
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return folder


def _write_tokenizer(tokenizer: TextTokenizer, folder: Path, length: int) -> None:
    """tokenizer.json and what makes PreTrainedTokenizerFast give the ids that training saw: no BOS, and text that
    spells a special token taken as text."""
    data = json.loads(tokenizer.to_bytes())
    data["post_processor"] = None
    (folder / "tokenizer.json").write_text(json.dumps(data))
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": tokenizer.inner.id_to_token(tokenizer.eos),
        "model_max_length": length,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(about, indent=1) + "\n")
