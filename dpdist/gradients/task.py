"""What is learned: the losses, the part of the model they train, and what its outputs should be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dpdist.base.tokens import PADDING
from dpdist.gradients.engine import GradientEngine, Objective

# (engine, inputs, labels, draw key, record ids) to targets, row b from record b, key and model.
Targets = Callable[[GradientEngine, Tensor, Tensor, bytes, Tensor], Tensor]


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Per-example cross-entropy: logits (B, classes), labels (B,) to losses (B,).

    Of an example with many targets, logits (B, T, classes) and (B, T), the mean over those that
    there are, which are not below 0; so an example's gradient is the mean of theirs, before it is
    clipped, and what one of them says about it is clipped with all others.
    """
    if targets.dim() == 1:
        return torch.nn.functional.cross_entropy(outputs, targets, reduction="none")
    losses = torch.nn.functional.cross_entropy(
        outputs.transpose(1, 2), targets, reduction="none", ignore_index=PADDING
    )
    return losses.sum(1) / (targets >= 0).sum(1).clamp(min=1)


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """||g(z) - x||_2^2 of each record: (B, ...), (B, ...) to (B,)."""
    return (outputs - targets).square().flatten(1).sum(1)


def the_labels(
    engine: GradientEngine, inputs: Tensor, labels: Tensor, draw_key: bytes, record_ids: Tensor
) -> Tensor:
    """Targets of a classifier."""
    return labels


def the_inputs(
    engine: GradientEngine, inputs: Tensor, labels: Tensor, draw_key: bytes, record_ids: Tensor
) -> Tensor:
    """Targets of a denoiser: the clean inputs."""
    return inputs


@dataclass(frozen=True)
class Task:
    """What is learned: per-example losses (B,) of (outputs, targets).

    part: the submodule that is trained and whose outputs count; None for the whole model. targets:
    what the outputs are compared with; row b depends on record b, the key and the model.
    """

    losses: Objective = cross_entropy
    part: str | None = None
    targets: Targets = the_labels

    def module(self, model: nn.Module) -> nn.Module:
        """The part of `model` to train."""
        return model if self.part is None else model.get_submodule(self.part)
