"""The probe: no trace in the run, tidy rows, pairs of steps, and patterns that behave as their recipe says."""

from dataclasses import replace

import pandas as pd
import pytest
import torch
from torch import nn

import mxfp4
from mxfp4.diagnostics.error_split import METRICS
from mxfp4.diagnostics.extra_backward import gradients, product_of_halves, untouched
from mxfp4.diagnostics.probe import COLUMNS, WOULD, Probe, own_recipe, recipes_for
from mxfp4.layers.convert import convert
from mxfp4.training.loop import train
from mxfp4.training.model import build_model
from tests.fakes import TINY, FakeCorpus, tiny_config


def probed(name: str, steps=(5, 6), **changes) -> pd.DataFrame:
    model = convert(build_model(replace(TINY, **changes), 0), name)
    probe, rows = Probe(blocks=1), []
    for step in steps:
        rows += probe(model, step, FakeCorpus().batch(step, 2, 16, 0))
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1.0001)
    return pd.DataFrame(rows)


def one(frame, **where):
    for column, value in where.items():
        frame = frame[frame[column] == value]
    assert len(frame)
    return frame.value


@pytest.mark.parametrize(
    ("name", "experts"), [("bf16", 0), ("mxfp4+sr", 0), ("mxfp4+rht16", 0), ("mxfp4+h16", 4), ("ti2d", 0)]
)
def test_a_run_that_was_probed_has_the_bytes_of_one_that_was_not(name, experts):
    model = replace(TINY, n_experts=experts)
    config = tiny_config(recipe=name, model=model, steps=4, probe_steps=(2, 3))
    plain = train(config, corpus=FakeCorpus(), device="cpu", progress=False)
    seen = train(config, corpus=FakeCorpus(), device="cpu", progress=False, probe=Probe())
    assert not plain.probes and seen.probes
    pairs = zip(plain.model.state_dict().items(), seen.model.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for (_, a), b in pairs)
    assert [r["train_loss"] for r in plain.curve[1:]] == [r["train_loss"] for r in seen.curve[1:]]


def test_rows_are_tidy_and_unique():
    frame = probed("mxfp4")
    assert tuple(frame.columns) == COLUMNS
    assert not frame.duplicated(list(COLUMNS[:-1])).any()
    assert set(frame.gemm) == {"", "fprop", "dgrad", "wgrad"}
    assert set(frame.tensor) == {"x", "w", "g", "y", "dx", "dw"}
    assert frame.value.notna().all()


def test_a_deterministic_recipe_has_no_error_but_its_systematic_one():
    frame = probed("mxfp4")
    for gemm, tensor in (("fprop", "y"), ("dgrad", "dx"), ("wgrad", "dw"), ("", "dw")):
        error, systematic = (one(frame, gemm=gemm, tensor=tensor, metric=m) for m in ("error", "systematic"))
        assert systematic.tolist() == pytest.approx(error.tolist()), gemm


def test_the_second_step_of_a_pair_gives_patterns_and_a_lone_step_does_not():
    frame = probed("mxfp4")
    second = frame[frame.step == 6]
    assert set(second.metric) == {"pattern_next", "pattern_next_held"}
    assert not set(frame[frame.step == 5].metric) & {"pattern_next", "pattern_next_held"}
    apart = probed("mxfp4", steps=(5, 7))
    assert "pattern_next" not in set(apart.metric)
    assert "error" in set(apart[apart.step == 7].metric)


def test_a_fixed_rotation_keeps_the_error_pattern_and_random_numbers_do_not():
    for name, low, high in (("mxfp4+h16", 0.9, 1.0001), ("mxfp4+rht16", -0.2, 0.3), ("mxfp4+sr", -0.2, 0.3)):
        frame = probed(name)
        for gemm in ("fprop", "dgrad"):
            kept = one(frame, gemm=gemm, tensor="w", metric="pattern_next")
            assert kept.between(low, high).all(), (name, gemm)
        redrawn = one(frame, gemm="wgrad", tensor="dw", metric="pattern_redraw")
        assert redrawn.between(low, high).all(), name


def test_an_arm_without_fp4_shows_what_mxfp4_would_do():
    bf16 = probed("bf16")
    assert recipes_for(convert(build_model(TINY, 0), "bf16")) == WOULD
    assert set(WOULD) <= set(bf16.recipe)
    clipped = {rule: one(bf16, recipe=f"mxfp4+{rule}", metric="clipped").mean() for rule in ("floor", "even", "rceil")}
    assert clipped["floor"] > clipped["even"] > clipped["rceil"] == 0
    assert set(probed("fp8").recipe) == {"", "fp8", "mxfp4"}
    # the same tensors, the same recipe: two arms that have not trained yet agree on what MXFP4 would do to X
    own = one(probed("mxfp4"), gemm="fprop", tensor="w", metric="error").tolist()
    assert one(bf16, recipe="mxfp4", gemm="fprop", tensor="w", metric="error").tolist() == pytest.approx(own, rel=1e-5)


def test_square_blocks_are_tried_on_the_gradient_of_an_arm_without_fp4():
    rows = probed("bf16")
    rows = rows[(rows["tensor"] == "g") & (rows["gemm"] == "wgrad")]
    flushed = rows[rows["metric"] == "flushed"].groupby("recipe")["value"].mean()
    assert flushed["mxfp4+2d"] > flushed["mxfp4"] > 0
    assert {"mxfp4+2d", "mxfp4+2d+hh16"} <= set(rows[rows["metric"] == "bias"]["recipe"])


def test_gradient_error_grows_with_the_quantized_scope():
    names = ("fp8", "mxfp4-fprop", "mxfp4")
    error, cosine = (
        [one(probed(n), recipe=n, layer="all", gemm="", metric=metric).item() for n in names]
        for metric in ("error", "cosine")
    )
    assert 0 < error[0] < error[1] < error[2]
    assert cosine[0] > cosine[1] > cosine[2]


def test_layers_of_every_block_asked_for_and_of_other_names():
    frame = probed("mxfp4", n_layers=5)
    assert {layer.split(".")[1] for layer in frame.layer if layer.startswith("layers.")} == {"0"}
    model = convert(build_model(replace(TINY, n_layers=5), 0), "mxfp4")
    rows = pd.DataFrame(Probe(blocks=3, kinds=("wo",))(model, 1, FakeCorpus().batch(0, 2, 16, 0)))
    assert set(rows.layer) == {"all", *(f"layers.{i}.attention.wo" for i in (0, 2, 4))}
    assert own_recipe(model) == "mxfp4"


LIGHT = {*METRICS, "gradient_to_noise", "gradient_to_noise_mean"}


def light(name: str, step=5, sequences=2, **changes) -> pd.DataFrame:
    model = convert(build_model(replace(TINY, **changes), 0), name)
    return pd.DataFrame(Probe(blocks=1).light(model, step, FakeCorpus().batch(step, sequences, 16, 0)))


@pytest.mark.parametrize("name", ["bf16", "mxfp4+sr", "fp8", "nvfp4", "quartet"])
def test_a_light_step_gives_its_rows_alone_and_the_same_as_a_whole_one(name):
    keys = list(COLUMNS[:-1])
    few, all_rows = light(name), probed(name, steps=(5,))
    assert set(few.metric) == LIGHT - (set(METRICS) if name == "quartet" else set())
    assert set(few.recipe) == set(recipes_for(convert(build_model(TINY, 0), name)))
    assert not few.duplicated(keys).any()
    both = few.merge(all_rows, on=keys, suffixes=("", "_whole"))
    assert len(both) == len(few)
    assert both.value.tolist() == pytest.approx(both.value_whole.tolist(), rel=1e-5, abs=1e-7)


def test_a_light_step_between_the_two_of_a_pair_leaves_no_trace_and_keeps_the_pair():
    model = convert(build_model(TINY, 0), "mxfp4+sr")
    before = {name: t.clone() for name, t in (model.state_dict() | dict(model.named_buffers())).items()}
    probe, batch = Probe(blocks=1), FakeCorpus().batch(5, 2, 16, 0)
    plain = Probe(blocks=1)
    first = pd.DataFrame(probe(model, 5, batch))
    probe.light(model, 6, batch)
    assert all(torch.equal(t, before[name]) for name, t in (model.state_dict() | dict(model.named_buffers())).items())
    assert all(p.grad is None for p in model.parameters())
    plain(model, 5, batch)
    assert probe(model, 6, batch) == plain(model, 6, batch)
    assert set(first.metric) >= LIGHT


def test_gradient_to_noise_is_the_inverse_of_the_error_and_falls_with_the_quantized_scope():
    frames = [probed(name, steps=(5,)) for name in ("fp8", "mxfp4-fprop", "mxfp4")]
    for frame, name in zip(frames, ("fp8", "mxfp4-fprop", "mxfp4"), strict=True):
        rows = frame[(frame.recipe == name) & (frame.gemm == "") & (frame.tensor == "dw")]
        table = rows.pivot(index="layer", columns="metric", values="value")
        assert "all" in table.index and len(table) > 2
        assert (table.gradient_to_noise * table.error).tolist() == pytest.approx([1.0] * len(table), rel=1e-5)
    whole = [one(f, recipe=n, layer="all", metric="gradient_to_noise").item()
             for f, n in zip(frames, ("fp8", "mxfp4-fprop", "mxfp4"), strict=True)]  # fmt: skip
    assert whole[0] > whole[1] > whole[2] > 0


class Exact(nn.Module):
    """One linear layer whose X and W are powers of two, which MXFP4 holds: the error of dW is that of G alone."""

    def __init__(self, vocab: int = 64, dim: int = 32):
        super().__init__()
        torch.manual_seed(0)
        sign = torch.randn(vocab, dim).sign()
        self.table = nn.Buffer(sign * 2.0 ** torch.randint(0, 2, (vocab, dim)))
        self.wq = nn.Linear(dim, vocab, bias=False)
        self.wq.weight.data = torch.randn(vocab, dim).sign() * 2.0 ** torch.randint(-5, -3, (vocab, dim)).float()

    def forward(self, tokens):
        return self.wq(self.table[tokens])


def test_the_noise_of_a_layer_whose_error_is_known():
    model = convert(Exact(), "mxfp4")
    batch = FakeCorpus().batch(0, 4, 16, 0)  # 64 tokens: whole blocks
    found = pd.DataFrame(Probe().light(model, 1, batch)).query("layer == 'wq' and tensor == 'dw'")
    x = model.table[batch[:, :-1]].flatten(0, 1)
    probabilities = (x @ model.wq.weight.T).softmax(-1)
    g = ((probabilities - nn.functional.one_hot(batch[:, 1:].flatten(), 64)) / len(x)).detach()
    exact = g.bfloat16().float()
    noise = ((mxfp4.fake_quantize(g, axis=0, scale_rule="even") - exact).T @ x).norm()
    assert one(found, metric="gradient_to_noise").item() == pytest.approx(
        ((exact.T @ x).norm() / noise).item(), rel=1e-4
    )
    halves = [exact[part].T @ x[part] * 2 for part in (slice(32), slice(32, 64))]  # each loss is a mean over its half
    mean = (halves[0] * halves[1]).sum()
    wanted = mean.sign() * mean.abs().sqrt() / noise
    assert one(found, metric="gradient_to_noise_mean").item() == pytest.approx(wanted.item(), rel=1e-3)


def test_the_product_of_two_halves_estimates_the_squared_mean_gradient_without_its_sampling_noise():
    model = convert(Exact(), "bf16")
    batches = [FakeCorpus().batch(step, 4, 16, 0) for step in range(300)]
    with untouched(model):
        of = [gradients(model, batch, 1, "bf16")["wq.weight"] for batch in batches]
        products = torch.stack(
            [product_of_halves(model, b, 1, {"wq.weight": g})["wq.weight"] for b, g in zip(batches, of, strict=True)]
        )
    mean_square = torch.stack(of).mean(0).square().sum().item()  # 1200 sequences: little sampling noise is left
    noisy = torch.stack([g.square().sum() for g in of]).mean().item()
    assert products.mean().item() == pytest.approx(mean_square, abs=0.02 * noisy + 4 * products.std().item() / 300**0.5)
    assert noisy > mean_square + 8 * products.std().item() / 300**0.5


@pytest.mark.parametrize("sequences", [2, 4, 5])
def test_the_second_half_is_what_the_first_leaves(sequences):
    model, batch = convert(build_model(TINY, 0), "bf16"), FakeCorpus().batch(0, sequences, 16, 0)
    half = sequences // 2
    with untouched(model):
        whole, first, second = (gradients(model, part, 1, "bf16") for part in (batch, batch[:half], batch[half:]))
        found = product_of_halves(model, batch, 1, whole)
    assert set(found) == set(whole)
    for name, value in found.items():
        size = (first[name].norm() * second[name].norm()).item()
        assert value.item() == pytest.approx((first[name] * second[name]).sum().item(), abs=2e-3 * size), name


def test_the_mean_needs_two_sequences():
    assert set(light("mxfp4", sequences=1).metric) == LIGHT - {"gradient_to_noise_mean"}


def test_experts_without_tokens_in_a_half_count_as_zero_there():
    frame = light("mxfp4", n_experts=8, n_experts_per_token=1)
    assert one(frame, layer="all", metric="gradient_to_noise_mean").notna().all()


def test_square_blocks_and_rules_are_split_on_the_tensors_of_an_arm_without_fp4():
    rows = probed("bf16", steps=(5,))
    rows = rows[rows.metric == "split_dead"]
    for name in ("mxfp4+rceil", "mxfp4+2d", "mxfp4+h32", *WOULD):
        assert set(rows[rows.recipe == name].tensor) == {"x", "w", "g"}, name


def test_sizes_are_checked():
    with pytest.raises(ValueError, match="draws=1"):
        Probe(draws=1)
