"""What is done with packed operands, as torch operators opaque to torch.compile: multiply, unpack, turn.

A packed matrix [R, K] is codes (uint8 [R, K / 2] for E2M1, else [R, K]) and E8M0 bytes (uint8 [R, K / 32], for 2D
blocks [R / 32, K / 32]). Each runs in Triton on a GPU and in torch on the CPU, where Triton interprets the GEMM.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mxfp4.numerics.formats import ELEMS, pack_nibbles
from mxfp4.numerics.kernels import HAS_TRITON
from mxfp4.numerics.tensor import MXTensor

_library = torch.library.Library("mxfp4", "FRAGMENT")
_library.define("unpack(Tensor qdata, Tensor scale, str elem, str block, ScalarType dtype, bool late=False) -> Tensor")
_library.define("turn(Tensor qdata, str elem) -> Tensor")
_operand = "Tensor {0}, Tensor {0}_scale, str {0}_elem, str {0}_block"
_library.define(f"gemm_packed({_operand.format('a')}, {_operand.format('b')}, ScalarType dtype) -> Tensor")


def _per_byte(elem: str) -> int:
    return 2 if ELEMS[elem].bits == 4 else 1


def _wrap(qdata: Tensor, scale: Tensor, elem: str, block: str) -> MXTensor:
    return MXTensor(qdata, scale, elem, block, -1, (*qdata.shape[:-1], qdata.shape[-1] * _per_byte(elem)))


@torch.library.impl(_library, "unpack", "CompositeExplicitAutograd")
def _unpack(qdata, scale, elem, block, dtype, late=False):
    x = _wrap(qdata, scale, elem, block)
    if qdata.is_cuda and HAS_TRITON:
        from mxfp4.numerics.kernels import gemm_triton

        return gemm_triton.unpack(x, dtype)
    return x.dequantize(dtype)


@torch.library.register_fake("mxfp4::unpack", lib=_library)
def _unpack_shape(qdata, scale, elem, block, dtype, late=False):
    return qdata.new_empty((*qdata.shape[:-1], qdata.shape[-1] * _per_byte(elem)), dtype=dtype)


@torch.library.impl(_library, "turn", "CompositeExplicitAutograd")
def _turn(qdata, elem):
    if qdata.is_cuda and HAS_TRITON:
        from mxfp4.numerics.kernels import turn_triton

        return turn_triton.turn(qdata, _per_byte(elem))
    codes = _wrap(qdata, qdata, elem, "1d").codes().t().contiguous()
    return pack_nibbles(codes) if _per_byte(elem) == 2 else codes


@torch.library.register_fake("mxfp4::turn", lib=_library)
def _turn_shape(qdata, elem):
    per_byte = _per_byte(elem)
    return qdata.new_empty((qdata.shape[1] * per_byte, qdata.shape[0] // per_byte))


@torch.library.impl(_library, "gemm_packed", "CompositeExplicitAutograd")
def _gemm_packed(a, a_scale, a_elem, a_block, b, b_scale, b_elem, b_block, dtype):
    from mxfp4.numerics.kernels import gemm_triton

    out = a.new_empty((a.shape[0], b.shape[0]), dtype=dtype)
    return gemm_triton.gemm(_wrap(a, a_scale, a_elem, a_block), _wrap(b, b_scale, b_elem, b_block), out)


@torch.library.register_fake("mxfp4::gemm_packed", lib=_library)
def _gemm_packed_shape(a, a_scale, a_elem, a_block, b, b_scale, b_elem, b_block, dtype):
    return a.new_empty((a.shape[0], b.shape[0]), dtype=dtype)


# Values [R, K] in `dtype`. `late` changes nothing but the call: a compiler would merge a backward's with its forward's,
# and keep the values in between.
unpack = torch.ops.mxfp4.unpack.default
# The codes of [R, K] packed along R, as [K, R / 2]: for square blocks, whose scales need only be transposed.
turn = torch.ops.mxfp4.turn.default
# [M, K] x [N, K] -> [M, N] in FP32 or BF16, by the chip's own FP4 and FP8 units.
gemm_packed = torch.ops.mxfp4.gemm_packed.default
