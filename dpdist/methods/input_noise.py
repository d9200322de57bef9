"""Augmentation by input noise inside each record's clip, with or without a consistency term."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import model_validator

from dpdist.base.fields import Positive, PositiveOrZero
from dpdist.methods.base import DrawCount, Fixed, Method
from dpdist.privacy.plan import StepPlan

if TYPE_CHECKING:
    from dpdist.gradients.perturbations import Draws
    from dpdist.gradients.task import Task


class InputNoise(Method):
    """Each record's gradient averaged over noisy copies of its input before the clip
    (augmentation).

    consistency: weight of the term that lets a record's copies agree (Jeong & Shin, NeurIPS 2020).
    """

    name: Literal["input-noise"] = "input-noise"
    known_as: ClassVar[str] = "DP-SGD on noisy copies of each record"
    sigma: Positive
    draws: DrawCount = 4
    consistency: PositiveOrZero = 0.0

    @model_validator(mode="after")
    def _copies_to_agree(self) -> InputNoise:
        if self.consistency and self.draws < 2:
            raise ValueError("consistency is between a record's copies: give draws >= 2")
        return self

    @property
    def together(self) -> bool:
        return self.consistency > 0

    def task(self) -> Task:
        from dpdist.gradients.consistency import agreed_targets, weighted_cross_entropy
        from dpdist.gradients.task import Task

        if not self.consistency:
            return Task()
        targets = partial(agreed_targets, weight=self.consistency)
        return Task(weighted_cross_entropy, targets=targets)

    def perturbation(self, step: StepPlan, learning_rate: float, fixed: Fixed) -> Draws:
        from dpdist.gradients.perturbations import InputDraws

        return InputDraws(self.draws, self.sigma)
