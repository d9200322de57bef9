"""A score of several objectives: each counts its share at most, and its draws hide no noise."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from dpdist import models
from dpdist.config.search import ScoreRecipe
from dpdist.data.dataset import Dataset
from dpdist.models import ModelSpec
from dpdist.tuning.scoring import _record_scores, certified_radii

KEY = bytes(range(32))
SPEC = ModelSpec("linear", (1, 8, 8), 10)


@pytest.fixture
def model(tmp_path: Path) -> torch.nn.Module:
    module = models.initialize(SPEC, 3)
    models.save(module, SPEC, tmp_path / "model")
    return module.eval()


@pytest.fixture
def dataset(tmp_path: Path, model: torch.nn.Module) -> Dataset:
    """Records that the model classifies rightly."""
    inputs = np.random.default_rng(5).integers(0, 256, (15, 1, 8, 8), dtype=np.uint8)
    with torch.inference_mode():
        labels = model(torch.from_numpy(inputs / 255).float()).argmax(1).numpy()
    folder = tmp_path / "records"
    folder.mkdir()
    np.save(folder / "inputs.npy", inputs)
    np.save(folder / "labels.npy", labels)
    return Dataset(folder, "made/up", 10, folder.name)


def test_no_objective_counts_for_another_one(model, dataset):
    """A radius beyond its cap is worth the cap: it does not stand in for what is not certified."""
    cap, radius, sigma = 0.01, 0.3, 0.2
    settings = ScoreRecipe(
        objectives={"certified-accuracy": 1.0, "average-radius": 1.0},
        radius=radius,
        radius_cap=cap,
        samples=200,
    )
    radii = certified_radii(model, dataset, settings, sigma, KEY)
    assert ((radii > 3 * cap) & (radii < radius)).any()  # else this test shows nothing
    values = _record_scores(model, dataset, settings, sigma, 1.0, KEY)
    expected = ((radii >= radius) + np.clip(radii, 0, cap) / cap) / 2
    np.testing.assert_allclose(values, expected, atol=1e-12)
