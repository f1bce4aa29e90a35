"""What a chip will execute: the kernels compiled for a target on any machine, and their machine code counted.

Triton compiles for AMD and NVIDIA chips without having one. For each kernel the report names the matrix instructions
that take FP4 or FP8 blocks with their scales, the conversions to and from FP4, registers, spills, scratch and shared
memory, and, from the shapes alone, the operations and the bytes of a call.
"""

from __future__ import annotations

import math
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from mxfp4.numerics.formats import ELEMS
from mxfp4.numerics.hadamard import Hadamard
from mxfp4.numerics.operand_plan import OperandPlan
from mxfp4.numerics.scale_rules import DEFAULT_SCALE_RULE
from mxfp4.numerics.tensor import MXTensor

ROWS, COLUMNS, INNER = 16384, 4096, 4096  # Llama-8B at micro-batch 2: tokens, out and in features


@dataclass(frozen=True)
class Arch:
    """A target: Triton's backend, architecture and warp width, and the level of `block_native.py` that it can use."""

    backend: str
    arch: str | int
    warp: int
    level: int


ARCHS = {
    "gfx950": Arch("hip", "gfx950", 64, 950),
    "gfx942": Arch("hip", "gfx942", 64, 0),
    "sm_100": Arch("cuda", 100, 32, 100),
    "sm_90": Arch("cuda", 90, 32, 90),
}


@dataclass(frozen=True)
class Report:
    """One kernel on one target. Counts are of instructions in the code, each once however often it runs."""

    kernel: str
    arch: str
    matrix: dict[str, int]
    """Matrix instructions by mnemonic."""
    conversions: dict[str, int]
    """FP4 and FP8 conversions by mnemonic."""
    instructions: int
    registers: int
    """Vector registers a thread (AMD: of both kinds)."""
    spills: int
    """Registers spilled (AMD), or bytes of stack a thread (NVIDIA)."""
    scratch: int
    """Bytes of memory a thread that stand in for registers."""
    shared: int
    """Bytes of LDS or shared memory a program."""
    flops: int
    """Floating-point operations of a call on the shape below (a multiply-add is two)."""
    bytes: int
    """Fewest bytes a call moves: each input read once, each output written once."""
    shape: str

    def as_json(self) -> dict:
        return asdict(self)


def report(kernel: str, arch: str) -> Report:
    """Compile `kernel` (a name in KERNELS) for `arch` (a name in ARCHS) and count. Needs Triton, not the chip."""
    return report_of(kernel, KERNELS[kernel], arch)


def tile_report(tile: int, arch: str) -> Report:
    """The same of the FP4 GEMM with one of the tiles that `kernels/triton/tiles.py` has for `arch`."""
    return report_of(f"gemm mxfp4, tile {tile}", _gemm("e2m1", "1d", torch.bfloat16, tile=tile), arch)


def report_of(kernel: str, build: Callable, arch: str) -> Report:
    """`report` of what `build` gives for a target."""
    target = ARCHS[arch]
    function, arguments, options, flops, moved, shape = build(target)
    compiled = compile_for(target, function, arguments, options)
    count = _count_amd if target.backend == "hip" else _count_nvidia
    return Report(
        kernel, arch, **count(compiled), shared=compiled.metadata.shared, flops=flops, bytes=moved, shape=shape
    )


def compile_for(target: Arch, function, arguments: dict, options: dict):
    """`function` compiled as a launch with these arguments would: tensors aligned, sizes specialised as Triton does."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = function.arg_names
    fixed = {p.name for p in function.params if p.do_not_specialize}
    signature, constants, attributes = {}, {}, {}
    for name, value in {**arguments, **{k: v for k, v in options.items() if k in names}}.items():
        place = (names.index(name),)
        if isinstance(value, Tensor):
            signature[name] = f"*{_TYPES[value.dtype]}"
            attributes[place] = [["tt.divisibility", 16]]
        elif name in arguments and value is not None and (value != 1 or name in fixed):
            signature[name] = "i64" if abs(value) >= 2**31 else "i32"
            if value % 16 == 0 and name not in fixed:
                attributes[place] = [["tt.divisibility", 16]]
        else:
            signature[name], constants[name] = "constexpr", value
    source = ASTSource(function, {name: signature[name] for name in names}, constexprs=constants, attrs=attributes)
    build = {k: v for k, v in options.items() if k not in names}
    return triton.compile(source, target=GPUTarget(target.backend, target.arch, target.warp), options=build)


_TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
}


def _count_amd(compiled) -> dict:
    text = compiled.asm["amdgcn"]

    def field(name: str) -> int:
        return int(re.search(rf"\.{name}:\s*(\d+)", text).group(1))

    mnemonics = re.findall(r"^\s+([vs]_\w+|ds_\w+|buffer_\w+|global_\w+|scratch_\w+|flat_\w+)", text, re.MULTILINE)
    return {
        "matrix": dict(Counter(m for m in mnemonics if "mfma" in m)),
        "conversions": dict(Counter(m for m in mnemonics if re.match(r"v_cvt_\w*(fp4|fp8|bf8)", m))),
        "instructions": len(mnemonics),
        "registers": field("vgpr_count"),
        "spills": field("vgpr_spill_count") + field("sgpr_spill_count"),
        "scratch": field("private_segment_fixed_size"),
    }


def _count_nvidia(compiled) -> dict:
    ptx = compiled.asm["ptx"]
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        sass = _tool("nvdisasm", "-c", cubin)
        usage = _tool("cuobjdump", "-res-usage", cubin)
    mnemonics = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9_.]*)", sass, re.MULTILINE)
    matrix = re.findall(r"\b(tcgen05\.mma[\w.:]*|wgmma\.mma_async[\w.]*|mma\.sync[\w.]*)", ptx)
    # Each of the pieces of an inline assembly block counts.
    conversions = re.findall(r"\b(cvt\.[\w.]*(?:e2m1|e4m3|e5m2)[\w.]*)", ptx)
    stack = int(re.search(r"STACK:(\d+)", usage).group(1))
    return {
        "matrix": dict(Counter(matrix)),
        "conversions": dict(Counter(conversions)),
        "instructions": len(mnemonics),
        "registers": int(re.search(r"REG:(\d+)", usage).group(1)),
        "spills": stack,
        "scratch": stack + int(re.search(r"LOCAL:(\d+)", usage).group(1)),
    }


def _tool(name: str, *arguments) -> str:
    """Run one of the binary tools that Triton brings along."""
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return subprocess.run([path, *map(str, arguments)], check=True, capture_output=True, text=True).stdout


# The kernels, as (function, arguments, options, FLOPs, bytes, shape) for a target.


def orientation(
    hadamard: int = 0,
    *,
    block: str = "1d",
    elem: str = "e2m1",
    scale_rule: str = DEFAULT_SCALE_RULE,
    stochastic: bool = False,
    dtype: torch.dtype | None = None,
) -> OperandPlan:
    """A plan: packed E2M1 under the default rule, unless told otherwise."""
    rounding, rotation = "stochastic" if stochastic else "nearest", Hadamard(hadamard) if hadamard else None
    return OperandPlan(elem=elem, block=block, scale_rule=scale_rule, rounding=rounding, rotation=rotation, dtype=dtype)


def _quantize(row: OperandPlan | None, col: OperandPlan | None) -> Callable:
    def build(target: Arch):
        from mxfp4.numerics.kernels.triton import block_kernel
        from mxfp4.numerics.kernels.triton import quantize as k

        x = torch.empty((1, ROWS, INNER), dtype=torch.bfloat16, device="meta")
        row_out = k.outputs(x, (1, ROWS, INNER), row)
        col_out = k.outputs(x, (1, INNER, ROWS), col)
        seed = torch.empty((), dtype=torch.int64, device="meta")
        _, arguments, options = k.launch(x, row, col, seed, row_out, col_out, target.level, target.warp)
        moved = sum(t.numel() * t.element_size() for t in (x, *row_out, *col_out) if t is not None)
        flops = sum(flops_an_element(how) for how in (row, col) if how is not None) * x.numel()
        return block_kernel.quantize_kernel, arguments, options, flops, moved, f"{ROWS}x{INNER} bf16"

    return build


def flops_an_element(how: OperandPlan) -> int:
    """Adds of the butterfly, its scaling, a comparison for the maximum, the scaling to the block, the rounding."""
    size = how.hadamard
    return (int(math.log2(size)) + 1 if size else 0) + 3


def _operand(rows: int, k: int, elem: str, block: str) -> MXTensor:
    width = k // 2 if ELEMS[elem].bits == 4 else k
    qdata = torch.empty((rows, width), dtype=torch.uint8, device="meta")
    scale = torch.empty((rows // 32 if block == "2d" else rows, k // 32), dtype=torch.uint8, device="meta")
    return MXTensor(qdata, scale, elem, block, -1, (rows, k))


def _gemm(elem: str, block: str, out_dtype: torch.dtype, accumulate: bool = False, tile: int = 0) -> Callable:
    """tile: which of the target's."""

    def build(target: Arch):
        from mxfp4.numerics.kernels.triton import gemm as k
        from mxfp4.numerics.kernels.triton import tiles

        a, b = _operand(ROWS, INNER, elem, block), _operand(COLUMNS, INNER, elem, block)
        out = torch.empty((ROWS, COLUMNS), dtype=out_dtype, device="meta")
        amd = target.backend == "hip"
        chosen = tiles.tiles(amd, fp4=elem == "e2m1")[tile]
        _, arguments, options = k.launch(a, b, out, accumulate, chosen, amd)
        moved = sum(t.numel() * t.element_size() for t in (a.qdata, a.scale, b.qdata, b.scale, out))
        moved += out.numel() * out.element_size() * accumulate
        shape = f"{ROWS}x{COLUMNS}x{INNER} -> {str(out_dtype).removeprefix('torch.')}"
        return k._gemm_kernel, arguments, options, 2 * ROWS * COLUMNS * INNER, moved, shape

    return build


def _unpack(target: Arch):
    from mxfp4.numerics.kernels.triton import gemm as k

    packed = _operand(ROWS, INNER, "e2m1", "1d")
    out = torch.empty((ROWS, INNER), dtype=torch.bfloat16, device="meta")
    _, arguments, options = k.launch_unpack(packed, out)
    moved = sum(t.numel() * t.element_size() for t in (packed.qdata, packed.scale, out))
    return k._unpack_kernel, arguments, options, 2 * out.numel(), moved, f"{ROWS}x{INNER} -> bfloat16"


def _rotate(target: Arch):
    from mxfp4.numerics.kernels.triton import rotate as k

    x = torch.empty((ROWS, INNER), dtype=torch.bfloat16, device="meta")
    out = torch.empty((ROWS, INNER), device="meta")
    _, arguments, options = k.launch(x, out, 16, None, False, True, target.warp)
    flops = 2 * (int(math.log2(16)) + 1) * x.numel()
    moved = sum(t.numel() * t.element_size() for t in (x, out))
    return k.rotate_kernel, arguments, options, flops, moved, f"{ROWS}x{INNER} bf16 -> float32"


_H16, _H32, _SR = orientation(16), orientation(32), orientation(16, stochastic=True)
_VALUES, _SQUARE = orientation(16, dtype=torch.bfloat16), orientation(block="2d", scale_rule="rceil")
# Kernels that no chip without FP4 matrix instructions is given: there the library's BF16 GEMM runs (`native.py`).
GEMMS = {
    "gemm mxfp4": _gemm("e2m1", "1d", torch.bfloat16),
    "gemm mxfp4 2d": _gemm("e2m1", "2d", torch.bfloat16),
    "gemm mxfp4, accumulate": _gemm("e2m1", "1d", torch.float32, accumulate=True),
    "gemm mxfp8": _gemm("e4m3", "1d", torch.bfloat16),
}
QUANTIZERS = {
    "quantize": _quantize(orientation(), None),
    "quantize h16": _quantize(_H16, None),
    "quantize h16, both": _quantize(_H16, _H16),
    "quantize h32, both": _quantize(_H32, _H32),
    "quantize h16 sr, both": _quantize(_SR, _SR),
    "quantize 2d, both": _quantize(_SQUARE, _SQUARE),
    "quantize mxfp8": _quantize(orientation(elem="e4m3"), None),
    "fake quantize h16, both": _quantize(_VALUES, _VALUES),
    "unpack": _unpack,
    "rotate h16, both axes": _rotate,
}
KERNELS = {**GEMMS, **QUANTIZERS}


def kernels_of(arch: str) -> list[str]:
    """The kernels that run on `arch`."""
    return [*(GEMMS if arch in ("gfx950", "sm_100") else ()), *QUANTIZERS]
