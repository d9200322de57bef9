"""The recipe's `training` section, and how public images are deformed."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from dpdist.base.conditions import OnlyWith
from dpdist.base.fields import (
    Count,
    Number,
    Part,
    Positive,
    PositiveOrZero,
    Probability,
    Section,
    Seed,
    Steps,
)

CANONICAL_SHARDS = 8  # of `reproducible: true`; the most workers such a run can use


class TrainingRecipe(Section):
    """The loop. batch_size is the expected batch L; the Poisson batch varies around it.

    schedule: what the learning rate is multiplied by; step: by `factor` at each of the milestones,
    which are fractions of all steps. weight_decay: times the parameters is added to the gradient,
    as in torch's SGD and Adam. crop, flip: every draw of a record sees its image moved by up to so
    many pixels in each direction (black comes in at the rim), mirrored with probability 1/2.
    """

    conditions = (
        OnlyWith(("factor",), "with schedule: step", lambda loop: loop.schedule == "step"),
    )

    batch_size: Count
    steps: Steps | None = None
    epochs: Count | None = Field(default=None, description="steps = epochs * records // batch_size")
    optimizer: Literal["sgd", "adam"] = "sgd"
    learning_rate: Positive
    schedule: Literal["constant", "cosine", "linear", "step"] = "constant"
    milestones: list[Probability] = Field(default=[], max_length=100)
    factor: Probability = 0.1
    momentum: Part = 0.0
    weight_decay: PositiveOrZero = Field(
        default=0.0, description="of released parameters: post-processing, free"
    )
    crop: Annotated[int, Number, Field(ge=0, le=64)] = Field(
        default=0, description="pixels; drawn for each record alone, before its clip: free"
    )
    flip: bool = Field(default=False, description="mirror images at random: free, as crop")
    ema: Probability | None = Field(
        default=None, description="average the parameters with this decay (post-processing, free)"
    )
    init_seed: Seed = 0
    reproducible: bool = Field(
        default=False,
        description="bit-identical on any number of workers (canonical shards, slower)",
    )

    @model_validator(mode="after")
    def _consistent(self) -> TrainingRecipe:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("give exactly one of steps and epochs")
        if self.momentum and self.optimizer != "sgd":
            raise ValueError("momentum belongs to optimizer: sgd")
        if (self.schedule == "step") != bool(self.milestones):
            raise ValueError(
                "schedule: step and milestones belong together: the fractions of the training at "
                "which the rate falls, such as [0.5, 0.75]"
            )
        if self.milestones != sorted(set(self.milestones)):
            raise ValueError(f"milestones must ascend, got {self.milestones}")
        return self

    @property
    def augmented(self) -> bool:
        """Whether records are seen changed at random."""
        return self.crop > 0 or self.flip


class AugmentRecipe(Section):
    """How public images are deformed at random; the defaults turn 8 x 8 digits into pen strokes.

    Angles in radians; lengths in half widths of the canvas. scale: width and height of the whole
    image on the canvas, drawn apart. elastic: standard deviation of the displacements on a 5 x 5
    lattice. contrast: grey values become contrast * (value - middle) + 1/2, cut to [0, 1].
    """

    rotate: PositiveOrZero = 0.3
    shear: PositiveOrZero = 0.35
    scale: tuple[Positive, Positive] = (0.6, 0.95)
    shift: PositiveOrZero = 0.15
    elastic: PositiveOrZero = 0.07
    middle: tuple[Probability, Probability] = (0.3, 0.65)
    contrast: tuple[Positive, Positive] | None = (2.0, 5.0)

    @model_validator(mode="after")
    def _ranges(self) -> AugmentRecipe:
        for name in ("scale", "middle", "contrast"):
            pair = getattr(self, name)
            if pair is not None and pair[0] > pair[1]:
                raise ValueError(f"{name}: a range, low to high, got {list(pair)}")
        return self
