"""What a layer is in its model: the output head, a router, a block's number, the query's projection.

`convert` decides by role first and by name last, as names repeat: RWKV's `attention.output` is no output head, and
Llama's `gate_proj` no gate of a mixture of experts. The names that are known are in `Names`; a user adds to them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields

from torch import Tensor, nn

from mxfp4.layers.recipe import BLOCK_LISTS

Q, K, V = "q_proj", "k_proj", "v_proj"

PROJECTIONS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("wq", "Wq", "query", "q", "q_lin", "query_proj", "to_q", "linear_q", "project_q", "q_head", "q_a_proj",
                     "q_b_proj", "wq_a", "wq_b", "linear_q_proj", "linear_q_down_proj", "linear_q_up_proj"), (Q,)),
    **dict.fromkeys(("wk", "Wk", "key", "k", "k_lin", "key_proj", "to_k", "linear_k", "project_k", "k_head"), (K,)),
    **dict.fromkeys(("wkv", "kv_proj", "to_kv", "kv", "key_value", "kv_a_proj_with_mqa", "kv_a_proj", "kv_b_proj",
                     "wkv_a", "wkv_b", "linear_kv", "linear_kv_down_proj", "linear_kv_up_proj"), (K, V)),
    **dict.fromkeys(("c_attn", "Wqkv", "wqkv", "qkv", "qkv_proj", "query_key_value", "to_qkv", "in_proj_qkv",
                     "in_proj_qkvz", "att_proj", "attn_qkv", "linear_qkv", "W_pack"), (Q, K, V)),
}  # fmt: skip
"""Last part of a layer's name -> the projections of attention that its matrix holds, as recipes name them."""

IN_ATTENTION = {"in_proj": (Q, K, V)}
"""The same, for names that mean this only inside of attention: Mamba has an `in_proj` too."""

AMBIGUOUS = {"query": "key", "key": "query", "q": "k", "k": "q"}
"""Names that mean a projection of attention only beside their partner: RWKV's feed-forward has a `key` too."""


@dataclass(frozen=True)
class Names:
    """Names of layers beside those that are known: each field adds to the defaults."""

    blocks: tuple[str, ...] = ()
    """Lists of blocks, beside layers, layer, h, blocks and block: what the depth of a model is counted by."""
    heads: tuple[str, ...] = ()
    """Output heads, beside HEADS: last parts of names outside the blocks."""
    routers: tuple[str, ...] = ()
    """Routers of mixtures of experts, beside `router` and a `gate` beside experts: last parts of names."""
    projections: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Last part of a name -> q_proj, k_proj, v_proj: those that its matrix holds. Beside PROJECTIONS."""

    def __post_init__(self):
        for f in ("blocks", "heads", "routers"):
            value = getattr(self, f)
            if isinstance(value, str) or not all(isinstance(name, str) for name in value):
                raise ValueError(f"Names.{f}={value!r} is not allowed; it is a tuple of names, such as ('stages',)")
            object.__setattr__(self, f, tuple(value))
        made = {}
        for name, held in dict(self.projections).items():
            held = (held,) if isinstance(held, str) else tuple(held)
            if not held or not set(held) <= {Q, K, V}:
                raise ValueError(f"Names.projections[{name!r}]={held!r} is not allowed; allowed: {Q}, {K}, {V}")
            made[name] = held
        object.__setattr__(self, "projections", made)

    def to_dict(self) -> dict:
        """Plain JSON data, without the fields that add nothing."""
        plain = {f.name: getattr(self, f.name) for f in fields(self)}
        lists = {k: list(v) for k, v in plain.items() if k != "projections" and v}
        held = {name: list(v) for name, v in self.projections.items()}
        return {**lists, **({"projections": held} if held else {})}


SURE_HEADS = ("lm_head", "embed_out", "proj_out")
HEADS = (*SURE_HEADS, "output", "head", "classifier", "score", "qa_outputs")
"""Last parts of names of output heads; the last ones only at the top of a model or with a vocabulary's size."""
WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "base_model", "base_layer",
            "original_module", "modules_to_save", "default", "linear", "model")  # fmt: skip
"""Parts of names that wrappers (DDP, torch.compile, FSDP, PEFT) put around a model or a layer."""
_NUMBERED = re.compile(r"(?:.*_)?(\d+)")


def last_part(fqn: str) -> str:
    """The last part of a layer's name, without what wrappers put behind it."""
    parts = [p for p in fqn.split(".") if p not in WRAPPERS]
    return parts[-1] if parts else fqn.rpartition(".")[2]


class Roles:
    """The roles in one model, found once. Names are those of `named_modules`."""

    def __init__(self, model: nn.Module, names: Names | None = None):
        self.names = names or Names()
        self.projections = {**PROJECTIONS, **self.names.projections}
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self._blocks, self.depth = self._numbered_blocks()
        self._embeddings = [m for m in self.modules.values() if isinstance(m, nn.Embedding)]
        self._tables = {id(own_parameter(m, "weight")) for m in self._embeddings}
        self._heads = self._output_embeddings()

    # Blocks.

    def _numbered_blocks(self) -> tuple[dict[str, int], int]:
        """{name of a block: its number in the whole model}, and how many there are.

        Blocks are the children of a list called by one of the known names; where there is none, of any list; else of
        the model itself. Stacks (encoder and decoder) count on, in the model's order.
        """
        lists = {fqn: m for fqn, m in self.modules.items() if _numbers(m)}
        known = {*BLOCK_LISTS, *self.names.blocks}
        named = {fqn: m for fqn, m in lists.items() if fqn.rpartition(".")[2] in known}
        found = [{fqn: m for fqn, m in named.items() if not _leaves(m)}, named]
        found += [{fqn: m for fqn, m in lists.items() if fqn and not _leaves(m) and not _of_experts(fqn)}]
        found += [{"": lists[""]}] if "" in lists else []
        stacks = next((f for f in found if f), {})
        inner = {fqn for fqn in stacks if _alike(stacks[fqn]) and any(_inside(fqn, outer) for outer in stacks)}
        stacks = {
            fqn: m
            for fqn, m in stacks.items()
            if not any(_inside(i, fqn) for i in inner)  # Swin: stages that hold the blocks
            and (fqn in inner or not any(_inside(fqn, outer) for outer in stacks))  # T5: parts of a block
        }
        blocks: dict[str, int] = {}
        depth = 0
        starts: dict[tuple[str, int], int] = {}
        for fqn, m in stacks.items():
            numbers = _numbers(m)
            size = 1 + max(numbers.values())
            beside = (
                fqn.rpartition(".")[0],
                size,
            )  # XLM: lists of attentions and of feed-forwards, one of each a block
            start = starts.setdefault(beside, depth)
            blocks |= {(f"{fqn}.{child}" if fqn else child): start + number for child, number in numbers.items()}
            depth = max(depth, start + size)
        return blocks, depth

    def block(self, fqn: str) -> int | None:
        """The number of the block that holds a layer, counted over the whole model."""
        return next((self._blocks[p] for p in _prefixes(fqn) if p in self._blocks), None)

    # Heads.

    def _output_embeddings(self) -> set[int]:
        found: set[int] = set()
        for m in self.modules.values():
            get = getattr(m, "get_output_embeddings", None)
            if callable(get):
                try:
                    head = get()
                except (NotImplementedError, AttributeError, TypeError):
                    continue
                found |= {id(inner) for inner in head.modules()} if isinstance(head, nn.Module) else set()
        return found

    def is_head(self, fqn: str, m: nn.Module) -> str | None:
        """Why a layer is an output head, or None."""
        if id(m) in self._heads:
            return "output head (get_output_embeddings)"
        weight = own_parameter(m, "weight")
        if weight is not None and id(weight) in self._tables:
            return "output head (shares the embedding's matrix)"
        name = last_part(fqn)
        if self.block(fqn) is not None and not self._is_root_list:
            return None
        if name in SURE_HEADS or name in self.names.heads:
            return "output head (by its name)"
        top = len([p for p in fqn.split(".") if p not in WRAPPERS]) <= 1
        vocabulary = getattr(m, "out_features", None) in {e.num_embeddings for e in self._embeddings}
        return "output head (by its name)" if name in HEADS and (top or vocabulary) else None

    @property
    def _is_root_list(self) -> bool:
        """Whether the blocks are the model's own children, so that being in one says nothing."""
        return all("." not in fqn for fqn in self._blocks)

    # Routers.

    def is_router(self, fqn: str, m: nn.Module) -> str | None:
        """Why a layer is a router, a gate or part of one, or None."""
        parts = fqn.split(".")
        for i, part in enumerate(parts):
            inside = self.modules[".".join(parts[: i + 1])]
            if re.search(r"(^|_)router$", part) or part in self.names.routers:
                return f"router ({type(inside).__name__})"
            experts = number_of_experts(self.modules[".".join(parts[:i])])
            if experts and re.search(r"(^|_)(gate|wg)$", part):
                return "gate beside experts"
            last = i == len(parts) - 1
            if last and experts > 1 and "expert" not in part and _rows(m) == experts:
                return f"router (one output for each of {experts} experts)"
        return None

    # Projections of attention.

    def aliases(self, fqn: str) -> tuple[str, ...]:
        """The names by which a recipe may call a layer beside its own: `a.b.q_proj` for BERT's `a.b.query`."""
        plain = ".".join(p for p in fqn.split(".") if p not in WRAPPERS[:-1])
        parent, _, name = plain.rpartition(".")
        held = self.projections.get(name, ())
        if not held and re.search("attention|attn", parent):
            held = IN_ATTENTION.get(name, ())
        partner = AMBIGUOUS.get(name)
        if partner and name not in self.names.projections:
            siblings = self.modules.get(fqn.rpartition(".")[0])
            held = held if siblings is not None and partner in siblings._modules else ()
        return (*((plain,) if plain != fqn else ()), *(f"{parent}.{one}" for one in held))

    # Experts.

    def active_share(self, fqn: str) -> float:
        """Share of the tokens that a layer sees: top k of n for an expert of a mixture, else 1."""
        parts = fqn.split(".")
        for i, part in enumerate(parts):
            if not _of_experts(part):
                continue
            experts, parent = self.modules[".".join(parts[: i + 1])], self.modules[".".join(parts[:i])]
            n, k = number_of_experts(parent), self._top_k(experts, parent)
            if n and k:
                return min(k / n, 1.0)
        return 1.0

    def _top_k(self, *near: nn.Module) -> int | None:
        router = [c for m in near for n, c in m._modules.items() if c is not None and re.search("router|gate", n)]
        places: list[object] = [*near, *router]
        places += [getattr(m, "config", None) for m in (*near, *router)]
        config = getattr(self.modules[""], "config", None)
        places += [config, getattr(config, "text_config", None)]
        names = ("top_k", "num_experts_per_tok", "num_experts_per_token", "n_experts_per_token", "moe_topk",
                 "moe_top_k", "num_selected_experts", "num_experts_per_layer", "moe_num_active_experts")  # fmt: skip
        values = (getattr(place, name, None) for place in places if place is not None for name in names)
        return next((v for v in values if isinstance(v, int) and not isinstance(v, bool) and v > 0), None)


def own_parameter(m: nn.Module, name: str) -> Tensor | None:
    """A module's parameter as it is registered, not computed; None without. Of a ScriptModule too."""
    return next((p for n, p in m._parameters.items() if n == name), None)


def number_of_experts(module: nn.Module) -> int:
    """How many experts the children of a module called `experts` are; 0 where there are none."""
    for name, child in module._modules.items():
        if child is None or not _of_experts(name):
            continue
        if numbers := _numbers(child):
            return len(numbers)
        for attribute in ("num_experts", "n_experts", "num_local_experts"):
            if isinstance(n := getattr(child, attribute, None), int) and n > 0:
                return n
        stacked = [p.shape[0] for _, p in child._parameters.items() if p is not None and p.ndim == 3]
        if stacked:
            return stacked[0]
    return 0


def _of_experts(part: str) -> bool:
    return bool(re.fullmatch(r"(?:\w+_)?experts", part.rpartition(".")[2])) and "shared" not in part.rpartition(".")[2]


def _rows(m: nn.Module) -> int | None:
    weight = own_parameter(m, "weight")
    rows = getattr(m, "out_features", None)
    return rows if rows is not None else weight.shape[0] if isinstance(weight, Tensor) and weight.ndim == 2 else None


def _numbers(m: nn.Module) -> dict[str, int]:
    """{name: number} of the children of a list of modules, {} for another module."""
    names = [name for name, child in m._modules.items() if child is not None]
    made = {name: int(match[1]) for name in names if (match := _NUMBERED.fullmatch(name))}
    return made if len(set(made.values())) == len(names) else {}


def _leaves(m: nn.Module) -> bool:
    return not any(True for child in m.children() for _ in child.children())


def _alike(m: nn.Module) -> bool:
    return len({type(child) for child in m.children()}) == 1 and not _leaves(m)


def _inside(fqn: str, outer: str) -> bool:
    return fqn != outer and (not outer or fqn.startswith(outer + "."))


def _prefixes(fqn: str) -> Iterator[str]:
    """The names of what holds a layer, from itself outwards."""
    parts = fqn.split(".")
    yield from (".".join(parts[:i]) for i in range(len(parts), 0, -1))
