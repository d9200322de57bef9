"""From a recipe's method to the blocks of the gradient engine."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dpdist.errors import UserError
from dpdist.gradients.clipping import (
    AutomaticClipping,
    Clipping,
    FlatClipping,
    NoClipping,
    PerLayerClipping,
)
from dpdist.gradients.engine import GradientEngine, Objective
from dpdist.gradients.perturbations import Draws, HiddenDraws, InputDraws, OneHiddenDraw
from dpdist.methods.consistency import agreed_targets, weighted_cross_entropy
from dpdist.methods.dplis import dplis_draws
from dpdist.methods.options import (
    DPSGD,
    DPlis,
    HiddenNoiseMethod,
    InputNoise,
    Method,
    TransDenoiser,
)
from dpdist.methods.transdenoiser import SplitEngine, squared_error
from dpdist.models import DENOISER, HiddenNoise
from dpdist.privacy.plan import StepPlan


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Per-example cross-entropy: logits (B, classes), labels (B,) to losses (B,)."""
    return torch.nn.functional.cross_entropy(outputs, targets, reduction="none")


@dataclass(frozen=True)
class Task:
    """What is learned: per-example losses (B,) of (outputs, targets).

    part: the submodule that is trained and whose outputs count; None for the whole model.
    reconstructs: the targets are the clean inputs instead of the labels. consistency: weight of
    the agreement of a record's noisy copies.
    """

    losses: Objective = cross_entropy
    part: str | None = None
    reconstructs: bool = False
    consistency: float = 0.0

    def module(self, model: nn.Module) -> nn.Module:
        """The part of `model` to train."""
        return model if self.part is None else model.get_submodule(self.part)

    def targets(
        self,
        engine: GradientEngine,
        inputs: Tensor,
        labels: Tensor,
        draw_key: bytes,
        record_ids: Tensor,
    ) -> Tensor:
        """What the outputs are compared with; row b depends on record b, the key and the model."""
        if self.consistency:
            return agreed_targets(engine, inputs, labels, self.consistency, draw_key, record_ids)
        return inputs if self.reconstructs else labels


def task_for(method: Method) -> Task:
    """The task of a method: classification, but for those that train a denoiser."""
    if isinstance(method, TransDenoiser):
        return Task(squared_error, DENOISER, reconstructs=True)
    if isinstance(method, InputNoise) and method.consistency:
        return Task(weighted_cross_entropy, consistency=method.consistency)
    return Task()


def engine_for(
    method: Method,
    model: nn.Module,
    clipping: Clipping,
    *,
    expected_batch: float,
    steps: int,
    micro_batch: int | None = None,
    isolate: bool = False,
) -> GradientEngine:
    """The gradient engine of a method, on the part of the model that it trains."""
    task = task_for(method)
    if isolate and (task.consistency or isinstance(method, HiddenNoiseMethod)):
        raise UserError(
            f"model.isolate: method {method.name} with these options runs records together; use "
            "another method, or a model from the zoo without it"
        )
    if isinstance(method, TransDenoiser) and method.variant == "full":
        return SplitEngine(
            task.module(model), method, clipping=clipping, expected_batch=expected_batch,
            steps=steps, micro_batch=micro_batch,
        )  # fmt: skip
    return GradientEngine(
        task.module(model), task.losses, clipping=clipping, micro_batch=micro_batch,
        isolate=isolate,
    )  # fmt: skip


def draws_for(
    method: Method,
    step: StepPlan,
    learning_rate: float,
    hidden: HiddenNoise | None = None,
    run_key: bytes | None = None,
) -> Draws:
    """The perturbation of one step. Scales come from public hyper-parameters only.

    hidden: the noise of a method with hidden noise. run_key: keys the one draw of a run that
    repeats it in every step (paper_faithful).
    """
    if isinstance(method, HiddenNoiseMethod):
        if hidden is None:
            raise UserError(f"method {method.name} needs its hidden noise")
        if method.paper_faithful:
            assert run_key is not None
            return OneHiddenDraw(hidden.module, hidden.std, run_key)
        return HiddenDraws(method.draws, hidden.module, hidden.std)
    if isinstance(method, DPlis):
        return dplis_draws(
            method.radius,
            learning_rate,
            round(step.expected_batch),
            step.noise_multiplier,
            step.clip_norm,
            draws=method.draws,
            aggregate=method.aggregate,
            per_example=method.per_example,
            input_std=method.sigma,
        )
    if isinstance(method, InputNoise | TransDenoiser):
        return InputDraws(method.draws, method.sigma)
    assert isinstance(method, DPSGD)
    return Draws(gradient_scale=method.gradient_scale)


def clipping_for(rule: str, clip_norm: float) -> Clipping:
    """The clipping rule with total sensitivity clip_norm, infinite for "none"."""
    if rule == "none":
        return NoClipping()
    if rule == "automatic":
        return AutomaticClipping(clip_norm)
    if rule == "per-layer":
        return PerLayerClipping(clip_norm)
    return FlatClipping(clip_norm)
