"""The zoo's sizes, files and back, and the refusal to import a stranger's factory."""

from __future__ import annotations

import gc
import json
import weakref

import pytest
import torch
from torch import nn

from dpdist import models
from dpdist.core.errors import UserError
from dpdist.models import ModelSpec
from dpdist.models.features import PenultimateFeatures


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


@pytest.mark.parametrize(
    "name", ["linear", "mlp", "tf-cnn", "unet-cnn", "pool-cnn", "small-cnn", "resnet-gn"]
)
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


def test_a_factory_in_a_script_that_makes_models_is_refused(tmp_path, monkeypatch):
    """Its import would wait forever for a lock that its own importer holds."""
    (tmp_path / "unguarded_script.py").write_text(
        "from torch import nn\n"
        "from dpdist import models\n"
        "def net(input_shape, classes):\n"
        "    return nn.Linear(*input_shape, classes)\n"
        "models.initialize(models.ModelSpec('mlp', (8,), 2), 0)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match="unguarded_script:net"):
        models.initialize(models.ModelSpec("unguarded_script:net", (8,), 2), 0)
    models.initialize(models.ModelSpec("mlp", (8,), 2), 0)  # the next one is built


def test_own_factory_by_name(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n"
        "def net(input_shape, classes, width=3):\n"
        "    return nn.Sequential(nn.Linear(input_shape[0], width), nn.Linear(width, classes))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    spec = ModelSpec("mine:net", (4,), 2, options={"width": 5})
    models.save(models.build_model(spec), spec, tmp_path / "m")
    assert models.load(tmp_path / "m", trusted_factory="mine:net")[0].out_features == 5


class Tied(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(self.first(x))


def tied(shape, classes):
    return Tied(classes)


def test_tied_weights_are_saved(tmp_path):
    name = f"{__name__}:tied"
    spec = ModelSpec(name, (6,), 6)
    module = models.build_model(spec)
    models.save(module, spec, tmp_path)
    loaded = models.load(tmp_path, trusted_factory=name)
    inputs = torch.rand(3, 6)
    assert torch.equal(loaded(inputs), module(inputs))


def test_a_reader_of_features_is_gone_with_its_last_reference():
    """Models that vote are trained one after the other: none waits for the collector."""
    gc.disable()
    try:
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        read = PenultimateFeatures(model, torch.zeros(2, 3))
        assert torch.equal(read(torch.ones(2, 3)), model[:2](torch.ones(2, 3)))
        there = weakref.ref(read)
        del read
        assert there() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("sides", [(28, 28), (17, 40), (16, 16)])
def test_dense_layers_fit_behind_convolutions(sides):
    for options in (
        {}, {"filters": [3], "kernels": [4], "strides": [3]},
        {"filters": [2, 3, 4], "kernels": [3, 5, 5], "strides": [1, 2, 2]},
    ):  # fmt: skip
        network = models.build_model(ModelSpec("hgm-cnn", (2, *sides), 5, options=options))
        assert network(torch.zeros(3, 2, *sides)).shape == (3, 5)
    for dense in (True, False):
        options = {"width": 3, "dense": dense}
        network = models.build_model(ModelSpec("tf-cnn", (2, *sides), 5, options=options))
        assert network(torch.zeros(3, 2, *sides)).shape == (3, 5)
