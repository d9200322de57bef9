"""Define the privacy plan: sampling, clipping, noise and steps in one frozen object.

The training loop takes its sampling rate, clip norm, noise multiplier and step count from here and
nowhere else, and the guarantee is computed from the same object, so the accounted mechanism is the
executed mechanism (Abadi et al. 2016, accounted with privacy loss distributions). The unit of
privacy is one record, or with a `UserUnit` all records of a user: then everything here counts
users, sampling, clip and divisor included.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from dpdist.core.errors import UserError
from dpdist.core.files import error_text
from dpdist.privacy.class_rates import ClassRates, check_count
from dpdist.privacy.guarantee import Guarantee, Neighbors, check_delta
from dpdist.privacy.phases import (
    GaussianSteps,
    Phase,
    dataset_path_events,
    phases_from_dicts,
    walk_phases,
)

if TYPE_CHECKING:
    import dp_accounting as dpa
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution


# --- the plan ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepPlan:
    """The settings of one training step. expected_batch: the fixed divisor of the noisy sum."""

    noise_multiplier: float
    sample_rate: float
    expected_batch: float
    clip_norm: float
    batch_cap: int | None
    # Not shown: an audit's keys are made of what is shown of a step.
    class_rates: ClassRates | None = field(default=None, repr=False)

    @property
    def mean_rate(self) -> float:
        """Return the expected batch as a share of the records, from which blocks get their size."""
        return self.sample_rate if self.class_rates is None else self.class_rates.mean

    def sampled_like(self, other: StepPlan) -> StepPlan:
        """Return the step with the proportions of another step's rates by class, if it has any."""
        if other.class_rates is None:
            return self
        return replace(self, class_rates=other.class_rates.scaled(self.sample_rate))

    @property
    def most_sampled_class(self) -> int:
        """Return the class with the largest rate; 0 without rates."""
        rates = self.class_rates
        return 0 if rates is None else rates.rates.index(rates.largest)

    @property
    def rates_by_class(self) -> tuple[float, ...] | None:
        """Return the sampling rates by class; None if all records have one rate."""
        return None if self.class_rates is None else self.class_rates.rates

    @property
    def noise_std(self) -> float:
        """Return the standard deviation of the noise on the sum; 0 without noise, for any clip."""
        return self.noise_multiplier * self.clip_norm if self.noise_multiplier else 0.0


@dataclass(frozen=True)
class UserUnit:
    """A user as the unit of privacy.

    Args:
        column: the field whose equal values make a user.
        max_records: most records of a user that count in one step.

    Raises:
        ValueError: `max_records` is no count of at least 1.

    Example:
        >>> print(UserUnit("patient", 4).description)
        a user (all records of one value of patient, of which at most 4 count in a step)
    """

    column: str
    max_records: int

    def __post_init__(self) -> None:
        check_count("max_records", self.max_records)

    @property
    def description(self) -> str:
        """Return the unit in words, as the neighboring relation names it."""
        return (
            f"a user (all records of one value of {self.column}, of which at most "
            f"{self.max_records} count in a step)"
        )

    @property
    def assumptions(self) -> tuple[str, ...]:
        """Return the conditions of a guarantee for users that the number of users leaves."""
        return (
            f"all records of a person have the same value of {self.column}; a record belongs to "
            "one person",
            "no person whose records are trained on is among public or test records under another "
            "name",
        )


# Names in a plan's hash. All keys of a run are derived from it, so new names would change the bits.
_HASHED_AS = {"adjacency": "neighbours", "user": "group"}

# Phrases of phases about records, and about users if these are the unit.
_IN_GROUPS = (
    ("every record joins", "every user joins"),
    ("held-out record", "held-out user"),
    ("clipped per record", "clipped per user"),
    ("of the records, with noise", "of the users, with noise"),
    ("a record adds at most 1 in all to the counts of a histogram, whatever the other records are",
     "a user adds at most 1 in all to the counts of a histogram, whatever the other users are"),
    ("every record lies in one part only, whatever the other records are",
     "every user lies in one part only, whatever the other users are"),
)  # fmt: skip


@dataclass(frozen=True)
class PrivacyPlan:
    """Everything that the privacy of a training run depends on.

    The plan that is executed is the plan that is accounted: the training loop takes sampling rate,
    clip, noise and steps from `step` and nowhere else.

    Each argument is an attribute of the same name. `guarantee()` computes epsilon, and `steps` is
    the number of steps of the training loop.

    Args:
        records: number of training records N, treated as public; number of users if `user` is
            given.
        phases: tuple of `Phase`, run in order. The training loop executes those in
            `training_phases`; all others are counted in full from the beginning.
        delta: the delta at which `guarantee` is stated.
        clip_norm: L2 bound C on a record's contribution; noise is noise_multiplier * clip_norm. It
            is infinite (no clip) only if no step has noise: nothing is then proved.
        adjacency: the relation of data sets, "add-or-remove-one" or "replace-one".
        nominal: whether `records` is a declared number instead of the true one, which then stays
            private.
        user: the unit if it is a user; None: one record.

    Raises:
        ValueError: a value is out of range, or a phase cannot be accounted under the relation.

    Example:
        >>> import dpdist
        >>> plan = dpdist.PrivacyPlan.dp_sgd(
        ...     records=60_000, batch_size=600, noise_multiplier=1.1, steps=1_000, delta=1e-5
        ... )
        >>> plan.step(0).sample_rate
        0.01
        >>> round(plan.guarantee().epsilon, 3)
        1.515
    """

    records: int
    phases: tuple[Phase, ...]
    delta: float
    clip_norm: float = 1.0
    adjacency: Neighbors = "add-or-remove-one"
    nominal: bool = False
    user: UserUnit | None = None

    def __post_init__(self) -> None:
        check_count("records", self.records)
        capped = any(phase.has_batch_cap for phase in walk_phases(self.phases))
        if self.nominal and capped:
            raise ValueError(
                "the cost of a capped batch depends on the true number of records: batch_cap does "
                "not go with a declared number"
            )
        if self.user is not None and (
            self.nominal or capped or self.adjacency != "add-or-remove-one"
        ):
            raise ValueError(
                "users need their counted number, no batch_cap, and adjacency add-or-remove-one"
            )
        if self.user is not None and any(loop.class_rates for loop in self.training_phases):
            raise ValueError("a user has records of several classes: no class rates")
        check_delta(self.delta)
        noisy = any(phase.noise_multiplier for phase in self.training_phases)
        if not self.clip_norm > 0 or (math.isinf(self.clip_norm) and noisy):
            raise ValueError(f"clip_norm must be > 0 and finite, got {self.clip_norm}")
        if self.adjacency not in ("add-or-remove-one", "replace-one"):
            raise ValueError(f"unknown neighboring relation {self.adjacency!r}")
        for phase in walk_phases(self.phases):
            if (why := phase.unsupported_reason(self.adjacency)) is not None:
                raise ValueError(why)

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
        adjacency: Neighbors = "add-or-remove-one",
        batch_cap: int | None = None,
        user: UserUnit | None = None,
    ) -> PrivacyPlan:
        """Return the plan of DP-SGD: one phase of Poisson-sampled steps with Gaussian noise.

        Args:
            records: number of training records N.
            batch_size: the EXPECTED batch L; each record joins a step with probability L / N.
            noise_multiplier: standard deviation of the noise in units of the clip norm.
            steps: number of steps.
            delta: the delta at which the guarantee is stated.
            clip_norm: L2 bound on a record's clipped gradient.
            adjacency: the relation of data sets.
            batch_cap: a batch beyond it is cut to a random subset of this size; None for no cap.
            user: the unit if it is a user; `records` and `batch_size` then count users.

        Returns:
            A `PrivacyPlan` of one phase; its `guarantee()` has epsilon at `delta`.

        Raises:
            ValueError: a value is out of range.
        """
        check_count("records", records)
        check_count("batch_size", batch_size)
        if batch_size > records:
            raise ValueError(f"batch_size {batch_size} is larger than the {records} records")
        phase = GaussianSteps(steps, noise_multiplier, batch_size / records, batch_cap)
        return cls(records, (phase,), delta, clip_norm, adjacency, user=user)

    @property
    def training_phases(self) -> list[GaussianSteps]:
        """Return the phases that the training loop executes, a list of `GaussianSteps`; or empty.

        A `GaussianSteps` has `steps` (int), `noise_multiplier` and `sample_rate` (floats). The list
        is empty for a plan without a training loop.
        """
        return [loop for phase in self.phases if (loop := phase.training_steps) is not None]

    @property
    def steps(self) -> int:
        """Return the number of steps that the training loop executes, an int; 0 without a loop."""
        return sum(phase.steps for phase in self.training_phases)

    @property
    def num_queries(self) -> int:
        """Return the number of noisy answers that the plan counts outside the loop, an int, or 0.

        An answer is the reply to one question to an ensemble that is never released, or one score
        on held-out private records. All votes of PATE's teachers together count as one.
        """
        return sum(phase.num_queries for phase in self.phases)

    @property
    def relies_on_clipping(self) -> bool:
        """Return whether the guarantee requires that contributions of records are clipped, a bool.

        It is True if steps have noise and `clip_norm` is finite.
        """
        loops = (phase.training_steps for phase in walk_phases(self.phases))
        steps = any(loop is not None and loop.noise_multiplier > 0 for loop in loops)
        return steps and math.isfinite(self.clip_norm)

    def training_phase_index(self, step: int) -> int:
        """Return the index in `training_phases` of the phase that a step belongs to, an int.

        Args:
            step: number of the step, 0 <= step < steps.

        Raises:
            ValueError: the plan has no such step.
        """
        if step >= 0:
            end = 0
            for index, phase in enumerate(self.training_phases):
                end += phase.steps
                if step < end:
                    return index
        raise ValueError(f"the plan has steps 0 to {self.steps - 1}, got step {step}")

    def phase_index(self, step: int) -> int:
        """Return the index in `phases` of the phase that a step belongs to, an int.

        Args:
            step: number of the step, 0 <= step < steps.

        Raises:
            ValueError: the plan has no such step.
        """
        places = [
            place for place, phase in enumerate(self.phases) if phase.training_steps is not None
        ]
        return places[self.training_phase_index(step)]

    def step(self, t: int) -> StepPlan:
        """Return the settings of one step, a `StepPlan`.

        Args:
            t: number of the step, 0 <= t < steps.

        Returns:
            A `StepPlan`: `noise_multiplier`, `sample_rate`, `expected_batch`, `clip_norm` and
            `noise_std` (floats), `batch_cap` (int; None: no cap), and `class_rates` (None: one rate
            for all records). With class rates, `sample_rate` is the largest of them.

        Raises:
            ValueError: the plan has no such step.
        """
        phase = self.training_phases[self.training_phase_index(t)]
        return StepPlan(
            noise_multiplier=phase.noise_multiplier,
            sample_rate=phase.sample_rate,
            expected_batch=self._expected_batch(phase),
            clip_norm=self.clip_norm,
            batch_cap=phase.batch_cap,
            class_rates=phase.class_rates,
        )

    @property
    def max_expected_batch(self) -> float:
        """Return the largest expected batch of any step, a float; 0 without steps.

        It is a number of records, or of users if the unit is a user.
        """
        return max(map(self._expected_batch, self.training_phases), default=0.0)

    def _expected_batch(self, phase: GaussianSteps) -> float:
        expected = phase.mean_rate * self.records
        whole = abs(expected - round(expected)) < 1e-9 * self.records
        return float(round(expected)) if whole else expected

    # --- accounting

    def step_counts(self, steps: int | None = None) -> list[int]:
        """Return how many of the first `steps` steps belong to each training phase, a list of int.

        Args:
            steps: number of steps taken; None for all.

        Returns:
            A list with one int for each of `training_phases`, which add up to `steps`; 0 for a
            phase that is not reached.

        Raises:
            ValueError: the plan has fewer steps.
        """
        left = self.steps if steps is None else steps
        if not 0 <= left <= self.steps:
            raise ValueError(f"steps must be between 0 and {self.steps}, got {steps}")
        counts = []
        for phase in self.training_phases:
            counts.append(min(left, phase.steps))
            left -= counts[-1]
        return counts

    def executed_phases(self, counts: Sequence[int]) -> tuple[Phase, ...]:
        """Return `phases` with only the steps that were taken, a tuple of `Phase`.

        Args:
            counts: number of steps taken in each of `training_phases`, as `step_counts` returns it.

        Returns:
            A tuple in the plan's order. A phase that is counted in full from the beginning is
            unchanged.
        """
        given = iter(counts)
        phases: list[Phase] = []
        for phase in self.phases:
            phases += (phase,) if phase.training_steps is None else phase.executed(next(given))
        return tuple(phases)

    def path_events(self, phases: Sequence[Phase]) -> list[dpa.DpEvent]:
        """Return what phases do to a record, a list of dp_accounting `DpEvent`, one for each path.

        A path is the sequence of mechanisms that read one record. There are several paths if
        records lie in parts of the data with mechanisms of their own, or if batches are capped,
        since their privacy loss depends on the number of other records.

        Args:
            phases: phases run on this plan's data, as `executed_phases` returns them.

        Raises:
            dpdist.privacy.pld.UnsupportedMechanismError: a phase cannot be accounted under the
                plan's relation.
        """
        return dataset_path_events(phases, self.records, self.adjacency)

    def _events_of_first(self, steps: int | None) -> list[dpa.DpEvent]:
        return self.path_events(self.executed_phases(self.step_counts(steps)))

    def event(self, steps: int | None = None) -> dpa.DpEvent:
        """Return what the first `steps` steps do to a record, a dp_accounting `DpEvent`.

        Args:
            steps: number of steps taken; None for all.

        Returns:
            The `DpEvent` of the only path of a record (see `path_events`), or of the path with the
            largest epsilon at the plan's delta.

        Raises:
            ValueError: the plan has fewer steps.
        """
        from dpdist.privacy import accounting

        def epsilon(path: dpa.DpEvent) -> float:
            return accounting.compute_epsilon([path], self.delta, self.adjacency)[0]

        paths = self._events_of_first(steps)
        return paths[0] if len(paths) == 1 else max(paths, key=epsilon)

    def guarantee(self, steps: int | None = None, delta: float | None = None) -> Guarantee:
        """Return the proved `Guarantee` of the first `steps` steps.

        Args:
            steps: number of steps taken; None for all.
            delta: the delta of the guarantee; None for the plan's delta.

        Returns:
            A `Guarantee`, the worst over the paths of a record (see `path_events`); its `epsilon`
            is infinite if no theorem covers the plan.

        Raises:
            ValueError: the plan has fewer steps.
        """
        return self.guarantee_for_events(self._events_of_first(steps), delta)

    def guarantee_for_events(
        self, paths: Sequence[dpa.DpEvent], delta: float | None = None
    ) -> Guarantee:
        """Return the `Guarantee` of given paths under this plan's neighboring relation.

        Args:
            paths: one dp_accounting `DpEvent` for each path of a record, as `path_events` returns
                them.
            delta: the delta of the guarantee; None for the plan's delta.

        Returns:
            A `Guarantee` of kind "proved", the worst over the paths.

        Raises:
            dpdist.privacy.accounting.UnsupportedMechanismError: no implemented theorem covers them.
        """
        from dpdist.privacy import accounting

        delta = self.delta if delta is None else delta
        check_delta(delta)
        value, name = accounting.compute_epsilon(list(paths), delta, self.adjacency)
        return Guarantee(
            value, delta, self.adjacency, "proved", name, self.assumptions, not self.nominal,
            None if self.user is None else self.user.description,
        )  # fmt: skip

    @property
    def assumptions(self) -> tuple[str, ...]:
        """Return the conditions of the guarantee, a tuple of sentences (str), without repetitions.

        The training loop clips and samples as they say. It cannot ensure those about your data,
        such as that the number of records is public. Empty if dpdist did not train the model.
        """
        if self.trained_elsewhere:
            return ()
        lines = []
        if self.relies_on_clipping:
            whose = "record's contribution" if self.user is None else "user's summed contribution"
            lines.append(f"every {whose} is clipped to L2 norm {self.clip_norm:g}")
        sampled = [line for phase in walk_phases(self.phases) for line in phase.assumptions]
        lines += map(self.in_units, sampled)
        if self.nominal:
            lines.append(f"{self.records} records were declared without looking at the data")
        else:
            lines.append(f"the number of {self.counted} ({self.records}) is public")
        lines += () if self.user is None else self.user.assumptions
        return tuple(dict.fromkeys(lines))

    @property
    def counted(self) -> str:
        """Return the name of the units that `records` counts, a str: "records" or "users"."""
        return "records" if self.user is None else "users"

    def in_units(self, line: str) -> str:
        """Return a sentence in the plan's unit, a str: unchanged for records, reworded for users.

        Args:
            line: a sentence about records, such as an assumption of a phase.
        """
        for of_records, of_users in () if self.user is None else _IN_GROUPS:
            line = line.replace(of_records, of_users)
        return line

    @property
    def trained_elsewhere(self) -> bool:
        """Return whether the plan stands for a training outside of dpdist, a bool.

        If True, no phase reads records, and dpdist cannot state an epsilon. It is False for a plan
        without phases.
        """
        return bool(self.phases) and not any(phase.reads_records for phase in self.phases)

    @property
    def unproved_reasons(self) -> list[str]:
        """Return why no theorem covers the plan, a list of sentences (str); empty if one does.

        There is one sentence for each phase that no theorem covers.
        """
        return [
            why for phase in walk_phases(self.phases) if (why := phase.unproved_reason) is not None
        ]

    def epsilon_curve(self, points: int = 20) -> list[tuple[int, float]]:
        """Return epsilon after increasing numbers of steps, a list of pairs (steps, epsilon).

        Every epsilon is an upper bound, computed on a ten times coarser grid than `guarantee` and
        never above the epsilon of the whole plan.

        Args:
            points: the most entries.

        Returns:
            A list of pairs (number of steps, epsilon at the plan's delta), ascending in both. The
            last pair is that of the whole plan. Empty without steps.
        """
        from dpdist.privacy import accounting

        if self.steps == 0:
            return []
        points = max(1, min(points, self.steps))
        marks = sorted({max(1, round(self.steps * (i + 1) / points)) for i in range(points)})
        final = self.guarantee().epsilon
        curve, highest = [], 0.0
        for mark in marks[:-1]:
            paths = self._events_of_first(mark)
            try:
                value = accounting.coarse_epsilon(paths, self.delta, self.adjacency)
            except accounting.UnsupportedMechanismError:
                value = accounting.compute_epsilon(paths, self.delta, self.adjacency)[0]
            highest = max(highest, min(value, final))
            curve.append((mark, highest))
        return [*curve, (self.steps, final)]

    # --- identity

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as a dict of JSON values, exactly: `from_dict` inverts it.

        Its keys are "records", "phases" (list of dicts), "delta", "clip_norm" ("inf" without a
        clip) and "adjacency", and "nominal" and "user" if they are set.
        """
        record = {
            "records": self.records,
            "phases": [phase.to_dict() for phase in self.phases],
            "delta": self.delta,
            "clip_norm": "inf" if math.isinf(self.clip_norm) else self.clip_norm,
            "adjacency": self.adjacency,
        }
        # Named only if it is set: other plans keep the fingerprint they had without it.
        record |= {"nominal": True} if self.nominal else {}
        return record if self.user is None else record | {"user": asdict(self.user)}

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> PrivacyPlan:
        """Return the `PrivacyPlan` whose `to_dict` is given.

        Args:
            record: a result of `to_dict`.

        Raises:
            ValueError: a field is unknown, missing or out of range.
        """
        fields = dict(record)
        try:
            phases = phases_from_dicts(fields.pop("phases"))
            clip_norm = float(fields.pop("clip_norm"))  # "inf" when nothing is clipped
            if "user" in fields:
                fields["user"] = UserUnit(**fields["user"])
            return cls(phases=phases, clip_norm=clip_norm, **fields)
        except (TypeError, KeyError) as error:
            raise ValueError(f"not a privacy plan: {error}") from error

    def fingerprint(self) -> str:
        """Return a hash of the plan, a str of 64 hex digits; only equal plans have equal hashes."""
        hashed = {_HASHED_AS.get(key, key): value for key, value in self.to_dict().items()}
        text = json.dumps(hashed, sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.blake2b(text.encode(), digest_size=32, person=b"dpdist.plan").hexdigest()


def parse_plan(record: Any, context: str) -> PrivacyPlan:
    """Return the plan of a JSON form. Raises UserError for an invalid form."""
    try:
        return PrivacyPlan.from_dict(record)
    except (ValueError, TypeError, AttributeError, OverflowError) as error:
        raise UserError(f"{context}: damaged: {error_text(error)}") from error


# --- group privacy: several records at once ---------------------------------------------------


_GROUP_GRID = 1e-3  # the library builds mixtures point by point


def group_delta_by_lemma(epsilon: float, delta: float, group_size: int) -> float:
    """Return delta of k-record groups at k epsilon: delta (e^(k epsilon) - 1) / (e^epsilon - 1)."""
    if epsilon == 0:
        return group_size * delta
    exponent = (group_size - 1) * epsilon
    if exponent > 700:
        return 1.0
    ratio = math.exp(exponent) * -math.expm1(-group_size * epsilon) / -math.expm1(-epsilon)
    return min(1.0, delta * ratio)


def group_pld(plan: PrivacyPlan, group_size: int) -> tuple[PrivacyLossDistribution, float] | None:
    """Return the exact loss of `group_size` records that come or go together, in both directions.

    Also returns the delta that rounding may have lost. None if a phase has no exact loss, or
    nothing is private.
    """
    from dp_accounting.pld import privacy_loss_distribution as library

    from dpdist.privacy.pld import rounding_delta

    total, releases = library.identity(value_discretization_interval=_GROUP_GRID), 0
    for phase in plan.phases:
        if (found := phase.group_loss(group_size, _GROUP_GRID)) is None:
            return None
        loss, count = found
        total, releases = total.compose(loss), releases + count
    return total, rounding_delta(releases)
