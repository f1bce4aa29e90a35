"""Several ranks compute what one computes, and decide alike.

Of each part of a batch the ranks compute the same values, so what may differ is the order in which parts are summed:
FP32 sums of PARTS numbers, an error of at most PARTS * 2^-24 of the sum of their sizes.
"""

import math
from dataclasses import replace

import pytest
import torch

from mxfp4.errors import UserError
from mxfp4.layers import linear
from mxfp4.layers.linear import end_step
from mxfp4.training.execution import cross_entropy
from mxfp4.training.execution.distributed import Ranks
from mxfp4.training.loop import train
from tests.fakes import TINY, FakeCorpus, tiny_config
from tests.fakes.ranks import full_state, keep, launch

CORPUS = FakeCorpus()
PARTS = 4
SUM_ERROR = PARTS * 2.0**-24
ARMS = {
    "plain": {"recipe": "fp32", "steps": 6},
    "random": {"recipe": "mxfp4+sr", "steps": 1},
    "signs, recomputed": {"recipe": "mxfp4+rht16", "steps": 1},
    "per tensor": {"recipe": "fp8", "steps": 1},
    "delayed": {"recipe": "fp8+delayed", "steps": 1},
    "compiled": {"recipe": "mxfp4+h16", "steps": 1},
    "experts, tied": {
        "recipe": "mxfp4+sr",
        "steps": 1,
        "model": replace(TINY, n_experts=4, n_layers=2, tie_embeddings=True),
    },
}


def arm(name):
    # 5 evaluation windows in batches of 2: the ranks have 2 and 1 of the 3 batches.
    return tiny_config(**{"model": replace(TINY, n_layers=2), **ARMS[name]}, batch_size=8, micro_batches=PARTS,
                       eval_sequences=5, warmup=0)  # fmt: skip


def run(name, **options):
    recompute = 2 if name.endswith("recomputed") else 0
    return train(arm(name), corpus=CORPUS, device="cpu", progress=False, recompute_every=recompute, **options)


def compiled(ranks, folder):
    """Through the tracing of torch.compile alone: generated code has an arithmetic of its own."""
    honest = torch.nn.Module.compile
    torch.nn.Module.compile = lambda module: honest(module, backend="eager")
    options = {"reshard_after_forward": False, "weights_once": True}  # in the same graphs
    keep(ranks, folder / "compiled", run("compiled", compile=True, **options))
    torch.nn.Module.compile = honest
    if ranks.rank == 0:
        frames = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        torch.save(frames, folder / "graphs")


def scenario(ranks, folder):
    for name in ARMS:
        if name not in ("compiled", "delayed"):
            keep(ranks, folder / name, run(name))
    delayed(ranks, folder)
    compiled(ranks, folder)
    choices(ranks, folder)
    poisoned(ranks, folder)


CHOSEN = {"attention": "auto", "cross_entropy": "chunked"}
ONCE = {**CHOSEN, "reshard_after_forward": False, "weights_once": True}


def choices(ranks, folder):
    """Weights made once a step beside those made for each part; gradients summed in BF16."""
    honest, made = linear.quantize_tensor, []

    def counted(t, plan, seed, *amax):
        made.extend(["w"] * (plan.tensor == "w"))
        return honest(t, plan, seed, *amax)

    linear.quantize_tensor, cross_entropy.CHUNK = counted, 12
    found = {}
    for name, options in (("each", CHOSEN), ("once", ONCE)):
        made.clear()
        result = run("compiled", **options)
        found[name] = {"weights": full_state(result.model), "curve": result.curve, "made": len(made),
                       "timings": result.timings}  # fmt: skip
    linear.quantize_tensor = honest
    result = train(replace(arm("compiled"), reduce_dtype="bfloat16"), corpus=CORPUS, device="cpu", progress=False)
    found["bfloat16"] = {"weights": full_state(result.model), "curve": result.curve}
    with pytest.raises(UserError, match="weights_once=True on 2 ranks needs reshard_after_forward=False"):
        run("compiled", weights_once=True)
    if ranks.rank == 0:
        torch.save(found, folder / "choices")


def delayed(ranks, folder):
    """Each rank has seen the maxima of its own parts; then all know the largest."""
    result = run("delayed")
    assert any(ranks.any(bool((mine != first).any()))[0] for mine, first in zip(
        result.model.buffers(), ranks.agree(list(result.model.buffers())), strict=True))  # fmt: skip
    end_step(result.model)
    keep(ranks, folder / "delayed", result)
    if ranks.rank == 0:
        torch.save(dict(result.model.named_buffers()), folder / "histories")


def poisoned(ranks, folder):
    """NaN in the loss of rank 1 alone, from step 3 on."""
    from mxfp4.training import run_state

    honest, forwards = run_state.token_loss, 0

    def token_loss(model, part):
        nonlocal forwards
        forwards += 1
        return honest(model, part) * (math.nan if ranks.rank == 1 and forwards > 2 * PARTS // 2 else 1.0)

    run_state.token_loss = token_loss
    result = run("plain")
    run_state.token_loss = honest
    outcomes = ranks.gather(result.outcome)
    assert outcomes[0] == outcomes[1]
    if ranks.rank == 0:
        torch.save(outcomes[0], folder / "poisoned")


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    launch(scenario, 2, folder)
    return {path.name: torch.load(path, weights_only=False) for path in folder.iterdir()}


@pytest.mark.parametrize("name", ARMS)
def test_two_ranks_compute_what_one_computes(two_ranks, name):
    one, two, config = run(name), two_ranks[name], arm(name)
    assert one.curve[0]["eval_loss"] == two["curve"][0]["eval_loss"]  # equal weights, equal batches: equal bytes
    first, theirs = one.curve[1], two["curve"][1]
    for column in ("train_loss", "balance_loss"):
        assert first[column] == pytest.approx(theirs[column], rel=SUM_ERROR, nan_ok=True)
    # The norm is a sum over all elements, each of which has the error of its own sum and of its square.
    assert first["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=8 * SUM_ERROR)
    if config.steps == 1:
        # Adam's first step is lr g / (|g| + eps): its slope is at most lr / eps, and g the mean of PARTS gradients,
        # clipped, so none of its sums exceeds a few times the clip.
        bound = config.lr / config.eps * SUM_ERROR * 4 * config.clip
        for key, weight in one.model.named_parameters():
            assert (weight - two["weights"][key]).abs().max() <= bound + 2.0**-22, key
    else:  # the errors of one step are the input of the next: a smooth model, few steps
        assert one.outcome["final_loss"] == pytest.approx(two["outcome"]["final_loss"], rel=1e-4)
    assert len(two["windows"]) == 5


def test_the_histories_of_delayed_scaling_are_those_of_one_rank(two_ranks):
    """A rank divides its loss by half as many parts, so G is twice as large there, exactly."""
    model = run("delayed").model
    end_step(model)
    ours = {name: b for name, b in model.named_buffers() if name.endswith("amax_history")}
    assert len(ours) == 14
    for name, history in ours.items():
        assert torch.equal(history * torch.tensor([[1.0], [1.0], [2.0]]), two_ranks["histories"][name]), name
        assert history[:, 0].all() and not history[:, 1:].any()


def test_sharded_blocks_share_their_compiled_code(two_ranks):
    assert two_ranks["graphs"] == 2  # with gradients and without, not once a block


def test_weights_made_once_a_step_of_sharded_blocks_change_no_bit(two_ranks, monkeypatch):
    monkeypatch.setattr(cross_entropy, "CHUNK", 12)
    found, one = two_ranks["choices"], run("compiled", **CHOSEN)
    for column in ("train_loss", "eval_loss"):
        values = [row[column] for row in one.curve if not math.isnan(row[column])]
        assert values == pytest.approx(
            [r[column] for r in found["each"]["curve"] if not math.isnan(r[column])], rel=1e-5
        )
    assert repr(found["once"]["curve"]) == repr(found["each"]["curve"])
    assert all(torch.equal(w, found["each"]["weights"][key]) for key, w in found["once"]["weights"].items())
    layers = 2 * 7
    evaluations = 2 * 2  # two, each of two batches on the busier rank
    assert found["each"]["made"] == layers * (PARTS // 2 + evaluations)
    assert found["once"]["made"] == layers * (1 + evaluations)
    assert {**ONCE, "ranks": 2}.items() <= found["once"]["timings"].items()


def test_gradients_summed_in_bf16_are_rounded_to_it(two_ranks):
    fine, coarse = two_ranks["compiled"], two_ranks["choices"]["bfloat16"]
    assert coarse["curve"][1]["train_loss"] == fine["curve"][1]["train_loss"]
    a, b = (side["curve"][1]["grad_norm"] for side in (fine, coarse))
    assert a != b and a == pytest.approx(b, rel=2.0**-7)  # two roundings of 2^-9 each
    with pytest.raises(UserError, match="reduce_dtype='bfloat16' is of a sum over several GPUs, and this run has one"):
        train(tiny_config(reduce_dtype="bfloat16"), corpus=CORPUS, device="cpu", progress=False)
    with pytest.raises(UserError, match="reduce_dtype='float16' must be one of float32, bfloat16"):
        tiny_config(reduce_dtype="float16")


def test_nan_on_one_rank_is_divergence_on_all(two_ranks):
    assert two_ranks["poisoned"]["status"] == "diverged" and two_ranks["poisoned"]["step"] == 3


def test_ranks_that_do_not_divide_the_parts_are_refused():
    with pytest.raises(UserError, match="micro_batches=4 must be a multiple of the 3 ranks"):
        Ranks(rank=0, size=3).check(4)


def test_every_part_has_one_rank():
    for parts in (1, 3, 4, 7):
        shares = [Ranks(rank=r, size=3).share(parts) for r in range(3)]
        assert [i for share, _ in shares for i in share] == list(range(parts))
        assert {most for _, most in shares} == {max(len(share) for share, _ in shares)}
