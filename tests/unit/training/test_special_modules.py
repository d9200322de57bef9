"""Modules and passes of a kind of their own: idle parameters, bfloat16, spectral norms."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.own_loops import WIDTH, begin, ended
from torch import Tensor, nn

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


def test_an_idle_parameter_changes_no_bit_and_is_named_on_the_card(tmp_path):
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


class Typed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.types = nn.Linear(6, 2), set[torch.dtype]()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = self.layer(inputs)
        self.types.add(outputs.dtype)
        return outputs


def _autocast(folder: Path, autocast: bool) -> dpdist.PrivateTraining:
    torch.manual_seed(0)
    return begin(folder, Typed(), loss=nn.CrossEntropyLoss(), steps=2, autocast=autocast)


def test_passes_in_bfloat16_train_and_are_stated(tmp_path):
    training = _autocast(tmp_path / "run", True)
    training.model.types.clear()
    training.step()
    assert training.model.types == {torch.bfloat16}
    assert training.model.layer.weight.dtype == torch.float32
    training.close()
    with pytest.raises(dpdist.UserError, match="loss"):
        _autocast(tmp_path / "run", False).step()
    again = _autocast(tmp_path / "run", True)
    run = again.run_all()
    assert "bfloat16" in str(run.read_recipe().by_script)
    assert dpdist.load_results(run).guarantee.kind == "proved"


def _normed(folder: Path) -> dpdist.PrivateTraining:
    torch.manual_seed(0)
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, 8))
    model = nn.Sequential(layer, nn.Dropout(0.1), nn.Linear(8, 2))
    return begin(folder, model, rate=0.5, steps=4)


def _vectors(training: dpdist.PrivateTraining) -> tuple[torch.Tensor, torch.Tensor]:
    (norm,) = training.model[0].parametrizations.weight
    return norm._u.clone(), norm._v.clone()


@pytest.mark.filterwarnings("ignore:privacy.run_key")
def test_a_spectral_norm_moves_once_a_step_and_resumes_to_the_bit(tmp_path):
    training = _normed(tmp_path / "run")
    _, before = _vectors(training)
    for number in range(4):
        training.step()
        after, v = _vectors(training)
        original = training.model[0].parametrizations.weight.original.detach()
        expected = nn.functional.normalize(original @ before, dim=0)
        assert torch.allclose(after, expected, atol=1e-6)
        before = v
        if number == 1:
            cut = _normed(tmp_path / "cut")
            cut.step()
            cut.step()
            cut.checkpoint()
            cut.close()
    resumed = ended(_normed(tmp_path / "cut"))
    for name, value in training.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name
    assert training.guarantee == resumed.guarantee
    assert "post-processing" not in training.guarantee.kind
