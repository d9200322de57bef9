"""Options of method functional: adversarial rounds, and noise shared out by public relevance."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.training import execute
from test_functional import CLASSES, RECORDS, SHAPE, job_of, network, records, sums
from torch import Tensor, nn

from dpdist import data, models
from dpdist.gradients.perturbations import InputPerturbation
from dpdist.methods.base import MethodSetup, MethodState
from dpdist.models import ModelSpec, last_linear
from dpdist.papers.stobatch.functional import Adversarial, Functional, Relevance
from dpdist.papers.stobatch.functional_sums import (
    CoefficientSums,
    FunctionalExecution,
    FunctionalSteps,
    feature_scales,
)
from dpdist.randomness.keys import derive_key
from dpdist.training.canaries import Canaries

ROUND = 2  # the step of the first round
MOVED = Adversarial(size=0.2, steps=2)
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
    """What a training sums in a step, of made-up records and one of them left out. made: None for
    the encoder's sum."""
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


def test_copies_stay_near_and_raise_the_loss_of_their_label() -> None:
    made = sums(Functional(adversarial=MOVED))
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


# ---- relevance


def test_scales_are_made_of_public_records_alone(tmp_path: Path) -> None:
    public = data.load(data.DataSource("digits", 10, None), "train").select_by_hash(0.0, 0.2)
    asked = Relevance(floor=0.2)
    spec = ModelSpec("scattering", SHAPE, 10, {"widths": [1.0], "stride": 1, "cosines": 3})
    setup = MethodSetup(None, spec, network, None, public, b"")  # type: ignore[arg-type]
    scales = feature_scales(Functional(), asked, setup)
    assert float(scales.square().mean()) == pytest.approx(1)
    assert 0.2 <= float(scales.square().min()) < 0.9 and float(scales.square().max()) > 1.5


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
        some = (0, 4, 6, 7)
        moved = [float((whole - summed(method, made, left, step)).norm()) for left in some]
        assert 0.6 < max(moved) <= 1.0
