"""TorchTitan 0.3: our recipes in its trainer, for training beyond one node.

    torchrun --nproc_per_node 8 -m torchtitan.train --module mxfp4.training.adapters.torchtitan \\
        --config llama3_8b --recipe mxfp4+h16

`MXFP4LinearConverter` is a TorchTitan quantization converter: it replaces the `Linear.Config` nodes of a model's
configuration by ours before anything is built, so parallelism, activation checkpointing, compilation and checkpoints
are TorchTitan's own. The master weights stay in FP32 and parameter names stay as they are; a block is quantized from
the part of a matrix that its rank holds. `MXFP4Trainer` adds what a converter cannot: `--recipe`, and `set_step`, so
that a resumed run draws the random numbers of one that was not interrupted.

Two things about TorchTitan's Llama differ from ours. It computes wq, wk and wv as one matrix; a recipe that treats
some of them apart (`qk8`, hence `ti2d`) gets three. And its attention does not look across documents, which MLPerf's
rules for this model do not ask for: curves are comparable between recipes here, not with P1's.

Mixtures of experts: TorchTitan's `GroupedExperts` becomes `TitanExperts`, whose matrices go expert by expert through a
layer of ours, on ranks that hold whole experts and without compilation. What would compute in BF16 without a word is
refused by its name: `tp_gemm_backend="dist_gemm"`, which multiplies with the weights past the layers' forward, and
other subclasses of `GroupedExperts` and of `Linear`. `skip` leaves any of them out on purpose.

TorchTitan 0.3.0 was released for a PyTorch nightly. With PyTorch 2.13 its models build and train on one rank, but its
trainer calls `torch.distributed.set_timeout`, which 2.13 lacks, after the first step, and its default backend shards
no parameters over several ranks; with 2.11 it does not import. A real run needs the PyTorch that TorchTitan names.

Source of the protocol: torchtitan/components/quantization/nvfp4.py (a leaf swap with a local-tensor region).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import ClassVar

import spmd_types as spmd
import torch
import torch.nn.functional as F
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.quantization import QuantizationConverter
from torchtitan.components.validate import Validator
from torchtitan.distributed.parallel_dims import MeshAxisName
from torchtitan.models.common.attention import FusedQKVLinear, QKVLinear
from torchtitan.models.common.decoder_sharding import dense_activation_placement, dense_param_placement
from torchtitan.models.common.dist_gemm import AllGatherFusedFeedForward, AllGatherFusedQKVLinear, RowParallelLinear
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.models.llama3 import config_registry
from torchtitan.protocols.module import Module, ModuleList
from torchtitan.protocols.sharding import LocalMapConfig
from torchtitan.trainer import Trainer

from mxfp4.errors import UserError
from mxfp4.layers.convert import DEFAULT_SKIP
from mxfp4.layers.experts import ExpertLinear, bare_layer
from mxfp4.layers.linear import MXFP4Linear, _QuantizedLinear, end_step, set_step
from mxfp4.layers.quest import _Projection
from mxfp4.layers.recipe import Recipe, layer_index, recipe
from mxfp4.numerics.ops.fp8_delayed import BUFFERS

TP = MeshAxisName.TP
for function in (_QuantizedLinear, _Projection):  # no collectives in them: the boundary below says what they map
    spmd.register_local_autograd_function(function)


class TitanLinear(MXFP4Linear, Module):
    """MXFP4Linear in TorchTitan's module protocol. Under tensor parallelism it works on this rank's part."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        """A Linear.Config that builds TitanLinear."""

        recipe: str = "mxfp4+h16"
        """Name of the recipe."""
        fqn: str = ""
        """The layer's full name in the model."""
        n_layers: int = 0
        """Blocks of the model, for recipes that keep the last ones in BF16."""
        seed: int = 0
        """Of the layer's random numbers."""

        def build(self, **kwargs):
            """The layer; its sharding, set since this configuration was made, becomes that of a local region."""
            layer = Linear.Config.build(self, **kwargs)
            sharding = layer._sharding_config
            if sharding is not None:
                rowwise = sharding.state_shardings["weight"].per_axis_spmd_types().get(TP) == spmd.S(1)
                inside = dense_activation_placement(tp=spmd.S(-1) if rowwise else spmd.R)
                gradient = dense_activation_placement(tp=spmd.S(-1) if rowwise else spmd.P)
                histories = {b: dense_param_placement(tp=spmd.R) for b in BUFFERS if hasattr(layer, b)}
                layer._sharding_config = replace(
                    sharding,
                    state_shardings={**sharding.state_shardings, **histories},
                    in_src_shardings={"x": inside},
                    in_dst_shardings={"x": inside},
                    local_map=LocalMapConfig(in_grad_placements=(gradient,)),
                )
            return layer

    def __init__(self, config: Config):
        MXFP4Linear.__init__(
            self, config.in_features, config.out_features, config.bias, recipe=config.recipe, fqn=config.fqn,
            seed=config.seed, n_layers=config.n_layers,
        )  # fmt: skip


class TitanExpertLinear(ExpertLinear, Module):
    """ExpertLinear in TorchTitan's module protocol."""


class TitanExperts(GroupedExperts):
    """TorchTitan's SwiGLU experts, whose three matrices go through a quantized layer of each expert."""

    quantized_parameters: ClassVar = {"w1_EFD": "w1_linears", "w2_EDF": "w2_linears", "w3_EFD": "w3_linears"}

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        """A GroupedExperts.Config that builds TitanExperts. Further fields as in TitanLinear.Config."""

        recipe: str = "mxfp4+h16"
        fqn: str = ""
        n_layers: int = 0
        seed: int = 0

    def __init__(self, config: Config):
        super().__init__(config)
        dim, hidden = config.dim, config.hidden_dim
        for name, inner, outer in (("w1", dim, hidden), ("w2", hidden, dim), ("w3", dim, hidden)):
            made = (
                bare_layer(
                    inner, outer, config.recipe, f"{config.fqn}.{expert}.{name}", config.seed,
                    n_layers=config.n_layers, cls=TitanExpertLinear,
                )
                for expert in range(config.num_experts)
            )  # fmt: skip
            setattr(self, f"{name}_linears", ModuleList(made))

    def parallelize(self, parallel_dims) -> None:
        """As GroupedExperts; raises UserError where experts, or parts of them, would lie on several ranks."""
        for what in ("ep", "tp"):
            if getattr(parallel_dims, what) > 1:
                raise UserError(
                    f"{what}={getattr(parallel_dims, what)} splits the experts among ranks, which a converted model does "
                    f"not support; allowed: 1, or leave the experts out with skip"
                )
        super().parallelize(parallel_dims)

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        """Tokens [rows, dim], sorted by expert, and the number of each expert -> [rows, dim]; in BF16, as TorchTitan's."""
        counts = num_tokens_per_expert_E.long().tolist()
        x = x_RD.bfloat16()
        w1, w2, w3 = (weight.unbind(0) for weight in (self.w1_EFD, self.w2_EDF, self.w3_EFD))
        parts, start = [], 0
        for expert, count in enumerate(counts):
            rows = x[start : start + count]
            if count:
                gate = self.w1_linears[expert](rows, w1[expert])
                up = self.w3_linears[expert](rows, w3[expert])
                parts.append(self.w2_linears[expert](F.silu(gate) * up, w2[expert]))
            start += count
        if start < len(x):  # rows that a dispatcher added
            parts.append(x.new_zeros(len(x) - start, x.shape[1]))
        return (torch.cat(parts) if parts else x.new_zeros(x.shape)).type_as(x_RD)


class SplitQKVLinear(QKVLinear):
    """QKVLinear with a configuration of its own for wk, which TorchTitan's shares with wv."""

    @dataclass(kw_only=True, slots=True)
    class Config(QKVLinear.Config):
        """As QKVLinear's; `wkv` is wv alone."""

        wk: Linear.Config

    def __init__(self, config: Config):
        super().__init__(config)
        self.wk = replace(config.wk, sharding_config=config.wkv.sharding_config).build()


_DIST_GEMM = {
    AllGatherFusedQKVLinear: ("wqkv",), AllGatherFusedFeedForward: ("w1", "w2", "w3"), RowParallelLinear: (),
}  # fmt: skip
"""TorchTitan's modules of `tp_gemm_backend="dist_gemm"` and whose weights they read; () for their own."""


class MXFP4LinearConverter(QuantizationConverter):
    """Replaces the Linear.Config and GroupedExperts.Config nodes of a model; LM head and routers stay as they are.

    Raises ValueError for an unknown recipe, a layer that does not fit one, a layer that would compute in BF16 all the
    same, or a model with none to replace, before anything is built.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(QuantizationConverter.Config):
        """What to convert to."""

        recipe: str = "mxfp4+h16"
        """Name of the recipe, as mxfp4.recipe takes it."""
        seed: int = 0
        """Of the recipe's random numbers."""
        skip: list[str] = field(default_factory=lambda: list(DEFAULT_SKIP))
        """Last parts of the names of layers that are left out."""

    def __init__(self, config: Config):
        self.config = config
        self.recipe = recipe(config.recipe)

    def convert(self, model_config):
        """`model_config` with its nodes replaced, in place."""
        self._refuse_what_stays_in_bf16(model_config)
        for _, node, parent, attribute in list(model_config.traverse(FusedQKVLinear.Config)):
            if _tells_apart(self.recipe):
                _put(parent, attribute, _split(node))
        for _, node, parent, attribute in list(model_config.traverse(QKVLinear.Config)):
            if not isinstance(node, SplitQKVLinear.Config):
                own = {f.name: getattr(node, f.name) for f in fields(node)}
                _put(parent, attribute, SplitQKVLinear.Config(**own, wk=replace(node.wkv)))
        found = [
            (fqn.replace(".wkv", ".wv"), *rest)
            for kind in (Linear, GroupedExperts)
            for fqn, *rest in model_config.traverse(kind.Config)
            if type(rest[0]) is kind.Config and not self._skips(fqn)
        ]
        if not found:
            there = Counter(type(node).__qualname__ for _, node, *_ in model_config.traverse(Linear.Config))
            what = ", ".join(f"{n} {kind}" for kind, n in there.items()) or "none at all"
            raise ValueError(f"no Linear.Config to convert to {self.recipe.name!r}; of its kind the model has {what}")
        depth = 1 + max((i for i in (layer_index(fqn) for fqn, *_ in found) if i is not None), default=-1)
        made = [(parent, attribute, self._layer(node, fqn, depth)) for fqn, node, parent, attribute in found]
        for parent, attribute, node in made:
            if parent is None:
                return node
            _put(parent, attribute, node)
        return model_config

    def _skips(self, fqn: str) -> bool:
        return fqn.rpartition(".")[2] in self.config.skip

    def _refuse_what_stays_in_bf16(self, model_config) -> None:
        """Raise UserError for a node that is to be converted and whose GEMMs no layer of ours would run."""
        for kind, inner in _DIST_GEMM.items():
            for fqn, *_ in model_config.traverse(kind.Config):
                if not all(self._skips(name) for name in inner or (fqn,)):
                    raise UserError(
                        f"{fqn}: tp_gemm_backend='dist_gemm' ({kind.__name__}) multiplies in BF16, past the converted "
                        "layers; allowed: tp_gemm_backend='default'"
                    )
        for kind, known in ((Linear, (Linear, TitanLinear)), (GroupedExperts, (GroupedExperts, TitanExperts))):
            for fqn, node, *_ in model_config.traverse(kind.Config):
                if type(node) not in [one.Config for one in known] and not self._skips(fqn):
                    raise UserError(
                        f"{fqn}: {type(node).__qualname__.removesuffix('.Config')} cannot be converted and would stay in "
                        f"BF16; leave it out with skip=[..., {fqn.rpartition('.')[2]!r}]"
                    )
                if kind is GroupedExperts and self.config.model_compile_enabled and not self._skips(fqn):
                    raise UserError(
                        f"{fqn}: compile.enable=True does not work with converted experts, whose numbers of tokens "
                        f"depend on data; set it to False, or leave them out with skip=[..., {fqn.rpartition('.')[2]!r}]"
                    )

    def _layer(self, node: Linear.Config | GroupedExperts.Config, fqn: str, n_layers: int):
        how = {"recipe": self.config.recipe, "fqn": fqn, "n_layers": n_layers, "seed": self.config.seed}
        if isinstance(node, GroupedExperts.Config):
            with torch.device("meta"):  # refuses sizes that do not fit
                bare_layer(node.dim, node.hidden_dim, self.config.recipe, f"{fqn}.0.w1", n_layers=n_layers)
                bare_layer(node.hidden_dim, node.dim, self.config.recipe, f"{fqn}.0.w2", n_layers=n_layers)
            return TitanExperts.Config(**{f.name: getattr(node, f.name) for f in fields(node)}, **how)
        with torch.device("meta"):
            MXFP4Linear(node.in_features, node.out_features, node.bias, **how)  # refuses sizes that do not fit
        return TitanLinear.Config(**{f.name: getattr(node, f.name) for f in fields(node)}, **how)


def _tells_apart(chosen: Recipe) -> bool:
    """Whether the recipe treats wq, wk and wv differently."""
    wq, wk, wv = (chosen.for_layer(f"layers.0.attention.qkv_linear.{w}") for w in ("wq", "wk", "wv"))
    return not wq == wk == wv


def _split(fused: FusedQKVLinear.Config) -> QKVLinear.Config:
    """The three projections of a fused one: same initial distribution, drawn for each."""
    head, one = fused.head_dim, fused.wqkv

    def part(n_heads: int) -> Linear.Config:
        return Linear.Config(
            in_features=one.in_features, out_features=n_heads * head, bias=one.bias, param_init=_unfused(one.param_init)
        )

    return QKVLinear.Config(head_dim=head, wq=part(fused.n_heads), wkv=part(fused.n_kv_heads))


def _unfused(param_init: dict[str, Callable] | None) -> dict[str, Callable] | None:
    """The initializers inside those that TorchTitan's `_fused_qkv_param_init` made."""
    if param_init is None:
        return None
    found = {}
    for name, init in param_init.items():
        cells = dict(zip(init.__code__.co_freevars, init.__closure__ or (), strict=True))
        if "base_init" not in cells:
            raise UserError(
                f"cannot take TorchTitan's fused wqkv apart: its initializer of {name!r} is not the known one"
            )
        found[name] = cells["base_init"].cell_contents
    return found


def _put(parent, attribute, node) -> None:
    if isinstance(parent, list):
        parent[attribute] = node
    else:
        setattr(parent, attribute, node)


class MXFP4Trainer(Trainer):
    """TorchTitan's trainer on a model converted to `recipe`."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """Trainer.Config with a recipe."""

        recipe: str = "mxfp4+h16"
        """Name of the recipe, as mxfp4.recipe takes it."""
        recipe_seed: int = 0
        """Of the recipe's random numbers."""
        recipe_skip: list[str] = field(default_factory=lambda: list(DEFAULT_SKIP))
        """Last parts of the names of layers that are left out."""

    def __init__(self, config: Config):
        parallelism = config.parallelism
        if parallelism.tensor_parallel_degree > 1 and parallelism.spmd_backend != "spmd_types":
            raise UserError(
                f"parallelism.spmd_backend={parallelism.spmd_backend!r} with tensor parallelism is not supported; "
                "allowed: spmd_types"
            )
        if parallelism.tensor_parallel_degree > 1 and recipe(config.recipe).is_delayed:
            raise UserError(
                f"recipe {config.recipe!r} with tensor_parallel_degree={parallelism.tensor_parallel_degree} is not "
                "supported: delayed scaling keeps one history for a whole layer; use fp8, or a degree of 1"
            )
        converter = MXFP4LinearConverter.Config(
            recipe=config.recipe, seed=config.recipe_seed, skip=config.recipe_skip,
            model_compile_enabled=config.compile.enable and "model" in config.compile.components,
        ).build()  # fmt: skip
        spec = config.model_spec
        super().__init__(replace(config, model_spec=replace(spec, model=converter.convert(spec.model))))

    def train_step(self, data_iterator) -> None:
        """One optimizer step; its random numbers are a function of its number, others on each data-parallel rank."""
        dims = self.parallel_dims
        rank = dims.get_mesh("batch").get_local_rank() if dims.dp_enabled else 0
        for part in self.model_parts:
            set_step(part, self.step, rank=rank)
        super().train_step(data_iterator)
        for part in self.model_parts:
            end_step(part)  # before a checkpoint


def _with_recipe(base: Trainer.Config) -> MXFP4Trainer.Config:
    return MXFP4Trainer.Config(**{f.name: getattr(base, f.name) for f in fields(base) if f.init})


def llama3_8b() -> MXFP4Trainer.Config:
    """Llama 3.1-8B on C4 by MLPerf's hyperparameters as AMD ran them: learning rate 8e-4 to 8e-5, cosine over 1.2
    million steps, warm-up 128, global batch 32 of 8192 tokens, evaluation every 12,288 sequences (P1, MLPerf v5.1).

    Blocks are compiled, and nothing is recomputed: selective checkpointing would keep the results of GEMMs, of which our
    backward needs the quantized operands, and quantize them a second time.

    All as this project's scale mi355x has it, the budget too: 11,213 steps, twice the 179,405 sequences that the
    reference took in BF16. Our own loop stops at 3.3 nats a token; TorchTitan trains the budget to its end.

    `validator.steps` counts batches of a rank: 128 of 1 on 8 ranks are MLPerf's 1,024 sequences.
    """
    config = _with_recipe(config_registry.llama3_8b())
    config.optimizer = default_adamw(lr=8e-4, eps=1e-5)
    config.lr_scheduler = LRSchedulersContainer.Config(
        warmup_steps=128, total_steps=1_200_000, decay_type="cosine", min_lr_factor=0.1
    )
    config.training = replace(config.training, seq_len=8192, local_batch_size=1, global_batch_size=32, steps=11_213)
    config.validator = Validator.Config(enable=True, freq=384, steps=128)
    config.compile = replace(config.compile, enable=True)
    config.activation_checkpoint = None
    return config


def llama3_debugmodel() -> MXFP4Trainer.Config:
    """TorchTitan's six-layer Llama of width 256, to try a set-up in a minute."""
    return _with_recipe(config_registry.llama3_debugmodel())
