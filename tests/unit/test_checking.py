"""`dpdist.check` lists what a training would refuse, at once, and leaves everything as it is."""

from __future__ import annotations

import copy
from typing import Any

import torch
from support.folder_contents import contents
from torch import Tensor, nn

import dpdist

INPUTS, LABELS = torch.rand(64, 3, 9, 9), torch.arange(64) % 3
SETTINGS: dict[str, Any] = {
    "privacy": {"epsilon": 3.0, "delta": 1e-3}, "batch_size": 8, "steps": 2,
}  # fmt: skip


def _network(*more: nn.Module, classes: int = 3) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), *more, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, classes)
    )


def _centered(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    outputs = module(batch[0])
    return (outputs - outputs.mean(0)).square().sum(1)


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_what_trains_has_no_problem_and_is_left_as_it_was() -> None:
    model = _network(nn.Dropout(0.2))
    model.register_parameter("idle", nn.Parameter(torch.ones(2)))
    optimizer, before = _sgd(model), copy.deepcopy(model.state_dict())
    found = dpdist.check(model, optimizer, (INPUTS, LABELS), **SETTINGS)
    assert found and found.problems == ()
    assert any("idle" in note for note in found.notes) and "idle" in str(found)
    assert model.idle.requires_grad
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert dpdist.check(model, optimizer, (INPUTS, LABELS))  # without settings


def test_a_run_in_the_folder_is_compared_and_left_as_it_was(tmp_path) -> None:
    def found(rate: float, data: Any = (INPUTS, LABELS), **more: Any) -> dpdist.CheckResult:
        model = nn.Sequential(nn.Flatten(), nn.Linear(243, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        return dpdist.check(model, optimizer, data, folder=tmp_path / "own", **SETTINGS | more)

    assert found(0.2) and not any(tmp_path.iterdir())
    model = nn.Sequential(nn.Flatten(), nn.Linear(243, 3))
    training = dpdist.PrivateTraining(
        model, _sgd(model), (INPUTS, LABELS), loss="cross-entropy", folder=tmp_path / "own",
        **SETTINGS,
    )  # fmt: skip
    training.step()
    training.close()
    before = contents(tmp_path)
    assert found(0.1)
    for other, key in (
        (found(0.2), "optimizer.lr"), (found(0.1, steps=3), "steps"),
        (found(0.1, (INPUTS + 0.1, LABELS)), "changed"),
    ):  # fmt: skip
        assert [key in each for each in other.problems] == [True], other
    assert contents(tmp_path) == before


def test_all_problems_are_listed_with_their_cures() -> None:
    model = _network(nn.BatchNorm2d(8), nn.InstanceNorm2d(8, track_running_stats=True))
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    found = dpdist.check(
        model, optimizer, (INPUTS, LABELS), loss=_centered, eval_data=(INPUTS[:4], LABELS[:4]),
        privacy={"epsilon": -1.0, "delta": 1e-3}, batch_size=8, steps=2,
    )  # fmt: skip
    expected = (
        "lacks 1.weight, 1.bias", "BatchNorm2d", "running statistics", "epsilon", "mixes examples",
        "eval_data",
    )  # fmt: skip
    for part in expected:
        assert sum(part in each for each in found.problems) == 1, part
    assert sum("dpdist.prepare(model)" in each for each in found.problems) == 2
    assert not found and len(found.problems) == len(expected)
    ready = dpdist.prepare(model)
    rest = dpdist.check(ready, _sgd(ready), (INPUTS, LABELS), **SETTINGS)
    assert rest, rest
