"""The blocks of PixelDP, HGM-PixelDP and Secure-SGD, each against an independent oracle."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from scipy import stats
from torch import nn

from dpdist import models
from dpdist.gradients.sampling import poisson_sample
from dpdist.models import ModelSpec, SplitModel
from dpdist.papers.secure_sgd import shares as hidden_noise_shares
from dpdist.papers.secure_sgd.method import HGMPixelDP, PixelDP, Redistribution, SecureSGD
from dpdist.privacy.phases import GaussianReleases, GaussianSteps, NonPrivate

SPEC = ModelSpec("hgm-cnn", (1, 6, 6), 3, {"filters": [4], "kernels": [3], "strides": [2]})


def split_of(model: nn.Module | None = None) -> SplitModel:
    return models.require_split(models.initialize(SPEC, 0) if model is None else model)


def records(count: int = 40) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    inputs = torch.rand(count, 1, 6, 6, generator=generator)
    return inputs, torch.randint(0, 3, (count,), generator=generator)


def test_noise_scale_is_the_mechanisms() -> None:
    assert PixelDP().noise_scale(784) == pytest.approx(0.1 * math.sqrt(2 * math.log(25)))
    assert PixelDP(norm="linf").noise_scale(784) == pytest.approx(28 * PixelDP().noise_scale(784))
    assert PixelDP(sensitivity=2.0).noise_scale(784) == 2 * PixelDP().noise_scale(784)
    assert SecureSGD(sigma=0.7).noise_scale(784) == 0.7
    # Delta 1, delta 1e-5: published values of the extended and the analytic Gaussian at epsilon 4.
    given = {"epsilon_r": 4, "delta_r": 1e-5, "attack_size": 1}
    assert SecureSGD(**given).noise_scale(784) == pytest.approx(1.2851, abs=1e-4)
    analytic = SecureSGD(mechanism="analytic", **given).noise_scale(784)
    assert analytic == pytest.approx(1.0812, abs=1e-4)


def test_equation_7_against_one_example_at_a_time() -> None:
    beta = 2.0
    split, (inputs, labels) = split_of(), records(7)
    expected = torch.zeros(split.hidden_shape(SPEC.input_shape), dtype=torch.float64)
    for x, y in zip(inputs, labels, strict=True):
        h = split.first(x[None]).detach().requires_grad_()
        loss = nn.functional.cross_entropy(split.rest(h), y[None])
        expected += torch.autograd.grad(loss, h)[0][0].abs().double() ** beta / 7
    got = hidden_noise_shares.mean_powers(split, inputs, labels, beta)
    assert torch.allclose(got, expected, rtol=1e-4, atol=1e-12)
    shares = hidden_noise_shares.normalized_shares(got, 0.1)
    assert float(shares.mean()) == pytest.approx(1) and float(shares.min()) >= 0.1 - 1e-12
    r = 0.9 * expected / expected.sum() + 0.1 / expected.numel()
    assert torch.allclose(shares, r * expected.numel(), rtol=1e-4)
    # The total power of the noise is that of equal noise.
    std = hidden_noise_shares.heterogeneous_std(0.3, shares)
    assert float(std.double().square().mean().sqrt()) == pytest.approx(0.3)


def test_one_record_moves_the_whole_paid_sum_by_no_more_than_its_noise_is_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Records run in passes of one shape, each with the same others: without one record no other
    changes a bit, where passes as they came moved the sum by 2e-7 clip norms more than one."""
    count, clip = 300, 1e-3
    inputs, labels = records(count)

    class Records:
        def __len__(self) -> int:
            return count

        def batch(self, rows: np.ndarray) -> torch.Tensor:
            return inputs[rows]

        def targets(self, rows: np.ndarray) -> torch.Tensor:
            return labels[rows]

    shapes: set[int] = set()
    real = hidden_noise_shares.gradient_powers

    def watched(split: Any, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        shapes.add(len(x))
        return real(split, x, *rest)

    monkeypatch.setattr(hidden_noise_shares, "gradient_powers", watched)
    monkeypatch.setattr(hidden_noise_shares, "noised_powers", lambda total, *rest: total)
    privacy = SimpleNamespace(nominal_records=None)
    setup: Any = SimpleNamespace(
        recipe=SimpleNamespace(privacy=privacy, resources=SimpleNamespace(rounding="standard")),
        spec=SPEC, private_records=Records(),
        key=b"k" * 32, build_initial_model=lambda: models.initialize(SPEC, 0),
    )  # fmt: skip
    section = Redistribution(source="paid", clip_norm=clip)

    def total(left: int | None = None) -> torch.Tensor:
        sample = poisson_sample
        members = lambda *a, **k: (m := sample(*a, **k))[m != left]  # noqa: E731
        monkeypatch.setattr(hidden_noise_shares, "poisson_sample", members)
        return hidden_noise_shares._released_powers(section, 1.0, setup)

    whole = total()
    moved = [float((whole - total(left)).norm()) / clip for left in (0, 100, 150, 299)]
    assert 0.9 < max(moved) <= 1 + 2.0**-43 * count + 1025 * 2.0**-19
    assert len(shapes) == 2 and max(shapes) <= 128  # the last pass is shorter


def test_the_paid_sum_has_its_noise() -> None:
    # 20,000 seeded normals: Kolmogorov-Smirnov, false failure 1e-4; 2/3 and 3/2 are rejected.
    noisy = hidden_noise_shares.noised_powers(
        torch.full((20_000,), 1e3, dtype=torch.float64), bytes(32), 5.0, 0.4
    )
    values = (noisy - 1e3).numpy()
    assert stats.kstest(values, stats.norm(scale=2.0).cdf).pvalue > 1e-4
    for wrong in (2.0 * 2 / 3, 2.0 * 3 / 2):
        assert stats.kstest(values, stats.norm(scale=wrong).cdf).pvalue < 1e-4


def test_options_refuse_what_does_not_hold() -> None:
    for method, wrong, key in (
        (PixelDP, {"epsilon_r": 4}, "epsilon_r"),
        (SecureSGD, {"redistribution": Redistribution(source="private")}, "paper_faithful:"),
    ):
        with pytest.raises(ValidationError, match=key):
            method(**wrong)
    steps = GaussianSteps(10, 1.0, 0.1)
    assert SecureSGD().cost(steps) == (steps,)
    paid = Redistribution(source="paid", noise_multiplier=5, sample_rate=0.1)
    assert SecureSGD(redistribution=paid).cost(steps) == (GaussianReleases(5, 1, 0.1), steps)
    private = Redistribution(source="private")
    phase, last = HGMPixelDP(redistribution=private, paper_faithful=True).cost(steps)
    assert isinstance(phase, NonPrivate) and last is steps
