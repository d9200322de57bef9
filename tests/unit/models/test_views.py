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

from dpdist import models
from dpdist.certification import job, table
from dpdist.certification.cohen import Cohen
from dpdist.core.errors import UserError
from dpdist.core.fields import list_shifts
from dpdist.evaluation import evaluate_stage, load_model
from dpdist.models import ModelSpec
from dpdist.models.outputs import ViewAverage
from dpdist.randomness.keys import AesWords, StreamKeys
from dpdist.runs.folder import RunFolder
from dpdist.runs.recipe import parse_recipe
from dpdist.training import worker
from dpdist.training.collectives import Reducer
from dpdist.training.job import prepare
from dpdist.training.records import data_source, load_test_records

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


def test_a_mirrored_model_is_the_mean_over_mirror_images_too(tmp_path):
    spec = dataclasses.replace(SPEC, shifts=1, mirrored=True)
    network, x = saved(tmp_path, spec), torch.rand(4, 2, 6, 6)
    assert models.read_spec(tmp_path) == spec
    with torch.no_grad():
        found = models.load(tmp_path)(x).numpy()
    np.testing.assert_allclose(found, averaged(network, x, MOVES[:5], True), atol=1e-5)
    assert np.abs(found - averaged(network, x, MOVES[:5])).max() > 1e-3


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


def test_the_certified_votes_are_those_of_the_average(tmp_path, monkeypatch):
    """Every count again: the unit's stream, the noise from it, the network on each view."""
    run_without_ray(monkeypatch)
    network = saved(tmp_path / "model", dataclasses.replace(SPEC, mirrored=True))
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
                votes = averaged(network, noisy, moves, True).argmax(1)[:draws]
                into += np.bincount(votes, minlength=3)
        assert row["histogram"] == histogram.tolist()
        assert row["histogram"] != alone.tolist()
