"""Counter-based random bits: Philox4x32 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).

Seven rounds, the fewest that pass BigCrush in that paper. A value depends on (seed, element index, stream) alone, so
every backend draws the same bits in any order: `tl.philox` in the Triton kernels, plain int64 arithmetic here. One
call gives four 32-bit words, so eight neighbouring elements share one: element i uses call i // 8, word (i % 8) // 2,
the low half when i is even.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mxfp4.numerics.formats import as_index

ROUNDS = 7
_MASK = 0xFFFFFFFF
_MUL_A, _MUL_B = 0xD2511F53, 0xCD9E8D57
_KEY_A, _KEY_B = 0x9E3779B9, 0xBB67AE85

# Counter word 2: what the bits are for. Word 3 is the caller's stream.
FOR_ROUNDING, FOR_SIGNS = 0, 1


def philox(seed: Tensor, index: Tensor, purpose: int, stream: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four 32-bit words (in int64 tensors shaped like `index`) for each 64-bit counter in `index`.

    `seed` is a 0-d int64 tensor, the 64-bit key.
    """
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    c0, c1 = index & _MASK, index >> 32
    c2 = torch.full_like(index, purpose)
    c3 = torch.full_like(index, stream)
    for _ in range(ROUNDS):
        a, b = c0 * _MUL_A, c2 * _MUL_B  # the product wraps at 64 bits, which keeps both halves right
        c0, c1, c2, c3 = ((b >> 32) & _MASK) ^ c1 ^ k0, b & _MASK, ((a >> 32) & _MASK) ^ c3 ^ k1, a & _MASK
        k0, k1 = (k0 + _KEY_A) & _MASK, (k1 + _KEY_B) & _MASK
    return c0, c1, c2, c3


def _philox_words(seed: int, purpose: int, stream: int) -> tuple[int, int, int, int]:
    """`philox` of counter 0, in Python's integers."""
    k0, k1 = seed & _MASK, seed >> 32 & _MASK
    c0, c1, c2, c3 = 0, 0, purpose, stream
    for _ in range(ROUNDS):
        a, b = c0 * _MUL_A, c2 * _MUL_B
        c0, c1, c2, c3 = b >> 32 ^ c1 ^ k0, b & _MASK, a >> 32 ^ c3 ^ k1, a & _MASK
        k0, k1 = k0 + _KEY_A & _MASK, k1 + _KEY_B & _MASK
    return c0, c1, c2, c3


def random16(seed: Tensor, shape: tuple[int, ...], stream: int, first: int = 0) -> Tensor:
    """Uniform 16-bit integers (int32) for a tensor of `shape`.

    `first`, a multiple of 8, is the index of its first element in the tensor that it is a part of.
    """
    count = torch.Size(shape).numel()
    calls = -(-count // 8)
    index = torch.arange(first // 8, first // 8 + calls, device=seed.device)
    words = philox(seed, index, FOR_ROUNDING, stream)
    halves = [half for word in words for half in (word & 0xFFFF, word >> 16)]
    return torch.stack(halves, dim=-1).to(torch.int32).flatten()[:count].view(shape)


def random_signs(seed: Tensor, size: int, stream: int) -> Tensor:
    """`size` random signs (FP32, +1 or -1): bit j % 32 of word j // 32, one call for each 128."""
    return _draw_signs(seed, size, stream)


# An operator, opaque to torch.compile: Inductor miscompiles `seed >> 32` for a negative int that it made dynamic.
_library = torch.library.Library("mxfp4", "FRAGMENT")
_library.define("random_signs(Tensor seed, int size, int stream) -> Tensor")


@torch.library.impl(_library, "random_signs", "CompositeExplicitAutograd")
def _random_signs(seed, size, stream):
    if seed.device.type == "cpu" and size <= 128:  # a single call: no need for tensors
        words = _philox_words(seed.item(), FOR_SIGNS, stream)
        signs = [1.0 - 2.0 * (words[j // 32] >> j % 32 & 1) for j in range(size)]
        return torch.tensor(signs, dtype=torch.float32)
    words = torch.stack(philox(seed, torch.arange(-(-size // 128), device=seed.device), FOR_SIGNS, stream), dim=-1)
    bits = (words.flatten()[:, None] >> torch.arange(32, device=seed.device)) & 1
    return 1.0 - 2.0 * bits.flatten()[:size].float()


@torch.library.register_fake("mxfp4::random_signs", lib=_library)
def _random_signs_shape(seed, size, stream):
    return seed.new_empty(size, dtype=torch.float32)


_draw_signs = torch.ops.mxfp4.random_signs.default


def as_seed(seed: int | Tensor | None, device: torch.device) -> Tensor:
    """`seed` as a 0-d int64 tensor on `device`; None draws the next one from torch's default CPU generator.

    Raises TypeError for anything but an integer (or one-element int64 tensor) and ValueError outside 64 bits.
    """
    if seed is None:
        return torch.randint(2**62, (), dtype=torch.int64, device="cpu").to(device)
    if isinstance(seed, Tensor):
        if seed.dtype != torch.int64 or seed.numel() != 1:
            raise TypeError(f"seed must be one int64, got a tensor of {seed.dtype} with {seed.numel()} elements")
        return seed.reshape(()).to(device)
    seed = as_index("seed", seed)
    if not -(2**63) <= seed < 2**64:
        raise ValueError(f"seed={seed} does not fit in 64 bits")
    return torch.tensor(seed - 2**64 if seed >= 2**63 else seed, dtype=torch.int64, device=device)
