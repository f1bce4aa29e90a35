"""A run's weights, evaluated in the forward of several recipes.

An arm's own forward hides nothing of what it pays, and cannot say where: the weights may be worse, or the forward may blur
good ones. The same weights in a BF16 forward answer a part of that; it also takes away a perturbation that the weights
may have adapted to. In its own forward an arm is evaluated as a user would run it: stochastic rounding becomes nearest.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from mxfp4.layers.linear import weights_kept
from mxfp4.layers.post_training import NAMES as POST_TRAINING
from mxfp4.layers.post_training import quantize_after_training
from mxfp4.layers.recipe import recipe
from mxfp4.training.arm_model import in_recipe
from mxfp4.training.config import TrainConfig
from mxfp4.training.evaluation import Judged, compute_context, judge_windows
from mxfp4.training.model import Llama

OWN = "own"
"""What tables call an arm's own forward; others have the name of their recipe."""


@dataclass
class Forwards:
    """Evaluates `model` at the steps of a run.

    windows: [n, seq + 1] int64; copied: bool [n, seq], see `Judged`; calibration: windows of the training data, for
    forwards that quantize after training.
    """

    config: TrainConfig
    model: Llama
    windows: Tensor
    copied: Tensor | None
    calibration: Tensor
    models: dict[str, Llama] = field(default_factory=dict)
    """One for each forward, made when first needed."""

    def judge(self, step: int, ends: bool) -> dict[str, Judged]:
        """{forward: what it makes of the windows}, the own one first. ends: after a decay, on all windows, and in
        `final_forwards` too."""
        config = self.config
        names = (OWN, *config.eval_forwards, *(config.final_forwards if ends else ()))
        windows = self.windows if ends and config.final_eval_sequences else self.windows[: config.eval_sequences]
        found: dict[str, Judged] = {}
        for name in names:
            if name == config.recipe:
                found[name] = found[OWN]
            elif name not in found:
                model = self._model(name)
                with weights_kept(model):
                    found[name] = judge_windows(model, windows, config.batch_size // config.micro_batches, self.copied)
        return found

    def _model(self, name: str) -> Llama:
        if name in POST_TRAINING:  # fitted to the weights as they are now
            model = in_recipe(self.model, self.config, recipe("bf16")).eval()
            return quantize_after_training(model, self._calibrate)
        if name not in self.models:
            used = recipe(self.config.recipe if name == OWN else name).to_nearest()
            self.models[name] = in_recipe(self.model, self.config, used)
        return self.models[name]

    def _calibrate(self, model: Llama) -> None:
        for windows in self.calibration.split(self.config.batch_size // self.config.micro_batches):
            with compute_context(windows.device):
                model(windows[:, :-1])
