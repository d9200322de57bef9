"""What of public features matters, judged by public records: the scales of method functional."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from dpdist import models
from dpdist.base.errors import UserError
from dpdist.methods.base import Setup
from dpdist.methods.functional_sums import Sums
from dpdist.methods.hgm_shares import resized, shares

if TYPE_CHECKING:
    from dpdist.methods.functional import Functional, Relevance

_EXAMPLES = 32
_PASS = 128


def scales_of(method: Functional, asked: Relevance, setup: Setup) -> Tensor:
    """float64 (D,), whose squares have mean 1: a function of public records and initial weights."""
    records = setup.public
    assert records is not None
    count = min(asked.max_records, len(records))
    rows = np.linspace(0, len(records) - 1, count).astype(np.int64)
    try:
        inputs = resized(records.batch(rows), setup.spec.input_shape)
    except ValueError as error:
        raise UserError(f"method.relevance.data: {records.name}: {error}") from error
    labels = records.targets(rows)
    if records.classes == setup.spec.classes:
        model = setup.initial()
    else:
        other = dataclasses.replace(setup.spec, classes=records.classes)
        model = models.initialise(other, setup.recipe.training.init_seed)
    plain = method.model_copy(update={"adversarial": None, "relevance": None})
    sums = Sums(plain, model, inputs[:_EXAMPLES], count)
    features = torch.cat([sums.features(some) for some in inputs.split(_PASS)])
    passes = [(features, labels, 1.0)]
    nowhere = features.new_zeros(features.shape[1])
    centre = sums.centre(sums.of_features(passes, nowhere))
    weights, _ = sums.fitted(sums.of_coefficients(passes, centre), 1.0)  # a little ridge
    weight, bias = sums.head(weights, centre)
    own = features * method.clip
    left = (own @ weight.T + bias).softmax(1) - nn.functional.one_hot(labels, len(bias))
    matters = (own * (left @ weight)).abs().pow(asked.beta).mean(0)
    return shares(matters, asked.floor).sqrt()
