"""Mean scores of a model with hidden noise over a few fresh draws: how it answers, unbounded."""

from __future__ import annotations

import secrets

import torch
from torch import Tensor, nn

from dpdist.certification.noises import Gaussian
from dpdist.models import hidden_noise, require_split
from dpdist.randomness.units import ESTIMATE, RandomWords, UnitSource


def expected_log_scores(
    model: nn.Module, inputs: Tensor, draws: int, seed: str | None = None
) -> Tensor:
    """log of the mean softmax over ``draws`` noises, each fresh for every input: (B, classes).

    seed: None draws a secret one. Raises ValueError for a model without noise of its own.
    """
    noise = hidden_noise(model)
    if noise is None:
        raise ValueError("the model has no noise of its own")
    split = require_split(model)
    source = UnitSource("evaluate", seed or secrets.token_hex(16), "", "", "gaussian", 1.0)
    with torch.inference_mode():
        hidden = split.first(inputs)
        normals = torch.empty_like(hidden)
        words = RandomWords(normals.numel() + normals.numel() % 2)
        total: Tensor | None = None
        for draw in range(draws):
            raw = words.fill(source.key(0, ESTIMATE, draw))
            Gaussian(1.0).draw(raw, normals.numpy().reshape(-1))
            p = torch.softmax(split.rest(hidden + normals * noise.std).double(), 1)
            total = p if total is None else total + p
        assert total is not None
        return (total / draws).log()
