"""The Llama: sizes, initial weights, causality, its parts against independent formulas, the mixture of
experts."""

import hashlib
import math
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from mxfp4 import MXFP4Linear, convert
from mxfp4.training import model as model_module
from mxfp4.training.model import Llama, apply_rope, build_model, rope_tables
from tests.fakes import TINY

MOE = replace(TINY, n_experts=4)
TOKENS = torch.randint(0, 64, (2, 20), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(
    "config", [TINY, MOE, replace(TINY, tie_embeddings=True), replace(TINY, n_layers=3, n_kv_heads=2)]
)
def test_parameter_count_is_the_real_count(config):
    with torch.device("meta"):
        model = Llama(config)
    assert config.n_params() == sum(p.numel() for p in model.parameters())
    outside = {id(p) for m in (model.tok_embeddings, model.output) for p in m.parameters()}
    inside = sum(p.numel() for p in model.parameters() if id(p) not in outside)
    assert config.n_params_non_embedding() == inside


def test_llama_8b_has_its_published_size():
    from mxfp4.training.config import ModelConfig

    config = ModelConfig(128256, 4096, 32, 32, 8, 14336, 8192, rope_theta=500000.0)
    assert config.n_params() == 8_030_261_248


def test_initial_weights_depend_on_the_seed_alone():
    plain, quantized = build_model(TINY, 7), convert(build_model(TINY, 7), "mxfp4+h16", seed=7)
    for (name, a), (other, b) in zip(plain.state_dict().items(), quantized.state_dict().items(), strict=True):
        assert name == other and torch.equal(a, b)
    assert not torch.equal(plain.output.weight, build_model(TINY, 8).output.weight)


def test_initial_weights_are_those_of_one_generator_each_however_many_are_drawn_at_a_time(monkeypatch):
    config = replace(TINY, n_layers=3)
    for threads in (1, model_module.DRAWING):
        monkeypatch.setattr(model_module, "_threads", lambda threads=threads: threads)
        for name, weight in build_model(config, 7).named_parameters():
            if weight.ndim == 1:
                continue
            seed = int.from_bytes(hashlib.blake2b(f"7:{name}".encode(), digest_size=8).digest(), "little") >> 1
            std = 0.02 / math.sqrt(6) if name.endswith(("wo.weight", "w2.weight")) else 0.02
            drawn = torch.empty(weight.shape).normal_(std=std, generator=torch.Generator().manual_seed(seed))
            assert torch.equal(weight, drawn), (threads, name)


def test_initial_weights_have_the_stated_spread():
    config = replace(TINY, dim=128, n_layers=2, ffn_dim=256)
    layer = build_model(config, 0).layers[1]
    assert layer.attention.wq.weight.std().item() == pytest.approx(0.02, rel=0.03)
    assert layer.feed_forward.w2.weight.std().item() == pytest.approx(0.01, rel=0.03)  # / sqrt(2 * 2 layers)
    assert torch.equal(layer.ffn_norm.weight, torch.ones(128))


@pytest.mark.parametrize("config", [TINY, MOE])
def test_a_token_never_sees_a_later_one(config):
    model = build_model(config, 0)
    changed = TOKENS.clone()
    changed[:, 12] = (changed[:, 12] + 1) % 64
    a, b = model(TOKENS), model(changed)
    assert torch.equal(a[:, :12], b[:, :12])
    assert not torch.equal(a[:, 12:], b[:, 12:])


def test_rope_makes_scores_depend_on_distance_alone():
    rope = rope_tables(32, 16, 10000.0)
    q, k = torch.randn(2, 1, 1, 1, 16, generator=torch.Generator().manual_seed(0)).expand(2, 1, 1, 32, 16)
    scores = apply_rope(q, rope)[0, 0] @ apply_rope(k, rope)[0, 0].t()
    for distance in (0, 1, 7):
        diagonal = scores.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-5)
    assert (scores.diagonal(-1)[0] - scores.diagonal(-7)[0]).abs() > 1e-3


def test_grouped_query_attention_equals_attention_with_copied_heads():
    shared = build_model(TINY, 0).layers[0].attention  # 2 query heads, 1 key and value head
    full = build_model(replace(TINY, n_kv_heads=2), 0).layers[0].attention
    with torch.no_grad():
        full.wq.weight.copy_(shared.wq.weight)
        full.wo.weight.copy_(shared.wo.weight)
        full.wk.weight.copy_(shared.wk.weight.repeat(2, 1))
        full.wv.weight.copy_(shared.wv.weight.repeat(2, 1))
    x, rope = torch.randn(2, 9, 64), rope_tables(9, 32, 10000.0)
    torch.testing.assert_close(shared(x, rope), full(x, rope))


def test_mixture_of_experts_is_the_weighted_sum_of_the_top_experts():
    layer = build_model(MOE, 0).layers[0].feed_forward
    x = torch.randn(3, 5, 64)
    probs = layer.router(x).softmax(-1)
    expected = torch.zeros_like(x)
    for b in range(3):
        for t in range(5):
            best = probs[b, t].argsort(descending=True)[:2]
            for i in best:
                expected[b, t] += probs[b, t, i] / probs[b, t, best].sum() * layer.experts[i](x[b, t])
    torch.testing.assert_close(layer(x), expected)
    share = F.one_hot(probs.topk(2).indices, 4).float().mean((0, 1, 2))
    torch.testing.assert_close(layer.balance, 4 * (share * probs.mean((0, 1))).sum())


def test_experts_are_quantized_and_the_router_is_not():
    model = convert(build_model(MOE, 0), "mxfp4+sr")
    layer = model.layers[0].feed_forward
    assert isinstance(layer.experts[3].w2, MXFP4Linear) and not isinstance(layer.router, MXFP4Linear)
    assert not isinstance(model.output, MXFP4Linear)
    (model(TOKENS).float().square().mean() + model.balance_loss()).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_under_autocast_logits_are_bf16_and_gradients_fp32():
    model = build_model(MOE, 0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(TOKENS)
    logits.float().mean().backward()
    assert logits.dtype == torch.bfloat16 and model.layers[0].attention.wq.weight.grad.dtype == torch.float32


def test_too_long_a_sequence_is_refused():
    with pytest.raises(ValueError, match="sequence of 33 tokens exceeds max_seq_len=32"):
        build_model(TINY, 0)(torch.zeros(1, 33, dtype=torch.long))
