"""Scores for rare classes: their values by numpy, and how far one record or person moves a sum."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dpdist
from dpdist import UserError
from dpdist.config.search import ScoreRecipe
from dpdist.data import Dataset
from dpdist.data.protocol import UNITS, UserRecords, Users
from dpdist.training.private_score import RecordValues
from dpdist.tuning.scoring import _record_scores, _total_score

CLASSES, WIDTH, RECORDS, MOST = 3, 4, 30, 5
KEY = b"k" * 32
WEIGHTS = {0: 0.4, 1: 1.0, 2: 5.0}


def minus_error(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    """A score of the user's, of any size; not a number for some records."""
    inputs, labels = batch
    found: torch.Tensor = -100 * (model(inputs)[:, 0] - labels).abs()
    return torch.where(inputs.flatten(1)[:, 0] > 0.95, torch.nan, found)


# By name: the score, and its value of logits (C,) and a class, by numpy, in its own units.
def _softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max())
    return powers / powers.sum()


def _brier(logits: np.ndarray, label: int) -> float:
    return float(((_softmax(logits) - np.eye(CLASSES)[label]) ** 2).sum())


def _log_loss(logits: np.ndarray, label: int) -> float:
    with np.errstate(divide="ignore"):
        return float(min(-np.log(_softmax(logits)[label]), 4.0))


def _balanced(logits: np.ndarray, label: int) -> float:
    return WEIGHTS[label] * float(logits.argmax() == label)


SCORES = {
    "brier": (dpdist.brier_score(), lambda z, y: 1 - _brier(z, y) / 2),
    "log-loss": (dpdist.log_loss_score(4.0), lambda z, y: 1 - _log_loss(z, y) / 4.0),
    "balanced-accuracy": (dpdist.balanced_accuracy(WEIGHTS), lambda z, y: _balanced(z, y) / 5.0),
    "value": (
        dpdist.bounded_score(minus_error, -300.0, 0.0),
        lambda z, y: (max(-100 * abs(z[0] - y), -300.0) + 300.0) / 300.0,
    ),
}


def drawn(seed: int) -> tuple[torch.nn.Module, np.ndarray, np.ndarray]:
    """A sharp model, so that values reach both ends, and records."""
    generator = torch.Generator().manual_seed(seed)
    model = torch.nn.Linear(WIDTH, CLASSES)
    with torch.no_grad():
        model.weight.copy_(20 * torch.randn(CLASSES, WIDTH, generator=generator))
    rng = np.random.default_rng(seed)
    return model, rng.random((RECORDS, WIDTH), np.float32), rng.integers(0, CLASSES, RECORDS)


def total(
    model: torch.nn.Module, value: Any, inputs: np.ndarray, labels: np.ndarray, units: Any = None
) -> float:
    records: Any = dpdist.as_records((torch.tensor(inputs), torch.tensor(labels)))
    if units is not None:
        records = UserRecords(records, Users.from_values(list(units), MOST))
    found = RecordValues(records, value, torch.device("cpu"), {})
    return found.private_units(model, KEY) / UNITS


@pytest.mark.parametrize("name", SCORES)
def test_values_are_those_of_numpy(name):
    value, expected = SCORES[name]
    model, inputs, labels = drawn(0)
    logits = model(torch.tensor(inputs)).detach().double().numpy()
    for row in range(RECORDS):
        one = slice(row, row + 1)
        wanted = expected(logits[row], int(labels[row]))
        if name == "value" and inputs[row, 0] > 0.95:
            wanted = 0.0
        assert total(model, value, inputs[one], labels[one]) == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize("name", SCORES)
def test_one_record_moves_a_sum_by_one_at_most_and_by_nearly_one(name):
    value, moved = SCORES[name][0], []
    for seed in (0, 3):
        model, inputs, labels = drawn(seed)
        whole = total(model, value, inputs, labels)
        rng = np.random.default_rng(seed + 50)
        for row in range(0, RECORDS, 2):
            rest = np.delete(np.arange(RECORDS), row)
            moved.append(whole - total(model, value, inputs[rest], labels[rest]))
            other_inputs, other_labels = inputs.copy(), labels.copy()
            other_inputs[row] = rng.random(WIDTH) * 10.0 ** rng.integers(-1, 4)
            other_labels[row] = rng.integers(0, CLASSES)
            moved.append(whole - total(model, value, other_inputs, other_labels))
    assert 0.95 < max(map(abs, moved)) <= 1


@pytest.mark.parametrize("name", SCORES)
def test_one_person_moves_a_sum_by_one_at_most_whatever_number_of_records(name):
    value, rng = SCORES[name][0], np.random.default_rng(7)
    model, inputs, labels = drawn(0)
    units = rng.integers(0, 6, RECORDS)
    whole, moved = total(model, value, inputs, labels, units), []
    for person in range(6):
        rest = units != person
        moved.append(whole - total(model, value, inputs[rest], labels[rest], units[rest]))
        own = rng.integers(1, 40)  # replaced by another one, with more records or fewer
        others = np.vstack([inputs[rest], rng.random((own, WIDTH), np.float32) * 50])
        wanted = np.concatenate([labels[rest], rng.integers(0, CLASSES, own)])
        persons = np.concatenate([units[rest], np.full(own, person)])
        moved.append(whole - total(model, value, others, wanted, persons))
    assert max(map(abs, moved)) <= 1 + 1e-12 and any(moved)


FUNCTION = "own_scores_of_tests:minus_error"


def section(name: str) -> ScoreRecipe:
    more: dict[str, Any] = {
        "log-loss": {"log_loss_cap": 4.0},
        "balanced-accuracy": {"class_weights": list(WEIGHTS.values())},
        "value": {"value": FUNCTION, "value_range": [-300.0, 0.0]},
    }.get(name, {})
    return ScoreRecipe(objectives={name: 1.0}, **more)


@pytest.fixture
def own_scores(tmp_path, monkeypatch):
    """A module of the user's with `minus_error`."""
    text = Path(__file__).read_text().split("def minus_error", 1)[1].split("\n\n\n", 1)[0]
    head = "from typing import Any\n\nimport torch\n\n\ndef minus_error"
    (tmp_path / "own_scores_of_tests.py").write_text(head + text)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.usefixtures("own_scores")
def test_a_recipe_scores_as_a_search_over_a_function(name, tmp_path):
    """The same sum over the same records; a record and a group move it by one at most."""
    model, inputs, labels = drawn(2)
    wrapped = torch.nn.Sequential(torch.nn.Flatten(), model).eval()
    (tmp_path / "d").mkdir()
    np.save(tmp_path / "d" / "inputs.npy", inputs.reshape(RECORDS, 1, 2, 2))
    np.save(tmp_path / "d" / "labels.npy", labels)
    dataset = Dataset(tmp_path / "d", "made/up", CLASSES, "d")
    settings, value = section(name), SCORES[name][0]
    found = _total_score(wrapped, dataset, settings, None, 1.0, KEY)
    public = _total_score(wrapped, dataset, settings, None, None, KEY)
    assert found == pytest.approx(total(model, value, inputs, labels), abs=1e-4)
    assert public == pytest.approx(found, abs=1e-4)
    units = np.random.default_rng(1).integers(0, 6, RECORDS)
    values = _record_scores(wrapped, dataset, settings, None, 1.0, KEY)
    by_person = Users.from_values(units.tolist(), MOST).sum_of_means(values)
    assert by_person == pytest.approx(total(model, value, inputs, labels, units), abs=1e-4)


REFUSED = [
    ({"objectives": {"log-loss": 1}}, "log_loss_cap"),
    ({"objectives": {"balanced-accuracy": 1}}, "class_weights"),
    ({"objectives": {"balanced-accuracy": 1}, "class_weights": [1, 0]}, "class_weights"),
    ({"objectives": {"value": 1}, "value": "no:where"}, "value_range"),
    ({"objectives": {"value": 1}, "value": "no:where", "value_range": [1, 0]}, "value_range"),
]


@pytest.mark.parametrize(("score", "key"), REFUSED, ids=[f"{s}" for s, _ in REFUSED])
def test_a_score_without_what_bounds_it_is_refused(recipe, score, key):
    with pytest.raises(UserError, match=key):
        recipe(tune={"score": score})


def test_a_model_without_numbers_scores_nothing():
    nothing = torch.full((2, CLASSES), torch.nan)
    for name in ("brier", "log-loss", "balanced-accuracy"):
        assert SCORES[name][0](nothing, torch.tensor([0, 1])).tolist() == [0.0, 0.0]
