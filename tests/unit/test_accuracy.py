"""A row of logits that is not finite is right about nothing, wherever accuracy is counted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpdist import evaluation, models
from dpdist.evaluation import _evaluate_labels, _evaluate_next_tokens
from dpdist.training.public_training import accuracy


class Records(list[int]):
    """As many records as there are targets; an input is its place."""

    classes, name, input_shape = 3, "records", (1,)

    def __init__(self, targets: Any) -> None:
        super().__init__(range(len(targets)))
        self._targets = torch.tensor(targets)

    def batch(self, rows: slice) -> Tensor:
        return torch.arange(len(self))[rows].float()[:, None]

    def targets(self, rows: slice) -> Tensor:
        return self._targets[rows]


class Says(nn.Module):
    """The logits of each record, by its place."""

    def __init__(self, logits: Any) -> None:
        super().__init__()
        self.logits = torch.tensor(logits)

    def forward(self, x: Tensor) -> Tensor:
        return self.logits[x[:, 0].long()]


NAN, INF = float("nan"), float("inf")
LOGITS = [[NAN, 0.0, 0.0], [1.0, 0.0, 0.0], [INF, 0.0, 0.0], [0.0, NAN, 9.0], [0.0, 0.0, -INF]]


def test_an_input_without_a_class_is_missed() -> None:
    says, records = Says(LOGITS), Records([0, 0, 0, 2, 0])
    found = _evaluate_labels(records, lambda inputs, start: says(inputs))  # type: ignore[arg-type]
    assert found["correct"] == 1 and found["wrong"] == "0 2 3 4"
    assert found["by_class"] == [[4, 1], [0, 0], [1, 0]]
    assert accuracy(says, records) == pytest.approx(0.2)  # type: ignore[arg-type]


def test_nor_is_a_next_token_said_without_numbers() -> None:
    logits, targets = [LOGITS[:3], LOGITS[2:]], [[0, 0, -1], [-1, 2, 0]]
    says, records = Says(logits), Records(targets)
    found = _evaluate_next_tokens(records, lambda inputs, start: says(inputs))  # type: ignore[arg-type]
    assert (found["correct"], found["asked"]) == (1, 4)
    # A target that is not there is -1, and so is what no class is called.
    assert accuracy(says, records) == pytest.approx(0.25)  # type: ignore[arg-type]


def test_each_input_has_its_own_noise_however_inputs_are_batched(monkeypatch) -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Identity()).eval()
    models.attach_noise(model, torch.full((3,), 0.3))
    monkeypatch.setattr(
        evaluation, "load_subject", lambda *_: SimpleNamespace(model=model, digest="")
    )
    of_method = SimpleNamespace(not_releasable_reason=None)
    recipe: Any = SimpleNamespace(method=SimpleNamespace(capabilities=of_method))
    _, answer, _, _ = evaluation._scoring_function(recipe, Any, [0, 1])  # type: ignore[arg-type]
    inputs = torch.zeros(2, 3)
    first, second = answer(inputs, 0)
    assert torch.equal(answer(inputs[1:], 1)[0], second) and not torch.equal(first, second)
