"""What a run believes of the weights that it begins with: nothing that contradicts itself, and no
record that they saw or were chosen by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.datasets import write_images

from dpdist import data, models
from dpdist.core.errors import UserError
from dpdist.core.files import write_json
from dpdist.runs.folder import RunFolder
from dpdist.runs.recipe import Recipe, parse_recipe
from dpdist.training.model_setup import initial_model, model_spec
from dpdist.training.provenance import RECORDS_FILE, check_pretrained, write_provenance
from dpdist.training.records import data_source, private_records, records_with_canaries

SEEN, OWN = slice(0, 40), slice(40, 80)


def images(which: slice | np.ndarray) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (80, 4, 4), dtype=np.uint8)[which]


def write(root: Path, name: str, chosen: np.ndarray) -> None:
    """A data set of made-up images."""
    made = np.random.default_rng(9).integers(0, 256, (10, 4, 4), dtype=np.uint8)
    for split, rows in (("train", chosen), ("test", made)):
        write_images(root / name, split, rows)


def recipe(root: Path, name: str, initial: dict[str, Any] | None = None, **section: Any) -> Recipe:
    model: dict[str, Any] = {"name": "linear"}
    return parse_recipe(
        {
            "name": "run",
            "data": {"name": name, "root": str(root), "classes": 3, **section},
            "model": model | ({"initial": initial} if initial else {}),
            "privacy": {"noise_multiplier": 1.0, "delta": 1e-3},
            "training": {"batch_size": 5, "steps": 2, "learning_rate": 0.1},
        },
        "r.yaml",
    )


def records(described: Recipe) -> data.Dataset:
    return private_records(described, data_source(described))


def save(described: Recipe, folder: Path) -> None:
    """The recipe's own network, as weights to begin with."""
    spec = model_spec(described, records(described))
    models.save(initial_model(described, spec), spec, folder)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write(tmp_path, "seen", images(SEEN))
    write(tmp_path, "own", images(OWN))
    return tmp_path


def begun(root: Path, folder: Path, pretraining_data: str | None = None, name: str = "own") -> Any:
    """What a run on `name` finds out of the weights in `folder`."""
    said = {"pretraining_data": pretraining_data} if pretraining_data else {}
    described = recipe(root, name, {"folder": str(folder), **said})
    return check_pretrained(described, records(described), "r.yaml")


# --- a list of records


def test_a_list_of_records_that_lacks_one_is_not_believed(root):
    """Least of all the private one."""
    weights, own = root / "weights", recipe(root, "own")
    write(root, "both", images(slice(0, 41)))  # one of them is private
    save(own, weights)
    both = records(recipe(root, "both"))
    write_provenance(weights, both, {})
    with pytest.raises(UserError, match="1 of the 40 private records"):
        begun(root, weights)
    hidden = np.sort(both.hashes[~np.isin(both.hashes, records(own).hashes)])
    np.save(weights / RECORDS_FILE, hidden)
    with pytest.raises(UserError, match="40 records, not 41"):
        begun(root, weights)
    write_provenance(weights, records(recipe(root, "seen")), {})
    found = begun(root, weights)
    assert found["checked"] and found["assumed"] is None


# --- a privacy card


def card(folder: Path, name: str, **extra: str) -> None:
    stated = {"private": True, "guarantee": {"epsilon": 1.0, "delta": 1e-5}}
    write_json(folder / "privacy_card.json", stated | {"extra": {"training data": name, **extra}})


def test_a_card_speaks_of_the_model_that_it_names(root):
    weights = root / "weights"
    save(recipe(root, "own"), weights)
    card(weights, "other", **{"model hash": "ab" * 8})
    with pytest.raises(UserError, match="not the one of"):
        begun(root, weights)
    card(weights, "other", **{"model hash": models.model_hash(weights)})
    found = begun(root, weights)
    assert not found["checked"] and "among those of other" in found["assumed"]


def test_no_spelling_hides_that_a_card_is_of_the_run_s_own_data(root):
    weights = root / "weights"
    save(recipe(root, "own"), weights)
    card(weights, "OWN", **{"model hash": models.model_hash(weights)})
    with pytest.raises(UserError):
        begun(root, weights)


# --- a run of one's own


def run_on(root: Path, name: str, **section: Any) -> RunFolder:
    """One whose training is not of interest: its recipe, its records' fingerprint, its model."""
    described = recipe(root, name, **section)
    run = RunFolder(root / "runs" / "before")
    run.create_or_open(described)
    trained = records_with_canaries(described, data_source(described))
    write_json(run.data_fingerprint, {"train": trained.fingerprint, "test": ""})
    save(recipe(root, "own"), run.model_folder)
    return run


def test_records_of_an_earlier_run_count_as_compared_only_while_they_are_there(root):
    run = run_on(root, "seen")
    assert begun(root, run.model_folder, "what it saw")["assumed"] is None
    write(root, "seen", images(slice(0, 30)))  # other records at the old place
    assert begun(root, run.model_folder, "what it saw")["assumed"] is not None


def test_records_that_chose_a_model_s_settings_were_seen_by_it(root):
    """Held out of training, and scored on: its search would be of these records too."""
    write(root, "whole", images(slice(0, 80)))
    described = recipe(root, "whole", private_eval_fraction=0.5)
    trained = records_with_canaries(described, data_source(described))
    everything = images(slice(0, 80))
    held_out = ~np.isin(records(described).hashes, trained.hashes)
    assert 10 < held_out.sum() < 70
    run = run_on(root, "whole", private_eval_fraction=0.5)
    write(root, "rest", everything[held_out])
    with pytest.raises(UserError, match="chose its settings"):
        begun(root, run.model_folder, "what it saw", name="rest")
    write(root, "apart", 255 - everything)
    assert begun(root, run.model_folder, "what it saw", name="apart")["assumed"] is None
