"""The privacy plan: sampling, clipping, noise and steps in one frozen object.

The training loop takes its sampling rate, clip norm, noise multiplier and step count from here and
nowhere else, and the guarantee is computed from the same object, so the accounted mechanism is the
executed mechanism (Abadi et al. 2016, accounted with privacy loss distributions).
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dpdist.privacy.guarantee import Guarantee, Neighbours

if TYPE_CHECKING:
    import dp_accounting as dpa


def _positive_integer(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number >= 1, got {value!r}")


def _noise(value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"noise_multiplier must be >= 0 and finite, got {value}")


@dataclass(frozen=True)
class GaussianSteps:
    """`steps` releases of a clipped sum over a Poisson batch plus N(0, (noise_multiplier * C)^2).

    sample_rate: each record's probability of joining a step; 1.0 means full batches.
    batch_cap: hard cap on the physical batch; above it a uniformly random subset of that size is
    kept (truncated Poisson sampling, arXiv 2508.15089).
    """

    steps: int
    noise_multiplier: float
    sample_rate: float
    batch_cap: int | None = None

    def __post_init__(self) -> None:
        _positive_integer("steps", self.steps)
        _noise(self.noise_multiplier)
        if not 0 < self.sample_rate <= 1:
            raise ValueError(f"sample_rate must be in (0, 1], got {self.sample_rate}")
        if self.batch_cap is not None:
            _positive_integer("batch_cap", self.batch_cap)


@dataclass(frozen=True)
class _Releases:
    """`count` noisy sums over a Poisson sample, beside the training."""

    noise_multiplier: float
    count: int = 1
    sample_rate: float = 1.0

    def __post_init__(self) -> None:
        _positive_integer("count", self.count)
        _noise(self.noise_multiplier)
        if not 0 < self.sample_rate <= 1:
            raise ValueError(f"sample_rate must be in (0, 1], got {self.sample_rate}")


@dataclass(frozen=True)
class LaplaceReleases(_Releases):
    """`count` releases with Laplace noise of scale noise_multiplier * (L1 bound of one record)."""


@dataclass(frozen=True)
class GaussianReleases(_Releases):
    """`count` sums over a Poisson sample, released beside the training with Gaussian noise.

    Each record's part is clipped to some L2 norm c of its own; the noise is noise_multiplier * c.
    """


@dataclass(frozen=True)
class NonPrivate:
    """Something computed from the records that no theorem covers: epsilon is infinite."""

    reason: str


@dataclass(frozen=True)
class ParallelParts:
    """Mechanisms on disjoint parts of the data: a record pays only for the part it lies in.

    parts: one sequence of phases per part. The partition must not depend on other records, and each
    record must lie in one part only (by identity, not by content).
    """

    parts: tuple[tuple[Phase, ...], ...]

    def __post_init__(self) -> None:
        if not self.parts:
            raise ValueError("ParallelParts needs at least one part")


@dataclass(frozen=True)
class RepeatAndSelect:
    """Run `phases` K times, release only the best run; K is secret and random.

    mean: E[K]. shape: of K's law, infinity for Poisson, otherwise truncated negative binomial
    (1 geometric, 0 logarithmic, any above -1). Papernot and Steinke 2022, Theorems 2 and 6.
    """

    phases: tuple[Phase, ...]
    mean: float
    shape: float

    def __post_init__(self) -> None:
        if math.isnan(self.shape) or self.shape <= -1:
            raise ValueError(f"shape must be > -1 (infinity: Poisson), got {self.shape}")
        if not (math.isfinite(self.mean) and self.mean >= 1):
            raise ValueError(f"mean number of runs must be >= 1 and finite, got {self.mean}")


@dataclass(frozen=True)
class WorstOf:
    """One of several mechanisms, chosen without looking at the data; the choice may be public.

    Costs the pointwise maximum of the Renyi curves of `choices`, which covers every mechanism whose
    curve lies below it. max_order: the curves count up to this order only (None: everywhere).
    """

    choices: tuple[tuple[Phase, ...], ...]
    max_order: float | None = None

    def __post_init__(self) -> None:
        if not self.choices:
            raise ValueError("WorstOf needs at least one choice")
        if self.max_order is not None and not self.max_order > 1:
            raise ValueError(f"max_order must be > 1, got {self.max_order}")


Phase = (
    GaussianSteps
    | LaplaceReleases
    | GaussianReleases
    | NonPrivate
    | ParallelParts
    | RepeatAndSelect
    | WorstOf
)


@dataclass(frozen=True)
class StepPlan:
    """What one training step executes. expected_batch: the fixed divisor of the noisy sum."""

    noise_multiplier: float
    sample_rate: float
    expected_batch: float
    clip_norm: float
    batch_cap: int | None

    @property
    def noise_std(self) -> float:
        """Standard deviation of the noise on the sum; without noise the clip may be infinite."""
        return self.noise_multiplier * self.clip_norm if self.noise_multiplier else 0.0


# --- phases <-> plain data and events ---------------------------------------------------------


def phase_to_dict(phase: Phase) -> dict[str, Any]:
    """Plain JSON types; `phase_from_dict` inverts it. An infinite shape becomes "inf"."""
    if isinstance(phase, GaussianSteps):
        return {
            "kind": "gaussian-steps",
            "steps": phase.steps,
            "noise_multiplier": phase.noise_multiplier,
            "sample_rate": phase.sample_rate,
            "batch_cap": phase.batch_cap,
        }
    if isinstance(phase, LaplaceReleases):
        return {
            "kind": "laplace-releases",
            "noise_multiplier": phase.noise_multiplier,
            "count": phase.count,
            "sample_rate": phase.sample_rate,
        }
    if isinstance(phase, GaussianReleases):
        return {
            "kind": "gaussian-releases",
            "noise_multiplier": phase.noise_multiplier,
            "count": phase.count,
            "sample_rate": phase.sample_rate,
        }
    if isinstance(phase, NonPrivate):
        return {"kind": "non-private", "reason": phase.reason}
    if isinstance(phase, ParallelParts):
        parts = [[phase_to_dict(inner) for inner in part] for part in phase.parts]
        return {"kind": "parallel-parts", "parts": parts}
    if isinstance(phase, WorstOf):
        choices = [[phase_to_dict(inner) for inner in choice] for choice in phase.choices]
        return {"kind": "worst-of", "choices": choices, "max_order": phase.max_order}
    return {
        "kind": "repeat-and-select",
        "phases": [phase_to_dict(inner) for inner in phase.phases],
        "mean": phase.mean,
        "shape": "inf" if math.isinf(phase.shape) else phase.shape,
    }


def phase_from_dict(record: dict[str, Any]) -> Phase:
    """Inverse of `phase_to_dict`. Raises ValueError for an unknown kind or missing field."""
    fields = dict(record)
    kind = fields.pop("kind", None)
    try:
        if kind == "gaussian-steps":
            return GaussianSteps(**fields)
        if kind == "laplace-releases":
            return LaplaceReleases(**fields)
        if kind == "gaussian-releases":
            return GaussianReleases(**fields)
        if kind == "non-private":
            return NonPrivate(**fields)
        if kind == "parallel-parts":
            return ParallelParts(tuple(tuple(map(phase_from_dict, p)) for p in fields["parts"]))
        if kind == "worst-of":
            choices = tuple(tuple(map(phase_from_dict, c)) for c in fields["choices"])
            return WorstOf(choices, fields["max_order"])
        if kind == "repeat-and-select":
            phases = tuple(map(phase_from_dict, fields["phases"]))
            return RepeatAndSelect(phases, float(fields["mean"]), float(fields["shape"]))
    except (TypeError, KeyError) as error:
        raise ValueError(f"a {kind} phase is incomplete: {error}") from error
    raise ValueError(f"unknown kind of phase: {kind!r}")


def _leaf_event(
    phase: GaussianSteps | LaplaceReleases | GaussianReleases, records: int
) -> dpa.DpEvent:
    import dp_accounting as dpa

    # A cap above the number of records never acts, whichever neighbour is larger by one.
    cap = phase.batch_cap if isinstance(phase, GaussianSteps) else None
    if cap is not None and cap <= records:
        if phase.sample_rate == 1.0:
            raise ValueError(f"full batches of {records} records cannot be capped at {cap}")
        return dpa.TruncatedSubsampledGaussianDpEvent(
            dataset_size=records,
            sampling_probability=phase.sample_rate,
            truncated_batch_size=cap,
            noise_multiplier=phase.noise_multiplier,
        )
    inner = (
        dpa.LaplaceDpEvent(phase.noise_multiplier)
        if isinstance(phase, LaplaceReleases)
        else dpa.GaussianDpEvent(phase.noise_multiplier)
    )
    if phase.sample_rate == 1.0:
        return inner
    return dpa.PoissonSampledDpEvent(phase.sample_rate, inner)


def phase_alternatives(phase: Phase, records: int) -> list[dpa.DpEvent]:
    """One event per path a record may take through `phase`."""
    import dp_accounting as dpa
    from dp_accounting.dp_event import RepeatAndSelectDpEvent

    if isinstance(phase, GaussianSteps):
        return [dpa.SelfComposedDpEvent(_leaf_event(phase, records), phase.steps)]
    if isinstance(phase, LaplaceReleases | GaussianReleases):
        return [dpa.SelfComposedDpEvent(_leaf_event(phase, records), phase.count)]
    if isinstance(phase, NonPrivate):
        return [dpa.NonPrivateDpEvent()]
    if isinstance(phase, ParallelParts):
        paths = [sequence_alternatives(part, records) for part in phase.parts]
        return list(itertools.chain.from_iterable(paths))
    if isinstance(phase, WorstOf):
        from dpdist.privacy.events import WorstOfDpEvent

        choices = [sequence_alternatives(choice, records) for choice in phase.choices]
        return [WorstOfDpEvent(list(path), phase.max_order) for path in itertools.product(*choices)]
    return [
        RepeatAndSelectDpEvent(path, phase.mean, phase.shape)
        for path in sequence_alternatives(phase.phases, records)
    ]


def sequence_alternatives(phases: Sequence[Phase], records: int) -> list[dpa.DpEvent]:
    """Paths through phases that run one after the other (adaptively) on the same data."""
    return compose_alternatives([phase_alternatives(phase, records) for phase in phases])


def data_alternatives(
    phases: Sequence[Phase], records: int, neighbours: Neighbours
) -> list[dpa.DpEvent]:
    """Paths through phases for a data set of `records` records and every neighbour of it.

    The loss of a capped batch depends on the number of OTHER records: one fewer than `records` when
    a record is removed, all of them when one is added.
    """
    paths = sequence_alternatives(phases, records)
    if neighbours == "add-or-remove-one" and any_phase(phases, _is_capped):
        paths += sequence_alternatives(phases, records + 1)
    return paths


def compose_alternatives(choices: Sequence[Sequence[dpa.DpEvent]]) -> list[dpa.DpEvent]:
    """Every way of choosing one event per entry, each composed in order."""
    import dp_accounting as dpa

    return [
        path[0] if len(path) == 1 else dpa.ComposedDpEvent(list(path))
        for path in itertools.product(*choices)
    ]


# --- the plan ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class PrivacyPlan:
    """Everything the privacy of a training run depends on.

    records: number of training records N, treated as public. nominal: it was declared instead, and
    nothing follows from the true number, which stays private. phases: run in order; the training
    loop executes the GaussianSteps, other phases are charged in full from the beginning.
    clip_norm: L2 bound C on a record's contribution; noise is noise_multiplier * clip_norm. It is
    infinite (no clip) only where no step has noise: nothing is then proved.
    delta: the delta at which `guarantee` is stated.
    """

    records: int
    phases: tuple[Phase, ...]
    delta: float
    clip_norm: float = 1.0
    neighbours: Neighbours = "add-or-remove-one"
    nominal: bool = False

    def __post_init__(self) -> None:
        _positive_integer("records", self.records)
        if self.nominal and any_phase(self.phases, _is_capped):
            raise ValueError("what a capped batch costs depends on the true number of records")
        if not 0 < self.delta < 1:
            raise ValueError(f"delta must lie strictly between 0 and 1, got {self.delta}")
        noisy = any(phase.noise_multiplier for phase in self._gaussians)
        if not self.clip_norm > 0 or (math.isinf(self.clip_norm) and noisy):
            raise ValueError(f"clip_norm must be > 0 and finite, got {self.clip_norm}")
        if self.neighbours not in ("add-or-remove-one", "replace-one"):
            raise ValueError(f"unknown neighbouring relation {self.neighbours!r}")
        if self.neighbours == "replace-one" and any_phase(self.phases, _is_parallel):
            raise ValueError(
                "parallel parts are accounted under add-or-remove-one only: a replaced record may "
                "change parts and then costs both"
            )

    @classmethod
    def dp_sgd(
        cls,
        *,
        records: int,
        batch_size: int,
        noise_multiplier: float,
        steps: int,
        delta: float,
        clip_norm: float = 1.0,
        neighbours: Neighbours = "add-or-remove-one",
        batch_cap: int | None = None,
        besides: tuple[Phase, ...] = (),
        nominal: bool = False,
    ) -> PrivacyPlan:
        """One phase of Poisson-sampled steps; batch_size is the EXPECTED batch L, rate L / N.

        besides: what else reads the records; charged as well.
        """
        _positive_integer("records", records)
        _positive_integer("batch_size", batch_size)
        if batch_size > records:
            raise ValueError(f"batch_size {batch_size} is larger than the {records} records")
        phase = GaussianSteps(steps, noise_multiplier, batch_size / records, batch_cap)
        return cls(records, (*besides, phase), delta, clip_norm, neighbours, nominal)

    @property
    def _gaussians(self) -> list[GaussianSteps]:
        return [phase for phase in self.phases if isinstance(phase, GaussianSteps)]

    @property
    def steps(self) -> int:
        """Number of steps the training loop executes."""
        return sum(phase.steps for phase in self._gaussians)

    def phase_of(self, step: int) -> int:
        """Index (among the GaussianSteps) of the phase that step 0 <= step < steps belongs to."""
        if step >= 0:
            end = 0
            for index, phase in enumerate(self._gaussians):
                end += phase.steps
                if step < end:
                    return index
        raise ValueError(f"the plan has steps 0 to {self.steps - 1}, got step {step}")

    def step(self, t: int) -> StepPlan:
        """What step t executes, 0 <= t < steps. Raises ValueError outside that range."""
        phase = self._gaussians[self.phase_of(t)]
        expected = phase.sample_rate * self.records
        if abs(expected - round(expected)) < 1e-9 * self.records:
            expected = float(round(expected))
        return StepPlan(
            noise_multiplier=phase.noise_multiplier,
            sample_rate=phase.sample_rate,
            expected_batch=expected,
            clip_norm=self.clip_norm,
            batch_cap=phase.batch_cap,
        )

    # --- accounting

    def counts(self, steps: int | None = None) -> list[int]:
        """Executed steps of each GaussianSteps phase after the first `steps` (default: all)."""
        left = self.steps if steps is None else steps
        if not 0 <= left <= self.steps:
            raise ValueError(f"steps must be between 0 and {self.steps}, got {steps}")
        counts = []
        for phase in self._gaussians:
            counts.append(min(left, phase.steps))
            left -= counts[-1]
        return counts

    def with_counts(self, counts: Sequence[int]) -> tuple[Phase, ...]:
        """The plan's phases with counts[j] steps in the j-th GaussianSteps, dropped at 0."""
        given = iter(counts)
        phases: list[Phase] = []
        for phase in self.phases:
            if not isinstance(phase, GaussianSteps):
                phases.append(phase)
            elif (count := next(given)) > 0:
                phases.append(replace(phase, steps=count))
        return tuple(phases)

    def alternatives(self, phases: Sequence[Phase]) -> list[dpa.DpEvent]:
        """One event per path that a record may take through phases run on this plan's data."""
        return data_alternatives(phases, self.records, self.neighbours)

    def _first(self, steps: int | None) -> list[dpa.DpEvent]:
        return self.alternatives(self.with_counts(self.counts(steps)))

    def event(self, steps: int | None = None) -> dpa.DpEvent:
        """The dp_accounting event of the first `steps` steps (default: all).

        With parallel parts, the event of the part that costs most at the plan's delta.
        """
        return self.worst_of(self._first(steps))

    def worst_of(self, paths: Sequence[dpa.DpEvent]) -> dpa.DpEvent:
        """Of several paths the one that costs most at the plan's delta."""
        from dpdist.privacy import accounting

        if len(paths) == 1:
            return paths[0]
        costs = [accounting.epsilon([path], self.delta, self.neighbours)[0] for path in paths]
        return paths[costs.index(max(costs))]

    def guarantee(self, steps: int | None = None, delta: float | None = None) -> Guarantee:
        """What is proved for the first `steps` steps (default: all) at `delta` (the plan's)."""
        return self.guarantee_of(self._first(steps), delta)

    def guarantee_of(self, paths: Sequence[dpa.DpEvent], delta: float | None = None) -> Guarantee:
        """The guarantee of given paths under this plan's neighbouring relation.

        Raises dpdist.privacy.accounting.Unsupported when no implemented theorem covers them.
        """
        from dpdist.privacy import accounting

        delta = self.delta if delta is None else delta
        if not 0 < delta < 1:
            raise ValueError(f"delta must lie strictly between 0 and 1, got {delta}")
        value, name = accounting.epsilon(list(paths), delta, self.neighbours)
        return Guarantee(
            value, delta, self.neighbours, "proved", name, self.assumptions, not self.nominal
        )

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What must hold for the guarantee to be true; the training loop sees to each."""
        lines = []
        if math.isfinite(self.clip_norm):
            lines.append(f"every record's contribution is clipped to L2 norm {self.clip_norm:g}")
        if any(isinstance(phase, GaussianReleases) for phase in self.phases):
            lines.append("what is released beside the steps is clipped per record as well")
        lines += [f"NOT PRIVATE: {p.reason}" for p in self.phases if isinstance(p, NonPrivate)]
        if any_phase(self.phases, _is_sampled):
            lines.append("every record joins a step independently (Poisson), never by shuffling")
        if any_phase(self.phases, _is_capped):
            lines.append("a batch above the cap is cut to a uniformly random subset")
        if any_phase(self.phases, lambda phase: isinstance(phase, LaplaceReleases)):
            lines.append("Laplace parts bound a record's contribution in L1 norm")
        if any_phase(self.phases, _is_parallel):
            lines.append("every record lies in one part only, whatever the other records are")
        if any(isinstance(phase, RepeatAndSelect) for phase in self.phases):
            lines.append("the number of runs and all unselected runs stay secret")
        if any_phase(self.phases, lambda phase: isinstance(phase, WorstOf)):
            lines.append("every setting that was tried costs at most as much as the one described")
        if self.nominal:
            lines.append(f"{self.records} records were declared without looking at the data")
        else:
            lines.append(f"the number of records ({self.records}) is public")
        return tuple(lines)

    def epsilon_curve(self, points: int = 50) -> list[tuple[int, float]]:
        """(step, epsilon at the plan's delta) at up to `points` step counts, the last is all.

        Computed on a ten times coarser grid than `guarantee` and capped by the guarantee of the
        whole plan, an upper bound for every prefix: non-decreasing, and it ends there.
        """
        from dpdist.privacy import accounting

        if self.steps == 0:
            return []
        points = max(1, min(points, self.steps))
        marks = sorted({max(1, round(self.steps * (i + 1) / points)) for i in range(points)})
        final = self.guarantee().epsilon
        curve, highest = [], 0.0
        for mark in marks[:-1]:
            paths = self._first(mark)
            try:
                value = accounting.coarse_epsilon(paths, self.delta, self.neighbours)
            except accounting.Unsupported:
                value = accounting.epsilon(paths, self.delta, self.neighbours)[0]
            highest = max(highest, min(value, final))
            curve.append((mark, highest))
        return [*curve, (self.steps, final)]

    # --- identity

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, exact (floats round-trip); `from_dict` inverts it."""
        record = {
            "records": self.records,
            "phases": [phase_to_dict(phase) for phase in self.phases],
            "delta": self.delta,
            "clip_norm": "inf" if math.isinf(self.clip_norm) else self.clip_norm,
            "neighbours": self.neighbours,
        }
        # Named only where it holds: other plans keep the fingerprint they had without it.
        return record | {"nominal": True} if self.nominal else record

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> PrivacyPlan:
        """Inverse of `to_dict`. Raises ValueError on unknown or missing fields."""
        fields = dict(record)
        try:
            phases = tuple(phase_from_dict(phase) for phase in fields.pop("phases"))
            clip_norm = float(fields.pop("clip_norm"))  # "inf" when nothing is clipped
            return cls(phases=phases, clip_norm=clip_norm, **fields)
        except (TypeError, KeyError) as error:
            raise ValueError(f"not a privacy plan: {error}") from error

    def fingerprint(self) -> str:
        """64 hex digits; equal exactly for equal plans."""
        text = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.blake2b(text.encode(), digest_size=32, person=b"dpdist.plan").hexdigest()


def _is_capped(phase: Phase) -> bool:
    return isinstance(phase, GaussianSteps) and phase.batch_cap is not None


def _is_sampled(phase: Phase) -> bool:
    leaves = GaussianSteps | LaplaceReleases | GaussianReleases
    return isinstance(phase, leaves) and phase.sample_rate < 1


def _is_parallel(phase: Phase) -> bool:
    return isinstance(phase, ParallelParts)


def any_phase(phases: Sequence[Phase], holds: Callable[[Phase], bool]) -> bool:
    """Whether a phase, or one nested in a search or in parallel parts, has the property."""
    for phase in phases:
        inner: Sequence[Phase] = ()
        if isinstance(phase, RepeatAndSelect):
            inner = phase.phases
        elif isinstance(phase, ParallelParts):
            inner = [nested for part in phase.parts for nested in part]
        elif isinstance(phase, WorstOf):
            inner = [nested for choice in phase.choices for nested in choice]
        if holds(phase) or any_phase(inner, holds):
            return True
    return False
