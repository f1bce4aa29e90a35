"""Device memory of a training step, estimated without a device: sizes from the model built on the meta device.

A pure function of the configuration and of how it is run. Each moment of a step that can be its peak is a list of
terms, each with its formula; the peak is the largest moment. Bytes are those that PyTorch's allocator hands out
(`torch.cuda.max_memory_allocated`); what a device needs beside them is `reserve`.

Symbols: P parameters (p of one block, r of the root: embedding, head, last norm), N ranks, T tokens of a
micro-batch, D width, F feed-forward width (of all experts that a token visits), H heads, V vocabulary, b bytes of a
value in the compute type (2: BF16 on a GPU, 4: FP32 on the CPU).

What a block keeps for its backward is read off the model (`training/model.py`, `training/gemms.py`): each RMSNorm its
input and its result in FP32; attention q, k and v (copied for each query head where the back end takes no shared
ones), its output and one FP32 a head; the feed-forward both
projections and the SiLU; each linear layer its X and its W as Wgrad and Dgrad will read them, which the emulated paths
hold dequantized in b bytes a value, the native ones packed (MXFP4: 17/32 bytes, FP8: 1). A compiled block recomputes
what is cheap, and quantizes an input that several layers share once where the recipe draws no random numbers; a
recomputed block keeps its input alone.

Over several ranks (FSDP2): parameters are gathered in FP32, the root's for the whole step, two blocks at a time (one
in work, one on its way; all of them without `reshard_after_forward`); gradients are summed over the ranks once a step, so until its last part a rank holds all of
them. The estimate of a step's blocks is then an upper bound, as how far transfers overlap is not known.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from mxfp4.errors import UserError
from mxfp4.layers.convert import convert
from mxfp4.layers.gemms import per_tensor, serves_both
from mxfp4.layers.linear import MXFP4Linear
from mxfp4.layers.plan import takes_packed
from mxfp4.layers.recipe import Gemm, Operand
from mxfp4.numerics.formats import BLOCK, elem_format
from mxfp4.numerics.ops.fp8_block import SIDE
from mxfp4.training.config import TrainConfig
from mxfp4.training.execution.attention import COPIES
from mxfp4.training.execution.choices import Execution
from mxfp4.training.execution.cross_entropy import CHUNK
from mxfp4.training.model import Block, Llama

WORKSPACE = 64 * 2**20
"""cuBLAS and cuBLASLt (hipBLASLt) work space, 32 MiB each."""
CONTEXT = 1.5e9
"""Assumed: driver context, compiled kernels, buffers of the collectives; not in the allocator's count."""
FRAGMENTATION = 0.05
"""Assumed: share of the peak that the allocator holds and cannot use."""
NVFP4_COPIES = 10
"""FP32 copies of an operand that its quantizer, in plain PyTorch, has alive at once."""
SHARED_INPUT = (("wq", "wk", "wv"), ("wo",), ("w1", "w3"), ("w2",))
"""Linear layers of a block that read the same X."""


@dataclass(frozen=True)
class Term:
    """One summand: what it is, its formula, bytes on a rank."""

    name: str
    formula: str
    bytes: float


@dataclass(frozen=True)
class Moment:
    """A moment of the step and what is alive then beside the terms that always are."""

    name: str
    terms: tuple[Term, ...]

    @property
    def bytes(self) -> float:
        return sum(t.bytes for t in self.terms)


@dataclass(frozen=True)
class Memory:
    """The estimate for one rank."""

    always: Moment
    """Alive from the second step on."""
    moments: tuple[Moment, ...]
    """Candidates for the peak, in the order of a step."""
    block: tuple[Term, ...]
    """What one block keeps for its backward: the last one's terms."""
    kept_twice: bool = False
    """A captured step has a pool of its own beside the one that warmed up."""

    @property
    def worst(self) -> Moment:
        return max(self.moments, key=lambda m: m.bytes)

    @property
    def peak(self) -> float:
        """Bytes, to compare with torch.cuda.max_memory_allocated."""
        return self.always.bytes + self.worst.bytes

    @property
    def reserve(self) -> float:
        """Bytes that the device needs beside the peak."""
        twice = self.worst.bytes if self.kept_twice else 0.0
        return CONTEXT + FRAGMENTATION * self.peak + twice

    @property
    def terms(self) -> tuple[Term, ...]:
        """All summands of the peak."""
        return (*self.always.terms, *self.worst.terms)


def local_batch(config: TrainConfig, ranks: int) -> tuple[int, int]:
    """(sequences of a part, parts of a step on a rank): each rank takes whole parts. UserError when it cannot."""
    if ranks < 1 or config.micro_batches % ranks:
        allowed = ", ".join(str(n) for n in range(1, config.micro_batches + 1) if config.micro_batches % n == 0)
        raise UserError(
            f"{ranks} GPUs cannot share micro_batches={config.micro_batches} of a batch of {config.batch_size}: "
            f"allowed are {allowed}"
        )
    return config.batch_size // config.micro_batches, config.micro_batches // ranks


def estimate(
    config: TrainConfig,
    *,
    ranks: int = 1,
    device: str = "cuda",
    compiled: bool = False,
    recompute_every: int = 0,
    captured: bool = False,
    native: bool = False,
    fp8: bool = False,
    attention: str = "repeat",
    cross_entropy: str = "whole",
    reshard_after_forward: bool = True,
    weights_once: bool = False,
) -> Memory:
    """Memory of a rank that trains `config`, its parameters sharded over `ranks` (FSDP2, each block and the root).

    device: "cuda" (BF16 over FP32 weights) or "cpu" (FP32). compiled: torch.compile on each block.
    recompute_every: activation checkpointing of every n-th block, the first one included; 0: none. captured: a step is
    one CUDA graph. native: the chip multiplies packed operands, so they are kept packed; fp8: those in FP8 with a scale
    a tensor, if no others (`numerics/path.py`). attention, cross_entropy, reshard_after_forward, weights_once: see
    `Execution`; liger-kernel's own chunks are taken for as large as CHUNK. Raises UserError when the batch cannot be dealt to the ranks, and for
    recompute_every < 0.
    """
    with torch.device("meta"):
        model = convert(Llama(config.model), config.recipe, seed=config.seed)
    b = 2 if device == "cuda" else 4
    if config.model.n_experts:  # the loop does neither with experts
        compiled = captured = False
    chosen = Execution(
        compiled, captured, recompute_every=recompute_every, attention=attention, cross_entropy=cross_entropy,
        reshard_after_forward=reshard_after_forward, weights_once=weights_once,
    )  # fmt: skip
    return _Step(config, model, ranks, b, chosen, (native, native or fp8)).memory()


class _Step:
    """The sizes of one step."""

    def __init__(
        self, config: TrainConfig, model: Llama, ranks: int, b: int, chosen: Execution, native: tuple[bool, bool]
    ):
        m, every = config.model, chosen.recompute_every
        self.config, self.model, self.ranks, self.b = config, model, ranks, b
        self.chosen, self.compiled, self.native = chosen, chosen.compile, native
        self.recomputed = [every > 0 and i % every == 0 for i in range(m.n_layers)]
        self.sharded = ranks > 1
        self.keeps_gathered = self.sharded and not chosen.reshard_after_forward
        self.kv = m.n_heads if chosen.attention in COPIES else m.n_kv_heads
        sequences, self.parts = local_batch(config, ranks)
        self.t = sequences * config.seq_len
        self.d, self.v, self.h = m.dim, m.vocab_size, m.n_heads
        self.visits = m.n_experts_per_token if m.n_experts else 1
        self.f = m.ffn_dim * self.visits
        self.shards = sum(-(-p.shape[0] // ranks) * math.prod(p.shape[1:]) for p in model.parameters())
        self.whole = sum(p.numel() for p in model.parameters())
        self.p = sum(p.numel() for p in model.layers[0].parameters())
        self.r = self.whole - self.p * m.n_layers
        self.blocks = [self._block(block) for block in model.layers]

    def memory(self) -> Memory:
        return Memory(self._always(), tuple(self._moments()), tuple(self.blocks[-1]), self.chosen.capture)

    def _always(self) -> Moment:
        config, s = self.config, self.shards
        tokens = 8 * (config.eval_sequences + config.batch_size // self.ranks) * (config.seq_len + 1)
        rope = 8 * self.d // self.h * config.model.max_seq_len
        return Moment("always", (
            Term("parameters, FP32", "4 P/N", 4 * s),
            Term("Adam, two moments", "8 P/N", 8 * s),
            Term("evaluation windows, batch, RoPE", "8 tokens + 8 D/H seq", tokens + rope),
            Term("library work space", "64 MiB", WORKSPACE if self.b == 2 else 0),
        ))  # fmt: skip

    def _moments(self) -> list[Moment]:
        t, d, b = self.t, self.d, self.b
        vd = self.v * d
        grads = Term("gradients, FP32", "4 P/N", 4 * self.shards)
        kept, root, work, gathered = self._kept(), self._root(), self._work(), self._gathered()
        # Gradients of the parts before this one; ranks sum them once a step, and until then hold them whole.
        before = []
        if self.parts > 1:
            size, name = (2, "BF16") if self.sharded and self.config.reduce_dtype == "bfloat16" else (4, "FP32")
            before = [Term(f"gradients of the parts before, whole, {name}", f"{size} P", size * self.whole)]
        first = [] if before else [Term("gradient of the head, FP32", "4 V D", 4 * vd)]
        again = [block for block, r in zip(self.blocks, self.recomputed, strict=True) if r]
        top = again[-1] if again else []  # what the last of them keeps while it is in work
        later, last_later, first_later, all_later = self._kept_weights(bool(before))
        own = Term("input of the first block", "b T D", b * t * d)
        lower = [grads]
        if self.sharded:
            lower.append(Term("gradients of the root, whole", "4 r", 4 * self.r))
        elif not before:
            lower.append(Term("but for the embedding's", "-4 V D", -4 * vd))
        all_gathered = gathered if self.keeps_gathered else []
        beside = (*before, *root, *all_gathered)
        end = [Term("gradient of its output", "(4 + b) T D", (4 + b) * t * d)]
        if self.sharded:
            end.append(Term("gradients of the root, whole and in reduction", "8 r", 8 * self.r))
        if before:
            end.append(Term("gradient of the embedding, FP32", "4 V D", 4 * vd))
        weight = Term("gradient of a weight, FP32", "4 D F", 4 * d * self.config.model.ffn_dim)
        return [
            Moment("forward, in the last block", (*before, *root, *kept, *later, *gathered, *work)),
            *(Moment(name, (*beside, *kept, *later, *terms)) for name, terms in self._at_the_loss()),
            Moment("backward, in the last block", (
                *before, *first, *root, kept[0], *last_later, *top, *gathered, *self._reduced(), *work, weight
            )),
            Moment("backward, in the first block", (
                *lower, *root, own, *self.blocks[0], *first_later, *gathered, *self._reduced(), *work, weight
            )),
            Moment("backward, at the embedding", (grads, *root, *all_later, *end)),
            Moment("optimizer", (grads,)),
            Moment("evaluation, at the loss", (*root, *all_gathered, *self._evaluated())),
        ]  # fmt: skip

    def _logits(self) -> list[Term]:
        """Logits whose losses are made: all at once, or those of a chunk."""
        tokens, name = (self.t, "T") if self.chosen.cross_entropy == "whole" else (min(CHUNK, self.t), "C")
        tv, b = tokens * self.v, self.b
        logits = [Term("logits in the compute type", f"b {name} V", b * tv)] if b == 2 else []
        return [*logits, Term("logits and log-probabilities, FP32", f"8 {name} V", 8 * tv)]

    def _evaluated(self) -> list[Term]:
        cast = [Term("head in BF16", "2 V D", 2 * self.v * self.d)] if self.b == 2 else []
        return [*(cast if self.chosen.cross_entropy != "whole" else []), *self._logits()]

    def _at_the_loss(self) -> list[tuple[str, list[Term]]]:
        """The moments at the loss, with what is alive beside what the forward leaves."""
        b, tv, vd = self.b, self.t * self.v, self.v * self.d
        if self.chosen.cross_entropy == "whole":
            dw = 4 if b == 4 else 6  # in BF16, then FP32
            return [
                ("forward, at the loss", self._logits()),
                ("backward, at the loss", [Term("log-probabilities and two gradients, FP32", "12 T V", 12 * tv)]),
                ("backward, at the head", [
                    Term("gradient of the logits", "b T V", b * tv), Term("gradient of the head", f"{dw} V D", dw * vd)
                ]),
            ]  # fmt: skip
        gradients = Term("gradients of the head, FP32, and of its X", "4 V D + b T D", 4 * vd + b * self.t * self.d)
        copies = [Term("product that is added to it, BF16 and FP32", "6 V D", 6 * vd)]
        liger = self.chosen.cross_entropy == "liger"
        return [("at the loss, in chunks", [gradients, *self._logits(), *(copies if liger else [])])]

    def _kept(self) -> list[Term]:
        """What the forward leaves for the backward; blocks first, as one term."""
        t, d, b = self.t, self.d, self.b
        pairs = list(zip(self.blocks, self.recomputed, strict=True))
        total = sum(b * t * d if again else sum(term.bytes for term in block) for block, again in pairs)
        again = sum(self.recomputed)
        name = f"activations of {len(pairs) - again} blocks" + (f", inputs of {again}" if again else "")
        blocks = Term(name, "see the block's terms, b T D", total)
        kept = [blocks, Term("last norm and the head's X", "(8 + b) T D", (8 + b) * t * d)]
        if b == 2:
            kept.append(Term("head in BF16", "2 V D", 2 * self.v * d))
        return kept

    def _kept_weights(self, parts: bool) -> tuple[list[Term], ...]:
        """Quantized weights that wait for the next part (`linear.weights_kept`: one rank, not compiled; elsewhere
        `linear.weights_made`), beside what the blocks keep anyway: in the forward, in the backward of the last block, of
        the first one, at the end."""
        if not parts or ((self.sharded or self.compiled) and not self.chosen.weights_once):
            return [], [], [], []
        fprop, dgrad = zip(*(self._weights(block) for block in self.model.layers), strict=True)
        again = [d for d, r in zip(dgrad, self.recomputed, strict=True) if r]
        return tuple(
            [Term("quantized W, kept for the next part", "b (packed: 17/32) in out, each", sum(fprop) + sum(more))]
            for more in (again, again[:-1], dgrad[1:], dgrad)
        )

    def _weights(self, block: Block) -> tuple[float, float]:
        """Bytes of W that the linear layers of a block hold for Fprop, where not what Dgrad reads, and for Dgrad."""
        fprop = dgrad = 0.0
        for layer in block.modules():
            if isinstance(layer, MXFP4Linear) and layer.keepable:
                ops, n = layer.recipe.operands(), layer.in_features * layer.out_features
                one, two = ops["fprop", "w"], ops["dgrad", "w"]
                copied = not (two.format == "fp32" and self.b == 4)
                dgrad += copied * self._size(two, layer.recipe.dgrad) * n
                cast = one.format in ("bf16", "fp32") and one.hadamard is None  # both read one cast of W
                codes = per_tensor(one) and takes_packed(layer.recipe.dgrad, *self.native)  # stored once an orientation
                shared = one == two and (cast or serves_both(one)) and not codes
                fprop += (not shared) * self._size(one, layer.recipe.fprop) * n
        return fprop, dgrad

    def _block(self, block: Block) -> list[Term]:
        """What one block keeps for its backward, by kind."""
        t, d, f, b = self.t, self.d, self.f, self.b
        x_bytes, w_bytes = self._operands(block)
        copied, kv = self.kv == self.h, 2 * t * d * self.kv / self.h
        attention = Term(
            "attention: q, k, v, output", "4 b T D + 4 T H" if copied else "2 b T (D + D H_kv / H) + 4 T H",
            b * (2 * t * d + kv) + 4 * t * self.h,
        )  # fmt: skip
        if self.compiled:
            terms = [
                Term("residual stream, before and inside", "2 b T D", 2 * b * t * d),
                attention,
                Term("feed-forward: two projections", "2 b T F", 2 * b * t * f),
            ]
        else:
            terms = [
                Term("norms, FP32", "16 T D", 16 * t * d),
                attention,
                Term("feed-forward: two projections, SiLU", "3 b T F", 3 * b * t * f),
            ]
        if self.visits > 1:
            terms.append(Term("router's X, experts' outputs", "4 T D + b k T D", (4 + b * self.visits) * t * d))
        return [
            *terms,
            Term("X of the linear layers, for Wgrad", "b (packed: 17/32) T in, each", x_bytes),
            Term("W of the linear layers, for Dgrad", "b (packed: 17/32) in out, each", w_bytes),
        ]

    def _operands(self, block: Block) -> tuple[float, float]:
        """Bytes of X and W that the linear layers of a block keep."""
        x_bytes = w_bytes = 0.0
        seen: set[tuple] = set()
        for name, layer in block.named_modules():
            if not isinstance(layer, MXFP4Linear):
                continue
            short = name.rpartition(".")[2]
            group = next(i for i, names in enumerate(SHARED_INPUT) if short in names)
            tokens = self.t * self.visits / self.config.model.n_experts if "experts." in name else self.t
            ops = layer.recipe.operands()
            x, w = ops["wgrad", "x"], ops["dgrad", "w"]
            key = (name.rpartition(".")[0], group, x)
            source = x.format == "bf16" and x.hadamard is None  # the very tensor that came in
            one_for_all = source or (self.compiled and not (x.is_random or (x.is_mx and layer.recipe.is_random)))
            kept_anyway = source and short == "wo"  # it is attention's output
            if not (one_for_all and key in seen) and not kept_anyway:
                x_bytes += self._size(x, layer.recipe.wgrad) * tokens * layer.in_features
            seen.add(key)
            if not (w.format == "fp32" and self.b == 4):  # the parameter itself
                w_bytes += self._size(w, layer.recipe.dgrad) * layer.in_features * layer.out_features
        return x_bytes, w_bytes

    def _size(self, op: Operand, gemm: Gemm) -> float:
        """Bytes of an element of `op` that waits for `gemm`."""
        if takes_packed(gemm, *self.native):
            scales = 1 / BLOCK if op.is_mx else 0.0
            if op.format == "fp8-block":  # FP32
                scales = 4 / SIDE if op.block == "1d" else 4 / SIDE**2
            return elem_format(op.elem or "e2m1").bits / 8 + scales
        return 4 if op.format in ("fp32", "fp8-block") else self.b

    def _work(self) -> list[Term]:
        """The most that a block has in work beside what it keeps: its w2, in the forward or when computed again."""
        t, d, b, ffn = self.t, self.d, self.b, self.config.model.ffn_dim
        linears = [m for m in self.model.modules() if isinstance(m, MXFP4Linear)]
        formats = {op.format for m in linears for op in m.recipe.operands().values()}
        terms = [
            Term("feed-forward's product and its operand", "2 b T F", 2 * b * t * self.f),
            Term("W and its operand", "2 b D F", 2 * b * d * ffn),
            Term("residual stream, its gradient, output", "3 b T D", 3 * b * t * d),
        ]
        if "nvfp4" in formats:
            copies = NVFP4_COPIES * 4
            terms.append(Term("NVFP4 quantizer, FP32 copies", f"{copies} T F", copies * t * self.f))
        return terms

    def _gathered(self) -> list[Term]:
        """Gathered parameters while a block is in work."""
        if self.keeps_gathered:
            return [Term("all blocks gathered, FP32", "4 p L", 4 * self.p * len(self.blocks))]
        return [Term("two blocks gathered, FP32", "8 p", 8 * self.p)] if self.sharded else []

    def _reduced(self) -> list[Term]:
        """Gradients of a block on their way to the ranks."""
        if not self.sharded:
            return []
        return [Term("gradients of two blocks, whole and in reduction", "12 p", 12 * self.p)]

    def _root(self) -> list[Term]:
        return [Term("embedding and head gathered, FP32", "4 r", 4 * self.r)] if self.sharded else []
