"""What of public features matters, judged by public records: the scales of method functional."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from dpdist.methods.base import Setup
from dpdist.methods.functional_sums import Sums
from dpdist.methods.hgm_shares import shares, without_privacy

if TYPE_CHECKING:
    from dpdist.methods.functional import Functional, Relevance

_EXAMPLES = 32
_PASS = 128


def scales_of(method: Functional, asked: Relevance, setup: Setup) -> Tensor:
    """float64 (D,), whose squares have mean 1: a function of public records and initial weights."""
    records = setup.public
    assert records is not None
    field = "method.relevance.data"
    model, inputs, labels = without_privacy(records, asked.max_records, setup, field)
    plain = method.model_copy(update={"adversarial": None, "relevance": None})
    sums = Sums(plain, model, inputs[:_EXAMPLES], len(inputs))
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
