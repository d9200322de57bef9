"""The flat optimizer against torch's own, with every option at once."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from dpdist.sections.training import TrainingRecipe
from dpdist.training.optimizer import FlatOptimizer

STEPS = 6


def section(**more: Any) -> TrainingRecipe:
    return TrainingRecipe(batch_size=10, steps=STEPS, learning_rate=0.1, **more)


KINDS = [
    {"optimizer": kind, "weight_decay": decay, **({"momentum": momentum} if momentum else {})}
    for kind, momentum, decay in itertools.product(("sgd", "adam"), (0.0, 0.9), (0.0, 0.3))
    if not (kind == "adam" and momentum)
]


@pytest.mark.slow  # torch's optimizers take seconds to load
@pytest.mark.parametrize("options", KINDS, ids=str)
def test_every_option_is_torch_s(options):
    """Weight decay as L2 regularisation is part of the gradient, of Adam's moments too."""
    generator = torch.Generator().manual_seed(0)
    flat = torch.randn(20, generator=generator, dtype=torch.float64)
    theirs = flat.clone().requires_grad_()
    decay, momentum = options["weight_decay"], options.get("momentum", 0.0)
    other: torch.optim.Optimizer
    if options["optimizer"] == "adam":
        other = torch.optim.Adam([theirs], lr=0.1, weight_decay=decay)
    else:
        other = torch.optim.SGD([theirs], lr=0.1, momentum=momentum, weight_decay=decay)
    own = FlatOptimizer(section(**options), STEPS, flat)
    for step in range(STEPS):
        gradient = torch.randn(20, generator=generator, dtype=torch.float64)
        own.update(flat, gradient, step)
        theirs.grad = gradient.clone()
        other.step()
        torch.testing.assert_close(flat, theirs.detach(), rtol=1e-10, atol=1e-12)
