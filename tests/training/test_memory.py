"""The memory estimate against the real step on fake tensors, and against what a compiled block saves."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from mxfp4.errors import UserError
from mxfp4.layers.convert import convert
from mxfp4.training import evaluation
from mxfp4.training.config import ModelConfig, TrainConfig
from mxfp4.training.execution.attention import set_attention
from mxfp4.training.execution.recompute import recompute_every
from mxfp4.training.memory import WORKSPACE, estimate
from mxfp4.training.model import Llama
from tests.fakes.step import as_a_gpu, peak_of_step


def config(
    recipe="mxfp4+h16", *, vocab=128256, dim=4096, layers=4, ffn=14336, seq=4096, batch=1, parts=1
) -> TrainConfig:  # fmt: skip
    model = ModelConfig(
        vocab_size=vocab, dim=dim, n_layers=layers, n_heads=dim // 128, n_kv_heads=max(dim // 512, 1), ffn_dim=ffn,
        max_seq_len=seq,
    )  # fmt: skip
    return TrainConfig(
        recipe=recipe, seed=0, model=model, corpus="fake", seq_len=seq, batch_size=batch, steps=1, lr=1.0, lr_min=0.0,
        warmup=0, eval_every=1, eval_sequences=8, scale="gpu", micro_batches=parts,
    )  # fmt: skip


def recompute_all(model):
    recompute_every(model, 1)


# Full width of Llama 3.1-8B, few layers; a wide vocabulary makes the loss the peak, a small one the blocks.
CASES = [
    (config(), 0, 0.01),
    (config(), 1, 0.01),
    (config("bf16", seq=2048, batch=2, parts=2), 0, 0.03),
    (config("mxfp4+sr-grad", seq=1024, layers=2), 1, 0.03),
    (config("fp8", vocab=1024, layers=2, seq=2048, batch=2, parts=2), 0, 0.06),
    (config("mxfp4+h16+tail15", vocab=1024, seq=2048, batch=2, parts=2), 1, 0.03),
    (config("ti2d", vocab=32000, dim=1024, layers=6, ffn=2816, seq=2048, batch=4), 0, 0.01),
]


@pytest.mark.parametrize(("c", "every", "tolerance"), CASES)
def test_peak_is_that_of_the_real_step(c, every, tolerance, monkeypatch):
    measured = peak_of_step(c, monkeypatch, prepare=recompute_all if every else lambda model: None)
    assert estimate(c, recompute_every=every).peak - WORKSPACE == pytest.approx(measured, rel=tolerance)


def test_peak_in_chunks_and_without_copies_is_that_of_the_real_step(monkeypatch):
    """A vocabulary and a token count that make the loss the peak, in chunks of 2048 of 4096 tokens."""
    c, how = config(layers=2), {"attention": "auto", "cross_entropy": "chunked"}
    monkeypatch.setattr(evaluation, "token_loss", evaluation.chunked_token_loss)
    measured = peak_of_step(c, monkeypatch, prepare=lambda model: set_attention(model, "auto"))
    found = estimate(c, **how)
    assert found.worst.name == "at the loss, in chunks"
    assert found.peak - WORKSPACE == pytest.approx(measured, rel=0.01)
    assert found.peak < estimate(c).peak


def test_choices_of_a_sharded_step_are_terms():
    c = config(layers=4, seq=1024, batch=8, parts=8)
    plain, kept = (estimate(c, ranks=4, compiled=True, native=True, **how) for how in (
        {}, {"reshard_after_forward": False, "weights_once": True}
    ))  # fmt: skip
    with torch.device("meta"):
        model = Llama(c.model)
    weights = sum(p.numel() for p in model.layers.parameters())
    linear = sum(p.numel() for p in model.layers.parameters() if p.ndim > 1)
    more = kept.moments[1].bytes - plain.moments[1].bytes  # at the loss; the block's own W for Dgrad is in both
    assert more == 4 * weights + linear * 17 / 32
    fine, coarse = (estimate(replace(c, reduce_dtype=dtype), ranks=4).moments[1] for dtype in ("float32", "bfloat16"))
    assert fine.bytes - coarse.bytes == 2 * c.model.n_params()


@pytest.fixture
def eight_ranks():
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    yield 8
    dist.destroy_process_group()


@pytest.mark.parametrize("parts", [1, 2])
def test_peak_of_a_sharded_step(eight_ranks, parts, monkeypatch):
    c = config(seq=8192, batch=8 * parts, parts=8 * parts)
    measured = peak_of_step(c, monkeypatch, ranks=8)
    found = estimate(c, ranks=8)
    assert found.worst.name == "backward, at the loss"
    assert found.peak - WORKSPACE == pytest.approx(measured, rel=0.01)


def test_blocks_of_a_sharded_step_are_bounded(eight_ranks, monkeypatch):
    """Without transfers that overlap, as here, one block is gathered at a time; the estimate allows for two."""
    c = config(vocab=1024, seq=4096, batch=16, parts=16)
    measured = peak_of_step(c, monkeypatch, ranks=8)
    assert 1.0 <= (estimate(c, ranks=8).peak - WORKSPACE) / measured < 1.3


@pytest.mark.parametrize("recipe", ["mxfp4+h16", "mxfp4+sr"])
def test_what_a_compiled_block_saves(recipe, monkeypatch):
    """Read off autograd's saved tensors, with the compiler's own partition of forward and backward."""
    c = config(recipe, vocab=64, dim=256, layers=1, ffn=896, seq=1024)
    torch._dynamo.reset()
    with as_a_gpu(monkeypatch):
        model = convert(Llama(c.model).init_weights(0), recipe)
        here = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
        saved = {}

        def pack(t):
            if t.untyped_storage().data_ptr() not in here:
                saved[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        x = torch.randn(1, 1024, 256, dtype=torch.bfloat16, requires_grad=True)
        block = torch.compile(model.layers[0], backend="aot_eager_decomp_partition")
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), torch.autocast("cpu", dtype=torch.bfloat16):
            y = block(x, model.rope)
    assert y.requires_grad
    assert sum(t.bytes for t in estimate(c, compiled=True).block) == pytest.approx(sum(saved.values()), rel=0.02)


def test_terms_are_what_their_formulas_say():
    c = config(layers=2, seq=512, batch=4, parts=4)
    whole, half = estimate(c), estimate(c, ranks=2)
    p = c.model.n_params()
    first = {t.name: t.bytes for t in whole.always.terms}
    assert first["parameters, FP32"] == 4 * p and first["Adam, two moments"] == 8 * p
    assert {t.name: t.bytes for t in half.always.terms}["parameters, FP32"] == 2 * p
    tv = 512 * c.model.vocab_size
    assert {t.formula: t.bytes for t in whole.moments[2].terms}["12 T V"] == 12 * tv
    assert all(t.formula for m in (whole.always, *whole.moments) for t in m.terms)
    assert whole.peak == max(whole.always.bytes + m.bytes for m in whole.moments)


def test_native_operands_wait_packed():
    c = config(layers=1, seq=128)
    with torch.device("meta"):
        linear = sum(p.numel() for p in Llama(c.model).layers.parameters() if p.ndim > 1)
    kept = {n: {t.name: t.bytes for t in estimate(c, native=n).block} for n in (False, True)}
    name = "W of the linear layers, for Dgrad"
    assert kept[False][name] == 2 * linear and kept[True][name] == linear * 17 / 32
    for recipe, size in (("mxfp4-fprop", 1), ("bf16", 2), ("nvfp4-plain", 2)):  # Dgrad in FP8; no packed form
        for native in (False, True):
            block = estimate(config(recipe, layers=1, seq=128), native=native, fp8=True).block
            assert {t.name: t.bytes for t in block}[name] == size * linear


@pytest.mark.parametrize("fp8, size", [(False, 2), (True, 1 + 1)])  # one tensor of BF16; two of codes
def test_weights_kept_for_the_next_part_are_codes_in_both_orientations(fp8, size):
    c = config("fp8", layers=1, seq=128, batch=4, parts=4)
    with torch.device("meta"):
        linear = sum(p.numel() for p in Llama(c.model).layers.parameters() if p.ndim > 1)
    moments = estimate(c, fp8=fp8).moments
    held = [sum(t.bytes for t in m.terms if t.name.startswith("quantized W")) for m in moments]
    forward, end = held[0], held[-3]
    assert end == size * linear
    assert forward == fp8 * linear  # beside what the block keeps for Dgrad


def test_a_captured_step_reserves_its_pool_beside_the_first():
    c = config(layers=1, seq=128)
    plain, captured = estimate(c), estimate(c, captured=True)
    assert plain.peak == captured.peak and captured.reserve == plain.reserve + plain.worst.bytes


@pytest.mark.parametrize("ranks", [0, 3, 8])
def test_ranks_that_cannot_share_the_batch(ranks):
    with pytest.raises(UserError, match="micro_batches=4 .* allowed are 1, 2, 4"):
        estimate(config(batch=4, parts=4, layers=1, seq=128), ranks=ranks)
