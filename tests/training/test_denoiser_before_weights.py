"""Initial weights behind a frozen denoiser, `public.denoiser`: both learned from public records, by
one folder, and only what is behind the denoiser is trained privately."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from support.training import execute

from dpdist import models
from dpdist.core.errors import UserError
from dpdist.reports.results import load_results
from dpdist.runs.folder import RunFolder
from dpdist.runs.recipe import parse_recipe
from dpdist.training.job import prepare
from dpdist.training.model_setup import initial_model, model_spec
from dpdist.training.pretraining import pretrain
from dpdist.training.records import (
    data_source,
    records_with_canaries,
)

CNN = {"name": "small-cnn", "options": {"width": 4}}
UNET = {"name": "unet", "options": {"channels": [8]}}
TRAINING = {"batch_size": 50, "steps": 200, "learning_rate": 0.01, "optimizer": "adam"}


def raw(folder: Path, **sections) -> dict:
    return {
        "name": "run",
        "data": {"name": "digits", "public": 0.4},
        "model": {**CNN, "initial": str(folder)},
        "method": {"name": "input-noise", "sigma": 0.5, "augmentations": 1},
        "public": {"sigma": 0.5, "denoiser": UNET, "training": TRAINING},
        "privacy": {"noise_multiplier": 1.0, "delta": 1e-4},
        "training": {"batch_size": 40, "steps": 2, "learning_rate": 0.5},
        **sections,
    }


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("before") / "weights"
    pretrain(parse_recipe(raw(folder), "test"), "test")
    return folder


def parts(folder: Path) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Denoiser and classifier."""
    model = models.load_network(folder)
    return model.get_submodule(models.DENOISER), model.get_submodule(models.CLASSIFIER)


@pytest.mark.slow
def test_a_private_run_trains_what_is_behind_it_only(weights, tmp_path):
    recipe = parse_recipe(raw(weights), "test")
    folder = RunFolder(tmp_path / "run")
    job = prepare(recipe, folder, "test")
    dataset = records_with_canaries(recipe, data_source(recipe))
    begun, saved = initial_model(recipe, model_spec(recipe, dataset)), models.load_network(weights)
    for ours, theirs in zip(begun.parameters(), saved.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    trained = [name for name, p in begun.named_parameters() if p.requires_grad]
    assert trained and all(name.startswith("classifier.") for name in trained)
    execute(job)
    for before, after, same in zip(
        parts(weights), parts(folder.model_folder), (True, False), strict=True
    ):
        for a, b in zip(before.parameters(), after.parameters(), strict=True):
            assert torch.equal(a, b) == same
    assert models.read_spec(folder.model_folder).denoiser == models.read_spec(weights).denoiser
    card = load_results(folder).privacy_card()["extra"]
    pretraining_data = card["initial weights trained on"]
    assert (
        "public records of digits" in pretraining_data and "compared by content" in pretraining_data
    )
    assert card["frozen denoiser"] == "came with the initial weights"
    # What was trained may begin another run, and its denoiser comes with it.
    other = parse_recipe(raw(folder.model_folder, public=None), "test")
    assert model_spec(other, dataset).denoiser == models.read_spec(weights).denoiser


@pytest.mark.parametrize("change", [{"denoiser": None}, {"denoiser": {**UNET, "options": {}}}])
def test_weights_made_with_another_denoiser_are_refused(weights, tmp_path, change):
    described = raw(weights)
    described["public"] = described["public"] | change
    with pytest.raises(UserError, match=r"public\.denoiser"):
        prepare(parse_recipe(described, "test"), RunFolder(tmp_path / "run"), "test")


def altered(weights: Path, folder: Path, **change) -> Path:
    """The same with another denoiser in its description."""
    shutil.copytree(weights, folder)
    path = folder / "model.json"
    described = json.loads(path.read_text())
    described["denoiser"] |= change
    path.write_text(json.dumps(described))
    (folder / "provenance.json").unlink()
    return folder


def declared(folder: Path) -> dict:
    """A run that begins with weights that do not say what they saw."""
    initial = {"folder": str(folder), "pretraining_data": "what lay about"}
    return raw(folder, public=None, model={**CNN, "initial": initial})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"input_shape": [1, 16, 16]}, r"its denoiser takes \(1, 16, 16\), digits"),
        ({"name": "evil:factory"}, "built by 'evil:factory'; a frozen part must be of the zoo"),
        ({"hidden_noise": True}, "its denoiser"),
    ],
)
def test_another_denoiser_is_refused_before_training(weights, tmp_path, change, said):
    folder = altered(weights, tmp_path / "w", **change)
    with pytest.raises(UserError, match=said):
        prepare(parse_recipe(declared(folder), "test"), RunFolder(tmp_path / "run"), "test")
    assert not (tmp_path / "run").exists()


def test_a_method_with_noise_inside_takes_no_weights_behind_a_denoiser(weights, tmp_path):
    method = {"name": "secure-sgd", "epsilon_r": 1.0, "delta_r": 0.05, "attack_size": 0.1}
    described = raw(weights, method=method, public=None)
    with pytest.raises(UserError, match="secure-sgd"):
        prepare(parse_recipe(described, "test"), RunFolder(tmp_path / "run"), "test")


def test_the_trained_modules_are_those_behind_the_denoiser(weights):
    described = raw(weights, public=None)
    described["model"]["trained"] = ["5"]
    recipe = parse_recipe(described, "test")
    spec = model_spec(recipe, records_with_canaries(recipe, data_source(recipe)))
    trained = [n for n, p in initial_model(recipe, spec).named_parameters() if p.requires_grad]
    assert trained == ["classifier.5.weight", "classifier.5.bias"]
    described["model"]["trained"] = ["denoiser"]
    with pytest.raises(UserError, match="no module 'denoiser'"):
        initial_model(parse_recipe(described, "test"), spec)
