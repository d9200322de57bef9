"""`--set KEY=VALUE`: as if the recipe said so, wherever a recipe is read."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from dpdist.core.errors import UserError
from dpdist.runs.folder import RunFolder
from dpdist.runs.recipe import load_recipe, parse_changes, resolve_recipe

RECIPE = {
    "data": {"name": "digits"},
    "model": "linear",
    "privacy": {"noise_multiplier": 1.0, "delta": 1e-4},
    "training": {"batch_size": 50, "steps": 5, "learning_rate": 0.1},
    "certify": {"sigma": 0.5},
}


@pytest.fixture
def path(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(RECIPE))
    return path


def changed(path: Path, *given: str) -> dict:
    return resolve_recipe(path, changes=parse_changes(given)).model_dump(mode="json")


def test_a_value_is_written_as_in_a_recipe(path):
    found = changed(
        path, "training.batch_size=512", "training.learning_rate=1e-3", "method.sigma = 0.25",
        "method.name=input-noise", "model.options={width: 4}", "data.labels=[3, 5]",
        "certify=null", "resources.archive=s3://bucket/a=b",
    )  # fmt: skip
    assert found["training"]["batch_size"] == 512
    assert found["training"]["learning_rate"] == 1e-3
    assert (found["method"]["name"], found["method"]["sigma"]) == ("input-noise", 0.25)
    assert found["model"] == {**found["model"], "name": "linear", "options": {"width": 4}}
    assert found["data"]["labels"] == [3, 5] and found["certify"] is None
    assert found["resources"]["archive"] == "s3://bucket/a=b"
    assert changed(path) == load_recipe(path).model_dump(mode="json")


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (["training.batch_size=0"], "small.yaml: training.batch_size: "),
        (["name=a", "name=b"], "--set name: "),
        (["data.labels=!!python/object:x 1"], "--set data.labels: "),
        (["privacy={epsilon: 1, epsilon: 2}"], "'epsilon'"),
    ],
)
def test_it_is_refused_as_a_key_of_the_recipe_is(path, given, named):
    with pytest.raises(UserError) as caught:
        changed(path, *given)
    assert named in str(caught.value)


def test_a_run_s_recipe_is_the_changed_one(path):
    folder = RunFolder(path.parent / "runs" / "small")
    folder.create_or_open(resolve_recipe(path, changes=parse_changes(["training.steps=7"])))
    assert folder.read_recipe().training.steps == 7
    with pytest.raises(UserError, match=r"training\.steps"):
        folder.create_or_open(load_recipe(path))
