"""Scores: one record changes one side of the split and the count by at most one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from dpdist import models
from dpdist.certification.reexecution import Reexecution
from dpdist.config.search import ScoreRecipe
from dpdist.core.errors import UserError
from dpdist.data.dataset import Dataset
from dpdist.gradients.noise import add_noise
from dpdist.models import ModelSpec
from dpdist.randomness.keys import derive_key
from dpdist.training.record_scores import ACCURACY
from dpdist.tuning import scoring
from dpdist.tuning.scoring import (
    _record_scores,
    certified_radii,
    compute_score,
    publishable_score,
    values_by,
)

KEY = bytes(range(32))


def stored(folder, inputs: np.ndarray, labels: np.ndarray) -> Dataset:
    folder.mkdir()
    np.save(folder / "inputs.npy", inputs)
    np.save(folder / "labels.npy", labels)
    return Dataset(folder, "made/up", 10, folder.name)


@pytest.fixture
def records(tmp_path):
    rng = np.random.default_rng(5)
    inputs = rng.integers(0, 256, (120, 1, 8, 8), dtype=np.uint8)
    return tmp_path, inputs, rng.integers(0, 10, 120)


@pytest.fixture
def model(tmp_path):
    spec = ModelSpec("linear", (1, 8, 8), 10)
    module = models.initialize(spec, 3)
    models.save(module, spec, tmp_path / "model")
    return module.eval(), tmp_path / "model"


OBJECTIVES = [
    ScoreRecipe(),
    ScoreRecipe(objectives={"certified-accuracy": 1.0}, radius=0.05, samples=20),
    ScoreRecipe(objectives={"accuracy": 1.0, "average-radius": 3.0}, radius_cap=0.2, samples=20),
]


@pytest.mark.parametrize("settings", OBJECTIVES, ids=lambda s: "+".join(s.objectives))
def test_each_record_adds_its_own_number_between_zero_and_one(records, model, settings):
    """The other records' numbers do not change when one is removed: sensitivity 1."""
    root, inputs, _ = records
    with torch.inference_mode():
        labels = model[0](torch.from_numpy(inputs[:30] / 255).float()).argmax(1).numpy()
    whole = stored(root / "whole", inputs[:30], labels)
    values = _record_scores(model[0], whole, settings, 0.1, 1.0, KEY)
    assert values.shape == (30,) and (values >= 0).all() and (values <= 1).all()
    assert values.sum() > 3
    smaller = stored(root / "smaller", inputs[:29], labels[:29])
    assert np.array_equal(_record_scores(model[0], smaller, settings, 0.1, 1.0, KEY), values[:29])


def test_no_objective_counts_for_another_one(records, model):
    """A radius beyond its cap is worth the cap: it does not stand in for what is not certified."""
    root, inputs, _ = records
    with torch.inference_mode():
        labels = model[0](torch.from_numpy(inputs[:15] / 255).float()).argmax(1).numpy()
    dataset = stored(root / "records", inputs[:15], labels)
    cap, radius, sigma = 0.01, 0.3, 0.2
    both = {"certified-accuracy": 1.0, "average-radius": 1.0}
    settings = ScoreRecipe(objectives=both, radius=radius, radius_cap=cap, samples=200)
    radii = certified_radii(model[0], dataset, settings, sigma, KEY)
    assert ((radii > 3 * cap) & (radii < radius)).any()  # else this test shows nothing
    values = _record_scores(model[0], dataset, settings, sigma, 1.0, KEY)
    expected = ((radii >= radius) + np.clip(radii, 0, cap) / cap) / 2
    np.testing.assert_allclose(values, expected, atol=1e-12)


class Company(torch.nn.Module):
    """Class 0 for who is executed alone, class 1 for who is not."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        alone = torch.full((len(inputs),), int(len(inputs) > 1))
        return torch.nn.functional.one_hot(alone, 10).float()


def test_private_records_are_executed_alone(records):
    root, inputs, _ = records
    dataset = stored(root / "some", inputs[:30], np.zeros(30, dtype=np.int64))
    for most, right in ((1.0, 30), (None, 0)):  # of public records all at once
        found = _record_scores(Company(), dataset, ScoreRecipe(), None, most, KEY)
        assert found.sum() == right


def test_a_private_record_that_raises_an_error_adds_nothing(records):
    """Else whether a trial fails would depend on it."""
    root, inputs, labels = records
    few = stored(root / "some", inputs[:3], labels[:3])
    numbers = iter([1.0, None, 1.0])

    def value(module: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return torch.full((1,), next(numbers))  # None raises an error

    assert values_by(value, torch.nn.Identity(), few, 1).tolist() == [1.0, 0.0, 1.0]


def test_radii_are_those_of_the_certifier(records, model):
    root, inputs, _ = records
    module = model[0]
    with torch.inference_mode():
        labels = module(torch.from_numpy(inputs[:12] / 255).float()).argmax(1).numpy()
    labels[:2] = (labels[:2] + 1) % 10  # wrong ones have no radius
    dataset = stored(root / "some", inputs[:12], labels)
    settings = ScoreRecipe(objectives={"certified-accuracy": 1.0}, radius=0.1, samples=200)
    radii, again, other = (
        certified_radii(module, dataset, settings, 0.2, key) for key in (KEY, KEY, bytes(32))
    )
    assert (radii[:2] == -1).all() and (radii[2:] > 0).any()
    ceiling = 0.2 * stats.norm.ppf(0.01 ** (1 / 200))
    assert radii.max() <= ceiling * (1 + 1e-9)
    assert np.array_equal(radii, again) and not np.array_equal(radii, other)


def test_private_scores_carry_exactly_the_noise_paid_for(records, model):
    """Chi-square on 400 keys at 10^-4 a side; two thirds and three halves of it are rejected."""
    root, inputs, labels = records
    few = stored(root / "whole", inputs, labels).first(20)
    exact = float(values_by(ACCURACY, model[0], few, 1).sum())

    def score(noise: float | None, key: bytes) -> float:
        return compute_score(model[1], few, ScoreRecipe(), sigma=None, noise=noise, key=key)

    assert score(None, KEY) == exact / 20
    drawn = np.array([score(3.0, i.to_bytes(32, "little")) for i in range(400)])
    statistic = (((drawn * 20 - exact) / 3.0) ** 2).sum()
    low, high = stats.chi2.ppf([1e-4, 1 - 1e-4], 400)
    assert low < statistic < high
    for wrong in (2 / 3, 3 / 2):
        assert not low < statistic * wrong**2 < high


def test_a_diverged_model_has_no_score(records, model):
    root, inputs, labels = records
    module, folder = model
    with torch.no_grad():
        next(module.parameters()).fill_(torch.nan)
    models.save(module, ModelSpec("linear", (1, 8, 8), 10), folder)
    dataset = stored(root / "whole", inputs, labels)
    with pytest.raises(UserError, match="not finite"):
        compute_score(folder, dataset, ScoreRecipe(), sigma=None, noise=1.0, key=KEY)


def test_whatever_a_score_draws_has_a_key_of_its_own(records, model, monkeypatch):
    root, inputs, labels = records
    made = []

    def derived(*given):
        made.append(derive_key(*given))
        return made[-1]

    monkeypatch.setattr(scoring, "derive_key", derived)
    settings = ScoreRecipe(objectives={"certified-accuracy": 1.0}, radius=0.1, samples=20)
    dataset = stored(root / "some", inputs[:5], labels[:5])
    compute_score(model[1], dataset, settings, sigma=0.2, noise=1.0, key=KEY)
    assert len(made) == len(set(made)) == 2 and KEY not in made


def test_no_private_record_is_executed_again(records, model, monkeypatch):
    """What a second execution says would decide whether the trial is stopped."""
    root, inputs, labels = records
    monkeypatch.setattr(Reexecution, "__init__", lambda *_: pytest.fail("a record is looked at"))
    settings = ScoreRecipe(objectives={"certified-accuracy": 1.0}, radius=0.1, samples=20)
    dataset = stored(root / "some", inputs[:5], labels[:5])
    assert len(certified_radii(model[0], dataset, settings, 0.2, KEY)) == 5


@pytest.mark.parametrize("noise", [0.3, 1000.0])
def test_a_published_score_says_nothing_of_how_many_records_there_are(noise):
    """The same noisy count, of whatever number of records, is the same published score; the shares
    themselves lie on another grid for each number."""
    counts = add_noise(np.arange(50.0), bytes(32), noise)
    shown = {
        publishable_score(float(c) / n, n, noise, 143.7) for c in counts for n in (99, 143, 60_000)
    }
    assert shown == {float(c) / 143.7 for c in counts}
