"""What DPlis' theory says of smoothing: Lemma 1, Theorem 3 and the toy example of Equation 1."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from dpdist.gradients.clipping import FlatClipping
from dpdist.gradients.engine import GradientEngine
from dpdist.gradients.perturbations import ParameterPerturbation, Perturbation
from dpdist.methods.base import Method, MethodState
from dpdist.methods.dp_sgd import DPSGD, DPlis
from dpdist.privacy.plan import PrivacyPlan

KEY = bytes(range(32))


def _slopes(theta: float, std: float) -> np.ndarray:
    """Of |theta|, 1-Lipschitz with a kink, by the engine: 2,000 weights, each with own noise."""
    model = nn.Linear(1, 2000, bias=False)
    nn.init.constant_(model.weight, theta)
    engine = GradientEngine(
        model,
        lambda outputs, targets: outputs.abs().sum(1),
        clipping=FlatClipping(1e3),
        perturbation=ParameterPerturbation(1, std),
    )
    return engine.clipped_sum(torch.ones(1, 1), torch.zeros(1), draw_key=KEY).flat.numpy()


def test_lemma_one_the_smoothed_absolute_value():
    """E |theta + s Z| has slope 2 Phi(theta / s) - 1: it rises by sqrt(2/pi) / s at most, and the
    lemma says 1/s. Draws of one key are the same at all points, so that their error is, too."""
    std, points = 0.5, (-0.4, -0.1, 0.1, 0.4)
    draws = [_slopes(theta, std) for theta in points]
    slopes = [each.mean() for each in draws]
    exact = [math.erf(theta / std / math.sqrt(2)) for theta in points]
    # Means of signs, whose standard deviation is below 1 / sqrt(2000); for each but for 1e-6.
    assert slopes == pytest.approx(exact, abs=5 / math.sqrt(2000))
    rises = np.diff(slopes) / np.diff(points)
    assert rises.max() < 1 / std
    assert rises[1] == pytest.approx(math.sqrt(2 / math.pi) / std, abs=0.3)
    # Without smoothing no constant would do, nor for any one draw: the lemma is of the mean.
    assert [_slopes(theta, 0.0).mean() for theta in points] == pytest.approx([-1, -1, 1, 1])
    assert set(np.concatenate(draws).round(6)) == {-1.0, 1.0}


def test_theorem_three_is_attained_up_to_a_constant():
    """Two trainings that differ in one of n records, same batches and noise: parameters are at most
    (2 eta C T / n)(1 + eta beta)^(T-1) apart, so losses at most l times that. Worst case: a loss
    curved downwards, and a record that pulls the other way."""
    n, clip, rate, steps, beta = 50, 1.0, 0.1, 30, 0.5
    theta, other = 0.0, 0.0
    for _ in range(steps):  # batches of all records; -beta theta^2 / 2, clipped
        pull = [float(np.clip(-beta * t, -clip, clip)) for t in (theta, other)]
        theta -= rate * ((n - 1) * pull[0] + clip) / n
        other -= rate * ((n - 1) * pull[1] - clip) / n
    bound = 2 * rate * clip * steps / n * (1 + rate * beta) ** (steps - 1)
    exact = 2 * rate * clip / n * ((1 + rate * beta) ** steps - 1) / (rate * beta)
    assert exact == pytest.approx(abs(theta - other), rel=0.05)
    assert bound / 3 < abs(theta - other) <= exact < bound


def test_draws_have_the_scale_of_the_papers_mnist_setting() -> None:
    """eta/L = 6e-4, sigma 1.1, C 1 (DPlis, Table 1)."""
    plan = PrivacyPlan.dp_sgd(
        records=60_000, batch_size=256, noise_multiplier=1.1, steps=1, delta=1e-5
    )

    def draws_of(method: Method) -> Perturbation:
        return method.execution().perturbation(plan.step(0), 0.1536, MethodState(nn.Identity()))

    draws = draws_of(DPlis())
    assert (draws.count, draws.per_example) == (10, False)
    assert draws.std == pytest.approx(6.6e-3)
    assert draws.gradient_weight == pytest.approx(0.1)
    assert draws_of(DPlis(aggregate="sum")).gradient_weight == 1
    control = draws_of(DPSGD(gradient_scale=10))
    assert (control.count, control.gradient_weight) == (1, 10)
