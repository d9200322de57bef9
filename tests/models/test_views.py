"""The average over views: part of the trained model wherever it answers, and of no training."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.special import log_softmax
from support import certificates
from support.local_execution import run_without_ray

import dpdist
from dpdist import models
from dpdist.certification import job, table
from dpdist.certification.cohen import Cohen
from dpdist.core.errors import UserError
from dpdist.core.fields import list_shifts
from dpdist.evaluation import evaluate_stage, load_model
from dpdist.models import ModelSpec
from dpdist.models.outputs import ViewAverage
from dpdist.privacy.card import PRIVACY_CARD
from dpdist.publishing import write_release
from dpdist.randomness.keys import AesWords, StreamKeys
from dpdist.runs.folder import RunFolder
from dpdist.runs.recipe import parse_recipe
from dpdist.training import worker
from dpdist.training.collectives import Reducer
from dpdist.training.job import prepare
from dpdist.training.model_setup import model_spec
from dpdist.training.pretraining import join_parts, pretrain
from dpdist.training.records import data_source, load_test_records, records_with_canaries

SPEC = ModelSpec("small-cnn", (2, 6, 6), 3, {"width": 4}, mean=(0.4,), std=(0.5,), shifts=2)
MOVES = [(0, 0), (1, 0), (-1, 0), (0, 1), (0, -1), (2, 0), (-2, 0), (0, 2), (0, -2)]


def averaged(
    network: torch.nn.Module, x: torch.Tensor, moves: list[tuple[int, int]], mirrored: bool = False
) -> np.ndarray:
    """By the definition, in float64: moved[i, j] = x[i - dy, j - dx], around the edge; mirrored[i,
    j] = moved[i, -1 - j]."""
    height, width = x.shape[2:]
    found = []
    for dy, dx in moves:
        rows = [(i - dy) % height for i in range(height)]
        columns = [(j - dx) % width for j in range(width)]
        for order in (columns, columns[::-1]) if mirrored else (columns,):
            with torch.no_grad():
                logits = network(x[:, :, rows][:, :, :, order]).double().numpy()
            found.append(log_softmax(logits, axis=1))
    return np.mean(found, axis=0)


def saved(folder: Path, spec: ModelSpec = SPEC) -> torch.nn.Module:
    """The network, after it was saved."""
    network = models.initialize(spec, 3)
    models.save(network, spec, folder)
    return network.eval()


def test_a_loaded_model_is_the_mean_log_probability_over_its_moves(tmp_path):
    network, x = saved(tmp_path), torch.rand(4, 2, 6, 6)
    assert list_shifts(0) == MOVES[:1] and sorted(list_shifts(2)) == sorted(MOVES)
    with torch.no_grad():
        found = models.load(tmp_path)(x).numpy()
    np.testing.assert_allclose(found, averaged(network, x, MOVES), atol=1e-5)
    assert np.abs(found - averaged(network, x, MOVES[:5])).max() > 1e-3
    np.testing.assert_allclose(np.exp(averaged(network, x, MOVES[:1])).sum(1), 1)


@pytest.mark.parametrize(("shifts", "moves"), [(0, 1), (1, 5)])
def test_a_mirrored_model_is_the_mean_over_mirror_images_too(tmp_path, shifts, moves):
    spec = dataclasses.replace(SPEC, shifts=shifts, mirrored=True)
    network, x = saved(tmp_path, spec), torch.rand(4, 2, 6, 6)
    assert models.read_spec(tmp_path) == spec
    with torch.no_grad():
        found = models.load(tmp_path)(x).numpy()
        turned = models.load(tmp_path)(x.flip(3)).numpy()
    np.testing.assert_allclose(found, averaged(network, x, MOVES[:moves], True), atol=1e-5)
    assert np.abs(found - averaged(network, x, MOVES[:moves])).max() > 1e-3
    np.testing.assert_allclose(found, turned, atol=1e-5)  # as it cannot tell them apart


def test_the_file_has_the_network_alone(tmp_path):
    """So that the weights begin other trainings, and saving what was loaded changes nothing."""
    network, x = saved(tmp_path / "a"), torch.rand(4, 2, 6, 6)
    models.save(models.load(tmp_path / "a"), models.read_spec(tmp_path / "a"), tmp_path / "b")
    assert models.model_hash(tmp_path / "a") == models.model_hash(tmp_path / "b")
    plain = dataclasses.replace(SPEC, shifts=0)
    saved(tmp_path / "plain", plain)
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("a", "plain")]
    assert files[0] == files[1]
    assert models.model_hash(tmp_path / "a") != models.model_hash(tmp_path / "plain")
    described = json.loads((tmp_path / "plain/model.json").read_text())
    assert not {"shifts", "denoised_shifts", "mirrored", "following"} & set(described)
    again = models.initialize(plain, 7).eval()
    models.load_weights(again, tmp_path / "a")
    with torch.no_grad():
        assert torch.equal(again(x), network(x))
        assert torch.equal(models.load_network(tmp_path / "a")(x), network(x))


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"shifts": 9}, "shifts"),
        ({"shifts": -1}, "shifts"),
        ({"shifts": True}, "shifts"),
        ({"shifts": 1.0}, "shifts"),
        ({"shifts": 6}, r"model\.shifts"),
        ({"input_shape": [72]}, r"model\.shifts"),
        ({"hidden_noise": True}, "shifts"),
        ({"block_noise": {"modules": [], "mode": "additive", "floor": 0.0}}, "shifts"),
        ({"following": True}, "shifts"),
        ({"denoiser": {k: v for k, v in SPEC.to_dict.items() if k != "format"}}, "denoiser"),
        ({"mirrored": 1}, "mirrored"),
        ({"shifts": 0, "mirrored": True, "input_shape": [72]}, r"model\.mirrored"),
        ({"shifts": 0, "mirrored": True, "hidden_noise": True}, "shifts"),
        ({"shifts": 0, "denoised_shifts": True}, "denoised_shifts"),
    ],
)
def test_a_description_that_no_training_leaves_is_refused(tmp_path, change, key):
    saved(tmp_path)
    path = tmp_path / "model.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UserError, match=key):
        models.load(tmp_path)


def test_an_averaged_model_is_not_cut_behind_its_first_layer():
    average = ViewAverage(models.initialize(ModelSpec("mlp", (1, 6, 6), 3), 0), 1).eval()
    with pytest.raises(UserError):
        models.require_split(average)


# ---- a run


def raw(**sections) -> dict:
    return {
        "name": "run",
        "data": {"name": "digits"},
        "model": {"name": "small-cnn", "options": {"width": 4}, "shifts": 1},
        "method": {"name": "input-noise", "sigma": 0.25, "augmentations": 1},
        "privacy": {
            "noise_multiplier": 1.0, "delta": 1e-5, "clip_norm": 1.0, "run_key": "ab" * 32,
        },
        "training": {"batch_size": 40, "steps": 3, "learning_rate": 0.5},
        "certify": {"sigma": 0.25, "n": 100, "n0": 20, "max_inputs": 3, "radii": [0.1]},
        **sections,
    }  # fmt: skip


def train(described: dict, path: Path) -> RunFolder:
    folder = RunFolder(path)
    worker.run_training(
        prepare(parse_recipe(described, "test"), folder, "test"), Reducer(0, 1, torch.device("cpu"))
    )
    return folder


PLAIN = {"name": "small-cnn", "options": {"width": 4}}


@pytest.mark.slow
def test_training_sees_nothing_of_it_and_the_answers_all_of_it(tmp_path):
    mine = train(raw(), tmp_path / "mine")
    plain = train(raw(model=PLAIN), tmp_path / "plain")
    files = [(folder.model_folder / "model.safetensors").read_bytes() for folder in (mine, plain)]
    assert files[0] == files[1]
    recipe = mine.read_recipe()
    evaluate_stage(recipe, mine)
    test = load_test_records(recipe, data_source(recipe))
    x, network = test.batch(slice(0, len(test))), load_model(plain.read_recipe(), plain)
    answers = averaged(network, x, MOVES[:5]).argmax(1)
    with torch.no_grad():
        assert (network(x).argmax(1).numpy() != answers).any()
        assert (load_model(recipe, mine)(x).argmax(1).numpy() == answers).all()
    wrong = json.loads(mine.evaluation.read_text())["wrong"]
    assert [int(i) for i in wrong.split()] == np.flatnonzero(answers != test.labels).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("mirrored", [False, True])
def test_the_certified_votes_are_those_of_the_average(tmp_path, monkeypatch, mirrored):
    """Every count again: the unit's stream, the noise from it, the network on each view."""
    run_without_ray(monkeypatch)
    network = saved(tmp_path / "model", dataclasses.replace(SPEC, mirrored=mirrored))
    settings = Cohen(sigma=0.5, n0=30, n=250, batch=100, seed="5", backend="eager")

    class Images:
        fingerprint, classes, labels = "these", 3, np.arange(3)

        def batch(self, indices):
            return torch.rand(3, 2, 6, 6, generator=torch.Generator().manual_seed(1))[indices]

    certificates.certify(tmp_path / "model", Images(), settings, tmp_path / "out")
    source = StreamKeys(
        "certify", "5", models.model_hash(tmp_path / "model"), "these", "gaussian", 0.5
    )
    for row in table.read(tmp_path / "out" / job.TABLE).to_pylist():
        i, histogram, alone = row["index"], np.zeros(3, int), np.zeros(3, int)
        for block in range(3):
            words = AesWords().fill(source.key(i, "estimate", block), 100 * 72)
            noise = torch.empty(100, 2, 6, 6)
            settings.smoothing_noise.draw(words, noise.numpy().ravel())
            noisy, draws = Images().batch(slice(i, i + 1)) + noise, min(100, 250 - block * 100)
            for moves, into in ((MOVES, histogram), (MOVES[:1], alone)):
                votes = averaged(network, noisy, moves, mirrored).argmax(1)[:draws]
                into += np.bincount(votes, minlength=3)
        assert row["histogram"] == histogram.tolist()
        assert row["histogram"] != alone.tolist()


def test_a_denoiser_before_it_keeps_the_runs_average(tmp_path):
    """`dpdist import --run`: the whole is averaged once, not its classifier inside it again."""
    quick = {"batch_size": 50, "steps": 2, "learning_rate": 0.1}
    autoencoder = {"name": "conv-autoencoder", "options": {"channels": [4]}}
    public = raw(
        data={"name": "digits", "public": 0.4}, model=PLAIN | {"denoiser": str(tmp_path / "d")},
        public={"model": autoencoder, "training": quick, "sigma": 0.25},
    )  # fmt: skip
    pretrain(parse_recipe(public, "test"), "test")
    run = train(raw(data={"name": "digits", "public": 0.4}), tmp_path / "runs/run")
    joined = join_parts(run, "denoiser", tmp_path / "d", RunFolder(tmp_path / "runs/joined"))
    assert models.read_spec(joined.model_folder).shifts == 1
    x = torch.rand(3, 1, 8, 8)
    denoiser, network = models.load(tmp_path / "d"), models.load_network(run.model_folder)

    def whole(x: torch.Tensor) -> torch.Tensor:
        return network(denoiser(x))

    with torch.no_grad():
        found = models.load(joined.model_folder)(x).numpy()
    np.testing.assert_allclose(found, averaged(whole, x, MOVES[:5]), atol=1e-5)


def test_a_frozen_classifier_is_its_network(tmp_path):
    """What is averaged is the whole model, where its own recipe says so."""
    run = train(raw(model=PLAIN | {"shifts": 1, "mirrored": True}), tmp_path / "run")
    behind = {"name": "conv-autoencoder", "options": {"channels": [4]}}
    behind["classifier"] = {"folder": str(run.model_folder), "pretraining_data": "digits"}
    recipe = parse_recipe(raw(model=behind), "test")
    spec = model_spec(recipe, records_with_canaries(recipe, data_source(recipe)))
    assert not spec.averages_views and not spec.classifier.averages_views
    assert models.read_spec(run.model_folder).shifts == 1


@pytest.mark.slow
def test_a_release_answers_by_it_and_says_so(tmp_path):
    run = train(raw(privacy=raw()["privacy"] | {"run_key": None}), tmp_path / "run")
    evaluate_stage(run.read_recipe(), run)
    write_release(run)
    loaded, x = dpdist.load(run.release_folder), torch.rand(5, 1, 8, 8)
    network = models.load_network(run.model_folder)
    with torch.no_grad():
        np.testing.assert_allclose(loaded.model(x), averaged(network, x, MOVES[:5]), atol=1e-5)
    card = json.loads((run.release_folder / PRIVACY_CARD).read_text())
    assert card["extra"]["model"] == "small-cnn, averaged over 5 shifts"
