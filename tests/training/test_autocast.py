"""A script's passes may run in bfloat16; its card says so, and a run keeps what it began with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from training.own_loops import begin

import dpdist


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.types = nn.Linear(6, 2), set[torch.dtype]()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = self.layer(inputs)
        self.types.add(outputs.dtype)
        return outputs


def _training(folder: Path, autocast: bool) -> dpdist.PrivateTraining:
    torch.manual_seed(0)
    return begin(folder, Net(), loss=nn.CrossEntropyLoss(), steps=2, autocast=autocast)


def test_it_trains_and_is_stated(tmp_path):
    training = _training(tmp_path / "run", True)
    training.model.types.clear()
    training.step()
    assert training.model.types == {torch.bfloat16}
    assert training.model.layer.weight.dtype == torch.float32
    training.close()
    with pytest.raises(dpdist.UserError, match="loss"):
        _training(tmp_path / "run", False).step()
    again = _training(tmp_path / "run", True)
    run = again.run_all()
    assert "bfloat16" in str(run.read_recipe().by_script)
    assert dpdist.load_results(run).guarantee.kind == "proved"
