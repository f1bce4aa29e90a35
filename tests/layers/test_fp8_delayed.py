"""Delayed scaling of FP8 against an oracle that keeps the history in Python, and what may not change that history."""

from __future__ import annotations

import copy
import warnings
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from mxfp4 import MXFP4Linear, convert, set_step
from mxfp4.errors import Notice
from mxfp4.layers import plan as plans
from mxfp4.layers.linear import end_step
from mxfp4.numerics.ops.fp8_delayed import BUFFERS
from mxfp4.training import weights
from mxfp4.training.arm_model import in_recipe
from mxfp4.training.branch import kept
from mxfp4.training.evaluation import token_loss
from mxfp4.training.loop import train
from mxfp4.training.model import build_model
from tests.fakes import FakeCorpus, tiny_config

MAX = {"e4m3": 448.0, "e5m2": 57344.0}
DTYPE = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


class Oracle:
    """Transformer Engine's rule for one tensor: the scale from past steps, saturation beyond it."""

    def __init__(self, elem: str, algorithm: str):
        self.elem, self.algorithm, self.past, self.seen = elem, algorithm, [], []

    def __call__(self, t: torch.Tensor) -> torch.Tensor:
        """What the GEMM sees, float64."""
        now = float(t.abs().max())
        self.seen.append(now)
        amax = (self.past[-1] if self.algorithm == "most_recent" else max(self.past[-4:])) if self.past else now
        scale = torch.tensor(MAX[self.elem]) / torch.tensor(amax)
        q = (t * scale).clamp(-MAX[self.elem], MAX[self.elem]).to(DTYPE[self.elem])
        return q.double() / scale.double()

    def step(self) -> None:
        self.past, self.seen = [*self.past, max(self.seen)], []


def layer_of(recipe: str = "fp8+delayed", **options) -> MXFP4Linear:
    torch.manual_seed(0)
    return MXFP4Linear(48, 32, bias=False, recipe=recipe, fqn="a", **options)


def batch(step: int, size: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, grad = torch.randn(40, 48, generator=generator), torch.randn(40, 32, generator=generator)
    return (x * size).requires_grad_(), grad * size


def histories(layer: torch.nn.Module) -> list[torch.Tensor]:
    return [b.clone() for name, b in layer.named_buffers() if name.rpartition(".")[2] in BUFFERS]


def same(a, b) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("recipe, algorithm", [("fp8+delayed", "most_recent"), ("fp8+delayed-max", "max")])
@pytest.mark.parametrize("native, save", [(False, "values"), (True, "packed")])
def test_the_three_gemms_follow_the_history(recipe, algorithm, native, save, monkeypatch):
    """Seven steps of two micro-batches whose sizes jump, so that values saturate and scales leave the window of four."""
    monkeypatch.setattr(plans, "fp8_path", lambda device: "native" if native else "emulated")
    layer = layer_of(recipe, save=save)
    of = {t: Oracle("e5m2" if t == "g" else "e4m3", algorithm) for t in "xwg"}
    for step, size in enumerate((1.0, 64.0, 1e-3, 3.0, 0.5, 0.5, 0.25), start=1):
        set_step(layer, step)
        for part in range(2):
            x, grad = batch(10 * step + part, size)
            y = layer(x)
            dx, dw = torch.autograd.grad(y, (x, layer.weight), grad)
            qx, qw, qg = of["x"](x.detach()), of["w"](layer.weight.detach()), of["g"](grad)
            for got, a, b in ((y.detach(), qx, qw.t()), (dx, qg, qw), (dw, qg.t(), qx)):
                assert ((got.double() - a @ b).abs() <= 60 * 2.0**-23 * (a.abs() @ b.abs())).all()
        with torch.no_grad():
            layer.weight.mul_(1.5)
        for oracle in of.values():
            oracle.step()
    set_step(layer, step + 1)
    expected = torch.tensor([oracle.past[:-5:-1] for oracle in of.values()])
    assert torch.equal(layer.amax_history, expected)
    assert not layer.amax_forward.any() and not layer.amax_backward.any()


def test_the_first_step_is_current_scaling_and_so_is_a_history_of_the_same_maximum():
    ours, theirs = layer_of(), layer_of("fp8")
    for step in (1, 2):
        set_step(ours, step)
        results = []
        for layer in (ours, theirs):
            x, grad = batch(7)
            y = layer(x)
            results.append((y.detach(), *torch.autograd.grad(y, (x, layer.weight), grad)))
        assert same(*results)


def test_infinities_show_and_leave_the_scale_as_it_was():
    layer = layer_of()
    set_step(layer, 1)
    layer(batch(1)[0]).backward(batch(1)[1])
    set_step(layer, 2)
    before = layer.amax_history.clone()
    x, grad = batch(2)
    bad = x.detach().clone()
    bad[3, 5] = torch.inf
    y = layer(bad.requires_grad_())
    assert y[3].isnan().all() and y[:3].isfinite().all()
    y.backward(torch.zeros_like(grad))
    set_step(layer, 3)
    assert torch.equal(layer.amax_history[0], before[0]) and torch.equal(layer.amax_history[2], before[2])
    assert layer.amax_history[1, 1] == before[1, 0]  # W's entered


def test_a_finite_value_far_beyond_the_scale_saturates():
    layer = layer_of()
    set_step(layer, 1)
    layer(torch.full((4, 48), 1e-38, requires_grad=True)).sum().backward()
    set_step(layer, 2)
    assert layer(torch.full((4, 48), 1e30)).isfinite().all()  # times a scale of 4e40, cut to FP32's largest


def test_evaluation_and_forwards_without_gradients_use_the_history_and_leave_it():
    layer = layer_of()
    set_step(layer, 1)
    layer(batch(1)[0]).backward(batch(1)[1])
    set_step(layer, 2)
    before, x = histories(layer), batch(3, 100.0)[0]
    with torch.no_grad():
        y = layer(x)
    assert same(before, histories(layer)) and y.abs().max() < 0.1 * (x @ layer.weight.t()).abs().max()
    layer.eval()
    y = layer(x)
    y.sum().backward()
    assert same(before, histories(layer))
    set_step(layer, 2)  # the same step again
    end_step(layer)
    assert same(before, histories(layer))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_second_forward_of_activation_checkpointing_changes_nothing(reentrant):
    results = []
    for recompute in (False, True):
        layer = layer_of()
        for step in (1, 2, 3):
            set_step(layer, step)
            for part in range(2):
                x, grad = batch(10 * step + part, 4.0**step)
                y = checkpoint(layer, x, use_reentrant=reentrant) if recompute else layer(x)
                y.backward(grad)
        results.append([x.grad, layer.weight.grad, *histories(layer)])
    assert same(*results)


def test_backwards_of_interleaved_forwards():
    """As pipelines run them: what another micro-batch has seen in between is no error."""
    layer = layer_of()
    set_step(layer, 1)
    ys = [layer(batch(i)[0]) for i in range(2)]
    for y in ys:
        y.sum().backward()
    assert layer.amax_backward == 1


def test_compiled_without_a_graph_break_to_the_same_bytes():
    torch._dynamo.reset()
    results = []
    for how in ("eager", "compiled", "compiled, recomputed"):
        layer = layer_of()
        call = partial(checkpoint, layer, use_reentrant=False) if "recomputed" in how else layer
        if "compiled" in how:
            call = torch.compile(call, fullgraph=True, backend="aot_eager_decomp_partition")
        made = []
        for forward in range(4):
            set_step(layer, 1 + forward // 2)
            x, grad = batch(forward, 3.0**forward)
            y = call(x)
            y.backward(grad)
            made += [y.detach(), x.grad, layer.weight.grad.clone()]
        results.append([*made, *histories(layer)])
    assert same(results[0], results[1]) and same(results[0], results[2])
    program = torch.export.export(layer.eval(), (x.detach(),))
    assert torch.equal(program.module()(x.detach()), layer(x.detach()))


def test_the_state_is_in_the_state_dict_of_this_recipe_alone():
    layer = layer_of()
    assert list(layer.state_dict()) == ["weight", *BUFFERS] and list(layer_of("fp8").state_dict()) == ["weight"]
    set_step(layer, 1)
    layer(batch(1)[0]).backward(batch(1)[1])
    end_step(layer)
    other = layer_of()
    other.load_state_dict(layer.state_dict())
    assert same(histories(layer), histories(other))
    other.load_state_dict(layer_of("fp8").state_dict())  # of another recipe, which has no history
    assert not any(b.any() for b in histories(other))
    assert same(histories(copy.deepcopy(layer)), histories(layer))
    assert layer.to(torch.bfloat16).amax_history.dtype == torch.float32


def test_from_the_meta_device_there_is_no_history():
    with torch.device("meta"):
        model = convert(torch.nn.Sequential(torch.nn.Linear(32, 32)), "fp8+delayed")
    model.to_empty(device="cpu")
    assert [b.tolist() for b in model.buffers()] == [torch.zeros(shape).tolist() for shape in BUFFERS.values()]


def test_a_branch_leaves_the_history_as_it_was_and_another_forward_shares_it():
    config = tiny_config(recipe="fp8+delayed")
    model = build_model(config.model, 0)
    convert(model, config.recipe)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(64, (2, 17), generator=torch.Generator().manual_seed(0))
    set_step(model, 1)
    token_loss(model, tokens).backward()
    end_step(model)
    before = histories(model)
    with kept(model, optimizer):
        branch = in_recipe(model, config, "fp8+delayed-max")
        set_step(branch, 2)
        token_loss(branch, tokens).backward()
        set_step(branch, 3)
        assert not same(before, histories(model)) and same(histories(model), histories(branch))
    assert same(before, histories(model)) and not histories(in_recipe(model, config, "fp8"))


def test_kept_weights_have_no_history(tmp_path):
    config = tiny_config(recipe="fp8+delayed")
    model = convert(build_model(config.model, 0), config.recipe)
    weights.save(tmp_path / "weights", model, config)
    assert weights.load(tmp_path / "weights").tensors.keys() == dict(model.named_parameters()).keys()


def test_a_training_that_names_no_step_is_told():
    layer = layer_of()
    with pytest.warns(Notice, match="'fp8.delayed' scales by earlier steps: call mxfp4.set_step"):
        layer(batch(1)[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer(batch(1)[0])


def test_a_run_resumes_to_the_same_bytes(tmp_path):
    config = tiny_config(recipe="fp8+delayed", micro_batches=2, steps=6)
    options = {"corpus": FakeCorpus(), "device": "cpu", "progress": False}
    straight = train(config, **options)
    seen: list[int] = []
    paused = train(config, checkpoint_dir=tmp_path, on_step=seen.append, stop=lambda: seen[-1] == 3, **options)
    assert paused.outcome["status"] == "paused"
    resumed = train(config, checkpoint_dir=tmp_path, **options)
    states = [run.model.state_dict() for run in (straight, resumed)]
    assert list(states[0]) == list(states[1]) and same(*[list(s.values()) for s in states])
    assert any(name.endswith("amax_history") and b.all() for name, b in states[0].items())
