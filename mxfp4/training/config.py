"""Configurations: everything that determines what a training run computes, as two frozen dataclasses.

Plain data. They round-trip through dicts (`to_dict`, `from_dict`), unknown fields are refused with the
known ones, and values that cannot work are refused when the object is made, before anything is trained.
"""

from __future__ import annotations

from dataclasses import MISSING, asdict, dataclass, fields

from mxfp4.errors import UserError
from mxfp4.layers.post_training import NAMES as POST_TRAINING
from mxfp4.layers.recipe import recipe


@dataclass(frozen=True)
class ModelConfig:
    """A Llama: sizes only. With n_experts > 0 every feed-forward is a mixture of experts."""

    vocab_size: int
    """Tokens in the vocabulary, V."""
    dim: int
    """Width of the residual stream."""
    n_layers: int
    """Transformer blocks."""
    n_heads: int
    """Query heads; the head size is dim / n_heads."""
    n_kv_heads: int
    """Key and value heads; query heads share them in equal groups (GQA)."""
    ffn_dim: int
    """Hidden width of SwiGLU (of each expert)."""
    max_seq_len: int
    """Longest sequence, in tokens: the length of the RoPE tables."""
    rope_theta: float = 10000.0
    """Base of RoPE's wavelengths; Llama 3 uses 500000."""
    norm_eps: float = 1e-5
    """Added to the mean square in RMSNorm."""
    n_experts: int = 0
    """0: dense. Else experts in each feed-forward."""
    n_experts_per_token: int = 2
    """Experts each token is sent to."""
    aux_loss_weight: float = 0.01
    """Weight of the load-balance loss of a mixture of experts (Switch Transformer, section 2.2)."""
    tie_embeddings: bool = False
    """Whether the LM head shares the embedding's matrix."""
    rope_scaling_factor: float = 1.0
    """Llama 3.1's factor on RoPE's long wavelengths, 8 in its own models; 1: RoPE as it is (`model.scaled_rates`)."""

    def __post_init__(self):
        _positive(self, "vocab_size", "dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim", "max_seq_len")
        if self.dim % (2 * self.n_heads):
            raise UserError(f"dim={self.dim} must be a multiple of 2 n_heads={2 * self.n_heads}: RoPE turns pairs")
        if self.n_heads % self.n_kv_heads:
            raise UserError(f"n_heads={self.n_heads} must be a multiple of n_kv_heads={self.n_kv_heads}")
        if not self.rope_scaling_factor >= 1:
            raise UserError(f"rope_scaling_factor={self.rope_scaling_factor} must be at least 1 (1: no scaling)")
        if self.n_experts < 0 or (self.n_experts and not 0 < self.n_experts_per_token <= self.n_experts):
            raise UserError(
                f"n_experts_per_token={self.n_experts_per_token} must lie in 1 to n_experts={self.n_experts}"
            )

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads

    def n_params(self) -> int:
        """Parameters of the model; a tied matrix counts once."""
        head = 0 if self.tie_embeddings else self.vocab_size * self.dim
        return self.vocab_size * self.dim + head + self.n_params_non_embedding()

    def n_params_non_embedding(self) -> int:
        """Parameters without the embedding and the LM head."""
        kv = self.n_kv_heads * self.head_dim
        attention = 2 * self.dim * self.dim + 2 * self.dim * kv
        feed_forward = 3 * self.dim * self.ffn_dim
        if self.n_experts:
            feed_forward = self.n_experts * feed_forward + self.n_experts * self.dim  # and the router
        return self.n_layers * (attention + feed_forward + 2 * self.dim) + self.dim

    def to_dict(self) -> dict:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict) -> ModelConfig:
        """The inverse of `to_dict`. UserError for unknown or missing fields."""
        return cls(**_checked(cls, data))


TUPLES = ("probe_steps", "light_probe_steps", "short_budgets", "decay_recipes", "eval_forwards", "final_forwards")
"""Fields of TrainConfig that hold several values: lists in JSON."""
REDUCE_DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class TrainConfig:
    """One arm with one seed. Runs are keyed by it, so it holds what determines a result and nothing else."""

    recipe: str
    """Name of the recipe, as `mxfp4.recipe` parses it."""
    seed: int
    """Picks initial weights, order of the data and random numbers of the recipe; arms of a seed share the
    first two."""
    model: ModelConfig
    """The model."""
    corpus: str
    """Name of the corpus."""
    seq_len: int
    """Tokens in a training sequence."""
    batch_size: int
    """Sequences in an optimizer step, all micro-batches together."""
    steps: int
    """Optimizer steps: the budget."""
    lr: float
    """Peak learning rate."""
    lr_min: float
    """Learning rate at the end of the cosine."""
    warmup: int
    """Steps of linear warm-up."""
    eval_every: int
    """Steps between evaluations; step 0 and the last one are evaluated as well."""
    eval_sequences: int
    """Sequences of the fixed evaluation set."""
    scale: str
    """Name of the scale that the sizes come from; runs are filed under it."""
    weight_decay: float = 0.1
    """AdamW's, on every matrix including embeddings, not on norms."""
    beta1: float = 0.9
    """AdamW's."""
    beta2: float = 0.95
    """AdamW's."""
    eps: float = 1e-5
    """AdamW's."""
    clip: float = 1.0
    """Largest norm of the gradient."""
    probe_steps: tuple[int, ...] = ()
    """Steps at which tensors are looked at (diagnostics)."""
    target_loss: float | None = None
    """Evaluation loss, nats a token, whose first reaching is recorded."""
    stop_at_target: bool = False
    """Whether training ends there."""
    micro_batches: int = 1
    """Equal parts that a batch is computed in, gradients summed."""
    decay_steps: int = 0
    """Steps of the whole schedule, warm-up included; 0: `steps`. MLPerf's cosine is far longer than the
    run."""
    cooldown_steps: int = 0
    """Last steps of the budget, in which the rate falls linearly to lr_min after a constant rate; 0: a cosine."""
    light_probe_steps: tuple[int, ...] = ()
    """Steps at which only the cheap part of a probe is taken."""
    short_budgets: tuple[int, ...] = ()
    """Shorter budgets, in steps, that are judged too: at each the run branches off into a decay of its own, of the same
    share of its budget, and then goes on as if it had not."""
    decay_recipes: tuple[str, ...] = ()
    """Recipes in which a branch of the run makes the last decay, beside the run's own."""
    eval_forwards: tuple[str, ...] = ()
    """Recipes in whose forward each evaluation is made, beside the arm's own; then the own one rounds to nearest. Empty:
    in the arm's own alone, with the draws it trains with."""
    final_forwards: tuple[str, ...] = ()
    """More of them, for the run's last evaluation; also the names of `layers.post_training`."""
    final_eval_sequences: int = 0
    """Sequences of the evaluations that end a decay; 0: `eval_sequences`."""
    stall_evaluations: int = 0
    """Evaluations over which a run that does not improve is ended as stalled (`divergence.StallRule`); 0: never."""
    stall_improvement: float = 0.0
    """Nats a token that count as an improvement."""
    stall_above: float = 0.0
    """Loss, nats a token, above which alone a run can be stalled."""
    reduce_dtype: str = "float32"
    """Dtype in which gradients are summed over several GPUs, one of REDUCE_DTYPES; MLPerf's reference has bfloat16."""
    append_eod: bool = True
    """Whether packing puts the end-of-document token after each document of text (Megatron's --append-eod)."""

    def __post_init__(self):
        for name in TUPLES:
            object.__setattr__(self, name, tuple(getattr(self, name)))
        try:
            final = (name for name in self.final_forwards if name not in POST_TRAINING)
            for name in (self.recipe, *self.decay_recipes, *self.eval_forwards, *final):
                recipe(name)
        except ValueError as error:
            raise UserError(str(error)) from None
        _positive(
            self,
            "seq_len",
            "batch_size",
            "steps",
            "eval_every",
            "eval_sequences",
            "micro_batches",
            "lr",
            "clip",
        )
        for name in ("seed", "warmup", "decay_steps", "cooldown_steps", "stall_evaluations"):
            if getattr(self, name) < 0:
                raise UserError(f"{name}={getattr(self, name)} must not be negative")
        if not 0 <= self.lr_min <= self.lr:
            raise UserError(f"lr_min={self.lr_min} must lie in 0 to lr={self.lr}")
        if self.seq_len > self.model.max_seq_len:
            raise UserError(f"seq_len={self.seq_len} exceeds the model's max_seq_len={self.model.max_seq_len}")
        if self.batch_size % self.micro_batches:
            raise UserError(f"batch_size={self.batch_size} must be a multiple of micro_batches={self.micro_batches}")
        if self.stop_at_target and self.target_loss is None:
            raise UserError("stop_at_target=True needs a target_loss")
        if self.stall_evaluations and not (self.stall_improvement > 0 and self.stall_above > 0):
            raise UserError(
                f"stall_evaluations={self.stall_evaluations} needs a positive stall_improvement and stall_above, not "
                f"{self.stall_improvement:g} and {self.stall_above:g}"
            )
        if self.cooldown_steps and self.cooldown_steps + self.warmup > self.steps:
            raise UserError(
                f"warmup={self.warmup} and cooldown_steps={self.cooldown_steps} do not fit into steps={self.steps}"
            )
        if (self.short_budgets or self.decay_recipes) and not self.cooldown_steps:
            raise UserError("short_budgets and decay_recipes branch off into a decay: they need cooldown_steps")
        for budget in self.short_budgets:
            if not self.warmup < budget - self.cooldown_of(budget) < budget < self.steps:
                raise UserError(
                    f"short_budgets={budget} must lie below steps={self.steps}, and its decay after warmup={self.warmup}"
                )
        if self.reduce_dtype not in REDUCE_DTYPES:
            raise UserError(f"reduce_dtype={self.reduce_dtype!r} must be one of {', '.join(REDUCE_DTYPES)}")
        if self.final_forwards and not self.eval_forwards:
            raise UserError("final_forwards need eval_forwards")
        if 0 < self.final_eval_sequences < self.eval_sequences:
            raise UserError(
                f"final_eval_sequences={self.final_eval_sequences} must be at least eval_sequences={self.eval_sequences}"
            )

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.seq_len

    @property
    def tokens(self) -> int:
        """Training tokens of the whole budget."""
        return self.steps * self.tokens_per_step

    def cooldown_of(self, budget: int) -> int:
        """Steps of decay at the end of a budget, `steps` or a shorter one."""
        return round(self.cooldown_steps * budget / self.steps)

    def to_dict(self) -> dict:
        """Plain JSON data, every field spelled out."""
        return {**asdict(self), **{name: list(getattr(self, name)) for name in TUPLES}}

    def key_dict(self) -> dict:
        """`to_dict` without the fields that have their default value: what a run is keyed by.

        So a field added later leaves the keys of earlier runs as they were.
        """
        data = {k: v for k, v in self.to_dict().items() if not _is_default(self, k)}
        data["model"] = {k: v for k, v in self.model.to_dict().items() if not _is_default(self.model, k)}
        return data

    @classmethod
    def from_dict(cls, data: dict) -> TrainConfig:
        """The inverse of `to_dict`. UserError for unknown or missing fields."""
        data = _checked(cls, data)
        return cls(**{**data, "model": ModelConfig.from_dict(data["model"])})


def _positive(config, *names: str) -> None:
    for name in names:
        if not getattr(config, name) > 0:
            raise UserError(f"{name}={getattr(config, name)} must be positive")


def _is_default(config, name: str) -> bool:
    field = type(config).__dataclass_fields__[name]
    return field.default is not MISSING and getattr(config, name) == field.default


def _checked(cls, data: dict) -> dict:
    known = [f.name for f in fields(cls)]
    unknown = [name for name in data if name not in known]
    if unknown:
        raise UserError(f"unknown {cls.__name__} field {unknown[0]!r}; known: {', '.join(known)}")
    missing = [f.name for f in fields(cls) if f.name not in data and f.default is MISSING]
    if missing:
        raise UserError(f"{cls.__name__} lacks {', '.join(missing)}")
    return dict(data)
