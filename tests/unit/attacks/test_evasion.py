from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.hypothesis_settings import hypothesis_settings
from torch import Tensor, nn

import dpdist
from dpdist.attacks.gradient_attacks import (
    Ball,
    RandomizedClassifier,
    attack,
    distance,
    loss_gradient,
    success_score,
)
from dpdist.certification.worker import KeyedGenerator
from dpdist.core.fields import ATTACKS, NORMS
from dpdist.randomness.keys import StreamKeys
from dpdist.randomness.noise_location import HiddenNoise, InputNoise


def randomness(seed: str = "1") -> KeyedGenerator:
    return KeyedGenerator(StreamKeys("test", seed, "m", "d", "n", 0.0))


def linear(numbers: int = 50, seed: int = 0, scale: float = 1.0) -> nn.Sequential:
    model = nn.Sequential(nn.Flatten(), nn.Linear(numbers, 2))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        model[1].weight.copy_(torch.randn(2, numbers, generator=generator) * scale)  # type: ignore[operator]
        model[1].bias.copy_(torch.randn(2, generator=generator))  # type: ignore[operator]
    return model


def inputs(count: int, numbers: int, seed: int = 3) -> Tensor:
    # Away from the box, so that closed forms need no clipping.
    return torch.rand(count, numbers, generator=torch.Generator().manual_seed(seed)) * 0.2 + 0.4


def run(name, model, x, size, targets, norm, *, noise=None, seed="1", box=(0.0, 1.0), **options):
    ball = Ball(x, torch.as_tensor(size, dtype=torch.float64).expand(len(x)), norm, box)
    classifier = RandomizedClassifier(model, noise)
    return attack(name, classifier, ball, targets, range(len(x)), randomness(seed), **options)


def margin(model: nn.Sequential, x: Tensor, targets: Tensor) -> Tensor:
    """Logit of the target minus the other one's, in float64."""
    w, b = model[1].weight.double(), model[1].bias.double()  # type: ignore[operator, union-attr]
    logits = x.double().flatten(1) @ w.T + b
    return logits.gather(1, targets[:, None])[:, 0] - logits.gather(1, 1 - targets[:, None])[:, 0]


@pytest.mark.parametrize("name", ATTACKS)
@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_linear_models_are_attacked_optimally(name: str, norm: str) -> None:
    # The least distance to the boundary is margin / dual norm of the weights' difference.
    model, x = linear(), inputs(40, 50)
    targets = model(x).argmax(1)
    w = (model[1].weight[0] - model[1].weight[1]).detach().double()  # type: ignore[index, union-attr]
    dual = w.abs().sum() if norm == "linf" else w.norm()
    least = (margin(model, x, targets) / dual).detach()
    for factor, fooled in ((1 - 1e-3, False), (1 + 1e-3, True)):
        # Large steps, because projected ascent turns toward the best point of a sphere slowly.
        found = run(
            name, model, x, least * factor, targets, norm, box=None, steps=40, step_scale=20
        )
        left = margin(model, found, targets)
        assert ((left < 0) == fooled).all(), (factor, left)
        assert (distance(found.numpy(), x.numpy(), norm) <= (least * factor).numpy()).all()
    # The whole margin that the size is worth is gone, up to float32 rounding.
    gone = (margin(model, x, targets) - margin(model, found, targets)) / dual
    assert gone.detach().numpy() == pytest.approx(least.numpy() * 1.001, abs=2.0**-22)


def test_confident_networks_are_not_safe_by_underflow() -> None:
    # A logit gap above 104 makes the float32 gradient of the cross-entropy exactly zero.
    model, x = linear(scale=200.0), inputs(20, 50)
    targets = model(x).argmax(1)
    keep = margin(model, x, targets) > 150
    x, targets = x[keep], targets[keep]
    naive = x.clone().requires_grad_(True)
    nn.functional.cross_entropy(model(naive), targets, reduction="sum").backward()
    assert len(x) > 5 and not naive.grad.any()  # type: ignore[union-attr]
    found = run("fgsm", model, x, 0.4, targets, "linf")
    assert (model(found).argmax(1) != targets).all()


class Curved(nn.Module):
    """Two inputs, two hidden units; the noise-free gradient points elsewhere than the mean one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.rest = nn.Linear(2, 2)
        with torch.no_grad():
            self.first.weight.copy_(torch.tensor([[2.5, 0.0], [0.7, 1.1]]))
            self.first.bias.copy_(torch.tensor([-2.5, 0.1]))
            self.rest.weight.copy_(torch.tensor([[2.0, -1.0], [-1.5, 2.0]]))
            self.rest.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(torch.tanh(self.first(x)) ** 3)


def expected_gradient(x: np.ndarray, target: int, where: str, std: np.ndarray) -> np.ndarray:
    """E[gradient of the cross-entropy by x], by Gauss-Hermite quadrature and finite differences."""
    model = Curved().double()
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    z = torch.from_numpy(np.array(list(itertools.product(nodes, nodes))) * std)
    w = torch.from_numpy(np.outer(weights, weights).ravel() / (2 * np.pi))

    def mean_loss(point: np.ndarray) -> float:
        at = torch.from_numpy(point)[None].expand(len(z), 2)
        with torch.no_grad():
            if where == "input":
                logits = model(at + z)
            else:
                logits = model.rest(torch.tanh(model.first(at) + z) ** 3)
            labels = torch.full((len(z),), target)
            return float((w * nn.functional.cross_entropy(logits, labels, reduction="none")).sum())

    steps = np.eye(2) * 1e-5
    return np.array([(mean_loss(x + h) - mean_loss(x - h)) / 2e-5 for h in steps])


@pytest.mark.parametrize("where", ["input", "hidden"])
def test_eot_gradient_is_the_numerical_expectation(where: str) -> None:
    # 40,000 draws: the angle's standard error is below 0.01; 0.05 is five of them (false failure
    # below 1e-5). The gradient without noise is off by more than 0.1 and must not pass.
    x = torch.tensor([[0.6, 0.3], [0.2, 0.8]])
    targets = torch.tensor([0, 1])
    std = np.array([0.8, 0.4]) if where == "hidden" else np.array([0.5, 0.5])
    noise = InputNoise(0.5) if where == "input" else HiddenNoise("first", torch.tensor([0.8, 0.4]))
    classifier = RandomizedClassifier(Curved(), noise)
    normals = randomness().normals((0, 1), "eot", 0, 40_000, (2,))
    found = loss_gradient(classifier, x, targets, normals).double().numpy()
    plain = loss_gradient(RandomizedClassifier(Curved()), x, targets, None).double().numpy()

    def angle(gradient: np.ndarray) -> float:
        return float(np.arctan2(gradient[1], gradient[0]))

    for row in range(2):
        want = angle(expected_gradient(x[row].double().numpy(), int(targets[row]), where, std))
        assert angle(found[row]) == pytest.approx(want, abs=0.05)
        assert abs(angle(plain[row]) - want) > 0.1


def test_by_mean_scores_the_target_is_to_score_less_than_another() -> None:
    # Two of three draws say class 0 narrowly, one class 1 surely: by votes the second point is
    # better for the attack, by mean scores the first.
    model = nn.Linear(1, 2)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[0.0], [1.0]]))
        model.bias.zero_()
    x, targets = torch.tensor([[0.0], [0.2]]), torch.tensor([0, 0])
    normals = torch.tensor([[-0.1], [-0.1], [9.0], [0.01], [0.01], [-9.0]])
    votes, scores = (
        success_score(RandomizedClassifier(model, InputNoise(1.0), by), x, targets, normals)
        for by in (None, False)
    )
    p = torch.softmax(model(x.repeat_interleave(3, 0) + normals).double(), 1).view(2, 3, 2).mean(1)
    assert scores == pytest.approx((p[:, 1] - p[:, 0]).detach().numpy())
    assert votes[1] > votes[0] and scores[0] > scores[1]


def test_one_call_attacks_any_classifier_within_its_size():
    """A linear model has a margin of |x0 - x1|: points beyond it are lost, closer ones are not."""
    model = nn.Linear(2, 2, bias=False)
    model.weight.data.copy_(torch.eye(2))
    gaps = torch.linspace(0.02, 0.6, 100)
    inputs = torch.stack([0.5 + gaps / 2, 0.5 - gaps / 2], 1)
    labels = torch.zeros(100, dtype=torch.int64)
    points = dpdist.attack(model, inputs, labels, size=0.1, norm="linf", steps=40)
    assert (points - inputs).double().abs().max() <= 0.1
    assert points.min() >= 0 and points.max() <= 1
    wrong = model(points).argmax(1) != 0
    assert wrong[gaps < 0.1998].all() and not wrong[gaps > 0.2002].any()
    alone = dpdist.attack(model, inputs[:70], labels[:70], size=0.1, norm="linf", steps=40)
    assert torch.equal(alone, points[:70])


def sizes(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@hypothesis_settings(150, derandomize=False)
@given(
    seed=st.integers(0, 2**31),
    size=st.one_of(st.just(0.0), st.floats(1e-9, 3.0)),
    norm=st.sampled_from(NORMS),
    numbers=st.sampled_from([1, 3, 784, 3072]),
    boxed=st.booleans(),
)
def test_no_point_is_a_hair_outside(seed, size, norm, numbers, boxed) -> None:
    generator = torch.Generator().manual_seed(seed)
    center = torch.rand(4, numbers, generator=generator)
    center[0] = center[0].round()  # corners of the box
    ball = Ball(center, sizes(size, size / 3, size, 0), norm, (0.0, 1.0) if boxed else None)
    far = center + torch.randn(4, numbers, generator=generator) * 2
    for point in (far.double(), center.double() + size * torch.sign(far - center)):
        moved = ball.project_to_float32(point)
        assert moved.dtype == torch.float32
        # Exactly: no tolerance.
        assert (distance(moved.numpy(), center.numpy(), norm) <= ball.size.numpy()).all()
        if boxed:
            assert moved.min() >= 0 and moved.max() <= 1
    assert torch.equal(ball.project_to_float32(far)[3], center[3])


def test_a_center_outside_the_box_has_none() -> None:
    """A standardized picture beside pixels: neither leaves its ball for the other's sake."""
    center = torch.stack([torch.full((3, 4, 4), 0.95), torch.full((3, 4, 4), 1.7)])
    ball = Ball(center, sizes(0.1, 0.1), "linf")
    moved = ball.project_to_float32(center.double() + 1)
    assert (moved[0] == 1).all() and (moved[1] > 1.79).all()
    assert (distance(moved.numpy(), center.numpy(), "linf") <= 0.1).all()
