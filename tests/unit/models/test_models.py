"""The zoo's sizes, files and back, and the refusal to import a stranger's factory."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from dpdist import models
from dpdist.core.errors import UserError
from dpdist.models import ModelSpec


def size(spec: ModelSpec) -> int:
    return sum(p.numel() for p in models.build_model(spec).parameters())


def test_sizes_are_the_papers():
    """DPlis' CNN has 26,010 parameters on MNIST and 37,274 on CIFAR-10 (three input channels)."""
    assert size(ModelSpec("tf-cnn", (1, 28, 28), 10)) == 26_010
    assert size(ModelSpec("tf-cnn", (1, 28, 28), 10, {"dense": False})) == 14_394
    assert size(ModelSpec("tf-cnn", (3, 32, 32), 10)) == 37_274
    assert size(ModelSpec("unet-cnn", (1, 28, 28), 10)) == 43_563
    assert size(ModelSpec("pool-cnn", (3, 32, 32), 10)) == 115_274
    assert size(ModelSpec("pool-cnn", (3, 32, 32), 10, {"groups": 8})) == 115_722
    assert size(ModelSpec("linear", (1, 8, 8), 10)) == 650


@pytest.mark.parametrize("name", ["tf-cnn", "unet-cnn", "pool-cnn", "resnet-gn"])
def test_every_model_runs_saves_and_loads(name, tmp_path):
    shape = (3, 32, 32)
    spec = ModelSpec(name, shape, 7, mean=(0.5, 0.4, 0.3), std=(0.2,))
    module = models.initialize(spec, 3)
    inputs = torch.rand(2, *shape)
    models.save(module, spec, tmp_path)
    assert models.read_spec(tmp_path) == spec
    loaded = models.load(tmp_path)
    assert not loaded.training
    assert torch.equal(loaded(inputs), module.eval()(inputs))
    assert module(inputs).shape == (2, 7)


def test_initial_weights_depend_on_the_seed_only():
    spec = ModelSpec("linear", (4,), 2)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = models.initialize(spec, 5)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    second, third = models.initialize(spec, 5), models.initialize(spec, 6)
    assert torch.equal(first[1].weight, second[1].weight)
    assert not torch.equal(first[1].weight, third[1].weight)


def test_hash_names_weights_and_description(tmp_path):
    hashes = set()
    for number, (seed, classes) in enumerate([(0, 2), (1, 2), (0, 3)]):
        folder = tmp_path / str(number)
        spec = ModelSpec("linear", (4,), classes)
        models.save(models.initialize(spec, seed), spec, folder)
        hashes.add(models.model_hash(folder))
    assert len(hashes) == 3


def test_a_strangers_factory_is_not_imported(tmp_path):
    spec = ModelSpec("linear", (4,), 2)
    models.save(models.build_model(spec), spec, tmp_path)
    description = json.loads((tmp_path / "model.json").read_text())
    description["name"] = "os:abort"
    (tmp_path / "model.json").write_text(json.dumps(description))
    with pytest.raises(UserError, match="os:abort"):
        models.load(tmp_path)


def tied(shape, classes):
    first, second = nn.Linear(classes, classes), nn.Linear(classes, classes)
    second.weight = first.weight
    return nn.Sequential(first, second)


def test_tied_weights_are_saved(tmp_path):
    name = f"{__name__}:tied"
    spec = ModelSpec(name, (6,), 6)
    module = models.build_model(spec)
    models.save(module, spec, tmp_path)
    loaded = models.load(tmp_path, trusted_factory=name)
    inputs = torch.rand(3, 6)
    assert torch.equal(loaded(inputs), module(inputs))
