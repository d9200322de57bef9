"""What audits there are: the recipe's `audit` section, one class for each kind.

A kind is its options and what can be said of it without doing it. What does it is a function of
`dpdist.audits`, listed in its catalogue. A new kind is a class here and a line there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from dpdist.base.fields import Count, HexKey, Number, Probability, Section, Text

if TYPE_CHECKING:
    from dpdist.sections.recipe import Sections

_EVERY_SUM = "every noisy sum, knowing the records and which of them joined each step"


class AuditOptions(Section):
    """What every kind has. alpha: the error of all `audits` audits of one run together."""

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

    @property
    def sees(self) -> str:
        """What the adversary sees, in words."""
        raise NotImplementedError

    @property
    def private(self) -> bool:
        """Whether its result says more of the records than a run's guarantee covers: it then lies
        where no report, card, release, fetch or archive without private state looks."""
        return False

    @property
    def planted(self) -> CanaryAudit | None:
        """What a training with this section has behind its records, if anything."""
        return None

    def check(self, recipe: Sections) -> None:
        """Raise ValueError for a recipe that could not be audited in this way."""


class MechanismAudit(AuditOptions):
    """The pieces of a training step, driven with canaries: sampling, clipped sum, reduction, noise,
    rounding, division. No record of the run is read.

    releases: with the canary, and as many without. workers: how many add up the sum. seed: of the
    keys.
    """

    kind: Literal["mechanism"] = "mechanism"
    releases: Annotated[int, Number, Field(ge=100, le=10_000_000)] = 20_000
    workers: Annotated[int, Number, Field(ge=1, le=64)] = 2
    seed: Text = "0"

    @property
    def sees(self) -> str:
        return "single releases"


class ManyRunsAudit(AuditOptions):
    """The recipe's training, done anew again and again, with a canary and without; small models.
    Its counts are made of so many models of the private records, and stay private as they do.

    trainings: in all, every second with the canary. canary: an input unlike all others (the
    adversary sees the model), or a gradient of the clip's norm along one coordinate (it sees every
    noisy sum, and knows the records and which of them joined each step). copies: of the canary.
    seed: 64 hex digits; None draws a secret one.
    """

    kind: Literal["many-runs"] = "many-runs"
    trainings: Annotated[int, Number, Field(ge=8, le=1_000_000)] = 1000
    canary: Literal["input", "gradient"] = "input"
    copies: Annotated[int, Number, Field(ge=1, le=64)] = 1
    seed: HexKey | None = None

    @property
    def every_step(self) -> bool:
        """Whether the adversary sees every step, and the plan says what scores to expect."""
        return self.canary == "gradient"

    @property
    def sees(self) -> str:
        return _EVERY_SUM if self.every_step else "the final model"

    @property
    def private(self) -> bool:
        return True

    @property
    def folder_name(self) -> str:
        return f"{self.kind}-{self.canary}-{self.copies}"


class CanaryAudit(AuditOptions):
    """One training with canaries behind its records, each in or out by its own secret coin; the
    adversary guesses coins. The trained model is never released.

    canary: gradient (white box: as much as the clip lets through, on a coordinate of its own),
    mislabelled (a public input under a wrong label), blank (a constant input) or pair (a random
    input under label 0 or label 1: its coin replaces one record by another). view: every-step, all
    noisy sums, by an adversary who knows the records and which of them joined each step (of
    gradient canaries only); or final, the trained model. guesses: how many coins are guessed, half
    of them as in (default: 8 % of the canaries). All is fixed before the training.
    """

    kind: Literal["canaries"] = "canaries"
    canaries: Annotated[int, Number, Field(ge=20, le=1_000_000)] = 1000
    canary: Literal["gradient", "mislabelled", "blank", "pair"] = "gradient"
    view: Literal["every-step", "final"] | None = None
    guesses: Annotated[int, Number, Field(ge=2)] | None = None

    @model_validator(mode="after")
    def _fits(self) -> CanaryAudit:
        if self.guessed > self.canaries:
            raise ValueError(f"guesses must be <= canaries, the {self.canaries} that there are")
        if self.view == "every-step" and not self.in_sums:
            raise ValueError("view: every-step belongs to canary: gradient")
        return self

    @property
    def guessed(self) -> int:
        """How many coins are guessed: an even number."""
        return 2 * round(0.04 * self.canaries) if self.guesses is None else self.guesses // 2 * 2

    @property
    def in_sums(self) -> bool:
        """Whether they are gradients in the clipped sums, and not records."""
        return self.canary == "gradient"

    @property
    def replaces(self) -> bool:
        """Whether, under replace-one, a coin replaces a record, or its gradient, by another."""
        return self.in_sums or self.canary == "pair"

    @property
    def every_step(self) -> bool:
        """Whether the adversary sees every step: of canaries in the sums, unless told otherwise."""
        return self.in_sums and self.view != "final"

    @property
    def sees(self) -> str:
        if self.every_step:
            return _EVERY_SUM
        return "the trained model" if self.replaces else "the trained model's answers"

    @property
    def folder_name(self) -> str:
        return f"canaries-{'every-step' if self.every_step else 'final'}"

    @property
    def planted(self) -> CanaryAudit:
        return self

    def words(self, records: int) -> str:
        """How a report marks the run. records: all that the plan counts."""
        coin = "under label 0 or 1" if self.canary == "pair" else "in or out"
        return (
            f"not for release: {self.canaries:,} of its {records:,} records are {self.canary} "
            f"canaries, each {coin} by a secret coin"
        )

    def check(self, recipe: Sections) -> None:
        if recipe.tune is not None:
            raise ValueError("audit.kind: canaries does not go with tune; audit the values found")
        if self.canary == "pair" and recipe.privacy.neighbours != "replace-one":
            raise ValueError(
                "audit.canary: pair replaces a record by another, which is two steps of "
                "add-or-remove-one: give privacy.neighbours: replace-one"
            )
        if self.in_sums and recipe.privacy.noise_multiplier == 0:
            raise ValueError(
                "audit.canary: gradient canaries of a training without noise have no target: "
                "nothing is promised about its sums"
            )


def _kind(section: Any) -> str:
    """The kind that a section names; `mechanism` where it names none."""
    if isinstance(section, AuditOptions):
        return section.kind
    return str(section.get("kind", "mechanism")) if isinstance(section, Mapping) else "mechanism"


AnyAudit = Annotated[
    Annotated[MechanismAudit, Tag("mechanism")]
    | Annotated[CanaryAudit, Tag("canaries")]
    | Annotated[ManyRunsAudit, Tag("many-runs")],
    Discriminator(_kind),
]
"""The recipe's ``audit`` section."""
