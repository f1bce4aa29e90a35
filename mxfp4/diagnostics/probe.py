"""The probe: looks at a run's own tensors and gradients at pairs of consecutive steps, and leaves no trace in it.

A probe is called by the training loop before a step, with the model and the step's batch, and returns tidy rows:

    step, recipe, layer, gemm, tensor, metric, value

`recipe` is what was applied to the tensors. It is the arm's own, and for an arm without FP4 also recipes that the arm
did not train with ("what would MXFP4 do here"): for the bf16 arm all of WOULD, on the same weights and batch, which
makes recipes comparable. `layer` is a full name, or "all" for the whole model; `gemm` and `tensor` say what the metric
is of (tables in `operand_error` and `transposition`). On top of those:

| gemm, tensor   | metric                | meaning                                                                 |
|----------------|-----------------------|-------------------------------------------------------------------------|
| "", "dw"       | error, cosine, bias   | the weight's whole gradient against a BF16 backward, same weights, batch|
| "", "dw"       | systematic, pattern_redraw | as for products, between two draws of the recipe's random numbers  |
| "", "dw"       | gradient_to_noise     | norm of the BF16 gradient over the norm of its error: 1 / error         |
| "", "dw"       | gradient_to_noise_mean | the same, with the norm of the mean gradient, estimated (see below)    |
| fprop, dgrad "w" | pattern_next        | cosine of the error of Q(W), unrotated, at step t and at t + 1          |
| fprop, dgrad "w" | pattern_redraw      | the same between two draws at one step: only randomness differs         |
| wgrad "dw"     | pattern_next          | cosine of Wgrad's own error at step t and at t + 1                      |
| wgrad "dw"     | pattern_next_held     | the same with the batch held: weights and random numbers differ         |
| "", "dw"       | pattern_next          | cosine of the gradient's error (against BF16) at t and at t + 1         |

The first step of a pair gives the statistics, the second (t + 1, seen by the same object) the `pattern_next` rows. A
run that was resumed between the two treats the second as a first one. Of a recipe with Quartet's forward only the whole
gradient is measured.

**Gradient to noise.** "FP4 All the Way" (Chmiel et al., arXiv 2505.19115) finds that training in FP4 becomes less
effective once the norm of the gradient falls below about sqrt(3) times its quantization noise. Here the noise is the
whole error, dW under the recipe less dW under BF16: one draw of the recipe's random numbers, bias included, errors that
other layers pass on included. Both gradients have the same weights and the same sequences: at most `max_tokens` of the
step's batch, which need not be all of it. Two numerators:

- `gradient_to_noise`: the norm of these sequences' BF16 gradient r. It is larger than the norm of the mean gradient m
  over all data, because r has sampling noise: E|r|^2 = |m|^2 + variance / sequences. Few tokens make the ratio large.
- `gradient_to_noise_mean`: the square root of <r1, r2>, where r1 and r2 are the BF16 gradients of the two halves of the
  sequences. The halves are independent, so <r1, r2> estimates |m|^2 without bias. A negative product keeps its sign,
  -sqrt(-<r1, r2>): the mean of value * |value| over steps then estimates the squared ratio, whereas the mean of the
  values is too low. Missing where there is one sequence. With experts it is approximate, because the load-balance loss
  is no mean over sequences.

Both are of one layer's weight, or of all parameters together in the rows of layer "all" (sums of squares before the
division). `Probe.light` gives these rows and those of `error_split` alone, for steps all through a run.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from mxfp4.diagnostics import error_split, operand_error, transposition
from mxfp4.diagnostics.extra_backward import (
    capturing,
    depth,
    gradients,
    product_of_halves,
    quantized_layers,
    recipe_of,
    untouched,
)  # fmt: skip
from mxfp4.diagnostics.operand_error import Captured, Rows
from mxfp4.layers.linear import MXFP4Linear
from mxfp4.layers.recipe import FP4, Operand, Recipe, layer_index
from mxfp4.numerics.scale_rules import SCALE_RULES

COLUMNS = ("step", "recipe", "layer", "gemm", "tensor", "metric", "value")
KINDS = ("wq", "wo", "w1", "w2")
WOULD = ("mxfp4", "mxfp4+sr", "mxfp4+rht16", "mxfp4+h16")
ROTATED = "mxfp4+h32"


@dataclass
class _Seen:
    """What the second step of a pair needs of the first."""

    step: int
    batch: Tensor
    errors: dict[tuple[str, str, str, str], Tensor] = field(default_factory=dict)
    """{(recipe, layer, gemm, tensor): error pattern}."""


class Probe:
    """Callable for the training loop: `probe(model, step, batch)` -> rows; `light` for the cheap ones alone.

    blocks: how many transformer blocks are looked at layer by layer, spread from the first to the last; None is
    3 on a GPU, 2 on the CPU. kinds: which of their layers, by the last part of the name; those left out resemble one
    that is in. max_tokens: how much of the batch is used, in whole sequences; None is 8192 on a GPU, 256 on
    the CPU. draws: repetitions that tell bias from noise for recipes with random numbers; None is 4 on a GPU, 2 on the
    CPU.
    """

    def __init__(
        self, *, blocks: int | None = None, kinds: tuple[str, ...] = KINDS, max_tokens: int | None = None,
        draws: int | None = None,
    ):  # fmt: skip
        for what, given, least in (("blocks", blocks, 1), ("max_tokens", max_tokens, 1), ("draws", draws, 2)):
            if given is not None and given < least:
                raise ValueError(f"{what}={given} must be at least {least}")
        self.blocks, self.kinds, self.max_tokens, self.draws = blocks, kinds, max_tokens, draws
        self._last: _Seen | None = None

    def __call__(self, model: nn.Module, step: int, batch: Tensor) -> list[dict]:
        """Rows for `step`; `batch` is [sequences, seq + 1]. The model is as it was, apart from time passed."""
        look = self._look(model, step, batch)
        before = self._last if self._last is not None and self._last.step == step - 1 else None
        with untouched(model):
            look.take(before)
        self._last = look.seen
        return look.rows()

    def light(self, model: nn.Module, step: int, batch: Tensor) -> list[dict]:
        """The rows of `gradient_to_noise`, `gradient_to_noise_mean` and `error_split` alone, for a single `step`.

        Arguments, layers, tokens and recipes as in a call, which leaves no trace either. A call at the first step of a
        pair gives the same rows among others; pairs are not affected by what lies between them.
        """
        look = self._look(model, step, batch)
        with untouched(model):
            look.take_light()
        return look.rows()

    def _look(self, model: nn.Module, step: int, batch: Tensor) -> _Look:
        max_tokens, blocks, draws = (256, 2, 2) if batch.device.type == "cpu" else (8192, 3, 4)
        batch = batch[: max((self.max_tokens or max_tokens) // (batch.shape[1] - 1), 1)]
        layers = _chosen(model, self.blocks or blocks, self.kinds)
        return _Look(model, step, batch, layers, self.draws or draws)


class _Look:
    """One call of a probe: measurements pile up on the device and come over together."""

    def __init__(self, model: nn.Module, step: int, batch: Tensor, layers: dict[str, MXFP4Linear], draws: int):
        self.model, self.step, self.batch, self.layers, self.draws = model, step, batch, layers, draws
        self.n_layers = depth(model)
        self.seen = _Seen(step, batch)
        self.halves: dict[str, Tensor] = {}
        self.found: dict[tuple[str, str, str, str, str], Tensor] = {}

    def take(self, before: _Seen | None) -> None:
        tensors, own = self._captured(self.batch)
        reference = self._reference(own)
        if before is None:
            self.halves = product_of_halves(self.model, self.batch, self.step, reference)
        names = recipes_for(self.model)
        for name in names:
            self._gradient(name, own, reference, before)
            for layer in tensors.values():
                if not self._recipe(name, layer.fqn).quest:  # its GEMMs read a projection of these tensors
                    self._layer(name, layer, before)
        if before is not None:
            self._held(before, names)
            return
        for i, layer in enumerate(tensors.values()):
            if i == 0:
                self._add("", layer.fqn, transposition.tile_rows(layer))
            if own_recipe(self.model) == "bf16":
                self._variants(layer)

    def take_light(self) -> None:
        tensors, own = self._captured(self.batch)
        reference = self._reference(own)
        self.halves = product_of_halves(self.model, self.batch, self.step, reference)
        squares = {n: (r * r).sum() for n, r in reference.items()}
        for name in recipes_for(self.model):
            got = self._under(name, own)
            errors = {n: (got[n] - r).square().sum() for n, r in reference.items() if n in got}
            self._noise(name, errors, squares)
            for layer in tensors.values():
                used = self._recipe(name, layer.fqn)
                if not used.quest:
                    self._add(name, layer.fqn, operand_error.split_rows(layer, used, self._seed(layer.fqn, 0)))

    def _under(self, name: str, own: dict[str, Tensor]) -> dict[str, Tensor]:
        """The whole model's gradient under the recipe `name`; `own` is that of the model's own recipe."""
        return own if name == own_recipe(self.model) else gradients(self.model, self.batch, self.step, name)

    def _reference(self, own: dict[str, Tensor]) -> dict[str, Tensor]:
        return self._under("bf16", own)

    def _noise(self, name: str, errors: dict[str, Tensor], squares: dict[str, Tensor]) -> None:
        """Gradient to noise from {parameter: squared norm} of the gradient's error and of the BF16 gradient."""
        layers = {fqn: [f"{fqn}.weight"] for fqn in self.layers if f"{fqn}.weight" in errors}
        for fqn, names in (layers | {"all": list(errors)}).items():
            error, square = (torch.stack([found[n] for n in names]).sum() for found in (errors, squares))
            rows: Rows = {("", "dw", "gradient_to_noise"): (square / error).sqrt()}
            if self.halves:
                zero = torch.zeros_like(error)
                mean = torch.stack([self.halves.get(n, zero) for n in names]).sum() / error
                rows["", "dw", "gradient_to_noise_mean"] = mean.sign() * mean.abs().sqrt()
            self._add(name, fqn, rows)

    def _captured(self, batch: Tensor) -> tuple[dict[str, Captured], dict[str, Tensor]]:
        with capturing(self.layers) as tensors:
            own = gradients(self.model, batch, self.step)
        return tensors, own

    def _recipe(self, name: str, fqn: str) -> Recipe:
        layer = self.layers[fqn]
        return layer.recipe if name == layer.recipe.name else recipe_of(layer, name, self.n_layers)

    def _seed(self, fqn: str, draw: int) -> Tensor:
        return operand_error.fresh_seed(self.layers[fqn].draws.state[0], self.step, draw)

    def _layer(self, name: str, layer: Captured, before: _Seen | None) -> None:
        """Operands, products and error patterns of one layer under one recipe."""
        used = self._recipe(name, layer.fqn)
        seeds = [self._seed(layer.fqn, draw) for draw in range(self.draws)]
        made = operand_error.prepared(layer, used, seeds[0])
        weights = operand_error.weight_errors(layer, used, seeds[0], made)
        for gemm, error in weights.items():
            self._pattern(name, layer.fqn, gemm, "w", error, before)
        if before is None:
            rows, dw_error = operand_error.product_rows(layer, used, seeds, made)
            rows |= operand_error.operand_rows(layer, used, seeds[0], made)
            rows |= transposition.transposition_rows(layer, used, seeds[0], made)
            again = operand_error.weight_errors(layer, used, seeds[1]) if used.is_random else weights
            for gemm, error in weights.items():
                rows[gemm, "w", "pattern_redraw"] = operand_error.pattern_cosine(error, again[gemm])
            self._add(name, layer.fqn, rows)
        else:
            dw_error = operand_error.dw_error(layer, used, made)
        self._pattern(name, layer.fqn, "wgrad", "dw", dw_error, before)

    def _variants(self, layer: Captured) -> None:
        """Scale rules, another rotation and block shapes, on the tensors of an arm without FP4."""
        seed = self._seed(layer.fqn, 0)
        for rule in SCALE_RULES:
            self._add(f"mxfp4+{rule}", layer.fqn, operand_error.rule_rows(layer, Operand("mxfp4", scale_rule=rule)))
        for name in (ROTATED, *transposition.VARIANTS):
            used = self._recipe(name, layer.fqn)
            if used is self.layers[layer.fqn].recipe or name in WOULD:  # does not fit; is there already
                continue
            if name == ROTATED:
                rows = operand_error.operand_rows(layer, used, seed)
            else:
                rows = transposition.transposition_rows(layer, used, seed)
                if used.wgrad.a.block == "2d":  # one scale for 32 tokens: what is left of G
                    found = operand_error.operand_rows(layer, used, seed)
                    rows |= {key: row for key, row in found.items() if key[1] == "g" or key[2] in error_split.METRICS}
            self._add(name, layer.fqn, rows)

    def _gradient(self, name: str, own: dict, reference: dict, before: _Seen | None) -> None:
        """The whole model's gradient under one recipe, against BF16's; experts that saw no token have none."""
        got = self._under(name, own)
        shown = {f"{fqn}.weight": fqn for fqn in self.layers}
        again = None
        if before is None and any(self._recipe(name, fqn).is_random for fqn in self.layers):
            again = gradients(self.model, self.batch, self.step, name, draw=1)
        common = [n for n in got if n in reference and (again is None or n in again)]
        if before is None:
            sums = {n: _sums(got[n], reference[n], again and again[n] - reference[n]) for n in common}
            for n, fqn in shown.items():
                if n in sums:
                    self._add(name, fqn, _from_sums(sums[n]))
            self._add(name, "all", _from_sums(torch.stack(list(sums.values())).sum(0)))
            self._noise(name, {n: s[0] for n, s in sums.items()}, {n: s[2] for n, s in sums.items()})
        for n in common:
            if n in shown:
                self._pattern(name, shown[n], "", "dw", got[n] - reference[n], before)

    def _held(self, before: _Seen, names: tuple[str, ...]) -> None:
        """Wgrad's error on the batch of the step before, with the weights and random numbers of this one."""
        tensors, _ = self._captured(before.batch)
        for fqn, layer in tensors.items():
            for name in names:
                used = self._recipe(name, fqn)
                if used.quest:
                    continue
                error = operand_error.dw_error(layer, used, operand_error.prepared(layer, used, self._seed(fqn, 0)))
                first = before.errors.get((name, fqn, "wgrad", "dw"))
                if first is not None:
                    cosine = operand_error.pattern_cosine(first, error)
                    self._add(name, fqn, {("wgrad", "dw", "pattern_next_held"): cosine})

    def _pattern(self, name: str, fqn: str, gemm: str, tensor: str, error: Tensor, before: _Seen | None) -> None:
        """Keep an error pattern for the next step, and compare it with the last one's."""
        key = name, fqn, gemm, tensor
        self.seen.errors[key] = error
        if before is not None and key in before.errors:
            self._add(
                name, fqn, {(gemm, tensor, "pattern_next"): operand_error.pattern_cosine(before.errors[key], error)}
            )

    def _add(self, name: str, fqn: str, rows: Rows) -> None:
        self.found |= {(name, fqn, *key): value for key, value in rows.items()}

    def rows(self) -> list[dict]:
        if not self.found:
            return []
        values = torch.stack([v.float() for v in self.found.values()]).tolist()
        return [
            dict(zip(COLUMNS, (self.step, *key, value), strict=True))
            for key, value in zip(self.found, values, strict=True)
        ]


def own_recipe(model: nn.Module) -> str:
    """Name of the recipe that the model trains with."""
    return next(iter(quantized_layers(model).values())).recipe.name


def recipes_for(model: nn.Module) -> tuple[str, ...]:
    """The recipes that a probe measures on `model`: its own, and where that has no FP4, what MXFP4 would do."""
    own = own_recipe(model)
    if own == "bf16":
        return WOULD
    return (own, "mxfp4") if _is_plain(model) else (own,)


def _is_plain(model: nn.Module) -> bool:
    """Whether no layer has an FP4 operand."""
    layers = quantized_layers(model).values()
    return all(op.format not in FP4 for layer in layers for op in layer.recipe.operands().values())


def _chosen(model: nn.Module, blocks: int, kinds: tuple[str, ...]) -> dict[str, MXFP4Linear]:
    """The converted layers of those kinds in `blocks` blocks from first to last (of experts, the first).

    All of them in a model whose layers have other names.
    """
    layers, n = quantized_layers(model), depth(model)
    blocks = min(blocks, n)
    kept = {round(i * (n - 1) / max(blocks - 1, 1)) for i in range(blocks)} | {None}
    found = {
        fqn: m
        for fqn, m in layers.items()
        if layer_index(fqn) in kept
        and fqn.rpartition(".")[2] in kinds
        and (".experts." not in fqn or ".experts.0." in fqn)
    }
    return found or layers


def _sums(got: Tensor, reference: Tensor, again: Tensor | None) -> Tensor:
    """The inner products that gradient metrics are made of; they add up over tensors."""
    e = got - reference
    other = e if again is None else again
    pairs = ((e, e), (e, reference), (reference, reference), (got, reference), (got, got), (e, other), (other, other))
    return torch.stack([(a * b).sum() for a, b in pairs])


def _from_sums(s: Tensor) -> Rows:
    ee, er, rr, gr, gg, shared, oo = s
    found = {
        "error": (ee / rr).sqrt(),
        "bias": er / rr,
        "cosine": gr / (gg * rr).sqrt(),
        "systematic": (shared.clamp(min=0) / rr).sqrt(),
        "pattern_redraw": shared / (ee * oo).sqrt(),
    }
    return {("", "dw", metric): value for metric, value in found.items()}
