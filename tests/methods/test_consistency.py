"""The consistency term: against the divergence by autograd, record by record, and its privacy."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dpdist.gradients.clipping import FlatClipping
from dpdist.gradients.engine import GradientEngine
from dpdist.gradients.objective import consistency_targets, weighted_cross_entropy
from dpdist.gradients.perturbations import InputPerturbation
from dpdist.methods.dp_sgd import InputNoiseMethod

KEY, DRAWS, WEIGHT = bytes(range(32)), 3, 4.0


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def batch(count: int = 5) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, 6, generator=generator)
    return inputs, torch.arange(count) % 4, 10 + 3 * torch.arange(count)


def engine(clip_norm: float = 1e6) -> GradientEngine:
    return GradientEngine(
        network(), weighted_cross_entropy, clipping=FlatClipping(clip_norm),
        perturbation=InputPerturbation(DRAWS, 0.5),
    )  # fmt: skip


def clipped_sum(of: GradientEngine, inputs, labels, ids) -> torch.Tensor:
    task = InputNoiseMethod(sigma=0.5, augmentations=DRAWS, consistency=WEIGHT).execution().task()
    targets = task.target_function(of, inputs, labels, KEY, ids)
    return of.clipped_sum(inputs, targets, draw_key=KEY, record_ids=ids).flat.float()


def by_hand(clip_norm: float, weight: float = WEIGHT) -> torch.Tensor:
    """Sum of clipped gradients of mean_k [CE_k + weight KL(mean || p_k)], one record at a time."""
    of, total = engine(), 0.0
    for x, label, record in zip(*batch(), strict=True):
        copies = [
            of.perturbation.perturb_inputs(x[None], record[None], KEY, k) for k in range(DRAWS)
        ]
        logs = [of.model(copy).log_softmax(1)[0] for copy in copies]
        mean = torch.stack([log.exp() for log in logs]).mean(0).detach()
        losses = [-log[label] + weight * (mean * (mean.log() - log)).sum() for log in logs]
        gradients = torch.autograd.grad(sum(losses) / DRAWS, list(of.model.parameters()))
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        total = total + flat * min(1.0, clip_norm / float(flat.norm()))
    return total


@pytest.mark.parametrize("clip_norm", [0.3, 1e6])
def test_gradients_are_those_of_the_divergence(clip_norm):
    ours = clipped_sum(engine(clip_norm), *batch())
    torch.testing.assert_close(ours, by_hand(clip_norm), rtol=1e-4, atol=1e-5)
    # The comparison can fail: without the term, or with another weight, the sum is another.
    for weight in (0.0, 1.5 * WEIGHT):
        assert float((ours - by_hand(clip_norm, weight)).norm()) > 1e-2 * float(ours.norm())


def test_an_empty_batch_has_empty_targets():
    inputs, labels, ids = (part[:0] for part in batch())
    assert consistency_targets(engine(), inputs, labels, KEY, ids, WEIGHT).shape == (0, 4)
