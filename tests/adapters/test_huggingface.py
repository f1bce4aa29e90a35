"""The Hugging Face adapter: exported models compute what ours do; converted ones train, save, reload and resume."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import mxfp4
from mxfp4 import MXFP4Linear
from mxfp4.adapters.huggingface import DTYPES, export, hf_config, hf_name, set_step_callback
from mxfp4.data import tokenizer as tokenizers_
from mxfp4.errors import UserError
from mxfp4.studies.scales import MI355X
from mxfp4.training.model import Llama, build_model, rope_tables, scaled_rates
from tests.fakes import TINY

transformers = pytest.importorskip("transformers", reason="transformers is not installed (pip install -e '.[hf]')")

GQA = replace(TINY, n_layers=2, n_heads=4, n_kv_heads=2, rope_theta=500000.0, norm_eps=1e-6)
MODELS = {
    "grouped heads": GQA,
    "tied": replace(GQA, tie_embeddings=True),
    "scaled RoPE": replace(GQA, rope_scaling_factor=8.0),
    "experts": replace(TINY, n_layers=2, n_experts=4, n_experts_per_token=2),
}


def a_model(config) -> Llama:
    """Random weights, norms included, large enough that every part shows in the logits."""
    model = build_model(config, seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn(p.shape, generator=generator))
    return model.eval()


@pytest.fixture(scope="module")
def bpe():
    return tokenizers_.train(["one two three four, five and six: seven"] * 3, 300)


@pytest.mark.parametrize("name", MODELS)
def test_an_exported_model_gives_the_same_logits(name, tmp_path):
    model = a_model(MODELS[name])
    export(model.state_dict(), model.config, tmp_path / "out")
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    kind = "MixtralForCausalLM" if model.config.n_experts else "LlamaForCausalLM"
    assert type(theirs).__name__ == kind and theirs.dtype == torch.float32
    assert theirs.num_parameters() == model.config.n_params()
    tokens = torch.randint(0, 64, (2, 32), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        ours, exported = model(tokens), theirs.eval()(tokens).logits
    assert ours.std() > 0.5
    torch.testing.assert_close(exported, ours, atol=2e-5, rtol=2e-5)


def test_rope_is_scaled_as_in_llama_3_1():
    """At the size of the 8B model, against transformers' own formula; some pairs are slowed, some mixed, some left."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = replace(MI355X.model, rope_scaling_factor=8.0)
    theirs, attention = ROPE_INIT_FUNCTIONS["llama3"](LlamaConfig(**hf_config(config)), "cpu")
    plain = 500000.0 ** (-torch.arange(0, 128, 2, dtype=torch.float64) / 128)
    ours = scaled_rates(plain, 8.0)
    torch.testing.assert_close(ours, theirs.double(), rtol=1e-6, atol=0)
    ratio = plain / ours
    assert attention == 1.0 and (ratio == 1).sum() > 20 and (ratio == 8).sum() > 20
    assert ((ratio > 1.01) & (ratio < 7.99)).any()
    table = rope_tables(8192, 128, 500000.0, scaling_factor=8.0)[0, 8191, :64].double()
    torch.testing.assert_close(table, (8191 * ours).cos(), rtol=0, atol=1e-6)


def test_export_halves_the_bytes_in_bf16(tmp_path):
    model = a_model(GQA)
    sizes = {}
    for dtype in DTYPES:
        folder = export(model.state_dict(), GQA, tmp_path / dtype, dtype=dtype)
        sizes[dtype] = (folder / "model.safetensors").stat().st_size
        assert transformers.AutoModelForCausalLM.from_pretrained(folder).dtype == DTYPES[dtype]
    assert sizes["float32"] / sizes["bfloat16"] == pytest.approx(2, rel=0.02)


def test_the_exported_tokenizer_gives_the_ids_that_training_saw(bpe, tmp_path):
    config = replace(GQA, vocab_size=300)
    export(a_model(config).state_dict(), config, tmp_path / "out", tokenizer=bpe)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in ("one two", "é 漢字 \n\t", "it says <|endoftext|> here", ""):
        assert theirs(text)["input_ids"] == bpe.encode(text)
        assert theirs.decode(bpe.encode(text)) == text
    assert (theirs.eos_token_id, theirs.bos_token_id, len(theirs)) == (bpe.eos, None, bpe.size)
    assert theirs.model_max_length == config.max_seq_len


def test_a_tokenizer_that_adds_a_token_before_each_text_does_not_when_exported(tmp_path):
    """As Llama 3.1's does: training reads documents without it."""
    from tokenizers import processors

    plain = tokenizers_.train(["one two three"], 300)
    ids = plain.encode("one two")
    plain.inner.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", plain.eos)]
    )
    config = replace(GQA, vocab_size=300)
    export(a_model(config).state_dict(), config, tmp_path / "out", tokenizer=plain)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out")("one two")["input_ids"] == ids


def test_what_cannot_be_exported_is_one_line_and_leaves_nothing(bpe, tmp_path):
    state = a_model(GQA).state_dict()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    for how, said in (
        ({"folder": tmp_path / "full"}, "is there already and not empty"),
        ({"dtype": "int8"}, "dtype 'int8' is not known; allowed: float32, bfloat16"),
        ({"tokenizer": bpe}, "the tokenizer has .* ids, the model 64"),
    ):
        with pytest.raises(UserError, match=said):
            export(state, GQA, **{"folder": tmp_path / "new", **how})
    assert [p.name for p in tmp_path.rglob("*")] == ["full", "mine.txt"]


def test_every_parameter_has_a_name_of_its_own():
    for config in MODELS.values():
        with torch.device("meta"):
            names = [name for name, _ in Llama(config).named_parameters()]
        assert len({hf_name(n) for n in names}) == len(names)
    assert hf_config(MODELS["experts"])["num_local_experts"] == 4


# Training a converted model.

LLAMA = {**hf_config(TINY), "use_cache": False}
TOKENS = torch.randint(0, 64, (8, 16), generator=torch.Generator().manual_seed(0))


def a_llama(recipe: str | None = None):
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))
    return model if recipe is None else mxfp4.convert(model, recipe)


class Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return len(TOKENS)

    def __getitem__(self, i):
        return {"input_ids": TOKENS[i], "labels": TOKENS[i]}


def trained(model, folder: Path, steps: int, *, resume: bool = False):
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=4, learning_rate=1e-2, report_to=[],
        save_steps=2, logging_steps=1, use_cpu=True, disable_tqdm=True, lr_scheduler_type="constant",
    )  # fmt: skip
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=Tokens(), callbacks=[set_step_callback()])
    trainer.train(resume_from_checkpoint=resume)
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def test_a_converted_model_trains_saves_and_reloads(tmp_path):
    plain, model = a_llama(), a_llama("mxfp4+h16")
    layers = [m for m in model.modules() if isinstance(m, MXFP4Linear)]
    assert len(layers) == 7 and not isinstance(model.lm_head, MXFP4Linear)
    assert model.state_dict().keys() == plain.state_dict().keys()
    losses = trained(model, tmp_path / "run", 8)
    assert losses[-1] < losses[0] - 0.5
    model.save_pretrained(tmp_path / "saved")
    again = mxfp4.convert(transformers.LlamaForCausalLM.from_pretrained(tmp_path / "saved"), "mxfp4+h16")
    with torch.no_grad():
        assert torch.equal(again.eval()(TOKENS).logits, model.eval()(TOKENS).logits)
        assert not torch.equal(
            model(TOKENS).logits, transformers.LlamaForCausalLM.from_pretrained(tmp_path / "saved")(TOKENS).logits
        )


def test_what_would_train_unconverted_is_refused(tmp_path):
    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=64, n_embd=64, n_layer=2, n_head=2))
    with pytest.raises(
        ValueError,
        match=r"no layer to convert to 'mxfp4': .*1 nn.Linear \('lm_head'\); convert does not know its 8 Conv1D$",
    ):
        mxfp4.convert(gpt2, "mxfp4")
    with pytest.raises(
        ValueError, match="^LlamaForCausalLM has no MXFP4Linear: mxfp4.convert it before it is trained$"
    ):
        trained(a_llama(), tmp_path, 1)


def test_gradient_checkpointing_changes_nothing(tmp_path):
    found = {}
    for on in (False, True):
        model = a_llama("mxfp4+rht16")
        if on:
            model.gradient_checkpointing_enable()
        found[on] = trained(model, tmp_path / str(on), 3), model.state_dict()
    assert found[False][0] == found[True][0]
    assert all(torch.equal(found[False][1][name], value) for name, value in found[True][1].items())


@pytest.mark.parametrize("name", ["mxfp4+sr", "fp8+delayed"])
def test_a_resumed_run_is_the_uninterrupted_one(name, tmp_path):
    straight = a_llama(name)
    trained(straight, tmp_path / "straight", 4)
    trained(a_llama(name), tmp_path / "stopped", 2)
    resumed = a_llama(name)
    trained(resumed, tmp_path / "stopped", 4, resume=True)
    assert all(torch.equal(straight.state_dict()[name], value) for name, value in resumed.state_dict().items())


def test_a_local_lm_eval_task_runs_on_an_exported_model(bpe, tmp_path):
    """Downstream accuracy: the exported model's, in lm_eval, equals what our model's own likelihoods give."""
    lm_eval = pytest.importorskip("lm_eval", reason="lm_eval is not installed (pip install -e '.[eval]')")
    config = replace(GQA, vocab_size=300, max_seq_len=64)
    model = a_model(config)
    export(model.state_dict(), config, tmp_path / "model", tokenizer=bpe)
    questions = [
        {"text": f"one {a} two", "choices": [" three", " four", " seven"], "label": i % 3}
        for i, a in enumerate(("and", "five", "six", ":", "seven", "two"))
    ]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, questions)))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "tiny.yaml").write_text(
        "task: tiny_counting\ndataset_path: json\n"
        f"dataset_kwargs:\n  data_files:\n    test: {tmp_path / 'data.jsonl'}\n"
        "output_type: multiple_choice\ntest_split: test\n"
        "doc_to_text: '{{text}}'\ndoc_to_choice: choices\ndoc_to_target: label\ntarget_delimiter: ''\n"
        "metric_list:\n  - metric: acc\n"
    )
    answers = lm_eval.simple_evaluate(
        model="hf", model_args=f"pretrained={tmp_path / 'model'},dtype=float32", tasks=["tiny_counting"],
        task_manager=lm_eval.tasks.TaskManager(include_path=str(tmp_path / "tasks"), include_defaults=False),
        device="cpu", batch_size=2, bootstrap_iters=0,
    )  # fmt: skip
    right = 0
    for q in questions:
        scores = [_log_likelihood(model, bpe.encode(q["text"]), bpe.encode(c)) for c in q["choices"]]
        right += scores.index(max(scores)) == q["label"]
    assert answers["results"]["tiny_counting"]["acc,none"] == pytest.approx(right / len(questions))
    assert 0 < right < len(questions)  # else the comparison says little


@torch.no_grad()
def _log_likelihood(model: Llama, context: list[int], continuation: list[int]) -> float:
    ids = torch.tensor([context + continuation])
    logs = model(ids[:, :-1]).log_softmax(-1)[0, len(context) - 1 :]
    return logs.gather(1, ids[0, len(context) :, None]).sum().item()
