"""The probe: no trace in the run, tidy rows, pairs of steps, and patterns that behave as their recipe says."""

from dataclasses import replace

import pandas as pd
import pytest
import torch
from fakes import TINY, FakeCorpus, tiny_config

from mxfp4.experiments.probes import COLUMNS, WOULD, Probe, own_recipe, recipes_for
from mxfp4.training.linear import convert
from mxfp4.training.loop import train
from mxfp4.training.model import build_model


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


def test_sizes_are_checked():
    with pytest.raises(ValueError, match="draws=1"):
        Probe(draws=1)
