"""MXFP4Linear and convert: each row of the field's "layer and training" cases, and the GEMMs against an oracle."""

import copy

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import mxfp4
from mxfp4 import Gemm, MXFP4Linear, Operand, Recipe, convert, quantize, recipe, set_step
from mxfp4.layers.gemms import token_multiple
from tests.fakes.draws import twin

NAMES = [
    "bf16",
    "fp8",
    "mxfp4-fprop",
    "mxfp4-wgrad",
    "mxfp4",
    "mxfp4+sr",
    "mxfp4+rht16",
    "mxfp4+h16",
    "mxfp4+h32",
    "ti2d",
]


def run(layer, x, grad):
    """(Y, dX, dW) of a layer."""
    x = x.detach().clone().requires_grad_()
    y = layer(x)
    y.backward(grad)
    return y.detach(), x.grad, layer.weight.grad


def relative(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


@pytest.fixture
def data():
    torch.manual_seed(0)
    return torch.randn(96, 64), torch.randn(96, 128)


@pytest.mark.parametrize("rotation", ["h16", "h32", "rht16", "frht16", "h64", "hh16"])
@pytest.mark.parametrize("which", ["fprop", "dgrad", "wgrad"])
def test_rotation_without_quantization_cancels_in_each_gemm(which, rotation, data):
    x, grad = data
    linear = nn.Linear(64, 128, bias=False)
    high, turned = Operand("fp32"), Operand("fp32", hadamard=rotation)
    gemms = {g: Gemm(turned, turned) if g == which else Gemm(high, high) for g in ("fprop", "dgrad", "wgrad")}
    layer = MXFP4Linear.from_linear(copy.deepcopy(linear), Recipe("identity", **gemms))
    for ours, plain in zip(run(layer, x, grad), run(linear, x, grad), strict=True):
        assert relative(ours, plain) < 1e-6


def test_rotation_changes_the_bytes_of_an_outlier_block():
    x = torch.linspace(-1, 1, 32 * 64).view(32, 64)
    x[:, 3] = 1000.0
    plain, turned = quantize(x), quantize(x, hadamard=mxfp4.Hadamard(16))
    assert not torch.equal(plain.qdata, turned.qdata)
    layers = [MXFP4Linear(64, 64, bias=False, recipe=f"mxfp4{h}") for h in ("", "+h16")]
    layers[1].load_state_dict(layers[0].state_dict())
    for ours, theirs in zip(run(layers[0], x, x), run(layers[1], x, x), strict=True):
        assert not torch.equal(ours, theirs)


@pytest.mark.parametrize("name", ["mxfp4", "mxfp4+h16", "mxfp4+floor+h32", "mxfp4+2d+rceil", "mxfp4+2d+h16"])
def test_the_three_gemms_equal_the_fp64_product_of_their_quantized_operands(name, data):
    x, grad = data
    layer = MXFP4Linear(64, 128, bias=False, recipe=name)
    w, op = layer.weight.detach(), recipe(name).fprop.a
    hadamard = None if op.hadamard is None else mxfp4.Hadamard(int(op.hadamard[1:]))

    def q(t):  # contraction axis last
        return quantize(t, block=op.block, scale_rule=op.scale_rule, hadamard=hadamard).dequantize().double()

    y, dx, dw = run(layer, x, grad)
    assert relative(y, q(x) @ q(w).t()) < 1e-6
    assert relative(dx, q(grad) @ q(w.t()).t()) < 1e-6
    assert relative(dw, q(grad.t()) @ q(x.t()).t()) < 1e-6


def test_fp8_error_is_that_of_its_formats(data):
    x, grad = data
    linear = nn.Linear(64, 128, bias=False)
    layer = MXFP4Linear.from_linear(copy.deepcopy(linear), "fp8")
    errors = [relative(a, b) for a, b in zip(run(layer, x, grad), run(linear, x, grad), strict=True)]
    assert 0.01 < errors[0] < 0.05  # E4M3 x E4M3
    assert 0.02 < errors[1] < 0.1 and 0.02 < errors[2] < 0.1  # an E5M2 operand


def test_fp8_of_tiny_and_zero_tensors_is_finite():
    layer = MXFP4Linear(32, 32, bias=False, recipe="fp8")
    for x in (torch.zeros(4, 32), torch.full((4, 32), 1e-40), torch.full((4, 32), 1e30)):
        y, dx, dw = run(layer, x, torch.zeros(4, 32))
        assert y.isfinite().all() and dx.isfinite().all() and dw.isfinite().all()


@pytest.mark.parametrize("name", ["bf16", "fp8", "mxfp4", "nvfp4", "quartet"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_an_input_that_is_no_float_is_refused(name, dtype):
    """Its dtype would be the result's: token ids by mistake would come back as integers."""
    with pytest.raises(TypeError, match=f"x must be a float32, bfloat16, float16 or float64 tensor, got {dtype}"):
        MXFP4Linear(64, 64, recipe=name)(torch.zeros(2, 64).to(dtype))


@pytest.mark.parametrize("sizes, named", [((0, 64), "in_features=0"), ((64, 0), "out_features=0")])
@pytest.mark.parametrize("name", ["bf16", "fp8", "mxfp4"])
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_a_layer_without_features_is_refused(name, sizes, named):
    with pytest.raises(ValueError, match=f"layer 'a.b': {named} must be 1 or more"):
        MXFP4Linear(*sizes, recipe=name, fqn="a.b")


@pytest.mark.parametrize("name", NAMES)
def test_zero_weight_and_unit_bias(name):
    layer = MXFP4Linear(64, 32, recipe=name)
    with torch.no_grad():
        layer.weight.zero_()
        layer.bias.fill_(1)
    y = layer(torch.randn(40, 64))
    y.sum().backward()
    assert torch.equal(y, torch.ones(40, 32))
    assert torch.equal(layer.bias.grad, torch.full((32,), 40.0))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(33, 64), (0, 64), (64,), (2, 5, 64), (3, 0, 64), (1, 64), (2, 3, 7, 64)])
def test_shapes_follow_nn_linear(name, shape):
    layer, plain = MXFP4Linear(64, 32, recipe=name), nn.Linear(64, 32)
    x = torch.randn(shape, requires_grad=True)
    y = layer(x)
    assert y.shape == plain(x).shape
    y.sum().backward()  # a stride-0 gradient
    assert x.grad.shape == x.shape and x.grad.isfinite().all()
    assert layer.weight.grad.shape == (32, 64) and layer.weight.grad.isfinite().all()


@pytest.mark.parametrize("shape", [(4, 32), (2, 128), (0, 7), (4, 0), ()])
def test_another_number_of_features_is_refused(shape):
    layer = MXFP4Linear(64, 32, recipe="mxfp4", fqn="layers.0.w1")
    with pytest.raises(ValueError, match=r"layers\.0\.w1.* must end in in_features=64"):
        layer(torch.randn(shape))


@pytest.mark.parametrize("name", ["bf16", "mxfp4", "quartet"])
def test_a_second_derivative_is_refused(name, data):
    """Of the quantized operands that a backward holds it would be wrong, and of a gradient penalty zero."""
    layer, x = MXFP4Linear(64, 128, recipe=name), data[0].requires_grad_()
    (first,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        (layer(x).sum() + first.square().sum()).backward()
    (first,) = torch.autograd.grad(layer(x).sum(), x, create_graph=True)  # of a constant gradient
    with pytest.raises(RuntimeError, match="differentiate twice"):
        (layer(x).sum() + first.square().sum()).backward()


def test_padding_tokens_is_exact(data):
    x, grad = data
    layer = MXFP4Linear(64, 128, bias=False, recipe="mxfp4+h16")
    y, dx, dw = run(layer, x[:33], grad[:33])
    layer.weight.grad = None
    zeros = torch.zeros(31, 64), torch.zeros(31, 128)
    y2, dx2, dw2 = run(layer, torch.cat([x[:33], zeros[0]]), torch.cat([grad[:33], zeros[1]]))
    assert torch.equal(y, y2[:33]) and torch.equal(dx, dx2[:33]) and torch.equal(dw, dw2)


@pytest.mark.parametrize("name", ["mxfp4", "mxfp4+sr", "ti2d", "fp8"])
def test_a_transposed_gradient_gives_the_same_bytes(name, data):
    x, grad = data
    layers = [MXFP4Linear(64, 128, bias=False, recipe=name, seed=5, fqn="a") for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    for ours, theirs in zip(run(layers[0], x, grad), run(layers[1], x, grad.t().contiguous().t()), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", ["mxfp4", "mxfp4+h16", "fp8", "mxfp4-fprop", "ti2d"])
def test_fp32_masters_under_autocast(name):
    layer = MXFP4Linear(64, 64, recipe=name)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(torch.randn(32, 64))
        loss = y.float().square().sum()
    loss.backward()
    assert y.dtype == torch.bfloat16 and layer.weight.grad.dtype == layer.bias.grad.dtype == torch.float32


def test_one_gemm_in_high_precision_under_autocast():
    quantized, high = Operand("mxfp4"), Operand("fp32")
    for which in ("fprop", "dgrad", "wgrad"):
        gemms = {
            g: Gemm(high, quantized) if g == which else Gemm(quantized, quantized) for g in ("fprop", "dgrad", "wgrad")
        }
        layer = MXFP4Linear(64, 64, recipe=Recipe("mixed", **gemms))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = layer(torch.randn(32, 64)).float().sum()
        loss.backward()
        assert layer.weight.grad.dtype == torch.float32 and layer.weight.grad.isfinite().all()


def test_micro_batches_sum_and_weights_are_never_stale():
    layer = MXFP4Linear(64, 64, bias=False, recipe="mxfp4+h16")
    batches = torch.randn(4, 32, 64)
    parts = []
    for x in batches:
        layer.weight.grad = None
        layer(x).square().sum().backward()
        parts.append(layer.weight.grad)
    layer.weight.grad = None
    for x in batches:
        layer(x).square().sum().backward()
    assert torch.equal(layer.weight.grad, parts[0] + parts[1] + parts[2] + parts[3])

    def fresh(x):
        return MXFP4Linear.from_linear(layer, "mxfp4+h16")(x)

    before = layer(batches[0])
    torch.optim.SGD(layer.parameters(), lr=0.1).step()
    assert torch.equal(layer(batches[0]), fresh(batches[0])) and not torch.equal(layer(batches[0]), before)
    layer.weight.data.copy_(torch.randn(64, 64))
    assert torch.equal(layer(batches[0]), fresh(batches[0]))
    layer.load_state_dict({"weight": torch.randn(64, 64)})
    assert torch.equal(layer(batches[0]), fresh(batches[0]))


def test_random_numbers_differ_by_call_and_layer_and_repeat_by_step():
    model = convert(nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(2)]), "mxfp4+sr", seed=3)
    model[1].weight.data.copy_(model[0].weight)
    x = torch.randn(32, 64)
    set_step(model, 7)
    first, other, second = model[0](x), model[1](x), model[0](x)
    assert not torch.equal(first, other) and not torch.equal(first, second)
    set_step(model, 7)
    assert torch.equal(model[0](x), first)
    set_step(model, 8)
    assert not torch.equal(model[0](x), first)


def test_rht_redraws_signs_and_frht_does_not():
    x = torch.randn(32, 64)
    redrawn, fixed = (MXFP4Linear(64, 64, recipe=f"mxfp4+{h}") for h in ("rht16", "frht16"))
    assert not torch.equal(redrawn(x), redrawn(x))
    assert torch.equal(fixed(x), fixed(x))


def test_ti2d_sees_one_weight_in_both_directions():
    """P2's point: the W of dgrad is the W of fprop, element by element; with 1D blocks it is not."""
    for name, same in (("ti2d", True), ("mxfp4", False)):
        layer = MXFP4Linear(64, 128, bias=False, recipe=name, fqn="layers.0.attention.wo")
        forward = layer(torch.eye(64)).detach().t()  # powers of two quantize exactly: the W that fprop sees
        eye = torch.eye(128, 64).requires_grad_()
        layer(eye).backward(torch.eye(128))
        backward = eye.grad
        assert torch.equal(forward, backward) == same


def test_convert_leaves_head_embedding_and_filtered_layers_alone():
    class Tiny(nn.Module):
        def __init__(self):
            super().__init__()
            self.tok_embeddings = nn.Embedding(50, 64)
            self.layers = nn.ModuleList(
                [nn.ModuleDict({"wq": nn.Linear(64, 64), "w1": nn.Linear(64, 64)}) for _ in range(2)]
            )
            self.output = nn.Linear(64, 50)

    model = Tiny()
    parameters = dict(model.named_parameters())
    convert(model, "ti2d")
    assert type(model.output) is nn.Linear and type(model.tok_embeddings) is nn.Embedding
    assert all(type(layer) is MXFP4Linear for block in model.layers for layer in block.values())
    assert all(p is parameters[n] for n, p in model.named_parameters()) and len(model.state_dict()) == len(parameters)
    assert model.layers[0]["wq"].recipe.fprop.a.format == "mxfp8"

    kept = convert(Tiny(), "mxfp4", lambda module, fqn: fqn.startswith("layers.0"))
    x = torch.randn(4, 64)
    assert type(kept.layers[1]["wq"]) is nn.Linear
    plain = nn.Linear(64, 64)
    plain.load_state_dict(kept.layers[1]["wq"].state_dict())
    assert torch.equal(kept.layers[1]["wq"](x), plain(x))


def test_misfit_features_are_refused_by_name_before_anything_changes():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 40))
    for name in ("mxfp4", "ti2d", "mxfp4-dgrad"):
        with pytest.raises(ValueError, match=r"'1'.*out_features=40.*32"):
            convert(model, name)
        assert type(model[0]) is nn.Linear
    with pytest.raises(ValueError, match=r"in_features=96.*64"):
        MXFP4Linear(96, 64, recipe="mxfp4+h64")
    convert(model, "mxfp4-fprop")  # contracts in_features only
    assert type(model[1]) is MXFP4Linear


@pytest.mark.parametrize(
    "name", ["mxfp4+2d+hh16", "mxfp4+2d+rceil+hh32", "nvfp4-plain", "nvfp4-plain+2d", "mxfp4+prescale+sr"]
)
def test_two_sided_rotation_nvfp4_and_prescale_come_out_in_the_original_basis_and_scale(name, data):
    """Their products are undone after the GEMM: what remains is an FP4 error, not a rotated or scaled result."""
    x, grad = data
    linear = nn.Linear(64, 128, bias=False)
    layer = MXFP4Linear.from_linear(copy.deepcopy(linear), name)
    for ours, plain in zip(run(layer, x, grad), run(linear, x, grad), strict=True):
        assert 0.05 < relative(ours, plain) < 0.35
        slope = (ours.double() * plain).sum() / plain.double().square().sum()
        assert abs(slope - 1) < 0.05


def test_two_sided_rotation_keeps_one_weight_for_both_directions():
    """What hh16 is for: the quantized W is one matrix, so dgrad's is exactly fprop's, as in `ti2d`."""
    from mxfp4.layers.gemms import operand

    w = torch.randn(64, 128)
    for name, same in (("mxfp4+2d+hh16", True), ("mxfp4+2d+h16", False)):
        forward, backward = (operand(w, which, "w", recipe(name), None)[0] for which in ("fprop", "dgrad"))
        assert torch.equal(forward, backward.t()) == same


def test_requantize_takes_the_backward_operands_from_the_forward_ones():
    from mxfp4.layers.gemms import both_operands

    w = torch.randn(64, 128)
    forward, backward = (v for v, _ in both_operands(w, "w", recipe("mxfp4+rceil+double"), None))
    again = mxfp4.fake_quantize(forward, axis=0, scale_rule="rceil")
    assert torch.equal(backward.t(), again) and not torch.equal(
        backward.t(), mxfp4.fake_quantize(w, axis=0, scale_rule="rceil")
    )


def test_prescale_is_exact_for_bf16_tensors():
    """3/4 of a BF16 number has two bits more than BF16 holds."""
    from mxfp4.layers.gemms import quantized_operand

    x = (torch.randn(32, 64) * 3).bfloat16()
    op, seed = recipe("mxfp4+prescale+sr").fprop.a, torch.tensor(5)
    of_bf16, of_fp32 = (quantized_operand(t, op, -1, seed, 0)[0] for t in (x, x.float()))
    assert torch.equal(of_bf16, of_fp32)


def test_prescale_takes_the_floor_scale_and_is_unbiased_at_the_block_maximum():
    from mxfp4.layers.gemms import quantized_operand
    from mxfp4.numerics.formats import e8m0_value

    x = torch.randn(4096, 32)
    x[:, 0] = 7.7  # floor scales it to (6, 8) and clips
    op = recipe("mxfp4+prescale+sr").fprop.a
    value, factor = quantized_operand(x, op, -1, torch.tensor(1), 0)
    scale = e8m0_value(quantize(x, scale_rule="floor").scale)
    assert torch.equal(value / scale, (value / scale * 2).round() / 2) and (value.abs() <= 6 * scale).all()
    first = (value * factor)[:, 0]
    assert abs(first.mean() - 7.7) < 4 * first.std() / 64
    assert (mxfp4.fake_quantize(x, scale_rule="floor", rounding="stochastic", seed=1)[:, 0] == 6).all()


def test_fp8_rounds_as_the_format_does():
    from mxfp4.layers.gemms import quantized_operand
    from mxfp4.numerics.formats import ELEMS
    from mxfp4.numerics.rounding import round_nearest

    x = torch.randn(64, 64) * torch.exp2(torch.randint(-30, 30, (64, 64)).float())
    for elem in ("e4m3", "e5m2"):
        value, factor = quantized_operand(x, Operand("fp8", elem), -1, None, 0)
        assert torch.equal(value, round_nearest(x * (1 / factor), ELEMS[elem]))


def test_bf16_tail_keeps_the_last_layers():
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Linear(32, 32) for _ in range(8)])
    convert(model, "mxfp4+tail15")
    assert [layer.recipe.fprop.a.format for layer in model.layers] == ["mxfp4"] * 7 + ["bf16"]
    convert(model2 := nn.Sequential(nn.Linear(32, 32)), "mxfp4+tail15")
    assert model2[0].recipe.fprop.a.format == "mxfp4"


def test_nvfp4_values():
    from mxfp4.numerics.nvfp4 import nvfp4_values

    x = torch.randn(32, 64)
    x[0, :16] = 0
    for block in ("1d", "2d"):
        value, factor = nvfp4_values(x, block, None, 0)
        assert relative(value * factor, x) < 0.13
        assert torch.equal(value.to(torch.bfloat16).float(), value)  # exact in BF16
        assert not value[0, :16].any()
    assert torch.equal(nvfp4_values(x, "2d", None, 0)[0], nvfp4_values(x.t(), "2d", None, 0)[0].t())
    assert not torch.equal(nvfp4_values(x, "1d", None, 0)[0], nvfp4_values(x.t(), "1d", None, 0)[0].t())
    zero, factor = nvfp4_values(torch.zeros(16, 16), "1d", None, 0)
    assert not zero.any() and factor == 1
    x[3, 3] = torch.inf
    assert nvfp4_values(x, "1d", None, 0)[1].isnan()


def test_token_multiple():
    assert [token_multiple(recipe(n)) for n in ("bf16", "fp8", "mxfp4-fprop", "mxfp4", "mxfp4+h64", "ti2d")] == [
        1, 1, 1, 32, 64, 32,
    ]  # fmt: skip


def test_state_dict_and_deepcopy():
    layer = MXFP4Linear(64, 32, recipe="mxfp4+sr")
    assert set(layer.state_dict()) == {"weight", "bias"}
    x = torch.randn(4, 64)
    assert torch.equal(twin(layer)(x), layer(x))
    plain = MXFP4Linear(64, 32, recipe="mxfp4")
    assert torch.equal(copy.deepcopy(plain)(x), plain(x))


@pytest.mark.parametrize("name", ["bf16", "mxfp4-bwd+h16", "mxfp4+h16", "mxfp4+sr", "ti2d", "quartet"])
def test_compiled_whole_equals_eager(name, data):
    torch.compiler.reset()  # one forward may be compiled for so many layers only
    x, grad = data
    eager = MXFP4Linear(64, 128, recipe=name, fqn="layers.0.attention.wo")
    compiled = twin(eager)
    function = torch.compile(compiled, fullgraph=True)
    x1, x2 = (x.clone().requires_grad_() for _ in range(2))
    pairs = [(eager(x1), function(x2)) for _ in range(2)]  # both forwards first: a backward must use its own draw
    for ours, theirs in pairs:
        assert torch.equal(ours, theirs)
        ours.backward(grad)
        theirs.backward(grad)
    assert torch.equal(x1.grad, x2.grad) and torch.equal(eager.weight.grad, compiled.weight.grad)


def _save_products(ctx, op, *args, **kwargs):
    policy = torch.utils.checkpoint.CheckpointPolicy
    return policy.MUST_SAVE if op is torch.ops.aten.mm.default else policy.PREFER_RECOMPUTE


RECOMPUTED = {
    "whole": {"use_reentrant": False},
    "reentrant": {"use_reentrant": True},
    "all but products": {
        "use_reentrant": False,
        "context_fn": lambda: torch.utils.checkpoint.create_selective_checkpoint_contexts(_save_products),
    },
}


@pytest.mark.parametrize("how", RECOMPUTED)
@pytest.mark.parametrize("name", ["mxfp4+rht16", "mxfp4+sr"])
def test_a_forward_run_again_for_its_gradients_draws_the_same_numbers(name, how, data):
    x, _ = data

    def gradients(forward):
        torch.manual_seed(1)
        net = convert(nn.Sequential(nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 64)), name)
        set_step(net, 3)
        found = []
        for _ in range(2):  # the second step draws other numbers
            leaf = x.clone().requires_grad_()
            forward(net, leaf).square().sum().backward()
            found += [leaf.grad, *(p.grad.clone() for p in net.parameters())]
        return found

    plain = gradients(lambda net, leaf: net(leaf))
    again = gradients(lambda net, leaf: torch.utils.checkpoint.checkpoint(net, leaf, **RECOMPUTED[how]))
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))
    assert not torch.equal(plain[0], plain[5])
