"""Phases that release noisy sums one after the other, and what no theorem covers."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from dpdist.privacy.guarantee import Neighbours
from dpdist.privacy.phases import Phase

if TYPE_CHECKING:
    import dp_accounting as dpa
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

_POISSON = "every record joins a step independently (Poisson), never by shuffling"


def check_count(name: str, value: object) -> None:
    """Raise ValueError unless `value` is a whole number >= 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number >= 1, got {value!r}")


def check_release(noise_multiplier: float, sample_rate: float) -> None:
    """Raise ValueError for a noise multiplier or a sampling rate that is none."""
    if not (math.isfinite(noise_multiplier) and noise_multiplier >= 0):
        raise ValueError(f"noise_multiplier must be >= 0 and finite, got {noise_multiplier}")
    if not 0 < sample_rate <= 1:
        raise ValueError(f"sample_rate must be in (0, 1], got {sample_rate}")


@dataclass(frozen=True)
class GaussianSteps(Phase):
    """`steps` releases of a clipped sum over a Poisson batch plus N(0, (noise_multiplier * C)^2).

    sample_rate: each record's probability of joining a step; 1.0 means full batches.
    batch_cap: hard cap on the physical batch; above it a uniformly random subset of that size is
    kept (truncated Poisson sampling, arXiv 2508.15089).
    """

    kind: ClassVar[str] = "gaussian-steps"
    steps: int
    noise_multiplier: float
    sample_rate: float
    batch_cap: int | None = None

    def __post_init__(self) -> None:
        check_count("steps", self.steps)
        check_release(self.noise_multiplier, self.sample_rate)
        if self.batch_cap is not None:
            check_count("batch_cap", self.batch_cap)

    def events(self, records: int) -> list[dpa.DpEvent]:
        import dp_accounting as dpa

        # A cap above the number of records never acts, whichever neighbour is larger by one.
        if self.batch_cap is None or self.batch_cap > records:
            one = _sampled(dpa.GaussianDpEvent(self.noise_multiplier), self.sample_rate)
        elif self.sample_rate == 1.0:
            raise ValueError(
                f"full batches of {records} records cannot be capped at {self.batch_cap}"
            )
        else:
            one = dpa.TruncatedSubsampledGaussianDpEvent(
                dataset_size=records,
                sampling_probability=self.sample_rate,
                truncated_batch_size=self.batch_cap,
                noise_multiplier=self.noise_multiplier,
            )
        return [dpa.SelfComposedDpEvent(one, self.steps)]

    @property
    def capped(self) -> bool:
        return self.batch_cap is not None

    @property
    def loop(self) -> GaussianSteps:
        return self

    @property
    def units(self) -> int:
        return self.steps

    def at(self, units: int) -> tuple[Phase, ...]:
        return self.taken(units)

    def times(self, runs: int) -> tuple[Phase, ...]:
        return (replace(self, steps=self.steps * runs),)

    def at_most(self, other: Phase) -> bool:
        """No more steps, joined no more often, with no less noise."""
        if not isinstance(other, GaussianSteps) or self.capped or other.capped:
            return self == other
        return (
            self.steps <= other.steps
            and self.sample_rate <= other.sample_rate
            and self.noise_multiplier >= other.noise_multiplier
        )

    def group_loss(self, size: int, grid: float) -> tuple[PrivacyLossDistribution, int] | None:
        """Mixtures of Gaussians (Ganesh 2024): each record joins a step independently."""
        from dp_accounting.pld import privacy_loss_distribution as library
        from scipy.stats import binom

        if self.capped or self.noise_multiplier == 0:
            return None
        if self.sample_rate == 1.0:
            one = library.from_gaussian_mechanism(
                self.noise_multiplier / size, value_discretization_interval=grid
            )
        else:
            joined = list(range(size + 1))
            one = library.from_mixture_gaussian_mechanism(
                self.noise_multiplier,
                [float(count) for count in joined],
                [float(p) for p in binom.pmf(joined, size, self.sample_rate)],
                value_discretization_interval=grid,
            )
        return one.self_compose(self.steps), self.steps

    @property
    def words(self) -> str:
        steps = "step" if self.steps == 1 else "steps"
        noise = f"{self.steps} {steps} WITHOUT noise"
        if self.noise_multiplier:
            noise = f"{self.steps} Gaussian {steps}, noise multiplier {self.noise_multiplier:.6g}"
        how = "full batches"
        if self.sample_rate < 1:
            how = f"Poisson sampling at rate {self.sample_rate:.6g}"
        cap = "" if self.batch_cap is None else f", cut to at most {self.batch_cap} records"
        return f"{noise}, {how}{cap}"

    @property
    def assumptions(self) -> tuple[str, ...]:
        sampled = (_POISSON,) if self.sample_rate < 1 else ()
        cut = ("a batch above the cap is cut to a uniformly random subset",) if self.capped else ()
        return sampled + cut


@dataclass(frozen=True)
class _Releases(Phase):
    """`count` noisy sums over a Poisson sample, beside the training."""

    noise_multiplier: float
    count: int = 1
    sample_rate: float = 1.0
    noun: ClassVar[str]
    bounded: ClassVar[str]

    def __post_init__(self) -> None:
        check_count("count", self.count)
        check_release(self.noise_multiplier, self.sample_rate)

    @abstractmethod
    def _one(self) -> dpa.DpEvent:
        """A release without sampling."""

    def events(self, records: int) -> list[dpa.DpEvent]:
        import dp_accounting as dpa

        return [dpa.SelfComposedDpEvent(_sampled(self._one(), self.sample_rate), self.count)]

    def times(self, runs: int) -> tuple[Phase, ...]:
        return (replace(self, count=self.count * runs),)

    @property
    def words(self) -> str:
        rate = "" if self.sample_rate == 1 else f", Poisson sampling at {self.sample_rate:.6g}"
        return f"{self.count} {self.noun}, noise multiplier {self.noise_multiplier:.6g}{rate}"

    @property
    def assumptions(self) -> tuple[str, ...]:
        return (self.bounded, *((_POISSON,) if self.sample_rate < 1 else ()))


@dataclass(frozen=True)
class LaplaceReleases(_Releases):
    """`count` releases with Laplace noise of scale noise_multiplier * (L1 bound of one record)."""

    kind: ClassVar[str] = "laplace-releases"
    noun: ClassVar[str] = "Laplace releases"
    bounded: ClassVar[str] = "Laplace parts bound a record's contribution in L1 norm"

    def _one(self) -> dpa.DpEvent:
        import dp_accounting as dpa

        return dpa.LaplaceDpEvent(self.noise_multiplier)

    def group_loss(self, size: int, grid: float) -> tuple[PrivacyLossDistribution, int] | None:
        from dp_accounting.pld import privacy_loss_distribution as library

        if self.sample_rate < 1 or self.noise_multiplier == 0:
            return None
        one = library.from_laplace_mechanism(
            self.noise_multiplier / size, value_discretization_interval=grid
        )
        return one.self_compose(self.count), self.count


@dataclass(frozen=True)
class GaussianReleases(_Releases):
    """`count` sums over a Poisson sample, released beside the training with Gaussian noise.

    Each record's part is clipped to some L2 norm c of its own; the noise is noise_multiplier * c.
    """

    kind: ClassVar[str] = "gaussian-releases"
    noun: ClassVar[str] = "Gaussian sum beside the training"
    bounded: ClassVar[str] = "what is released beside the steps is clipped per record as well"

    def _one(self) -> dpa.DpEvent:
        import dp_accounting as dpa

        return dpa.GaussianDpEvent(self.noise_multiplier)


@dataclass(frozen=True)
class GaussianAnswers(GaussianReleases):
    """At most `count` answers of models that are never released, trained on disjoint shards.

    Each is a mean over models, in which one model is bounded: one record that comes or goes changes
    one model, and moves the mean by at most c. The noise is noise_multiplier * c. Questions may be
    chosen by earlier answers. All of them are charged from the beginning, given or not.
    """

    kind: ClassVar[str] = "gaussian-answers"
    noun: ClassVar[str] = "answers at most, each a noisy mean over models of disjoint shards"
    bounded: ClassVar[str] = (
        "models are trained on disjoint shards by keyed hash and never released; one model's part "
        "in an answer is bounded"
    )

    @property
    def pays_for(self) -> int:
        return self.count

    @property
    def units(self) -> int:
        return self.count

    def at(self, units: int) -> tuple[Phase, ...]:
        return (replace(self, count=units),) if units else ()

    def group_loss(self, size: int, grid: float) -> tuple[PrivacyLossDistribution, int] | None:
        """`size` records change at most so many models."""
        from dp_accounting.pld import privacy_loss_distribution as library

        if self.sample_rate < 1 or self.noise_multiplier == 0:
            return None
        one = library.from_gaussian_mechanism(
            self.noise_multiplier / size, value_discretization_interval=grid
        )
        return one.self_compose(self.count), self.count


class AtOnce(Phase):
    """A phase whose `steps` steps have no noise of their own: all of it is charged from the
    beginning, and no more for steps that were taken again."""

    steps: int
    sample_rate: float
    batch_cap: int | None = None

    @property
    def loop(self) -> GaussianSteps:
        return GaussianSteps(self.steps, 0.0, self.sample_rate, self.batch_cap)

    def taken(self, steps: int) -> tuple[Phase, ...]:
        return (self,)


@dataclass(frozen=True)
class NoisyRecords(AtOnce):
    """Every record released once, with noise of its own, before `steps` steps on nothing else.

    An input is clipped to some L2 norm c and gets Gaussian noise of noise_multiplier * c; a label
    is released by a mechanism of pure label_epsilon. The steps are post-processing, and free.
    """

    kind: ClassVar[str] = "noisy-records"
    noise_multiplier: float
    label_epsilon: float
    steps: int
    sample_rate: float
    batch_cap: int | None = None

    def __post_init__(self) -> None:
        check_release(self.noise_multiplier, self.sample_rate)
        if not (math.isfinite(self.label_epsilon) and self.label_epsilon > 0):
            raise ValueError(f"label_epsilon must be > 0 and finite, got {self.label_epsilon}")

    def events(self, records: int) -> list[dpa.DpEvent]:
        import dp_accounting as dpa

        # Of all mechanisms of pure epsilon, randomised response on one bit tells most.
        label = dpa.RandomizedResponseDpEvent(2 / (math.exp(self.label_epsilon) + 1), 2)
        return [dpa.ComposedDpEvent([dpa.GaussianDpEvent(self.noise_multiplier), label])]

    def refused(self, neighbours: Neighbours) -> str | None:
        if neighbours == "replace-one":
            return None
        return "noisy records are released one by one: replace-one is what can be proved"

    @property
    def words(self) -> str:
        return (
            f"every record released once: its input with noise multiplier "
            f"{self.noise_multiplier:.6g}, its label by randomised response of epsilon "
            f"{self.label_epsilon:g}; {self.steps} steps on what was released"
        )

    @property
    def assumptions(self) -> tuple[str, ...]:
        return ("inputs are clipped before their noise, which is drawn once for each record",)


def _sampled(event: dpa.DpEvent, sample_rate: float) -> dpa.DpEvent:
    import dp_accounting as dpa

    return event if sample_rate == 1.0 else dpa.PoissonSampledDpEvent(sample_rate, event)


@dataclass(frozen=True)
class NonPrivate(Phase):
    """Something computed from the records that no theorem covers: epsilon is infinite."""

    kind: ClassVar[str] = "non-private"
    reason: str

    def events(self, records: int) -> list[dpa.DpEvent]:
        import dp_accounting as dpa

        return [dpa.NonPrivateDpEvent()]

    @property
    def unproved(self) -> str:
        return self.reason

    @property
    def words(self) -> str:
        return f"NOT PRIVATE: {self.reason}"

    @property
    def assumptions(self) -> tuple[str, ...]:
        return (self.words,)


@dataclass(frozen=True)
class FixedBatches(AtOnce):
    """`steps` steps on disjoint batches that stay the same, each a share sample_rate of the
    records, which no theorem covers: epsilon is infinite."""

    kind: ClassVar[str] = "fixed-batches"
    steps: int
    sample_rate: float
    reason: str

    def __post_init__(self) -> None:
        check_count("steps", self.steps)
        check_release(0.0, self.sample_rate)

    def events(self, records: int) -> list[dpa.DpEvent]:
        return NonPrivate(self.reason).events(records)

    @property
    def unproved(self) -> str:
        return self.reason

    @property
    def words(self) -> str:
        return f"NOT PRIVATE: {self.steps} steps on fixed disjoint batches: {self.reason}"

    @property
    def assumptions(self) -> tuple[str, ...]:
        return (self.words,)
