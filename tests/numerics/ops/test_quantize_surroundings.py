"""quantize and fake_quantize in odd surroundings: torch modes, default dtypes and devices, threads, the compiler."""

import shutil
import threading

import pytest
import torch

import mxfp4
from mxfp4 import Hadamard, MXTensor, fake_quantize, quantize

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "c++", "clang++"))), reason="needs a C++ compiler"
)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    """Normal values times 2^normal: every row of blocks has other scales."""
    g = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=g) * torch.exp2(3 * torch.randn(shape, generator=g))


def same(a: MXTensor, b: MXTensor) -> bool:
    return torch.equal(a.qdata, b.qdata) and torch.equal(a.scale, b.scale)


SR_ROTATED = {
    "hadamard": Hadamard(16, "seed"),
    "rounding": "stochastic",
    "seed": 3,
    "elem": "e4m3",
    "block": "2d",
}


def test_inference_mode_and_no_grad():
    x = normal(64, 96)
    with torch.inference_mode():
        inside = quantize(x, **SR_ROTATED)
        fresh = quantize(normal(64, 96), **SR_ROTATED)
    assert same(inside, quantize(x, **SR_ROTATED)) and same(fresh, inside)


@pytest.mark.parametrize("default", [torch.float64, torch.float16, torch.bfloat16])
def test_default_dtype(default):
    x = normal(64, 96)
    want, values = quantize(x, **SR_ROTATED), fake_quantize(x, **SR_ROTATED)
    torch.set_default_dtype(default)
    try:
        got = quantize(x, **SR_ROTATED)
        assert same(got, want) and got.dequantize().dtype == torch.float32
        assert torch.equal(fake_quantize(x, **SR_ROTATED), values)
    finally:
        torch.set_default_dtype(torch.float32)


def test_default_device():
    x = normal(64, 96)
    want = quantize(x, **SR_ROTATED)
    with torch.device("meta"):
        got = quantize(x, **SR_ROTATED)
        assert quantize(x, rounding="stochastic").device.type == "cpu"
        assert torch.equal(got.dequantize(), want.dequantize())
    assert same(got, want)


def test_meta_tensors_give_shapes():
    x = torch.empty(64, 96, device="meta")
    q = quantize(x, **SR_ROTATED)
    assert q.qdata.shape == (64, 96) and q.scale.shape == (2, 3) and q.dequantize().shape == (64, 96)
    assert (
        quantize(x).qdata.shape == (64, 48) and fake_quantize(x, axis=0, dtype=torch.bfloat16).dtype == torch.bfloat16
    )


def test_deterministic_algorithms_and_autocast():
    x = normal(64, 96)
    want = quantize(x, **SR_ROTATED)
    torch.use_deterministic_algorithms(True)
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert same(quantize(x, **SR_ROTATED), want)
    finally:
        torch.use_deterministic_algorithms(False)


def test_flushing_denormals_changes_normal_values_by_nothing():
    x = normal(64, 96)
    x[0] = 2.0**-100
    want = quantize(x, **SR_ROTATED)
    if not torch.set_flush_denormal(True):
        pytest.skip("this machine cannot flush denormals")
    try:
        got = quantize(x, **SR_ROTATED)
        assert same(got, want) and torch.equal(got.dequantize(), want.dequantize())
        assert quantize(torch.full((32,), 2.0**-126)).codes().unique().tolist() == [4]
    finally:
        torch.set_flush_denormal(False)


def test_threads():
    inputs = [normal(64, 96, seed=i) for i in range(8)]
    want = [quantize(x, **SR_ROTATED) for x in inputs]
    got: list = [None] * 8

    def work(i):
        for _ in range(5):
            got[i] = quantize(inputs[i], **SR_ROTATED)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert all(same(a, b) for a, b in zip(got, want, strict=True))


def test_number_of_threads_does_not_matter():
    x = normal(512, 1024)
    want = quantize(x, **SR_ROTATED)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert same(quantize(x, **SR_ROTATED), want)
    finally:
        torch.set_num_threads(before)


@pytest.mark.filterwarnings("ignore")
def test_vmap_over_rows():
    x = normal(8, 64)
    assert torch.equal(torch.func.vmap(fake_quantize)(x), fake_quantize(x))
    assert torch.equal(torch.func.vmap(lambda v: quantize(v).scale, in_dims=1)(x.t().contiguous()), quantize(x).scale)


def test_gradients_are_zero_not_wrong():
    assert torch.func.grad(lambda v: fake_quantize(v).sum())(normal(64)).count_nonzero() == 0


@needs_compiler
@pytest.mark.filterwarnings("ignore")
def test_compiled_bytes_equal_eager_for_any_seed():
    """Seeds become dynamic integers after the first; Inductor once drew other signs for a negative one."""
    torch._dynamo.reset()
    x = normal(64, 96)
    how = dict(SR_ROTATED, elem="e2m1", block="1d")

    def draw(x, seed):
        q = quantize(x, **{**how, "seed": seed})
        return q.qdata, q.scale, fake_quantize(x * 2, **{**how, "seed": seed}, stream=1) + 1

    compiled = torch.compile(draw, fullgraph=True)
    for seed in (0, 1, 7, 2**31, 2**63 - 1, -5, -(2**62)):
        for got, want in zip(compiled(x, seed), draw(x, seed), strict=True):
            assert torch.equal(got, want), seed
    for tensor_seed in (torch.tensor(-9), torch.tensor(2**40)):
        assert all(map(torch.equal, compiled(x, tensor_seed), draw(x, tensor_seed)))
    y = normal(32, 128)  # other shapes
    assert all(map(torch.equal, compiled(y, 3), draw(y, 3)))


@pytest.mark.parametrize("how", [{}, {"axis": 0, "block": "2d"}, {"elem": "e5m2", "scale_rule": "even"},
                                 {"hadamard": Hadamard(32, (1, -1) * 16)}], ids=str)  # fmt: skip
def test_traced_whole_with_the_result_as_mxtensor(how):
    torch._dynamo.reset()

    def whole(x):
        q = quantize(x, **how)
        return (
            q,
            q.dequantize(torch.bfloat16),
            q.t().dequantize(rotated=False),
            mxfp4.matmul(quantize(x), quantize(x)),
        )

    x = normal(64, 96)
    got = torch.compile(whole, fullgraph=True, backend="aot_eager")(x)
    want = whole(x)
    assert same(got[0], want[0]) and repr(got[0]) == repr(want[0])
    assert all(map(torch.equal, got[1:], want[1:]))
