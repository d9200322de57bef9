"""What audits there are: the recipe's `audit` section, one class for each kind.

A kind is its options and what can be said of it without doing it. What does it is a function of
`dpdist.audits`, listed in its catalogue. A new kind is a class here and a line there.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from dpdist.base.fields import Count, Number, Probability, Section, Text


class AuditOptions(Section):
    """What every kind has. alpha: the error of all `audits` audits of one run together.

    view: what the adversary sees, in words.
    """

    view: ClassVar[str]

    kind: str
    alpha: Probability = 0.05
    audits: Count = Field(default=1, description="so many audits of this run share alpha")
    exploratory: bool = Field(
        default=False, description="an audit beyond those that alpha was divided by: no statement"
    )

    @property
    def folder_name(self) -> str:
        """Where its result goes by default: what tells two audits of one run apart."""
        return self.kind


class MechanismAudit(AuditOptions):
    """The pieces of a training step, driven with canaries: sampling, clipped sum, reduction, noise,
    rounding, division. No record of the run is read.

    releases: with the canary, and as many without. workers: how many add up the sum. seed: of the
    keys.
    """

    view: ClassVar[str] = "single releases"

    kind: Literal["mechanism"] = "mechanism"
    releases: Annotated[int, Number, Field(ge=100, le=10_000_000)] = 20_000
    workers: Annotated[int, Number, Field(ge=1, le=64)] = 2
    seed: Text = "0"


class ManyRunsAudit(AuditOptions):
    """The recipe's training, done anew again and again, with a canary and without; small models.

    trainings: in all, every second with the canary. canary: an input unlike all others (the
    adversary sees the model), or a gradient of the clip's norm on a coordinate of its own (it sees
    every noisy sum). copies: of the canary. seed: 64 hex digits; None draws a secret one.
    """

    view: ClassVar[str] = "models of many trainings"

    kind: Literal["many-runs"] = "many-runs"
    trainings: Annotated[int, Number, Field(ge=8, le=1_000_000)] = 1000
    canary: Literal["input", "gradient"] = "input"
    copies: Annotated[int, Number, Field(ge=1, le=64)] = 1
    seed: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None

    @property
    def seen(self) -> str:
        """What the adversary sees with this canary."""
        return "every noisy sum" if self.canary == "gradient" else "the final model"

    @property
    def folder_name(self) -> str:
        return f"{self.kind}-{self.canary}-{self.copies}"


AnyAudit = MechanismAudit | ManyRunsAudit
"""The recipe's ``audit`` section."""
