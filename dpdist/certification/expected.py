"""Mean scores of a model with its own noise over a few fresh draws: how it answers, unbounded."""

from __future__ import annotations

import secrets

import torch
from torch import Tensor, nn

from dpdist.certification.sampling import Randomness
from dpdist.models import softmax_scores
from dpdist.randomness.places import place_of
from dpdist.randomness.units import ESTIMATE, UnitSource


def expected_log_scores(
    model: nn.Module, inputs: Tensor, draws: int, seed: str | None = None, first: int = 0
) -> Tensor:
    """log of the mean softmax over ``draws`` noises, each fresh for every input: (B, classes).

    A draw whose logits are not finite has score 0 in every class; an input of which all are such
    has no scores: NaN.

    The noise of input b is keyed by its name first + b, wherever it stands in a batch. seed: None
    draws a secret one. Raises ValueError for a model without noise of its own.
    """
    place = place_of(model)
    shape = place.normals_shape(model, tuple(inputs.shape[1:]))
    if shape is None:
        raise ValueError("the model has no noise of its own")
    names = range(first, first + len(inputs))
    source = UnitSource("evaluate", seed or secrets.token_hex(16), "", "", "gaussian", 1.0)
    randomness, total = Randomness(source), torch.zeros(())
    with torch.inference_mode():
        for draw in range(draws):
            normals = randomness.normals(names, ESTIMATE, draw, 1, shape).to(inputs.device)
            total = total + softmax_scores(place.logits(model, inputs, normals).double())
        none = total.sum(1, keepdim=True) == 0
        # A class that is never said has a finite log score too: others have no more than a number.
        least = torch.finfo(torch.float64).tiny
        return (total / draws).clamp_min(least).log().masked_fill(none, torch.nan)
