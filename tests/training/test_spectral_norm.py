"""A spectral norm's vectors move once a step, by released weights, and are part of a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from training.own_loops import WIDTH, begin, ended

import dpdist


def _training(folder: Path) -> dpdist.PrivateTraining:
    torch.manual_seed(0)
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, 8))
    model = nn.Sequential(layer, nn.Dropout(0.1), nn.Linear(8, 2))
    return begin(folder, model, rate=0.5, steps=4)


def _vectors(training: dpdist.PrivateTraining) -> tuple[torch.Tensor, torch.Tensor]:
    (norm,) = training.model[0].parametrizations.weight
    return norm._u.clone(), norm._v.clone()


@pytest.mark.filterwarnings("ignore:privacy.run_key")
def test_it_moves_once_a_step_and_resumes_to_the_bit(tmp_path):
    training = _training(tmp_path / "run")
    _, before = _vectors(training)
    for number in range(4):
        training.step()
        after, v = _vectors(training)
        original = training.model[0].parametrizations.weight.original.detach()
        expected = nn.functional.normalize(original @ before, dim=0)
        assert torch.allclose(after, expected, atol=1e-6)
        before = v
        if number == 1:
            cut = _training(tmp_path / "cut")
            cut.step()
            cut.step()
            cut.checkpoint()
            cut.close()
    resumed = ended(_training(tmp_path / "cut"))
    for name, value in training.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name
    assert training.guarantee == resumed.guarantee
    assert "post-processing" not in training.guarantee.kind
