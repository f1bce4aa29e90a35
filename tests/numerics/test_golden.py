"""Quantized bytes, pinned: when one of these digests changes, raise SEMANTICS_VERSION (mxfp4/numerics/version.py).

Run records carry that number in their key. `python tests/numerics/test_golden.py` prints the table for the version at
hand; old versions leave the table when their records leave the repository.
"""

import hashlib
from itertools import product

import pytest
import torch

import mxfp4
from mxfp4 import SEMANTICS_VERSION, Hadamard, quantize
from mxfp4.numerics.ops.block_quantize import draw_seed

ELEMS, RULES = ("e2m1", "e4m3", "e5m2"), ("floor", "even", "ceil", "rceil")
ROTATIONS = (None, Hadamard(16), Hadamard(32), Hadamard(64, "seed"), Hadamard(128, (1, -1, -1, 1) * 32))

GOLDEN = {
    1: {
        "e2m1 nearest": "791d4937bc133a245afde026a8a0f3f56a9b4f73962d83317b712fbdd7a0b200",
        "e2m1 stochastic": "e66b8edcd1aebbcf2400ab15d43dbd89978c04eaf58669f8a8cf1eed7baed554",
        "e4m3 nearest": "c09471397c8c3cc7511bb0fb6ebff5bd2e8b0c66b7b536a1fb8fbc97da6aa241",
        "e4m3 stochastic": "db03cc56ee27e1a5b8361b75b59d1fdc4bab0e9d370597322e93594913fbf09a",
        "e5m2 nearest": "d402f2b7c38097dba2bf47fdcd088c4e478dc9d8b3bf8acff3bfe80cb630e5c0",
        "e5m2 stochastic": "d2ff348b35fa64eea8a4b94e74076ee977a98ad9ee3226a3913529e13b29547b",
        "seeds and streams": "04997d0fac3533bdd770e1293cead2b8cc509fa100fa4600bdd376886c18b028",
    },
}


def fixed_input() -> torch.Tensor:
    """FP32 [64, 128] from integers alone: all signs and mantissas, exponents within 2^-20 and 2^20, some special blocks."""
    i = torch.arange(64 * 128)
    noise = (i * 2654435761 + (i * i % 8191) * 40503) & 0xFFFFFFFF
    exponent = 107 + (noise >> 23) % 9 + (i // 512) * 2
    x = ((noise >> 31 << 31) | exponent << 23 | noise & 0x7FFFFF).to(torch.int32).view(torch.float32).view(64, 128)
    x[1, :32] = 0
    x[2, 32:64] *= 2.0**-126
    x[3, 64] = torch.nan
    x[4, 5] = torch.inf
    return x


def digest(elem: str, rounding: str, x: torch.Tensor) -> str:
    """Of the bytes of every block kind, axis, scale rule and rotation for one element format and rounding."""
    sha = hashlib.sha256()
    for block, axis, rule, rotation in product(("1d", "2d"), (-1, 0), RULES, ROTATIONS):
        if rotation is not None and x.shape[axis] % rotation.size:
            continue
        q = quantize(
            x,
            elem=elem,
            rounding=rounding,
            block=block,
            axis=axis,
            scale_rule=rule,
            hadamard=rotation,
            seed=1234567890123,
        )
        sha.update(q.qdata.numpy().tobytes() + q.scale.numpy().tobytes())
    return sha.hexdigest()


def digests() -> dict[str, str]:
    x = fixed_input()
    table = {f"{e} {r}": digest(e, r, x) for e, r in product(ELEMS, ("nearest", "stochastic"))}
    counter = torch.tensor([42, 0])
    seeds = torch.stack([draw_seed(counter) for _ in range(8)])
    how = {"scale_rule": "floor", "rounding": "stochastic"}
    streams = [mxfp4.fake_quantize(x[8:], **how, seed=s, stream=i) for i, s in enumerate(seeds)]
    table["seeds and streams"] = hashlib.sha256(
        seeds.numpy().tobytes() + torch.stack(streams).numpy().tobytes()
    ).hexdigest()
    return table


def test_the_input_is_the_same_everywhere():
    want = "6ee6cccea5a0ad17"
    assert hashlib.sha256(fixed_input().numpy().tobytes()).hexdigest()[:16] == want


def test_this_version_has_its_digests():
    assert SEMANTICS_VERSION in GOLDEN, "print them with: python tests/numerics/test_golden.py"


@pytest.mark.parametrize(
    "name", [f"{e} {r}" for e, r in product(ELEMS, ("nearest", "stochastic"))] + ["seeds and streams"]
)
def test_bytes_are_those_of_this_semantics_version(name):
    assert digests_once()[name] == GOLDEN[SEMANTICS_VERSION][name], (
        f"quantized bytes of {name!r} changed: a bug, or raise SEMANTICS_VERSION and add its digests here"
    )


_cache: dict[str, str] = {}


def digests_once() -> dict[str, str]:
    if not _cache:
        _cache.update(digests())
    return _cache


if __name__ == "__main__":
    for key, value in digests().items():
        print(f'        "{key}": "{value}",')
