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


AnyAudit = MechanismAudit
"""The recipe's ``audit`` section."""
