"""Questions to a model are put to public and invented examples: whole runs, and their cards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({}, KNOWN_LAYERS),
        ({"model": f"{HERE}:rows"}, SCREENED),
        ({"model": {"name": f"{HERE}:rows", "vmap": True}}, PER_EXAMPLE),
        ({"method": "functional", "model": "mlp"}, SCREENED),
    ],
)
def test_a_card_says_how_records_are_kept_apart(more, said, tmp_path):
    privacy = {"noise_multiplier": 2.0, "delta": 1e-4}
    recipe, folder = make(tmp_path, privacy=privacy, training__steps=2, **more)
    execute(prepare(recipe, folder, "test"))
    assert [group.independence for group in monitoring.read_groups(folder)] == [said]
    card = load_results(folder).privacy_card()
    alone = "the model and the loss treat each record independently"
    assert (alone in card["assumptions"]) == (said == SCREENED)


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


def test_a_measured_move_is_never_rounded_down():
    for moves in (1.23e-7, 9.99e-8, 2.0**-20, 0.0):
        shown = float(describe_rounding("standard", None, "float32", moves).split("most ")[-1][:-3])
        assert moves <= shown <= 1.1 * moves
