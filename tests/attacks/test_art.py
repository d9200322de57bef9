"""The same attacks by the Adversarial Robustness Toolbox, on the same model."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from dpdist.attacks.gradient_attacks import Ball, RandomizedClassifier, attack, distance
from dpdist.certification.worker import KeyedGenerator
from dpdist.randomness.keys import StreamKeys

STEPS = 10
SIZES = {"linf": (0.05, 0.1, 0.2), "l2": (0.3, 0.6, 1.2)}


@pytest.fixture(scope="module")
def digits() -> tuple[Tensor, Tensor]:
    data = load_digits()
    images = torch.from_numpy(data.images).float()[:, None] / 16
    return images, torch.from_numpy(data.target)


@pytest.fixture(scope="module")
def model(digits: tuple[Tensor, Tensor]) -> nn.Module:
    x, y = digits[0][:1300], digits[1][:1300]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(1, 12, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12 * 36, 10))
        optimizer = torch.optim.Adam(net.parameters(), 5e-3)
        for _ in range(60):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()
    return net.eval()


def theirs(model: nn.Module, name: str, norm: str, size: float, x: Tensor, y: Tensor) -> np.ndarray:
    evasion = pytest.importorskip("art.attacks.evasion")
    from art.estimators.classification import PyTorchClassifier

    p = np.inf if norm == "linf" else 2
    estimator = PyTorchClassifier(
        model, nn.CrossEntropyLoss(), (1, 8, 8), 10, clip_values=(0.0, 1.0), device_type="cpu"
    )
    steps = {"norm": p, "eps": size, "eps_step": size / STEPS, "max_iter": STEPS, "verbose": False}
    steps["batch_size"] = len(x)
    if name == "fgsm":
        it = evasion.FastGradientMethod(estimator, norm=p, eps=size, batch_size=len(x))
    elif name == "i-fgsm":
        it = evasion.ProjectedGradientDescentPyTorch(estimator, **steps)
    elif name == "mim":
        it = evasion.MomentumIterativeMethod(estimator, decay=1.0, **steps)
    else:
        steps["eps_step"] = 2.5 * size / STEPS
        np.random.seed(0)
        it = evasion.ProjectedGradientDescentPyTorch(estimator, num_random_init=1, **steps)
    return it.generate(x.numpy(), y.numpy())


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize("name", ["fgsm", "i-fgsm", "mim", "pgd"])
def test_success_rates_are_arts(name: str, norm: str, model, digits) -> None:
    # The first three are deterministic: they differ by rounding only (at most 2 of 497 inputs).
    # PGD starts at random: two rates of the same inputs; the attacks agree on nearly all inputs,
    # so 3 points are more than 5 standard errors (false failure below 1e-5).
    x, y = digits[0][1300:], digits[1][1300:]
    own = KeyedGenerator(StreamKeys("test", "1", "", "", "", 0.0))
    for size in SIZES[norm]:
        ball = Ball(x, torch.full((len(x),), size, dtype=torch.float64), norm)
        ours = attack(name, RandomizedClassifier(model), ball, y, range(len(x)), own, steps=STEPS)  # type: ignore[arg-type]
        other = theirs(model, name, norm, size, x, y)
        with torch.no_grad():
            wrong = [
                (model(points).argmax(1) != y).double().mean().item()
                for points in (ours, torch.from_numpy(other))
            ]
        assert wrong[0] == pytest.approx(wrong[1], abs=0.03 if name == "pgd" else 0.0045), size
        assert distance(ours.numpy(), x.numpy(), norm).max() <= size
        if size == max(SIZES[norm]):
            assert wrong[0] > 0.6  # the comparison is about something
