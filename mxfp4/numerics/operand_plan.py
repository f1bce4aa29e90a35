"""OperandPlan: what a GEMM does to one operand, one object from the layer (or `mxfp4.quantize`) to a kernel's launch.

Torch operators take a plan as its text, which holds all of it and survives `torch.export` and saved graphs. A text is
parsed once: `OperandPlan.parse` returns the same object for the same text, and caches further down key on it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from functools import lru_cache

import torch
from torch import Tensor

from mxfp4.numerics.formats import BLOCK, ELEMS, ElemFormat
from mxfp4.numerics.hadamard import Hadamard
from mxfp4.numerics.native import compile_time_constant
from mxfp4.numerics.philox import as_seed, random_signs
from mxfp4.numerics.scale_rules import DEFAULT_SCALE_RULE

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64, "packed": None}
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
PRESCALE = 0.75
"""Factor of a prescaled operand's elements (Tseng et al.); its product is multiplied by the inverse."""


@compile_time_constant
def inverse_prescale() -> float:
    """1 / PRESCALE. A compiler of dynamic shapes would take a module's float for a symbol."""
    return 1 / PRESCALE


@dataclass(frozen=True, eq=False)
class OperandPlan:
    """How one operand is quantized; immutable, printed as its text.

    The derived fields at the end are what kernels ask for, computed once.
    """

    name: str = "-"
    """GEMM and tensor, such as wgrad.x; "-" outside a layer."""
    format: str = "mxfp4"
    """fp32, bf16, fp8, mxfp8, mxfp4 or nvfp4, as in `Recipe`; "mx" kernels only read `elem`."""
    elem: str = "e2m1"
    block: str = "1d"
    scale_rule: str = DEFAULT_SCALE_RULE
    """The rule as a kernel applies it: of a prescaled operand, to 3/4 of its elements."""
    rounding: str = "nearest"
    rotation: Hadamard | None = None
    """Along the blocks, before their maximum."""
    both_axes: int = 0
    """Size of a rotation along both axes of the matrix, before everything else; 0: none."""
    prescaled: bool = False
    """Elements are multiplied by PRESCALE first."""
    stream: int = 0
    """Coordinate of the random numbers beside seed and element; stream // 2 that of random signs."""
    axis: int = -1
    """The axis that the GEMM contracts, along which blocks lie."""
    dtype: torch.dtype | None = None
    """Of values; None: packed, as codes and scales."""
    transposed: bool = False
    """Packed along the other axis: one quantization serves two GEMMs, and this one reads its transpose."""

    fmt: ElemFormat = field(init=False, repr=False)
    hadamard: int = field(init=False, repr=False)
    """Size of `rotation`, 0 for none."""
    stochastic: bool = field(init=False, repr=False)
    sign_kind: int = field(init=False, repr=False)
    """Of `rotation`: 0 no signs, 1 fixed ones, 2 drawn from the seed."""
    sign_words: tuple[int, int, int, int] = field(init=False, repr=False)
    """Fixed signs, bit j % 32 of word j // 32 set where sign j is -1."""
    text: str = field(init=False, repr=False)

    def __post_init__(self):
        signs = None if self.rotation is None else self.rotation.signs
        kind = 0 if signs is None else 2 if signs == "seed" else 1
        bits = sum((s < 0) << i for i, s in enumerate(signs)) if kind == 1 else 0
        derived = {
            "fmt": ELEMS[self.elem],
            "hadamard": 0 if self.rotation is None else self.rotation.size,
            "stochastic": self.rounding == "stochastic",
            "sign_kind": kind,
            "sign_words": tuple(bits >> 32 * i & 0xFFFFFFFF for i in range(4)),
            "text": plan_text(**{name: getattr(self, name) for name in _FIELDS}),
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    @staticmethod
    @lru_cache(maxsize=8192)
    def parse(text: str) -> OperandPlan:
        """The plan of a text, always the same object."""
        return OperandPlan(**{name: _READ[name](part) for name, part in zip(_FIELDS, text.split(), strict=True)})

    def but(self, **changes) -> OperandPlan:
        """The plan with some fields changed."""
        return OperandPlan.parse(replace(self, **changes).text)

    @property
    def is_random(self) -> bool:
        """Whether it needs a seed."""
        return self.stochastic or self.sign_kind == 2

    def signs(self, seed: Tensor | None, device: torch.device) -> Tensor | None:
        """The signs of `rotation`, FP32 [hadamard] on `device`, or None; `seed` (0-d int64) for random ones."""
        if self.sign_kind == 2:
            return random_signs(as_seed(seed, device), self.hadamard, self.stream // 2)
        return None if self.rotation is None else self.rotation.resolve(None, 0, device)

    def __eq__(self, other) -> bool:
        return isinstance(other, OperandPlan) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)

    def __str__(self) -> str:
        return self.text

    def __deepcopy__(self, memo) -> OperandPlan:
        return self

    def __reduce__(self):
        return OperandPlan.parse, (self.text,)


_FIELDS = tuple(f.name for f in fields(OperandPlan) if f.init)


def plan_text(
    name: str = "-",
    format: str = "mxfp4",
    elem: str = "e2m1",
    block: str = "1d",
    scale_rule: str = DEFAULT_SCALE_RULE,
    rounding: str = "nearest",
    rotation: Hadamard | None = None,
    both_axes: int = 0,
    prescaled: bool = False,
    stream: int = 0,
    axis: int = -1,
    dtype: torch.dtype | None = None,
    transposed: bool = False,
) -> str:
    """`OperandPlan(...).text`, by string operations alone, which torch.compile traces."""
    rotated = "-"
    if rotation is not None:
        signs = rotation.signs
        if isinstance(signs, tuple):
            signs = "".join(["-" if s < 0 else "+" for s in signs])
        rotated = f"h{rotation.size}:{signs or ''}"
    output = _DTYPE_NAMES[dtype]
    return (
        f"{name} {format} {elem} {block} {scale_rule} {rounding} {rotated} {both_axes} {int(prescaled)} {stream} {axis} "
        f"{output} {int(transposed)}"
    )


def _rotation(text: str) -> Hadamard | None:
    if text == "-":
        return None
    size, signs = text[1:].split(":")
    if not signs or signs == "seed":
        return Hadamard(int(size), signs or None)
    return Hadamard(int(size), tuple(-1 if s == "-" else 1 for s in signs))


_READ = dict.fromkeys(_FIELDS, str) | {
    "rotation": _rotation,
    "both_axes": int,
    "prescaled": lambda text: text == "1",
    "stream": int,
    "axis": int,
    "dtype": DTYPES.__getitem__,
    "transposed": lambda text: text == "1",
}


def output_shapes(shape: tuple[int, ...], plan: OperandPlan) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """Shapes of (values, None) or (codes, scale bytes) of a tensor of `shape`, its blocks along the last axis."""
    *rows, k = shape
    if plan.dtype is not None:
        return shape, None
    scale_rows = [*rows[:-1], rows[-1] // BLOCK] if plan.block == "2d" else rows
    return (*rows, k // 2 if plan.fmt.bits == 4 else k), (*scale_rows, k // BLOCK)
