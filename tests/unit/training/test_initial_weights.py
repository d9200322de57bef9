"""Public initial weights: deformed images, pre-training by noise, and what a private run checks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from support.training import execute

from dpdist import models, pipeline
from dpdist.core.errors import UserError
from dpdist.data.registry import SYNTHETIC_RECORDS
from dpdist.reports.results import load_results
from dpdist.runs.folder import RunFolder
from dpdist.runs.recipe import parse_recipe
from dpdist.training.job import prepare
from dpdist.training.model_setup import initial_model, model_spec
from dpdist.training.pretraining import pretrain
from dpdist.training.provenance import PROVENANCE_FILE, pretraining_settings
from dpdist.training.public_training import deform_images
from dpdist.training.records import data_source, external_public_records, records_with_canaries

CNN = {"name": "small-cnn", "options": {"width": 4}}


def raw(folder: Path, **sections) -> dict:
    return {
        "name": "run",
        "data": {"name": "digits", "public": 0.4},
        "model": {**CNN, "initial": str(folder)},
        "public": {
            "sigma": 0.25,
            "training": {
                "batch_size": 50, "steps": 120, "learning_rate": 0.01, "optimizer": "adam"
            },
        },
        "privacy": {"noise_multiplier": 1.0, "delta": 1e-4},
        "training": {"batch_size": 40, "steps": 2, "learning_rate": 0.01},
        **sections,
    }  # fmt: skip


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# --- deformations


def test_each_image_has_deformations_of_its_own_that_its_seed_repeats():
    one = torch.rand(1, 1, 9, 9, generator=generator(1)).expand(4, -1, -1, -1)
    first = deform_images(one, (1, 9, 9), generator())
    assert len({tuple(image.flatten().tolist()) for image in first}) == 4
    assert torch.equal(first, deform_images(one, (1, 9, 9), generator()))
    assert first.min() >= 0 and first.max() <= 1


# --- pre-training, and the run that begins with it


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("initial") / "weights"
    _, right = pretrain(parse_recipe(raw(folder), "test"), "test")
    assert right > 0.6  # ten classes: chance is 0.1
    return folder


def drawn(folder: Path, **sections) -> dict:
    """Public weights from strokes, of which there are 200 classes."""
    described = raw(folder, **{"data": {"name": "digits"}, **sections})
    described["public"]["data"] = {"name": "strokes", "classes": 200}
    described["public"]["training"] |= {"steps": 2}
    return described


def test_public_records_of_other_classes_teach_all_but_the_head(tmp_path, monkeypatch):
    monkeypatch.setitem(SYNTHETIC_RECORDS, "strokes", 400)
    monkeypatch.setenv("DPDIST_CACHE", str(tmp_path / "cache"))
    recipe = parse_recipe(drawn(tmp_path / "weights"), "test")
    folder, _ = pretrain(recipe, "test")
    run = prepare(recipe, RunFolder(tmp_path / "run"), "test").folder
    assert "400 public records of strokes" in run.pretraining_record.read_text()
    spec = models.read_spec(folder)
    trained, fresh = (models.load(folder).state_dict(), models.initialize(spec, 0).state_dict())
    assert spec.classes == 10
    for name in trained:
        assert torch.equal(trained[name], fresh[name]) == name.startswith("5."), name


def test_weights_that_saw_private_records_are_refused(weights, tmp_path):
    recipe = parse_recipe(raw(weights, data={"name": "digits", "public": 0.2}), "test")
    with pytest.raises(UserError, match="public ones"):
        prepare(recipe, RunFolder(tmp_path / "run"), "test")


def test_weights_made_by_other_settings_are_refused(weights, tmp_path):
    recipe = parse_recipe(raw(weights, public=raw(weights)["public"] | {"sigma": 0.5}), "test")
    with pytest.raises(UserError, match=r"public\.sigma"):
        prepare(recipe, RunFolder(tmp_path / "run"), "test")


def test_weights_that_nobody_vouches_for_are_refused(weights, tmp_path):
    bare = tmp_path / "bare"
    models.save(models.load(weights), models.read_spec(weights), bare)
    recipe = parse_recipe(raw(bare), "test")
    with pytest.raises(UserError, match=r"model\.initial\.pretraining_data"):
        prepare(recipe, RunFolder(tmp_path / "run"), "test")
    declared = raw(bare)
    declared["model"]["initial"] = {"folder": str(bare), "pretraining_data": "a public set"}
    prepare(parse_recipe(declared, "test"), RunFolder(tmp_path / "run"), "test")


def test_weights_replaced_in_the_middle_of_a_run_stop_it(weights, tmp_path):
    own, folder = tmp_path / "weights", RunFolder(tmp_path / "run")
    shutil.copytree(weights, own)
    recipe = parse_recipe(raw(own), "test")
    prepare(recipe, folder, "test")
    shutil.rmtree(own)
    described = raw(own)
    described["public"]["training"]["steps"] = 1
    pretrain(parse_recipe(described, "test"), "test")
    about = json.loads((own / PROVENANCE_FILE).read_text())
    about["made_by"] = pretraining_settings(recipe.public)  # as if by the run's own settings
    (own / PROVENANCE_FILE).write_text(json.dumps(about))
    with pytest.raises(UserError, match="initial has changed"):
        prepare(recipe, folder, "test")


def test_a_run_makes_its_public_part_first_and_only_once(tmp_path):
    recipe = parse_recipe(raw(tmp_path / "made"), "test")
    pipeline.pretrain_stage(recipe, "test")
    before = models.model_hash(tmp_path / "made")
    prepare(recipe, RunFolder(tmp_path / "run"), "test")
    pipeline.pretrain_stage(recipe, "test")
    assert models.model_hash(tmp_path / "made") == before


# --- transfer: a public part that stays, and a private head


def transfer(folder: Path, **model) -> dict:
    own = {"name": "small-cnn", "options": {"width": 4}, "initial": str(folder), "trained": ["5"]}
    return raw(
        folder,
        data={"name": "digits", "labels": [6, 7, 8, 9]},
        model=own | model,
        public={
            "data": {"name": "digits", "labels": [0, 1, 2, 3, 4, 5]},
            "training": {"batch_size": 50, "steps": 3, "learning_rate": 0.01},
        },
    )


# --- features that public records whiten

WHITENED = {"name": "pool-cnn", "trained": ["7"],
            "options": {"filters": [4, 6], "kernels": [3, 3], "whiten": 1e-6}}  # fmt: skip


def test_what_is_trained_must_be_there_and_the_rest_public(tmp_path):
    pretrain(parse_recipe(transfer(tmp_path / "public"), "test"), "test")
    recipe = parse_recipe(transfer(tmp_path / "public", trained=["head"]), "test")
    with pytest.raises(UserError, match=r"model\.trained"):
        prepare(recipe, RunFolder(tmp_path / "run"), "test")
    overlapping = transfer(tmp_path / "other")
    overlapping["public"]["data"]["labels"] = [5, 6]
    with pytest.raises(UserError, match="public ones"):
        pretrain(parse_recipe(overlapping, "test"), "test")


def test_a_layer_whitens_what_the_private_head_reads_by_public_records_alone(tmp_path):
    """Public features are uncorrelated and of their mean square behind it; private steps move the
    head alone."""
    recipe = parse_recipe(transfer(tmp_path / "public", **WHITENED), "test")
    pretrain(recipe, "test")
    network, public = models.load(tmp_path / "public"), declared_public(recipe)
    with torch.inference_mode():
        before = network[:6](public).double()
        after = network[:7](public).double()
    covariance = torch.cov(after.T, correction=0)
    varying = torch.cov(before.T, correction=0)
    seen = torch.linalg.eigvalsh(covariance) > 0.5 * covariance.trace() / len(covariance)
    assert after.mean(0).abs().max() < 1e-4
    assert float(covariance.trace()) == pytest.approx(float(varying.trace()), rel=1e-3)
    assert seen.sum() >= 12  # of 24; some never move
    values = torch.linalg.eigvalsh(covariance)[seen]
    assert float(values.max() / values.min()) < 1.05
    spread = torch.linalg.eigvalsh(varying)
    assert float(spread.max() / spread[-int(seen.sum())]) > 20
    job = prepare(recipe, RunFolder(tmp_path / "run"), "test")
    execute(job)
    trained = models.load(RunFolder(tmp_path / "run").model_folder).state_dict()
    moved = {n for n, v in network.state_dict().items() if not torch.equal(trained[n], v)}
    assert moved == {"7.weight", "7.bias"}


def declared_public(recipe) -> torch.Tensor:
    return external_public_records(recipe.public.data, None).batch(slice(None))


# --- weights behind a frozen denoiser, which both are public

UNET = {"name": "unet", "options": {"channels": [8]}}
DENOISING = {"batch_size": 50, "steps": 200, "learning_rate": 0.01, "optimizer": "adam"}


def behind(folder: Path, **sections) -> dict:
    return {
        "name": "run",
        "data": {"name": "digits", "public": 0.4},
        "model": {**CNN, "initial": str(folder)},
        "method": {"name": "input-noise", "sigma": 0.5, "augmentations": 1},
        "public": {"sigma": 0.5, "denoiser": UNET, "training": DENOISING},
        "privacy": {"noise_multiplier": 1.0, "delta": 1e-4},
        "training": {"batch_size": 40, "steps": 2, "learning_rate": 0.5},
        **sections,
    }


@pytest.fixture(scope="module")
def denoised(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("before") / "weights"
    pretrain(parse_recipe(behind(folder), "test"), "test")
    return folder


def parts(folder: Path) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Denoiser and classifier."""
    model = models.load_network(folder)
    return model.get_submodule(models.DENOISER), model.get_submodule(models.CLASSIFIER)


@pytest.mark.slow
def test_a_private_run_trains_what_is_behind_a_denoiser_only(denoised, tmp_path):
    recipe = parse_recipe(behind(denoised), "test")
    folder = RunFolder(tmp_path / "run")
    job = prepare(recipe, folder, "test")
    dataset = records_with_canaries(recipe, data_source(recipe))
    begun, saved = (
        initial_model(recipe, model_spec(recipe, dataset)),
        models.load_network(denoised),
    )
    for ours, theirs in zip(begun.parameters(), saved.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    trained = [name for name, p in begun.named_parameters() if p.requires_grad]
    assert trained and all(name.startswith("classifier.") for name in trained)
    execute(job)
    for before, after, same in zip(
        parts(denoised), parts(folder.model_folder), (True, False), strict=True
    ):
        for a, b in zip(before.parameters(), after.parameters(), strict=True):
            assert torch.equal(a, b) == same
    assert models.read_spec(folder.model_folder).denoiser == models.read_spec(denoised).denoiser
    card = load_results(folder).privacy_card()["extra"]
    assert "public records of digits" in card["initial weights trained on"]
    # What was trained may begin another run, and its denoiser comes with it.
    other = parse_recipe(behind(folder.model_folder, public=None), "test")
    assert model_spec(other, dataset).denoiser == models.read_spec(denoised).denoiser


def test_weights_made_with_another_denoiser_are_refused(denoised, tmp_path):
    described = behind(denoised)
    described["public"]["denoiser"] = {**UNET, "options": {}}
    with pytest.raises(UserError, match=r"public\.denoiser"):
        prepare(parse_recipe(described, "test"), RunFolder(tmp_path / "run"), "test")


def test_a_method_with_noise_inside_takes_no_weights_behind_a_denoiser(denoised, tmp_path):
    method = {"name": "secure-sgd", "epsilon_r": 1.0, "delta_r": 0.05, "attack_size": 0.1}
    described = behind(denoised, method=method, public=None)
    with pytest.raises(UserError, match="secure-sgd"):
        prepare(parse_recipe(described, "test"), RunFolder(tmp_path / "run"), "test")


def test_the_trained_modules_are_those_behind_the_denoiser(denoised):
    described = behind(denoised, public=None)
    described["model"]["trained"] = ["5"]
    recipe = parse_recipe(described, "test")
    spec = model_spec(recipe, records_with_canaries(recipe, data_source(recipe)))
    trained = [n for n, p in initial_model(recipe, spec).named_parameters() if p.requires_grad]
    assert trained == ["classifier.5.weight", "classifier.5.bias"]
