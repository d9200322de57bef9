"""The recipe: its paths, and its steps."""

import math
from fractions import Fraction
from pathlib import Path

import pytest

from dpdist.core.errors import UserError
from dpdist.runs.recipe import Recipe, load_recipe, parse_recipe, step_count

RECIPE = {
    "name": "paths",
    "data": {"name": "digits", "root": "data"},
    "model": {"name": "mlp", "denoiser": "denoiser"},
    "method": {"name": "dp-sgd"},
    "privacy": {"epsilon": 3.0, "delta": 1e-5, "budget": "budgets"},
    "training": {"batch_size": 32, "steps": 10, "learning_rate": 0.1},
    "public": {
        "model": {"name": "mlp", "initial": "initial"},
        "training": {"batch_size": 32, "steps": 10, "learning_rate": 0.1},
        "sigma": 0.1,
        "data": {"name": "mnist", "root": "elsewhere"},
        "weights": "weights.safetensors",
    },
    "tune": {
        "space": {"training.learning_rate": {"uniform": [0.1, 0.2]}},
        "num_trials": {"name": "geometric", "mean": 3},
        "score": {"public": {"name": "mnist", "root": "~/public"}},
    },
}


def paths(section) -> list[Path]:
    """All paths in a section and the sections in it."""
    if isinstance(section, Path):
        return [section]
    fields = dict(section).values() if hasattr(section, "model_fields") else []
    return [path for inner in fields for path in paths(inner)]


def test_every_path_is_absolute_once_read(tmp_path, monkeypatch):
    """A run is continued, and a trial of a search trained, from any directory and on any host."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    recipe = parse_recipe(RECIPE, "test")
    found = paths(recipe)
    assert len(found) == 7
    for path in found:
        assert path.is_relative_to(tmp_path), path
    assert recipe.tune.score.public.root == tmp_path / "home" / "public"

    (tmp_path / "recipe.yaml").write_text(recipe.to_yaml())
    other = tmp_path / "other"
    other.mkdir()
    monkeypatch.chdir(other)
    assert load_recipe(tmp_path / "recipe.yaml") == recipe
    assert Recipe.model_validate(RECIPE) != recipe  # read there, they lie there


def test_classes_have_names_and_numbers():
    def data(**more):
        return parse_recipe(
            {**RECIPE, "data": {"name": "mine", "root": "data", **more}}, "test"
        ).data

    assert data(names=["a", "b", "c"]).classes == 3
    assert data(names=["a", "b", "c"], labels=[2, 0]).class_names == ["c", "a"]
    assert data(classes=2).class_names == ["0", "1"]
    assert data(columns={"features": "mean_*"}).columns.features == ["mean_*"]
    for names, classes in ((["a", "b"], 3), (["a", "a"], 2)):
        with pytest.raises(UserError, match=r"data\.names"):
            data(names=names, classes=classes)


def test_a_network_of_torchvision_has_one_name_in_recipes_and_commands():
    """The same section, and so the same run, as the zoo's network with that architecture."""
    one = RECIPE | {"public": None, "tune": None}
    long = {"name": "torchvision", "options": {"architecture": "vgg11"}}
    recipes = [
        parse_recipe(one | {"model": model}, "r.yaml") for model in ("torchvision:vgg11", long)
    ]
    assert recipes[0].model == recipes[1].model


def test_epochs_make_a_whole_number_of_steps():
    """Counted in whole numbers: `int(1 / rate)` has one step too few for 153 of n below 3,000."""
    one = RECIPE | {"public": None, "tune": None, "model": "mlp"}
    lost = [n for n in range(1, 3000) if int(1 / (1 / n)) != n]
    assert len(lost) == 153
    for records, batch, epochs in [*((n, 1, 1) for n in lost), (60_000, 256, 15), (10, 3, 7)]:
        length = {"batch_size": batch, "epochs": epochs, "learning_rate": 0.1}
        recipe = parse_recipe(one | {"training": length}, "r.yaml")
        assert step_count(recipe, records) == math.floor(Fraction(epochs * records, batch))
