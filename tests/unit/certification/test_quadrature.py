"""Noise on the input and behind the first layer: both certify together, in quadrature and no more.

Each wrong rule (the sum of DPAL's Proposition 1, a norm that is not the layer's, a missing square)
is held against the same truths and must fail.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from support import certificates
from support.certificates import check_certificates
from support.local_execution import run_without_ray
from support.mechanisms import laplace_epsilon
from support.networks import SMALL_CNN
from support.separable_points import Points
from torch import nn

from dpdist import models
from dpdist.attacks.settings import AttackSettings
from dpdist.certification import job, table_reader
from dpdist.certification.certificate import CombinedNoise
from dpdist.certification.cohen import Cohen
from dpdist.certification.predict import Predictor
from dpdist.certification.registry import settings_of
from dpdist.certification.score_bounds import ScoreBounds, pure_epsilon
from dpdist.certification.statistics import certified_rows
from dpdist.certification.table_reader import recertify
from dpdist.certification.worker import combined_noise_of_model
from dpdist.core.errors import UserError
from dpdist.models.zoo import NormalizedNetwork
from dpdist.randomness.noise_location import (
    HiddenNoise,
    InputNoise,
    ModuleNoise,
    find_noise_location,
)

SIGMA = 0.25

# What wrong rules take both noises for: of sigma, the hidden noise, and the layer's true norm.
WRONG: dict[str, Callable[[CombinedNoise], float]] = {
    "kappa + phi": lambda q: q.sigma_as_printed,
    "a square forgotten": lambda q: math.sqrt(q.sigma**2 + q.hidden_as_input_sigma),
    "half the norm": lambda q: math.hypot(q.sigma, 2 * q.hidden_as_input_sigma),
    "the root of the norm": lambda q: math.hypot(q.sigma, q.hidden_std / math.sqrt(q.sensitivity)),
}


def dense(rows: int, columns: int, seed: int = 0) -> nn.Linear:
    layer = nn.Linear(columns, rows)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(rows, columns, generator=generator))
    return layer


def lengths(layer: nn.Linear, variances: torch.Tensor, directions: torch.Tensor) -> torch.Tensor:
    """Mahalanobis length of what a shift by each unit direction does to the layer's output."""
    weight = layer.weight.detach().double()
    covariance = SIGMA**2 * weight @ weight.T + variances.double().diag()
    moved = directions.double() @ weight.T
    return (moved * torch.linalg.solve(covariance, moved.T).T).sum(1).sqrt()


@pytest.mark.parametrize(("rows", "columns", "scale"), [(6, 4, 0.05), (6, 4, 0.5), (3, 4, 5.0)])
def test_no_direction_moves_further_than_the_rule_says(rows, columns, scale) -> None:
    """10^5 directions, heterogeneous noise; the worst one reaches the bound."""
    layer = dense(rows, columns)
    std = scale * (0.3 + torch.rand(rows, generator=torch.Generator().manual_seed(1)))
    model = nn.Sequential(layer, nn.ReLU(), nn.Linear(rows, 2)).eval()
    models.attach_noise(model, std)
    where = find_noise_location(model).with_input_noise(SIGMA)
    both = combined_noise_of_model(where, model, (columns,), SIGMA)
    assert both is not None and both.hidden_std == pytest.approx(float(std.square().mean().sqrt()))
    directions = torch.randn(100_000, columns, generator=torch.Generator().manual_seed(2))
    directions /= directions.norm(dim=1, keepdim=True)
    worst = float(lengths(layer, std.square(), directions).max())
    assert 0.98 / both.combined_sigma <= worst <= 1 / both.combined_sigma
    wrong = {name: rule(both) for name, rule in WRONG.items()}
    assert 1 / wrong["kappa + phi"] < worst  # and so it promises what is not so
    # Each noise alone certifies less; without the shares' weights the norm is another one.
    assert max(both.sigma, both.hidden_as_input_sigma) < both.combined_sigma < both.sigma_as_printed
    unweighted = float(torch.linalg.matrix_norm(layer.weight.detach().double(), 2))
    if unweighted < both.sensitivity:
        assert 1 / math.hypot(SIGMA, both.hidden_std / unweighted) < worst


def plane(weight: float = 5.0, std: float = 1.7678, twist: float = 2.0) -> nn.Module:
    """Class 1 where x0 > 0: two hidden numbers that read x0 and noise of unequal strength, weighed
    as the likelihood ratio weighs them, so that no classifier is more easily moved."""
    first, last = nn.Linear(3, 2), nn.Linear(2, 2)
    variances = torch.tensor([1.0, twist**2]) * std**2
    with torch.no_grad():
        for layer in (first, last):
            layer.bias.zero_()
            layer.weight.zero_()
        first.weight[:, 0] = weight * torch.tensor([1.0, -2.0])
        covariance = SIGMA**2 * first.weight @ first.weight.T + variances.diag()
        best = torch.linalg.solve(covariance, first.weight[:, 0])
        last.weight.copy_(torch.stack([-best, best]))
    model = nn.Sequential(first, last).eval()
    models.attach_noise(model, variances.sqrt())
    return model


def both_of(model: nn.Module) -> CombinedNoise:
    found = combined_noise_of_model(
        find_noise_location(model).with_input_noise(SIGMA), model, (3,), SIGMA
    )
    assert found is not None
    return found


# A lower bound at 1e-6 is 0.006 below p: the radius falls short by less than 4 %.
@pytest.mark.parametrize("std", [1.0, 3.0])
def test_a_plane_is_certified_up_to_its_distance(std: float) -> None:
    model = plane(std=std)
    both = both_of(model)
    distance = 0.9 * both.combined_sigma
    x = torch.tensor([distance, 0.3, -2.0])
    settings = settings_of({"sigma": SIGMA, "n": 100_000, "alpha": 1e-6})
    verdict = Predictor(model, settings, 2, (3,)).certify(x)
    # The executed noise is what the rule says: two-sided exact test, false failure 1e-5.
    assert stats.binomtest(verdict.k, verdict.n, stats.norm.cdf(0.9)).pvalue > 1e-5
    assert verdict.prediction == 1 and 0.95 * distance <= verdict.radius <= distance
    z = verdict.radius / both.combined_sigma
    for name, rule in WRONG.items():
        assert rule(both) * z > distance, name
    assert max(both.sigma, both.hidden_as_input_sigma) * z < 0.93 * distance


POINTS = Points(3)


SPEC = models.ModelSpec(f"{__name__}:factory", (3,), 2, hidden_noise=True)


def factory(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))


@pytest.fixture
def certified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A table of the plane, certified under both noises in equal parts."""
    run_without_ray(monkeypatch)
    models.save(plane(), SPEC, tmp_path / "model")
    settings = settings_of({"sigma": SIGMA, "n0": 50, "n": 1000, "batch": 200, "seed": "1"})
    certificates.certify(
        tmp_path / "model", POINTS, settings, tmp_path / "c", trusted_factory=SPEC.name
    )
    return tmp_path / "c" / job.TABLE


def test_the_table_states_what_holds_and_names_what_does_not(certified: Path) -> None:
    found, both = table_reader.read(certified), both_of(plane())
    assert found.job_record["hidden"] == both.hidden_std
    assert found.job_record["sensitivity"] == {"l2": both.sensitivity}
    for row in found.table.to_pylist():
        z = stats.norm.ppf(row["p_lower"]) if row["p_lower"] > 0.5 else 0.0
        assert row["radius"] == pytest.approx(both.combined_sigma * z, rel=1e-9)
    sizes = {s.name: s for s in found.sizes}
    assert [name for name, s in sizes.items() if not s.is_valid] == ["as_printed"]
    positive = found.radius > 0
    for name, worth in (
        ("cohen", both.combined_sigma), ("input", SIGMA), ("hidden", both.hidden_as_input_sigma),
        ("as_printed", SIGMA + both.hidden_as_input_sigma),
    ):  # fmt: skip
        share = sizes[name].size[positive] / found.radius[positive]
        assert share == pytest.approx(worth / both.combined_sigma, rel=1e-9)
    # Another alpha from the stored counts, as if certified so.
    stricter = recertify(found.table, 1e-5)
    p = [Cohen.lower_bound(k, 1000, 1e-5) for k in stricter["k"].to_pylist()]
    want = [both.combined_sigma * stats.norm.ppf(q) if q > 0.5 else 0.0 for q in p]
    assert stricter["radius"].to_pylist() == pytest.approx(want, rel=1e-9)
    assert any("kappa + phi (does not hold)" in row.name for row in certified_rows(found))


def test_the_sum_is_refuted_by_attack_and_the_rule_is_not(certified: Path, tmp_path: Path) -> None:
    attack = AttackSettings(attacks=("pgd",), steps=5, samples=4, seed="2", batch=30)
    for claim, holds in ((None, True), ("hidden_l2", True), ("as_printed_l2", False)):
        _, verdict = check_certificates(
            tmp_path / "model", POINTS, certified, attack, tmp_path / f"check-{claim}",
            claim=claim, trusted_factory=SPEC.name,
        )  # fmt: skip
        assert verdict.plausible == (verdict.contradictions <= verdict.allowed) == holds


def test_only_affine_additive_noise_everywhere_counts() -> None:
    layer = dense(4, 3)
    model = nn.Sequential(layer, nn.ReLU(), nn.Linear(4, 2)).eval()

    def found(place, model: nn.Module = model) -> CombinedNoise | None:
        return combined_noise_of_model(place, model, (3,), SIGMA)

    one = found(ModuleNoise({"0": 0.5, "2": 3.0}, input_std=SIGMA))
    # what follows is post-processing
    assert one is not None and one.hidden_std == pytest.approx(0.5)
    norm = float(torch.linalg.matrix_norm(layer.weight.detach().double(), 2))
    assert one.sensitivity == pytest.approx(norm)
    assert found(HiddenNoise("0", torch.full((4,), 0.5)).with_input_noise(SIGMA)) == one
    for place in (
        InputNoise(SIGMA),
        ModuleNoise({"2": 0.5}, input_std=SIGMA),  # behind what is not linear
        ModuleNoise({"0": 0.5}, "multiplicative", SIGMA),
        ModuleNoise({"0": torch.tensor([0.5, 0.5, 0.5, 0.0])}, input_std=SIGMA),
    ):
        assert found(place) is None
    squared = nn.Sequential(nn.Tanh(), layer).eval()
    assert found(ModuleNoise({"1": 0.5}, input_std=SIGMA), squared) is None
    # In input units, whatever normalizes before the layer.
    scaled = NormalizedNetwork(model, torch.zeros(3), torch.full((3,), 0.5)).eval()
    name = models.require_split(scaled).name
    two = found(ModuleNoise({name: 0.5}, input_std=SIGMA), scaled)
    assert two is not None and two.sensitivity == pytest.approx(2 * norm)


def test_both_noises_are_saved_with_the_model(tmp_path: Path) -> None:
    spec = SMALL_CNN
    model = models.initialize(spec, 0)
    place = ModuleNoise({models.require_split(model).name: 0.3}, input_std=0.5)
    place.attach(model)
    models.save(model, replace(spec, block_noise=models.BlockNoise(("0",))), tmp_path)
    again = find_noise_location(models.load(tmp_path))
    assert again == place and again.smoothing_sigma == 0.5
    both = (
        settings_of({"sigma": 0.5}).build_sampler(models.load(tmp_path), (1, 6, 6)).combined_noise
    )
    assert both is not None and both.hidden_std == pytest.approx(0.3)
    for bad in (torch.tensor([0.1, -0.1]), torch.tensor([0.1, float("nan")])):
        with pytest.raises(UserError, match="noise on 0"):
            ModuleNoise({"0": bad})


def test_the_product_of_two_passes_is_the_harmonic_sum() -> None:
    """Two passes with one Laplace noise each: their budgets add, so the size is below either."""
    epsilon = pure_epsilon(ScoreBounds(np.array([0.8, 0.1]), np.array([0.8, 0.1])))
    noises = ((0.5, 100.0), (2.0, 30.0))  # scale, sensitivity
    kappa, phi = (epsilon * scale / norm for scale, norm in noises)

    def spent(size: float) -> float:
        return sum(float(laplace_epsilon(0.0, b, s * size)) for b, s in noises)

    assert spent(kappa * phi / (kappa + phi)) == pytest.approx(epsilon)
    assert spent(min(kappa, phi)) > 1.05 * epsilon and spent(kappa + phi) > 5 * epsilon
