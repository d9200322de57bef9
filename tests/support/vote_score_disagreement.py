"""A model with hidden noise whose draws mostly say one class, and whose mean scores say another."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from dpdist import models

VOTE, SCORE = 0, 1  # the class of six draws in ten, narrowly; of the others, surely


def save(folder: Path, size: int) -> None:
    """Of inputs of `size` features; the first one moves the hidden unit a little."""
    spec = models.ModelSpec("mlp", (size,), 2, {"hidden": [1]}, hidden_noise=True)
    model = models.initialize(spec, 0)
    first, last = (module for module in model.modules() if isinstance(module, nn.Linear))
    with torch.no_grad():
        for layer in (first, last):
            layer.weight.zero_()
            layer.bias.zero_()
        first.weight[0, 0], first.bias[0] = 0.02, -0.5 * 0.2533  # below 0 in 60 % of the draws
        last.weight[SCORE, 0], last.bias[VOTE] = 40.0, 0.02
    models.attach_noise(model, torch.tensor([0.5]))
    models.save(model, spec, folder)
