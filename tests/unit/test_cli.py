"""The command line without Ray: help, calculators, and the one line of every bad input."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from support.recipes import write_recipe

from dpdist import pipeline
from dpdist.core.errors import UserError
from dpdist.runs.folder import RunFolder
from dpdist.runs.recipe import (
    Recipe,
    ScriptedRecipe,
    _anchor_paths,
    load_recipe,
    resolve_recipe,
)


def recipe(tmp_path: Path, **sections) -> Path:
    raw = {
        "name": "small",
        "data": {"name": "digits"},
        "model": "linear",
        "privacy": {"noise_multiplier": 1.0, "delta": 1e-4},
        "training": {"batch_size": 50, "steps": 5, "learning_rate": 0.1},
    }
    return write_recipe(tmp_path, raw, **sections)


def refused(done) -> str:
    """The one line of a user's mistake: exit code 2, no traceback, nothing on standard output."""
    assert done.code == 2 and not done.out and "Traceback" not in done.err, done.err
    (line,) = done.err.strip().splitlines()
    return line


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ("run digits --until nothing", "--until"),
        ("run list.yaml", "list.yaml"),
        ("run nothing-like-it", "nothing-like-it"),
        ("audit digits --kind membership --set color=1", "color"),
        ("report a b --technical-file", "--technical-file"),
        ("run digits --runs s3://bucket/runs", "--runs"),
        ("account --records 10", "account"),
    ],
)
def test_what_a_command_cannot_use_is_named_in_one_line(dpdist, tmp_path, words, key):
    (tmp_path / "list.yaml").write_text("- 1")
    line = refused(dpdist(*words.split()))
    assert key in line and len(list(tmp_path.iterdir())) == 1


def test_recipes_are_listed_and_shown_complete(dpdist):
    listed = dpdist("recipes").out
    assert "digits" in listed and "mnist-dpsgd" in listed
    shown = yaml.safe_load(dpdist("recipes", "digits").out)
    assert shown["training"]["reproducible"] is False


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        ({"color": "blue"}, "color: "),
        ({"privacy": {"noise_multiplier": None, "epsilon": 0}}, "privacy.epsilon: "),
        ({"privacy": {"delta": 0.01}}, "privacy.delta: "),
        ({"training": {"batch_size": 5000}}, "training.batch_size: "),
        ({"data": {"name": "mnist", "root": "/nowhere"}}, "/nowhere"),
        ({"name": "../escape"}, "name: "),
        ({"training": {"batch_size": 1439}, "privacy": {"batch_cap": 1439}}, "privacy.batch_cap: "),
    ],
)
def test_bad_recipes(dpdist, tmp_path, sections, named):
    done = dpdist("run", "--until", "train", recipe(tmp_path, **sections))
    assert named in refused(done)
    assert not list(tmp_path.glob("runs/*/private/*key"))


def test_paths_of_a_recipe_do_not_depend_on_the_directory(tmp_path, monkeypatch):
    """They begin at its file's folder; those of options, and of Python, at the current one."""
    place = tmp_path / "recipes"
    place.mkdir()
    path = recipe(place, data={"name": "mine", "root": "data"}, privacy={"budget": "~/budget"})
    monkeypatch.chdir(tmp_path)
    for given in (path, path.relative_to(tmp_path)):
        found = resolve_recipe(given)
        assert found.data.root == place / "data"
        assert found.privacy.budget == Path.home() / "budget"
        other = resolve_recipe(given, changes={"privacy.budget": "other"}, data_root="mine")
        assert (other.data.root, other.privacy.budget) == (tmp_path / "mine", tmp_path / "other")
    raw = found.model_dump(mode="json") | {"data": {"name": "mine", "root": "data"}}
    assert resolve_recipe(raw).data.root == tmp_path / "data"


def test_every_path_of_a_recipe_begins_at_its_folder(tmp_path):
    """Every section is looked at. A field that takes a path or a name keeps a name as it is."""

    def anchored(raw):
        return _anchor_paths(raw, [Recipe, ScriptedRecipe], tmp_path)

    at = str(tmp_path / "x")
    for raw in (
        {"data": {"root": "x", "text": {"tokenizer": "x"}}},
        {"model": {part: {"folder": "x"} for part in ("initial", "classifier", "denoiser")}},
        {"privacy": {"budget": "x"}, "public": {"weights": "x"}},
        {"tune": {"score": {"public": {"root": "x"}}}},
        {"method": {"name": "secure-sgd", "redistribution": {"root": "x"}}},
    ):
        assert str(anchored(raw)) == str(raw).replace("'x'", repr(at)), raw
    raw = {"public": {"weights": "torchvision"}, "name": "x", "method": "x"}
    assert anchored(raw) == raw


def test_a_budget_both_beside_the_recipe_and_here_is_refused(tmp_path, monkeypatch):
    """The one that was not charged would let a ceiling begin anew, without a word."""
    place = tmp_path / "recipes"
    for folder in (place, tmp_path):
        (folder / "spent").mkdir(parents=True)
    path = recipe(place, privacy={"budget": "spent"})
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"privacy\.budget: "):
        resolve_recipe(path)
    found = resolve_recipe(path, changes={"privacy.budget": str(place / "spent")})
    (tmp_path / "spent").rmdir()
    assert resolve_recipe(path) == found
    (tmp_path / "spent").symlink_to(place / "spent")
    assert resolve_recipe(path) == found


def test_a_budget_that_only_the_current_directory_has_is_refused(tmp_path, monkeypatch):
    """With another budget a ceiling would begin anew, without a word."""
    place = tmp_path / "recipes"
    place.mkdir()
    (tmp_path / "spent").mkdir()
    path = recipe(place, privacy={"budget": "spent"})
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"privacy\.budget: "):
        resolve_recipe(path)
    privacy = {"noise_multiplier": 1.0, "delta": 1e-4}
    assert resolve_recipe(path, changes={"privacy": privacy}).privacy.budget is None
    # As it was begun, so it continues: with the path that is named, or by the option.
    begun = resolve_recipe(path, changes={"privacy.budget": "spent"})
    recipe(place, privacy={"budget": "../spent"})
    assert resolve_recipe(path) == begun and begun.privacy.budget == tmp_path / "spent"


def make_run(tmp_path: Path) -> Path:
    """A run folder that was begun and never trained."""
    folder = RunFolder(tmp_path / "runs" / "small")
    folder.create_or_open(load_recipe(recipe(tmp_path)))
    return folder.path


def test_same_name_with_a_different_recipe(dpdist, tmp_path):
    make_run(tmp_path)
    path = recipe(tmp_path, privacy={"noise_multiplier": 2.0})
    line = refused(dpdist("run", "--until", "train", path))
    assert "privacy.noise_multiplier" in line


def test_a_public_sweep_marks_the_best_trial(dpdist, tmp_path, monkeypatch):
    def result(name, score, error=None):
        return SimpleNamespace(metrics={"trial_id": name, "score": score}, config={}, error=error)

    grid = [result("a", math.nan), result("b", 0.5), result("c", 0.9, "lost"), result("d", 0.2)]
    monkeypatch.setattr(pipeline, "tune_public", lambda *_, **__: grid)
    done = dpdist("tune", str(recipe(tmp_path)), "--public")
    marked = [line.split()[0] for line in done.out.splitlines() if line.endswith("best")]
    assert marked == ["b"]
