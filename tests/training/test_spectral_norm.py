"""A spectral norm's vectors move once a step, by released weights, and are part of a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.training import KEY
from torch import nn

import dpdist

INPUTS = torch.rand(200, 4, generator=torch.Generator().manual_seed(0))
LABELS = (INPUTS[:, 0] > 0.5).long()


def _training(folder: Path) -> dpdist.PrivateTraining:
    torch.manual_seed(0)
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 8))
    model = nn.Sequential(layer, nn.Dropout(0.1), nn.Linear(8, 2))
    return dpdist.PrivateTraining(
        model, torch.optim.SGD(model.parameters(), lr=0.5), (INPUTS, LABELS), loss="cross-entropy",
        privacy=dpdist.Privacy(noise_multiplier=1.0, delta=1e-3, run_key=KEY), batch_size=20,
        steps=4, folder=folder,
    )  # fmt: skip


def _vectors(training: dpdist.PrivateTraining) -> tuple[torch.Tensor, torch.Tensor]:
    (norm,) = training.model[0].parametrizations.weight
    return norm._u.clone(), norm._v.clone()


@pytest.mark.filterwarnings("ignore:privacy.run_key")
def test_it_moves_once_a_step_and_resumes_to_the_bit(tmp_path: Path) -> None:
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
    resumed = _training(tmp_path / "cut")
    resumed.run_all()
    for name, value in training.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name
    assert training.guarantee == resumed.guarantee
    assert "post-processing" not in training.guarantee.kind
