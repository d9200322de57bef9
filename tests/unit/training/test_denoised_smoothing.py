"""Frozen parts from their commands to the card: denoised smoothing as a block, on real run folders.

A DP-trained denoiser before another classifier, a public denoiser before a DP-trained classifier,
and what of it all the privacy card says.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save as save_tensors
from support.datasets import write_images
from support.local_execution import command
from support.recipes import write_recipe
from support.training import execute
from torch import nn

from dpdist import models
from dpdist.core.errors import UserError
from dpdist.core.optional_imports import import_torchvision
from dpdist.gradients.clipping import FlatClipping
from dpdist.gradients.engine import GradientEngine, cross_entropy
from dpdist.reports.results import load_results
from dpdist.runs.folder import RunFolder
from dpdist.runs.recipe import parse_recipe
from dpdist.training.job import prepare
from dpdist.training.model_setup import initial_model, model_spec
from dpdist.training.pretraining import join_parts, pretrain
from dpdist.training.provenance import PROVENANCE_FILE
from dpdist.training.records import data_source, records_with_canaries

CNN = {"name": "small-cnn", "options": {"width": 4}}
DENOISER = {"name": "conv-autoencoder", "options": {"channels": [4]}}
QUICK = {"batch_size": 50, "steps": 60, "learning_rate": 0.01, "optimizer": "adam"}
PRIVACY = {"noise_multiplier": 1.0, "delta": 1e-4}


def raw(**sections) -> dict:
    """A run on the private 60 % of the digits."""
    return {
        "name": "run",
        "data": {"name": "digits", "public": 0.4},
        "method": "dp-sgd",
        "privacy": PRIVACY,
        "training": {"batch_size": 40, "steps": 3, "learning_rate": 0.1},
        "certify": {"sigma": 0.25, "n": 100, "n0": 20, "max_inputs": 10, "radii": [0.1]},
        **sections,
    }


def with_classifier(folder: Path, **sections) -> dict:
    """A private denoiser before the public classifier in `folder`."""
    return raw(
        model={**DENOISER, "classifier": str(folder)},
        method={"name": "transdenoiser", "sigma": 0.25},
        public={"model": CNN, "training": QUICK},
        **sections,
    )


def with_denoiser(folder: Path, **sections) -> dict:
    """A private classifier behind the public denoiser in `folder`."""
    return raw(
        model={**CNN, "denoiser": str(folder)},
        method={"name": "input-noise", "sigma": 0.25, "augmentations": 1},
        public={"model": DENOISER, "training": QUICK, "sigma": 0.25},
        **sections,
    )


def train(described: dict, folder: RunFolder) -> nn.Module:
    execute(prepare(parse_recipe(described, "test"), folder, "test"))
    return models.load(folder.model_folder)


@pytest.fixture(scope="module")
def public(tmp_path_factory) -> Path:
    """A folder with a public `classifier` and a public `denoiser`."""
    root = tmp_path_factory.mktemp("public")
    pretrain(parse_recipe(with_classifier(root / "classifier"), "test"), "test")
    _, error = pretrain(parse_recipe(with_denoiser(root / "denoiser"), "test"), "test")
    assert error < 0.25  # less noise than there was: each pixel had deviation 0.25
    return root


@pytest.fixture
def dpdist(here, monkeypatch, capsys) -> Callable[..., None]:
    """A command in this process, which ends as it should."""

    def run(*words: object, cwd: Path, code: int = 0) -> None:
        done = command(monkeypatch, capsys, cwd, *words)
        assert done.code == code, done.out + done.err

    return run


def test_a_denoiser_that_saw_private_records_is_refused(public, tmp_path):
    described = with_denoiser(public / "denoiser", data={"name": "digits", "public": 0.2})
    with pytest.raises(UserError, match=r"model\.denoiser\.folder"):
        prepare(parse_recipe(described, "test"), RunFolder(tmp_path / "run"), "test")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_the_commands_put_a_denoiser_before_any_classifier(dpdist, public, tmp_path):
    """Pretrain, join both ways, certify, release: by the command, on real runs."""
    private_denoiser, private_classifier = (RunFolder(tmp_path / "d"), RunFolder(tmp_path / "c"))
    train(with_classifier(public / "classifier"), private_denoiser)
    own = train(raw(model=CNN), private_classifier)
    mlp = {"model": {"name": "mlp", "options": {"hidden": [16]}}, "training": QUICK}
    write_recipe(tmp_path, with_classifier(tmp_path / "other"), "other.yaml", public=mlp)
    dpdist("run", "other.yaml", "--until", "pretrain", cwd=tmp_path)

    def join(name: str, *words: object, code: int = 0) -> None:
        dpdist("import", name, "--run", *words, "--runs", tmp_path, cwd=tmp_path, code=code)

    join("moved", "d", "--classifier", "other")
    moved = RunFolder(tmp_path / "moved")
    x = torch.rand(4, 1, 8, 8)
    denoiser = models.load(private_denoiser.model_folder).get_submodule("denoiser")
    assert torch.equal(
        models.load(moved.model_folder)(x), models.load(tmp_path / "other")(denoiser(x))
    )
    assert load_results(moved).guarantee == load_results(private_denoiser).guarantee

    join("smoothed", "c", "--denoiser", public / "denoiser")
    smoothed = RunFolder(tmp_path / "smoothed")
    before = models.load(public / "denoiser")
    assert torch.equal(models.load(smoothed.model_folder)(x), own(before(x)))
    assert load_results(smoothed).guarantee == load_results(private_classifier).guarantee

    # Its recipe continues it: nothing is left to train.
    prepare(smoothed.read_recipe(), smoothed, "test")
    dpdist("certify", "smoothed", "--runs", tmp_path, "--workers", 1, cwd=tmp_path)
    (table,) = smoothed.certificates.glob("*/certificates.parquet")
    assert pq.read_table(table).num_rows == 10
    dpdist("release", "smoothed", "--runs", tmp_path, cwd=tmp_path)
    card = json.loads((smoothed.release_folder / "privacy_card.json").read_text())
    assert card["private"] and "public records" in card["extra"]["frozen denoiser trained on"]
    other = ("--classifier", tmp_path / "other")
    for run, name in (("d", "a/b"), ("d", "moved"), ("c", "x")):
        join(name, run, *other, code=2)
    assert not (tmp_path / "x").exists()


@pytest.mark.slow
def test_parts_that_saw_private_records_are_not_put_together(public, tmp_path):
    folder = RunFolder(tmp_path / "c")
    train(raw(model=CNN), folder)
    more = with_denoiser(tmp_path / "more", data={"name": "digits", "public": 0.6})
    pretrain(parse_recipe(more, "test"), "test")
    with pytest.raises(UserError, match="public"):
        join_parts(folder, "denoiser", tmp_path / "more", RunFolder(tmp_path / "x"))
    (tmp_path / "more" / PROVENANCE_FILE).unlink()
    with pytest.raises(UserError, match=r"model\.denoiser\.pretraining_data"):
        join_parts(folder, "denoiser", tmp_path / "more", RunFolder(tmp_path / "x"))
    assert not (tmp_path / "x").exists()


def torchvision_recipe(tmp_path: Path, weights: str) -> dict:
    """A pre-training that takes one tiny step from `weights`, on color images."""
    rng = np.random.default_rng(1)
    for split in ("train", "test"):
        pictures = (255 * rng.random((40, 32, 32, 3), dtype=np.float32)).astype(np.uint8)
        write_images(tmp_path / "colors", split, pictures, rng.integers(0, 10, 40))
    return raw(
        data={"name": "colors", "root": str(tmp_path), "public": 0.5},
        model={**DENOISER, "classifier": str(tmp_path / "classifier")},
        method={"name": "transdenoiser", "sigma": 0.25},
        public={
            "model": {"name": "torchvision", "options": {"architecture": "squeezenet1_1"}},
            "training": {"batch_size": 4, "steps": 1, "learning_rate": 1e-9},
            "weights": weights,
        },
        privacy={"noise_multiplier": 1.0, "delta": 1e-2},
        training={"batch_size": 4, "steps": 1, "learning_rate": 0.1},
    )


@pytest.mark.slow
def test_pretraining_begins_with_a_file_of_weights(tmp_path):
    """The body is the published one of a thousand classes, the head of ten a fresh one."""
    torch.manual_seed(2)
    get = import_torchvision("models").get_model
    tensors = get("squeezenet1_1", weights=None, num_classes=1000).state_dict()
    (tmp_path / "weights.safetensors").write_bytes(save_tensors(tensors))
    described = torchvision_recipe(tmp_path, str(tmp_path / "weights.safetensors"))
    folder, _ = pretrain(parse_recipe(described, "test"), "test")
    found = models.load(folder).state_dict()
    head = {"classifier.1.weight", "classifier.1.bias"}
    for name in found.keys() - head:
        torch.testing.assert_close(found[name], tensors[name], rtol=1e-5, atol=1e-6)
    assert all(found[name].shape != tensors[name].shape for name in head)
    job = prepare(parse_recipe(described, "test"), RunFolder(tmp_path / "run"), "test")
    assert "weights.safetensors" in job.folder.pretraining_record.read_text()


def test_gradients_behind_a_frozen_denoiser_equal_autograd_one_by_one(public):
    recipe = parse_recipe(with_denoiser(public / "denoiser"), "test")
    dataset = records_with_canaries(recipe, data_source(recipe))
    model = initial_model(recipe, model_spec(recipe, dataset))
    x, y = dataset.batch(slice(0, 6)), dataset.targets(slice(0, 6))
    engine = GradientEngine(model, cross_entropy, clipping=FlatClipping(0.05))
    found = engine.clipped_sum(x, y, draw_key=bytes(32), record_ids=torch.arange(6)).flat
    trained = [p for p in model.parameters() if p.requires_grad]
    expected = torch.zeros(engine.size)
    for place in range(6):
        loss = cross_entropy(model(x[place : place + 1]), y[place : place + 1]).sum()
        flat = torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, trained)])
        expected += flat * min(1.0, 0.05 / float(flat.norm()))
    assert engine.size == sum(p.numel() for p in model.get_submodule("classifier").parameters())
    assert torch.allclose(found.float(), expected, atol=1e-6)
