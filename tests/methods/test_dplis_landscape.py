"""How flat a minimum is, by `papers/dplis/landscape.py`."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch
from support.networks import cross_entropy
from torch import Tensor, nn

pytestmark = pytest.mark.slow

LANDSCAPE = runpy.run_path(str(Path(__file__).parents[2] / "papers/dplis/landscape.py"))
KEY = bytes(range(32))


class _Quadratic(nn.Module):
    """Mean loss = sum_i curvature_i theta_i^2, whatever the inputs."""

    def __init__(self, theta: Tensor, curvature: Tensor) -> None:
        super().__init__()
        self.theta, self.curvature = nn.Parameter(theta), curvature

    def forward(self, inputs: Tensor) -> Tensor:
        return (self.curvature * self.theta.square()).sum().expand(len(inputs), 1)


def as_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs[:, 0]


def test_sharpness_of_a_quadratic_is_known():
    """The largest value is at the corner away from zero: curvature * (|t| + e(|t| + 1))^2."""
    theta, curvature = torch.tensor([1.0, -2.0, 0.5]), torch.tensor([1.0, 3.0, 10.0])
    model = _Quadratic(theta.double(), curvature.double())
    inputs, targets = torch.zeros(7, 1), torch.zeros(7)
    result = LANDSCAPE["sharpness"](model, as_loss, inputs, targets, box=0.01, batch_size=3)
    corner = theta.abs() + 0.01 * (theta.abs() + 1)
    loss, worst = float((curvature * theta**2).sum()), float((curvature * corner**2).sum())
    assert result.loss == pytest.approx(loss)
    assert result.worst_loss == pytest.approx(worst, rel=1e-6)
    assert result.value == pytest.approx(100 * (worst - loss) / (1 + loss), rel=1e-5)
    assert torch.equal(model.theta.detach(), theta.double())


def test_losses_along_a_filter_normalized_direction():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
    before = [p.detach().clone() for p in model.parameters()]
    inputs, targets = torch.rand(20, 1, 8, 8), torch.randint(0, 3, (20,))
    along = LANDSCAPE["losses_along"]
    losses = along(
        model, cross_entropy, inputs, targets, key=KEY, alphas=(-0.5, 0.0, 0.5), batch_size=8
    )
    assert losses[1] == pytest.approx(
        float(cross_entropy(model(inputs), targets).mean().detach()), rel=1e-5
    )
    assert losses[0] != losses[1] != losses[2]
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    # The direction has the filters' norms and no component on biases.
    weight = model[0].weight.detach()
    direction = LANDSCAPE["filter_normalized"](torch.randn_like(weight), weight)
    torch.testing.assert_close(direction.flatten(1).norm(dim=1), weight.flatten(1).norm(dim=1))
    assert not LANDSCAPE["filter_normalized"](torch.randn(4), model[0].bias.detach()).any()
    (again,) = along(model, cross_entropy, inputs, targets, key=KEY, alphas=(0.5,))
    assert again == pytest.approx(losses[2], rel=1e-5)
