"""Questions to a model are put to public and invented examples: whole runs, and their cards."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.datasets import write_split
from support.local_execution import command, run_without_ray
from support.recipes import write_recipe
from support.training import execute, make, prepare, train
from torch import Tensor, nn

from dpdist import data
from dpdist.core.errors import UserError
from dpdist.core.fields import KNOWN_LAYERS, PER_EXAMPLE, SCREENED, describe_rounding
from dpdist.gradients.engine import GradientEngine
from dpdist.reports.results import load_results
from dpdist.training import monitoring
from dpdist.training.model_setup import public_examples
from dpdist.training.records import data_source

HERE = __name__
WIDTH, CLASSES = 64, 3


# ---- two data sets that differ in one record


def written(root: Path, first: np.ndarray | None) -> Path:
    """A data set of features under `root`; first: in place of its first training record."""
    generator = np.random.default_rng(0)
    for split, count in (("train", 40), ("test", 30)):
        rows = generator.random((count, WIDTH), dtype=np.float32)
        if split == "train" and first is not None:
            rows[0] = first
        write_split(root / "made", split, features=rows, label=np.arange(count) % CLASSES)
    return root


def recipe_of(root: Path, **more: Any) -> dict[str, Any]:
    return {
        "name": "run",
        "data": {"name": "made", "root": str(root), "classes": CLASSES,
                 "columns": {"features": ["features"]}},
        "model": "linear",
        "privacy": {"noise_multiplier": 1.0, "delta": 1e-4},
        "training": {"batch_size": 40, "steps": 11, "learning_rate": 0.1},
        "resources": {"workers": 1, "cpus_per_worker": 1},
        **more,
    }  # fmt: skip


PRIVATE_PREDICTION = {
    "method": {"name": "private-prediction", "teachers": 1, "logit_bound": 1.0, "queries": 5},
}


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, PRIVATE_PREDICTION], ids=["dp-sgd", "private-prediction"])
def test_one_record_does_not_stop_a_command(more, tmp_path, monkeypatch, capsys):
    """It takes part in every step, so every look at the records would find that it overflows."""
    run_without_ray(monkeypatch)
    left = []
    for name, first in (("one", None), ("other", np.full(WIDTH, 3e38))):
        root = written(tmp_path / name, first)
        write_recipe(root, recipe_of(root, **more))
        done = command(monkeypatch, capsys, root, "run", "--until", "train", "r.yaml")
        assert done.code == 0, done.err
        run = root / "runs" / "run"
        left.append(sorted(str(path.relative_to(run)) for path in run.rglob("*")))
    assert left[0] == left[1]


def test_the_looks_of_a_run_read_no_record(tmp_path, monkeypatch):
    """Records are read from the first sum on; screen and micro-batch are done by then."""
    seen: list[bool] = []
    real = GradientEngine.clipped_sum

    def watched(self: GradientEngine, *args: Any, **options: Any) -> Any:
        seen.append(self._checked and self.micro_batch is not None)
        return real(self, *args, **options)

    monkeypatch.setattr(GradientEngine, "clipped_sum", watched)
    train(*make(tmp_path, training__steps=2))
    assert seen == [True, True]


# ---- the examples


def test_examples_are_public_and_in_range():
    recipe, _ = make(Path("unused"))
    source = data_source(recipe)
    test = data.load(source, "test")
    inputs, labels = public_examples(source, 33)
    assert inputs.shape == (33, 1, 8, 8) and labels.shape == (33,)
    assert torch.equal(inputs[:17], test.batch(slice(0, 17)))
    assert torch.equal(labels[:17], test.targets(slice(0, 17)))
    own = inputs[17:25]  # each number is a test record's, at the same place
    assert all(
        bool((own[:, 0, i, j, None] == test.batch(slice(0, 17))[None, :, 0, i, j]).any(1).all())
        for i in range(8)
        for j in range(8)
    )
    assert inputs[25:].min() >= 3 and not torch.equal(own[0], inputs[0])
    again = public_examples(source, 33)
    assert torch.equal(inputs, again[0]) and torch.equal(labels, again[1])
    assert len(public_examples(source, 4)[0]) == 4


@pytest.mark.parametrize("following", [False, True])
def test_examples_of_texts_are_tokens(following, tmp_path):
    for split in ("train", "test"):
        texts = ["abc", "de", "fghij"] * 4
        write_split(tmp_path / "texts", split, text=texts, label=[0, 1, 0] * 4)
    text = data.TextColumn("text", 9, predicts_next_token=following)
    columns = data.Columns(text=text)
    source = data.DataSource(
        "texts", text.vocabulary_size if following else 2, tmp_path, columns=columns
    )  # fmt: skip
    inputs, labels = public_examples(source, 33)
    invented = inputs[12:]
    assert len(inputs) == 33 and bool((invented == invented.round()).all())
    assert float(invented.min()) >= 0 and float(invented.max()) < text.vocabulary_size
    assert len(set(invented.flatten().tolist())) > 100
    if following:
        assert torch.equal(labels[:, :-1].float(), inputs[:, 1:])
    else:
        assert set(labels.tolist()) == {0, 1}


# ---- what a card says


class Rows(nn.Module):
    """Takes the batch apart into its records, which no list of operations can follow."""

    def __init__(self, classes: int, mixes: bool) -> None:
        super().__init__()
        self.layer, self.mixes = nn.Linear(64, classes), mixes

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.stack([row.flatten() for row in x])
        return self.layer(rows - rows.detach().mean(0) if self.mixes else rows)


def rows(shape: tuple[int, ...], classes: int, mixes: bool = False) -> nn.Module:
    return Rows(classes, mixes)


def test_a_model_that_mixes_is_refused_before_anything_is_written(tmp_path):
    model = {"name": f"{HERE}:rows", "options": {"mixes": True}}
    recipe, folder = make(tmp_path, model=model)
    with pytest.raises(UserError, match="mixes examples"):
        prepare(recipe, folder, "test")
    assert list(tmp_path.iterdir()) == []


SAID = {
    "of the zoo": ({}, KNOWN_LAYERS),
    "own": ({"model": f"{HERE}:rows"}, SCREENED),
    "own, isolated": ({"model": {"name": f"{HERE}:rows", "vmap": True}}, PER_EXAMPLE),
    "dplis": ({"method": "dplis"}, KNOWN_LAYERS),
    "dplis, by record": ({"method": {"name": "dplis", "per_example": True}}, PER_EXAMPLE),
    "stobatch": ({"method": {"name": "stobatch", "steps": 1}}, KNOWN_LAYERS),
    "functional": ({"method": "functional", "model": "mlp"}, SCREENED),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SAID)
def test_a_card_says_how_records_are_kept_apart(name, tmp_path):
    more, said = SAID[name]
    privacy = {"noise_multiplier": 2.0, "delta": 1e-4}
    recipe, folder = make(tmp_path, privacy=privacy, training__steps=2, **more)
    execute(prepare(recipe, folder, "test"), 2 if name == "of the zoo" else 1)
    assert [group.independence for group in monitoring.read_groups(folder)] == [said]
    card = load_results(folder).privacy_card()
    (note,) = [note for note in card["notes"] if "independence" in note]
    assert note.startswith(f"Record independence of the model: {said} (")
    alone = "the model and the loss treat each record independently"
    assumed = [line for line in card["assumptions"] if line == alone]
    assert len(assumed) == (said == SCREENED)
    assert any("Custom model" in note for note in card["notes"]) == ("own" in name)


@pytest.mark.slow
def test_of_several_starts_the_least_sure_one_counts(tmp_path, monkeypatch):
    recipe, folder = make(tmp_path)
    job = prepare(recipe, folder, "test")
    execute(job, until=4)
    with monkeypatch.context() as other:  # as if other code had taken some steps
        other.setattr(GradientEngine, "independence", SCREENED)
        execute(job, until=6)
    execute(job)
    found = [group.independence for group in monitoring.read_groups(folder)]
    assert found == [KNOWN_LAYERS, SCREENED, KNOWN_LAYERS]
    assert json.loads(folder.training_summary.read_text())["independence"] == SCREENED
    assert load_results(folder).record_independence == SCREENED


@pytest.mark.slow
def test_a_run_that_does_not_say_is_assumed(tmp_path: Path) -> None:
    recipe, folder = make(tmp_path, training__steps=2)
    train(recipe, folder)
    trained = json.loads(folder.training_summary.read_text())
    trained.pop("independence", None)
    folder.training_summary.write_text(json.dumps(trained))
    assert load_results(folder).record_independence == SCREENED


def test_the_driver_screens_and_its_workers_do_not(tmp_path, monkeypatch):
    """Unless their model is another one than the driver's."""
    screened = []
    real = GradientEngine.validate
    monkeypatch.setattr(
        GradientEngine, "validate",
        lambda self, *examples: (screened.append(self), real(self, *examples))[1],
    )  # fmt: skip
    recipe, folder = make(tmp_path, training__steps=2)
    job = prepare(recipe, folder, "test")
    assert len(screened) == 1
    execute(job, 2)
    assert len(screened) == 1
    recipe, folder = make(tmp_path, "other", training__steps=2)
    execute(dataclasses.replace(prepare(recipe, folder, "test"), screened="another"), 2)
    assert len(screened) == 4


def test_a_measured_move_is_never_rounded_down():
    for moves in (1.23e-7, 9.99e-8, 2.0**-20, 0.0):
        shown = float(describe_rounding("standard", None, "float32", moves).split("most ")[-1][:-3])
        assert moves <= shown <= 1.1 * moves
    for moves, precision, covered in (
        (2.0**-21, "float32", True), (2.0**-19, "float32", False), (2.0**-30, "float64", False),
    ):  # fmt: skip
        note = describe_rounding("standard", None, precision, moves)
        assert ("does not cover" not in note) == covered
