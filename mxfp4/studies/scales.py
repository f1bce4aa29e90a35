"""The scales a study runs at: model, data and budget, from a laptop to the papers' own.

| scale  | for                        | model                        | budget                              |
|--------|----------------------------|------------------------------|-------------------------------------|
| cpu    | a laptop, two cores        | a toy                        | the whole plan in minutes           |
| gpu    | one GPU                    | tens of millions of weights  | minutes an arm                      |
| mi355x | 8 MI355X, as in P1         | Llama 3.1-8B                 | MLPerf's rules: to 3.3 nats a token |

Learning rates were chosen without FP4, so that no arm is favoured. Some plans leave a scale's own setting: other
sizes, experts, another source (`Scale.settings`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace

from mxfp4.data.corpora import TOY
from mxfp4.errors import UserError
from mxfp4.training.config import ModelConfig, TrainConfig
from mxfp4.training.execution.choices import Execution


@dataclass(frozen=True)
class Scale:
    """Everything about an arm but its recipe and seed, and how the arms of this scale are run."""

    name: str
    """cpu, gpu or mi355x."""
    model: ModelConfig
    """Sizes."""
    corpus: str
    """Name of the corpus."""
    seq_len: int
    """Tokens in a sequence."""
    batch_size: int
    """Sequences in a step."""
    steps: int
    """Budget."""
    lr: float
    """Peak learning rate."""
    lr_min: float
    """Learning rate at the end."""
    warmup: int
    """Steps of warm-up."""
    eval_every: int
    """Steps between evaluations."""
    eval_sequences: int
    """Sequences of the fixed evaluation set."""
    seeds: dict[str, tuple[int, ...]]
    """Seeds of each plan; "" for those not named."""
    settings: dict[str, tuple[dict, ...]] = field(default_factory=dict)
    """Plans whose arms leave this scale's setting: the fields of TrainConfig that differ, once for each setting."""
    probe_steps: tuple[int, ...] = ()
    """Pairs of neighbouring steps at which seed 0 of each arm is probed."""
    target_loss: float | None = None
    """Nats a token."""
    stop_at_target: bool = False
    """Whether a run ends at the target."""
    micro_batches: int = 1
    """Parts of a batch."""
    decay_steps: int = 0
    """Length of the schedule; 0: the budget."""
    stall_evaluations: int = 0
    """Evaluations without an improvement after which a run is ended as stalled; 0: never."""
    stall_improvement: float = 0.0
    """Nats a token that count as one."""
    stall_above: float = 0.0
    """Loss, nats a token, above which alone a run can be stalled."""
    jobs: int = 1
    """Arms trained at a time, on each device."""
    compile: bool = False
    """Whether blocks go through torch.compile."""
    capture: bool = False
    """Whether a step runs as one CUDA graph: pays where kernels are short."""
    deterministic: bool = False
    """Whether sums are taken in a fixed order, so that an arm run again gives the same curve to the last bit."""
    ranks_per_arm: int = 1
    """GPUs that train one arm together (FSDP2); 0: as many of those there are as share a batch's parts evenly."""
    recompute_every: int = 0
    """Every n-th block computes its activations again in the backward; 0: none does."""
    checkpoint_minutes: float = 1.0
    """Least time between two checkpoints of an arm, unless saving then takes more than 2% of the time (`resume`)."""
    attention: str = "repeat"
    """Back end of attention, see `execution.attention`."""
    cross_entropy: str = "whole"
    """How the loss is computed, see `execution.cross_entropy`."""
    reshard_after_forward: bool = True
    """Whether a block's gathered parameters are freed between its forward and its backward, on several GPUs."""
    weights_once: bool = False
    """Whether each weight is quantized once a step also in compiled or sharded blocks."""
    append_eod: bool = True
    """Whether documents end with the end-of-document token."""
    trial: dict = field(default_factory=dict)
    """What differs on the toy C4: its text is too little for a large model, and its tokenizer is not Llama's."""

    @property
    def needs_gpu(self) -> bool:
        """Whether steps are executed as a GPU does: its models are too large for a CPU, but for one of a trial."""
        return (self.compile or self.capture) and not self.is_trial

    @property
    def is_trial(self) -> bool:
        """Whether this is a scale as arms on the toy C4 have it."""
        return bool(self.trial) and all(getattr(self, name) == value for name, value in self.trial.items())

    def on_device(self, kind: str) -> Scale:
        """The scale as a device of type `kind` executes it: a CPU takes a trial's blocks eagerly, as compiling them takes
        longer than the trial."""
        return replace(self, compile=False, capture=False) if kind == "cpu" and self.is_trial else self

    @property
    def spread(self) -> bool:
        """Whether arms are for several ranks: then parameters are sharded, on a single GPU too."""
        return self.ranks_per_arm != 1

    def ranks_on(self, gpus: int) -> int:
        """Ranks of an arm on a machine with so many GPUs; on the CPU (0), where they are processes, all is one."""
        return self.ranks_per_arm or max(n for n in range(1, max(gpus, 1) + 1) if self.micro_batches % n == 0)

    def execution(self) -> dict:
        """How a step is executed, which changes no result's meaning: the fields of `Execution`, keywords of `train`."""
        return {f.name: getattr(self, f.name) for f in fields(Execution)}

    def config(self, recipe: str, seed: int, **overrides) -> TrainConfig:
        """The arm `recipe` with `seed`; overrides are fields of TrainConfig."""
        names = {f.name for f in fields(TrainConfig)} & {f.name for f in fields(self)}
        values = {name: getattr(self, name) for name in names}
        values.update(recipe=recipe, seed=seed, scale=self.name)
        if seed != 0:
            values["probe_steps"] = ()
        return TrainConfig.from_dict(_plain({**values, **overrides}))

    def on_corpus(self, corpus: str | None) -> Scale:
        """The scale as arms on `corpus` have it (None: its own): on the toy C4 with the sizes of `trial`."""
        return replace(self, **self.trial) if corpus == TOY else self

    def seeds_of(self, plan: str) -> tuple[int, ...]:
        return self.seeds.get(plan, self.seeds[""])

    def settings_of(self, plan: str) -> tuple[dict, ...]:
        return self.settings.get(plan, ({},))


def _plain(values: dict) -> dict:
    return {k: v.to_dict() if isinstance(v, ModelConfig) else v for k, v in values.items()}


def resized(scale: Scale, **sizes: int) -> dict:
    """The setting of `scale` with another model: same batches and steps, learning rates times its width over the new
    one, as the best rate of a Llama trained with Adam falls about as 1 / width. Not probed."""
    model = replace(scale.model, **sizes)
    lr, lr_min = (rate * scale.model.dim / model.dim for rate in (scale.lr, scale.lr_min))
    return {"model": model, "lr": lr, "lr_min": lr_min, "probe_steps": ()}


def with_experts(scale: Scale) -> dict:
    """The setting of `scale` with 8 experts of half its feed-forward's width, 2 a token: equal active weights."""
    return {"model": replace(scale.model, n_experts=8, ffn_dim=scale.model.ffn_dim // 2), "probe_steps": ()}


def known_entropy(scale: Scale, vocab_size: int) -> dict:
    """The setting of `scale` on the generator whose entropy is known."""
    return {"corpus": "synthetic", "model": replace(scale.model, vocab_size=vocab_size), "probe_steps": ()}


# The learning rate is the one of 1e-3, 2e-3, 3e-3, 4e-3, 8e-3, 1.6e-2 that ended lowest with recipe fp32 (no
# quantization), seed 0, 240 steps: `mxfp4.studies.plans.plan("table1", "cpu", recipes=["fp32"], lr=...)`.
CPU = Scale(
    name="cpu",
    model=ModelConfig(vocab_size=2048, dim=96, n_layers=2, n_heads=3, n_kv_heads=1, ffn_dim=256, max_seq_len=128),
    corpus="prose",
    seq_len=64,
    batch_size=4,
    steps=160,
    lr=3e-3,
    lr_min=3e-4,
    warmup=20,
    eval_every=20,
    eval_sequences=32,
    seeds={"table1": (0, 1), "": (0,)},
    probe_steps=(30, 31, 140, 141),
    jobs=2,
)
CPU = replace(
    CPU,
    settings={
        "sizes": (
            resized(CPU, dim=64, n_layers=1, n_heads=2, ffn_dim=128),
            {},
            resized(CPU, dim=128, n_layers=4, n_heads=4, ffn_dim=384),
        ),
        "others": (resized(CPU, dim=128, n_heads=2, ffn_dim=256),),  # some rotate in blocks of 64
        "synthetic": (known_entropy(CPU, 64),),
        "moe": (with_experts(CPU),),
    },
)

# Four passes over the corpus; a fifth would begin at step 1226. The learning rate is the one of 5e-4, 1e-3, 2e-3, 4e-3
# that ended lowest with recipe bf16, seed 0, with 60 steps of warm-up (runs/pilot/gpu-learning-rate.json). With those,
# fp8 ended above bf16 at that rate, so a second pilot on the two alone, two seeds, lengthened the warm-up to 200 steps,
# with which it does not; of its three rates with 200 steps bf16 ends lowest at this one, and higher than with 60
# (runs/pilot/gpu-warm-up.json).
GPU = Scale(
    name="gpu",
    model=ModelConfig(vocab_size=4096, dim=512, n_layers=10, n_heads=8, n_kv_heads=4, ffn_dim=1408, max_seq_len=512),
    corpus="prose",
    seq_len=512,
    batch_size=32,
    steps=1216,
    lr=2e-3,
    lr_min=2e-4,
    warmup=200,
    eval_every=64,
    eval_sequences=256,
    seeds={"": (0, 1, 2)},
    probe_steps=(200, 201, 1200, 1201),
    jobs=3,
    compile=True,
    capture=True,
    deterministic=True,
)
GPU = replace(
    GPU,
    settings={
        "sizes": (
            resized(GPU, dim=384, n_layers=6, n_heads=6, n_kv_heads=3, ffn_dim=1024),
            {},
            resized(GPU, dim=768, n_layers=14, n_heads=12, n_kv_heads=6, ffn_dim=2048),
        ),
        "synthetic": (known_entropy(GPU, 1024),),
        "moe": (with_experts(GPU),),
    },
)

# Llama 3.1-8B by the MLPerf v5.1 rules (sequence 8192, global batch 32, evaluation every 12,288
# sequences on 1,024, cosine over 1.2 M steps from 8e-4, target 3.3). The budget is twice the reference's
# 179,405 sequences. A run is ended as stalled when, more than 0.5 nats above the target, it gains less than 0.02 nats in
# 61,440 sequences, a third of what the reference takes in all: at that pace the target is four budgets away.
MI355X = Scale(
    name="mi355x",
    model=ModelConfig(
        vocab_size=128256,
        dim=4096,
        n_layers=32,
        n_heads=32,
        n_kv_heads=8,
        ffn_dim=14336,
        max_seq_len=8192,
        rope_theta=500000.0,
    ),
    corpus="c4",
    seq_len=8192,
    batch_size=32,
    steps=11213,
    lr=8e-4,
    lr_min=8e-5,
    warmup=128,
    eval_every=384,
    eval_sequences=1024,
    seeds={"first": (0, 1, 2), "": (0,)},
    target_loss=3.3,
    stop_at_target=True,
    stall_evaluations=5,
    stall_improvement=0.02,
    stall_above=3.8,
    micro_batches=16,
    decay_steps=1_200_000,
    compile=True,
    ranks_per_arm=0,
    checkpoint_minutes=20.0,  # of 96 GB each: a kill costs 10 minutes on average, a disk of 100 MB/s can follow
    attention="auto",
    cross_entropy="chunked",
    append_eod=False,  # as the reference, whose documents are joined without a token in between
)
# On the toy C4 the same machinery trains a model that takes seconds on a GPU and minutes on two cores.
TRIAL = {
    "model": ModelConfig(
        vocab_size=4096,
        dim=256,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        ffn_dim=768,
        max_seq_len=256,
        rope_theta=500000.0,
    ),
    "seq_len": 256,
    "steps": 24,
    "lr": 2e-3,
    "lr_min": 2e-4,
    "warmup": 4,
    "eval_every": 8,
    "eval_sequences": 32,
    "decay_steps": 0,
    "target_loss": None,
    "stop_at_target": False,
}
MI355X = replace(MI355X, trial=TRIAL)

SCALES = {scale.name: scale for scale in (CPU, GPU, MI355X)}


def get_scale(name: str) -> Scale:
    """The scale called `name`; UserError lists the known ones."""
    if name not in SCALES:
        raise UserError(f"scale {name!r} is not known; allowed: {', '.join(SCALES)}")
    return SCALES[name]
