"""Compiled blocks learn what eager ones learn, as the loop uses them: evaluation first, then a step."""

import pytest
import torch

from mxfp4 import MXFP4Linear, convert
from mxfp4.training.config import ModelConfig
from mxfp4.training.evaluation import token_loss
from mxfp4.training.model import build_model

CONFIG = ModelConfig(vocab_size=64, dim=64, n_layers=1, n_heads=2, n_kv_heads=1, ffn_dim=128, max_seq_len=32)


@pytest.fixture(autouse=True)
def nothing_compiled_before():
    """What other tests compiled counts towards the limit at which Dynamo gives up compiling."""
    torch._dynamo.reset()


def gradients(name: str, compiled: bool, autocast: bool, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    model = convert(build_model(CONFIG, 0), name)
    if compiled:
        for layer in model.layers:
            layer.compile()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        with torch.no_grad():
            token_loss(model, tokens)
        loss = token_loss(model, tokens)
    loss.backward()
    return {n: p.grad for n, p in model.named_parameters()}


# A compiler fuses BF16 roundings away, which moves some values across an FP4 rounding boundary, hence the second bound.
# Without autocast the layers' FP32 products need no cast: there PyTorch 2.11 lost every gradient (`matmul.as_dtype`).
@pytest.mark.parametrize(
    "name, autocast, error", [("bf16", True, 0.02), ("mxfp4+h16", True, 0.35), ("bf16", False, 0.02)]
)
def test_every_parameter_gets_the_eager_gradient(name, autocast, error):
    tokens = torch.randint(64, (2, 33), generator=torch.Generator().manual_seed(0))
    eager, compiled = (gradients(name, c, autocast, tokens) for c in (False, True))
    for parameter, expected in eager.items():
        assert compiled[parameter] is not None, parameter
        assert (compiled[parameter] - expected).norm() < error * expected.norm(), parameter


@pytest.mark.parametrize("name", ["bf16", "fp8", "mxfp4+h16", "nvfp4"])
def test_compiled_code_takes_the_strides_of_any_input(name):
    """A cut of a transpose has gaps, and its results another layout than the first guess."""
    base = torch.randn(96, 70)
    x, grad = base[3:67, 5:60].t(), torch.randn(128, 60)[:, 2:57].t()
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        layer = MXFP4Linear(64, 128, bias=False, recipe=name, fqn="a")
        y = (torch.compile(layer, fullgraph=True) if compiled else layer)(x)
        y.backward(grad)
        results.append((y.detach(), layer.weight.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_compiled_block_quantizes_a_shared_input_once(monkeypatch):
    """Query, key and value read one X, gate and up another: where nothing is random, compiled code makes each once."""
    from mxfp4.numerics.kernels.cpu import quantize as on_cpu

    calls, quantize = [], on_cpu.quantize_matrix
    monkeypatch.setattr(on_cpu, "quantize_matrix", lambda *a: (calls.append(1), quantize(*a))[1])
    tokens = torch.randint(64, (1, 33), generator=torch.Generator().manual_seed(0))
    counts = {}
    for name in ("mxfp4+h16", "mxfp4+sr"):
        for compiled in (False, True):
            model = convert(build_model(CONFIG, 0), name)
            if compiled:
                model.layers[0].compile(backend="aot_eager_decomp_partition")  # Inductor's graph, not its C++
            calls.clear()
            token_loss(model, tokens)
            counts[name, compiled] = len(calls)
    assert counts["mxfp4+h16", False] == counts["mxfp4+sr", False] == 14  # X and W of seven layers
    assert counts["mxfp4+h16", True] == 11 and counts["mxfp4+sr", True] == 14
