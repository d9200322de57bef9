"""Define the phases of a privacy plan: every operation on private records, and its price.

A phase's class says how it is stored, which dp_accounting events price it, which conditions make
that price true and how a privacy card describes it. Phases release noisy sums one after the other,
combine other phases (on disjoint data, the best of several runs, one of several settings) or
release noisy votes (PATE, Papernot et al. 2018, composed exactly). A new kind is a subclass of
`Phase` and an entry of the registry at the end of this file; no other code asks which kind a phase
is.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar

from dpdist.core.preprocessing import COUNTED_LEVELS
from dpdist.privacy.class_rates import ClassRates, check_count
from dpdist.privacy.guarantee import Neighbors
from dpdist.privacy.selection import TrialDistribution

if TYPE_CHECKING:
    import dp_accounting as dpa
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution


# --- the base class ---------------------------------------------------------------------------


PhaseSequences = tuple[tuple["Phase", ...], ...]
PhaseReader = Callable[[Sequence[dict[str, Any]]], tuple["Phase", ...]]


class Phase(ABC):
    """One part of a plan. Subclasses are frozen dataclasses whose fields are their JSON form.

    kind: its name in JSON. has_batch_cap: its price depends on the true number of records.
    couples_orders: its Renyi divergence at one order follows from those at others as well.
    reads_records: it is executed on the plan's records, so that their number matters.
    """

    kind: ClassVar[str]
    couples_orders: ClassVar[bool] = False
    reads_records: ClassVar[bool] = True

    # --- its price

    @abstractmethod
    def events(self, records: int) -> list[dpa.DpEvent]:
        """Return one event per path of a record through the phase, in a data set of `records`."""

    @property
    def inner_sequences(self) -> PhaseSequences:
        """Return the sequences of phases that the phase is made of, if any."""
        return ()

    @property
    def alternative_sequences(self) -> PhaseSequences:
        """Return the sequences of which one is run in its place.

        Most phases are their only setting.
        """
        return ((self,),)

    @property
    def has_batch_cap(self) -> bool:
        return False

    @property
    def uses_only_profile(self) -> bool:
        """Return whether the price depends on the hockey-stick profile alone.

        It then covers every mechanism whose profile does not rise above.
        """
        return False

    @property
    def training_steps(self) -> GaussianSteps | None:
        """Return the part that the training loop executes, or None.

        A phase without such a part is charged in full from the start.
        """
        return None

    def executed(self, steps: int) -> tuple[Phase, ...]:
        """Return the released part after the training loop took `steps` of its steps."""
        loop = self.training_steps
        return (replace(loop, steps=steps),) if loop is not None and steps else ()

    @property
    def num_queries(self) -> int:
        """Return the number of answers that the phase pays for outside the loop, one at a time.

        These are votes before it, or questions after it: the ledger counts each before its
        noise is drawn.
        """
        return 0

    @property
    def num_units(self) -> int | None:
        """Return the number of planned releases that are charged one by one.

        None: the phase is charged at once.
        """
        return None

    def executed_units(self, units: int) -> tuple[Phase, ...]:
        """Return the released part: `units` units, or the whole phase `units` times."""
        return self.repeat(units) if units else ()

    @property
    def unproved_reason(self) -> str | None:
        """Return the reason why no theorem covers the phase; None if one does."""
        return None

    def unsupported_reason(self, adjacency: Neighbors) -> str | None:
        """Return the reason why this relation cannot be accounted; None if it can."""
        return None

    def repeat(self, runs: int) -> tuple[Phase, ...]:
        """Return the phase `runs` times over."""
        return (self,) * runs

    def dominated_by(self, other: Phase) -> bool:
        """Return whether the phase is a post-processing of `other`.

        Every accountant then agrees that it costs no more.
        """
        return self == other

    def group_loss(self, size: int, grid: float) -> tuple[PrivacyLossDistribution, int] | None:
        """Return the exact loss of `size` records that come or go together.

        Also returns the number of releases composed in it. None if no exact loss is known.
        """
        return None

    # --- its words

    @property
    @abstractmethod
    def description(self) -> str:
        """Return the phase in a sentence, for readers of a card, without anything secret."""

    @property
    def assumptions(self) -> tuple[str, ...]:
        """Return the conditions of the price, besides those of its inner phases."""
        return ()

    # --- JSON

    def to_dict(self) -> dict[str, Any]:
        """Return the phase as plain JSON types; `phase_from_dict` inverts it.

        Infinity becomes "inf".
        """
        values = {field.name: _to_json(getattr(self, field.name)) for field in fields(self)}  # type: ignore[arg-type]
        return {"kind": self.kind, **values}

    @classmethod
    def from_fields(cls, values: dict[str, Any], read_phases: PhaseReader) -> Phase:
        """Return the phase from its fields in JSON. read_phases: reads a list of phases.

        Raises ValueError, TypeError or KeyError.
        """
        return cls(**values)


def _to_json(value: Any) -> Any:
    if isinstance(value, Phase):
        return value.to_dict()
    if isinstance(value, tuple):
        return [_to_json(item) for item in value]
    return "inf" if value == math.inf else value


# --- sequences --------------------------------------------------------------------------------


def walk_phases(phases: Sequence[Phase]) -> Iterator[Phase]:
    """Yield every phase, after the phases that it is made of."""
    for phase in phases:
        for sequence in phase.inner_sequences:
            yield from walk_phases(sequence)
        yield phase


def sequence_path_events(phases: Sequence[Phase], records: int) -> list[dpa.DpEvent]:
    """Return the paths through phases that run one after the other on the same data.

    The composition is adaptive.
    """
    return compose_path_events([phase.events(records) for phase in phases])


def dataset_path_events(
    phases: Sequence[Phase], records: int, adjacency: Neighbors
) -> list[dpa.DpEvent]:
    """Return the paths through phases for `records` records and every neighbor of the data set.

    The loss of a capped batch depends on the number of OTHER records: one fewer than `records` when
    a record is removed, all of them when one is added. Raises
    dpdist.privacy.pld.UnsupportedMechanismError for a phase that cannot be accounted under the
    relation, whatever relation it was charged under.
    """
    refused = [
        why
        for phase in walk_phases(phases)
        if (why := phase.unsupported_reason(adjacency)) is not None
    ]
    if refused:
        from dpdist.privacy.pld import UnsupportedMechanismError

        raise UnsupportedMechanismError(refused[0])
    paths = sequence_path_events(phases, records)
    if adjacency == "add-or-remove-one" and any(
        phase.has_batch_cap for phase in walk_phases(phases)
    ):
        paths += sequence_path_events(phases, records + 1)
    return paths


def compose_path_events(choices: Sequence[Sequence[dpa.DpEvent]]) -> list[dpa.DpEvent]:
    """Return every way of choosing one event per entry, each composed in order."""
    import dp_accounting as dpa

    return [
        path[0] if len(path) == 1 else dpa.ComposedDpEvent(list(path))
        for path in itertools.product(*choices)
    ]


# --- noisy sums -------------------------------------------------------------------------------


_POISSON = "every record joins a step independently (Poisson), never by shuffling"
_PUBLIC_RATES = (
    "a record's sampling rate follows from its own class and from class counts that are public: "
    "they were declared, not counted in the private records"
)


def check_release(noise_multiplier: float, sample_rate: float) -> None:
    """Raise ValueError for an invalid noise multiplier or sampling rate."""
    if not (math.isfinite(noise_multiplier) and noise_multiplier >= 0):
        raise ValueError(f"noise_multiplier must be >= 0 and finite, got {noise_multiplier}")
    if not 0 < sample_rate <= 1:
        raise ValueError(f"sample_rate must be in (0, 1], got {sample_rate}")


@dataclass(frozen=True)
class GaussianSteps(Phase):
    """`steps` releases of a clipped sum over a Poisson batch plus Gaussian noise.

    The noise is N(0, (noise_multiplier * C)^2).

    sample_rate: each record's probability of joining a step; 1.0 means full batches.
    batch_cap: hard cap on the physical batch; above it a uniformly random subset of that size is
    kept (truncated Poisson sampling, arXiv 2508.15089).
    class_rates: rates by a record's own class; sample_rate is then the largest of them, which is
    the one that is paid for (docs/explanation/proofs.md#rates-by-class).
    """

    kind: ClassVar[str] = "gaussian-steps"
    steps: int
    noise_multiplier: float
    sample_rate: float
    batch_cap: int | None = None
    class_rates: ClassRates | None = None

    def __post_init__(self) -> None:
        check_count("steps", self.steps)
        check_release(self.noise_multiplier, self.sample_rate)
        if self.batch_cap is not None:
            check_count("batch_cap", self.batch_cap)
        if self.class_rates is None:
            return
        if self.batch_cap is not None:
            raise ValueError("a capped batch is priced at equal rates: no batch_cap beside rates")
        if self.sample_rate != self.class_rates.largest:
            raise ValueError(
                f"sample_rate must be the largest class rate {self.class_rates.largest}, got "
                f"{self.sample_rate}"
            )

    @property
    def mean_rate(self) -> float:
        """Return the expected batch as a share of the records, a public number."""
        return self.sample_rate if self.class_rates is None else self.class_rates.mean

    def to_dict(self) -> dict[str, Any]:
        """Return the phase as JSON; rates by class are named only where they hold."""
        values = super().to_dict()
        rates = values.pop("class_rates")  # other plans keep the fingerprint they had without it
        return values if rates is None else values | {"class_rates": rates.to_dict()}

    @classmethod
    def from_fields(cls, values: dict[str, Any], read_phases: PhaseReader) -> Phase:
        if "class_rates" in values:
            given = dict(values["class_rates"])
            given |= {name: tuple(given[name]) for name in ("rates", "counts")}
            values = values | {"class_rates": ClassRates(**given)}
        return cls(**values)

    def events(self, records: int) -> list[dpa.DpEvent]:
        import dp_accounting as dpa

        # A cap above the number of records never acts, whichever neighbor is larger by one.
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
    def has_batch_cap(self) -> bool:
        return self.batch_cap is not None

    @property
    def training_steps(self) -> GaussianSteps:
        return self

    @property
    def num_units(self) -> int:
        return self.steps

    def executed_units(self, units: int) -> tuple[Phase, ...]:
        return self.executed(units)

    def repeat(self, runs: int) -> tuple[Phase, ...]:
        return (replace(self, steps=self.steps * runs),)

    def dominated_by(self, other: Phase) -> bool:
        """Return whether the steps are no more, joined no more often, with no less noise."""
        if not isinstance(other, GaussianSteps) or self.has_batch_cap or other.has_batch_cap:
            return self == other
        return (
            self.steps <= other.steps
            and self.sample_rate <= other.sample_rate
            and self.noise_multiplier >= other.noise_multiplier
        )

    def group_loss(self, size: int, grid: float) -> tuple[PrivacyLossDistribution, int] | None:
        """Return a mixture of Gaussians, since each record joins a step independently.

        Source: Ganesh 2024.
        """
        from dp_accounting.pld import privacy_loss_distribution as library
        from scipy.stats import binom

        if self.has_batch_cap or self.noise_multiplier == 0:
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
    def description(self) -> str:
        steps = "step" if self.steps == 1 else "steps"
        noise = f"{self.steps} {steps} WITHOUT noise"
        if self.noise_multiplier:
            noise = f"{self.steps} Gaussian {steps}, noise multiplier {self.noise_multiplier:.6g}"
        how = "full batches"
        if self.sample_rate < 1:
            how = f"Poisson sampling at rate {self.sample_rate:.6g}"
        if self.class_rates is not None:
            how = (
                f"Poisson sampling {self.class_rates.description}, priced at the largest, "
                f"{self.sample_rate:.6g}"
            )
        cap = "" if self.batch_cap is None else f", cut to at most {self.batch_cap} records"
        return f"{noise}, {how}{cap}"

    @property
    def assumptions(self) -> tuple[str, ...]:
        sampled: tuple[str, ...] = (_POISSON,) if self.mean_rate < 1 else ()
        if self.class_rates is not None:
            sampled += (_PUBLIC_RATES,)
        cut = (
            ("a batch above the cap is cut to a uniformly random subset",)
            if self.has_batch_cap
            else ()
        )
        return sampled + cut


@dataclass(frozen=True)
class GaussianReleases(Phase):
    """`count` sums over a Poisson sample, released next to the training, with Gaussian noise.

    Each record's part is clipped to an L2 norm c; the noise is noise_multiplier * c.
    """

    kind: ClassVar[str] = "gaussian-releases"
    noise_multiplier: float
    count: int = 1
    sample_rate: float = 1.0
    release_name: ClassVar[str] = "Gaussian sum beside the training"
    bound_assumption: ClassVar[str] = (
        "what is released beside the steps is clipped per record as well"
    )

    def __post_init__(self) -> None:
        check_count("count", self.count)
        check_release(self.noise_multiplier, self.sample_rate)

    def events(self, records: int) -> list[dpa.DpEvent]:
        import dp_accounting as dpa

        one = _sampled(dpa.GaussianDpEvent(self.noise_multiplier), self.sample_rate)
        return [dpa.SelfComposedDpEvent(one, self.count)]

    def repeat(self, runs: int) -> tuple[Phase, ...]:
        return (replace(self, count=self.count * runs),)

    @property
    def description(self) -> str:
        rate = "" if self.sample_rate == 1 else f", Poisson sampling at {self.sample_rate:.6g}"
        return (
            f"{self.count} {self.release_name}, noise multiplier {self.noise_multiplier:.6g}{rate}"
        )

    @property
    def assumptions(self) -> tuple[str, ...]:
        return (self.bound_assumption, *((_POISSON,) if self.sample_rate < 1 else ()))


def _exact_loss(
    phase: GaussianReleases | NoisyVotes, size: int, grid: float
) -> tuple[PrivacyLossDistribution, int] | None:
    """Return the loss of `size` records that move unsampled releases; None without noise."""
    from dp_accounting.pld import privacy_loss_distribution as library

    if phase.noise_multiplier == 0:
        return None
    count, noise = getattr(phase, "count", 1), phase.noise_multiplier / size
    one = library.from_gaussian_mechanism(noise, value_discretization_interval=grid)
    return (one if count == 1 else one.self_compose(count)), count


class _Queries(GaussianReleases):
    """At most `count` noisy answers, one at a time."""

    @property
    def num_queries(self) -> int:
        return self.count

    def executed_units(self, units: int) -> tuple[Phase, ...]:
        return (replace(self, count=units),) if units else ()


@dataclass(frozen=True)
class GaussianAnswers(_Queries):
    """At most `count` answers of models that are never released, trained on disjoint shards.

    Each is a mean over models, in which one model is bounded: one record that comes or goes changes
    one model, and moves the mean by at most c. The noise is noise_multiplier * c. Questions may be
    chosen by earlier answers. All of them are charged from the beginning, given or not.
    """

    kind: ClassVar[str] = "gaussian-answers"
    release_name: ClassVar[str] = (
        "answers at most, each a noisy mean over models of disjoint shards"
    )
    bound_assumption: ClassVar[str] = (
        "models are trained on disjoint shards by keyed hash and never released; one model's part "
        "in an answer is bounded"
    )

    @property
    def num_units(self) -> int:
        return self.count

    def group_loss(self, size: int, grid: float) -> tuple[PrivacyLossDistribution, int] | None:
        """Return the loss when `size` records change at most `size` models."""
        return None if self.sample_rate < 1 else _exact_loss(self, size, grid)


@dataclass(frozen=True)
class GaussianScores(_Queries):
    """At most `count` scores of models on `records` held-out records that no step trains on.

    Each is a sum to which a record adds a number in [0, 1], with Gaussian noise of standard
    deviation noise_multiplier. Models may be chosen by earlier scores. All of them are charged from
    the beginning, given or not.
    """

    kind: ClassVar[str] = "gaussian-scores"
    release_name: ClassVar[str] = "noisy scores at most"
    records: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("records", self.records)

    @property
    def description(self) -> str:
        return f"{super().description}, each of {self.records} held-out records"

    @property
    def assumptions(self) -> tuple[str, ...]:
        return (
            "a held-out record adds at most 1 to a score, and no step trains on it",
            f"the number of held-out records ({self.records}) is public",
        )


@dataclass(frozen=True)
class GaussianCounts(Phase):
    """Histograms of the records, released once with Gaussian noise on each count.

    A record adds 1 in all to the counts of each histogram, or less: of `histograms` of them, a
    record that comes, goes or is blanked out moves the counts by at most sqrt(histograms) in L2
    norm, and a replaced one, which takes from some counts and adds to others, by sqrt(2 *
    histograms). Together they are one histogram whose noise is smaller by sqrt(histograms)
    (docs/explanation/proofs.md#counts-of-columns).
    deviation: of the noise, in records.
    """

    kind: ClassVar[str] = "gaussian-counts"
    deviation: float
    histograms: int = 1

    def __post_init__(self) -> None:
        check_count("histograms", self.histograms)
        if not (math.isfinite(self.deviation) and self.deviation > 0):
            raise ValueError(f"deviation must be > 0 and finite, got {self.deviation}")

    @classmethod
    def of_columns(cls, noise_multiplier: float, columns: int) -> GaussianCounts:
        """Return the phase of counting columns (`dpdist.data.histograms`).

        noise_multiplier: of the noise, in units of what a record adds to all counts in L2 norm.
        """
        histograms = COUNTED_LEVELS * columns
        return cls(noise_multiplier * math.sqrt(histograms), histograms)

    def events(self, records: int) -> list[dpa.DpEvent]:
        from dpdist.privacy.pld import CountsDpEvent

        return [CountsDpEvent(self.deviation / math.sqrt(self.histograms))]

    def to_dict(self) -> dict[str, Any]:
        """Return the phase as JSON; the number of histograms is named where there are several."""
        values = super().to_dict()  # a plan of one keeps the fingerprint it had without it
        return values if self.histograms > 1 else {k: values[k] for k in ("kind", "deviation")}

    @property
    def description(self) -> str:
        many = "histogram" if self.histograms == 1 else "histograms"
        return (
            f"{self.histograms} {many} of the records, with noise of standard deviation "
            f"{self.deviation:.6g} on each count"
        )

    @property
    def assumptions(self) -> tuple[str, ...]:
        return (
            "a record adds at most 1 in all to the counts of a histogram, whatever the other "
            "records are",
        )


class UpfrontPhase(Phase):
    """A phase whose `steps` steps have no noise of their own.

    All of it is charged from the beginning, and no more for steps that were taken again.
    """

    steps: int
    sample_rate: float
    batch_cap: int | None = None

    @property
    def training_steps(self) -> GaussianSteps:
        return GaussianSteps(self.steps, 0.0, self.sample_rate, self.batch_cap)

    def executed(self, steps: int) -> tuple[Phase, ...]:
        return (self,)


@dataclass(frozen=True)
class NoisyRecords(UpfrontPhase):
    """A release of every record once, with its own noise, before `steps` steps on these alone.

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

        # Of all mechanisms of pure epsilon, randomized response on one bit tells most.
        label = dpa.RandomizedResponseDpEvent(2 / (math.exp(self.label_epsilon) + 1), 2)
        return [dpa.ComposedDpEvent([dpa.GaussianDpEvent(self.noise_multiplier), label])]

    def unsupported_reason(self, adjacency: Neighbors) -> str | None:
        if adjacency == "replace-one":
            return None
        return "noisy records are released one by one: replace-one is what can be proved"

    @property
    def description(self) -> str:
        return (
            f"every record released once: its input with noise multiplier "
            f"{self.noise_multiplier:.6g}, its label by randomized response of epsilon "
            f"{self.label_epsilon:g}; {self.steps} steps on what was released"
        )

    @property
    def assumptions(self) -> tuple[str, ...]:
        return ("inputs are clipped before their noise, which is drawn once for each record",)


def _sampled(event: dpa.DpEvent, sample_rate: float) -> dpa.DpEvent:
    import dp_accounting as dpa

    return event if sample_rate == 1.0 else dpa.PoissonSampledDpEvent(sample_rate, event)


class _Unproved(Phase):
    """A phase that no theorem covers: epsilon is infinite."""

    reason: str

    def events(self, records: int) -> list[dpa.DpEvent]:
        import dp_accounting as dpa

        return [dpa.NonPrivateDpEvent()]

    @property
    def unproved_reason(self) -> str:
        return self.reason

    @property
    def assumptions(self) -> tuple[str, ...]:
        return (self.description,)


@dataclass(frozen=True)
class NonPrivate(_Unproved):
    """A computation on the records that no theorem covers."""

    kind: ClassVar[str] = "non-private"
    reason: str

    @property
    def description(self) -> str:
        return f"NOT PRIVATE: {self.reason}"


NOT_TRAINED_HERE = "not trained by dpdist: no epsilon"
UNKNOWN_DATA = "unknown: the model was trained elsewhere"


@dataclass(frozen=True)
class TrainedElsewhere(_Unproved):
    """Stand for a training that dpdist did not execute: its cost is not known.

    It reads none of this plan's records, whose number therefore says nothing.
    """

    kind: ClassVar[str] = "trained-elsewhere"
    reads_records: ClassVar[bool] = False
    reason = NOT_TRAINED_HERE

    @property
    def description(self) -> str:
        return self.reason


@dataclass(frozen=True)
class FixedBatches(_Unproved, UpfrontPhase):
    """`steps` steps on disjoint batches that stay the same: epsilon is infinite.

    Each batch is a share sample_rate of the records; no theorem covers the steps.
    """

    kind: ClassVar[str] = "fixed-batches"
    steps: int
    sample_rate: float
    reason: str

    def __post_init__(self) -> None:
        check_count("steps", self.steps)
        check_release(0.0, self.sample_rate)

    @property
    def description(self) -> str:
        return f"NOT PRIVATE: {self.steps} steps on fixed disjoint batches: {self.reason}"


# --- phases made of phases --------------------------------------------------------------------


@dataclass(frozen=True)
class ParallelParts(Phase):
    """Mechanisms on disjoint parts of the data: a record pays only for the part it lies in.

    parts: one sequence of phases per part. The partition must not depend on other records, and each
    record must lie in one part only (by identity, not by content).
    """

    kind: ClassVar[str] = "parallel-parts"
    parts: PhaseSequences

    def __post_init__(self) -> None:
        if not self.parts:
            raise ValueError("ParallelParts needs at least one part")

    def events(self, records: int) -> list[dpa.DpEvent]:
        return [path for part in self.parts for path in sequence_path_events(part, records)]

    @property
    def inner_sequences(self) -> PhaseSequences:
        return self.parts

    def unsupported_reason(self, adjacency: Neighbors) -> str | None:
        if adjacency == "add-or-remove-one":
            return None
        return (
            "parallel parts are accounted under add-or-remove-one only: a replaced record may "
            "change parts and then costs both"
        )

    @property
    def description(self) -> str:
        return f"on disjoint parts of the data: {_describe_sequences(self.parts)}"

    @property
    def assumptions(self) -> tuple[str, ...]:
        return ("every record lies in one part only, whatever the other records are",)

    @classmethod
    def from_fields(cls, values: dict[str, Any], read_phases: PhaseReader) -> Phase:
        return cls(tuple(map(read_phases, values["parts"])))


@dataclass(frozen=True)
class ScoredTraining(ParallelParts):
    """A training, and scores of its models on held-out records that no step trains on.

    parts: the phases of the training, one of which has the steps, and those of the scores. The
    steps are charged as they are taken, the scores from the beginning. A record lies on one side:
    its loss is that of the steps or that of the scores, whatever the other side released before.
    """

    kind: ClassVar[str] = "scored-training"

    def __post_init__(self) -> None:
        if len(self.parts) != 2 or len(self._loops) != 1:
            raise ValueError("a scored training has one phase with steps, and scores")

    @property
    def _loops(self) -> list[GaussianSteps]:
        return [loop for phase in self.parts[0] if (loop := phase.training_steps) is not None]

    @property
    def training_steps(self) -> GaussianSteps:
        return self._loops[0]

    def executed(self, steps: int) -> tuple[Phase, ...]:
        training, scores = self.parts
        taken: list[Phase] = []
        for phase in training:
            taken += (phase,) if phase.training_steps is None else phase.executed(steps)
        if not taken:
            return scores
        whole = any(phase.training_steps for phase in taken)
        return ((ScoredTraining if whole else ParallelParts)((tuple(taken), scores)),)

    @property
    def description(self) -> str:
        training, scores = (" then ".join(each.description for each in part) for part in self.parts)
        return f"{training}; beside it, on records held out of it, {scores}"

    @property
    def num_queries(self) -> int:
        return sum(phase.num_queries for part in self.parts for phase in part)


@dataclass(frozen=True)
class RepeatAndSelect(Phase):
    """Run `phases` K times, release only the best run; K is secret and random.

    mean, shape: of K's distribution, see `dpdist.privacy.selection.TrialDistribution`. Costs the
    smaller of what `dpdist.privacy.pld` and Papernot and Steinke 2022 (Theorems 2 and 6) prove.
    """

    kind: ClassVar[str] = "repeat-and-select"
    couples_orders: ClassVar[bool] = True
    phases: tuple[Phase, ...]
    mean: float
    shape: float

    def __post_init__(self) -> None:
        TrialDistribution(self.mean, self.shape)  # its limits hold here

    def events(self, records: int) -> list[dpa.DpEvent]:
        from dp_accounting.dp_event import RepeatAndSelectDpEvent

        paths = sequence_path_events(self.phases, records)
        return [RepeatAndSelectDpEvent(path, self.mean, self.shape) for path in paths]

    @property
    def inner_sequences(self) -> PhaseSequences:
        return (self.phases,)

    @property
    def description(self) -> str:
        """Return the search in a sentence; the number of runs itself stays secret."""
        distribution = TrialDistribution(self.mean, self.shape).describe()
        return (
            f"the best of a secret random number of runs ({distribution}) of: "
            f"{_describe_sequences(self.inner_sequences)}"
        )

    @property
    def assumptions(self) -> tuple[str, ...]:
        return ("the number of runs and all unselected runs stay secret",)

    @classmethod
    def from_fields(cls, values: dict[str, Any], read_phases: PhaseReader) -> Phase:
        return cls(read_phases(values["phases"]), float(values["mean"]), float(values["shape"]))


@dataclass(frozen=True)
class WorstOf(Phase):
    """One of several mechanisms, chosen without looking at the data; the choice may be public.

    Costs the pointwise maximum of the profiles of `choices` and of `floor`, a delta. With a floor
    nothing else prices it, so that it covers every mechanism whose profile does not rise above, in
    either direction, at any epsilon; Renyi curves would not do, as they do not order profiles.
    """

    kind: ClassVar[str] = "worst-of"
    choices: PhaseSequences
    floor: float = 0.0

    def __post_init__(self) -> None:
        if not self.choices:
            raise ValueError("WorstOf needs at least one choice")
        if not 0 <= self.floor < 1:
            raise ValueError(f"floor must be in [0, 1), got {self.floor}")

    @property
    def uses_only_profile(self) -> bool:
        return self.floor > 0

    def events(self, records: int) -> list[dpa.DpEvent]:
        from dpdist.privacy.pld import WorstOfDpEvent

        choices = [sequence_path_events(choice, records) for choice in self.choices]
        return [WorstOfDpEvent(list(path), self.floor) for path in itertools.product(*choices)]

    @property
    def inner_sequences(self) -> PhaseSequences:
        return self.choices

    @property
    def alternative_sequences(self) -> PhaseSequences:
        return self.choices

    @property
    def description(self) -> str:
        return (
            "a setting chosen without the data that costs at most: "
            f"{_describe_sequences(self.choices)}"
        )

    @property
    def assumptions(self) -> tuple[str, ...]:
        return ("every setting that was tried costs at most as much as the one described",)

    @classmethod
    def from_fields(cls, values: dict[str, Any], read_phases: PhaseReader) -> Phase:
        return cls(tuple(map(read_phases, values["choices"])), values["floor"])


def _describe_sequences(sequences: PhaseSequences) -> str:
    return "; or ".join(
        " then ".join(phase.description for phase in phases) for phases in sequences
    )


# --- noisy votes ------------------------------------------------------------------------------


@dataclass(frozen=True)
class NoisyVotes(UpfrontPhase):
    """Votes of unreleased models, released once, before `steps` steps on these alone.

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
        """Return the standard deviation of the screening noise, in votes.

        Infinite without screening.
        """
        if not self.screening:
            return math.inf
        return self.noise_multiplier * math.sqrt(self.queries / self.screening)

    @property
    def vote_noise(self) -> float:
        """Return the standard deviation of the noise on votes, in votes."""
        return self.noise_multiplier * math.sqrt(2 * self.answers / (1 - self.screening))

    def events(self, records: int) -> list[dpa.DpEvent]:
        import dp_accounting as dpa

        return [dpa.GaussianDpEvent(self.noise_multiplier)]

    @property
    def num_queries(self) -> int:
        return 1

    def dominated_by(self, other: Phase) -> bool:
        """Return whether the noise is no less, however it is split."""
        return isinstance(other, NoisyVotes) and self.noise_multiplier >= other.noise_multiplier

    def group_loss(self, size: int, grid: float) -> tuple[PrivacyLossDistribution, int] | None:
        """Return the loss when `size` records change at most `size` models."""
        return _exact_loss(self, size, grid)

    @property
    def description(self) -> str:
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


# --- registry ---------------------------------------------------------------------------------


_CLASSES: tuple[type[Phase], ...] = (
    GaussianSteps,
    GaussianReleases,
    FixedBatches,
    GaussianAnswers,
    GaussianCounts,
    GaussianScores,
    NoisyRecords,
    NoisyVotes,
    NonPrivate,
    ParallelParts,
    RepeatAndSelect,
    ScoredTraining,
    TrainedElsewhere,
    WorstOf,
)
KINDS: dict[str, type[Phase]] = {phase.kind: phase for phase in _CLASSES}


def phase_from_dict(record: dict[str, Any]) -> Phase:
    """Return the phase that `Phase.to_dict` wrote.

    Raises ValueError for an unknown kind or missing field.
    """
    values = dict(record)
    kind = values.pop("kind", None)
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"unknown kind of phase: {kind!r}")
    try:
        return KINDS[kind].from_fields(values, phases_from_dicts)
    except (TypeError, KeyError) as error:
        raise ValueError(f"a {kind} phase is incomplete: {error}") from error


def phases_from_dicts(records: Sequence[dict[str, Any]]) -> tuple[Phase, ...]:
    """Return the phases that `Phase.to_dict` wrote, in order."""
    return tuple(map(phase_from_dict, records))
