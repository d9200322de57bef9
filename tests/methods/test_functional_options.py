"""Options of method functional: adversarial rounds, and noise shared out by public relevance."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.training import execute, make, parameters, train, train_and_crash
from test_functional import CLASSES, RECORDS, SHAPE, job_of, network, records
from torch import Tensor, nn

from dpdist import data, models
from dpdist.core.errors import UserError
from dpdist.gradients.perturbations import InputPerturbation
from dpdist.methods.base import MethodSetup, MethodState
from dpdist.models import ModelSpec, last_linear
from dpdist.papers.stobatch.functional import Adversarial, Functional, Relevance
from dpdist.papers.stobatch.functional_sums import (
    SCALES,
    CoefficientSums,
    FunctionalExecution,
    FunctionalSteps,
    feature_scales,
    rounding_slack,
)
from dpdist.randomness.keys import derive_key
from dpdist.training.canaries import Canaries

ROUND = 2  # the step of the first round
MOVED = Adversarial(size=0.2, steps=2)
PATCHES = {"filters": 6, "side": 3, "pool": 3}


def encoded() -> nn.Module:
    return models.initialize(ModelSpec("patches", SHAPE, CLASSES, PATCHES), 0)


def sums(
    method: Functional, scales: Tensor | None = None, model: nn.Module | None = None
) -> CoefficientSums:
    return CoefficientSums(method, model or network(), torch.rand(8, *SHAPE), RECORDS, scales)


class MadeUp(list[Tensor]):
    """Records of these inputs and targets."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        super().__init__(x)
        self.batch, self.targets = (lambda rows: x[rows]), (lambda rows: y[rows])


def summed(
    method: Functional,
    made: CoefficientSums | None,
    left: int = -1,
    step: int = ROUND,
    planned: int = RECORDS,
    nominal: int | None = None,
) -> Tensor:
    """What a training sums in a step, of made-up records and one of them left out. made: None for
    the encoder's sum. planned, nominal: records of the plan, and those declared."""
    rng = np.random.default_rng(0)
    x = records(rng).float()
    y = torch.from_numpy(rng.integers(0, CLASSES, RECORDS))
    canaries = Canaries()
    canaries.inputs_for = lambda members: members[members != left]  # type: ignore[method-assign]
    model = network() if made is not None else encoded()
    last_linear(model).weight.data.normal_(generator=torch.Generator().manual_seed(0))
    given = SimpleNamespace(
        plan=SimpleNamespace(step=lambda step: None, records=planned),
        recipe=SimpleNamespace(privacy=SimpleNamespace(nominal_records=nominal)),
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
@pytest.mark.parametrize("xi", [0.5, 3.0])
def test_one_record_moves_an_adversarial_round_by_at_most_one(xi: float, sigma: float) -> None:
    asked = Adversarial(size=0.2, steps=2, xi=xi)
    method = Functional(adversarial=asked, sigma=sigma, augmentations=2 if sigma else 1)
    made = sums(method)
    whole = summed(method, made)
    some = range(0, RECORDS, 3)
    moved = [float((whole - summed(method, made, left)).norm()) for left in some]
    assert max(moved) <= 1 - 2.0**-10  # room for rounding
    assert max(moved) > (0.5 if sigma else 0.8)


def made_moved() -> CoefficientSums:
    return sums(Functional(adversarial=MOVED))


def test_copies_stay_near_and_raise_the_loss_of_their_label() -> None:
    made = made_moved()
    x, y = 0.2 + 0.6 * torch.rand(20, *SHAPE), torch.arange(20) % CLASSES
    weight = torch.randn(CLASSES, made.size - 1, dtype=torch.float64)
    bias = torch.randn(CLASSES, dtype=torch.float64)
    found = made.adversarial_copies(x, y, weight, bias)
    assert 0.15 < float((found - x).abs().max()) <= 0.2 + 1e-12
    assert float(found.min()) >= 0 and float(found.max()) <= 1

    def loss(points: Tensor) -> Tensor:
        logits = made._penultimate_features(points.double()) @ weight.T + bias
        return nn.functional.cross_entropy(logits, y, reduction="none")

    assert bool((loss(found) > loss(x)).all())
    # A function of the record alone, but for rounding.
    alone = torch.cat(
        [made.adversarial_copies(x[i : i + 1], y[i : i + 1], weight, bias) for i in range(20)]
    )
    assert float((alone - found).abs().max()) < 1e-9


class Turned(torch.autograd.Function):
    """The same answers in any company, and another gradient in a batch of odd size."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.flatten(1)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        return (slope if len(slope) % 2 == 0 else -slope).view(-1, *SHAPE)


class Turns(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Turned.apply(x)


def test_copies_that_depend_on_their_company_are_refused() -> None:
    model = nn.Sequential(Turns(), nn.Linear(64, CLASSES))
    sums(Functional(), model=model)
    with pytest.raises(UserError, match=r"method\.adversarial"):
        sums(Functional(adversarial=MOVED), model=model)
    with pytest.raises(ValueError, match="rounds"):
        Functional(adversarial=MOVED, rounds=0)


# ---- relevance


def test_scaled_directions_are_within_one_and_the_head_is_the_same() -> None:
    scales = torch.linspace(0.1, 3.0, sums(Functional()).size - 1).double()
    made = sums(Functional(radius=0.2), scales)
    features = made.features(records(np.random.default_rng(0)))
    center = features.mean(0)
    h = made.directions(features, center)
    assert float(h.norm(dim=1).max()) <= 1 + 1e-12
    wide = sums(Functional(radius=10.0), scales)  # nothing is clipped
    h = wide.directions(features, center)
    plain = sums(Functional(radius=10.0)).directions(features, center)
    assert torch.allclose(h[:, :-1], plain[:, :-1] * scales)
    weights = torch.randn(wide.size, CLASSES).double()
    weight, bias = wide.head_from_weights(weights, center)
    assert torch.allclose(features @ weight.T + bias, h @ weights)
    assert torch.allclose(wide.weights_from_head(weight, bias, center), weights)


def test_scales_are_made_of_public_records_alone(tmp_path: Path) -> None:
    public = data.load(data.DataSource("digits", 10, None), "train").select_by_hash(0.0, 0.2)
    asked = Relevance(floor=0.2)
    spec = ModelSpec("scattering", SHAPE, 10, {"widths": [1.0], "stride": 1, "cosines": 3})
    setup = MethodSetup(None, spec, network, None, public, b"")  # type: ignore[arg-type]
    scales = feature_scales(Functional(), asked, setup)
    assert float(scales.square().mean()) == pytest.approx(1)
    assert 0.2 <= float(scales.square().min()) < 0.9 and float(scales.square().max()) > 1.5


@pytest.mark.slow
def test_both_options_train(tmp_path: Path) -> None:
    found = {}
    base = {"name": "functional", "rounds": 2}
    for name, more in {
        "plain": {},
        "adversarial": {"adversarial": {"size": 0.1}},
        "relevance": {"relevance": {"data": "digits"}},
    }.items():
        given = {"name": "digits", "public": 0.3, "max_train": 400}
        job = job_of(tmp_path, name, data=given, method=base | more)
        stand = job.recipe.method.execution().placeholder_state(network(), SHAPE)
        assert (SCALES in stand) == (name == "relevance")
        execute(job)
        found[name] = parameters(job.folder)
        assert found[name].isfinite().all()
        one = job.plan.guarantee().epsilon
        assert one == pytest.approx(found.setdefault("epsilon", one))  # the same cost
    for name in ("adversarial", "relevance"):
        assert not torch.equal(found[name], found["plain"])


# ---- a private encoder


@pytest.mark.parametrize("sigma", [0.0, 0.3])
def test_one_record_moves_the_encoder_s_sum_by_at_most_one(sigma: float) -> None:
    method = Functional(encoder=0.1, sigma=sigma, augmentations=3 if sigma else 1)
    whole = summed(method, None, step=0)
    moved = [float((whole - summed(method, None, left, step=0)).norm()) for left in range(RECORDS)]
    assert max(moved) <= 1.0 and whole.isfinite().all()
    assert max(moved) > (0.1 if sigma else 0.3)
    checks = torch.tensor([[0.0, 1e6], [1e6, 0.0]]).repeat(4, 4)[None, None]
    square = models.patch_features_of(encoded()).moments(checks)
    assert float(square.norm()) == pytest.approx(1.0, abs=1e-6)  # not overstated either


def test_the_encoder_s_sum_leaves_room_for_its_rounding() -> None:
    """It is shortened by what as many records as the plan's, or as a declared number stands for,
    may round it by."""
    method = Functional(encoder=0.1)
    few = summed(method, None, step=0) / (1 - rounding_slack(RECORDS))
    for planned, nominal, most in ((2**26, None, 2**26), (64, 64, 2**20), (2**22, 2**22, 2**24)):
        found = summed(method, None, step=0, planned=planned, nominal=nominal)
        shorter = 1 - float(found.norm() / few.norm())
        assert shorter == pytest.approx(rounding_slack(most), rel=1e-3)


def test_filters_are_the_principal_components_of_patches() -> None:
    part = models.patch_features_of(encoded())
    before = part.encoder.weight.detach().clone().flatten(1)
    assert torch.allclose(before @ before.T, torch.eye(6), atol=1e-6)
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
    common: dict[Any, Any] = {}
    execute(replace(job, shared_cache=common))
    assert not common  # of filters that other trainings do not have
    kept = models.patch_features_of(models.load(job.folder.model_folder)).encoder.weight
    assert not torch.allclose(kept, models.patch_features_of(encoded()).encoder.weight, atol=0.1)
    assert "paid for" in job.recipe.method.assumptions(job.recipe)[0]
    with pytest.raises(UserError, match=r"model\.name: "):
        job_of(tmp_path, "other", method=method)


@pytest.mark.slow
def test_a_training_with_an_encoder_continues_with_the_same_bits(tmp_path, monkeypatch) -> None:
    given = {
        "model": {"name": "patches", "options": PATCHES},
        "method": {"name": "functional", "rounds": 1, "encoder": 0.1, "adversarial": {}},
    }
    whole = train(*make(tmp_path, "whole", **given))
    for at in (0, 1):
        recipe, folder = make(tmp_path, f"cut-{at}", **given)
        train_and_crash(recipe, folder, monkeypatch, at)
        assert torch.equal(train(recipe, folder), whole)


# ---- noise that a record has of its own


def test_own_noise_is_a_function_of_the_record_and_fresh_noise_is_not() -> None:
    x, draws = torch.rand(6, *SHAPE), InputPerturbation(2, 0.5)
    rows = np.arange(6)

    def noisy(noise: Any, key: bytes = b"k", draw: int = 0, order: Any = rows) -> Tensor:
        steps = FunctionalSteps.__new__(FunctionalSteps)
        records = SimpleNamespace(batch=lambda asked: x[order][asked])
        steps._given = SimpleNamespace(records=records)  # type: ignore[assignment]
        steps.method, steps._device = Functional(noise=noise), torch.device("cpu")
        return steps._noisy_copy(draws, key * 32, rows, draw)[np.argsort(order)]

    own, fresh, turned = noisy("own"), noisy("fresh"), np.arange(6)[::-1].copy()
    assert torch.equal(noisy("own", b"j", order=turned), own)
    assert not torch.equal(noisy("own", draw=1), own)
    assert (noisy("fresh", b"j") != fresh).all() and (noisy("fresh", order=turned) != fresh).any()
    noise = own - x
    assert float(noise.std()) == pytest.approx(0.5, rel=0.15)  # 384 numbers
    assert len({tuple(each.flatten().tolist()) for each in noise}) == 6


def test_one_record_with_its_own_noise_moves_each_sum_by_at_most_one() -> None:
    method = Functional(sigma=0.3, augmentations=2, noise="own", radius=0.05)
    made = sums(method)
    for step in (0, 1, ROUND):
        whole = summed(method, made, step=step)
        some = (0, 4, 6, 7, 13, 20)
        moved = [float((whole - summed(method, made, left, step)).norm()) for left in some]
        assert 0.6 < max(moved) <= 1.0
