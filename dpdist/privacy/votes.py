"""Noisy votes: the phase of PATE (Papernot et al. 2018), composed exactly."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from dpdist.privacy.phases import Phase
from dpdist.privacy.releases import AtOnce, check_count, check_release

if TYPE_CHECKING:
    import dp_accounting as dpa
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution


@dataclass(frozen=True)
class NoisyVotes(AtOnce):
    """Votes of models that are never released, released once, before `steps` steps on nothing else.

    The models are trained on disjoint shards, and each has at most one vote on each of `queries`
    questions. Of every question the most votes for a class are released with Gaussian noise of
    `screen_noise`, and of at most `answers` questions, which may be chosen by that, the votes for
    every class with noise of `vote_noise`. One record that comes or goes changes one model, whose
    votes move from one class to another, or to none: the most votes by 1 at most, all of them by
    sqrt 2 in L2 norm. Together they are one Gaussian of mu = 1 / noise_multiplier, of whose square
    the first has the part `screening` (0: nothing is screened). All of it is charged from the
    beginning, given or not.
    """

    kind: ClassVar[str] = "noisy-votes"
    noise_multiplier: float
    queries: int
    answers: int
    screening: float
    steps: int
    sample_rate: float

    def __post_init__(self) -> None:
        check_count("queries", self.queries)
        check_count("answers", self.answers)
        check_release(self.noise_multiplier, self.sample_rate)
        if not 0 <= self.screening < 1:
            raise ValueError(f"screening must be in [0, 1), got {self.screening}")

    @property
    def screen_noise(self) -> float:
        """Standard deviation, in votes; infinite where nothing is screened."""
        if not self.screening:
            return math.inf
        return self.noise_multiplier * math.sqrt(self.queries / self.screening)

    @property
    def vote_noise(self) -> float:
        """Standard deviation, in votes."""
        return self.noise_multiplier * math.sqrt(2 * self.answers / (1 - self.screening))

    def events(self, records: int) -> list[dpa.DpEvent]:
        import dp_accounting as dpa

        return [dpa.GaussianDpEvent(self.noise_multiplier)]

    @property
    def pays_for(self) -> int:
        return 1

    def at_most(self, other: Phase) -> bool:
        """No less noise, however it is split."""
        return isinstance(other, NoisyVotes) and self.noise_multiplier >= other.noise_multiplier

    def group_loss(self, size: int, grid: float) -> tuple[PrivacyLossDistribution, int] | None:
        """`size` records change at most so many models."""
        from dp_accounting.pld import privacy_loss_distribution as library

        if self.noise_multiplier == 0:
            return None
        noise = self.noise_multiplier / size
        return library.from_gaussian_mechanism(noise, value_discretization_interval=grid), 1

    @property
    def words(self) -> str:
        screened = ""
        if self.screening:
            screened = (
                f"the most votes on each of {self.queries} public inputs with noise "
                f"{self.screen_noise:.6g}, and "
            )
        return (
            f"votes of models on disjoint shards: {screened}all votes on at most {self.answers} "
            f"inputs with noise {self.vote_noise:.6g}; {self.steps} steps on the labels that follow"
        )

    @property
    def assumptions(self) -> tuple[str, ...]:
        return (
            "models are trained on disjoint shards by keyed hash and never released; each has at "
            "most one vote on each input",
        )
