"""Denoisers through the whole pipeline: the CIFAR-10 recipe, the benchmark's own rows."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from support.benchmarks import load as load_benchmark
from support.datasets import png, write_split

from dpdist import models, pipeline
from dpdist.models.zoo import FixedBatchNorm
from dpdist.reports.results import load_results
from dpdist.runs.recipe import find_recipe, load_recipe, resolve_recipe
from dpdist.training.pretraining import pretrain

pytestmark = pytest.mark.timeout(600)


def color_images(root: Path, records: int = 60) -> Path:
    """Made-up records in CIFAR-10's layout."""
    rng = np.random.default_rng(3)
    for split in ("train", "test"):
        pictures = rng.integers(0, 256, (records, 32, 32, 3), dtype=np.uint8)
        rows = [{"bytes": png(picture), "path": ""} for picture in pictures]
        write_split(root / "cifar10", split, image=rows, label=rng.integers(0, 10, records))
    return root


@pytest.mark.slow
@pytest.mark.nightly
def test_the_cifar10_recipe_with_a_torchvision_classifier(here, tmp_path):
    """pretrain, train, evaluate, certify, report: a few steps of the recipe that comes along."""
    small = {
        "model.classifier": str(tmp_path / "classifier"),
        "public.training": {"batch_size": 8, "steps": 2, "learning_rate": 0.01},
        "training.batch_size": 8,
        "training.steps": 3,
        "privacy.delta": 1e-3,
        "certify.n": 20,
        "certify.n0": 5,
        "certify.every": 30,
        "certify.radii": [0.1],
        "resources.workers": 2,
        "resources.cpus_per_worker": 1,
    }
    recipe = load_recipe(find_recipe("transdenoiser-cifar10"), small)
    recipe = resolve_recipe(recipe, data_root=color_images(tmp_path / "data"))
    pretrain(recipe, "test")
    folder = pipeline.run(recipe, runs=tmp_path / "runs")
    facts = load_results(folder)
    assert facts.training_summary["steps"] == 3 and facts.guarantee.epsilon <= 3.0
    assert len(facts.tables[0].index) == 2 and folder.report_file.exists()
    assert facts.training_summary["fallback_layers"] == []
    model = models.load(folder.model_folder)
    classifier = models.load(tmp_path / "classifier").state_dict()
    behind = model.get_submodule("classifier")
    assert any(isinstance(module, FixedBatchNorm) for module in behind.modules())
    # Nothing of the classifier moved: weights, and the statistics it was pre-trained with.
    assert all(torch.equal(value, classifier[key]) for key, value in behind.state_dict().items())


@pytest.fixture
def benchmark(monkeypatch) -> ModuleType:
    return load_benchmark("papers/transdenoiser/run", monkeypatch)
