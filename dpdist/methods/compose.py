"""From a recipe's method to the blocks of the gradient engine."""

from __future__ import annotations

import torch
from torch import Tensor

from dpdist.gradients.clipping import AutomaticClipping, Clipping, FlatClipping, PerLayerClipping
from dpdist.gradients.perturbations import Draws, InputDraws
from dpdist.methods.dplis import dplis_draws
from dpdist.methods.options import DPlis, InputNoise, Method
from dpdist.privacy.plan import StepPlan


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Per-example cross-entropy: logits (B, classes), labels (B,) to losses (B,)."""
    return torch.nn.functional.cross_entropy(outputs, targets, reduction="none")


def draws_for(method: Method, step: StepPlan, learning_rate: float) -> Draws:
    """The perturbation of one step. Scales come from public hyper-parameters only."""
    if isinstance(method, DPlis):
        return dplis_draws(
            method.radius,
            learning_rate,
            round(step.expected_batch),
            step.noise_multiplier,
            step.clip_norm,
            draws=method.draws,
            aggregate=method.aggregate,
        )
    if isinstance(method, InputNoise):
        return InputDraws(method.draws, method.sigma)
    return Draws(gradient_scale=method.gradient_scale)


def clipping_for(rule: str, clip_norm: float) -> Clipping:
    """The clipping rule with total sensitivity clip_norm."""
    if rule == "automatic":
        return AutomaticClipping(clip_norm)
    if rule == "per-layer":
        return PerLayerClipping(clip_norm)
    return FlatClipping(clip_norm)
