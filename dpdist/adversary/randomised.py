"""The attacked classifier: a network, and the place where it is random at inference.

A randomised classifier answers with the class that most draws of its noise say, or with that of
the largest mean score. Attacks differentiate it by expectation over the noise (EOT, Athalye et al.,
ICML 2018): the gradient is the mean of the gradients under independent draws.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dpdist.adversary.balls import per_row
from dpdist.models import NO_CLASS, predicted_classes, softmax_scores
from dpdist.randomness.places import Nowhere, Place


class RandomisedClassifier:
    """Logits of a network under given standard normal draws; without noise it is deterministic.

    votes: whether it answers by votes of draws, or by their mean scores; None: as the place does.
    """

    def __init__(
        self, model: nn.Module, place: Place | None = None, votes: bool | None = None
    ) -> None:
        self.model = model
        self.place = place or Nowhere()
        self.votes = self.place.votes if votes is None else votes

    def noise_shape(self, input_shape: Sequence[int]) -> tuple[int, ...] | None:
        """Shape of the normals of one draw for one example; None when nothing is random."""
        return self.place.normals_shape(self.model, tuple(input_shape))

    def logits(self, x: Tensor, normals: Tensor | None) -> Tensor:
        """(B, classes) for float32 inputs (B, ...) and normals (B, *noise_shape), or none."""
        return self.place.logits(self.model, x, normals)


def loss_gradient(
    classifier: RandomisedClassifier, x: Tensor, targets: Tensor, normals: Tensor | None
) -> Tensor:
    """Gradient by x of the mean cross-entropy over the draws, up to a positive factor per input.

    x: float32 (B, ...). targets: int64 (B,). normals: (B * K, *noise_shape), the K draws of an
    input beside one another, or None. Returns float32 (B, ...).

    The factor keeps the gradient of a confident network from underflowing to zero, which would
    look like robustness. No attack here depends on it. An input whose gradient is not finite gets
    the gradient 0: no direction is known there.
    """
    draws = 1 if normals is None else len(normals) // len(x)
    with torch.enable_grad():
        inputs = x.detach().clone().requires_grad_(True)
        logits = classifier.logits(inputs.repeat_interleave(draws, 0), normals)
        back = _logit_gradient(logits.detach(), targets.repeat_interleave(draws))
        largest = back.abs().view(len(x), -1).amax(1).clamp_min(1e-300).repeat_interleave(draws)
        (gradient,) = torch.autograd.grad(logits, inputs, (back / largest[:, None]).float())
    finite = gradient.isfinite().flatten(1).all(1)
    return gradient.masked_fill(~per_row(finite, gradient), 0.0)


def _logit_gradient(logits: Tensor, targets: Tensor) -> Tensor:
    """softmax - onehot in float64; the target's entry is minus the sum of the others, so that it
    does not round to zero when the target has nearly all the probability."""
    p = torch.log_softmax(logits.double(), 1).exp()
    p.scatter_(1, targets[:, None], 0.0)
    return p.scatter(1, targets[:, None], -p.sum(1, keepdim=True))


def success_score(
    classifier: RandomisedClassifier, x: Tensor, targets: Tensor, normals: Tensor | None
) -> Tensor:
    """Return how well x fools the classifier, for choosing between restarts: float64 (B,).

    Of votes: the number of draws not answered by the target, plus loss / (1 + loss) of the mean
    loss. Of mean scores: by how much the target's is below the largest other one. A draw whose
    logits are not finite is no answer, and adds nothing.
    """
    draws = 1 if normals is None else len(normals) // len(x)
    repeated = targets.repeat_interleave(draws)
    with torch.inference_mode():
        logits = classifier.logits(x.repeat_interleave(draws, 0), normals).double()
        found = predicted_classes(logits)
        if not classifier.votes:
            scores = softmax_scores(logits).view(len(x), draws, -1).mean(1)
            own = scores.gather(1, targets[:, None])[:, 0]
            return scores.scatter(1, targets[:, None], -1.0).amax(1) - own
        loss = nn.functional.cross_entropy(logits, repeated, reduction="none")
        loss = loss.masked_fill(found == NO_CLASS, 0.0)
        wrong = ((found != repeated) & (found != NO_CLASS)).double()
    loss = loss.view(len(x), draws).mean(1)
    return wrong.view(len(x), draws).sum(1) + loss / (1 + loss)
