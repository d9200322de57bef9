"""SGD with momentum and Adam on one flat vector; all of it is post-processing of noisy
gradients."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dpdist.sections.training import TrainingRecipe

_ADAM_BETA1, _ADAM_BETA2, _ADAM_EPSILON = 0.9, 0.999, 1e-8
LEAF = 2**16  # entries: a sharded vector is cut at multiples of it, and updated by as many at once


class FlatOptimizer:
    """Updates parameters (size,) in place from a gradient (size,).

    slots: its state by name, saved with checkpoints. The learning rate of step t is
    learning_rate * schedule(t / steps).
    """

    def __init__(self, training: TrainingRecipe, steps: int, flat: Tensor) -> None:
        self.training, self.steps = training, steps
        names = {"sgd": ["momentum"] if training.momentum else [], "adam": ["mean", "square"]}
        self.slots = {name: torch.zeros_like(flat) for name in names[training.optimizer]}
        if training.ema is not None:
            self.slots["ema"] = flat.clone()

    def learning_rate(self, step: int) -> float:
        """The rate of step 0 <= step < steps."""
        training = self.training
        done = step / self.steps
        factor = {
            "constant": 1.0,
            "linear": 1 - done,
            "cosine": (1 + math.cos(math.pi * done)) / 2,
            "step": training.factor ** sum(done >= passed for passed in training.milestones),
        }
        return training.learning_rate * factor[training.schedule]

    def update(self, flat: Tensor, gradient: Tensor, step: int) -> None:
        """One step; exact: no fused kernels, the same operations on every machine, and leaf by
        leaf, so that a worker that updates some of the leaves gets the bits of one with all.
        gradient: of any precision, rounded to that of `flat`."""
        if gradient.device != flat.device:
            gradient = gradient.to(flat)  # in one transfer
        for start in range(0, len(flat), LEAF):
            leaf = slice(start, start + LEAF)
            slots = {name: slot[leaf] for name, slot in self.slots.items()}
            self._update(flat[leaf], gradient[leaf].to(flat), slots, step)

    def _update(self, flat: Tensor, gradient: Tensor, slots: dict[str, Tensor], step: int) -> None:
        rate = self.learning_rate(step)
        if self.training.weight_decay:
            gradient = gradient.add(flat, alpha=self.training.weight_decay)
        if self.training.optimizer == "adam":
            mean, square = slots["mean"], slots["square"]
            mean.mul_(_ADAM_BETA1).add_(gradient, alpha=1 - _ADAM_BETA1)
            square.mul_(_ADAM_BETA2).addcmul_(gradient, gradient, value=1 - _ADAM_BETA2)
            scale = rate / (1 - _ADAM_BETA1 ** (step + 1))
            root = (square / (1 - _ADAM_BETA2 ** (step + 1))).sqrt_().add_(_ADAM_EPSILON)
            flat.addcdiv_(mean, root, value=-scale)
        elif self.training.momentum:
            momentum = slots["momentum"].mul_(self.training.momentum).add_(gradient)
            flat.add_(momentum, alpha=-rate)
        else:
            flat.add_(gradient, alpha=-rate)
        if "ema" in slots and self.training.ema is not None:
            # Early on the average follows the mean of all steps so far: no bias to the start.
            decay = min(self.training.ema, (step + 1) / (step + 10))
            slots["ema"].lerp_(flat, 1 - decay)

    def result(self, flat: Tensor) -> Tensor:
        """The parameters to publish: the average when there is one."""
        return self.slots.get("ema", flat)
