"""What is done with packed operands, as torch operators opaque to torch.compile: multiply, unpack, turn.

A packed matrix [R, K] is codes (uint8 [R, K / 2] for E2M1, else [R, K]) and E8M0 bytes (uint8 [R, K / 32], for 2D
blocks [R / 32, K / 32]), or FP8 codes and one FP32 factor for the tensor, its block then called "tensor". Each runs
in Triton on a GPU and in torch on the CPU, where Triton interprets the GEMM.
"""

from __future__ import annotations

import importlib

import torch
from torch import Tensor

from mxfp4.numerics.formats import ELEMS, pack_nibbles, transposed_copy
from mxfp4.numerics.fp8 import FP8, fp8_scale
from mxfp4.numerics.gemm_backends.choice import multiply
from mxfp4.numerics.gemm_backends.library import gemm, gemm_dtype
from mxfp4.numerics.kernels import HAS_TRITON
from mxfp4.numerics.ops.block_quantize import scaled_fp8
from mxfp4.numerics.tensor import MXTensor

_library = torch.library.Library("mxfp4", "FRAGMENT")
_library.define("unpack(Tensor qdata, Tensor scale, str elem, str block, ScalarType dtype, bool late=False) -> Tensor")
_library.define("turn(Tensor qdata, str elem) -> Tensor")
_operand = "Tensor {0}, Tensor {0}_scale, str {0}_elem, str {0}_block"
_library.define(f"gemm_packed({_operand.format('a')}, {_operand.format('b')}, ScalarType dtype) -> Tensor")
_library.define("fp8_codes(Tensor x, str elem, bool turned) -> (Tensor, Tensor)")
_library.define("fp8_codes_pair(Tensor x, str elem) -> (Tensor, Tensor, Tensor)")
_fp8 = "Tensor {0}, Tensor {0}_factor, str {0}_elem"
_library.define(f"gemm_fp8({_fp8.format('a')}, {_fp8.format('b')}, ScalarType dtype) -> Tensor")
ANY = "CompositeExplicitAutograd"


def _per_byte(elem: str) -> int:
    return 2 if ELEMS[elem].bits == 4 else 1


def _wrap(qdata: Tensor, scale: Tensor, elem: str, block: str) -> MXTensor:
    return MXTensor(qdata, scale, elem, block, -1, (*qdata.shape[:-1], qdata.shape[-1] * _per_byte(elem)))


@torch.library.impl(_library, "unpack", ANY)
def _unpack(qdata, scale, elem, block, dtype, late=False):
    if block == "tensor":
        return qdata.view(FP8[elem]).to(dtype)
    return _wrap(qdata, scale, elem, block).dequantize(dtype)


@torch.library.register_fake("mxfp4::unpack", lib=_library)
def _unpack_shape(qdata, scale, elem, block, dtype, late=False):
    return qdata.new_empty((*qdata.shape[:-1], qdata.shape[-1] * _per_byte(elem)), dtype=dtype)


@torch.library.impl(_library, "turn", ANY)
def _turn(qdata, elem):
    codes = transposed_copy(_wrap(qdata, qdata, elem, "1d").codes())
    return pack_nibbles(codes) if _per_byte(elem) == 2 else codes


@torch.library.register_fake("mxfp4::turn", lib=_library)
def _turn_shape(qdata, elem):
    per_byte = _per_byte(elem)
    return qdata.new_empty((qdata.shape[1] * per_byte, qdata.shape[0] // per_byte))


@torch.library.impl(_library, "gemm_packed", ANY)
def _gemm_packed(a, a_scale, a_elem, a_block, b, b_scale, b_elem, b_block, dtype):
    a, b = _wrap(a, a_scale, a_elem, a_block), _wrap(b, b_scale, b_elem, b_block)
    product = multiply(a, b, dtype)
    if product is not None:
        return product
    return gemm(*(unpack(x.qdata, x.scale, x.elem, x.block, gemm_dtype(x.device)) for x in (a, b)), dtype)


@torch.library.register_fake("mxfp4::gemm_packed", lib=_library)
def _gemm_packed_shape(a, a_scale, a_elem, a_block, b, b_scale, b_elem, b_block, dtype):
    return a.new_empty((a.shape[0], b.shape[0]), dtype=dtype)


def _fp8_codes_of(x: Tensor, elem: str, along: bool, transposed: bool) -> tuple[Tensor | None, Tensor | None, Tensor]:
    scale = fp8_scale(x, elem)
    value = scaled_fp8(x, scale, elem, torch.bfloat16)  # which holds FP8 exactly
    codes = value.to(FP8[elem]).contiguous().view(torch.uint8)
    return codes if along else None, transposed_copy(codes) if transposed else None, scale.reciprocal()


def _implement_codes(key: str, codes_of) -> None:
    def fp8_codes(x, elem, turned):
        along, across, factor = codes_of(x, elem, not turned, turned)
        return (across if turned else along), factor

    _library.impl("fp8_codes", fp8_codes, key)
    _library.impl("fp8_codes_pair", lambda x, elem: codes_of(x, elem, True, True), key)


_implement_codes(ANY, _fp8_codes_of)
if HAS_TRITON:

    def _kernels(name: str):
        return importlib.import_module(f"mxfp4.numerics.kernels.triton.{name}")

    @torch.library.impl(_library, "unpack", "CUDA")
    def _unpack_in_triton(qdata, scale, elem, block, dtype, late=False):
        if block == "tensor":
            return qdata.view(FP8[elem]).to(dtype)
        return _kernels("gemm").unpack(_wrap(qdata, scale, elem, block), dtype)

    _library.impl("turn", lambda qdata, elem: _kernels("transpose").turn(qdata, _per_byte(elem)), "CUDA")
    _implement_codes("CUDA", lambda *args: _kernels("fp8").codes(*args))


@torch.library.register_fake("mxfp4::fp8_codes", lib=_library)
def _fp8_codes_shape(x, elem, turned):
    return x.new_empty(x.shape[::-1] if turned else x.shape, dtype=torch.uint8), x.new_empty((), dtype=torch.float32)


@torch.library.register_fake("mxfp4::fp8_codes_pair", lib=_library)
def _fp8_codes_pair_shape(x, elem):
    codes, transposed = (x.new_empty(shape, dtype=torch.uint8) for shape in (x.shape, x.shape[::-1]))
    return codes, transposed, x.new_empty((), dtype=torch.float32)


@torch.library.impl(_library, "gemm_fp8", ANY)
def _gemm_fp8(a, a_factor, a_elem, b, b_factor, b_elem, dtype):
    a, b = a.view(FP8[a_elem]), b.view(FP8[b_elem])
    return torch._scaled_mm(a, b.t(), scale_a=a_factor, scale_b=b_factor, out_dtype=dtype, use_fast_accum=False)


@torch.library.register_fake("mxfp4::gemm_fp8", lib=_library)
def _gemm_fp8_shape(a, a_factor, a_elem, b, b_factor, b_elem, dtype):
    return a.new_empty((a.shape[0], b.shape[0]), dtype=dtype)


# Values [R, K] in `dtype`, a tensor's factor left aside. `late` changes nothing but the call: a compiler would merge a
# backward's with its forward's, and keep the values in between.
unpack = torch.ops.mxfp4.unpack.default
# The codes of [R, K] packed along R, as [K, R / 2]: for square blocks, whose scales need only be transposed.
turn = torch.ops.mxfp4.turn.default
# [M, K] x [N, K] -> [M, N] in FP32 or BF16, by the chip's own FP4 and FP8 units.
gemm_packed = torch.ops.mxfp4.gemm_packed.default
# A matrix [R, K] as FP8 codes under one scale (uint8 [R, K], [K, R] if `turned`), and the FP32 factor that undoes it.
fp8_codes = torch.ops.mxfp4.fp8_codes.default
# The codes of `fp8_codes` in both orientations, [R, K] and [K, R], from one read, and the factor.
fp8_codes_pair = torch.ops.mxfp4.fp8_codes_pair.default
# [M, K] x [N, K] -> [M, N] of two such tensors, factors applied, by the library; K and N multiples of 16.
gemm_fp8 = torch.ops.mxfp4.gemm_fp8.default
