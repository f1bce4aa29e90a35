"""Recipes: which number format each operand of each GEMM of a linear layer takes.

A linear layer is three GEMMs (X: tokens x C_in, W: C_out x C_in, G = dL/dY: tokens x C_out):

| GEMM  | product    | operands a, b | contraction axis |
|-------|------------|---------------|------------------|
| fprop | Y = X W^T  | x, w          | C_in             |
| dgrad | dX = G W   | g, w          | C_out            |
| wgrad | dW = G^T X | g, x          | tokens           |

A recipe's name is a base and its modifiers, `mxfp4-fprop-dgrad+h16`: `recipe(name)` composes it, and any combination
of the parts below is a recipe. GEMMs outside the MXFP4 scope run in FP8, as in P1's controlled study. A recipe that no
name composes is written as JSON (`Recipe.to_json`), which `recipe` reads too. Configurations hold its canonical form,
`Recipe.to_text`.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from itertools import pairwise
from typing import Literal

from mxfp4.numerics.formats import BLOCK, one_of
from mxfp4.numerics.hadamard import SIZES
from mxfp4.numerics.nvfp4 import NV_BLOCK
from mxfp4.numerics.ops.fp8_block import SIDE
from mxfp4.numerics.ops.fp8_delayed import ALGORITHMS
from mxfp4.numerics.ops.quantize import BLOCKS
from mxfp4.numerics.rounding import ROUNDINGS
from mxfp4.numerics.scale_rules import SCALE_RULES

GEMMS = ("fprop", "dgrad", "wgrad")
TENSORS = {"fprop": ("x", "w"), "dgrad": ("g", "w"), "wgrad": ("g", "x")}
ELEMS_OF = {"fp32": (None,), "bf16": (None,), "fp8": ("e4m3", "e5m2"), "mxfp8": ("e4m3", "e5m2"),
            "mxfp4": (None,), "nvfp4": (None,), "fp8-block": ("e4m3",)}  # fmt: skip
FORMATS = tuple(ELEMS_OF)
FP4 = ("mxfp4", "nvfp4")
ROTATIONS = tuple(f"{kind}{size}" for kind in ("h", "rht", "frht", "hh") for size in SIZES)


@dataclass(frozen=True)
class Operand:
    """How one operand of one GEMM is quantized. Raises ValueError for any value that is not listed here."""

    format: str = "bf16"
    """fp32 (as it comes), bf16, fp8 (one FP32 scale a tensor), fp8-block (FP32 scale a block of 128, DeepSeek-V3), mxfp8
    or mxfp4 (E8M0 scale a block of 32), nvfp4 (E4M3 scale a block of 16, one FP32 scale a tensor)."""
    elem: str | None = None
    """e4m3 or e5m2 for the FP8 formats, None elsewhere."""
    block: str = "1d"
    """1d: 1x32 along the contraction axis; 2d: 32x32 (nvfp4: 1x16 and 16x16; fp8-block: 1x128 and 128x128)."""
    scale_rule: str = "even"
    """floor, even, ceil, rceil, for the mx formats; `even` is what ROCm Transformer Engine runs."""
    rounding: str = "nearest"
    """nearest or stochastic."""
    hadamard: str | None = None
    """hN: Sylvester of size N; rhtN: with random signs redrawn at every step; frhtN: with random signs drawn once;
    hhN: Sylvester along both axes, undone on the product, so that square blocks keep serving both orientations."""
    prescaled: bool = False
    """Elements times 3/4 after the floor rule took its scale, 4/3 on the product: nothing clips (Tseng et al.)."""
    delayed: str | None = None
    """most_recent or max: FP8's scale comes from that of a history of maxima (`numerics.ops.fp8_delayed`). None: from the
    tensor itself."""
    pow2_scales: bool = False
    """fp8-block: scales are rounded up to powers of two."""

    def __post_init__(self):
        one_of("format", self.format, FORMATS)
        one_of(f"elem of format {self.format!r}", self.elem, ELEMS_OF[self.format])
        one_of("block", self.block, BLOCKS)
        one_of("scale_rule", self.scale_rule, SCALE_RULES)
        one_of("rounding", self.rounding, ROUNDINGS)
        one_of("hadamard", self.hadamard, (None, *ROTATIONS))
        if self.prescaled and (self.format, self.scale_rule) != ("mxfp4", "floor"):
            raise ValueError(
                f"prescaled needs format 'mxfp4' and scale_rule 'floor', got {self.format!r}, {self.scale_rule!r}"
            )
        one_of("delayed", self.delayed, (None, *ALGORITHMS))
        if self.delayed and (self.format, self.rounding, self.hadamard) != ("fp8", "nearest", None):
            raise ValueError(
                f"delayed needs format 'fp8', rounding 'nearest' and no hadamard, got {self.format!r}, "
                f"{self.rounding!r}, {self.hadamard!r}"
            )
        if self.pow2_scales and self.format != "fp8-block":
            raise ValueError(f"pow2_scales needs format 'fp8-block', got {self.format!r}")

    @property
    def is_mx(self) -> bool:
        return self.format in ("mxfp8", "mxfp4")

    @property
    def block_size(self) -> int:
        """Elements that share a scale along an axis; 1 for formats without blocks."""
        return {"mxfp8": BLOCK, "mxfp4": BLOCK, "nvfp4": NV_BLOCK, "fp8-block": SIDE}.get(self.format, 1)

    @property
    def two_sided(self) -> bool:
        return (self.hadamard or "").startswith("hh")

    @property
    def transposable(self) -> bool:
        """Whether one quantization serves both orientations: square blocks, rotated along both axes or neither."""
        return self.block_size > 1 and self.block == "2d" and (self.hadamard is None or self.two_sided)

    @property
    def is_random(self) -> bool:
        return self.rounding == "stochastic" or (self.hadamard or "").startswith("rht")

    def __str__(self) -> str:
        parts = [self.format if self.elem is None else f"{self.format} {self.elem}"]
        if self.block_size > 1:
            parts += [self.block, self.scale_rule] if self.is_mx else [self.block]
        if self.pow2_scales:
            parts.append("pow2")
        if self.delayed:
            parts.append(f"delayed {self.delayed}")
        if self.rounding == "stochastic":
            parts.append("sr")
        if self.prescaled:
            parts.append("x3/4")
        return " ".join(parts + ([self.hadamard] if self.hadamard else []))


@dataclass(frozen=True)
class Gemm:
    """The two operands of a GEMM, in the order of the module's table. They share one rotation, so that it cancels."""

    a: Operand = Operand()
    b: Operand = Operand()

    def __post_init__(self):
        if self.a.hadamard != self.b.hadamard:
            raise ValueError(
                f"the operands of a GEMM must share one rotation, got {self.a.hadamard!r} and {self.b.hadamard!r}"
            )


@dataclass(frozen=True)
class Override:
    """Other GEMMs for some layers: `layers` is a pattern over full names, alternatives apart by `|`."""

    layers: str
    fprop: Gemm
    dgrad: Gemm
    wgrad: Gemm

    def matches(self, fqn: str) -> bool:
        return any(fnmatchcase(fqn, pattern) for pattern in self.layers.split("|"))


@dataclass(frozen=True)
class Recipe:
    """The three GEMMs of every converted linear layer, and the layers that differ. Immutable."""

    name: str
    fprop: Gemm = Gemm()
    dgrad: Gemm = Gemm()
    wgrad: Gemm = Gemm()
    overrides: tuple[Override, ...] = ()
    requantize: bool = False
    """Double quantization (TetraJet): the backward quantizes the forward's quantized X and W, not their sources."""
    bf16_tail: float = 0.0
    """Share of the last blocks (`layers.N` in their layers' names, see BLOCK_LISTS) that stays in BF16."""
    quest: bool = False
    """Quartet's forward: every GEMM reads X and W as `training.quest` projects them on MXFP4, exact in BF16."""

    def __post_init__(self):
        if not 0 <= self.bf16_tail < 1:
            raise ValueError(f"bf16_tail={self.bf16_tail!r} is not allowed; it lies in [0, 1)")
        if self.requantize and any(pair.a.hadamard for pair in (self.fprop, self.dgrad, self.wgrad)):
            raise ValueError(f"recipe {self.name!r}: requantize has no meaning with a rotation, which differs by GEMM")
        if self.quest and (self.requantize or self.fprop != Gemm()):
            raise ValueError(f"recipe {self.name!r}: quest projects X and W, so fprop takes them in bf16 as they are")
        for part in (self, *self.overrides):
            _one_history(part)

    def for_layer(
        self, fqn: str, n_layers: int = 0, *, index: int | None = None, aliases: tuple[str, ...] = ()
    ) -> Recipe:
        """The recipe of the layer called `fqn` in a model of `n_layers` blocks, without overrides or tail.

        index: the number of the layer's block, where the name does not say it. aliases: other names of the layer that
        overrides may mean.
        """
        part = self.part_of(fqn, n_layers, index=index, aliases=aliases)
        if part == "tail":
            return _interned(Recipe(self.name, **BASES["bf16"]))
        gemms = {gemm: getattr(part, gemm) for gemm in GEMMS} if isinstance(part, Override) else {}
        return _interned(replace(self, **gemms, overrides=(), bf16_tail=0.0))

    def part_of(
        self, fqn: str, n_layers: int = 0, *, index: int | None = None, aliases: tuple[str, ...] = ()
    ) -> Literal["main", "tail"] | Override:
        """The part of the recipe that a layer takes: its BF16 tail, an override, or what all others take."""
        index = layer_index(fqn) if index is None else index
        if index is not None and n_layers and index >= n_layers - self.tail_of(n_layers):
            return "tail"
        return next((o for o in self.overrides if any(o.matches(name) for name in (fqn, *aliases))), "main")

    def tail_of(self, n_layers: int) -> int:
        """How many of `n_layers` blocks are in the BF16 tail."""
        return round(self.bf16_tail * n_layers)

    def operands(self) -> dict[tuple[str, str], Operand]:
        """{(gemm, tensor): operand} of the six operands, overrides left out."""
        pairs = {gemm: getattr(self, gemm) for gemm in GEMMS}
        return {(g, t): op for g, p in pairs.items() for t, op in zip(TENSORS[g], (p.a, p.b), strict=True)}

    @property
    def is_random(self) -> bool:
        return any(op.is_random for op in self.operands().values())

    @property
    def is_delayed(self) -> bool:
        """Whether an operand is scaled by a history, which is then state of the layer."""
        return any(op.delayed for op in self.operands().values())

    def to_nearest(self) -> Recipe:
        """The same recipe, rounding to nearest wherever it rounds stochastically."""

        def gemms(part: Recipe | Override) -> dict[str, Gemm]:
            pairs = {name: getattr(part, name) for name in GEMMS}
            return {g: Gemm(*(replace(op, rounding="nearest") for op in (p.a, p.b))) for g, p in pairs.items()}

        return replace(self, **gemms(self), overrides=tuple(replace(o, **gemms(o)) for o in self.overrides))

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    def to_text(self) -> str:
        """The canonical text that `recipe` reads as this recipe: its name if that is enough, else JSON without defaults.

        A recipe that has a built-in recipe's name and another content gives a text that `recipe` refuses.
        """
        try:
            if recipe(self.name) == self:
                return self.name
        except ValueError:
            pass
        return json.dumps(_plain(self), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Recipe:
        """The inverse of `to_json`. Fields that are left out have their default value. Raises ValueError in one line for
        what is not JSON, an unknown field (with the known ones) or a value of another type."""
        try:
            return _build(cls, json.loads(text))
        except json.JSONDecodeError as error:
            raise ValueError(f"not JSON: {error.msg} at line {error.lineno}, column {error.colno}") from None

    def __str__(self) -> str:
        lines = [f"recipe {self.name}"]
        for title, part in [("", self), *((f" ({o.layers})", o) for o in self.overrides)]:
            for gemm in GEMMS:
                pair, (a, b) = getattr(part, gemm), TENSORS[gemm]
                lines.append(f"  {gemm}{title}: {a} {pair.a} | {b} {pair.b}")
        if self.quest:
            lines.append("  X and W projected on mxfp4 by QuEST before all three")
        if self.requantize:
            lines.append("  backward quantizes the quantized X and W again")
        if self.bf16_tail:
            lines.append(f"  last {self.bf16_tail:.0%} of the layers in bf16")
        return "\n".join(lines)


def _one_history(part: Recipe | Override) -> None:
    """ValueError where the two operands of a tensor take their scale from its history in two ways."""
    for tensor in "xwg":
        ops = (op for g in GEMMS for t, op in zip(TENSORS[g], (getattr(part, g).a, getattr(part, g).b), strict=True)
               if t == tensor)  # fmt: skip
        ways = sorted({op.delayed for op in ops if op.delayed})
        if len(ways) > 1:
            raise ValueError(f"tensor {tensor!r} is delayed in two ways, {ways[0]!r} and {ways[1]!r}; allowed is one")


BLOCK_LISTS = ("layers", "layer", "h", "blocks", "block")
"""What models call their lists of blocks."""


@lru_cache(maxsize=1024)
def _interned(r: Recipe) -> Recipe:
    """One object for equal recipes, so that compiled code serves every layer that has one."""
    return r


def layer_index(fqn: str) -> int | None:
    """The N of `layers.N`, or of another list of blocks (the outermost one), in a layer's full name."""
    return next((int(b) for a, b in pairwise(fqn.split(".")) if a in BLOCK_LISTS and b.isdigit()), None)


_OWN_NAME = re.compile(r"[A-Za-z0-9][\w.+-]{0,63}")
_JSON_TYPES = {
    "str": (str, "text"), "str | None": ((str, type(None)), "text or null"), "bool": (bool, "true or false"),
    "float": ((int, float), "a number"), "tuple[Override, ...]": (list, "a list"),
}  # fmt: skip


def _build(cls, data):
    """A dataclass of this module from plain JSON data, unknown fields and values of another type refused."""
    if not isinstance(data, dict):
        raise ValueError(f"{cls.__name__} is a JSON object, not {json.dumps(data)[:40]}")
    types = {f.name: f.type for f in fields(cls)}
    for name, value in data.items():
        one_of(f"{cls.__name__} field", name, sorted(types))
        allowed, words = _JSON_TYPES.get(types[name], (object, ""))
        if not isinstance(value, allowed) or (isinstance(value, bool) and allowed is not bool and words):
            raise ValueError(f"{cls.__name__} field {name!r} is {words}, not {json.dumps(value)[:40]}")
    parts = {"fprop": Gemm, "dgrad": Gemm, "wgrad": Gemm, "a": Operand, "b": Operand}
    made = {k: _build(parts[k], v) if k in parts else v for k, v in data.items()}
    made |= {k: tuple(_build(Override, o) for o in v) for k, v in data.items() if k == "overrides"}
    missing = [f.name for f in fields(cls) if f.default is MISSING and f.name not in made]
    if missing:
        raise ValueError(f"{cls.__name__} field {missing[0]!r} is missing; needed: {', '.join(missing)}")
    return cls(**made)


def _plain(part: Recipe | Override | Gemm | Operand) -> dict:
    """Plain JSON data without the fields that have their default value, so that a field added later changes no text."""

    def plain(value):
        return (
            _plain(value) if is_dataclass(value) else [plain(v) for v in value] if isinstance(value, tuple) else value
        )

    values = {f.name: (getattr(part, f.name), f.default) for f in fields(part)}
    return {name: plain(value) for name, (value, default) in values.items() if default is MISSING or value != default}


# Composition. A modifier changes the operands of a recipe in one format, FP4 as a rule, or some of them.
def _gemms(x: Operand, w: Operand, g: Operand) -> dict[str, Gemm]:
    return {"fprop": Gemm(x, w), "dgrad": Gemm(g, w), "wgrad": Gemm(g, x)}


def _change(
    r: Recipe, gemms: tuple[str, ...] = GEMMS, tensors: str = "xwg", formats: tuple[str, ...] = FP4, **changes
) -> Recipe:
    """`r` with `changes` in its operands among `gemms`, `tensors` and `formats`; ValueError where there is none."""
    reached = [(g, t) for (g, t), op in r.operands().items() if g in gemms and t in tensors and op.format in formats]
    if not reached:
        wanted = "FP4" if formats == FP4 else " or ".join(formats)
        raise ValueError(f"none of the operands that it would change is in {wanted}")
    if "hadamard" in changes and any(r.operands()[key].hadamard for key in reached):
        raise ValueError("those operands have a rotation already; allowed is one")
    new = {}
    for gemm in gemms:
        pair = getattr(r, gemm)
        sides = zip((pair.a, pair.b), TENSORS[gemm], strict=True)
        new[gemm] = Gemm(*(replace(op, **changes) if (gemm, t) in reached else op for op, t in sides))
    return replace(r, **new)


_FP8 = _gemms(Operand("fp8", "e4m3"), Operand("fp8", "e4m3"), Operand("fp8", "e5m2"))
_MXFP4 = _gemms(*[Operand("mxfp4")] * 3)
_MXFP8 = _gemms(Operand("mxfp8", "e4m3"), Operand("mxfp8", "e4m3"), Operand("mxfp8", "e4m3"))
_TILE = Operand("fp8-block", "e4m3")
_QUERY_KEY = "*.wq|*.wk|*.q_proj|*.k_proj"


def _scope(*gemms: str) -> dict[str, Gemm]:
    return {g: _MXFP4[g] if g in gemms else _FP8[g] for g in GEMMS}


BASES: dict[str, dict[str, Gemm]] = {
    "fp32": _gemms(*[Operand("fp32")] * 3),
    "bf16": _gemms(*[Operand("bf16")] * 3),
    "fp8": _FP8,
    "fp8-block": _gemms(_TILE, replace(_TILE, block="2d"), _TILE),
    "mxfp8": _MXFP8,
    "mxfp4-fprop": _scope("fprop"),
    "mxfp4-dgrad": _scope("dgrad"),
    "mxfp4-wgrad": _scope("wgrad"),
    "mxfp4-fprop-dgrad": _scope("fprop", "dgrad"),
    "mxfp4": _MXFP4,
    "mxfp4-bwd": {**_MXFP4, "fprop": Gemm(Operand("bf16"), Operand("bf16"))},
    "mxfp4-fwd": {"fprop": _MXFP4["fprop"], "dgrad": Gemm(), "wgrad": Gemm()},
    "nvfp4-plain": _gemms(*[Operand("nvfp4")] * 3),
}

MODIFIERS: dict[str, Callable[[Recipe], Recipe]] = {
    "sr": lambda r: _change(r, rounding="stochastic"),
    "sr-grad": lambda r: _change(r, tensors="g", rounding="stochastic"),
    "sr-bwd": lambda r: _change(r, gemms=("dgrad", "wgrad"), rounding="stochastic"),
    "sr-xw": lambda r: _change(r, tensors="xw", rounding="stochastic"),
    "prescale": lambda r: _change(r, scale_rule="floor", prescaled=True),
    "2d": lambda r: _change(r, block="2d"),
    **{f"2d-{t}": lambda r, t=t: _change(r, tensors=t, block="2d") for t in "xwg"},
    "qk8": lambda r: replace(r, overrides=(*r.overrides, Override(_QUERY_KEY, **_MXFP8))),
    "double": lambda r: replace(r, requantize=True),
    "quest": lambda r: replace(r, fprop=Gemm(), quest=True),
    "delayed": lambda r: _change(r, formats=("fp8",), delayed="most_recent"),
    "delayed-max": lambda r: _change(r, formats=("fp8",), delayed="max"),
    "pow2": lambda r: _change(r, formats=("fp8-block",), pow2_scales=True),
    "tail15": lambda r: replace(r, bf16_tail=0.15),
    **{rule: lambda r, rule=rule: _change(r, scale_rule=rule) for rule in SCALE_RULES},
    **{h: lambda r, h=h: _change(r, hadamard=h) for h in ROTATIONS},
    **{f"{h}-wgrad": lambda r, h=h: _change(r, gemms=("wgrad",), hadamard=h) for h in ROTATIONS},
}

# P2's recipe, and the name under which each ingredient can be taken out: ti2d-no-sr.
TI2D = {"2d": "2d", "rceil": "rceil", "sr": "sr-grad", "qk8": "qk8"}

# Recipes of other papers, by what public code or abstracts say of them (their sources: the book's references).
OTHERS = {
    "nvfp4": "nvfp4-plain+2d-w+sr-grad+frht16-wgrad+tail15",
    "tseng": "mxfp4-bwd+prescale+sr+rht64",
    "tetrajet": "mxfp4+rceil+sr-bwd+double",
    "quartet": "mxfp4-bwd+prescale+sr+rht32+quest",
}

_SCOPES = ("mxfp4-fprop", "mxfp4-fprop-dgrad", "mxfp4")
RECIPES = (
    "bf16", "fp8", "fp8+delayed", "fp8-block", *_SCOPES,
    *(f"{scope}+{stabiliser}" for scope in _SCOPES for stabiliser in ("sr", "rht16", "h16", "h32")),
    "ti2d", *(f"ti2d-no-{ingredient}" for ingredient in TI2D), *OTHERS,
)  # fmt: skip


def recipe(name: str | Recipe) -> Recipe:
    """The recipe called `name`: a base, then modifiers, each after a `+`. A Recipe is returned as it is.

    A text that starts with "{" is a recipe's JSON (`Recipe.to_json`), of any content and with a name of its own.
    Raises ValueError that lists the known bases and modifiers for an unknown one, and for JSON that is not a recipe or
    that gives a known recipe's name to another recipe.
    """
    if isinstance(name, Recipe):
        return name
    if not isinstance(name, str):
        raise TypeError(f"a recipe is named by a string or is a Recipe, got {type(name).__name__}")
    if name.startswith("{"):
        return _of_its_own(Recipe.from_json(name))
    base, *modifiers = name.split("+")
    if base.split("-no-")[0] == "ti2d":
        removed = base.split("-no-")[1:]
        for ingredient in removed:
            one_of(f"ingredient removed in recipe {name!r}:", ingredient, TI2D)
        modifiers = [m for ingredient, m in TI2D.items() if ingredient not in removed] + modifiers
        base = "mxfp4"
    if base in OTHERS:
        base, *parts = OTHERS[base].split("+")
        modifiers = parts + modifiers
    if base not in BASES:
        close = difflib.get_close_matches(base, [*BASES, "ti2d", *OTHERS], n=1)
        hint = f"did you mean {'+'.join([*close, *modifiers])}? " if close else ""
        known = ", ".join(f"+{m}" for m in MODIFIERS)
        raise ValueError(
            f"recipe {name!r} is not known; {hint}named recipes: {', '.join(RECIPES)}; modifiers of any: {known}"
        )
    result = Recipe(name, **BASES[base])
    for modifier in modifiers:
        if modifier not in MODIFIERS:
            raise ValueError(f"modifier {modifier!r} of recipe {name!r} is not known; allowed: {', '.join(MODIFIERS)}")
        try:
            result = MODIFIERS[modifier](result)
        except ValueError as error:
            raise ValueError(f"modifier {modifier!r} of recipe {name!r}: {error}") from None
    return result


def shown_name(text: str) -> str:
    """The name by which tables and run ids show a recipe that a configuration holds as a name or as JSON."""
    return recipe(text).name if text.startswith("{") else text


def _of_its_own(made: Recipe) -> Recipe:
    """A recipe from JSON, if tables can show it by its name. Raises ValueError where the name means another recipe."""
    if not _OWN_NAME.fullmatch(made.name):
        raise ValueError(f"name {made.name[:80]!r} is not allowed; 1 to 64 letters, digits and . _ + - are")
    try:
        known = recipe(made.name)
    except ValueError:  # a new name
        return made
    if known != made:
        raise ValueError(f"name {made.name!r} is taken: a built-in recipe of that name differs; choose another name")
    return made
