"""Method functional: what one record moves, what is released, and what is made of it."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.training import execute, make, parameters, prepare_job, train, train_and_crash
from torch import Tensor, nn

from dpdist import models
from dpdist.core.errors import UserError
from dpdist.methods import base
from dpdist.methods.base import MethodState, check_record_limit
from dpdist.models import ModelSpec, last_linear
from dpdist.papers.stobatch.functional import Adversarial, Functional
from dpdist.papers.stobatch.functional_sums import (
    CoefficientSums,
    FunctionalExecution,
    FunctionalSteps,
    clip_rows,
    rounding_slack,
)
from dpdist.privacy import mechanisms
from dpdist.privacy.ledger import Ledger
from dpdist.randomness.keys import derive_key
from dpdist.runs.folder import read_verified_ledger
from dpdist.training import private_step
from dpdist.training.canaries import Canaries
from dpdist.training.checkpoint import load_latest

SHAPE, CLASSES, RECORDS = (1, 8, 8), 10, 24
MODEL = {"name": "scattering", "options": {"widths": [1.0], "stride": 1, "cosines": 3}}
METHOD = {"name": "functional", "rounds": 2}


def network() -> nn.Module:
    return models.initialize(ModelSpec("scattering", SHAPE, CLASSES, MODEL["options"]), 0)


def sums(method: Functional | None = None) -> CoefficientSums:
    return CoefficientSums(method or Functional(), network(), torch.rand(4, *SHAPE), RECORDS)


def job_of(tmp: Path, name: str = "run", **more: Any) -> Any:
    return prepare_job(tmp, name, **{"model": MODEL, "method": METHOD, **more})


# ---- what one record moves


def records(rng: np.random.Generator) -> Tensor:
    """Images, and what an adversary would put in their place."""
    x = torch.from_numpy(rng.random((RECORDS, *SHAPE)))
    x[0], x[1], x[2] = 0.0, 1.0, 1e6
    x[3] = torch.eye(8) * 1e-9
    x[4] = float("nan")
    x[5, 0, 3] = float("inf")
    x[6] = -x[7]
    return x


def three(
    made: CoefficientSums, passes: list[Any], center: Tensor, weights: Tensor
) -> list[Tensor]:
    """What a training releases of these passes."""
    return [
        made.sum_features(passes, center),
        made.sum_coefficients(passes, center),
        made.sum_residuals(passes, center, weights),
    ]


@pytest.mark.parametrize(
    "method",
    [
        Functional(),
        Functional(radius=2.0, labels=0.9, constant=0.9, residual=5.0, clip=0.5),
    ],
    ids=["default", "loose"],
)
def test_one_record_moves_each_sum_by_at_most_one(method: Functional) -> None:
    rng, made = np.random.default_rng(0), sums(method)
    x, y = records(rng), torch.from_numpy(rng.integers(0, CLASSES, RECORDS))
    center = 0.3 * clip_rows(torch.from_numpy(rng.normal(size=(1, made.size - 1))), 1.0)[0]
    weights = torch.from_numpy(rng.normal(size=(made.size, CLASSES)) * 10)
    features = made.features(x)
    whole = three(made, [(features, y, 1.0)], center, weights)
    assert all(total.isfinite().all() for total in whole)
    largest = np.zeros(3)
    for left in range(RECORDS):
        keep = torch.arange(RECORDS) != left
        rest = three(made, [(features[keep], y[keep], 1.0)], center, weights)
        moved = [float((a - b).norm()) for a, b in zip(whole, rest, strict=True)]
        largest = np.maximum(largest, moved)
    assert largest.max() <= 1.0
    assert largest[0] > 0.99  # the sensitivity is not overstated either
    assert largest[1] > (0.99 if method.radius < 1 else 0.5)
    assert largest[2] > (0.99 if method.residual < 1 else 0.1)


# ---- what is made of the sums


def objective(made: CoefficientSums, records: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rng = np.random.default_rng(2)
    x = torch.from_numpy(rng.random((records, *SHAPE)))
    features = made.features(x)
    y = torch.from_numpy(rng.integers(0, CLASSES, records))
    center = features.mean(0)
    return features, y, center, made.directions(features, center)


def test_the_head_minimizes_the_expansion() -> None:
    method = Functional(radius=10.0, constant=0.5)  # nothing is clipped
    made, noise = sums(method), 0.5
    features, y, center, h = objective(made, 300)
    weights, _ = made.fit_weights(made.sum_coefficients([(features, y, 1.0)], center), noise)
    ridge = method.ridge * noise / math.sqrt(1 - method.labels) * math.sqrt(2 * made.size)
    hot = nn.functional.one_hot(y, CLASSES).double()

    def slope(w: Tensor) -> float:
        """Of the expansion of log(1 + e^z) - y z at 0, and the ridge."""
        w = w.clone().requires_grad_()
        z = h @ w
        (z * (0.5 - hot) + z**2 / 8).sum().add(ridge * (w**2).sum() / 8).backward()
        assert w.grad is not None
        return float(w.grad.norm())

    assert slope(weights) < 1e-5 * slope(torch.zeros_like(weights))
    weight, bias = made.head_from_weights(weights, center)
    assert torch.allclose(features @ weight.T + bias, h @ weights)
    assert torch.allclose(made.weights_from_head(weight, bias, center), weights)


def test_a_round_descends_the_softmax_loss() -> None:
    made = sums(Functional(radius=10.0, residual=10.0, step=1.0))
    features, y, center, h = objective(made, 300)
    weights, curvature = made.fit_weights(made.sum_coefficients([(features, y, 1.0)], center), 0.1)
    residuals = made.sum_residuals([(features, y, 1.0)], center, weights)
    at = weights.clone().requires_grad_()
    nn.functional.cross_entropy(h @ at, y, reduction="sum").backward()
    assert at.grad is not None
    assert torch.allclose(10.0 * residuals.view_as(at), -at.grad, atol=1e-5)
    better = made.refine_weights(residuals, weights, curvature)
    loss = [float(nn.functional.cross_entropy(h @ w, y)) for w in (weights, better)]
    assert loss[1] < loss[0]


# ---- what a training releases


PARTS = (0.05, 0.25, 0.35, 0.35)  # of mu^2, by default, in two rounds


def test_each_sum_has_the_plans_noise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[tuple[np.ndarray, np.ndarray, bytes, float]] = []
    real = private_step.add_noise

    def watched(total: np.ndarray, key: bytes, std: float, *given: Any) -> np.ndarray:
        summed = total.copy()
        noisy = real(total, key, std, *given)
        found.append((summed, noisy.copy(), key, std))
        return noisy

    monkeypatch.setattr(private_step, "add_noise", watched)
    job = job_of(tmp_path, privacy__noise_multiplier=3.0)
    execute(job)
    size = sums().size
    outer = size * (size + 1) // 2 + size * CLASSES
    assert [len(total) for total, *_ in found] == [size - 1, outer, *[size * CLASSES] * 2]
    for (total, noisy, _, std), part in zip(found, PARTS, strict=True):
        assert std == pytest.approx(3.0 / math.sqrt(part))
        # 5 standard deviations of the estimate: 6e-7; 3/2 and 2/3 of the noise are far beyond.
        measured = float(np.std(noisy - total)) / (3.0 / math.sqrt(part))
        assert abs(measured - 1) < 5 / math.sqrt(2 * len(total)) < 1 / 2
    wide = found[1]
    assert 5 / math.sqrt(2 * len(wide[0])) < 0.1
    assert len({key for _, _, key, _ in found}) == 4
    assert Ledger.read(job.folder.ledger).release_counts == dict.fromkeys(range(4), 1)


@pytest.mark.parametrize("rounds", [0, 3])
def test_what_it_costs_is_the_exact_gaussian(tmp_path: Path, rounds: int) -> None:
    method = {**METHOD, "center": 0.2, "refine": 0.3, "rounds": rounds}
    plan = job_of(tmp_path, method=method, privacy__noise_multiplier=2.5).plan
    noises = [plan.step(t).noise_multiplier for t in range(plan.steps)]
    assert len(noises) == 2 + rounds
    mu = math.sqrt(sum(noise**-2 for noise in noises))
    assert mu == pytest.approx(1 / 2.5)
    exact = float(mechanisms.gaussian_epsilon(plan.delta, 1.0, mu))
    assert exact <= plan.guarantee().epsilon <= exact + 1e-3


def test_any_number_of_workers(tmp_path: Path) -> None:
    """With noise shared out by the relevance of public records."""
    more: dict[str, Any] = {
        "data": {"name": "digits", "public": 0.3, "max_train": 400},
        "method": {**METHOD, "relevance": {"data": "digits"}},
        "training__reproducible": True,
    }

    def run(workers: int) -> Tensor:
        job = job_of(tmp_path, str(workers), resources__workers=workers, **more)
        execute(job, workers)
        return parameters(job.folder)

    assert torch.equal(run(1), run(3))


@pytest.mark.slow
def test_it_continues_with_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With all that it has: an encoder that is learned first, noisy and adversarial copies."""
    model = {"name": "patches", "options": {"filters": 6, "side": 3, "pool": 3}}
    method = {"encoder": 0.1, "adversarial": {}, "sigma": 0.2, "augmentations": 2, "rounds": 1}
    given = {"model": model, "method": {**METHOD, **method}}
    whole = train(*make(tmp_path, "whole", **given))
    for at in (0, 2):
        recipe, folder = make(tmp_path, f"cut-{at}", **given)
        train_and_crash(recipe, folder, monkeypatch, at)
        assert Ledger.read(folder.ledger).release_counts == dict.fromkeys(range(at + 1), 1)
        assert (load_latest(folder.checkpoints) is None) == (at == 0)
        assert torch.equal(train(recipe, folder), whole)
        assert read_verified_ledger(folder).ledger.num_superseded == 0


def test_a_declared_number_leaves_room_for_many_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rounding of a sum grows with the true number, which a declared one says nothing of."""
    made: list[CoefficientSums] = []
    monkeypatch.setattr(
        CoefficientSums, "sum_features", lambda self, *rest: made.append(self) or rest[1]
    )
    more = {"data": {"name": "digits"}, "privacy__delta": 1e-7}
    nominal, most = 2**19, 2**21
    job = job_of(tmp_path, str(nominal), **more, privacy__nominal_records=nominal)
    execute(job, until=1)
    assert made[-1]._slack_factor == 1 - rounding_slack(most) and made[-1].records == nominal
    # Of both sums, over so many records in passes of 128 (Higham, section 3.5).
    assert 2 * (128 + most / 128) * 2.0**-53 * most <= rounding_slack(most)
    assert check_record_limit(job.recipe, most) == most
    with pytest.raises(UserError, match=r"privacy\.nominal_records:"):
        check_record_limit(job.recipe, most + 1)
    monkeypatch.setattr(base, "_MIN_RECORD_LIMIT", 100)
    job = job_of(tmp_path, "beyond", **more, privacy__nominal_records=60)
    with pytest.raises(UserError, match=r"privacy\.nominal_records:"):
        execute(job)


# ---- options

ROUND = 2  # the step of the first round
PATCHES = {"filters": 6, "side": 3, "pool": 3}


def encoded() -> nn.Module:
    return models.initialize(ModelSpec("patches", SHAPE, CLASSES, PATCHES), 0)


class MadeUp(list[Tensor]):
    """Records of these inputs and targets."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        super().__init__(x)
        self.batch, self.targets = (lambda rows: x[rows]), (lambda rows: y[rows])


def summed(
    method: Functional, made: CoefficientSums | None, left: int = -1, step: int = ROUND
) -> Tensor:
    """Return the sum of a step over synthetic records except the one at position `left`.

    made: None for the encoder's sum.
    """
    rng = np.random.default_rng(0)
    x = records(rng).float()
    y = torch.from_numpy(rng.integers(0, CLASSES, RECORDS))
    canaries = Canaries()
    canaries.inputs_for = lambda members: members[members != left]  # type: ignore[method-assign]
    model = network() if made is not None else encoded()
    last_linear(model).weight.data.normal_(generator=torch.Generator().manual_seed(0))
    given = SimpleNamespace(
        plan=SimpleNamespace(step=lambda step: None, records=RECORDS),
        recipe=SimpleNamespace(privacy=SimpleNamespace(nominal_records=None)),
        model=model, parameters=[last_linear(model).weight], state=MethodState(nn.Identity()),
        canaries=canaries,
        draw_key=lambda *labels: derive_key(b"k" * 32, "draw", "", *labels),
        shards=SimpleNamespace(local_shards=[(0, 0, RECORDS)], num_rows=1),
        records=MadeUp(x, y),
    )  # fmt: skip
    if made is not None:
        made.feature_cache.clear()  # its passes are others when a record is left out
    steps = FunctionalSteps(FunctionalExecution(method), given)  # type: ignore[arg-type]
    steps._coefficients = made
    (row,) = steps.sums(step)
    return row


@pytest.mark.parametrize("sigma", [0.0, 0.3])
def test_one_record_moves_an_adversarial_round_by_at_most_one(sigma: float) -> None:
    asked = Adversarial(size=0.2, steps=2, xi=0.5)
    method = Functional(adversarial=asked, sigma=sigma, augmentations=2 if sigma else 1)
    made = sums(method)
    whole = summed(method, made)
    some = range(0, RECORDS, 3)
    moved = [float((whole - summed(method, made, left)).norm()) for left in some]
    assert max(moved) <= 1 - 2.0**-10  # room for rounding
    assert max(moved) > (0.5 if sigma else 0.8)


# ---- relevance


# ---- a private encoder


@pytest.mark.parametrize("sigma", [0.0, 0.3])
def test_one_record_moves_the_encoder_s_sum_by_at_most_one(sigma: float) -> None:
    method = Functional(encoder=0.1, sigma=sigma, augmentations=3 if sigma else 1)
    whole = summed(method, None, step=0)
    moved = [float((whole - summed(method, None, left, step=0)).norm()) for left in range(RECORDS)]
    assert max(moved) <= 1.0 and whole.isfinite().all()
    assert max(moved) > (0.1 if sigma else 0.3)


def test_filters_are_the_principal_components_of_patches() -> None:
    part = models.patch_features_of(encoded())
    x = torch.rand(40, *SHAPE)
    found = nn.functional.unfold(x.double(), 3).transpose(1, 2).reshape(-1, 9)
    found = found - found.mean(1, keepdim=True)
    found = found / found.norm(dim=1, keepdim=True).clamp(min=1)
    part.fit_filters(part.moments(x).sum(0))
    after = part.encoder.weight.detach().double().flatten(1)
    assert torch.allclose(after @ after.T, torch.eye(6).double(), atol=1e-6)
    assert float(after.sum(1).abs().max()) < 1e-6
    kept = (found @ after.T).square().sum() / found.square().sum()
    best = torch.linalg.eigvalsh(found.T @ found).flip(0)
    assert float(kept) == pytest.approx(float(best[:6].sum() / best.sum()), rel=1e-6)


def test_the_encoder_is_paid_for_and_learned_first(tmp_path: Path) -> None:
    method = {"name": "functional", "rounds": 2, "encoder": 0.1}
    model = {"name": "patches", "options": PATCHES}
    job = job_of(tmp_path, model=model, method=method, privacy__noise_multiplier=2.0)
    noises = [job.plan.step(t).noise_multiplier for t in range(job.plan.steps)]
    assert len(noises) == 5 and noises[0] == pytest.approx(2.0 / math.sqrt(0.1))
    assert sum(noise**-2 for noise in noises) == pytest.approx(2.0**-2)
    execute(job)
    kept = models.patch_features_of(models.load(job.folder.model_folder)).encoder.weight
    assert not torch.allclose(kept, models.patch_features_of(encoded()).encoder.weight, atol=0.1)


# ---- noise that a record has of its own


def test_one_record_with_its_own_noise_moves_each_sum_by_at_most_one() -> None:
    method = Functional(sigma=0.3, augmentations=2, noise="own", radius=0.05)
    made = sums(method)
    for step in (0, 1, ROUND):
        whole = summed(method, made, step=step)
        some = (0, 4, 6, 7)
        moved = [float((whole - summed(method, made, left, step)).norm()) for left in some]
        assert 0.6 < max(moved) <= 1.0
