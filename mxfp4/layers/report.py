"""What a model computes in which format: `report(model)`, read off the model as it is."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.nn.utils import parametrize

from mxfp4.layers import experts, swap
from mxfp4.layers.linear import MXFP4Linear
from mxfp4.layers.recipe import GEMMS, TENSORS, Recipe
from mxfp4.layers.roles import Names, Roles, own_parameter

PLAIN = "not quantized"
NOTES = "_mxfp4_notes"
READ_BY_ATTENTION = "nn.MultiheadAttention reads its matrices itself"
_TABLE = re.compile(r"embed|position|pos_|token|relative_attention_bias", re.IGNORECASE)


@dataclass
class Notes:
    """What `convert` leaves on a model for its report, by name of layer."""

    parts: dict[str, str] = field(default_factory=dict)
    """Part of the recipe: `all layers`, an override's pattern, `bf16 tail`."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Why a layer was left out."""
    recipes: list[str] = field(default_factory=list)
    unmatched: list[str] = field(default_factory=list)
    """Parts of recipes that no layer took."""
    remarks: list[str] = field(default_factory=list)
    names: Names | None = None


@dataclass(frozen=True)
class LayerReport:
    """One matrix of a model."""

    name: str
    """Full name; the first one, where several places hold it."""
    kind: str
    """Class of the module."""
    shape: tuple[int, ...]
    """[out, in]; of experts [experts, out, in]; of other parameters as they are."""
    weights: int
    """Elements, 0 for a matrix that another line has."""
    flops: float
    """Of the forward, a token: 2 an element, times places, times the share of the tokens that an expert sees."""
    part: str | None
    """The part of the recipe that it takes, None for a layer that is not converted."""
    formats: dict[str, str] | None
    """{gemm: format of its operands}, None for a layer that is not converted."""
    weight_format: str
    """Format in which the GEMMs read the weight."""
    reason: str | None
    """Why it is not converted."""
    unknown: bool = False
    """Whether `convert` does not know its kind, or cannot convert it."""
    places: int = 1


@dataclass(frozen=True)
class Report:
    """The matrices of a model by format, and why those that are not converted are not.

    Shares are of all matrices, embeddings (which no GEMM reads) left out. FLOPs are those of the matrices for one
    token, forward and backward (three GEMMs); of a mixture the active experts; attention's own products not counted.
    """

    recipes: tuple[str, ...]
    converted: tuple[LayerReport, ...]
    left_out: tuple[LayerReport, ...]
    unmatched: tuple[str, ...]
    """Parts of the recipe that no layer took."""
    remarks: tuple[str, ...] = ()

    @property
    def weight_share(self) -> dict[str, float]:
        """{format: share of the matrix weights}."""
        return _shares((line.weight_format, line.weights) for line in (*self.converted, *self.left_out))

    @property
    def flop_share(self) -> dict[str, float]:
        """{format: share of the FLOPs}."""
        lines = (*self.converted, *self.left_out)
        return _shares(
            ((line.formats or {}).get(gemm, PLAIN), line.flops) for line in lines for gemm in GEMMS
        )  # fmt: skip

    @property
    def quantized_weights(self) -> float:
        """Share of the matrix weights that at least one GEMM reads quantized."""
        return sum(share for name, share in self.weight_share.items() if not _plain(name))

    @property
    def quantized_flops(self) -> float:
        """Share of the FLOPs in GEMMs of which at least one operand is quantized."""
        return sum(share for name, share in self.flop_share.items() if not _plain(name))

    def summary(self) -> str:
        """One line."""
        return (
            f"{' and '.join(self.recipes) or 'no recipe'}: {len(self.converted)} matrices converted, "
            f"{len(self.left_out)} left out; {self.quantized_weights:.1%} of the matrix weights and "
            f"{self.quantized_flops:.1%} of the FLOPs quantized"
        )

    def __str__(self) -> str:
        total = sum(line.weights for line in (*self.converted, *self.left_out)) or 1
        work = sum(line.flops for line in (*self.converted, *self.left_out)) or 1
        rows = [("converted", "number", "shape", "part of the recipe", "format of W", "weights", "FLOPs")]
        rows += _rows(self.converted, total, work, lambda line: (line.part or "", line.weight_format))
        gap = len(rows)
        rows += [("left out", "number", "shape", "why", "", "weights", "FLOPs")]
        rows += _rows(self.left_out, total, work, lambda line: (line.reason or "", ""))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        lines.insert(gap, "")
        text = [self.summary(), "", *lines, ""]
        text.append("weights: " + ", ".join(f"{name} {share:.1%}" for name, share in self.weight_share.items()))
        text.append("FLOPs:   " + ", ".join(f"{name} {share:.1%}" for name, share in self.flop_share.items()))
        text += [f"matched no layer: {part}" for part in self.unmatched]
        return "\n".join([*text, *self.remarks])


def report(model: nn.Module) -> Report:
    """What is converted in `model`, what is not and why, with shares of weights and of FLOPs. `print` shows a table."""
    notes = _notes(model)
    roles = Roles(model, notes.names)
    lines = list(_matrices(roles, notes))
    return Report(
        tuple(notes.recipes) or tuple(sorted({m.recipe.name for m in model.modules() if isinstance(m, MXFP4Linear)})),
        tuple(line for line in lines if line.part is not None),
        tuple(line for line in lines if line.part is None),
        tuple(notes.unmatched),
        tuple(notes.remarks),
    )


def _notes(model: nn.Module) -> Notes:
    """The notes of all converted parts of a model, under the names that its layers have here."""
    found = Notes()
    for prefix, m in model.named_modules():
        note = m.__dict__.get(NOTES)
        if note is not None:
            dotted = prefix and prefix + "."
            found.parts |= {dotted + fqn: part for fqn, part in note.parts.items()}
            found.left_out |= {dotted + fqn: reason for fqn, reason in note.left_out.items()}
            for name in ("recipes", "unmatched", "remarks"):
                getattr(found, name).extend(x for x in getattr(note, name) if x not in getattr(found, name))
            found.names = found.names or note.names
    return found


def _matrices(roles: Roles, notes: Notes) -> Iterator[LayerReport]:
    places: dict[int, list[str]] = defaultdict(list)
    for fqn, m in roles.modules.items():
        places[id(m)].append(fqn)
    seen: set[int] = set()
    parts_of_others: set[int] = set()
    for fqn, m in roles.modules.items():
        if fqn != places[id(m)][0] or id(m) in parts_of_others:
            continue
        names = places[id(m)]
        share = sum(roles.active_share(name) for name in names)
        if isinstance(m, nn.Linear) and not isinstance(m, experts.ExpertLinear):
            parts_of_others |= {id(inner) for inner in m.modules() if inner is not m}
            yield _linear(m, names, share, notes, roles, seen)
            if type(m) is not nn.Linear and not isinstance(m, MXFP4Linear):  # what a subclass has beside its weight
                yield from _others(m, names, share, notes, roles, seen)
        elif isinstance(m, experts.QuantizedExperts) or experts.is_experts(m):
            yield from _experts(m, names, share, notes, roles, seen)
        elif not isinstance(m, experts.ExpertLinear):
            yield from _others(m, names, share, notes, roles, seen)


def _key(tensor: Tensor) -> int:
    return id(tensor)


def _linear(m, names, share, notes: Notes, roles: Roles, seen: set[int]) -> LayerReport:
    weight = own_parameter(m, "weight")
    new = weight is None or _key(weight) not in seen
    if weight is not None:
        seen.add(_key(weight))
    elements = m.in_features * m.out_features
    converted = isinstance(m, MXFP4Linear)
    reason = None if converted else next((notes.left_out[n] for n in names if n in notes.left_out), None)
    cls = parametrize.type_before_parametrizations(m)
    unknown = False
    if not converted and reason is None:
        role = why_by_role(roles, names, m)
        reason, unknown = role or _why_by_class(cls), role is None and cls is not nn.Linear
    return LayerReport(
        names[0], cls.__name__, (m.out_features, m.in_features), elements * new, 2.0 * elements * share,
        (_part(notes, names) if converted else None), _formats(m.recipe) if converted else None,
        _weight_format(m.recipe) if converted else PLAIN, reason, unknown, places=len(names),
    )  # fmt: skip


def _why_by_class(cls: type) -> str:
    if cls is nn.modules.linear.NonDynamicallyQuantizableLinear:
        return f"{READ_BY_ATTENTION} ({cls.__name__})"
    return "not chosen" if cls is nn.Linear else f"{cls.__name__} is a subclass of nn.Linear"


def why_by_role(roles: Roles, names: list[str], m: nn.Module) -> str | None:
    """Why a layer is left out by default, from its role alone."""
    for fqn in names:
        why = roles.is_head(fqn, m) or roles.is_router(fqn, m)
        if why:
            return why
        if re.search(r"(^|\.)lora_", fqn):
            return "LoRA adapter"
        if isinstance(m, nn.Linear) and swap.is_linear(m) and m.out_features == 1:
            return "one output"
    return None


def _experts(m, names, share, notes: Notes, roles: Roles, seen: set[int]) -> Iterator[LayerReport]:
    converted = isinstance(m, experts.QuantizedExperts)
    for projection in experts.projections(m):
        n, out_features, in_features = experts.sizes(m, projection)
        stacked = getattr(m, projection)
        elements = n * out_features * in_features
        new, chosen = _key(stacked) not in seen, m.recipes[projection] if converted else None
        seen.add(_key(stacked))
        full = [f"{name}.{projection}" for name in names]
        reason = next((notes.left_out[x] for x in (*full, *names) if x in notes.left_out), "not chosen")
        yield LayerReport(
            full[0], type(m).__name__, (n, out_features, in_features), elements * new, 2.0 * elements * share,
            _part(notes, full) if chosen else None, _formats(chosen) if chosen else None,
            _weight_format(chosen) if chosen else PLAIN, None if chosen else reason, places=len(names),
        )  # fmt: skip


def _others(m, names, share, notes: Notes, roles: Roles, seen: set[int]) -> Iterator[LayerReport]:
    """Matrices in other modules: embeddings count nothing, as no GEMM reads them."""
    if packed := _packed_linear(m):
        kind, (outer, inner) = type(m).__name__, packed
        reason = f"convert does not know {kind} (its weight is no parameter)"
        yield LayerReport(
            names[0], kind, packed, outer * inner, 2.0 * outer * inner * share, None, None, PLAIN,
            notes.left_out.get(names[0]) or reason, unknown=True, places=len(names),
        )  # fmt: skip
    for name, p in m._parameters.items():
        if p is None or _key(p) in seen or sum(size > 1 for size in p.shape) < 2:
            continue
        full = f"{names[0]}.{name}" if names[0] else name
        if name.endswith("_bias") and own_parameter(m, name.removesuffix("_bias")) is not None:
            continue
        kind, table = type(m).__name__, isinstance(m, nn.Embedding | nn.EmbeddingBag)
        table = table or (p.ndim < 4 and (bool(_TABLE.search(full.rpartition(".")[2])) or "Embedding" in kind))
        if isinstance(m, nn.Embedding) and any(
            isinstance(o, nn.Linear) and own_parameter(o, "weight") is p for o in roles.modules.values()
        ):
            reason = "embedding; its matrix is counted at the output head"
            yield LayerReport(full, kind, tuple(p.shape), 0, 0.0, None, None, PLAIN, reason)
            continue
        seen.add(_key(p))
        if table:
            yield LayerReport(full, kind, tuple(p.shape), 0, 0.0, None, None, PLAIN, "embedding")
            continue
        role = why_by_role(roles, names, m)
        known = role or (f"{kind}: no linear layer" if isinstance(m, nn.modules.conv._ConvNd) else None)
        attention = READ_BY_ATTENTION if isinstance(m, nn.MultiheadAttention) and known is None else None
        if chosen := _multiplied_by(m, name):
            yield LayerReport(
                full, kind, tuple(p.shape), p.numel(), 2.0 * p.numel() * share, _part(notes, [full]), _formats(chosen),
                _weight_format(chosen), None, places=len(names),
            )  # fmt: skip
            continue
        dims = "a 3-D parameter" if p.ndim == 3 else "a parameter"
        reason = notes.left_out.get(names[0]) or known or attention or f"convert does not know {kind} ({dims})"
        active = share
        if p.ndim == 3 and share == 1 and (k := roles._top_k(m, roles.modules[names[0].rpartition(".")[0]])):
            active = min(k / p.shape[0], 1.0) if "expert" in full.lower() else 1.0
        yield LayerReport(
            full, kind, tuple(p.shape), p.numel(), 2.0 * p.numel() * active, None, None, PLAIN, reason,
            unknown=known is None and names[0] not in notes.left_out, places=len(names),
        )  # fmt: skip


def _multiplied_by(m: nn.Module, parameter: str) -> Recipe | None:
    """The recipe of the layers that multiply with a parameter, of adapters' modules (`quantized_parameters`)."""
    name = getattr(m, "quantized_parameters", {}).get(parameter)
    inner = next((x for x in getattr(m, name).modules() if isinstance(x, MXFP4Linear)), None) if name else None
    return inner.recipe if inner is not None else None


def _packed_linear(m: nn.Module) -> tuple[int, int] | None:
    """(out, in) of a linear layer of a quantization library, which keeps its weight in no parameter."""
    sizes = (getattr(m, "out_features", None), getattr(m, "in_features", None))
    if isinstance(m, nn.Linear) or not all(isinstance(size, int) for size in sizes):
        return None
    has_one = any(p.ndim > 1 for p in m.parameters()) or any(isinstance(inner, nn.Linear) for inner in m.modules())
    return None if has_one else sizes


def _part(notes: Notes, names: list[str]) -> str:
    return next((notes.parts[n] for n in names if n in notes.parts), "all layers")


def _formats(chosen: Recipe) -> dict[str, str]:
    """{gemm: format of its operands, `a x b` where they differ}."""
    made = {}
    for gemm in GEMMS:
        pair = getattr(chosen, gemm)
        a, b = ("mxfp4" if chosen.quest and t in "xw" and op.format == "bf16" else op.format
                for t, op in zip(TENSORS[gemm], (pair.a, pair.b), strict=True))  # fmt: skip
        made[gemm] = a if a == b else f"{a} x {b}"
    return made


def _weight_format(chosen: Recipe) -> str:
    ops = chosen.operands()
    one, two = ("mxfp4" if chosen.quest and ops[g, "w"].format == "bf16" else ops[g, "w"].format for g in GEMMS[:2])
    return one if one == two else f"{one} and {two}"


def _plain(name: str) -> bool:
    return name == PLAIN or set(re.split(" x | and ", name)) <= {"bf16", "fp32"}


def _shares(pairs) -> dict[str, float]:
    sums: dict[str, float] = defaultdict(float)
    for name, value in pairs:
        sums[name] += value
    total = sum(sums.values())
    return {name: value / total for name, value in sums.items() if value} if total else {}


def _rows(lines, total: int, work: float, columns: Callable[[LayerReport], tuple[str, str]]) -> list[tuple[str, ...]]:
    """One row for layers that differ in a block's or an expert's number only."""
    groups: dict[tuple, list[LayerReport]] = defaultdict(list)
    for line in lines:
        short = re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.)", "*", line.name)
        groups[(short, line.shape, *columns(line))].append(line)
    rows = []
    for (short, shape, one, two), members in groups.items():
        places = sum(m.places for m in members)
        number = str(len(members)) if places == len(members) else f"{len(members)} at {places} places"
        weights, flops = sum(m.weights for m in members) / total, sum(m.flops for m in members) / work
        size = " x ".join(map(str, shape))
        rows.append((short or "the model", number, size, one, two, f"{weights:.1%}", f"{flops:.1%}"))
    return rows
