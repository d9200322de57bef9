"""From a recipe's method to the blocks of the gradient engine."""

from __future__ import annotations

import torch
from torch import Tensor

from dpdist.errors import UserError
from dpdist.gradients.clipping import (
    AutomaticClipping,
    Clipping,
    FlatClipping,
    NoClipping,
    PerLayerClipping,
)
from dpdist.gradients.perturbations import Draws, HiddenDraws, InputDraws, OneHiddenDraw
from dpdist.methods.dplis import dplis_draws
from dpdist.methods.options import DPSGD, DPlis, HiddenNoiseMethod, InputNoise, Method
from dpdist.models import HiddenNoise
from dpdist.privacy.plan import StepPlan


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Per-example cross-entropy: logits (B, classes), labels (B,) to losses (B,)."""
    return torch.nn.functional.cross_entropy(outputs, targets, reduction="none")


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
        )
    if isinstance(method, InputNoise):
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
