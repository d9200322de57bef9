"""What DPlis' theory says of smoothing: Lemma 1, Theorem 3 and the toy example of Equation 1."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from support.benchmarks import load as load_benchmark
from torch import Tensor, nn

from dpdist.gradients.clipping import FlatClipping
from dpdist.gradients.engine import GradientEngine
from dpdist.gradients.perturbations import ParameterPerturbation

pytestmark = pytest.mark.guarantee

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


def test_theorem_three_of_the_engine_s_own_steps():
    """Logistic regression, inputs of norm at most 1: l = 1, beta = 1/4. Batches of a fixed size, as
    the theorem has them; the mean over batches is bounded, each training is not."""
    rng = np.random.default_rng(0)
    n, size, batch, clip, rate, steps = 12, 5, 4, 0.5, 0.5, 8
    x = rng.normal(size=(n + 1, size))
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    x, y = torch.from_numpy(x).float(), torch.from_numpy(rng.choice([-1.0, 1.0], n + 1)).float()

    def softplus(outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.softplus(-targets * outputs[:, 0])

    apart = []
    for _ in range(4):
        twins = [nn.Linear(size, 1, bias=False) for _ in range(2)]
        twins[1].load_state_dict(twins[0].state_dict())
        engines = [GradientEngine(m, softplus, clipping=FlatClipping(clip)) for m in twins]
        for _ in range(steps):
            rows = rng.choice(n, batch, replace=False)
            noise = rng.normal(size=size)
            changed = np.where(rows == 0, n, rows)  # the record that differs
            for engine, model, own in zip(engines, twins, (rows, changed), strict=True):
                total = engine.clipped_sum(x[own], y[own]).flat + torch.from_numpy(noise)
                with torch.no_grad():
                    model.weight -= rate / batch * total[None].float()
        apart.append(float((twins[0].weight - twins[1].weight).detach().norm()))
    bound = 2 * rate * clip * steps / n * (1 + rate / 4) ** (steps - 1)
    assert 0 < float(np.mean(apart)) < bound


def test_theorem_three_is_empty_at_the_paper_s_setting():
    """Table 1 on MNIST: eta 0.1536, C 1, T 6,057, n 60,000; beta = 1 / s of Lemma 1 at R = 40."""
    rate, steps, std = 0.1536, 6057, 40 * 6e-4 * 1.1
    digits = math.log10(2 * rate * steps / 60_000) + (steps - 1) * math.log10(1 + rate / std)
    assert digits > 1000


@pytest.mark.slow
def test_smoothing_leads_to_the_flat_minimum():
    toy = vars(load_benchmark("papers/dplis/toy"))
    theta = np.random.default_rng(1).normal(0, 6, (20, 2))
    step = 1e-6
    shifted = [(toy["loss"](theta + step * e) - toy["loss"](theta - step * e)) for e in np.eye(2)]
    numeric = np.stack(shifted, -1) / (2 * step)
    np.testing.assert_allclose(toy["gradient"](theta), numeric, atol=1e-6)
    plain, smooth = (toy["train"](std, runs=200) for std in (0.0, 5.0))
    assert 0.6 < toy["nearer_flat"](plain) < 0.85
    assert toy["nearer_flat"](smooth) > 0.95
