"""A parameter that the loss does not depend on is left out of clip, noise and update."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from training.own_loops import WIDTH, begin

import dpdist


class Net(nn.Module):
    def __init__(self, idle: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.used = nn.Linear(WIDTH, 2)
        if idle:
            self.mask = nn.Parameter(torch.ones(WIDTH))
            self.idle = nn.Linear(3, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.used(inputs)


def started(model: nn.Module, folder: Path) -> dpdist.PrivateTraining:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    return begin(folder, model, optimizer, steps=3)


def test_it_changes_no_bit_of_the_others_and_is_named_on_the_card(tmp_path):
    with pytest.warns(UserWarning, match=r"does not depend on mask, idle\.weight, idle\.bias"):
        training = started(model := Net(idle=True), tmp_path / "idle")
    for _ in training:
        pass
    plain = started(without := Net(idle=False), tmp_path / "plain")
    for _ in plain:
        pass
    assert torch.equal(model.used.weight, without.used.weight)
    assert torch.equal(model.used.bias, without.used.bias)
    assert torch.equal(model.mask, torch.ones(WIDTH))
    notes = dpdist.load_results(training.run.path).privacy_card()["notes"]
    assert any("idle.weight" in note for note in notes)


def test_a_parameter_that_a_later_model_uses_is_trained_and_not_named(tmp_path):
    model = Net(idle=True)
    with pytest.warns(UserWarning):
        started(model, tmp_path / "first").close()
    model.mask.requires_grad_(True)
    model.forward = lambda inputs: model.used(inputs * model.mask)  # type: ignore[method-assign]
    training = started(model, tmp_path / "second")
    training.step()
    assert not torch.equal(model.mask, torch.ones(WIDTH))
    notes = dpdist.load_results(training.finish().path).privacy_card()["notes"]
    assert not any("mask" in note for note in notes) and any("idle.weight" in n for n in notes)


def test_a_module_that_is_given_again_continues_its_run(tmp_path):
    model = Net(idle=True)
    with pytest.warns(UserWarning):
        training = started(model, tmp_path / "run")
    training.step()
    training.checkpoint()
    training.close()
    again = started(model, tmp_path / "run")
    assert again.remaining_steps == 2
    again.run_all()
