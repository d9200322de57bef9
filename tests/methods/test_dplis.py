"""DPlis' scale and draws."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dpdist.gradients.clipping import FlatClipping
from dpdist.gradients.engine import GradientEngine
from dpdist.gradients.perturbations import Perturbation
from dpdist.methods.base import Method, MethodState
from dpdist.methods.dp_sgd import DPSGD, DPlis
from dpdist.privacy.plan import StepPlan

KEY = bytes(range(32))


def draws_of(method: Method) -> Perturbation:
    step = StepPlan(
        noise_multiplier=1.1, sample_rate=256 / 60_000, expected_batch=256.0, clip_norm=1.0,
        batch_cap=None,
    )  # fmt: skip
    return method.execution().perturbation(step, 0.1536, MethodState(nn.Identity()))


def test_draws():
    draws = draws_of(DPlis())
    assert (draws.count, draws.per_example) == (10, False)
    assert draws.std == pytest.approx(6.6e-3)
    assert draws.gradient_weight == pytest.approx(0.1)
    assert draws_of(DPlis(aggregate="sum")).gradient_weight == 1
    control = draws_of(DPSGD(gradient_scale=10))
    assert (control.count, control.gradient_weight) == (1, 10)


def test_smoothed_gradient_of_a_quadratic():
    """E loss(theta + noise) of a quadratic has the same gradient; K = 400 draws get close to it."""
    model = nn.Linear(3, 1, bias=False)
    inputs, targets = torch.randn(1, 3, generator=torch.Generator().manual_seed(0)), torch.ones(1)

    def squared(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs[:, 0] - targets).square() / 2

    draws = draws_of(DPlis(augmentations=400))
    engine = GradientEngine(model, squared, clipping=FlatClipping(1e6), perturbation=draws)
    smooth = engine.clipped_sum(inputs, targets, draw_key=KEY).flat
    plain = GradientEngine(model, squared, clipping=FlatClipping(1e6))
    reference = plain.clipped_sum(inputs, targets).flat
    # The error is |x| s z / sqrt(400) along x: below 6 standard deviations but for 2e-9.
    bound = 6 * 6.6e-3 * float(inputs.norm()) ** 2 / 20
    assert 0 < float((smooth - reference).norm()) < bound
