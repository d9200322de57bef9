"""Numbers and labels in place of classes: read, trained on, measured, told; the rest refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.datasets import write_split
from support.training import make, train
from typer.testing import CliRunner

from dpdist.cli.main import app
from dpdist.core.errors import UserError
from dpdist.core.fields import MEASURES
from dpdist.evaluation import evaluate_stage, load_model
from dpdist.publishing import write_release
from dpdist.release.bundle import load as load_release
from dpdist.runs.folder import RunFolder
from dpdist.runs.recipe import Recipe
from dpdist.training.records import data_source, load_test_records, records_with_canaries

KINDS = {"number": ("mse", 2), "labels": ("multi-label-bce", 3)}


def columns(kind: str, count: int, seed: int, rows: int = 90) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 4)).astype(np.float32)
    y = x[:, :count] * 2 + 1 if kind == "number" else (x[:, :count] > 0).astype(float)
    return {"x": x, "y": y[:, 0] if count == 1 else y}


def recipe_of(tmp: Path, kind: str, name: str = "run", **more: Any) -> tuple[Recipe, RunFolder]:
    loss, count = KINDS[kind]
    for split, seed in (("train", 0), ("test", 1)):
        if not (tmp / "data" / "own" / f"{split}.parquet").exists():
            write_split(tmp / "data" / "own", split, **columns(kind, count, seed))
    own = {
        "name": "own", "root": str(tmp / "data"), "targets": kind, "classes": count,
        "columns": {"features": ["x"], "label": "y"},
    } | more.pop("data", {})  # fmt: skip
    settings = {
        "model": {"name": "mlp", "options": {"hidden": [6]}},
        "training__steps": 5, "training__learning_rate": 0.2, "training__loss": loss,
    } | more  # fmt: skip
    return make(tmp / "runs", name, data=own, **settings)


@pytest.fixture(scope="module", params=KINDS)
def finished(request, tmp_path_factory) -> tuple[str, Recipe, RunFolder]:
    recipe, folder = recipe_of(tmp_path_factory.mktemp("kind"), request.param)
    train(recipe, folder)
    evaluate_stage(recipe, folder)
    return request.param, recipe, folder


@pytest.mark.slow
def test_targets_are_read_as_they_are_stored(finished):
    kind, recipe, _ = finished
    records = records_with_canaries(recipe, data_source(recipe))
    stored = columns(kind, KINDS[kind][1], 0)["y"].astype(np.float32)
    found = records.targets(np.array([7, 2]))
    assert found.dtype == torch.float32
    assert torch.equal(found, torch.from_numpy(stored[[7, 2]]))
    assert records.target_kind == kind and records.classes == KINDS[kind][1]


@pytest.mark.slow
def test_the_measures_are_those_of_the_model(finished):
    kind, recipe, folder = finished
    written = json.loads(folder.evaluation.read_text())
    test = load_test_records(recipe, data_source(recipe))
    with torch.no_grad():
        outputs = load_model(recipe, folder)(test.batch(slice(None))).numpy().astype(float)
    y = columns(kind, KINDS[kind][1], 1)["y"]
    if kind == "number":
        wanted = [np.mean((outputs - y) ** 2), np.mean(np.abs(outputs - y))]
    else:
        right = (outputs > 0) == (y > 0)
        wanted = [right.mean(), right.all(1).mean()]
    assert [written["measures"][name] for name in MEASURES[kind]] == pytest.approx(wanted)
    assert written["inputs"] == len(y) and "accuracy" not in written


def test_a_release_is_a_model_and_says_no_class(finished):
    kind, _, folder = finished
    if not folder.release_folder.exists():
        write_release(folder, not_private=True)
    release = load_release(folder.release_folder)
    assert release.description.data.targets == kind and release.description.tested is None
    assert release.model(torch.zeros(2, 4)).shape == (2, KINDS[kind][1])
    page = (folder.release_folder / "README.md").read_text()
    assert ("tabular-regression" in page) == (kind == "number") == ("A classifier" not in page)
    assert ("Classes:" not in page) == (kind == "number")
    written = json.loads(folder.evaluation.read_text())["measures"]
    assert release.description.measured.keys() == written.keys() >= set(MEASURES[kind])
    stated = {row.name: float(re.match(r"[\d.e+-]+", row.value)[0]) for row in release.rows
              if row.name in written}  # fmt: skip
    scale = 100 if kind == "labels" else 1
    assert stated == pytest.approx({name: scale * v for name, v in written.items()}, rel=1e-3)
    assert all(name.capitalize() in page for name in written)
    with pytest.raises(UserError):
        release.certificate_settings(sigma=0.1)


def said(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return done.exit_code, done.output if done.exception is None else str(done.exception)


def test_predict_tells_numbers_and_labels_of_runs_and_releases(finished, tmp_path):
    kind, recipe, folder = finished
    if not folder.release_folder.exists():
        write_release(folder, not_private=True)
    row = np.random.default_rng(3).normal(size=4).astype(np.float32)
    np.save(tmp_path / "row.npy", row)
    with torch.no_grad():
        outputs = load_model(recipe, folder)(torch.from_numpy(row)[None])[0].double().tolist()
    wanted = outputs if kind == "number" else [int(value > 0) for value in outputs]
    for where in (folder.path, folder.release_folder):
        code, line = said("predict", where, tmp_path / "row.npy", "--json")
        answer = json.loads(line.strip().splitlines()[-1])
        assert code == 0 and answer[kind] == pytest.approx(wanted)
        assert answer["outputs"] == pytest.approx(outputs)
    assert said("certify", folder.release_folder)[0] != 0


@pytest.mark.parametrize(
    ("kind", "y"),
    [
        ("number", [[1.0, 2.0], [np.nan, 1.0]]),
        ("number", [[1.0], [1.0, 2.0]]),
        ("number", ["secret", "91370"]),
        ("labels", [[0, 1, 91370], [0, 1, 1]]),
    ],
)
def test_targets_that_do_not_fit_are_refused_without_their_value(tmp_path, kind, y):
    write_split(tmp_path / "data" / "own", x=[[1.0] * 4, [2.0] * 4], y=y)
    recipe, _ = recipe_of(tmp_path, kind)
    with pytest.raises(UserError, match="column 'y'") as caught:
        records_with_canaries(recipe, data_source(recipe))
    assert "91370" not in str(caught.value)
